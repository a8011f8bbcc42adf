"""``cancel`` reports what it found: a request that waits, one that is claimed, one that has ended."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.cancels import read_cancel
from bridge.bus.requests import Submitted
from bridge.cli.cancel import cancel
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.result import Reason, Status, Verdict
from bridge.protocol.runner_info import Limits
from tests.bridge.bus.archives import answered, pruned
from tests.bridge.cli.calls import call
from tests.bridge.registrations import info, publish_info
from tests.fixtures.bus import BusFixture, snapshot
from tests.fixtures.repo import Done, wait_for


@pytest.fixture
def kakeya(capsys: pytest.CaptureFixture[str]):
    def run(*args: str) -> Done:
        return call(cancel, capsys, *args)

    return run


def cancel_commit(bus: BusFixture, submitted: Submitted) -> str | None:
    return bus.git.list_refs(bus.remote).get(refs.CANCELS + submitted.nonce)


def claimed(bus: BusFixture) -> Submitted:
    """A request that a runner has."""
    submitted = bus.submit()
    bus.claim(submitted)
    return submitted


def end_as(bus: BusFixture, submitted: Submitted, status: Status, reason: Reason) -> None:
    verdict = Verdict(status=status, reason=reason)
    bus.answer(submitted, result=bus.result(bus.expected(submitted), verdict=verdict))


def document(status: str, submitted: Submitted) -> dict[str, object]:
    """What `cancel --json` prints of an unsigned cancellation."""
    document = {"status": status, "nonce": submitted.nonce, "signed": False, "run": None}
    is_over = status == "withdrawn"
    document |= {"handle": submitted.nonce, "terminal": is_over, "cancelling": not is_over}
    return {**document, "warnings": [], "untrusted": [], "exit_code": 0}


def test_request_that_waits_is_withdrawn(here: BusFixture, kakeya) -> None:
    submitted = here.submit()
    done = kakeya(submitted.nonce[:20], "--reason", "wrong\nmodel", "--json")
    assert done.code == 0, done.err
    assert done.json == document("withdrawn", submitted)
    left = {ref for ref in here.repo.remote_refs() if submitted.nonce in ref}
    assert left == {submitted.ref}
    again = kakeya(submitted.nonce)
    assert (again.code, again.out) == (0, f"{submitted.nonce}: already-finished: cancelled (requested)\n")


@pytest.mark.slow
def test_withdrawing_takes_a_cancel_request_away(here: BusFixture, kakeya) -> None:
    submitted = here.submit()
    here.point(refs.CANCELS + submitted.nonce, here.repo.head())
    assert kakeya(submitted.nonce, "--json").json["status"] == "withdrawn"
    assert cancel_commit(here, submitted) is None


def test_with_wait_a_withdrawn_request_ends_in_5(here: BusFixture, kakeya) -> None:
    done = kakeya(here.submit().nonce, "--wait", "20", "--json")
    assert (done.code, done.json["status"], done.json["cancel"]) == (5, "cancelled", "withdrawn")


def test_cancel_request_is_on_the_remote_with_its_reason(here: BusFixture, kakeya) -> None:
    submitted = claimed(here)
    done = kakeya(submitted.nonce[:20], "--reason", "wrong\nmodel", "--json")
    assert done.code == 0, done.err
    assert done.json == document("cancelling", submitted)
    cancel_request = read_cancel(GitRepo(here.repo.remote), cancel_commit(here, submitted) or "")
    assert cancel_request is not None
    assert cancel_request.reason == "wrong model"
    assert cancel_request.requested_by


@pytest.mark.slow
def test_asking_again_says_so(here: BusFixture, kakeya) -> None:
    submitted = claimed(here)
    kakeya(submitted.nonce)
    before = cancel_commit(here, submitted)
    done = kakeya(submitted.nonce)
    assert done.code == 0
    assert "already" in done.out
    assert kakeya(submitted.nonce, "--json").json["status"] == "already-asked"
    assert cancel_commit(here, submitted) == before


def test_a_finished_request_is_said_to_be_with_its_status(here: BusFixture, kakeya) -> None:
    submitted = here.submit()
    end_as(here, submitted, Status.FAILED, Reason.EXIT_CODE)
    done = kakeya(submitted.nonce)
    assert done.code == 0
    assert "already-finished: failed (exit_code)" in done.out
    document = kakeya(submitted.nonce, "--json").json
    assert (document["status"], document["result_status"]) == ("already-finished", "failed")
    assert cancel_commit(here, submitted) is None
    followed = kakeya(submitted.nonce, "--wait", "20", "--json")
    assert (followed.code, followed.json["status"]) == (1, "failed")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("wait", [(), ("--wait", "20")], ids=["at once", "with wait"])
def test_an_archived_request_is_said_to_have_finished(
    here: BusFixture, kakeya, wait: tuple[str, ...]
) -> None:
    failed = Verdict(status=Status.FAILED, reason=Reason.EXIT_CODE)
    nonce = answered(here, verdict=failed).nonce
    assert pruned(here).archived == [nonce]
    done = kakeya(nonce[:20], *wait, "--json")
    if wait:
        assert (done.code, done.json["status"], done.json["cancel"]) == (1, "failed", "already-finished")
        return
    assert (done.code, done.json["status"], done.json["result_status"]) == (0, "already-finished", "failed")
    assert "already-finished: failed (exit_code)" in kakeya(f"mac-bridge/probe-{nonce}").out


@pytest.mark.slow
def test_unsigned_cancel_that_a_live_runner_ignores_is_warned_of(
    here: BusFixture, kakeya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = Limits(max_timeout_s=60, require_signature=True)
    publish_info(here.cache, info("strict", now=datetime.now(UTC), limits=strict))
    submitted = claimed(here)
    done = kakeya(submitted.nonce, "--json")
    assert done.code == 0
    assert "strict will ignore it" in done.json["warnings"][0]
    assert done.json["warnings"][0] in done.err
    monkeypatch.setenv("KAKEYA_SIGNING_KEY", str(signing.ensure_key(tmp_path / "keys" / "me", "me")))
    assert kakeya(submitted.nonce, "--json").json["warnings"] == []


def test_handle_after_wait_is_not_parsed_as_seconds(here: BusFixture, kakeya) -> None:
    submitted = here.submit()
    for words in (("--wait", submitted.nonce), ("--wait", submitted.nonce, submitted.nonce)):
        done = kakeya(*words)
        assert done.code == 2
        assert f"Invalid value for '--wait': '{submitted.nonce}'" in done.err
    for seconds, said in (
        ("9999999", "is not in the range"),
        ("inf", "not in the range"),
        ("nan", "not finite"),
    ):
        assert said in kakeya(submitted.nonce, "--wait", seconds).err
    assert cancel_commit(here, submitted) is None


def test_with_wait_its_end_is_the_exit_code(here: BusFixture, kakeya) -> None:
    submitted = claimed(here)

    def stop_it() -> None:
        wait_for(lambda: cancel_commit(here, submitted))
        end_as(here, submitted, Status.CANCELLED, Reason.REQUESTED)

    runner = threading.Thread(target=stop_it, daemon=True)
    runner.start()
    done = kakeya(submitted.nonce, "--wait", "30", "--json")
    runner.join(30)
    assert done.code == 5, done.err
    assert (done.json["status"], done.json["reason"], done.json["cancel"]) == (
        "cancelled",
        "requested",
        "cancelling",
    )


def test_a_wait_that_ends_first_is_4(here: BusFixture, kakeya) -> None:
    submitted = claimed(here)
    done = kakeya(submitted.nonce, "--wait", "0.2", "--json")
    assert (done.code, done.json["status"], done.json["cancel"]) == (4, "waiting", "cancelling")


def test_cancel_works_from_another_clone_and_leaves_nothing_there(
    here: BusFixture, kakeya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    here.repo.git("clone", "--quiet", here.remote, str(other), cwd=tmp_path)
    submitted = here.submit()
    monkeypatch.chdir(other)
    before = snapshot(other)
    done = kakeya(submitted.ref.removeprefix("refs/heads/"))
    assert done.code == 0, done.err
    assert "withdrawn" in done.out
    assert snapshot(other) == before


def test_cancel_request_is_signed_with_the_configured_key(
    here: BusFixture, kakeya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = signing.ensure_key(tmp_path / "keys" / "me", "me")
    monkeypatch.setenv("KAKEYA_SIGNING_KEY", str(key))
    submitted = claimed(here)
    assert kakeya(submitted.nonce, "--json").json["signed"] is True
    files = here.repo.git(
        "ls-tree", "--name-only", cancel_commit(here, submitted) or "", cwd=here.repo.remote
    )
    assert files.split() == ["cancel.json", "cancel.json.sig"]


def test_untrusted_result_does_not_prevent_cancelling(here: BusFixture, kakeya) -> None:
    submitted = here.submit()
    files = {f".mac-bridge/results/{submitted.nonce}/result.json": b"{}"}
    here.point(submitted.ref, here.commit(submitted.commit, files))
    done = kakeya(submitted.nonce, "--json")
    assert done.json["status"] == "cancelling", done.err


@pytest.mark.parametrize("branch", ["deleted", "moved"])
def test_request_that_is_nowhere_cannot_be_cancelled(here: BusFixture, kakeya, branch: str) -> None:
    submitted = here.submit()
    here.claim(submitted)
    here.repo.git("update-ref", "-d", refs.INBOX + submitted.nonce, cwd=here.repo.remote)
    if branch == "moved":
        here.point(submitted.ref, here.repo.head())
    else:
        here.repo.git("update-ref", "-d", submitted.ref, cwd=here.repo.remote)
    done = kakeya(submitted.nonce)
    assert done.code in (3, 6)
    said = f"holds {here.repo.head()[:12]}" if branch == "moved" else "it was deleted, or never pushed"
    assert said in done.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("20200101t000000z000000000000",), 2, "no request on this remote"),
        (("{nonce}", "--reason", "x" * 501), 2, "reason"),
        (("{nonce}", "--remote", "/nowhere/at/all"), 6, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_done_is_said(
    here: BusFixture, kakeya, args: tuple[str, ...], code: int, message: str
) -> None:
    submitted = here.submit()
    done = kakeya(*(arg.format(nonce=submitted.nonce) for arg in args))
    assert (done.code, message in done.err) == (code, True), done.err
    assert cancel_commit(here, submitted) is None
