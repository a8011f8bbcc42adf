"""A result gets to the server, or something in its place does, and no result is lost on this disk."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge.bus.claims import Claim, RunnerIdentity
from bridge.bus.publish import ResultFiles
from bridge.bus.requests import Submitted, resolve_handle
from bridge.bus.results import ExpectedRequest, believe, fetch
from bridge.errors import LeaseLost, MachineError
from bridge.protocol import refs
from bridge.protocol.result import Reason, Result, Status
from bridge.runner.publisher import LONGEST_PAUSE_S, MAX_REJECTIONS, PATIENCE_S, Publisher
from bridge.runner.store import LONGEST_PAUSE_S as LONGEST_RETRY_S
from bridge.runner.store import Store
from tests.bridge.git.damage import DAMAGE
from tests.bridge.runner.bench import Bench
from tests.worlds import FILES, RUNNER, World

OTHER = RunnerIdentity("other", "f" * 16, "00000000000000bb")
LARGE = {**FILES, "logs/run.log": os.urandom(200_000)}
THEIRS = {"report.json": b"of the other\n"}
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
NO_RESULT = BAD_NAME.replace("run.log", "results/")
ONLY_NEW_BRANCHES = """
case "$1 $2" in
  "refs/heads/"*" 0000000000000000000000000000000000000000") ;;
  "refs/heads/"*) echo "branches are made here, and not moved"; exit 1;;
esac
"""


class Killed(BaseException):
    """What a test ends a runner with."""


class Post:
    """One runner's publisher on one remote, with a clock that is turned by hand."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = datetime.now(UTC).timestamp()
        self.config = Bench(world.house).config_of()
        self.begin()

    def begin(self) -> None:
        """As a new process of the same runner does."""
        self.store = Store(self.config.folder / "store.sqlite", clock=lambda: self.now)
        sessions = frozenset({RUNNER.session})
        self.publisher = Publisher(self.config, self.world.cache, self.store, sessions=sessions)

    def claimed(self, identity: RunnerIdentity = RUNNER) -> tuple[Submitted, Claim]:
        submitted = self.world.submit()
        self.world.bring(submitted)
        return submitted, self.world.claim(submitted, identity)

    def result(self, submitted: Submitted, files: dict[str, bytes] = FILES) -> ResultFiles:
        data = self.world.result(self.world.expected(submitted), files)
        return ResultFiles(submitted.nonce, submitted.commit, submitted.ref, data, None, files)

    def publish(
        self, submitted: Submitted, claim: Claim, files: dict[str, bytes] = FILES, *, untouched: bool = True
    ) -> ResultFiles:
        result = self.result(submitted, files)
        self.publisher.publish(result, claim, untouched=untouched)
        return result

    def flush(self, *, after: float = 0.0) -> None:
        self.now += after
        self.publisher.flush(self.world.cache.list_remote("refs/"))

    def flush_for(self, nonce: str, tries: int) -> list[float]:
        """Flush so often, each time as soon as it may be tried again; the pauses before."""
        pauses = []
        for _ in range(tries):
            pause = max(0.0, (self.store.get(nonce).not_before or self.now) - self.now)
            pauses.append(pause)
            self.flush(after=pause)
        return pauses

    def files(self, submitted: Submitted) -> dict[str, bytes]:
        return dict(self._believed(submitted).files)

    def answer(self, submitted: Submitted) -> Result:
        return self._believed(submitted).result

    def _believed(self, submitted: Submitted):  # type: ignore[no-untyped-def]
        state = resolve_handle(self.world.git, self.world.remote, submitted.nonce)
        found = fetch(self.world.git, self.world.remote, state)
        assert found is not None
        return believe(found, trusted=Path("/nonexistent"))

    def left(self) -> set[str]:
        """The bridge's refs on the remote other than branches."""
        return {ref for ref in self.world.house.remote_refs() if ref.startswith("refs/mac-bridge/")}

    def unpublished(self, submitted: Submitted) -> dict[str, bytes]:
        folder = self.config.folder / "unpublished" / submitted.nonce
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }


@pytest.fixture
def post(world: World) -> Post:
    return Post(world)


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("untouched", [True, False], ids=["at once", "after a look"])
def test_damaged_cache_costs_a_moment_and_no_result(post: Post, how: str, untouched: bool) -> None:
    submitted, claim = post.claimed()
    assert post.world.cache.exists(submitted.commit)  # its reader, which knows the objects, outlives them
    DAMAGE[how](post.world.cache.directory)
    post.publish(submitted, claim, untouched=untouched)
    if post.publisher.waiting():
        post.flush_for(submitted.nonce, 1)
    assert post.files(submitted) == FILES
    assert post.publisher.waiting() == set()
    assert post.left() == set()


@pytest.mark.slow
def test_result_is_kept_while_the_remote_is_away(post: Post) -> None:
    submitted, claim = post.claimed()
    shutil.rmtree(post.world.cache.directory)
    away = post.world.house.remote.with_name("away.git")
    post.world.house.remote.rename(away)
    post.publish(submitted, claim)
    assert post.publisher.waiting() == {submitted.nonce}
    away.rename(post.world.house.remote)
    post.begin()
    post.flush(after=LONGEST_RETRY_S)
    assert post.files(submitted) == FILES
    assert post.left() == set()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("hook", "script", "words"),
    [
        pytest.param("pre-receive", TOO_LARGE, "a file is too large here", id="too large"),
        pytest.param("update", BAD_NAME, "no logs are taken", id="a name it dislikes"),
    ],
)
def test_result_that_is_never_taken_is_replaced_by_one_without_files(
    post: Post, hook: str, script: str, words: str
) -> None:
    post.world.hook(hook, script)
    submitted, claim = post.claimed()
    whole = post.publish(submitted, claim, LARGE)
    pauses = post.flush_for(submitted.nonce, MAX_REJECTIONS)
    assert pauses == sorted(pauses)
    assert submitted.nonce in post.publisher.waiting(), "a server's bad minutes pass"
    small, other = post.claimed()
    post.publish(small, other, {"report.json": b"{}\n"})
    assert post.files(small) == {"report.json": b"{}\n"}
    post.flush(after=PATIENCE_S)
    found = post.answer(submitted)
    assert (found.verdict.status, found.verdict.reason) == (Status.FAILED, Reason.RUNNER_ERROR)
    assert "passed/ok" in found.verdict.message
    assert words in found.verdict.message
    assert found.files == ()
    assert post.left() == set()
    assert post.publisher.waiting() == set()
    assert post.store.is_answered(submitted.nonce)
    assert post.unpublished(submitted) == {**LARGE, "result.json": whole.result}


@pytest.mark.slow
def test_server_in_maintenance_gets_the_whole_result_later(post: Post) -> None:
    submitted, claim = post.claimed()
    post.world.hook("pre-receive", "echo maintenance; exit 1")
    post.publish(submitted, claim)
    pauses = post.flush_for(submitted.nonce, 2 * MAX_REJECTIONS)
    assert max(pauses) <= LONGEST_RETRY_S
    (post.world.house.remote / "hooks" / "pre-receive").unlink()
    post.flush(after=LONGEST_RETRY_S)
    assert post.files(submitted) == FILES
    assert post.publisher.waiting() == set()


@pytest.mark.exhaustive
def test_server_that_takes_no_result_at_all_costs_none(post: Post) -> None:
    post.world.hook("update", NO_RESULT)
    submitted, claim = post.claimed()
    post.publish(submitted, claim)
    post.flush_for(submitted.nonce, MAX_REJECTIONS)
    post.now += PATIENCE_S
    assert LONGEST_RETRY_S < max(post.flush_for(submitted.nonce, 5)) <= LONGEST_PAUSE_S
    assert refs.claim_ref(submitted.nonce) in post.left(), "no other runner need try it"
    (post.world.house.remote / "hooks" / "update").unlink()
    post.flush(after=LONGEST_PAUSE_S)
    assert post.files(submitted) == FILES
    assert post.publisher.waiting() == set()


@pytest.mark.slow
def test_runner_killed_after_the_replacement_still_has_the_whole_result(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.world.hook("pre-receive", TOO_LARGE)
    submitted, claim = post.claimed()
    whole = post.publish(submitted, claim, LARGE)

    def killed(*_: object, **__: object) -> None:
        raise Killed

    post.flush_for(submitted.nonce, MAX_REJECTIONS)
    monkeypatch.setattr(post.store, "answer", killed)
    with pytest.raises(Killed):
        post.flush(after=PATIENCE_S)
    post.begin()
    post.flush()
    assert post.answer(submitted).verdict.reason is Reason.RUNNER_ERROR
    assert post.unpublished(submitted)["result.json"] == whole.result
    assert post.publisher.waiting() == set()


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_first_of_two_results_is_the_one(post: Post, first: str) -> None:
    """Ours waits here, and the claim is another machine's now."""
    submitted, theirs = post.claimed(OTHER)
    post.store.keep(post.result(submitted))
    if first == "ours":
        post.flush()
        with pytest.raises(LeaseLost):
            post.world.answer(submitted, held=theirs, files=THEIRS)
    else:
        post.world.answer(submitted, held=theirs, files=THEIRS)
        before = post.world.house.git("show-ref", cwd=post.world.house.remote)
        post.flush()
        assert post.world.house.git("show-ref", cwd=post.world.house.remote) == before
    assert post.files(submitted) == (FILES if first == "ours" else THEIRS)
    assert post.publisher.waiting() == set()
    assert post.store.is_answered(submitted.nonce)
    assert refs.result_ref(submitted.nonce) not in post.left()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("locked", ["branch", "branch, after a look", "claim", "inbox"])
def test_lock_that_a_dying_server_left_is_worked_around(post: Post, locked: str) -> None:
    submitted, claim = post.claimed()
    inbox = refs.inbox_ref(submitted.nonce)
    ref = {"claim": claim.ref, "inbox": inbox}.get(locked, submitted.ref)
    lock = post.world.house.remote / f"{ref}.lock"
    lock.touch()
    post.publish(submitted, claim, untouched="look" not in locked)
    if locked == "inbox":  # it must go with the result: else there might be two
        assert post.publisher.waiting() == {submitted.nonce}
        lock.unlink()
        post.flush(after=LONGEST_RETRY_S)
    assert post.files(submitted) == FILES
    place = {refs.result_ref(submitted.nonce)}
    assert post.left() == {"claim": {claim.ref}, "inbox": set()}.get(locked, place)
    assert post.publisher.waiting() == set()


def test_branch_that_may_not_move_leaves_the_result_next_to_it(post: Post) -> None:
    post.world.hook("update", ONLY_NEW_BRANCHES)
    submitted, claim = post.claimed()
    post.publish(submitted, claim)
    assert post.files(submitted) == FILES
    assert post.left() == {refs.result_ref(submitted.nonce)}
    assert post.publisher.waiting() == set()


@pytest.mark.slow
def test_result_that_the_server_dies_on_holds_up_no_other(post: Post) -> None:
    deadly, claim = post.claimed()
    post.world.hook(
        "update", f'case "$1" in *results/{deadly.nonce}|{deadly.ref}) kill -9 $PPID;; esac\nexit 0'
    )
    post.publish(deadly, claim)
    other, claim = post.claimed()
    post.publish(other, claim)
    assert post.files(other) == FILES
    post.flush_for(deadly.nonce, MAX_REJECTIONS)
    post.flush(after=PATIENCE_S)
    (post.world.house.remote / "hooks" / "update").unlink()
    post.flush(after=LONGEST_PAUSE_S)
    assert post.files(deadly) == FILES


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("fault", ["another branch", "no result", "an unknown commit"])
def test_unusable_result_goes_to_a_folder_and_moves_no_other_ref(post: Post, fault: str) -> None:
    submitted, _ = post.claimed()
    main = post.world.house.git("rev-parse", "main", cwd=post.world.house.remote)
    made = post.result(submitted)
    changed = {
        "another branch": ("refs/heads/main", made.request_commit, made.result),
        "no result": (made.result_ref, made.request_commit, b'{"nonce": 1e999}'),
        "an unknown commit": (made.result_ref, "12" * 20, made.result),
    }[fault]
    ref, commit, data = changed
    post.store.keep(ResultFiles(made.nonce, commit, ref, data, None, made.files))
    post.flush()
    assert post.world.house.git("rev-parse", "main", cwd=post.world.house.remote) == main
    assert post.publisher.waiting() == set()
    if fault != "an unknown commit":  # that one is published, as a result that fits no request
        assert post.unpublished(submitted)["result.json"] == data


@pytest.mark.slow
def test_result_that_neither_disk_nor_server_takes_is_kept_in_memory(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MachineError("the disk is full")

    hook = post.world.house.remote / "hooks" / "update"
    submitted, claim = post.claimed()
    post.world.hook("update", NO_RESULT)
    with monkeypatch.context() as disk:
        for name in ("keep", "back_off", "note_rejection"):
            disk.setattr(post.store, name, full)
        post.publish(submitted, claim)
        post.flush()
    assert post.publisher.waiting() == {submitted.nonce}
    hook.unlink()
    post.flush()
    assert post.files(submitted) == FILES


@pytest.mark.slow
def test_workload_with_a_huge_folder_in_the_place_of_results(post: Post) -> None:
    house = post.world.house
    blob = house.git("hash-object", "-w", "--stdin", cwd=house.clone, input="x")
    rows = "".join(f"100644 blob {blob}\tz{number:07}{'y' * 240}\n" for number in range(64_000))
    huge = house.git("mktree", cwd=house.clone, input=rows)
    ours = house.git("mktree", cwd=house.clone, input=f"040000 tree {huge}\tresults\n")
    root = house.git("mktree", cwd=house.clone, input=f"040000 tree {ours}\t.mac-bridge\n")
    who = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
    workload = house.git(*who, "commit-tree", root, "-m", "a workload", cwd=house.clone)
    submitted = post.world.submit(workload_sha=workload)
    post.world.bring(submitted)
    claim = post.world.claim(submitted)
    made = (post.world.cache.directory / "HEAD").stat().st_ino
    data = post.world.result(ExpectedRequest(submitted.nonce, submitted.commit, workload), FILES)
    result = ResultFiles(submitted.nonce, submitted.commit, submitted.ref, data, None, FILES)
    post.publisher.publish(result, claim, untouched=True)
    assert post.left() == {refs.result_ref(submitted.nonce)}
    assert post.publisher.waiting() == set()
    assert (post.world.cache.directory / "HEAD").stat().st_ino == made, "the cache was rebuilt"
