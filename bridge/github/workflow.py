"""What the two jobs of a workflow run share: their request, the artifact that passes between them, the log.

The artifact holds ``.mac-bridge/results/<nonce>/…`` and nothing else. Others may have replaced it, so it is
read as hostile; its digest travels as a job output.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge import errors
from bridge.bus.publish import ResultFiles
from bridge.bus.requests import bound_manifest, read_request
from bridge.bus.results import MAX_RESULT_BYTES, MAX_RESULT_FILES
from bridge.errors import MachineError, ResultError
from bridge.git.cache import GitCache
from bridge.github.api import GitHub, find_token, repository_of, with_token
from bridge.github.dispatch import RequestRef
from bridge.log import LineFormatter
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, Reason, Verdict, parse_result
from bridge.protocol.sanitize import one_line, quoted
from bridge.runner.admission import Refusal, Request

log = logging.getLogger(__name__)

_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_FORMAT = "kakeya-mac parcel 1"  # part of what is digested
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9._-]{0,199}")
_MAX_ENTRIES = 4 * MAX_RESULT_FILES


@dataclass(frozen=True)
class WorkflowRun:
    """A workflow run as its job sees it."""

    request: RequestRef
    remote: str = field(repr=False)  # perhaps with the run's token: for git alone, never to be shown
    attempt: int = 1
    run_id: int | None = None  # None: this is no workflow run
    page: str | None = None  # the repository that the run belongs to
    limit_s: float | None = None  # the time limit of the Mac's job; None: it is not told
    output: str | None = None  # the file that takes the step's outputs
    summary: str | None = None  # the file that takes the job's summary in Markdown

    @property
    def run_url(self) -> str | None:
        """The run's page."""
        return f"{self.page}/actions/runs/{self.run_id}" if self.page and self.run_id else None

    def api(self, environ: Mapping[str, str]) -> GitHub | None:
        """The API of the run's repository, with the run's token; None: it is not known."""
        try:
            repository = None if self.page is None else repository_of(self.page, environ)
            return None if repository is None else GitHub(repository, find_token(environ))
        except errors.ApiError as error:
            log.warning("the API is not asked: %s", error.message)
            return None

    def write_outputs(self, values: Mapping[str, str]) -> None:
        """Set the step's outputs; a random delimiter keeps a value from adding outputs of its own."""
        mark = f"kakeya_{secrets.token_hex(16)}"
        _append(self.output, "".join(f"{name}<<{mark}\n{values[name]}\n{mark}\n" for name in values))

    def write_summary(self, text: str) -> None:
        """Add Markdown to the job's summary."""
        _append(self.summary, text.rstrip("\n") + "\n")


def _append(path: str | None, text: str) -> None:
    if path:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise MachineError(f"cannot write {path}: {error.strerror}") from None


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
    """
    pairs = (
        (commit, branch),
        (environ.get("KAKEYA_REQUEST_COMMIT"), environ.get("KAKEYA_REQUEST_BRANCH")),
        (environ.get("GITHUB_SHA"), environ.get("GITHUB_REF")),
    )
    commit, branch = next((pair for pair in pairs if any(pair)), ("", ""))
    ref = branch if branch and branch.startswith("refs/") else f"refs/heads/{branch}"
    name = refs.parse_request_ref(ref)
    if name is None or not commit or not _SHA.fullmatch(commit):
        raise errors.RequestRefused(
            f"this is no request: commit {quoted(commit)} on the branch {quoted(branch)}",
            "give --commit (all hex digits) and --branch (mac-bridge/<preset>-<nonce>), or run this in the"
            " workflow of a request, which has them in GITHUB_SHA and GITHUB_REF",
        )
    server = (environ.get("GITHUB_SERVER_URL") or "https://github.com").rstrip("/")
    slug, run = environ.get("GITHUB_REPOSITORY"), environ.get("GITHUB_RUN_ID")
    page = f"{server}/{slug}" if slug else None
    address = remote or environ.get("KAKEYA_REMOTE") or page
    if address is None:
        raise errors.NoRemote(
            "no remote is named", "run this in a workflow (GITHUB_REPOSITORY), or give --remote"
        )
    return WorkflowRun(
        request=RequestRef(name.nonce, ref, commit),
        remote=with_token(address, environ),
        attempt=int(environ.get("GITHUB_RUN_ATTEMPT") or 1),
        run_id=int(run) if run and run.isdecimal() else None,
        page=page,
        limit_s=_limit_s(environ.get("KAKEYA_RUN_MINUTES") or ""),
        output=environ.get("GITHUB_OUTPUT"),
        summary=environ.get("GITHUB_STEP_SUMMARY"),
    )


def _limit_s(minutes: str) -> float | None:
    try:
        limit_s = float(minutes) * 60 if minutes else None
    except ValueError:
        limit_s = 0.0
    if limit_s is not None and not 0 < limit_s < math.inf:
        raise MachineError(
            f"KAKEYA_RUN_MINUTES is {quoted(minutes)}, not a number of minutes",
            "set the repository variable to the time limit of the Mac's job, as 180",
        )
    return limit_s


def load_request(cache: GitCache, ref: RequestRef) -> Request | None:
    """Fetch and read a request commit with its workload, whatever its branch holds; None: it is the daemon's.

    One that cannot be read has a `refusal`, and as `ref` the branch that its result goes to.
    """
    cache.prepare()
    request = cache.recover(lambda: _read_request(cache, ref))
    if request.manifest is not None and request.manifest.transport != "actions":
        log.info("left alone: the request is for the transport embedded, so a runner's daemon takes it")
        return None
    return request


def _read_request(cache: GitCache, ref: RequestRef) -> Request:
    for failure in cache.bring({ref.commit: ref.commit}, [ref.commit]).values():
        if not isinstance(failure, errors.LeaseLost):
            raise failure
        branch, tip = ref.branch.removeprefix("refs/heads/"), cache.list_remote(ref.branch).get(ref.branch)
        now = "is not there: it was deleted or never pushed" if tip is None else f"holds {tip[:12]} now"
        raise errors.RequestGone(
            f"the request commit {ref.commit[:12]} is not on the remote, and its branch {branch} {now}",
            "ask again with kakeya_mac run",
        )
    request = Request(ref.nonce, ref.commit, is_read=True)
    try:
        request.data = read_request(cache, ref.commit)
        request.manifest = bound_manifest(request.data, ref.nonce)
    except (errors.ManifestError, errors.BrokenObject) as error:
        reason = Reason.BAD_COMMIT if request.data is None else Reason.BAD_MANIFEST
        request.refusal = Refusal(reason, error.message, error.remedy)
        request.ref = ref.branch
    return request


def result_branch(request: Request) -> str:
    """The branch that the result of a loaded request goes to."""
    branch = request.ref if request.manifest is None else request.manifest.result_ref
    assert branch is not None  # noqa: S101 - `load_request` sets it
    return branch


def list_request(cache: GitCache, request: Request) -> dict[str, str]:
    """The refs of the remote that tell where the request and its result are, and the archive."""
    own = (refs.INBOX + request.nonce, refs.RESULTS + request.nonce, refs.BRANCH_RESULTS + request.nonce)
    return cache.list_remote(result_branch(request), *own, refs.ARCHIVE)


@dataclass(frozen=True)
class Artifact:
    """A result in its folder: contents by path relative to ``result.json``, and the whole folder's digest."""

    files: Mapping[str, bytes]
    digest: str

    @property
    def verdict(self) -> Verdict:
        """How the request ended; raises `EvidenceError` where ``result.json`` is none."""
        return parse_result(self.files[RESULT_NAME]).verdict


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
        held = next(folder.iterdir(), None)
    except OSError as error:
        raise MachineError(f"cannot use {folder}: {error.strerror}", "name another --out") from None
    if held is not None:
        raise MachineError(f"{folder} is not empty: it holds {held.name!r}", "name a new folder with --out")


def write_artifact(result: ResultFiles, folder: Path) -> Artifact:
    """Write a signed result into an empty folder."""
    files = result.contents()
    placed = {f"{RESULT_ROOT}/{result.nonce}/{path}": data for path, data in files.items()}
    try:
        for path, data in placed.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("xb") as file:
                file.write(data)
    except OSError as error:
        raise MachineError(f"cannot write the result to {folder}: {error.strerror}") from None
    return Artifact(files, digest_of(placed))


def read_artifact(folder: Path, nonce: str, expected_digest: str) -> Artifact | None:
    """Read a hostile folder; None: it is missing or holds no file.

    A `ResultError`: it has not the shape of this request's result, or another digest than the run gave.
    """
    if not os.path.lexists(folder):
        return None
    try:
        sizes = _plain_files(folder)
        if len(sizes) > MAX_RESULT_FILES or sum(sizes.values()) > MAX_RESULT_BYTES:
            raise ResultError(f"it holds {len(sizes)} files of {sum(sizes.values())} bytes: too many")
        files = {path: (folder / path).read_bytes() for path in sizes}
    except OSError as error:
        raise ResultError(f"it cannot be read: {error.strerror}") from None
    if not files:
        return None
    digest, root = digest_of(files), f"{RESULT_ROOT}/{nonce}/"
    if digest != expected_digest:
        given = quoted(expected_digest)
        raise ResultError(f"it was changed after the run wrote it: its digest is {digest}, not {given}")
    inside = {path.removeprefix(root): data for path, data in files.items() if path.startswith(root)}
    if len(inside) != len(files) or RESULT_NAME not in inside:
        raise ResultError(f"it holds more than {root}, or no {RESULT_NAME} there")
    return Artifact(inside, digest)


def _plain_files(root: Path) -> dict[str, int]:
    """Sizes of all files by relative path; links, pipes, sockets and odd names are refused."""
    if not stat.S_ISDIR(root.lstat().st_mode):
        raise ResultError("it is not a folder")
    sizes: dict[str, int] = {}
    paths = (Path(at, name) for at, folders, files in os.walk(root) for name in (*folders, *files))
    for seen, path in enumerate(paths):  # `os.walk` enters no link
        status, relative = path.lstat(), path.relative_to(root)
        is_file = stat.S_ISREG(status.st_mode)
        if not _NAME.fullmatch(path.name) or not (is_file or stat.S_ISDIR(status.st_mode)):
            raise ResultError(f"{quoted(relative)} is no plain file or folder with a plain name")
        if seen >= _MAX_ENTRIES:
            raise ResultError(f"it holds more than {_MAX_ENTRIES} entries")
        if is_file:
            sizes[relative.as_posix()] = status.st_size
    return sizes


class WorkflowFormatter(LineFormatter):
    """Formats the bridge's log for GitHub's runner, which reads commands in both output streams."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record; no line of it is a command."""
        return "\n".join(without_commands(line) for line in super().format(record).split("\n"))


def without_commands(text: str) -> str:
    """A text on one line that GitHub's runner, which obeys ``::`` and ``##[``, shows as it is."""
    return re.sub(r"^(\s*)::", r"\1: :", one_line(text).replace("##[", "## ["))


def annotation(level: str, title: str, message: str) -> str:
    """A line that annotates the run's page; `level` is ``notice`` or ``error``, `title` has no colon."""
    return f"::{level} title={title}::{without_commands(message).replace('%', '%25')}"
