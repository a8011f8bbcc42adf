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
from tests.bridge.runner.bench import Bench
from tests.objects import PLAIN, Objects


class Look:
    """A runner's queue, look by look."""

    def __init__(
        self,
        bench: Bench,
        *,
        cache: GitCache | None = None,
        limit_bytes: int = FETCH_LIMIT_BYTES,
        scan_interval_s: float = 0.0,
    ) -> None:
        self.config = bench.config_of()
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


def test_request_counts_for_its_signer_alone(bench: Bench) -> None:
    ann = bench.list_signer("ann")
    stranger = signing.ensure_key(bench.house.root / "keys" / "stranger", "stranger")
    hers, plain, strangers = bench.ask_signed(ann), bench.ask(), bench.ask_signed(stranger)
    broken = bench.ask(signature=b"-----BEGIN SSH SIGNATURE-----\nU1NIU0lH\n-----END SSH SIGNATURE-----\n")
    unshaped = bench.manifest()
    bench.push_commit(unshaped, hers.workload_sha)
    copy = bench.manifest().nonce
    bench.point(refs.INBOX + copy, bench.tip(refs.INBOX + hers.nonce) or "")
    look = Look(bench)
    known = look.requesters()
    assert known.pop(hers.nonce) == "ann"
    nobodys = [each.nonce for each in (plain, strangers, broken, unshaped)]
    assert known.items() >= dict.fromkeys([*nobodys, copy]).items()
    look.now += timedelta(hours=2)
    assert set(look.requesters().values()) == {None}, "anyone can push an expired request again"


@pytest.mark.slow
def test_look_verifies_a_few_signatures_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_VERIFIED", 2)
    ann, identify, checks = bench.list_signer("ann"), signing.identify, list[Any]()
    asked = {bench.ask_signed(ann).nonce for _ in range(3)}

    def counted(*args: Any, **options: Any) -> signing.Signature:
        checks.append(args)
        return identify(*args, **options)

    monkeypatch.setattr(signing, "identify", counted)
    look = Look(bench)
    assert len(look.read()) == 2
    assert set(look.requesters()) == asked
    assert len(look.read()) == 3
    assert len(checks) == 3


def test_look_reads_a_few_requests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_READ", 2)
    for _ in range(3):
        bench.ask()
    look = Look(bench)
    assert [len(look.read()) for _ in range(3)] == [2, 3, 3]


@pytest.mark.slow
def test_signers_are_found_out_again_when_a_list_of_keys_changes(bench: Bench) -> None:
    ann = bench.list_signer("ann")
    asked, look = bench.ask_signed(ann).nonce, Look(bench)
    assert look.requesters() == {asked: "ann"}
    revoked = bench.config / "revoked_keys"
    revoked.write_bytes(signing.public_key(ann).read_bytes())
    assert look.requesters() == {asked: None}
    revoked.unlink()
    assert look.requesters() == {asked: "ann"}


def test_request_that_cannot_be_fetched_holds_up_no_other(bench: Bench) -> None:
    """A commit whose tree the server does not have."""
    who = "Mallory <m@example.org> 1700000000 +0000"
    text = f"tree {'12' * 20}\nauthor {who}\ncommitter {who}\n\nhello\n"
    remote, broken = bench.house.remote, bench.manifest().nonce
    commit = bench.house.git(
        "hash-object", "-t", "commit", "--literally", "-w", "--stdin", cwd=remote, input=text
    )
    bench.point(refs.INBOX + broken, commit)
    asked, look = bench.ask().nonce, Look(bench)
    assert set(look.read()) == {asked}
    record = look.store.get(broken)
    assert record.failures == 1
    assert set(look.read()) == {asked}
    assert look.store.get(broken).failures == 1, "it is tried again later"
    look.now += timedelta(seconds=5)
    look.read()
    assert look.store.get(broken).failures == 2


def hostile_refs(bench: Bench, nonce: str) -> None:
    """Put names and objects next to a request that anyone with push rights, or another server, may."""
    remote, main = bench.house.remote, bench.tip("refs/heads/main")
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
    kept = bench.house.git("for-each-ref", "--format=%(refname) %(objectname)", cwd=remote)
    rows |= {name.encode(): sha for name, _, sha in (line.partition(" ") for line in kept.splitlines())}
    packed += [sha.encode() + b" " + name for name, sha in sorted(rows.items())]
    (remote / "packed-refs").write_bytes(b"\n".join(packed) + b"\n")


def test_names_and_objects_of_others_hide_no_request(bench: Bench) -> None:
    asked = bench.ask_signed(bench.list_signer("ann"))
    hostile_refs(bench, asked.nonce)
    look = Look(bench)
    for _ in range(3):
        found = look.read()
        assert (found[asked.nonce].requester, found[asked.nonce].refusal) == ("ann", None)
        assert {n for n, request in found.items() if request.refusal is None} == {asked.nonce}
    local = look.cache.run("for-each-ref", "--format=%(refname)").decode().split()
    assert local
    assert all(re.fullmatch(r"refs/kept/\d{12}-[0-9a-f]{40}", ref) for ref in local)


@pytest.mark.slow
def test_request_that_is_too_large_hides_no_other(bench: Bench) -> None:
    asked, large = bench.ask().nonce, bench.manifest().nonce
    commit = Objects(bench.house.remote).commit_files(None, {"x": os.urandom(2 << 20)})
    bench.point(refs.INBOX + large, commit)
    look = Look(bench, limit_bytes=1 << 20)
    assert set(look.read()) == {asked}
    assert "sends more than" in (look.store.get(large).reason or "")
    bench.house.git("update-ref", "-d", refs.INBOX + large, cwd=bench.house.remote)
    assert set(look.read()) == {asked}
    assert len(look.queue) == 1


# Requests on their branches alone --------------------------------------------------------------------------


def on_branches(bench: Bench, count: int, age: timedelta, *, answered: bool = False) -> list[str]:
    """Requests on branches alone, the oldest first, a second between them; or their results."""
    objects, lines, nonces = Objects(bench.house.remote), [], []
    for number in range(count):
        made = (datetime.now(UTC) - age + timedelta(seconds=number)).replace(microsecond=0)
        nonce = refs.new_nonce(made, os.urandom(6))
        times = {"created_at": made, "expires_at": made + timedelta(hours=1)}
        manifest = bench.manifest(nonce=nonce, result_ref=refs.request_ref("echo", nonce, None), **times)
        commit = objects.commit_files(manifest.workload_sha, {REQUEST_PATH: manifest.to_bytes()})
        if answered:
            commit = objects.commit_files(commit, {f"{RESULT_ROOT}/{nonce}/{RESULT_NAME}": b"{}"})
        lines.append(f"create {manifest.result_ref} {commit}\n")
        nonces.append(nonce)
    bench.house.git("update-ref", "--stdin", cwd=bench.house.remote, input="".join(lines))
    return nonces


@pytest.mark.slow
def test_scan_reads_each_branch_once_the_newest_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_SCANNED", 5)
    [old] = on_branches(bench, 1, timedelta(days=2))
    on_branches(bench, 12, timedelta(days=1), answered=True)
    [new] = on_branches(bench, 1, timedelta(minutes=1))
    look = Look(bench)
    for expected, brought in (({new}, 5), ({new}, 5), ({old, new}, 4), ({old, new}, 0)):
        assert (set(look.read()), look.brought()) == (expected, brought)
    again = Look(bench, cache=look.cache)  # the process is another one, the cache is the same
    for expected in ({new}, {new}, {old, new}):
        assert (set(again.read()), again.brought()) == (expected, 0)


def test_branch_counts_while_it_ends_in_a_request(bench: Bench) -> None:
    first, second = on_branches(bench, 2, timedelta(minutes=5))
    look, ref = Look(bench), refs.request_ref("echo", first, None)
    request = bench.tip(ref) or ""
    assert set(look.read()) == {first, second}
    result = {f"{RESULT_ROOT}/{first}/{RESULT_NAME}": b"{}"}
    bench.point(ref, Objects(bench.house.remote).commit_files(request, dict(result)))
    assert set(look.read()) == {second}
    bench.point(ref, request)  # by force
    assert set(look.read()) == {first, second}
    bench.house.git("update-ref", "-d", ref, cwd=bench.house.remote)
    assert set(look.read()) == {second}


def test_branches_of_the_same_nonce_hide_no_request(bench: Bench) -> None:
    [nonce] = on_branches(bench, 1, timedelta(minutes=5))
    for preset in ("aaa", "zzz"):
        bench.point(refs.request_ref(preset, nonce, None), bench.tip("refs/heads/main") or "")
    look = Look(bench)
    for _ in range(2):
        assert set(look.read()) == {nonce}


def test_scan_leaves_old_branches_other_names_and_the_inbox_alone(bench: Bench) -> None:
    longest = MAX_LIFETIME + MAX_NONCE_SKEW
    on_branches(bench, 1, longest + timedelta(hours=1))
    [oldest] = on_branches(bench, 1, longest - timedelta(hours=1))
    main = bench.tip("refs/heads/main") or ""
    for name in ("notes", "probe-20260301", f"probe-{oldest}-more", "deep/probe"):
        bench.point(f"refs/heads/mac-bridge/{name}", main)
    look = Look(bench)
    assert set(look.read()) == {oldest}
    assert look.brought() == 1
    asked = bench.ask()
    assert set(look.read()) == {oldest, asked.nonce}
    bench.house.git("update-ref", "-d", refs.INBOX + asked.nonce, cwd=bench.house.remote)
    assert set(look.read()) == {oldest, asked.nonce}


def test_branches_are_listed_once_an_interval(bench: Bench) -> None:
    look = Look(bench, scan_interval_s=60.0)
    assert look.read() == {}
    [nonce] = on_branches(bench, 1, timedelta(minutes=2))
    for pause, expected in ((19.9, set()), (39.9, set()), (0.5, {nonce})):
        look.seconds += pause
        assert set(look.read()) == expected


def test_request_waits_until_it_has_a_result(bench: Bench) -> None:
    asked, other = bench.ask(), bench.ask()
    look = Look(bench)
    assert list(look.read()) == sorted((asked.nonce, other.nonce)), "the oldest first"
    bench.house.git("update-ref", "-d", asked.result_ref, cwd=bench.house.remote)
    assert set(look.read()) == {asked.nonce, other.nonce}
    bench.point(refs.RESULTS + asked.nonce, bench.tip("refs/heads/main") or "")
    assert set(look.read()) == {other.nonce}
