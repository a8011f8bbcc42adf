"""What the two jobs of a workflow run share: their request, the artifact that passes between them, the log.

The artifact holds ``.mac-bridge/results/<nonce>/…`` and nothing else. Others may have replaced it, so it is
read as hostile: plain files and folders with plain names only, counted and measured before a byte is read.
The digest travels as a job output and covers path, size and sha256 of every file.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.bus.publish import ResultFiles
from bridge.bus.requests import bound_manifest, read_request
from bridge.bus.results import MAX_RESULT_BYTES, MAX_RESULT_FILES
from bridge.errors import (
    BrokenObject,
    MachineError,
    ManifestError,
    NoRemote,
    RemoteUnreachable,
    RequestRefused,
    ResultError,
    UnknownHandle,
)
from bridge.git.cache import GitCache
from bridge.github.api import with_token
from bridge.github.dispatch import RequestRef
from bridge.log import LineFormatter
from bridge.protocol import refs
from bridge.protocol.result import (
    RESULT_NAME,
    RESULT_ROOT,
    RESULT_SIGNATURE_NAME,
    Reason,
    Verdict,
    parse_result,
)
from bridge.protocol.sanitize import one_line, quoted
from bridge.runner.admission import Refused, Request

log = logging.getLogger(__name__)

_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_HEADS = "refs/heads/"
_FORMAT = "kakeya-mac parcel 1"  # part of what is digested
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_DEPTH = 12
_MAX_ENTRIES = 4 * MAX_RESULT_FILES
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class WorkflowRun:
    """A workflow run as its job sees it."""

    request: RequestRef
    remote: str = field(repr=False)  # perhaps with the run's token: for git alone, never to be shown
    attempt: int = 1
    run_url: str | None = None  # None: this is no workflow run
    is_actions: bool = False  # whether GitHub's runner reads standard output and obeys its commands
    output: Path | None = None  # takes the step's outputs
    summary: Path | None = None  # takes the job's summary in Markdown

    @property
    def tag(self) -> str:
        """Part of file names that is different for each remote."""
        return hashlib.sha256(refs.audience_of(self.remote).encode()).hexdigest()[:12]

    def write_outputs(self, values: Mapping[str, str]) -> None:
        """Set the step's outputs; a random delimiter keeps a value from adding outputs of its own."""
        mark = f"kakeya_{secrets.token_hex(16)}"
        _append(self.output, "".join(f"{name}<<{mark}\n{values[name]}\n{mark}\n" for name in values))

    def write_summary(self, text: str) -> None:
        """Add Markdown to the job's summary."""
        _append(self.summary, text.rstrip("\n") + "\n")


def _append(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise MachineError(f"cannot write to {path}: {error.strerror or error}") from None


def read_workflow_run(
    environ: Mapping[str, str],
    *,
    commit: str | None = None,
    branch: str | None = None,
    remote: str | None = None,
) -> WorkflowRun:
    """The workflow run that this process belongs to.

    A request comes from the flags, else from the inputs of a dispatched run, else from the event; commit and
    branch always come from the same place.

    Raises:
        RequestRefused: No request is named, or an invalid one.
        NoRemote: No remote is named.
    """
    given = {**environ, "--commit": commit, "--branch": branch}
    sources = (
        ("--commit", "--branch"),
        ("KAKEYA_REQUEST_COMMIT", "KAKEYA_REQUEST_BRANCH"),
        ("GITHUB_SHA", "GITHUB_REF"),
    )
    names = next((names for names in sources if any(given.get(name) for name in names)), None)
    if names is None:
        fix = "run this in a workflow (GITHUB_SHA and GITHUB_REF), or give --commit and --branch"
        raise RequestRefused("no request is named", fix)
    request = _named_request(names, given.get(names[0]) or "", given.get(names[1]) or "")
    server = (environ.get("GITHUB_SERVER_URL") or "https://github.com").rstrip("/")
    slug, run = environ.get("GITHUB_REPOSITORY"), environ.get("GITHUB_RUN_ID")
    page = f"{server}/{slug}" if slug else None
    address = remote or environ.get("KAKEYA_REMOTE") or page
    if address is None:
        raise NoRemote("no remote is named", "run this in a workflow (GITHUB_REPOSITORY), or give --remote")
    output, summary = environ.get("GITHUB_OUTPUT"), environ.get("GITHUB_STEP_SUMMARY")
    return WorkflowRun(
        request=request,
        remote=with_token(address, environ),
        attempt=int(environ.get("GITHUB_RUN_ATTEMPT") or 1),
        run_url=f"{page}/actions/runs/{run}" if page and run else None,
        is_actions=environ.get("GITHUB_ACTIONS") == "true",
        output=Path(output) if output else None,
        summary=Path(summary) if summary else None,
    )


def _named_request(names: tuple[str, str], commit: str, branch: str) -> RequestRef:
    if not commit or not branch:
        missing = names[1] if commit else names[0]
        raise RequestRefused(f"{missing} is not given", f"give both {names[0]} and {names[1]}")
    if not _SHA.fullmatch(commit):
        raise RequestRefused(f"{names[0]} is {quoted(commit)}, not a commit", "give all its hex digits")
    ref = branch if branch.startswith("refs/") else f"{_HEADS}{branch}"
    if (name := refs.parse_request_ref(ref)) is None:
        fix = f"name a branch {refs.BRANCHES.removeprefix(_HEADS)}<preset>-<nonce>"
        raise RequestRefused(f"{names[1]} is {quoted(branch)}, not a request's branch", fix)
    return RequestRef(name.nonce, ref, commit)


def load_request(cache: GitCache, ref: RequestRef) -> Request | None:
    """Fetch a request commit with its workload, whatever its branch holds by now, and read it.

    Returns:
        The request. One that cannot be read has a `refusal`, and as `ref` the branch that its result goes to.
        None: a runner's daemon takes it.

    Raises:
        RemoteUnreachable: The remote did not answer.
        FetchTooLarge: It sent too much.
        UnknownHandle: The remote no longer has the commit.
    """
    cache.prepare()
    request = cache.recover(lambda: _read_request(cache, ref))
    if request.manifest is not None and request.manifest.transport != "actions":
        log.info("left alone: the request is for the transport embedded, so a runner's daemon takes it")
        return None
    return request


def _read_request(cache: GitCache, ref: RequestRef) -> Request:
    try:
        cache.bring_object(ref.commit)
    except RemoteUnreachable:
        cache.list_remote(ref.branch)  # raises when it is the remote that is away
        raise UnknownHandle(
            f"the request commit {ref.commit[:12]} of {ref.branch} is no longer on the remote",
            "ask again with kakeya_mac run",
        ) from None
    request = Request(ref.nonce, ref.commit, is_read=True)
    try:
        request.data = read_request(cache, ref.commit)
        request.manifest = bound_manifest(request.data, ref.nonce)
    except (ManifestError, BrokenObject) as error:
        reason = Reason.BAD_COMMIT if request.data is None else Reason.BAD_MANIFEST
        request.refusal = Refused(reason, error.message, error.remedy)
        request.ref = ref.branch
    return request


def result_branch(request: Request) -> str:
    """The branch that the result of a loaded request goes to."""
    branch = request.ref if request.manifest is None else request.manifest.result_ref
    assert branch is not None  # noqa: S101 - `load_request` sets it
    return branch


def list_request(cache: GitCache, request: Request) -> dict[str, str]:
    """The refs of the remote that tell where the request and its result are, and the archive."""
    own = (refs.inbox_ref(request.nonce), refs.result_ref(request.nonce), refs.BRANCH_RESULTS + request.nonce)
    return cache.list_remote(result_branch(request), *own, refs.ARCHIVE)


class TamperedArtifact(ResultError):
    """The artifact is not the one that the run wrote."""


@dataclass(frozen=True)
class Artifact:
    """A result in its folder: contents by path relative to ``result.json``, and the whole folder's digest."""

    nonce: str
    files: Mapping[str, bytes]
    digest: str

    @property
    def verdict(self) -> Verdict:
        """How the request ended; raises `EvidenceError` where ``result.json`` is none."""
        return parse_result(self.files[RESULT_NAME]).verdict

    @property
    def signature(self) -> bytes | None:
        """Detached, of ``result.json``; None: unsigned."""
        return self.files.get(RESULT_SIGNATURE_NAME)


def digest_of(files: Mapping[str, bytes]) -> str:
    """The sha256 (hex) over sha256, size and path of every file, ordered by path."""
    lines = [
        f"{hashlib.sha256(data).hexdigest()} {len(data)} {path}\n"
        for path, data in sorted(files.items(), key=lambda item: item[0].encode())
    ]
    return hashlib.sha256(f"{_FORMAT} {len(lines)}\n{''.join(lines)}".encode()).hexdigest()


def require_empty(folder: Path) -> None:
    """Create the folder for a result, or refuse one that holds something: before a job runs, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        first = next(folder.iterdir(), None)
    except OSError as error:
        why = f"cannot use {folder} for a result: {error.strerror or error}"
        raise MachineError(why, "name another --out") from None
    if first is not None:
        raise MachineError(f"{folder} is not empty: it holds {first.name!r}", "name a new folder with --out")


def write_artifact(result: ResultFiles, folder: Path) -> Artifact:
    """Write a signed result into an empty folder."""
    files = {**result.files, RESULT_NAME: result.result}
    if result.signature is not None:
        files[RESULT_SIGNATURE_NAME] = result.signature
    placed = {f"{RESULT_ROOT}/{result.nonce}/{path}": data for path, data in files.items()}
    try:
        for path, data in placed.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(target, _CREATE, 0o644), "wb") as file:
                file.write(data)
    except OSError as error:
        raise MachineError(f"cannot write the result to {folder}: {error.strerror or error}") from None
    return Artifact(result.nonce, files, digest_of(placed))


def read_artifact(folder: Path, expected_digest: str) -> Artifact | None:
    """Read a hostile folder; None: it is missing or holds no file.

    Raises:
        TamperedArtifact: It has not the shape of a result, or another digest than the run's outputs say.
    """
    if not os.path.lexists(folder):
        return None
    try:
        sizes = _plain_files(folder)
        if len(sizes) > MAX_RESULT_FILES or sum(sizes.values()) > MAX_RESULT_BYTES:
            held = f"{len(sizes)} files of {sum(sizes.values())} bytes"
            limits = f"the limits are {MAX_RESULT_FILES} and {MAX_RESULT_BYTES}"
            raise TamperedArtifact(f"the result folder holds {held}; {limits}")
        files = {path: (folder / path).read_bytes() for path in sizes}
    except OSError as error:
        raise TamperedArtifact(f"cannot read the result folder: {error.strerror or error}") from None
    if not files:
        return None
    nonce = next(iter(files)).removeprefix(f"{RESULT_ROOT}/").partition("/")[0]
    root = f"{RESULT_ROOT}/{nonce}/"
    if odd := [path for path in files if not path.startswith(root) or not refs.is_nonce(nonce)]:
        raise TamperedArtifact(f"the result folder holds {quoted(odd[0])}, which is no file of one result")
    inside = {path.removeprefix(root): data for path, data in files.items()}
    if RESULT_NAME not in inside:
        raise TamperedArtifact(f"the result folder holds no {RESULT_NAME}")
    digest = digest_of(files)
    if not _DIGEST.fullmatch(expected_digest):
        found = quoted(expected_digest)
        raise TamperedArtifact(f"the run gave no digest of its result folder, but {found}")
    if not hmac.compare_digest(digest, expected_digest):
        given = f"its digest is {digest}, the run gave {expected_digest}"
        raise TamperedArtifact(f"the result folder was changed after the run wrote it: {given}")
    return Artifact(nonce, inside, digest)


def _plain_files(root: Path) -> dict[str, int]:
    """Sizes of all files by relative path; links, pipes, sockets and odd names are refused."""
    if not stat.S_ISDIR(root.lstat().st_mode):
        raise TamperedArtifact("the result folder is not a folder")
    sizes: dict[str, int] = {}
    paths = (Path(at, name) for at, folders, files in os.walk(root) for name in (*folders, *files))
    for seen, path in enumerate(paths):  # `os.walk` enters no link
        status, relative = path.lstat(), path.relative_to(root)
        if seen >= _MAX_ENTRIES or len(relative.parts) > _MAX_DEPTH:
            raise TamperedArtifact(f"more than {_MAX_ENTRIES} entries or {_MAX_DEPTH} levels of folders")
        if not _NAME.fullmatch(path.name):
            raise TamperedArtifact(f"the result folder holds an entry named {quoted(relative)}")
        if stat.S_ISREG(status.st_mode):
            sizes[relative.as_posix()] = status.st_size
        elif not stat.S_ISDIR(status.st_mode):
            raise TamperedArtifact(f"{quoted(relative)} in the result folder is no plain file and no folder")
    return sizes


class WorkflowFormatter(LineFormatter):
    """Formats the bridge's log for GitHub's runner, which reads commands in both output streams."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record; no line of it is a command."""
        return "\n".join(without_commands(line) for line in super().format(record).split("\n"))


def annotation(level: str, title: str, message: str, *, is_actions: bool) -> str:
    """A line that annotates the run's page; `level` is ``notice``, ``warning`` or ``error``."""
    text = without_commands(message)
    if not is_actions:
        return f"{title}: {text}"
    name = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{_escaped(text)}"


def without_commands(text: str) -> str:
    """A text on one line that GitHub's runner, which obeys ``::`` and ``##[``, shows as it is."""
    text = one_line(text).replace("##[", "## [")
    return re.sub(r"^(\s*)::", r"\1: :", text)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
