"""`status` of an unfinished request: where it is, what waits, too, and whether its runner is heard of."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from bridge.bus.claims import Heartbeat
from bridge.cli.logs import logs
from bridge.cli.result import result
from bridge.cli.status import status
from bridge.cli.wait import wait
from bridge.protocol import refs
from bridge.protocol.result import Phase
from tests.bridge.cli.calls import call
from tests.bridge.registrations import info, offer, publish_info
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import Done


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    def ask(*args: str) -> Done:
        done = call(status, capsys, *args)
        assert done.code == 0, done.err
        return done

    return ask


def running(bus: BusFixture, lease_s: float) -> str:
    """A request that runs, claimed by a runner that says nothing after its first heartbeats."""
    submitted = bus.submit()
    held = bus.claim(submitted, lease_s=lease_s)
    held.renew(Heartbeat(Phase.RUNNING, 12.0))
    return submitted.nonce


def test_runner_without_heartbeat_past_its_lease_is_shown_silent(here: BusFixture, said):
    nonce = running(here, lease_s=0.01)
    assert re.search(r"running on testmac \(12 s\), no heartbeat for [0-9:]+\n", said(nonce).out)
    assert 0 <= said(nonce, "--json").json["beat_age_s"] < 60


def test_outside_any_clone_the_remote_is_enough(here: BusFixture, capsys, monkeypatch, tmp_path):
    running_one, answered = running(here, lease_s=600.0), here.submit()
    here.answer(answered)
    folder = tmp_path / "no clone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for command, nonce, code in (
        (status, running_one, 0),
        (wait, answered.nonce, 3),
        (result, answered.nonce, 3),
        (logs, answered.nonce, 0),
    ):
        assert call(command, capsys, nonce, "--remote", here.remote).code == code
    assert not list(folder.iterdir())
    unknown = call(status, capsys, "20200101t000000z000000000000", "--remote", here.remote)
    assert (unknown.code, "no request on this remote" in unknown.err) == (2, True)


def test_a_runner_within_its_lease_is_not_silent(here: BusFixture, said):
    assert "running on testmac (12 s)\n" in said(running(here, lease_s=600.0)).out


def test_what_does_not_apply_to_a_running_request_is_null(here: BusFixture, said):
    document = said(running(here, lease_s=600.0), "--json").json
    assert (document["status"], document["ahead"], document["expected_s"]) == ("running", None, None)
    assert document["heartbeat"]["runner"] == "testmac"


def test_who_waits_is_told_how_many_older_ones_wait(here: BusFixture, said):
    now = datetime.now(UTC)
    nonces = [refs.new_nonce(now + timedelta(seconds=number), b"abcdef") for number in range(3)]
    for nonce in nonces:
        here.submit(nonce=nonce)
    publish_info(here.cache, info(now=now, presets=(offer(typical_s=10.0),)))
    first, last = (said(nonce, "--json").json for nonce in (nonces[0], nonces[2]))
    assert (first["ahead"], first["expected_s"], first["beat_age_s"]) == (0, 0.0, None)
    assert (last["ahead"], last["expected_s"]) == (2, 20.0)
    assert said(nonces[2]).out == f"{nonces[2]}  queued, 2 requests ahead\n"
