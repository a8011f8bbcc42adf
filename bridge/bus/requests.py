"""A request as a commit: built with plumbing, pushed, and read back.

The commit's single parent is the workload; its difference to it is exactly ``.mac-bridge/request.json``, the
detached signature beside it and, over GitHub Actions, the workflow file where the workload has none, because
a push runs the workflows of the pushed commit. Nothing here touches a work tree, an index, HEAD or a local
ref, and new objects live in a scratch store, so that a failed submission leaves nothing behind and the cost
does not follow the size of the checkout. Whether a preset exists, a signature counts or a machine is willing
is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.bus import trees
from bridge.bus.carriage import PLAIN, STARTS_NO_RUN, WORKFLOW_PATH, Carriage, folder_in, with_workflow
from bridge.bus.git import Git, Update
from bridge.bus.objects import Entry
from bridge.errors import BusError, ManifestError, PushRejected, RemoteUnreachable
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, SIGNATURE_PATH, Manifest, parse
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT
from bridge.protocol.sanitize import without_credentials

FOLDER = ".mac-bridge"
MAX_SIGNATURE_BYTES = 16 * 1024

_REQUEST_NAME = REQUEST_PATH.removeprefix(f"{FOLDER}/")
_SIGNATURE_NAME = SIGNATURE_PATH.removeprefix(f"{FOLDER}/")
_PLAIN_FILE = "100644"


@dataclass(frozen=True)
class Submitted:
    """A request that is on the remote.

    Attributes:
        nonce: Its durable handle.
        commit: The request commit.
        ref: The branch it was pushed to, where its result will appear.
        remote: The remote's address without credentials.
        audience: The one spelling of the remote that the manifest names.
        in_inbox: False where the server took the branch alone; runners then find it a little later.
    """

    nonce: str
    commit: str
    ref: str
    remote: str
    audience: str
    in_inbox: bool


@dataclass(frozen=True)
class ReadRequest:
    """A request commit of the right shape; its manifest is still unread bytes.

    Attributes:
        commit: The request commit.
        parent: The workload commit.
        data: The exact bytes of ``request.json``.
        signature: The exact bytes of ``request.json.sig``; None: unsigned.
        brings_workflow: Whether it adds the workflow file, which nobody has compared with anything.
    """

    commit: str
    parent: str
    data: bytes
    signature: bytes | None
    brings_workflow: bool = False


def build(git: Git, manifest: Manifest, signature: bytes | None, carriage: Carriage = PLAIN) -> str:
    """Write the request commit into the object store of `git` (meant: `Git.scratch`); returns its sha.

    Raises:
        RevisionError: The workload has a file where a folder belongs, or has the workflow file already.
        BusError: The workload commit is not here.
    """
    workload = manifest.workload_sha
    root = git.read_tree(workload)
    folder = folder_in(root, FOLDER, workload)
    kept = [] if folder is None else git.entries(folder)
    files = [entry for entry in kept if entry.name not in (_REQUEST_NAME, _SIGNATURE_NAME)]
    files.append(Entry(_PLAIN_FILE, "blob", git.write_blob(manifest.to_bytes()), _REQUEST_NAME))
    if signature is not None:
        files.append(Entry(_PLAIN_FILE, "blob", git.write_blob(signature), _SIGNATURE_NAME))
    root = trees.with_folder(root, FOLDER, git.write_tree(files))
    if carriage.workflow is not None:
        root = with_workflow(git, root, carriage.workflow, workload)
    message = f"kakeya-mac request: {manifest.preset} {manifest.nonce}\n"
    if not carriage.starts_run:
        message += f"\n{STARTS_NO_RUN}\n"
    return git.commit_tree(git.write_raw_tree(root), [workload], message)


def submit(
    git: Git,
    remote: str,
    manifest: Manifest,
    signature: bytes | None,
    *,
    carriage: Carriage = PLAIN,
    timeout_s: float | None = None,
) -> Submitted:
    """Push a request: its branch and its inbox ref together, or the branch alone where only branches are
    taken.

    Args:
        git: The checkout that has the workload commit.
        remote: Address of the bus (not a configured name: git would then also write a tracking ref).
        manifest: What is asked.
        signature: Detached signature of ``manifest.to_bytes()``.
        carriage: How it travels.
        timeout_s: Deadline of each push.

    Raises:
        RevisionError: See `build`.
        PushRejected: The remote said no, with its words.
        RemoteUnreachable: The remote did not answer.
    """
    branch = manifest.result_ref
    with git.scratch() as scratch:
        commit = build(scratch, manifest, signature, carriage)
        both = [Update(branch, commit, ""), Update(refs.inbox_ref(manifest.nonce), commit, "")]
        in_inbox = True
        try:
            try:
                scratch.push(remote, both, timeout_s=timeout_s)
            except PushRejected:
                in_inbox = False
                scratch.push(remote, both[:1], timeout_s=timeout_s)
        except RemoteUnreachable:
            if not _arrived(scratch, remote, branch, commit):
                raise
    return Submitted(
        nonce=manifest.nonce,
        commit=commit,
        ref=branch,
        remote=without_credentials(remote),
        audience=manifest.audience,
        in_inbox=in_inbox,
    )


def read_request(git: Git, commit: str) -> ReadRequest:
    """Read a request commit and hold it against the shape it must have.

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
        if change.status != "D" and change.mode != _PLAIN_FILE:
            raise ManifestError(f"{change.path} must be a plain file, its mode is {change.mode}")
    if not any(change.path == REQUEST_PATH and change.status != "D" for change in changes):
        raise ManifestError(f"the commit {commit[:12]} brings no {REQUEST_PATH}")
    try:
        data = git.read_blob(commit, REQUEST_PATH, MAX_BYTES)
        signature = git.read_blob(commit, SIGNATURE_PATH, MAX_SIGNATURE_BYTES)
    except BusError as error:
        raise ManifestError(error.message) from None
    if data is None:
        raise ManifestError(f"the commit {commit[:12]} has no readable {REQUEST_PATH}")
    brings_workflow = any(change.path == WORKFLOW_PATH for change in changes)
    return ReadRequest(commit, parents[0], data, signature, brings_workflow)


def bound_manifest(request: ReadRequest, nonce: str) -> Manifest:
    """Parse a request's manifest and hold it against the commit and the name it came under.

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


def take_back(git: Git, remote: str, submitted: Submitted) -> None:
    """Take a request from the remote that was just pushed there, and that nothing has touched.

    Raises:
        LeaseLost: Something has.
        PushRejected: The remote said no.
        RemoteUnreachable: The remote did not answer.
    """
    places = [submitted.ref, *([refs.inbox_ref(submitted.nonce)] if submitted.in_inbox else [])]
    git.push(remote, [Update(ref, None, submitted.commit) for ref in places])


def has_result(git: Git, commit: str, nonce: str) -> bool:
    """Whether a commit carries a result of this request: then it is no request but an answer."""
    return git.kind_and_size(f"{commit}:{RESULT_ROOT}/{nonce}/{RESULT_NAME}")[0] == "blob"


def _arrived(git: Git, remote: str, branch: str, commit: str) -> bool:
    """Whether a push whose answer was lost took effect after all."""
    try:
        return git.ls_remote(remote, branch, timeout_s=10.0).get(branch) == commit
    except RemoteUnreachable:
        return False
