"""A signed request that was answered and is put back is refused on every machine that could know."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from bridge import signing
from bridge.bus.claims import Claim
from bridge.bus.git import Git
from bridge.bus.requests import submit
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, format_time
from bridge.protocol.runner_info import MAX_ANSWERED
from bridge.runner.ledger import Ledger
from bridge.runner.serve import Runner
from bridge.runner.spool import Entry
from bridge.runner.station import Station
from tests.bridge.runner.bench import Bench
from tests.bridge.runner.test_peers import held_by, made_up, squat
from tests.houses import House

BOTH = f"{signing.CLAIM_NAMESPACE},{signing.RUNNER_NAMESPACE}"
PROGRAMS = {"echo": "print('hello from', arg)"}


@pytest.fixture
def bench(house: House) -> Bench:
    """A strict machine, the first of two."""
    made = Bench(house)
    made.install(PROGRAMS)
    made.policy("require_signature = true\n")
    key = signing.ensure_key(house.root / "ann", "ann")
    line = signing.allowed_line(signing.public_key(key), "ann", signing.REQUEST_NAMESPACE)
    (made.config / "allowed_signers").write_text(line)
    return made


def ask(bench: Bench) -> tuple[Manifest, str]:
    """A signed request, and its commit."""
    manifest = bench.manifest("echo")
    key = bench.house.root / "ann"
    signature = signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
    done = submit(Git(bench.house.clone), str(bench.house.remote), manifest, signature)
    return manifest, done.commit


def put_back(bench: Bench, asked: Manifest, commit: str, *, forget_cards: bool = False) -> None:
    """What whoever can push does who wants a job done again: no trace of the answer is left on the remote."""
    remote = bench.house.remote
    for ref in bench.house.remote_refs():
        card = forget_cards and ref.startswith(refs.RUNNERS)
        if asked.nonce in ref or card:
            bench.house.git("update-ref", "-d", ref, cwd=remote)
    for ref in (asked.result_ref, refs.inbox_ref(asked.nonce)):
        bench.house.git("update-ref", ref, commit, cwd=remote)


def other(bench: Bench, *knows: Station, name: str = "othermac") -> Station:
    """A second machine with the same policy, that knows these runners."""
    config = bench.house.root / f"config-{name}"
    shutil.copytree(bench.config, config, dirs_exist_ok=True)
    lines = [
        signing.allowed_line(signing.public_key(station.key), station.identity.name, BOTH)
        for station in knows
        if station.key is not None
    ]
    (config / "known_runners").write_text("".join(lines))
    return bench.station(name, state_dir=bench.house.root / f"state-{name}", config_dir=config)


def serve(bench: Bench, station: Station, idle_timeout_s: float = 20) -> int:
    return Runner(station, say=bench.said.append, idle_s=0.2).serve(once=True, idle_timeout_s=idle_timeout_s)


def test_a_signed_request_that_is_put_back_is_refused_on_another_machine(bench: Bench) -> None:
    first = bench.station()
    second = other(bench, first)
    asked, commit = ask(bench)
    assert serve(bench, first) == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    put_back(bench, asked, commit)
    assert serve(bench, second) == 1
    assert bench.verdict(asked.nonce) == ("refused", "replayed")


@pytest.mark.slow
def test_a_signed_request_that_was_refused_is_told_of_on_the_card_too(bench: Bench) -> None:
    bench.policy("require_signature = true\nallow_presets = []\n")
    first = bench.station()
    asked, commit = ask(bench)
    assert serve(bench, first) == 1
    assert bench.verdict(asked.nonce) == ("refused", "policy")
    bench.policy("require_signature = true\n")
    put_back(bench, asked, commit)
    assert serve(bench, other(bench, first)) == 1
    assert bench.verdict(asked.nonce) == ("refused", "replayed")


@pytest.mark.slow
def test_what_was_heard_once_stays_known_when_the_cards_are_gone(bench: Bench) -> None:
    first = bench.station()
    second = other(bench, first)
    asked, commit = ask(bench)
    assert serve(bench, first) == 1
    assert serve(bench, second, idle_timeout_s=0.5) == 0, "it only looks"
    put_back(bench, asked, commit, forget_cards=True)
    assert serve(bench, other(bench, first)) == 1
    assert bench.verdict(asked.nonce) == ("refused", "replayed")


@pytest.mark.slow
def test_the_word_of_a_runner_that_nobody_listed_counts_for_nothing(bench: Bench) -> None:
    first = bench.station()
    second = other(bench)
    asked, commit = ask(bench)
    assert serve(bench, first) == 1
    put_back(bench, asked, commit)
    assert serve(bench, second) == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_another_runner_of_the_same_machine_refuses_it_without_any_card(bench: Bench) -> None:
    asked, commit = ask(bench)
    assert serve(bench, bench.station()) == 1
    put_back(bench, asked, commit, forget_cards=True)
    assert serve(bench, bench.station("second")) == 1
    assert bench.verdict(asked.nonce) == ("refused", "replayed")


@pytest.mark.slow
def test_a_forged_result_does_not_let_a_signed_request_run_again(bench: Bench) -> None:
    asked, commit = ask(bench)
    runner = Runner(bench.station(), say=bench.said.append, idle_s=0.2)
    send = runner._outbox.send

    def send_after_a_forgery(entry: Entry, held: Claim, *, untouched: bool) -> None:
        for ref in (asked.result_ref, refs.result_ref(asked.nonce)):  # while the job ran
            bench.house.git("update-ref", ref, asked.workload_sha, cwd=bench.house.remote)
        send(entry, held, untouched=untouched)

    runner._outbox.send = send_after_a_forgery  # type: ignore[method-assign]
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert "already has a result" in str(bench.said)
    put_back(bench, asked, commit)
    assert serve(bench, bench.station()) == 1
    assert bench.verdict(asked.nonce) == ("refused", "replayed")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("crowd", [0, 2])
def test_a_claim_of_a_known_runner_that_was_seen_and_is_gone_was_an_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, crowd: int
) -> None:
    first = bench.station()
    second = other(bench, first)
    monkeypatch.setattr("bridge.runner.hearsay._CLAIMS_AT_ONCE", 2)
    for _ in range(crowd):  # as many as are weighed in one look, and older
        nonce = refs.new_nonce(datetime.now(UTC) - timedelta(hours=1), os.urandom(6))
        stranger = bench.ask(nonce=nonce, result_ref=refs.request_ref("echo", nonce, None))
        squat(bench, stranger, made_up(bench, stranger))
    asked, commit = ask(bench)
    watching = Runner(second, say=bench.said.append, idle_s=0.2)
    mirror, hearsay = watching._mirror, watching._hearsay

    def look() -> None:
        hearsay.look({request.nonce for request in mirror.refresh()})

    held_by(bench, asked, first)
    look()
    look()
    assert asked.nonce not in hearsay, "it is being worked on"
    for ref in bench.house.remote_refs():
        if asked.nonce in ref:
            bench.house.git("update-ref", "-d", ref, cwd=bench.house.remote)
    look()
    assert asked.nonce in hearsay
    put_back(bench, asked, commit)
    assert serve(bench, second) == 1
    assert bench.verdict(asked.nonce) == ("refused", "replayed")


def test_a_card_tells_only_of_signed_requests_that_have_not_expired(bench: Bench) -> None:
    now = datetime.now(UTC)
    ledger = Ledger(bench.house.root / "ledger", now)
    nonces = [refs.new_nonce(now, number.to_bytes(6, "big")) for number in range(4)]
    ledger.add(nonces[0])
    ledger.add(nonces[1], format_time(now - timedelta(seconds=1)))
    ledger.add(nonces[2], format_time(now + timedelta(hours=1)))
    ledger.add(nonces[3], format_time(now + timedelta(hours=2)))
    for known in (ledger, Ledger(bench.house.root / "ledger", now)):
        assert known.nonces == set(nonces)
        assert known.replayable(now, MAX_ANSWERED) == tuple(nonces[2:])
        assert known.replayable(now, 1) == (nonces[3],), "of too many those that expire last"


def test_an_unsigned_answer_is_on_no_card(bench: Bench) -> None:
    bench.policy("")
    bench.ask("echo")
    station = bench.station()
    assert serve(bench, station) == 1
    ledger = next(path for path in station.folder.glob("answered-*") if path.is_file())
    assert Ledger(ledger, datetime.now(UTC)).replayable(datetime.now(UTC), 9) == ()
    assert not [ref for ref in bench.house.remote_refs() if ref.startswith(refs.RUNNERS)]
