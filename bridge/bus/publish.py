"""The answer to a request as one commit on its branch, pushed so that at most one ever stands.

The commit's only difference to the request commit is the folder ``.mac-bridge/results/<nonce>/``; the same
push deletes the inbox ref and the claim. Where the branch was moved or deleted, or the server declines to
move it, the result goes to a ref of its own as a parentless commit. What could not be pushed is the caller's
to keep and bring again: publishing the same bytes twice is harmless.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from bridge.bus import trees
from bridge.bus.claims import Claim
from bridge.bus.git import Git, Update
from bridge.bus.objects import Entry
from bridge.bus.requests import FOLDER, has_result
from bridge.errors import BrokenObject, BusError, LeaseLost, PushRejected, RemoteUnreachable, ResultError
from bridge.protocol import refs
from bridge.protocol.manifest import parse_time
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, RESULT_SIGNATURE_NAME, parse_result

TRAILER = "Result-SHA256"

TRIES = 6
_FIRST_PAUSE_S = 0.5
# After a push that met another one.
_SHORT_PAUSE_S = 0.05
# A push of more than this may take longer than a lease.
_LARGE_BYTES = 1 << 20
# How many commits somebody may have put on top of a result that is still found.
_LONGEST_WALK = 100
_RESULTS_NAME = RESULT_ROOT.removeprefix(f"{FOLDER}/")


@dataclass(frozen=True)
class Published:
    """Where a result stands on the remote."""

    commit: str
    ref: str


@dataclass(frozen=True)
class _Answer:
    """What is to be published, ready to be written as a commit."""

    nonce: str
    request_commit: str
    branch: str | None
    files: Mapping[str, bytes]
    message: str
    when: datetime


def publish(
    git: Git,
    remote: str,
    *,
    request_commit: str,
    nonce: str,
    result_ref: str | None,
    files: Mapping[str, bytes],
    result: bytes,
    signature: bytes | None,
    claim: Claim | None,
    untouched: bool = False,
    tries: int = TRIES,
    sleep: Callable[[float], None] = time.sleep,
) -> Published:
    """Push one result, with backoff while the network fails.

    Args:
        git: A repository that holds the request commit: the runner's mirror.
        remote: Address of the bus.
        request_commit: What is answered.
        nonce: Its name.
        result_ref: The branch the request stands on; None when it is not known (a manifest that cannot be
        read).
        files: Contents by path relative to ``result.json``, as that file lists them.
        result: The exact bytes of ``result.json``.
        signature: Detached signature of `result`.
        claim: What this runner holds; deleted with the same push.
        untouched: The request was seen in the inbox and on its branch, and nobody wished to stop it; where
            that is still so, one push does it without a look first.
        tries: Pushes before giving up.
        sleep: Waits that many seconds.

    Raises:
        ResultError: `result` is not a result, or `result_ref` not a branch of the request.
        Answered: The request has another result.
        Superseded: Its claim is somebody else's now.
        LeaseLost: Refs kept moving, or stay locked; what stands there is no other answer.
        PushRejected: The remote takes the result nowhere.
        RemoteUnreachable: It did not answer in all the tries.
    """
    named = None if result_ref is None else refs.parse_request_ref(result_ref)
    if result_ref is not None and (named is None or named.nonce != nonce):
        raise ResultError(f"{result_ref!r} is not a branch of the request {nonce}")
    parsed = parse_result(result)
    digest = hashlib.sha256(result).hexdigest()
    message = f"kakeya-mac result: {parsed.verdict.status} {nonce} [skip ci]\n\n{TRAILER}: {digest}\n"
    everything = {**files, RESULT_NAME: result}
    if signature is not None:
        everything[RESULT_SIGNATURE_NAME] = signature
    answer = _Answer(nonce, request_commit, result_ref, everything, message, parse_time(parsed.finished_at))
    if has_result(git, request_commit, nonce):
        raise Answered(f"{request_commit[:12]} is no request but an answer to {nonce}")
    with git.scratch() as scratch:
        publisher = _Publisher(git, scratch, remote, answer, claim)
        large = sum(map(len, everything.values())) > _LARGE_BYTES
        if large:
            _hold(claim)
        if untouched and (published := publisher.at_once()) is not None:
            return published
        if not large:
            _hold(claim)
        for attempt in range(tries):
            try:
                return publisher.attempt(last=attempt == tries - 1)
            except (LeaseLost, RemoteUnreachable) as error:
                if isinstance(error, Superseded) or attempt == tries - 1:
                    raise
                first = _FIRST_PAUSE_S if isinstance(error, RemoteUnreachable) else _SHORT_PAUSE_S
                sleep(first * 2**attempt)
    raise ValueError(f"tries must be at least 1, got {tries}")


def _hold(claim: Claim | None) -> None:
    """Keep a claim for as long as the push may take: nothing else renews it any more."""
    if claim is not None:
        with contextlib.suppress(BusError):  # lost or away: the push itself finds that out
            claim.hold()


class Superseded(LeaseLost):
    """Somebody else's result or claim stands, which was looked at; trying again is pointless."""


class Answered(Superseded):
    """It is a result: whoever wrote that, the request ran here and must not run here again."""


class _Publisher:
    """One result on its way. The same answer is the same commit, whoever writes it: see `_already`."""

    def __init__(self, base: Git, scratch: Git, remote: str, answer: _Answer, claim: Claim | None) -> None:
        self._reader = base
        self._git = scratch
        self._remote = remote
        self._answer = answer
        self._claim = claim
        self._commits: dict[bool, str] = {}

    def at_once(self) -> Published | None:
        """One push without a look first, right where nothing has moved; None: something has, or may have."""
        answer, claim = self._answer, self._claim
        if answer.branch is None or claim is None or not self._reader.exists(answer.request_commit):
            return None
        if claim.ref != refs.claim_ref(answer.nonce):
            return None  # another may be in the first place
        commit = self._on_branch()
        if commit is None:
            return None
        target = Update(answer.branch, commit, answer.request_commit)
        inbox = Update(refs.inbox_ref(answer.nonce), None, answer.request_commit)
        try:
            self._git.push(self._remote, [target, inbox, Update(claim.ref, None, claim.commit)])
        except BusError:
            return None  # `attempt` finds out what stands where
        return Published(target.new or "", target.ref)

    def attempt(self, *, last: bool) -> Published:
        """Look what stands where, and push what fits.

        Args:
            last: Of several. Then refs that stay locked, as a server leaves them that died, are gone around:
                the result is pushed with the inbox entry alone, and to a ref of its own if need be.
        """
        answer, nonce = self._answer, self._answer.nonce
        claim_refs = refs.claim_places(nonce)
        own_refs = (refs.result_ref(nonce), refs.BRANCH_RESULTS + nonce)
        branches = (answer.branch,) if answer.branch else ()
        others = (refs.inbox_ref(nonce), *claim_refs, *_cancel_refs(nonce))
        found = self._git.ls_remote(self._remote, *branches, *others, *own_refs)
        if (before := self._already(found, (*branches, *own_refs))) is not None:
            with contextlib.suppress(BusError):
                self._clear(self._cleanup(found))
            return before
        for ref in own_refs:
            if ref in found:
                raise Answered(f"the request {nonce} already has a result at {ref}")
        tip = found.get(answer.branch) if answer.branch else None
        if tip is not None and tip != answer.request_commit and self._is_answered(tip):
            raise Answered(f"the request {nonce} already has a result on {answer.branch}")
        on_branch = answer.branch is not None and tip == answer.request_commit
        if on_branch and answer.branch is not None and not self._reader.exists(answer.request_commit):
            self._git.fetch(self._remote, [answer.branch], depth=2)
            self._reader = self._git
        cleanup = self._cleanup(found)
        places = [Update(ref, self._commit(on_branch=False), "") for ref in own_refs]
        if on_branch and answer.branch is not None and (commit := self._on_branch()) is not None:
            places.insert(0, Update(answer.branch, commit, answer.request_commit))
        refusals: list[BusError] = []
        for place in places:
            try:
                return self._push(place, cleanup, alone=last)
            except PushRejected as error:
                refusals.append(error)
            except LeaseLost as error:
                # Elsewhere only together with what every answer deletes: else there might be two.
                if not last or refs.inbox_ref(nonce) not in found:
                    raise
                refusals.append(error)
        raise refusals[0]

    def _already(self, found: Mapping[str, str], places: tuple[str, ...]) -> Published | None:
        """Where an earlier push of the same bytes put the result, be it another process's before a crash."""
        request = self._answer.request_commit
        others = {ref: found[ref] for ref in places if found.get(ref, request) != request}
        if not others:
            return None
        ours = {self._commit(on_branch=False)}
        if self._reader.exists(request) and (commit := self._on_branch()) is not None:
            ours.add(commit)
        return next((Published(held, ref) for ref, held in others.items() if held in ours), None)

    def _is_answered(self, tip: str) -> bool:
        """Whether a result, ours or another runner's, lies between the request and the branch's tip."""
        answer = self._answer
        self._git.fetch(self._remote, [answer.branch or ""], depth=_LONGEST_WALK)
        path = f"{RESULT_ROOT}/{answer.nonce}/{RESULT_NAME}"
        at = tip
        for _ in range(_LONGEST_WALK):
            if self._git.kind_and_size(at)[0] != "commit":
                return False
            parents = self._git.commit(at).parents
            if answer.request_commit in parents:
                return self._git.kind_and_size(f"{at}:{path}")[0] == "blob"
            if not parents:
                return False
            at = parents[0]
        return False

    def _cleanup(self, found: Mapping[str, str]) -> list[Update]:
        inbox = refs.inbox_ref(self._answer.nonce)
        updates = [Update(inbox, None, found[inbox])] if inbox in found else []
        claim = self._claim
        if claim is not None and claim.gives_way(found):
            raise Superseded(f"the claim {claim.ref} gives way to another runner's")
        if claim is not None and claim.ref in found:
            if not claim.holds(found[claim.ref]) and not claim.is_squatted(found[claim.ref]):
                raise Superseded(f"the claim {claim.ref} is somebody else's now")
            updates.append(Update(claim.ref, None, found[claim.ref]))
        wishes = [ref for ref in _cancel_refs(self._answer.nonce) if ref in found]
        return [*updates, *(Update(ref, None, found[ref]) for ref in wishes)]

    def _push(self, target: Update, cleanup: list[Update], *, alone: bool) -> Published:
        """Push the result and delete what its request leaves; with `alone` only the inbox entry with it."""
        inbox = refs.inbox_ref(self._answer.nonce)
        together = [update for update in cleanup if update.ref == inbox or not alone]
        try:
            self._git.push(self._remote, [target, *together])
        except PushRejected:
            if not together:
                raise
            # A server may take the result and refuse to delete refs.
            self._git.push(self._remote, [target])
            together = []
        self._clear([update for update in cleanup if update not in together])
        return Published(target.new or "", target.ref)

    def _clear(self, cleanup: list[Update]) -> None:
        """Delete what may be deleted, each by itself: the result stands already."""
        for update in cleanup:
            with contextlib.suppress(BusError):
                self._git.push(self._remote, [update])

    def _on_branch(self) -> str | None:
        """The result as a commit on its branch; None: the workload's own tree there is too large to read."""
        try:
            return self._commit(on_branch=True)
        except BrokenObject:
            return None

    def _commit(self, *, on_branch: bool) -> str:
        if on_branch not in self._commits:
            parents = [self._answer.request_commit] if on_branch else []
            tree = self._tree(self._answer.request_commit if on_branch else None)
            self._commits[on_branch] = self._git.commit_tree(
                tree, parents, self._answer.message, when=self._answer.when
            )
        return self._commits[on_branch]

    def _tree(self, base: str | None) -> str:
        folder = _write_folder(self._git, self._answer.files)
        results = self._with(base and f"{base}:{RESULT_ROOT}", self._answer.nonce, folder)
        return self._with(base, FOLDER, self._with(base and f"{base}:{FOLDER}", _RESULTS_NAME, results))

    def _with(self, tree: str | None, name: str, subtree: str) -> str:
        """A tree like `tree` (empty when there is none) with `subtree` under `name`."""
        present = tree is not None and self._reader.kind_and_size(_peeled(tree))[0] == "tree"
        raw = self._reader.read_tree(tree) if tree is not None and present else b""
        return self._git.write_raw_tree(trees.with_folder(raw, name, subtree))


def _cancel_refs(nonce: str) -> tuple[str, str]:
    return (refs.cancel_ref(nonce), refs.BRANCH_CANCELS + nonce)


def _peeled(tree: str) -> str:
    return tree if ":" in tree else f"{tree}^{{tree}}"


def _write_folder(git: Git, files: Mapping[str, bytes]) -> str:
    entries: list[Entry] = []
    below: dict[str, dict[str, bytes]] = {}
    for path, data in files.items():
        name, slash, rest = path.partition("/")
        if slash:
            below.setdefault(name, {})[rest] = data
        else:
            entries.append(Entry("100644", "blob", git.write_blob(data), name))
    entries += [Entry("040000", "tree", _write_folder(git, inner), name) for name, inner in below.items()]
    return git.write_tree(entries)
