"""What waits is read once, a bounded number in one look, and each request counts for who signed it."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bridge import signing
from bridge.git.cache import GitCache
from bridge.git.repo import FETCH_LIMIT_BYTES
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW, REQUEST_PATH
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT
from bridge.runner import queue
from bridge.runner.admission import Request
from bridge.runner.queue import Queue
from bridge.runner.store import Store
from tests.fixtures.runner import RunnerFixture
from tests.objects import PLAIN, Objects


class Look:
    """A runner's queue, look by look."""

    def __init__(
        self,
        runner: RunnerFixture,
        *,
        cache: GitCache | None = None,
        limit_bytes: int = FETCH_LIMIT_BYTES,
        scan_interval_s: float = 0.0,
    ) -> None:
        self.config = runner.config_of()
        self.seconds = 0.0
        self.now = datetime.now(UTC)
        self.store = Store(self.config.folder / "store.sqlite", clock=lambda: self.now.timestamp())  # noqa: PLW0108
        folder = self.config.folder / "cache.git"
        self.cache = cache or GitCache(folder, self.config.remote, limit_bytes=limit_bytes)
        self.queue = Queue(
            self.config,
            self.cache,
            self.store,
            clock=lambda: self.seconds,
            now=lambda: self.now,
            scan_interval_s=scan_interval_s,
        )
        self._kept = self._count()

    def _count(self) -> int:
        self.cache.prepare()
        return len(self.cache.run("for-each-ref", "refs/kept/").splitlines())

    def brought(self) -> int:
        """How many commits were fetched since the last time."""
        before, self._kept = self._kept, self._count()
        return self._kept - before

    def read(self) -> dict[str, Request]:
        return {request.nonce: request for request in self.queue.poll()}

    def requesters(self) -> dict[str, str | None]:
        return {nonce: self.queue._requester(request) for nonce, request in self.read().items()}


def test_request_on_a_branch_that_it_does_not_name_is_left_alone(runner: RunnerFixture) -> None:
    """It would be claimed, found closed and released at every look."""
    for _ in range(3):
        copied = runner.ask()
        runner.point(f"refs/heads/mac-bridge/other-{copied.nonce}", runner.tip(copied.result_ref) or "")
        runner.delete(copied.result_ref, refs.INBOX + copied.nonce)
    daemon = runner.daemon(prunes=False)
    pushed = runner.repo.root / "pushed"
    runner.hook("update", f'echo "$1" >>{pushed}')
    daemon.tick()
    assert not pushed.exists(), pushed.read_text()
    asked = runner.ask()
    assert daemon.tick()
    assert runner.verdict(asked.nonce) == ("passed", "ok")


def test_new_request_is_read_before_what_waits_unread(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "MAX_READ", 1)
    look = Look(runner)
    earlier = look.now.replace(microsecond=0) - timedelta(minutes=5)
    for _ in range(3):
        nonce = refs.new_nonce(earlier, os.urandom(6))
        runner.ask(nonce=nonce, created_at=earlier, result_ref=refs.request_ref("echo", nonce, None))
    look.read()
    asked = runner.ask()
    assert asked.nonce in look.read()


def test_request_counts_for_its_signer_alone(runner: RunnerFixture) -> None:
    ann = runner.list_signer("ann")
    stranger = signing.ensure_key(runner.repo.root / "keys" / "stranger", "stranger")
    hers, plain, strangers = runner.ask_signed(ann), runner.ask(), runner.ask_signed(stranger)
    broken = runner.ask(signature=b"-----BEGIN SSH SIGNATURE-----\nU1NIU0lH\n-----END SSH SIGNATURE-----\n")
    unshaped = runner.manifest()
    runner.push_commit(unshaped, hers.workload_sha)
    copy = runner.manifest().nonce
    runner.point(refs.INBOX + copy, runner.tip(refs.INBOX + hers.nonce) or "")
    look = Look(runner)
    known = look.requesters()
    assert known.pop(hers.nonce) == "ann"
    nobodys = [each.nonce for each in (plain, strangers, broken, unshaped)]
    assert known.items() >= dict.fromkeys([*nobodys, copy]).items()
    look.now += timedelta(hours=2)
    assert set(look.requesters().values()) == {None}, "anyone can push an expired request again"


@pytest.mark.slow
def test_look_verifies_a_few_signatures_once(runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_VERIFIED", 2)
    ann, identify, checks = runner.list_signer("ann"), signing.identify, list[Any]()
    asked = {runner.ask_signed(ann).nonce for _ in range(3)}

    def counted(*args: Any, **options: Any) -> signing.Signature:
        checks.append(args)
        return identify(*args, **options)

    monkeypatch.setattr(signing, "identify", counted)
    look = Look(runner)
    assert len(look.read()) == 2
    assert set(look.requesters()) == asked
    assert len(look.read()) == 3
    assert len(checks) == 3


def test_look_reads_a_few_requests(runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_READ", 2)
    for _ in range(3):
        runner.ask()
    look = Look(runner)
    assert [len(look.read()) for _ in range(3)] == [2, 3, 3]


@pytest.mark.slow
def test_signers_are_found_out_again_when_a_list_of_keys_changes(runner: RunnerFixture) -> None:
    ann = runner.list_signer("ann")
    asked, look = runner.ask_signed(ann).nonce, Look(runner)
    assert look.requesters() == {asked: "ann"}
    revoked = runner.config / "revoked_keys"
    revoked.write_bytes(signing.public_key(ann).read_bytes())
    assert look.requesters() == {asked: None}
    revoked.unlink()
    assert look.requesters() == {asked: "ann"}


def test_request_that_cannot_be_fetched_holds_up_no_other(runner: RunnerFixture) -> None:
    """A commit whose tree the server does not have."""
    who = "Mallory <m@example.org> 1700000000 +0000"
    text = f"tree {'12' * 20}\nauthor {who}\ncommitter {who}\n\nhello\n"
    remote, broken = runner.repo.remote, runner.manifest().nonce
    commit = runner.repo.git(
        "hash-object", "-t", "commit", "--literally", "-w", "--stdin", cwd=remote, input=text
    )
    runner.point(refs.INBOX + broken, commit)
    asked, look = runner.ask().nonce, Look(runner)
    assert set(look.read()) == {asked}
    record = look.store.get(broken)
    assert record.failures == 1
    assert set(look.read()) == {asked}
    assert look.store.get(broken).failures == 1, "it is tried again later"
    look.now += timedelta(seconds=5)
    look.read()
    assert look.store.get(broken).failures == 2


def hostile_refs(runner: RunnerFixture, nonce: str) -> None:
    """Put names and objects next to a request that anyone with push rights, or another server, may."""
    remote, main = runner.repo.remote, runner.tip("refs/heads/main")
    objects = Objects(remote)
    blob = objects.blob(b"x")
    tagged = f"object {main}\ntype commit\ntag t\ntagger A <a@b> 1 +0000\n\nx\n".encode()
    others = [blob, objects.tree([(PLAIN, "x", blob)]), objects.write("tag", tagged)]
    others += [objects.commit_files(None, {"x": b"%d" % number}) for number in range(20)]
    inbox, branch = refs.INBOX.encode(), refs.BRANCHES.encode()
    rows = {inbox + b"x" * 4000: main, inbox + b"\xff\xfe": main, branch + b"\x80-" + nonce.encode(): main}
    rows |= {inbox + nonce.upper().encode(): main, refs.CLAIMS.encode() + nonce.upper().encode(): main}
    rows |= {inbox + b"junk%05d" % number: main for number in range(5000)}
    for number, sha in enumerate(others):
        other = refs.new_nonce(datetime.now(UTC) - timedelta(minutes=1), b"%06d" % number)
        rows |= {inbox + other.encode(): sha, branch + b"echo-" + other.encode(): sha}
    packed = [b"# pack-refs with: peeled fully-peeled sorted "]
    kept = runner.repo.git("for-each-ref", "--format=%(refname) %(objectname)", cwd=remote)
    rows |= {name.encode(): sha for name, _, sha in (line.partition(" ") for line in kept.splitlines())}
    packed += [sha.encode() + b" " + name for name, sha in sorted(rows.items())]
    (remote / "packed-refs").write_bytes(b"\n".join(packed) + b"\n")


def test_names_and_objects_of_others_hide_no_request(runner: RunnerFixture) -> None:
    asked = runner.ask_signed(runner.list_signer("ann"))
    hostile_refs(runner, asked.nonce)
    look = Look(runner)
    for _ in range(3):
        found = look.read()
        assert (found[asked.nonce].requester, found[asked.nonce].refusal) == ("ann", None)
        assert {n for n, request in found.items() if request.refusal is None} == {asked.nonce}
    local = look.cache.run("for-each-ref", "--format=%(refname)").decode().split()
    assert local
    assert all(re.fullmatch(r"refs/kept/\d{12}-[0-9a-f]{40}", ref) for ref in local)


@pytest.mark.slow
def test_request_that_is_too_large_hides_no_other(runner: RunnerFixture) -> None:
    asked, large = runner.ask().nonce, runner.manifest().nonce
    commit = Objects(runner.repo.remote).commit_files(None, {"x": os.urandom(2 << 20)})
    runner.point(refs.INBOX + large, commit)
    look = Look(runner, limit_bytes=1 << 20)
    assert set(look.read()) == {asked}
    assert "sends more than" in (look.store.get(large).reason or "")
    runner.repo.git("update-ref", "-d", refs.INBOX + large, cwd=runner.repo.remote)
    assert set(look.read()) == {asked}
    assert len(look.queue) == 1


# Requests on their branches alone --------------------------------------------------------------------------


def on_branches(runner: RunnerFixture, count: int, age: timedelta, *, answered: bool = False) -> list[str]:
    """Requests on branches alone, the oldest first, a second between them; or their results."""
    objects, lines, nonces = Objects(runner.repo.remote), [], []
    for number in range(count):
        made = (datetime.now(UTC) - age + timedelta(seconds=number)).replace(microsecond=0)
        nonce = refs.new_nonce(made, os.urandom(6))
        times = {"created_at": made, "expires_at": made + timedelta(hours=1)}
        manifest = runner.manifest(nonce=nonce, result_ref=refs.request_ref("echo", nonce, None), **times)
        commit = objects.commit_files(manifest.workload_sha, {REQUEST_PATH: manifest.to_bytes()})
        if answered:
            commit = objects.commit_files(commit, {f"{RESULT_ROOT}/{nonce}/{RESULT_NAME}": b"{}"})
        lines.append(f"create {manifest.result_ref} {commit}\n")
        nonces.append(nonce)
    runner.repo.git("update-ref", "--stdin", cwd=runner.repo.remote, input="".join(lines))
    return nonces


@pytest.mark.slow
def test_scan_reads_each_branch_once_the_newest_first(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "MAX_SCANNED", 5)
    [old] = on_branches(runner, 1, timedelta(days=2))
    on_branches(runner, 12, timedelta(days=1), answered=True)
    [new] = on_branches(runner, 1, timedelta(minutes=1))
    look = Look(runner)
    for expected, brought in (({new}, 5), ({new}, 5), ({old, new}, 4), ({old, new}, 0)):
        assert (set(look.read()), look.brought()) == (expected, brought)
    again = Look(runner, cache=look.cache)  # the process is another one, the cache is the same
    for expected in ({new}, {new}, {old, new}):
        assert (set(again.read()), again.brought()) == (expected, 0)


def test_branch_counts_while_it_ends_in_a_request(runner: RunnerFixture) -> None:
    first, second = on_branches(runner, 2, timedelta(minutes=5))
    look, ref = Look(runner), refs.request_ref("echo", first, None)
    request = runner.tip(ref) or ""
    assert set(look.read()) == {first, second}
    result = {f"{RESULT_ROOT}/{first}/{RESULT_NAME}": b"{}"}
    runner.point(ref, Objects(runner.repo.remote).commit_files(request, dict(result)))
    assert set(look.read()) == {second}
    runner.point(ref, request)  # by force
    assert set(look.read()) == {first, second}
    runner.repo.git("update-ref", "-d", ref, cwd=runner.repo.remote)
    assert set(look.read()) == {second}


def test_branches_of_the_same_nonce_hide_no_request(runner: RunnerFixture) -> None:
    [nonce] = on_branches(runner, 1, timedelta(minutes=5))
    for preset in ("aaa", "zzz"):
        runner.point(refs.request_ref(preset, nonce, None), runner.tip("refs/heads/main") or "")
    look = Look(runner)
    for _ in range(2):
        assert set(look.read()) == {nonce}


def test_scan_leaves_old_branches_other_names_and_the_inbox_alone(runner: RunnerFixture) -> None:
    longest = MAX_LIFETIME + MAX_NONCE_SKEW
    on_branches(runner, 1, longest + timedelta(hours=1))
    [oldest] = on_branches(runner, 1, longest - timedelta(hours=1))
    main = runner.tip("refs/heads/main") or ""
    for name in ("notes", "probe-20260301", f"probe-{oldest}-more", "deep/probe"):
        runner.point(f"refs/heads/mac-bridge/{name}", main)
    look = Look(runner)
    assert set(look.read()) == {oldest}
    assert look.brought() == 1
    asked = runner.ask()
    assert set(look.read()) == {oldest, asked.nonce}
    runner.repo.git("update-ref", "-d", refs.INBOX + asked.nonce, cwd=runner.repo.remote)
    assert set(look.read()) == {oldest, asked.nonce}


def test_branches_are_listed_once_an_interval(runner: RunnerFixture) -> None:
    look = Look(runner, scan_interval_s=60.0)
    assert look.read() == {}
    [nonce] = on_branches(runner, 1, timedelta(minutes=2))
    for pause, expected in ((19.9, set()), (39.9, set()), (0.5, {nonce})):
        look.seconds += pause
        assert set(look.read()) == expected


def test_request_waits_until_it_has_a_result(runner: RunnerFixture) -> None:
    asked, other = runner.ask(), runner.ask()
    look = Look(runner)
    assert list(look.read()) == sorted((asked.nonce, other.nonce)), "the oldest first"
    runner.repo.git("update-ref", "-d", asked.result_ref, cwd=runner.repo.remote)
    assert set(look.read()) == {asked.nonce, other.nonce}
    runner.point(refs.RESULTS + asked.nonce, runner.tip("refs/heads/main") or "")
    assert set(look.read()) == {other.nonce}
