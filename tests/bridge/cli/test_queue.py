"""`queue` says how many are ahead of each request that waits, and when it is likely to start."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge.cli.queue import queue
from bridge.protocol import refs
from tests.bridge.cli.calls import call
from tests.bridge.registrations import info, offer, publish_info
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import Done


@pytest.fixture
def kakeya(capsys: pytest.CaptureFixture[str]):
    def run(*args: str) -> Done:
        return call(queue, capsys, *args)

    return run


def waiting(bus: BusFixture, count: int) -> list[str]:
    """So many requests, a second between them, the oldest first."""
    now = datetime.now(UTC)
    nonces = [refs.new_nonce(now + timedelta(seconds=number), b"abcdef") for number in range(count)]
    return [bus.submit(nonce=nonce, requested_by="ann").nonce for nonce in nonces]


def offering_info(bus: BusFixture) -> None:
    """A live runner that takes 300 s for a probe."""
    publish_info(bus.cache, info(now=datetime.now(UTC), presets=(offer(typical_s=300.0),)))


def test_each_request_is_told_how_long_it_is_likely_to_wait(here: BusFixture, kakeya) -> None:
    offering_info(here)
    nonces = waiting(here, 3)
    done = kakeya("--json")
    assert done.code == 0, done.err
    rows = done.json["requests"]
    assert [(row["nonce"], row["ahead"]) for row in rows] == list(zip(nonces, (0, 1, 2), strict=True))
    assert [row["expected_s"] for row in rows] == [0.0, 300.0, 600.0]
    text = kakeya().out
    assert re.search("queued for 0:0[0-9:]+, 1 request ahead, about 0:05:00 to wait", text)
    assert rows[1]["eta_s"] == 600.0
    assert rows[1]["requested_by"] == "ann" in text


def test_without_a_runner_nothing_is_promised(here: BusFixture, kakeya) -> None:
    nonces = waiting(here, 2)
    done = kakeya("--json")
    assert [(row["nonce"], row["expected_s"]) for row in done.json["requests"]] == [(n, None) for n in nonces]
    assert done.err == ""


def test_queue_is_shown_without_unreadable_registrations(here: BusFixture, kakeya) -> None:
    nonces = waiting(here, 2)
    offering_info(here)
    [name] = [ref for ref in here.repo.remote_refs() if ref.startswith(refs.RUNNERS)]
    tree = here.repo.git("rev-parse", f"{name}^{{tree}}", cwd=here.repo.remote)
    Path(here.repo.remote, "objects", tree[:2], tree[2:]).unlink()
    done = kakeya("--json")
    assert done.code == 0, done.err
    assert [(row["nonce"], row["expected_s"]) for row in done.json["requests"]] == [(n, None) for n in nonces]


def test_what_runs_is_not_told_to_wait(here: BusFixture, kakeya) -> None:
    submitted = here.submit()
    here.claim(submitted)
    [row] = kakeya("--json").json["requests"]
    assert (row["nonce"], row["state"], row["expected_s"]) == (submitted.nonce, "claimed", None)
