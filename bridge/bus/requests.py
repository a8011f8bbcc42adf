"""A request: the commit that asks, built, pushed and read back; and its state, from a remote's refs alone.

The commit differs from its first parent, the workload, by ``.mac-bridge/request.json``, the signature and,
over GitHub Actions, the workflow file where the workload has none. A second parent is the commit that a
paired run compares the workload with, so that one push brings both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.errors import BusError, LeaseLost, ManifestError, PushRejected, RevisionError, UnknownHandle
from bridge.git.repo import FILE_MODE, GitRepo, RefUpdate
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, SIGNATURE_PATH, Manifest, parse
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT

MAX_SIGNATURE_BYTES = 16 * 1024
WORKFLOW_NAME = "mac-bridge.yaml"
WORKFLOW_PATH = f".github/workflows/{WORKFLOW_NAME}"
# In a commit's message: its push starts no workflow run.
SKIP_CI = "[skip ci]"

CLAIMS = (refs.CLAIMS, refs.BRANCH_CLAIMS)
CANCELS = (refs.CANCELS, refs.BRANCH_CANCELS)
RESULTS = (refs.RESULTS, refs.BRANCH_RESULTS)
_CUSTOM = "refs/mac-bridge/"
OWN_REFS = (refs.INBOX, *CLAIMS, *CANCELS, *RESULTS)
# Prefixes of everything that the bridge has on a remote.
ALL_REFS = (_CUSTOM, "refs/heads/mac-bridge", refs.AGENT_BRANCHES)


@dataclass(frozen=True)
class SubmitOptions:
    """How a request travels."""

    workflow: bytes | None = None  # a workflow file that it brings, because the workload has none
    starts_run: bool = True  # whether its push may start workflow runs


@dataclass(frozen=True)
class Submitted:
    """A request that is on the remote."""

    nonce: str  # its durable handle
    commit: str  # the request commit
    ref: str  # the branch it was pushed to, where its result will appear
    in_inbox: bool  # false where the server took the branch alone; runners then find it a little later


@dataclass(frozen=True)
class RequestCommit:
    """A request commit of the right shape; its manifest is still unread bytes."""

    commit: str  # the request commit
    parents: tuple[str, ...]  # the workload commit, and one that it is compared with
    data: bytes  # the exact bytes of ``request.json``
    signature: bytes | None  # the exact bytes of ``request.json.sig``; None: unsigned
    # Whether it adds the workflow file, which is not compared with anything here
    brings_workflow: bool = False


def submit(
    git: GitRepo,
    remote: str,
    manifest: Manifest,
    signature: bytes | None,
    *,
    options: SubmitOptions | None = None,
) -> Submitted:
    """Push a request: its branch and its inbox ref together, or the branch alone where the server wants that.

    `remote` is an address: for a configured name git would also write a tracking ref. A `RevisionError`: the
    workload has a file where a folder belongs, or has the workflow file already.
    """
    branch, in_inbox, options = manifest.result_ref, True, options or SubmitOptions()
    files: dict[str, bytes | None] = {REQUEST_PATH: manifest.to_bytes(), SIGNATURE_PATH: signature}
    if options.workflow is not None:
        workload = manifest.workload_sha
        if git.exists(f"{workload}:{WORKFLOW_PATH}"):
            raise RevisionError(f"the workload {workload[:12]} has a {WORKFLOW_PATH} of its own")
        files[WORKFLOW_PATH] = options.workflow
    message = f"kakeya-mac request: {manifest.preset} {manifest.nonce}\n"
    if not options.starts_run:
        message += f"\n{SKIP_CI}\n"
    with git.scratch() as scratch:
        workload, *others = manifest.commits
        commit = scratch.commit_files(workload, files, message, merged=others)
        asking, pending = (RefUpdate(ref, commit, "") for ref in (branch, refs.INBOX + manifest.nonce))
        try:
            there = scratch.swap(remote, asking, [pending], timeout_s=git.timeout_s)
        except PushRejected:
            in_inbox = False
            there = scratch.swap(remote, asking, timeout_s=git.timeout_s)
    if there is not None:
        raise LeaseLost(f"there is a request {manifest.nonce} on the remote already", "submit it again")
    return Submitted(manifest.nonce, commit, branch, in_inbox)


def read_request(git: GitRepo, commit: str) -> RequestCommit:
    """Read a request commit; a `ManifestError`: its parents, another change, or no plain manifest."""
    kind, _ = git.kind_and_size(commit)
    if kind not in ("commit", "missing"):
        raise ManifestError(f"a request is a commit, {commit[:12]} is a {kind}")
    parents = git.commit(commit).parents
    if len(parents) not in (1, 2):
        raise ManifestError(f"a request commit has one or two parents, {commit[:12]} has {len(parents)}")
    changes = git.changes(parents[0], commit)
    for change in changes:
        brought = change.path == WORKFLOW_PATH and change.status == "A"
        if change.path not in (REQUEST_PATH, SIGNATURE_PATH) and not brought:
            raise ManifestError(f"a request changes only {REQUEST_PATH}, this one changes {change.path!r}")
        if change.status != "D" and change.mode != FILE_MODE:
            raise ManifestError(f"{change.path} must be a plain file, its mode is {change.mode}")
    if not any(change.path == REQUEST_PATH and change.status != "D" for change in changes):
        raise ManifestError(f"the commit {commit[:12]} brings no {REQUEST_PATH}")
    try:
        data = git.read_file(commit, REQUEST_PATH, MAX_BYTES)
        signature = git.read_file(commit, SIGNATURE_PATH, MAX_SIGNATURE_BYTES)
    except BusError as error:
        raise ManifestError(error.message) from None
    if data is None:
        raise ManifestError(f"the commit {commit[:12]} has no readable {REQUEST_PATH}")
    brings_workflow = any(change.path == WORKFLOW_PATH for change in changes)
    return RequestCommit(commit, parents, data, signature, brings_workflow)


def bound_manifest(request: RequestCommit, nonce: str) -> Manifest:
    """Parse a request's manifest and compare it with the commit and the name it came under."""
    manifest = parse(request.data)
    if manifest.nonce != nonce:
        raise ManifestError(f"manifest: nonce is {manifest.nonce}, but the request is named {nonce}")
    if manifest.commits != request.parents:
        stated, parents = (" and ".join(each) for each in (manifest.commits, request.parents))
        raise ManifestError(f"manifest: the workload is {stated}, but the commit's parent is {parents}")
    named = refs.parse_request_ref(manifest.result_ref)
    if named is None or named.nonce != nonce:
        raise ManifestError(f"manifest: result_ref {manifest.result_ref!r} is not a branch of this request")
    if request.brings_workflow and manifest.transport != "actions":
        raise ManifestError(
            f"a request for the transport {manifest.transport} brings no {WORKFLOW_PATH}, this one does"
        )
    return manifest


def take_back(git: GitRepo, remote: str, submitted: Submitted) -> None:
    """Take a request from the remote that was just pushed there; `LeaseLost`: something has touched it."""
    places = [submitted.ref, *([refs.INBOX + submitted.nonce] if submitted.in_inbox else [])]
    git.push(remote, [RefUpdate(ref, None, submitted.commit) for ref in places])


def has_result(git: GitRepo, commit: str, nonce: str) -> bool:
    """Whether a commit carries a result of this request: then it is no request but an answer."""
    return git.kind_and_size(f"{commit}:{RESULT_ROOT}/{nonce}/{RESULT_NAME}")[0] == "blob"


# State ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RefValue:
    """A ref and the commit it holds."""

    ref: str
    commit: str

    @property
    def name(self) -> str:
        """The last part of the ref."""
        return self.ref.rpartition("/")[2]


@dataclass(frozen=True)
class RequestState:
    """The state of one request, by the refs that exist for it."""

    nonce: str
    preset: str | None  # from the name of its branch; None: the branch is gone
    branches: tuple[RefValue, ...]  # what may be its branch, the likeliest first: anyone may push others
    inbox: str | None  # the request commit, while it is pending
    claim: RefValue | None  # who runs it, and its heartbeat
    cancel: RefValue | None  # a request to stop it
    result: RefValue | None  # a result that could not go on the branch
    # Older requests that wait, too. None: not known, because branches do not tell which ones wait.
    ahead: int | None

    @property
    def branch(self) -> RefValue | None:
        """The request branch: the request commit, later the result on top of it."""
        return self.branches[0] if self.branches else None

    def is_open(self, commit: str) -> bool:
        """Whether the request `commit` still waits for its one answer."""
        waits = self.inbox == commit or (self.branch is not None and self.branch.commit == commit)
        return waits and self.result is None

    @property
    def gone(self) -> bool:
        """Whether nothing of it is left on the remote."""
        return self.branch is None and self.inbox is None and self.claim is None and self.result is None


def resolve_handle(git: GitRepo, remote: str, handle: str) -> RequestState:
    """Find the request that a handle names on this remote; `UnknownHandle`: none, or several."""
    found = git.list_refs(remote, *ALL_REFS)
    return state_of(found, find(found, handle), handle)


def find(found: Mapping[str, str], handle: str) -> str:
    """The nonce that a handle names among a remote's refs; `UnknownHandle`: it names none, or several."""
    asked = spelled(handle)
    matches: set[str] = set()
    for ref in found:
        nonce, names = names_of(ref)
        if nonce is None or not asked:
            continue
        if asked in names:
            return nonce
        if any(name.startswith(asked) for name in names):
            matches.add(nonce)
    if len(matches) == 1:
        return matches.pop()
    if not matches:
        raise UnknownHandle(
            f"no request on this remote is called {handle!r}",
            "check the handle, and name its remote with --remote",
        )
    some = ", ".join(sorted(matches)[:5])
    raise UnknownHandle(f"{handle!r} names {len(matches)} requests: {some}", "give more of the name")


def state_of(found: Mapping[str, str], nonce: str, handle: str = "") -> RequestState:
    """The state of a request, from a remote's refs; of several branches it is the one that `handle` names."""
    asked = spelled(handle)
    names = {ref: named for ref in found if (named := refs.parse_request_ref(ref)) and named.nonce == nonce}
    order = sorted(names, key=lambda ref: (asked not in names_of(ref)[1][1:], ref))
    branches = tuple(RefValue(ref, found[ref]) for ref in order)
    return RequestState(
        nonce=nonce,
        preset=names[order[0]].preset if order else None,
        branches=branches,
        inbox=found.get(refs.INBOX + nonce),
        claim=_held(found, CLAIMS, nonce),
        cancel=_held(found, CANCELS, nonce),
        result=_held(found, RESULTS, nonce),
        ahead=_ahead(found, nonce, has_branch=bool(branches)),
    )


def _ahead(found: Mapping[str, str], nonce: str, *, has_branch: bool) -> int | None:
    """Older unclaimed requests of the inbox; None: the inbox does not tell."""
    ours = [ref for ref in found if ref.startswith(ALL_REFS)]
    branches_only = bool(ours) and not any(ref.startswith(_CUSTOM) for ref in ours)
    if refs.INBOX + nonce not in found and (has_branch or branches_only):
        return None
    waiting = _nonces(found, refs.INBOX) - _nonces(found, *CLAIMS)
    return sum(other < nonce for other in waiting)


def _nonces(found: Mapping[str, str], *prefixes: str) -> set[str]:
    return {nonce for ref in found for prefix in prefixes if (nonce := refs.nonce_of(ref, prefix))}


def _held(found: Mapping[str, str], prefixes: tuple[str, ...], nonce: str) -> RefValue | None:
    places = (prefix + nonce for prefix in prefixes)
    return next((RefValue(ref, found[ref]) for ref in places if ref in found), None)


def spelled(handle: str) -> str:
    """A handle as a branch is called, without the prefixes that git shows."""
    return handle.strip().removeprefix("refs/heads/").removeprefix("origin/")


def names_of(ref: str) -> tuple[str | None, tuple[str, ...]]:
    """The nonce a ref belongs to and the names a person may call it by."""
    named = refs.parse_request_ref(ref)
    if named is not None:
        branch = ref.removeprefix("refs/heads/")
        return named.nonce, (named.nonce, branch, branch.rpartition("/")[2].removeprefix("mac-bridge-"))
    for prefix in OWN_REFS:
        if nonce := refs.nonce_of(ref, prefix):
            return nonce, (nonce,)
    return None, ()
