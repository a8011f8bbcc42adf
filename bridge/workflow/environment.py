"""What a workflow run tells a program in its environment, read once; and the two files that take its answers.

Flags come first, then the inputs of a dispatched run, then the event itself. A commit and its branch always
come from the same place: half of one and half of another would be a request that nobody made.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import MachineError, NoRemote, RequestRefused
from bridge.github.address import with_token
from bridge.protocol.refs import BRANCHES, audience_of, parse_request_ref
from bridge.protocol.sanitize import quoted, without_credentials
from bridge.workflow.asked import Asked

_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}/(?!\.{1,2}$)[A-Za-z0-9_.-]{1,100}")
_NUMBER = re.compile(r"[0-9]{1,15}")
_HEADS = "refs/heads/"
_MOST_ATTEMPTS = 1_000_000


@dataclass(frozen=True)
class Environment:
    """A workflow run as its job sees it.

    Attributes:
        asked: The request.
        remote: Address of the bus, with its token where there is one: for `bridge.bus` alone, never to show.
        attempt: Which attempt of the run this is, from 1.
        run_url: The run's page; None: not in a workflow run.
        is_actions: Whether a workflow's log reads standard output, and obeys some lines of it.
        output: File that takes the step's outputs; None: there is none.
        summary: File that takes the job's summary in Markdown; None: there is none.
    """

    asked: Asked
    remote: str
    attempt: int = 1
    run_url: str | None = None
    is_actions: bool = False
    output: Path | None = None
    summary: Path | None = None

    @property
    def tag(self) -> str:
        """What tells this remote from others in names of files."""
        return hashlib.sha256(audience_of(self.remote).encode()).hexdigest()[:12]

    def __repr__(self) -> str:
        """Without the token."""
        return f"Environment(asked={self.asked!r}, remote={without_credentials(self.remote)!r})"

    def write_outputs(self, values: Mapping[str, str]) -> None:
        """Hand outputs to the later steps and jobs.

        Args:
            values: Texts by name. None of them can add an output: each lies between two lines that nobody
                could guess.

        Raises:
            MachineError: The file cannot be written.
        """
        if self.output is None:
            return
        blocks = []
        for name, value in values.items():
            mark = f"kakeya_{secrets.token_hex(16)}"
            blocks.append(f"{name}<<{mark}\n{value}\n{mark}\n")
        _append(self.output, "".join(blocks))

    def write_summary(self, text: str) -> None:
        """Add to the job's summary.

        Args:
            text: Markdown.

        Raises:
            MachineError: The file cannot be written.
        """
        if self.summary is not None:
            _append(self.summary, text.rstrip("\n") + "\n")


def read(
    environ: Mapping[str, str],
    *,
    commit: str | None = None,
    branch: str | None = None,
    remote: str | None = None,
) -> Environment:
    """The run this process belongs to; the arguments are the flags given on the command line.

    Args:
        environ: The process's environment.
        commit: The request commit.
        branch: Its branch, with or without ``refs/heads/``.
        remote: Address of the bus.

    Raises:
        RequestRefused: No request is named, or what is named cannot be one.
        NoRemote: No remote is named.
    """
    server = (environ.get("GITHUB_SERVER_URL") or "https://github.com").rstrip("/")
    repository = environ.get("GITHUB_REPOSITORY") or ""
    run, attempt = environ.get("GITHUB_RUN_ID") or "", environ.get("GITHUB_RUN_ATTEMPT") or ""
    has_run = _REPOSITORY.fullmatch(repository) and _NUMBER.fullmatch(run)
    return Environment(
        asked=_asked(environ, commit, branch),
        remote=_remote(remote or environ.get("KAKEYA_REMOTE"), server, repository, environ),
        attempt=min(max(1, int(attempt)), _MOST_ATTEMPTS) if _NUMBER.fullmatch(attempt) else 1,
        run_url=f"{server}/{repository}/actions/runs/{run}" if has_run else None,
        is_actions=environ.get("GITHUB_ACTIONS") == "true",
        output=_file(environ, "GITHUB_OUTPUT"),
        summary=_file(environ, "GITHUB_STEP_SUMMARY"),
    )


def _asked(environ: Mapping[str, str], commit: str | None, branch: str | None) -> Asked:
    places = (
        ("--commit", commit, "--branch", branch),
        *(
            (ours, environ.get(ours), theirs, environ.get(theirs))
            for ours, theirs in (
                ("KAKEYA_REQUEST_COMMIT", "KAKEYA_REQUEST_BRANCH"),
                ("GITHUB_SHA", "GITHUB_REF"),
            )
        ),
    )
    for commit_name, sha, branch_name, ref in places:
        if not sha and not ref:
            continue
        if not sha or not ref:
            given, lacking = (commit_name, branch_name) if sha else (branch_name, commit_name)
            raise RequestRefused(f"{given} is given and {lacking} is not", "a request is named by both")
        return _named(sha, commit_name, ref, branch_name)
    raise RequestRefused(
        "no request is named",
        "run this in a workflow (GITHUB_SHA and GITHUB_REF), or give --commit and --branch",
    )


def _named(sha: str, commit_name: str, ref: str, branch_name: str) -> Asked:
    if not _SHA.fullmatch(sha):
        raise RequestRefused(f"{commit_name} is {quoted(sha)}, not a commit", "give all its hex digits")
    full = ref if ref.startswith("refs/") else f"{_HEADS}{ref}"
    name = parse_request_ref(full)
    if name is None:
        raise RequestRefused(
            f"{branch_name} is {quoted(ref)}, not a branch of a request",
            f"a request is asked for on {BRANCHES.removeprefix(_HEADS)}<preset>-<nonce>",
        )
    return Asked(nonce=name.nonce, commit=sha, branch=full)


def _remote(given: str | None, server: str, repository: str, environ: Mapping[str, str]) -> str:
    """The bus's address; the run's token goes with it to the server that gave the token, and to no other."""
    if not given and not _REPOSITORY.fullmatch(repository):
        raise NoRemote("no remote is named", "run this in a workflow (GITHUB_REPOSITORY), or give --remote")
    address = given or f"{server}/{repository}"
    return with_token(address, environ)


def _file(environ: Mapping[str, str], name: str) -> Path | None:
    return Path(environ[name]) if environ.get(name) else None


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise MachineError(f"cannot write to {path}: {error.strerror or error}") from None
