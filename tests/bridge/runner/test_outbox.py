"""A result gets to the server, or something in its place does, and no result is lost on this disk."""

from __future__ import annotations

import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge.bus.claims import Claim, Identity
from bridge.bus.handles import resolve_handle
from bridge.bus.requests import Submitted
from bridge.bus.results import Asked, Believed, believe, fetch
from bridge.errors import LeaseLost
from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from bridge.runner.later import MAX_PAUSE_S, Later
from bridge.runner.ledger import Ledger
from bridge.runner.outbox import LONGEST_PAUSE_S, PATIENCE_S, REJECTIONS, Outbox
from bridge.runner.spool import Entry, Spool
from tests.bridge.bus.damage import DAMAGE
from tests.worlds import FILES, RUNNER, World

OTHER = Identity("other", "f" * 16, "00000000000000bb")
LARGE = {**FILES, "logs/run.log": os.urandom(200_000)}
TOO_LARGE = """
while read old new ref; do
  git cat-file -e "$new" 2>/dev/null || continue
  git rev-list --objects "$new" --not --all | cut -d' ' -f1 | git cat-file --batch-check='%(objectsize)' |
    awk '$1 > 50000 { exit 1 }' || { echo "a file is too large here"; exit 1; }
done
"""
BAD_NAME = """
git cat-file -e "$3" 2>/dev/null || exit 0
git ls-tree -r --name-only "$3" | grep -q run.log && { echo "no logs are taken"; exit 1; }
exit 0
"""
NO_RESULT = """
git cat-file -e "$3" 2>/dev/null || exit 0
git ls-tree -r --name-only "$3" | grep -q results/ && { echo "no results are taken"; exit 1; }
exit 0
"""
ONLY_NEW_BRANCHES = """
case "$1 $2" in
  "refs/heads/"*" 0000000000000000000000000000000000000000") ;;
  "refs/heads/"*) echo "branches are made here, and not moved"; exit 1;;
esac
"""


class Post:
    """One runner's outbox on one bus, with a clock that is turned by hand."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.folder = world.root / "runner"
        self.now = 0.0
        self.said: list[str] = []
        self.begin()

    def begin(self) -> None:
        """As a new process of the same runner does."""
        self.folder.mkdir(exist_ok=True)
        self.spool = Spool(self.folder / "spool")
        self.ledger = Ledger(self.folder / "answered", datetime.now(UTC))
        self.later = Later(lambda: self.now)
        self.outbox = Outbox(
            self.world.mirror,
            self.spool,
            self.ledger,
            self.later,
            sign=lambda _: None,
            say=self.said.append,
            clock=lambda: self.now,
        )

    def taken(self) -> tuple[Submitted, Claim]:
        submitted = self.world.submit()
        [pending] = [one for one in self.world.mirror.refresh() if one.nonce == submitted.nonce]
        return submitted, self.world.claim(pending)

    def entry(self, submitted: Submitted, files: dict[str, bytes] = FILES) -> Entry:
        result = self.world.result(self.world.asked(submitted), files)
        return Entry(submitted.nonce, submitted.commit, submitted.ref, result, None, files)

    def flush(self) -> int:
        self.world.mirror.refresh()
        return self.outbox.flush(self.world.mirror.claims, frozenset({RUNNER.session}))

    def flush_for(self, nonce: str, tries: int) -> list[float]:
        """Flush so often, each time as soon as it may be tried again; the pauses before."""
        pauses = []
        for _ in range(tries):
            began = self.now
            while not self.later.is_due(nonce):
                self.now += 1.0
            pauses.append(self.now - began)
            self.flush()
        return pauses


def answer(world: World, submitted: Submitted) -> Believed:
    found = fetch(world.git, world.remote, resolve_handle(world.git, world.remote, submitted.nonce))
    assert found is not None
    return believe(found, trusted=Path("/nonexistent"))


@pytest.fixture
def post(world: World) -> Post:
    return Post(world)


def left(post: Post) -> set[str]:
    """The bridge's refs on the remote beside branches."""
    return {ref for ref in post.world.house.remote_refs() if ref.startswith("refs/mac-bridge/")}


@pytest.mark.sampled(6, 3)
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("untouched", [True, False], ids=["at once", "after a look"])
def test_a_mirror_that_breaks_meanwhile_costs_a_moment_and_no_result(
    post: Post, how: str, untouched: bool
) -> None:
    submitted, claim = post.taken()
    git = post.world.mirror.git
    assert git.exists(submitted.commit)  # its reader, which knows the objects, outlives them
    assert git.files(submitted.commit)
    DAMAGE[how](git.directory)
    began = time.monotonic()
    post.outbox.send(post.entry(submitted), claim, untouched=untouched)
    assert time.monotonic() - began < 10, "the pauses of a network that fails are longer"
    assert dict(answer(post.world, submitted).files) == FILES
    assert post.outbox.nonces() == set()
    assert left(post) == set()
    assert post.world.mirror.refresh() == []


@pytest.mark.slow
def test_a_broken_mirror_and_a_remote_that_is_away_keep_the_result(post: Post) -> None:
    submitted, claim = post.taken()
    shutil.rmtree(post.world.mirror.git.directory)
    away = post.world.house.remote.with_name("away.git")
    post.world.house.remote.rename(away)
    post.outbox.send(post.entry(submitted), claim, untouched=True)
    assert post.outbox.nonces() == {submitted.nonce}
    away.rename(post.world.house.remote)
    post.now += MAX_PAUSE_S
    assert post.flush() == 1
    assert dict(answer(post.world, submitted).files) == FILES


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("hook", "script", "words"),
    [
        pytest.param("pre-receive", TOO_LARGE, "a file is too large here", id="too large"),
        pytest.param("update", BAD_NAME, "no logs are taken", id="a name it dislikes"),
    ],
)
def test_a_result_that_is_never_taken_is_answered_for_by_a_bare_one(
    post: Post, hook: str, script: str, words: str
) -> None:
    post.world.hook(hook, script)
    submitted, claim = post.taken()
    whole = post.entry(submitted, LARGE)
    post.outbox.send(whole, claim, untouched=True)
    assert submitted.nonce in post.outbox
    pauses = post.flush_for(submitted.nonce, REJECTIONS)
    assert pauses == sorted(pauses)
    assert len(set(pauses)) == REJECTIONS
    assert submitted.nonce in post.outbox, "a server's bad minutes pass"
    post.now += PATIENCE_S
    assert post.flush() == 1
    found = answer(post.world, submitted).result
    assert (found.verdict.status, found.verdict.reason) == (Status.FAILED, Reason.RUNNER_ERROR)
    assert "passed/ok" in found.verdict.message
    assert words in found.verdict.message
    assert found.files == ()
    assert left(post) == set()
    assert post.outbox.nonces() == set()
    assert submitted.nonce in post.ledger.nonces
    aside = post.folder / "spool" / f"unusable-{submitted.nonce}"
    assert str(aside) in post.said[-1]
    assert (aside / "result.json").read_bytes() == whole.result
    assert LARGE["logs/run.log"] in [path.read_bytes() for path in (aside / "files").iterdir()]


@pytest.mark.slow
def test_others_are_sent_beside_one_that_is_not_taken(post: Post) -> None:
    post.world.hook("pre-receive", TOO_LARGE)
    large, claim = post.taken()
    post.outbox.send(post.entry(large, LARGE), claim, untouched=True)
    small, claim = post.taken()
    post.outbox.send(post.entry(small), claim, untouched=True)
    assert post.outbox.nonces() == {large.nonce}
    assert dict(answer(post.world, small).files) == FILES


@pytest.mark.slow
def test_a_server_that_takes_nothing_at_the_moment_gets_the_whole_result_later(post: Post) -> None:
    submitted, claim = post.taken()
    post.world.hook("pre-receive", "echo maintenance; exit 1")
    post.outbox.send(post.entry(submitted), claim, untouched=True)
    pauses = post.flush_for(submitted.nonce, 2 * REJECTIONS)
    assert len(pauses) == 2 * REJECTIONS
    assert max(pauses) <= MAX_PAUSE_S
    (post.world.house.remote / "hooks" / "pre-receive").unlink()
    post.now += MAX_PAUSE_S
    assert post.flush() == 1
    assert dict(answer(post.world, submitted).files) == FILES
    assert list((post.folder / "spool").iterdir()) == []


@pytest.mark.exhaustive
def test_where_not_even_a_bare_result_is_taken_it_is_said_once_and_nothing_is_lost(post: Post) -> None:
    post.world.hook("update", NO_RESULT)
    submitted, claim = post.taken()
    post.outbox.send(post.entry(submitted), claim, untouched=True)
    post.flush_for(submitted.nonce, REJECTIONS)
    post.now += PATIENCE_S
    pauses = post.flush_for(submitted.nonce, 5)
    assert pauses[-1] > MAX_PAUSE_S
    assert max(pauses) <= LONGEST_PAUSE_S
    assert len([line for line in post.said if "not even a bare result" in line]) == 1
    assert "not even a bare result" in post.said[-1]
    assert refs.claim_ref(submitted.nonce) in left(post), "nobody else need try it"
    (post.world.house.remote / "hooks" / "update").unlink()
    post.now += LONGEST_PAUSE_S
    assert post.flush() == 1
    assert dict(answer(post.world, submitted).files) == FILES
    assert list((post.folder / "spool").iterdir()) == []


class Killed(BaseException):
    """What a test ends a runner with."""


@pytest.mark.slow
def test_a_runner_killed_just_after_the_bare_result_was_taken_still_has_the_whole_one(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.world.hook("pre-receive", TOO_LARGE)
    submitted, claim = post.taken()
    whole = post.entry(submitted, LARGE)
    post.outbox.send(whole, claim, untouched=True)

    def killed(nonce: str, _: str | None) -> None:
        raise Killed(nonce)

    monkeypatch.setattr(post.ledger, "add", killed)
    post.flush_for(submitted.nonce, REJECTIONS)
    post.now += PATIENCE_S
    with pytest.raises(Killed):
        post.flush()
    post.begin()
    assert post.flush() == 1
    assert answer(post.world, submitted).result.verdict.reason is Reason.RUNNER_ERROR
    aside = post.folder / "spool" / f"unusable-{submitted.nonce}"
    assert (aside / "result.json").read_bytes() == whole.result
    assert post.outbox.nonces() == set()


def foreign(post: Post) -> tuple[Submitted, Claim]:
    """A request of which a result of ours is in the spool, and the claim is another machine's now."""
    submitted = post.world.submit()
    [pending] = post.world.mirror.refresh()
    post.spool.put(post.entry(submitted))
    return submitted, post.world.claim(pending, OTHER)


THEIRS = {"report.json": b"of the other\n"}


def test_a_spooled_result_beside_a_foreign_claim_is_the_one_that_stands(post: Post) -> None:
    submitted, theirs = foreign(post)
    assert post.flush() == 1
    assert post.outbox.nonces() == set()
    with pytest.raises(LeaseLost):
        post.world.answer(submitted, held=theirs, files=THEIRS)
    assert dict(answer(post.world, submitted).files) == FILES
    assert refs.result_ref(submitted.nonce) not in post.world.house.remote_refs()


def test_a_spooled_result_after_a_foreign_one_is_too_late_and_goes(post: Post) -> None:
    submitted, theirs = foreign(post)
    post.world.answer(submitted, held=theirs, files=THEIRS)
    before = post.world.house.git("show-ref", cwd=post.world.house.remote)
    assert post.flush() == 1
    assert "not published" in post.said[-1]
    assert list((post.folder / "spool").iterdir()) == []
    assert post.world.house.git("show-ref", cwd=post.world.house.remote) == before
    assert dict(answer(post.world, submitted).files) == THEIRS


def lock_of(post: Post, ref: str) -> Path:
    """The lock that a server leaves on a ref when it dies in the middle of a push."""
    path = post.world.house.remote / f"{ref}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("untouched", [True, False], ids=["at once", "after a look"])
def test_a_lock_that_stays_on_the_branch_is_gone_around(post: Post, untouched: bool) -> None:
    submitted, claim = post.taken()
    lock_of(post, submitted.ref).touch()
    post.outbox.send(post.entry(submitted), claim, untouched=untouched)
    assert dict(answer(post.world, submitted).files) == FILES
    assert left(post) == {refs.result_ref(submitted.nonce)}
    assert post.outbox.nonces() == set()


@pytest.mark.slow
def test_a_lock_that_stays_on_the_claim_does_not_keep_the_result(post: Post) -> None:
    submitted, claim = post.taken()
    lock_of(post, claim.ref).touch()
    post.outbox.send(post.entry(submitted), claim, untouched=True)
    assert dict(answer(post.world, submitted).files) == FILES
    assert left(post) == {claim.ref}
    assert post.world.mirror.refresh() == []


@pytest.mark.slow
def test_what_is_locked_where_nothing_else_will_do_is_kept_and_not_thrown_away(post: Post) -> None:
    submitted, claim = post.taken()
    lock = lock_of(post, refs.inbox_ref(submitted.nonce))
    lock.touch()
    post.outbox.send(post.entry(submitted), claim, untouched=True)
    assert post.outbox.nonces() == {submitted.nonce}
    assert "kept for later" in post.said[-1]
    lock.unlink()
    post.now += MAX_PAUSE_S
    assert post.flush() == 1
    assert dict(answer(post.world, submitted).files) == FILES
    assert left(post) == set()


def test_where_the_server_declines_to_move_the_branch_the_result_stands_beside_it(post: Post) -> None:
    post.world.hook("update", ONLY_NEW_BRANCHES)
    submitted, claim = post.taken()
    post.outbox.send(post.entry(submitted), claim, untouched=True)
    assert dict(answer(post.world, submitted).files) == FILES
    assert left(post) == {refs.result_ref(submitted.nonce)}
    assert post.outbox.nonces() == set()
    assert post.world.mirror.refresh() == []


@pytest.mark.slow
def test_a_result_that_the_server_dies_on_holds_up_no_other(post: Post) -> None:
    deadly, claim = post.taken()
    post.world.hook(
        "update",
        f'case "$1" in *results/{deadly.nonce}|{deadly.ref}) kill -9 $PPID;; esac\nexit 0',
    )
    post.outbox.send(post.entry(deadly), claim, untouched=True)
    post.flush_for(deadly.nonce, REJECTIONS)
    post.now += PATIENCE_S
    assert post.flush() == 0
    assert "not even a bare result" in post.said[-1]
    other, claim = post.taken()
    post.outbox.send(post.entry(other), claim, untouched=True)
    assert dict(answer(post.world, other).files) == FILES
    (post.world.house.remote / "hooks" / "update").unlink()
    post.now += LONGEST_PAUSE_S
    assert post.flush() == 1
    assert dict(answer(post.world, deadly).files) == FILES


@pytest.mark.slow
def test_a_workload_with_a_huge_folder_in_the_results_place_costs_no_mirror(post: Post) -> None:
    house = post.world.house
    blob = house.git("hash-object", "-w", "--stdin", cwd=house.clone, input="x")
    rows = "".join(f"100644 blob {blob}\tz{number:07}{'y' * 240}\n" for number in range(64_000))
    huge = house.git("mktree", cwd=house.clone, input=rows)
    ours = house.git("mktree", cwd=house.clone, input=f"040000 tree {huge}\tresults\n")
    root = house.git("mktree", cwd=house.clone, input=f"040000 tree {ours}\t.mac-bridge\n")
    who = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
    workload = house.git(*who, "commit-tree", root, "-m", "a workload", cwd=house.clone)
    submitted = post.world.submit(workload_sha=workload)
    [pending] = post.world.mirror.refresh()
    made = (post.world.mirror.git.directory / "HEAD").stat().st_ino
    result = post.world.result(Asked(submitted.nonce, submitted.commit, workload), FILES)
    entry = Entry(submitted.nonce, submitted.commit, submitted.ref, result, None, FILES)
    post.outbox.send(entry, post.world.claim(pending), untouched=True)
    assert left(post) == {refs.result_ref(submitted.nonce)}, post.said
    assert post.outbox.nonces() == set()
    assert (post.world.mirror.git.directory / "HEAD").stat().st_ino == made, "the mirror was made again"
