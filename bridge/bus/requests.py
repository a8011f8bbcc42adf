"""A request as a commit: built, pushed, and read back.

The commit's single parent is the workload; its difference to it is exactly ``.mac-bridge/request.json``, the
detached signature and, over GitHub Actions, the workflow file where the workload has none, because a push
runs the workflows of the pushed commit. Nothing here touches a work tree, an index, HEAD or a local ref.
Whether a preset exists, a signature counts or a machine is willing is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.errors import BusError, ManifestError, PushRejected, RemoteUnreachable, RevisionError
from bridge.git.repo import FILE_MODE, GitRepo, RefUpdate, Scratch
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, SIGNATURE_PATH, Manifest, parse
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT

MAX_SIGNATURE_BYTES = 16 * 1024
WORKFLOW_NAME = "mac-bridge.yaml"
WORKFLOW_PATH = f".github/workflows/{WORKFLOW_NAME}"
# In a commit's message: its push starts no workflow run.
SKIP_CI = "[skip ci]"


@dataclass(frozen=True)
class SubmitOptions:
    """How a request travels."""

    # Bytes of the workflow file that it brings, because the workload has none; None: none
    workflow: bytes | None = None
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
    parent: str  # the workload commit
    data: bytes  # the exact bytes of ``request.json``
    signature: bytes | None  # the exact bytes of ``request.json.sig``; None: unsigned
    # Whether it adds the workflow file, which is not compared with anything here
    brings_workflow: bool = False


def build(
    git: GitRepo,
    scratch: Scratch,
    manifest: Manifest,
    signature: bytes | None,
    options: SubmitOptions | None = None,
) -> str:
    """Write the request commit into a scratch store; returns its sha.

    Raises:
        RevisionError: The workload has a file where a folder belongs, or has the workflow file already.
    """
    options, workload = options or SubmitOptions(), manifest.workload_sha
    files: dict[str, bytes | None] = {REQUEST_PATH: manifest.to_bytes(), SIGNATURE_PATH: signature}
    if options.workflow is not None:
        if git.kind_and_size(f"{workload}:{WORKFLOW_PATH}")[0] != "missing":
            raise RevisionError(f"the workload {workload[:12]} has a {WORKFLOW_PATH} of its own")
        files[WORKFLOW_PATH] = options.workflow
    message = f"kakeya-mac request: {manifest.preset} {manifest.nonce}\n"
    if not options.starts_run:
        message += f"\n{SKIP_CI}\n"
    return scratch.commit_files(workload, files, message)


def submit(
    git: GitRepo,
    remote: str,
    manifest: Manifest,
    signature: bytes | None,
    *,
    options: SubmitOptions | None = None,
    timeout_s: float | None = None,
) -> Submitted:
    """Push a request: its branch and its inbox ref together, or the branch alone where the server wants that.

    Args:
        git: The checkout that has the workload commit.
        remote: Address of the bus (not a configured name: git would then also write a tracking ref).
        manifest: What is asked.
        signature: Detached signature of ``manifest.to_bytes()``.
        options: How it travels.
        timeout_s: Deadline of each push.

    Raises:
        RevisionError: See `build`.
    """
    branch = manifest.result_ref
    with git.scratch() as scratch:
        commit = build(git, scratch, manifest, signature, options)
        both = [RefUpdate(branch, commit, ""), RefUpdate(refs.inbox_ref(manifest.nonce), commit, "")]
        in_inbox = True
        try:
            try:
                scratch.push(remote, both, timeout_s=timeout_s)
            except PushRejected:
                in_inbox = False
                scratch.push(remote, both[:1], timeout_s=timeout_s)
        except RemoteUnreachable:
            # The answer may have been lost, not the push.
            if not _arrived(git, remote, branch, commit):
                raise
    return Submitted(manifest.nonce, commit, branch, in_inbox)


def read_request(git: GitRepo, commit: str) -> RequestCommit:
    """Read a request commit and check its shape.

    Raises:
        ManifestError: It has not exactly one parent, changes other files, or carries no plain
            ``request.json``.
        BusError: The commit or its parent is not in this repository.
    """
    kind, _ = git.kind_and_size(commit)
    if kind not in ("commit", "missing"):
        raise ManifestError(f"a request is a commit, {commit[:12]} is a {kind}")
    parents = git.commit(commit).parents
    if len(parents) != 1:
        raise ManifestError(f"a request commit has exactly one parent, {commit[:12]} has {len(parents)}")
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
    return RequestCommit(commit, parents[0], data, signature, brings_workflow)


def bound_manifest(request: RequestCommit, nonce: str) -> Manifest:
    """Parse a request's manifest and compare it with the commit and the name it came under.

    Raises:
        ManifestError: It does not parse, or names another nonce, workload or result branch.
    """
    manifest = parse(request.data)
    if manifest.nonce != nonce:
        raise ManifestError(f"manifest: nonce is {manifest.nonce}, but the request is named {nonce}")
    if manifest.workload_sha != request.parent:
        raise ManifestError(
            f"manifest: workload_sha is {manifest.workload_sha}, but the commit's parent is {request.parent}"
        )
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
    places = [submitted.ref, *([refs.inbox_ref(submitted.nonce)] if submitted.in_inbox else [])]
    git.push(remote, [RefUpdate(ref, None, submitted.commit) for ref in places])


def has_result(git: GitRepo, commit: str, nonce: str) -> bool:
    """Whether a commit carries a result of this request: then it is no request but an answer."""
    return git.kind_and_size(f"{commit}:{RESULT_ROOT}/{nonce}/{RESULT_NAME}")[0] == "blob"


def _arrived(git: GitRepo, remote: str, branch: str, commit: str) -> bool:
    try:
        return git.list_refs(remote, branch, timeout_s=10.0).get(branch) == commit
    except RemoteUnreachable:
        return False
