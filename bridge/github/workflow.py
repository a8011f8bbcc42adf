"""A workflow run as its jobs see it: which request it serves, the remote, its outputs and its log."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.bus.requests import bound_manifest, has_result, read_request
from bridge.bus.state import RequestState
from bridge.errors import (
    BrokenObject,
    MachineError,
    ManifestError,
    NoRemote,
    RemoteUnreachable,
    RequestRefused,
    UnknownHandle,
)
from bridge.git.cache import GitCache
from bridge.github.dispatch import RequestRef
from bridge.github.repository import with_token
from bridge.log import LineFormatter
from bridge.protocol import refs
from bridge.protocol.refs import BRANCHES, audience_of, parse_request_ref
from bridge.protocol.result import Reason
from bridge.protocol.sanitize import one_line, quoted
from bridge.runner.request import Refused, Request

TRANSPORT = "actions"
LEFT_ALONE = "left alone: the request is for the transport embedded, so a runner's daemon takes it"

MAX_LOG_CHARACTERS = 1 << 20  # the whole log is in the result
_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_HEADS = "refs/heads/"
_REQUEST_VARIABLES = (("KAKEYA_REQUEST_COMMIT", "KAKEYA_REQUEST_BRANCH"), ("GITHUB_SHA", "GITHUB_REF"))


@dataclass(frozen=True)
class WorkflowRun:
    """A workflow run as its job sees it.

    Attributes:
        request: The request it serves; the manifest is not read yet.
        remote: Address of the bus, perhaps with the run's token: for git alone, never to be shown.
        attempt: From 1.
        run_url: The run's page; None: this is no workflow run.
        is_actions: Whether GitHub's runner reads standard output and obeys its commands.
        output: File for the step's outputs, `summary` for the job's summary in Markdown; None: there is none.
    """

    request: RequestRef
    remote: str = field(repr=False)
    attempt: int = 1
    run_url: str | None = None
    is_actions: bool = False
    output: Path | None = None
    summary: Path | None = None

    @property
    def tag(self) -> str:
        """Part of file names that is different for each remote."""
        return hashlib.sha256(audience_of(self.remote).encode()).hexdigest()[:12]

    def write_outputs(self, values: Mapping[str, str]) -> None:
        """Set the step's outputs; a random delimiter keeps a value from adding outputs of its own."""
        marks = {name: f"kakeya_{secrets.token_hex(16)}" for name in values}
        blocks = [f"{name}<<{marks[name]}\n{value}\n{marks[name]}\n" for name, value in values.items()]
        _append(self.output, "".join(blocks))

    def write_summary(self, text: str) -> None:
        """Add Markdown to the job's summary."""
        _append(self.summary, text.rstrip("\n") + "\n")


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
    server = (environ.get("GITHUB_SERVER_URL") or "https://github.com").rstrip("/")
    slug, run = environ.get("GITHUB_REPOSITORY"), environ.get("GITHUB_RUN_ID")
    page = f"{server}/{slug}" if slug else None
    request, address = _named_request(environ, commit, branch), remote or environ.get("KAKEYA_REMOTE") or page
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


def _named_request(environ: Mapping[str, str], commit: str | None, branch: str | None) -> RequestRef:
    sources = [("--commit", commit, "--branch", branch)]
    sources += [(one, environ.get(one), other, environ.get(other)) for one, other in _REQUEST_VARIABLES]
    for commit_name, sha, branch_name, ref in sources:
        if not sha and not ref:
            continue
        if not sha or not ref:
            given, missing = (commit_name, branch_name) if sha else (branch_name, commit_name)
            raise RequestRefused(f"{given} is given and {missing} is not", "give both")
        if not _SHA.fullmatch(sha):
            raise RequestRefused(f"{commit_name} is {quoted(sha)}, not a commit", "give all its hex digits")
        full = ref if ref.startswith("refs/") else f"{_HEADS}{ref}"
        if (name := parse_request_ref(full)) is None:
            fix = f"name a branch {BRANCHES.removeprefix(_HEADS)}<preset>-<nonce>"
            raise RequestRefused(f"{branch_name} is {quoted(ref)}, not a request's branch", fix)
        return RequestRef(name.nonce, full, sha)
    fix = "run this in a workflow (GITHUB_SHA and GITHUB_REF), or give --commit and --branch"
    raise RequestRefused("no request is named", fix)


def load_request(cache: GitCache, ref: RequestRef) -> Request:
    """Fetch a request commit with its workload, whatever its branch holds by now, and read it.

    Returns:
        The request. One that cannot be read has a `refusal`, and as `ref` the branch that its result goes to.

    Raises:
        RemoteUnreachable: The remote did not answer.
        FetchTooLarge: It sent too much.
        UnknownHandle: The remote no longer has the commit.
    """
    cache.prepare()
    return cache.recover(lambda: _load(cache, ref))


def result_branch(request: Request) -> str:
    """The branch that the result of a loaded request goes to."""
    branch = request.ref if request.manifest is None else request.manifest.result_ref
    assert branch is not None  # noqa: S101 - `load_request` sets it
    return branch


def list_request(cache: GitCache, request: Request) -> dict[str, str]:
    """The refs of the remote that tell where the request and its result are, and the archive."""
    own = (refs.inbox_ref(request.nonce), refs.result_ref(request.nonce), refs.BRANCH_RESULTS + request.nonce)
    return cache.list_remote(result_branch(request), *own, refs.ARCHIVE)


def is_answered(cache: GitCache, state: RequestState) -> bool:
    """Whether the remote holds a result of the request."""
    if state.result is not None:
        return True
    tips = {branch.ref: branch.commit for branch in state.branches}
    failures = cache.bring(tips, list(tips))
    return any(has_result(cache, tip, state.nonce) for ref, tip in tips.items() if ref not in failures)


def _load(cache: GitCache, ref: RequestRef) -> Request:
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


def _append(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise MachineError(f"cannot write to {path}: {error.strerror or error}") from None


class WorkflowFormatter(LineFormatter):
    """Formats the bridge's log for GitHub's runner, which reads commands in both output streams."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record; no line of it is a command."""
        return "\n".join(without_commands(line) for line in super().format(record).split("\n"))


class WorkflowLog:
    """The job's output, and annotations, on standard output.

    GitHub's runner obeys lines with ``::`` or ``##[``, so untrusted text is written without them.
    """

    def __init__(self, echo: Callable[[str], None], *, is_actions: bool) -> None:
        self._echo = echo
        self._is_actions = is_actions
        self._left = MAX_LOG_CHARACTERS

    def show(self, line: str) -> None:
        """Write one line of the job's output."""
        if self._left <= 0:
            return
        text = without_commands(line)
        self._left -= len(text)
        self._echo(f"| {text}")
        if self._left <= 0:
            self._echo("(truncated; the result's log.txt has all of it)")

    def annotate(self, level: str, title: str, message: str) -> None:
        """Write an annotation for the run's page; `level` is ``notice``, ``warning`` or ``error``."""
        text = without_commands(message)
        if self._is_actions:
            name = _escaped(title).replace(":", "%3A").replace(",", "%2C")
            self._echo(f"::{level} title={name}::{_escaped(text)}")
        else:
            self._echo(f"{title}: {text}")


def without_commands(text: str) -> str:
    """A text on one line that GitHub's runner does not obey."""
    text = one_line(text).replace("##[", "## [")
    bare = text.lstrip()
    return text if not bare.startswith("::") else f"{text[: len(text) - len(bare)]}: :{bare[2:]}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
