"""`queue` says how many are ahead of each request that waits, and when it is likely to start."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge.bus.catalogue import publish_card
from bridge.cli.queue import queue
from bridge.protocol import refs
from bridge.protocol.runner_info import State, Work
from tests.bridge.cards import card, offer
from tests.bridge.cli.calls import call
from tests.houses import Done
from tests.worlds import World


@pytest.fixture
def kakeya(capsys: pytest.CaptureFixture[str]):
    def run(*args: str) -> Done:
        return call(queue, capsys, *args)

    return run


def waiting(world: World, count: int) -> list[str]:
    """So many requests, a second between them, the oldest first."""
    now = datetime.now(UTC)
    nonces = [refs.new_nonce(now + timedelta(seconds=number), b"abcdef") for number in range(count)]
    return [world.submit(nonce=nonce).nonce for nonce in nonces]


def busy_card(world: World, elapsed_s: float) -> None:
    """A live runner that takes 300 s for a probe, and has been at one for a while."""
    work = Work(nonce="20260301t120000z0123456789ab", preset="probe", elapsed_s=elapsed_s)
    one = card(now=datetime.now(UTC), state=State.BUSY, job=work, presets=(offer(typical_s=300.0),))
    publish_card(world.git, world.remote, one, None)


def test_each_request_is_told_how_long_it_is_likely_to_wait(here: World, kakeya) -> None:
    busy_card(here, 60.0)
    nonces = waiting(here, 2)
    done = kakeya("--json")
    assert done.code == 0, done.err
    rows = done.json["requests"]
    assert [(row["nonce"], row["ahead"]) for row in rows] == list(zip(nonces, (0, 1), strict=True))
    assert [row["expected_s"] for row in rows] == pytest.approx([240.0, 540.0], abs=60)
    text = kakeya().out
    assert "queued, about 4 min to wait" in text
    assert "queued, 1 older one waits, about 9 min to wait" in text
    assert text.endswith("requesters take turns: an older request need not start first\n")


def test_without_a_runner_nothing_is_promised(here: World, kakeya) -> None:
    [nonce] = waiting(here, 1)
    done = kakeya("--json")
    assert [(row["nonce"], row["expected_s"]) for row in done.json["requests"]] == [(nonce, None)]
    assert done.err == ""


def test_cards_that_cannot_be_read_are_a_warning_and_the_queue_is_shown(here: World, kakeya) -> None:
    [nonce] = waiting(here, 1)
    busy_card(here, 60.0)
    [name] = [ref for ref in here.house.remote_refs() if ref.startswith(refs.RUNNERS)]
    tree = here.house.git("rev-parse", f"{name}^{{tree}}", cwd=here.house.remote)
    Path(here.house.remote, "objects", tree[:2], tree[2:]).unlink()
    done = kakeya("--json")
    assert done.code == 0, done.err
    assert "warning: which runners are there is not known" in done.err
    assert [(row["nonce"], row["expected_s"]) for row in done.json["requests"]] == [(nonce, None)]


def test_who_waits_first_is_told_that_a_runner_is_free(here: World, kakeya) -> None:
    publish_card(here.git, here.remote, card(now=datetime.now(UTC)), None)
    waiting(here, 1)
    text = kakeya().out
    assert "queued, likely to start soon" in text
    assert "turns" not in text


def test_who_waits_is_told_nothing_when_a_claim_is_not_on_its_runners_card_yet(here: World, kakeya) -> None:
    publish_card(here.git, here.remote, card(now=datetime.now(UTC)), None)
    here.submit()
    here.claim(*here.mirror.refresh())
    waiting(here, 1)
    [row] = [row for row in kakeya("--json").json["requests"] if row["state"] == "queued"]
    assert (row["ahead"], row["expected_s"]) == (0, None)


def test_what_runs_is_not_told_to_wait(here: World, kakeya) -> None:
    submitted = here.submit()
    here.claim(*here.mirror.refresh())
    [row] = kakeya("--json").json["requests"]
    assert (row["nonce"], row["state"], row["expected_s"]) == (submitted.nonce, "claimed", None)
