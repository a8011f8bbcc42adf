"""Where signatures are required, only claims of known runners count, and only while they are new."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge import signing
from bridge.bus.claims import Claim, claim
from bridge.bus.git import Git, Update
from bridge.bus.mirror import Pending
from bridge.bus.objects import Entry
from bridge.errors import LeaseLost
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, format_time
from bridge.protocol.result import STATUS_NAME, STATUS_SIGNATURE_NAME, Phase, RunStatus
from bridge.runner.check import Checked
from bridge.runner.serve import Runner
from bridge.runner.station import Station
from tests.bridge.runner.bench import Bench
from tests.houses import House, wait_for

PROGRAMS = {
    "echo": "print('hello from', arg)",
    "patient": "import time; print('up and running', flush=True); time.sleep(2); print('finished')",
}


@pytest.fixture
def bench(house: House) -> Bench:
    """A strict machine."""
    made = Bench(house)
    made.install(PROGRAMS)
    made.policy("require_signature = true\n")
    return made


@pytest.fixture
def ann(bench: Bench) -> Path:
    """The key of a requester whom the machine lists."""
    key = signing.ensure_key(bench.house.root / "ann", "ann")
    line = signing.allowed_line(signing.public_key(key), "ann", signing.REQUEST_NAMESPACE)
    (bench.config / "allowed_signers").write_text(line)
    return key


def ask_signed(bench: Bench, key: Path, preset: str = "echo") -> Manifest:
    manifest = bench.manifest(preset)
    signature = signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
    return bench.ask(signature=signature, **dict(manifest))


def peer(bench: Bench, *, known: bool = True, **changes: Any) -> Station:
    """A runner on another machine."""
    station = bench.station("othermac", state_dir=bench.house.root / "elsewhere", **changes)
    assert station.key is not None
    if known:
        line = signing.allowed_line(signing.public_key(station.key), "othermac", signing.CLAIM_NAMESPACE)
        (bench.config / "known_runners").write_text(line)
    return station


def pending(bench: Bench, asked: Manifest) -> Pending:
    commit = bench.house.git("rev-parse", asked.result_ref, cwd=bench.house.remote)
    return Pending(asked.nonce, commit, None)


def held_by(bench: Bench, asked: Manifest, other: Station, *, signed: bool = True) -> Claim:
    sign: Callable[[bytes], bytes | None] = other.sign_claim if signed else lambda _: None
    remote = str(bench.house.remote)
    held = claim(Git(bench.house.clone), remote, pending(bench, asked), other.identity, sign=sign)
    assert held is not None
    return held


def squat(bench: Bench, asked: Manifest, status: RunStatus, signature: bytes | None = None) -> str:
    """Put a claim in the place of whatever stands there, as anybody with push rights can."""
    git, ref = Git(bench.house.clone), refs.claim_ref(asked.nonce)
    files = {STATUS_NAME: status.to_bytes()}
    if signature is not None:
        files[STATUS_SIGNATURE_NAME] = signature
    with git.scratch() as scratch:
        rows = [Entry("100644", "blob", scratch.write_blob(data), name) for name, data in files.items()]
        commit = scratch.commit_tree(scratch.write_tree(rows), [], f"{secrets.token_hex(8)}\n")
        before = scratch.ls_remote(str(bench.house.remote), ref).get(ref, "")
        scratch.push(str(bench.house.remote), [Update(ref, commit, before)])
    return commit


def made_up(bench: Bench, asked: Manifest, **changes: object) -> RunStatus:
    fields: dict[str, object] = {
        "nonce": asked.nonce,
        "request_commit": pending(bench, asked).commit,
        "runner": "mallory",
        "runner_id": "0" * 16,
        "pid": 1,
        "unique": secrets.token_hex(16),
        "attempt": 999,
        "beat": 0,
        "lease_s": 900.0,
        "session": "0" * 16,
        "updated_at": format_time(datetime.now(UTC)),
        "phase": Phase.RUNNING,
        "elapsed_s": 0.0,
    }
    return RunStatus.model_validate({**fields, **changes})


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("signed", ["not at all", "by an unknown runner"])
def test_a_squatted_claim_does_not_hold_up_a_signed_request(bench: Bench, ann: Path, signed: str) -> None:
    asked, stranger = ask_signed(bench, ann), peer(bench, known=False)
    status = made_up(bench, asked)
    squat(bench, asked, status, None if signed == "not at all" else stranger.sign_claim(status.to_bytes()))
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.answer(asked.nonce).result.attempt == 1, "what a squatter says of attempts is not believed"


def test_a_squatted_claim_does_not_hold_up_the_refusal_of_a_signed_request(bench: Bench, ann: Path) -> None:
    bench.policy('require_signature = true\nallow_presets = ["patient"]\n')
    asked = ask_signed(bench, ann, "echo")
    squat(bench, asked, made_up(bench, asked))
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("refused", "policy")


@pytest.mark.slow
def test_squatted_claims_on_unsigned_requests_cost_signed_ones_no_time(bench: Bench, ann: Path) -> None:
    for _ in range(3):
        stranger = bench.ask()
        squat(bench, stranger, made_up(bench, stranger))
    asked = [ask_signed(bench, ann) for _ in range(2)]
    runner, examined = bench.runner(), []
    examine = runner._desk.examine

    def noted(pending: Pending, *rest: Any) -> Checked | None:
        examined.append(pending.nonce)
        return examine(pending, *rest)

    runner._desk.examine = noted  # type: ignore[method-assign]
    for _ in asked:
        assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert sorted(examined) == sorted(each.nonce for each in asked)


@pytest.mark.slow
def test_the_claim_of_a_known_runner_is_respected(bench: Bench, ann: Path) -> None:
    asked = ask_signed(bench, ann)
    held = held_by(bench, asked, peer(bench))
    assert bench.runner().serve(once=True, idle_timeout_s=1.0) == 0
    assert bench.house.git("rev-parse", held.ref, cwd=bench.house.remote) == held.commit


@pytest.mark.slow
def test_a_claim_that_was_respected_is_not_once_its_key_is_revoked(bench: Bench, ann: Path) -> None:
    asked, other = ask_signed(bench, ann), peer(bench)
    held_by(bench, asked, other)
    runner = bench.runner()
    assert runner.serve(once=True, idle_timeout_s=0.5) == 0
    (bench.config / "revoked_keys").write_text(f"{other.public_key}\n")
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_a_runner_of_the_same_machine_needs_no_line(bench: Bench, ann: Path) -> None:
    asked = ask_signed(bench, ann)
    held_by(bench, asked, bench.station("second"))
    assert bench.runner().serve(once=True, idle_timeout_s=1.0) == 0


@pytest.mark.slow
def test_the_claim_on_an_unsigned_request_is_left_to_its_lease(bench: Bench, ann: Path) -> None:
    asked = bench.ask()
    held = held_by(bench, asked, peer(bench, known=False), signed=False)
    assert bench.runner().serve(once=True, idle_timeout_s=1.0) == 0, "a machine beside this one may take it"
    assert bench.house.git("rev-parse", held.ref, cwd=bench.house.remote) == held.commit


@pytest.mark.slow
def test_a_claim_without_signatures_is_respected_where_none_are_required(bench: Bench, ann: Path) -> None:
    bench.policy("")
    asked = ask_signed(bench, ann)
    held_by(bench, asked, peer(bench, known=False), signed=False)
    assert bench.runner().serve(once=True, idle_timeout_s=1.0) == 0


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("minutes", [-60, 60])
def test_an_old_claim_of_a_known_runner_that_was_put_back_holds_nothing(
    bench: Bench, ann: Path, minutes: int
) -> None:
    asked, other = ask_signed(bench, ann), peer(bench)
    then = format_time(datetime.now(UTC) + timedelta(minutes=minutes))
    status = made_up(bench, asked, updated_at=then, attempt=2, runner="othermac")
    squat(bench, asked, status, other.sign_claim(status.to_bytes()))
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.answer(asked.nonce).result.attempt == 3, "it was made, so it counts as an attempt"


@pytest.mark.slow
def test_a_signed_claim_of_another_request_is_a_squatted_one(bench: Bench, ann: Path) -> None:
    first, second = ask_signed(bench, ann), ask_signed(bench, ann)
    other = peer(bench)
    held = held_by(bench, first, other)
    squat(bench, second, held.status, other.sign_claim(held.status.to_bytes()))
    assert bench.serve_once() == 1
    assert bench.verdict(second.nonce) == ("passed", "ok")


def log_claims(bench: Bench) -> Path:
    """Have the server note when a claim changes, a line each."""
    log, hook = bench.house.root / "claims.log", bench.house.remote / "hooks" / "post-receive"
    hook.parent.mkdir(exist_ok=True)
    case = f'case "$ref" in {refs.CLAIMS}*) date +%s.%N >> {log};; esac'
    hook.write_text(f"#!/bin/sh\nwhile read old new ref; do {case}; done\n")
    hook.chmod(0o755)
    return log


@pytest.mark.slow
def test_two_strict_machines_that_do_not_list_each_other_publish_one_result_and_say_why_both_ran(
    bench: Bench, ann: Path
) -> None:
    log, beat_s = log_claims(bench), 0.5
    stations = bench.station(beat_s=beat_s), peer(bench, known=False, beat_s=beat_s)
    said: tuple[list[str], ...] = ([], [])
    asked = ask_signed(bench, ann, "patient")
    runners = [Runner(station, say=to.append, idle_s=0.2) for station, to in zip(stations, said, strict=True)]
    served = [
        threading.Thread(target=runner.serve, kwargs={"once": True, "idle_timeout_s": 5.0}, daemon=True)
        for runner in runners
    ]
    for thread in served:
        thread.start()
    for thread in served:
        thread.join(60)
    assert not any(thread.is_alive() for thread in served), "they take it from each other for ever"
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert sum("published as" in line for line in (*said[0], *said[1])) == 1
    left = {ref for ref in bench.house.remote_refs() if asked.nonce in ref}
    assert left == {asked.result_ref}, "one result, and no claim"
    for lines, other in zip(said, reversed(stations), strict=True):
        told = [line for line in lines if "known_runners" in line]
        assert len(told) == 1, lines
        assert other.identity.name in told[0]
    moments = [float(line) for line in log.read_text().split()]
    # Each renews it once a beat and once a phase, and takes it at first; the last change is its deletion.
    assert len(moments) <= 2 * ((moments[-1] - moments[0]) / beat_s + len(Phase) + 1) + 1, moments


@pytest.mark.slow
@pytest.mark.parametrize("how", ["overwritten", "deleted"])
def test_whoever_keeps_taking_a_claim_away_does_not_stop_the_job(bench: Bench, ann: Path, how: str) -> None:
    asked = ask_signed(bench, ann, "patient")
    ref, remote = refs.claim_ref(asked.nonce), bench.house.remote
    served = threading.Thread(target=bench.serve_once, daemon=True)
    served.start()
    wait_for(lambda: ref in bench.house.remote_refs(), 20, "the claim")
    attacks = 0
    while served.is_alive() and asked.nonce not in str(bench.said[1:]):
        if how == "overwritten":
            with contextlib.suppress(LeaseLost):  # the runner was faster
                squat(bench, asked, made_up(bench, asked))
        elif ref in bench.house.remote_refs():
            bench.house.git("update-ref", "-d", ref, cwd=remote)
        attacks += 1
        time.sleep(0.7)
        if attacks > 3:
            break
    served.join(60)
    assert bench.verdict(asked.nonce) == ("passed", "ok"), bench.said
    assert "finished" in bench.log(asked.nonce)
    assert bench.answer(asked.nonce).result.attempt == 1
