"""``again`` asks for the same once more, from any clone, and vouches for nothing its caller did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge import signing
from bridge.bus.requests import Submitted, submit
from bridge.cli.again import again
from bridge.protocol import refs
from bridge.protocol.result import Reason, Status, Verdict
from tests.bridge.bus.archives import nonce_of_age, pruned
from tests.bridge.bus.refusals import BAD_MANIFESTS, refusal
from tests.bridge.cli.calls import call
from tests.fixtures.bus import BusFixture, snapshot
from tests.fixtures.repo import Done

PRESET = "throughput"
PARAMS = {"prompts": "code", "limit": 3}


@pytest.fixture
def kakeya(capsys: pytest.CaptureFixture[str]):
    def run(*args: str) -> Done:
        return call(again, capsys, *args)

    return run


def ask(bus: BusFixture, *, key: Path | None = None, **changes: object) -> Submitted:
    manifest = bus.manifest(preset=PRESET, params=PARAMS, timeout_s=77, **changes)
    branch = refs.request_ref(PRESET, manifest.nonce, None)
    manifest = manifest.model_copy(update={"result_ref": branch})
    signature = key and signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
    return submit(bus.git, bus.remote, manifest, signature)


def answer(bus: BusFixture, submitted: Submitted, **changes: object) -> None:
    verdict = Verdict(status=Status.FAILED, reason=Reason.EXIT_CODE)
    result = bus.result(bus.expected(submitted), preset=PRESET, verdict=verdict, **changes)
    bus.answer(submitted, result=result)


def manifest_of(bus: BusFixture, done: Done) -> dict[str, Any]:
    """The manifest that is on the remote now."""
    assert done.code == 0, done.err
    text = bus.repo.git("show", f"{done.json['ref']}:.mac-bridge/request.json", cwd=bus.repo.remote)
    return json.loads(text)


def other_clone(bus: BusFixture, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of ``main`` alone, now the working directory."""
    other = folder / "other"
    options = ("--quiet", "--single-branch", "--branch=main")
    # By URL: from a folder git would copy every object, reachable or not.
    bus.repo.git("clone", *options, f"file://{bus.remote}", str(other), cwd=folder)
    monkeypatch.chdir(other)
    return other


def commit_here(bus: BusFixture, name: str, clone: Path | None = None, text: str | None = None) -> str:
    """A commit of a clone's own that is on no branch of the remote."""
    clone = clone or bus.repo.clone
    (clone / name).write_text(text or name)
    bus.repo.git("add", name, cwd=clone)
    who = ("-c", "user.name=T", "-c", "user.email=t@example.org")
    bus.repo.git(*who, "commit", "--quiet", "--allow-empty", "-m", name, cwd=clone)
    return bus.repo.git("rev-parse", "HEAD", cwd=clone)


def test_what_is_given_is_changed_and_the_rest_stays(here: BusFixture, kakeya) -> None:
    first = ask(here)
    head = commit_here(here, "new.txt")
    options = ("-p", "limit=8", "--ref", "HEAD", "--timeout", "99", "--expires", "60")
    second = manifest_of(here, kakeya(first.nonce, "--json", *options))
    assert second["params"]["limit"] == 8
    assert second["params"]["prompts"] == "code"
    assert (second["workload_sha"], second["timeout_s"]) == (head, 99)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("answered", [False, True])
def test_a_clone_without_the_workload_can_repeat_it(
    here: BusFixture, kakeya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    workload = commit_here(here, "only-on-the-request.txt")
    first = ask(here)
    if answered:
        answer(here, first)
    other = other_clone(here, tmp_path, monkeypatch)
    before = snapshot(other)
    done = kakeya(first.nonce, "--json")
    second = manifest_of(here, done)
    assert second["workload_sha"] == workload
    assert here.repo.git("rev-parse", f"{done.json['ref']}^", cwd=here.repo.remote) == workload
    assert snapshot(other) == before


def test_a_clone_without_the_workload_can_name_a_commit_of_its_own(
    here: BusFixture, kakeya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_here(here, "only-on-the-request.txt")
    first = ask(here)
    other = other_clone(here, tmp_path, monkeypatch)
    own = commit_here(here, "only-in-this-clone.txt", other)
    second = manifest_of(here, kakeya(first.nonce, "--ref", "HEAD", "--json"))
    assert second["workload_sha"] == own


def test_a_dry_run_pushes_nothing(here: BusFixture, kakeya) -> None:
    first = ask(here)
    before = here.repo.remote_refs()
    done = kakeya(first.nonce, "--dry-run", "--json")
    assert (done.code, done.json["status"], done.json["again_of"]) == (0, "dry-run", first.nonce)
    assert done.json["manifest"]["params"]["limit"] == 3
    assert here.repo.remote_refs() == before


@pytest.mark.slow
def test_another_users_request_is_signed_only_with_a_named_workload(
    here: BusFixture, kakeya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = signing.ensure_key(tmp_path / "keys" / "mine", "mine")
    theirs = signing.ensure_key(tmp_path / "keys" / "theirs", "theirs")
    monkeypatch.setenv("KAKEYA_SIGNING_KEY", str(mine))
    assert kakeya(ask(here, key=mine).nonce, "--json").json["signed"] is True
    for foreign in (ask(here), ask(here, key=theirs)):
        done = kakeya(foreign.nonce, "--json")
        assert (done.code, done.json["error"]) == (2, "SignatureError")
        sha = here.repo.head()
        assert f"--ref {sha}" in done.err
        assert kakeya(foreign.nonce, "--ref", sha, "--json").json["signed"] is True


def test_a_request_put_over_another_does_not_get_its_callers_signature(
    here: BusFixture, kakeya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = signing.ensure_key(tmp_path / "keys" / "mine", "mine")
    monkeypatch.setenv("KAKEYA_SIGNING_KEY", str(mine))
    first = ask(here, key=mine)
    evil = commit_here(here, "evil.txt")
    here.repo.git("push", "--quiet", "origin", f"{evil}:refs/heads/evil")
    forged = here.manifest(
        nonce=first.nonce, preset=PRESET, params=PARAMS, workload_sha=evil, result_ref=first.ref
    )
    commit = here.commit(evil, {".mac-bridge/request.json": forged.to_bytes()})
    here.point(first.ref, commit)
    here.point(refs.INBOX + first.nonce, commit)
    done = kakeya(first.nonce, "--json")
    assert done.json["error"] == "SignatureError"


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("20200101t000000z000000000000",), 2, "no request on this remote"),
        (("{nonce}", "-p", "limit=many"), 2, "limit"),
        (("{nonce}", "-p", "colour=red"), 2, "colour"),
        (("{nonce}", "--ref", "nowhere"), 2, "nowhere"),
        (("{nonce}", "-o", "out"), 2, "-o needs --wait"),
        (("--wait", "{nonce}"), 2, "Invalid value for '--wait'"),
    ],
)
def test_what_cannot_be_done_is_said(
    here: BusFixture, kakeya, args: tuple[str, ...], code: int, message: str
) -> None:
    first = ask(here)
    before = here.repo.remote_refs()
    done = kakeya(*(arg.format(nonce=first.nonce) for arg in args))
    assert (done.code, message in done.err) == (code, True), done.err
    assert here.repo.remote_refs() == before


def test_a_request_whose_branch_is_gone_is_said_to_be_lost(here: BusFixture, kakeya) -> None:
    first = ask(here)
    here.repo.git("update-ref", "-d", first.ref, cwd=here.repo.remote)
    answer(here, first)
    done = kakeya(first.nonce)
    assert done.code == 6
    assert "is gone from the remote" in done.err
    assert "kakeya_mac run" in done.err


def archived(bus: BusFixture, *, key: Path | None = None, **changes: Any) -> str:
    """The nonce of an answered request that was pruned."""
    first = ask(bus, key=key, nonce=nonce_of_age(), **changes)
    answer(bus, first)
    assert pruned(bus).archived == [first.nonce]
    return first.nonce


def forget_commits(bus: BusFixture) -> None:
    """Have the remote drop every object that no ref reaches."""
    bus.repo.git("gc", "--quiet", "--prune=now", cwd=bus.repo.remote)


def test_archived_request_is_repeated_with_all_its_fields(here: BusFixture, kakeya) -> None:
    head = here.repo.head()
    nonce = archived(here)
    second = manifest_of(here, kakeya(nonce[:20], "--json", "-p", "limit=8"))
    assert (second["preset"], second["workload_sha"]) == (PRESET, head)
    assert (second["timeout_s"], second["params"]["prompts"], second["params"]["limit"]) == (77, "code", 8)


def test_workload_of_an_archived_request_is_fetched_from_the_remote(
    here: BusFixture, kakeya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = commit_here(here, "on-another-branch.txt")
    here.repo.git("push", "--quiet", "origin", f"{workload}:refs/heads/another")
    nonce = archived(here)
    forget_commits(here)
    other = other_clone(here, tmp_path, monkeypatch)
    before = snapshot(other)
    assert manifest_of(here, kakeya(nonce, "--json"))["workload_sha"] == workload
    assert snapshot(other) == before


def test_archived_unreadable_request_is_reported_as_lost(here: BusFixture, kakeya) -> None:
    nonce = nonce_of_age()
    refusal(here, nonce, BAD_MANIFESTS["no JSON"])
    assert pruned(here).archived == [nonce]
    done = kakeya(nonce)
    assert done.code == 6
    assert "cannot be read" in done.err


def test_a_request_that_cannot_be_read_cannot_be_repeated(here: BusFixture, kakeya) -> None:
    first = ask(here)
    commit = here.commit(first.commit + "^", {".mac-bridge/request.json": b"{}"})
    here.point(first.ref, commit)
    here.point(refs.INBOX + first.nonce, commit)
    done = kakeya(first.nonce)
    assert (done.code, "cannot be read" in done.err) == (6, True)


@pytest.mark.slow
def test_of_several_branches_the_one_that_is_named_is_asked_again(here: BusFixture, kakeya) -> None:
    asked = ask(here)
    answer(here, asked)
    shade = f"{refs.BRANCHES}aaa-{asked.nonce}"
    other = here.manifest(preset="probe", nonce=asked.nonce, result_ref=shade)
    submit(here.git, here.remote, other, None)
    here.repo.git("update-ref", "-d", refs.INBOX + asked.nonce, cwd=here.repo.remote)
    done = kakeya(asked.nonce, "--json")
    assert done.code != 0
    assert "2 branches carry the name of the request" in done.err
    assert manifest_of(here, kakeya(asked.ref.removeprefix("refs/heads/"), "--json"))["preset"] == PRESET


def test_machines_that_it_was_for_are_kept_or_changed(here: BusFixture, kakeya) -> None:
    first = ask(here, on="label=lab")
    assert manifest_of(here, kakeya(first.nonce, "--json"))["on"] == "label=lab"
    assert manifest_of(here, kakeya(first.nonce, "--on", "chip=M4*", "--json"))["on"] == "chip=M4*"
    assert "on" not in manifest_of(here, kakeya(first.nonce, "--on", "", "--json"))
