"""The only door to git: one command, run through GitPython, under rules of our own.

Every command: a fixed argv (no shell), its own session, a deadline after which the whole process group
ends, capped output, the C locale, no prompt, no hook, no file-system monitor, no automatic maintenance, and
none of the ``GIT_*`` variables that would send it to another repository. The user's credential helpers, SSH
and proxy settings stay in force, because a client needs nothing beyond a working ``git push``. What the
commands are for is in `bridge.bus.git`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from bridge.bus import failures
from bridge.bus.address import for_git
from bridge.bus.child import Outcome, Process, collect
from bridge.errors import BusError, MachineError

if TYPE_CHECKING:
    from git.cmd import Git as Door

# Long enough for a slow network, short enough that nobody thinks we hang.
NETWORK_TIMEOUT_S = 60.0
# More than this no remote may send in one fetch.
FETCH_LIMIT_BYTES = 4 * 1024**3

# More output than this ends a command.
MAX_OUTPUT = 256 * 1024 * 1024
_IMPORTS = 3

_KEPT_VARIABLES = re.compile(
    r"GIT_(SSH|SSH_COMMAND|SSH_VARIANT|ASKPASS|PROXY_COMMAND|EXEC_PATH|ALLOW_PROTOCOL|CEILING_DIRECTORIES"
    r"|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|KEY_\d+|VALUE_\d+)|SSL_\w+|HTTP_\w+|PYTHON_\w+)"
)
_OPTIONS = (
    "--no-pager",
    "--no-replace-objects",
    "--literal-pathspecs",
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.quotePath=false"),
    *("-c", "core.looseCompression=0"),
    *("-c", "core.bigFileThreshold=16m"),  # what is larger passes through memory piece by piece
    *("-c", "gc.auto=0"),
    *("-c", "maintenance.auto=false"),
    *("-c", "submodule.recurse=false"),
    *("-c", "fetch.recurseSubmodules=false"),
    *("-c", "fetch.writeCommitGraph=false"),
    *("-c", "pack.useSparse=true"),
    *("-c", "push.gpgSign=false"),
    *("-c", "push.followTags=false"),
    *("-c", "protocol.version=2"),
    *("-c", "http.lowSpeedLimit=1"),
    *("-c", "http.lowSpeedTime=30"),
)
_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GCM_INTERACTIVE": "never",
}


class Command:
    """Git commands in one folder.

    Args:
        directory: A work tree, a bare repository or a folder inside one.
        timeout_s: Deadline of a command, unless the call names another.
        environment: Variables added to every command.
    """

    def __init__(
        self, directory: Path, *, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory.absolute()
        self.timeout_s = timeout_s
        self._environment = dict(environment or {})

    def run(
        self,
        *args: str,
        input: bytes | None = None,  # noqa: A002 - the word every process API uses
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run a local git command and return its standard output.

        Raises:
            BusError: It failed or ran past its deadline.
            MachineError: There is no git.
        """
        done = self.attempt(*args, input=input, timeout_s=timeout_s, env=env)
        if done.stopped is not None:
            raise BusError(f"git {args[0]} was ended in {self.directory}: {done.stopped}")
        if done.timed_out:
            limit = self.timeout_s if timeout_s is None else timeout_s
            raise BusError(f"git {args[0]} did not end within {limit:g} s in {self.directory}")
        if done.exit_code != 0:
            raise failures.command_error(args[0], str(self.directory), done.exit_code, done.stderr)
        return done.stdout

    def attempt(
        self,
        *args: str,
        input: bytes | None = None,  # noqa: A002 - see run
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        guard: Callable[[], str | None] | None = None,
    ) -> Outcome:
        """Run a git command; a failure or a timeout is a value.

        Args:
            args: Arguments after ``git`` and our fixed options.
            input: Bytes for its standard input; None: it has none.
            timeout_s: Seconds until its process group is ended.
            env: Variables added to the environment.
            guard: Called a few times a second; a text it returns ends the command and becomes
            `Outcome.stopped`.

        Raises:
            MachineError: There is no git.
        """
        variables = {**_ENVIRONMENT, **self._environment, **(env or {})}
        argv = self._argv(variables, *args)
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with _as_file(input) as source:
            process = _start(argv, variables, source)
            return collect(process, deadline=deadline, limit_bytes=MAX_OUTPUT, guard=guard)

    def talk(
        self,
        remote: str,
        *args: str,
        specs: Sequence[str] = (),
        timeout_s: float | None = None,
        guard: Callable[[], str | None] | None = None,
    ) -> Outcome:
        """Run a command that talks to a remote; credentials in its address reach git unseen by others.

        Args:
            remote: Address of the remote.
            args: The command and its options.
            specs: What follows the address.
            timeout_s: As in `attempt`.
            guard: As in `attempt`.
        """
        address, secrets = for_git(remote, {**os.environ, **self._environment})
        return self.attempt(*args, "--", address, *specs, timeout_s=timeout_s, env=secrets, guard=guard)

    def keep_open(self, *args: str, source: BinaryIO) -> Process:
        """Start a command that goes on; its standard input is `source`. Ending it is the caller's."""
        variables = {**_ENVIRONMENT, **self._environment}
        return _start(self._argv(variables, *args), variables, source)

    def _argv(self, variables: Mapping[str, str], *args: str) -> list[str]:
        return [*_unset_prefix(variables), "git", "-C", str(self.directory), *_OPTIONS, *args]


def _unset_prefix(ours: Mapping[str, str]) -> list[str]:
    """``env -u NAME …`` for ``GIT_*`` variables, not ours, that would change what a command works on.

    GitPython can add variables but not remove them, and an empty GIT_DIR is an error; usually there are none.
    """
    foreign = [name for name in os.environ if name.startswith("GIT_") and name not in ours]
    names = [name for name in foreign if not _KEPT_VARIABLES.fullmatch(name)]
    return ["env", *(word for name in sorted(names) for word in ("-u", name))] if names else []


@contextlib.contextmanager
def _as_file(data: bytes | None) -> Generator[BinaryIO | None, None, None]:
    """Bytes as an open file, which cannot block a reader the way a pipe can; None stays None."""
    if data is None:
        yield None
        return
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield cast("BinaryIO", file)


def _start(argv: list[str], variables: Mapping[str, str], source: BinaryIO | None) -> Process:
    door, not_found = _gitpython()
    try:
        running = door().execute(argv, istream=source, as_process=True, env=variables, start_new_session=True)
    except not_found:
        raise _no_git() from None
    # GitPython would end the process when its wrapper goes out of scope.
    process, running.proc = running.proc, None
    return cast("Process", process)


def _gitpython() -> tuple[type[Door], type[Exception]]:
    """GitPython's way of starting git, and what it raises where there is none.

    When it is imported it asks git for its version, and fails if that git is killed; then once more.
    """
    failure = ""
    for _ in range(_IMPORTS):
        try:
            from git.cmd import Git
            from git.exc import GitCommandNotFound
        except ImportError as error:
            failure = str(error)
        else:
            return Git, GitCommandNotFound
    if shutil.which("git") is None:
        raise _no_git() from None
    raise MachineError(f"git does not say its version: {failure}", "see what `git version` does") from None


def _no_git() -> MachineError:
    return MachineError("git was not found on PATH", "install git 2.31 or later")
