"""A result gets to the server, or something in its place does, and no result is lost on this disk."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge.bus.claims import Claim, RunnerIdentity
from bridge.bus.publish import ResultFiles, publish
from bridge.bus.requests import RefValue, Submitted, resolve_handle
from bridge.bus.results import believe, fetch
from bridge.errors import LeaseLost
from bridge.protocol import refs
from bridge.protocol.result import Reason, Result, Status
from bridge.runner.publisher import MAX_TRIES, Publisher
from bridge.runner.store import LONGEST_PAUSE_S, Store
from tests.fixtures.bus import FILES, RUNNER, BusFixture
from tests.fixtures.runner import RunnerFixture

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
git ls-tree -r --name-only "$3" | grep -q run.log && { echo "no logs are allowed"; exit 1; }
exit 0
"""
ONLY_NEW_BRANCHES = """
case "$1 $2" in
  "refs/heads/"*" 0000000000000000000000000000000000000000") ;;
  "refs/heads/"*) echo "branches are made here, and not moved"; exit 1;;
esac
"""


class Post:
    """One runner's publisher on one remote, with a clock that is turned by hand."""

    def __init__(self, bus: BusFixture) -> None:
        self.bus = bus
        self.now = datetime.now(UTC).timestamp()
        self.config = RunnerFixture(bus.repo).config_of()
        self.begin()

    def begin(self) -> None:
        """As a new process of the same runner does."""
        self.store = Store(self.config.folder / "store.sqlite", clock=lambda: self.now)
        sessions = frozenset({RUNNER.session})
        self.publisher = Publisher(self.config, self.bus.cache, self.store, sessions=sessions)

    def claimed(self, identity: RunnerIdentity = RUNNER) -> tuple[Submitted, Claim]:
        submitted = self.bus.submit()
        self.bus.bring(submitted)
        return submitted, self.bus.claim(submitted, identity)

    def result(self, submitted: Submitted, files: dict[str, bytes] = FILES) -> ResultFiles:
        data = self.bus.result(self.bus.expected(submitted), files)
        return ResultFiles(submitted.nonce, submitted.commit, submitted.ref, data, None, files)

    def publish(
        self, submitted: Submitted, claim: Claim, files: dict[str, bytes] = FILES, *, untouched: bool = True
    ) -> ResultFiles:
        result = self.result(submitted, files)
        self.publisher.publish(result, claim, untouched=untouched)
        return result

    def flush(self, *, after: float = 0.0) -> None:
        self.now += after
        self.publisher.flush(self.bus.cache.list_remote("refs/"))

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
        state = resolve_handle(self.bus.git, self.bus.remote, submitted.nonce)
        found = fetch(self.bus.git, self.bus.remote, state)
        assert found is not None
        return believe(found, trusted=Path("/nonexistent"))

    def left(self) -> set[str]:
        """The bridge's refs on the remote other than branches."""
        return {ref for ref in self.bus.repo.remote_refs() if ref.startswith("refs/mac-bridge/")}

    def unpublished(self, submitted: Submitted) -> dict[str, bytes]:
        folder = self.config.folder / "unpublished" / submitted.nonce
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }


@pytest.fixture
def post(bus: BusFixture, monkeypatch: pytest.MonkeyPatch) -> Post:
    monkeypatch.setattr("bridge.bus.publish._FIRST_PAUSE_S", 0.001)
    return Post(bus)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("hook", "script", "words"),
    [
        pytest.param("pre-receive", TOO_LARGE, "a file is too large here", id="too large"),
        pytest.param("update", BAD_NAME, "no logs are allowed", id="a name it dislikes"),
    ],
)
def test_result_that_is_always_rejected_is_replaced_without_files(
    post: Post, hook: str, script: str, words: str
) -> None:
    post.bus.hook(hook, script)
    submitted, claim = post.claimed()
    whole = post.publish(submitted, claim, LARGE)
    pauses = post.flush_for(submitted.nonce, MAX_TRIES - 1)
    assert pauses == sorted(pauses)
    assert sum(pauses) > 600
    assert submitted.nonce in post.publisher.waiting(), "a server's bad minutes pass"
    post.begin()  # a restart forgets no refusal
    small, other = post.claimed()
    post.publish(small, other, {"report.json": b"{}\n"})
    assert post.files(small) == {"report.json": b"{}\n"}
    post.flush(after=LONGEST_PAUSE_S)
    found = post.answer(submitted)
    assert (found.verdict.status, found.verdict.reason) == (Status.FAILED, Reason.RUNNER_ERROR)
    assert "passed/ok" in found.verdict.message
    assert words in found.verdict.message
    assert found.files == ()
    assert post.left() == set()
    assert post.publisher.waiting() == set()
    assert post.store.get(submitted.nonce).answered_at
    assert post.unpublished(submitted) == {**LARGE, "result.json": whole.result}


@pytest.mark.slow
def test_server_in_maintenance_gets_the_whole_result_later(post: Post) -> None:
    submitted, claim = post.claimed()
    post.bus.hook("pre-receive", "echo maintenance; exit 1")
    post.publish(submitted, claim)
    pauses = post.flush_for(submitted.nonce, 2 * MAX_TRIES)
    assert max(pauses) <= LONGEST_PAUSE_S
    (post.bus.repo.remote / "hooks" / "pre-receive").unlink()
    post.flush(after=LONGEST_PAUSE_S)
    assert post.files(submitted) == FILES
    assert post.publisher.waiting() == set()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_first_of_two_results_is_the_one(post: Post, first: str) -> None:
    """Ours waits here, and the claim is another machine's now."""
    submitted, theirs = post.claimed(OTHER)
    post.store.keep(post.result(submitted))
    if first == "ours":
        post.flush()
        with pytest.raises(LeaseLost):
            post.bus.answer(submitted, held=theirs, files=THEIRS)
    else:
        post.bus.answer(submitted, held=theirs, files=THEIRS)
        before = post.bus.repo.git("show-ref", cwd=post.bus.repo.remote)
        post.flush()
        assert post.bus.repo.git("show-ref", cwd=post.bus.repo.remote) == before
    assert post.files(submitted) == (FILES if first == "ours" else THEIRS)
    assert post.publisher.waiting() == set()
    assert post.store.get(submitted.nonce).answered_at
    assert refs.RESULTS + submitted.nonce not in post.left()


def test_result_that_comes_second_gives_its_claim_back(post: Post) -> None:
    """The other runner's push began before our claim."""
    submitted, claim = post.claimed()
    publish(post.bus.cache, post.bus.remote, post.result(submitted, THEIRS), claim=None)
    assert post.left() == {claim.ref}
    post.publish(submitted, claim)
    assert post.left() == set()
    assert post.files(submitted) == THEIRS


def test_branch_that_may_not_move_leaves_the_result_next_to_it(post: Post) -> None:
    post.bus.hook("update", ONLY_NEW_BRANCHES)
    submitted, claim = post.claimed()
    post.publish(submitted, claim)
    assert post.files(submitted) == FILES
    assert post.left() == {refs.RESULTS + submitted.nonce}
    assert post.publisher.waiting() == set()


@pytest.mark.slow
def test_result_that_the_server_dies_on_holds_up_no_other(post: Post) -> None:
    deadly, claim = post.claimed()
    post.bus.hook(
        "update", f'case "$1" in *results/{deadly.nonce}|{deadly.ref}) kill -9 $PPID;; esac\nexit 0'
    )
    post.publish(deadly, claim)
    other, claim = post.claimed()
    post.publish(other, claim)
    assert post.files(other) == FILES
    post.flush_for(deadly.nonce, MAX_TRIES - 1)
    post.flush(after=LONGEST_PAUSE_S)
    (post.bus.repo.remote / "hooks" / "update").unlink()
    post.flush(after=LONGEST_PAUSE_S)
    assert post.files(deadly) == FILES


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("fault", ["another branch", "no result"])
def test_unusable_result_moves_no_other_ref(post: Post, fault: str) -> None:
    submitted, _ = post.claimed()
    main = post.bus.repo.git("rev-parse", "main", cwd=post.bus.repo.remote)
    made = post.result(submitted)
    changed = {
        "another branch": ("refs/heads/main", made.request_commit, made.result),
        "no result": (made.result_ref, made.request_commit, b'{"nonce": 1e999}'),
    }[fault]
    ref, commit, data = changed
    post.store.keep(ResultFiles(made.nonce, commit, ref, data, None, made.files))
    post.flush()
    assert post.bus.repo.git("rev-parse", "main", cwd=post.bus.repo.remote) == main


DAMAGE = {
    "result.json": "UPDATE result SET body = replace(body, 'nonce', 'nonxe')",
    "its type": "UPDATE result SET body = 'text'",
    "a file": "UPDATE file SET data = X'00'",
    "a missing file": "DELETE FROM file WHERE path = 'report.json'",
    "its request": "UPDATE result SET request_commit = CAST(X'FF' AS TEXT)",
    "its branch": "UPDATE result SET result_ref = CAST(X'FF' AS TEXT)",
}


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_kept_result_that_the_disk_damaged_is_not_published(post: Post, damage: str) -> None:
    """Its request runs again, and other results are pushed."""
    submitted, _ = post.claimed()
    post.store.keep(post.result(submitted))
    with post.store._transaction() as database:
        database.execute(damage)
    other, _ = post.claimed()
    post.store.keep(post.result(other))
    post.flush()
    assert post.publisher.waiting() == set()
    assert post.files(other) == FILES
    assert refs.INBOX + submitted.nonce in post.left()


def test_result_is_kept_until_the_remote_holds_one(post: Post) -> None:
    """Another runner's claim, which may die, is no result."""
    submitted, claim = post.claimed()
    post.bus.claim(submitted, OTHER, replaces=RefValue(claim.ref, claim.commit))
    post.publish(submitted, claim)
    assert post.publisher.waiting() == {submitted.nonce}
    post.flush(after=LONGEST_PAUSE_S)
    assert post.files(submitted) == FILES


@pytest.mark.slow
def test_outage_does_not_count_as_refusals(post: Post) -> None:
    """After however many failures, a server that refuses once gets the whole result the next time."""
    submitted, claim = post.claimed()
    remote = post.bus.repo.remote
    away = remote.with_name("away")
    remote.rename(away)
    post.publish(submitted, claim)
    for _ in range(MAX_TRIES + 1):
        post.now += LONGEST_PAUSE_S
        post.publisher.flush({})
    away.rename(remote)
    post.bus.hook("update", 'case "$1" in *claims/*) exit 0;; *) echo maintenance; exit 1;; esac')
    post.flush(after=LONGEST_PAUSE_S)
    (remote / "hooks" / "update").unlink()
    post.flush(after=LONGEST_PAUSE_S)
    assert post.files(submitted) == FILES


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("locked", ["branch", "claim"])
def test_ref_that_a_killed_server_left_locked_keeps_no_result(post: Post, locked: str) -> None:
    submitted, claim = post.claimed()
    (post.bus.repo.remote / f"{claim.ref if locked == 'claim' else submitted.ref}.lock").touch()
    post.publish(submitted, claim)
    post.flush(after=LONGEST_PAUSE_S)
    assert post.publisher.waiting() == set()
    assert post.files(submitted) == FILES
    assert refs.INBOX + submitted.nonce not in post.left()


@pytest.mark.slow
def test_disk_that_is_full_for_a_refused_result_holds_up_no_other(post: Post) -> None:
    refused, claim = post.claimed()
    post.bus.hook("update", 'case "$1" in *claims/*) exit 0;; *) echo never; exit 1;; esac')
    post.publish(refused, claim)
    (post.config.folder / "unpublished").write_text("in the way, as a full disk would be")
    post.flush_for(refused.nonce, MAX_TRIES + 2)
    assert post.publisher.waiting() == {refused.nonce}
