"""Git in one repository: objects through GitPython, everything else by git commands under fixed rules.

Nothing here checks out a file, moves HEAD or touches an index.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import errors
from bridge.git import remote as remotes
from bridge.git.errors import command_error, push_error, timed_out, unreachable
from bridge.proc import ProgramResult, find_program, run_program
from bridge.protocol.sanitize import without_credentials

if TYPE_CHECKING:
    import git as gitpython

NETWORK_TIMEOUT_S = 60.0
SWAP_TIMEOUT_S = 30.0
FETCH_LIMIT_BYTES = 4 * 1024**3
MAX_OUTPUT_BYTES = 256 * 1024 * 1024
# Sizes of objects that are read whole; larger ones were made to cost memory. A folder of 400,000 files fits.
MAX_COMMIT_BYTES = 1 << 20
MAX_TREE_BYTES = 16 << 20
# A few small trees can name more files than memory holds, so only so many changed folders are opened.
MAX_CHANGED_FOLDERS = 64

TREE_MODE = "040000"
FILE_MODE = "100644"
AUTHOR = ("kakeya-mac", "kakeya-mac@localhost")

_LOOK_TIMEOUT_S = 15.0
_CONTENTION_TRIES = 5
_COMMIT = re.compile(rb"tree ([0-9a-f]{40})\n((?:parent [0-9a-f]{40}\n)*)(?!parent )")
_KEPT_VARIABLES = re.compile(
    r"GIT_(SSH|SSH_COMMAND|SSH_VARIANT|ASKPASS|PROXY_COMMAND|EXEC_PATH|ALLOW_PROTOCOL|CEILING_DIRECTORIES"
    r"|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|KEY_\d+|VALUE_\d+)|SSL_\w+|HTTP_\w+)"
)
_ENVIRONMENT = {
    "LC_ALL": "C",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GCM_INTERACTIVE": "never",
}
_OPTIONS = (
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.bigFileThreshold=16m"),  # what is larger passes through memory piece by piece
    *("-c", "gc.auto=0"),
    *("-c", "maintenance.auto=false"),
    *("-c", "fetch.recurseSubmodules=false"),
    *("-c", "fetch.unpackLimit=1"),  # a pack's size can be limited, unpacked objects cannot
    *("-c", "fetch.writeCommitGraph=false"),
    *("-c", "pack.useSparse=true"),
    *("-c", "protocol.version=2"),
    *("-c", "http.lowSpeedLimit=1"),
    *("-c", "http.lowSpeedTime=30"),
)
_PUSH = ("push", "--porcelain", "--no-verify", "--no-signed", "--no-follow-tags", "--recurse-submodules=no")
_FETCH = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--stdin")


@dataclass(frozen=True)
class RefUpdate:
    """One ref to change by a push: to a commit (None deletes it), if it holds `expected` (empty: nothing)."""

    ref: str
    new: str | None
    expected: str


@dataclass(frozen=True)
class CommitData:
    """A commit: its tree's sha, its parents' shas, its message."""

    tree: str
    parents: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class FileChange:
    """A path that differs between two trees: ``A`` added, ``M`` modified, ``D`` deleted, ``T`` retyped."""

    status: str
    path: str
    mode: str
    sha: str


class GitRepo:
    """Git in a work tree, a bare repository or a folder inside one. Safe for use by several threads.

    The user's credential helpers, SSH and proxy settings stay in force. `environment` is added to them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        timeout_s: float = NETWORK_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self.timeout_s = timeout_s
        self._environment = dict(environment or {})
        self._lock = threading.RLock()
        self._repo: gitpython.Repo | None = None

    def close(self) -> None:
        """End the process that is kept open for reading; the next read starts another one."""
        with self._lock:
            repo, self._repo = self._repo, None
            if repo is not None:
                repo.git.clear_cache()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):  # it was made whole
            self.close()  # GitPython's own clean-up waits for the garbage collector

    # Commands ---------------------------------------------------------------------------------------------

    def run(self, *args: str, input: bytes = b"") -> bytes:  # noqa: A002 - the word every process API uses
        """Run a local git command and return its standard output; a `BusError` where it fails."""
        done = self.attempt(*args, input=input)
        if done.timed_out:
            raise errors.BusError(f"git {args[0]} did not end in time in {self.directory}")
        if done.exit_code != 0:
            raise command_error(args[0], str(self.directory), done.exit_code, done.stderr)
        return done.stdout

    def attempt(
        self,
        *args: str,
        input: bytes | Sequence[bytes] = b"",  # noqa: A002 - see run
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        guard: Callable[[], str | None] | None = None,
    ) -> ProgramResult:
        """Run a git command like `bridge.proc.run_program`; a failure or a timeout is a value."""
        return run_program(
            ["git", "-C", str(self.directory), *_OPTIONS, *args],
            input=input,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            env={**self._variables(), **(env or {})},
            limit_bytes=MAX_OUTPUT_BYTES,
            guard=guard,
        )

    def _variables(self) -> dict[str, str]:
        if find_program("git") is None:
            raise errors.MachineError("git was not found on PATH", "install git 2.31 or later")
        for name in list(os.environ):  # those that hooks of git set would mislead GitPython, too
            if name.startswith("GIT_") and not _KEPT_VARIABLES.fullmatch(name):
                os.environ.pop(name, None)
        return {**os.environ, **_ENVIRONMENT, **self._environment}

    # Reading ----------------------------------------------------------------------------------------------

    def resolve(self, rev: str) -> str:
        """The commit a revision names; a `RevisionError` where it names none."""
        if not rev or rev.startswith("-") or not rev.isprintable():
            raise errors.RevisionError(f"{rev!r} is not a revision", "give a branch, a tag or a commit")
        found = self._ask(f"{rev}^{{commit}}", 0)
        if found is None:
            raise errors.RevisionError(
                f"no commit is called {rev!r} in {self.directory}",
                "git fetch it first, or check the spelling; repositories of SHA-256 names are not read",
            )
        return found[0]

    def is_repository(self) -> bool:
        """Whether the folder is a repository, or inside one."""
        return self.attempt("rev-parse", "--git-dir", timeout_s=_LOOK_TIMEOUT_S).exit_code == 0

    def current_branch(self) -> str | None:
        """The branch HEAD is on, without ``refs/heads/``; None: detached."""
        head = self._opened().head
        with contextlib.suppress(TypeError, ValueError, OSError):  # detached, or no name that could be used
            return head.reference.name
        return None

    def top(self) -> Path:
        """The root of the work tree; of a bare repository, the repository itself."""
        repo = self._opened()
        return Path(repo.working_tree_dir or repo.git_dir)

    def settings(self, pattern: str, *, local: bool = False) -> list[tuple[str, str]]:
        """Configured values whose key matches a pattern, in order; with `local` only the repository's own."""
        scope = ["--local"] if local else []
        done = self.attempt("config", *scope, "--null", "--get-regexp", pattern)
        rows = [
            row.partition("\n") for row in done.stdout.decode("utf-8", "surrogateescape").split("\0") if row
        ]
        return [(key, value if line_end else "true") for key, line_end, value in rows]

    def is_dirty(self, timeout_s: float) -> bool | None:
        """Whether tracked files differ from HEAD; None: not known in time, or there is no work tree."""
        flags = ("--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all")
        done = self.attempt("diff", *flags, "HEAD", timeout_s=timeout_s)
        return None if done.timed_out or done.exit_code not in (0, 1) else done.exit_code == 1

    def exists(self, sha: str) -> bool:
        """Whether this repository holds the object."""
        return self.kind_and_size(sha)[0] != "missing"

    def kind_and_size(self, name: str) -> tuple[str, int]:
        """Kind (or ``missing``) and size in bytes of an object, named by its sha or as ``<sha>:path``."""
        found = self._ask(name, 0)
        return ("missing", 0) if found is None else found[1:3]

    def commit(self, sha: str) -> CommitData:
        """Read one commit; a `BusError` where it is missing, broken or none."""
        data = self._read("commit", sha, MAX_COMMIT_BYTES)
        match = _COMMIT.match(data)
        if match is None:
            raise errors.BrokenObject(f"the commit {sha[:12]} is broken: it begins with no tree and parents")
        parents = tuple(line.removeprefix("parent ") for line in match[2].decode().splitlines())
        message = data[match.end() :].partition(b"\n\n")[2].decode("utf-8", "replace")
        return CommitData(match[1].decode(), parents, message)

    def tree_entries(self, tree: str) -> dict[str, tuple[str, str]]:
        """Mode and sha of each entry of one tree, by name; `tree`: a sha, or ``<commit>:folder``."""
        data = self._read("tree", tree if ":" in tree else f"{tree}^{{tree}}", MAX_TREE_BYTES)
        try:
            rows = _gitpython().objects.fun.tree_entries_from_data(data)
        except ValueError as error:
            raise errors.BrokenObject(f"the tree {tree[:12]} is broken: {error}") from None
        entries = {name: (f"{mode:06o}", sha.hex()) for sha, mode, name in rows}
        if len(entries) != len(rows):
            raise errors.BrokenObject(f"the tree {tree[:12]} is broken: it holds a name twice")
        return entries

    def changes(self, old: str | None, new: str) -> list[FileChange]:
        """What differs between two trees or commits, ordered by path; `old` None: everything in `new`.

        Folders beyond the first `MAX_CHANGED_FOLDERS` come back closed, with the mode `TREE_MODE`.
        """
        found: list[FileChange] = []
        folders: list[tuple[str, str | None, str]] = [("", old, new)]
        for inside, before, after in folders:  # which grows meanwhile
            was, now = {} if before is None else self.tree_entries(before), self.tree_entries(after)
            for name in sorted(was.keys() | now.keys()):
                mine, theirs = was.get(name), now.get(name)
                if mine == theirs:
                    continue
                mode, sha = theirs or ("000000", "0" * 40)
                if mode == TREE_MODE and len(folders) <= MAX_CHANGED_FOLDERS:
                    folder = mine[1] if mine is not None and mine[0] == TREE_MODE else None
                    folders.append((f"{inside}{name}/", folder, sha))
                    if self.tree_entries(sha):  # an empty one would not show otherwise
                        continue
                same_kind = mine is not None and mine[0][:3] == mode[:3]
                status = "A" if mine is None else "D" if theirs is None else "M" if same_kind else "T"
                found.append(FileChange(status, inside + name, mode, sha))
        return sorted(found, key=lambda change: change.path)

    def read_file(self, commit: str, path: str, limit: int) -> bytes | None:
        """A file's bytes in a commit; None: no plain file is there. A `BrokenObject`: it is too large."""
        found = self._ask(f"{commit}:{path}", limit)
        return found[3] if found is not None and found[1] == "blob" else None

    def try_read_file(self, commit: str, path: str, limit: int) -> bytes | None:
        """Like `read_file`; None also where the file is too large or cannot be read."""
        try:
            return self.read_file(commit, path, limit)
        except errors.BusError:
            return None

    def read_objects(self, shas: Sequence[str], limit: int) -> list[bytes]:
        """The bytes of many files, in order; a `BusError`: one is missing, or they exceed `limit`."""
        found = [self._ask(sha, 0) for sha in shas]
        total = sum(size for _, _, size, _ in filter(None, found))
        if total > limit:
            raise errors.BusError(f"{len(shas)} files with {total} bytes, but at most {limit} are read")
        return [self._read("blob", sha, limit) for sha in shas]

    def _read(self, kind: str, name: str, limit: int) -> bytes:
        found = self._ask(name, limit)
        if found is None or found[1] != kind:
            what = "missing" if found is None else f"a {found[1]}, not a {kind}"
            raise errors.BusError(f"the object {name} is {what} in {self.directory}")
        return found[3]

    def _ask(self, name: str, limit: int) -> tuple[str, str, int, bytes] | None:
        """Sha, kind, size and bytes of an object; with a limit of 0 the bytes stay unread. None: missing."""
        if "\n" in name:
            return None
        with self._lock:
            for _ in range(2):  # the process may have died, or the repository been rebuilt under it
                try:
                    return _asked(self._opened().git, name, limit)
                except (OSError, ValueError, AttributeError) as error:
                    self.close()
                    failure = error
        self.run("rev-parse", "--git-dir")  # which says more
        raise errors.BusError(f"git cat-file failed in {self.directory}: {failure}")

    def _opened(self) -> gitpython.Repo:
        with self._lock:
            if self._repo is None:
                variables, git = self._variables(), _gitpython()
                try:
                    self._repo = repo = git.Repo(self.directory, search_parent_directories=True)
                except (git.exc.InvalidGitRepositoryError, git.exc.NoSuchPathError):
                    message = f"{self.directory} is not a git repository"
                    raise errors.BusError(message, "run this inside a checkout") from None
                except (configparser.Error, ValueError) as error:
                    message = f"the configuration of {self.directory} is broken: {error}".replace("\n", " ")
                    raise errors.BusError(message) from None
                repo.git.update_environment(**variables)
            return self._repo

    # Writing ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scratch(self) -> Generator[Scratch, None, None]:
        """The same repository with new objects going to a temporary folder, to be pushed from there."""
        with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
            scratch = Scratch(self, Path(folder))
            try:
                yield scratch
            finally:
                scratch.close()

    @property
    def objects(self) -> Path:
        """The folder of this repository's objects."""
        return Path(str(self._opened().odb.root_path()))

    # The network ------------------------------------------------------------------------------------------

    def push(
        self,
        remote: str,
        updates: Sequence[RefUpdate],
        *,
        timeout_s: float | None = None,
        atomic: bool = True,
    ) -> None:
        """Change refs of a remote, each only if it still holds what is expected; all of them or none.

        An update to what a ref holds already sends nothing, and fails the push if that has changed. Errors:
        see `bridge.git.errors.push_error`.
        """
        leases = [f"--force-with-lease={update.ref}:{update.expected}" for update in updates]
        specs = [f"{update.new or ''}:{update.ref}" for update in updates]
        flags = ["--atomic"] if atomic and len(updates) > 1 else []
        done = self._talk(remote, [*_PUSH, *flags, *leases], specs, timeout_s)
        if done.exit_code != 0:
            raise push_error(remote, done.stdout, done.stderr)

    def swap(
        self,
        remote: str,
        update: RefUpdate,
        same: Sequence[RefUpdate] = (),
        *,
        other: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, str] | None:
        """Push one change with others (all or none), again while the server only has a ref locked.

        None: it is done, also where only the answer was lost. Else what the refs (and `other`, which must not
        be there) hold now. After an error, which are those of `push`, it may be done a little later.
        """
        updates = [update, *same]
        for _ in range(_CONTENTION_TRIES):
            try:
                self.push(remote, updates, timeout_s=timeout_s or SWAP_TIMEOUT_S)
            except (errors.LeaseLost, errors.RemoteUnreachable, errors.PushRejected) as error:
                names = [each.ref for each in updates] + ([other] if other else [])
                found = self.list_refs(remote, *names, timeout_s=_LOOK_TIMEOUT_S)
                if found.get(update.ref) == update.new:
                    return None
                if isinstance(error, errors.RemoteUnreachable):
                    raise
                if other in found or any(found.get(each.ref, "") != each.expected for each in updates):
                    break
                if isinstance(error, errors.PushRejected):
                    raise
            else:
                return None
        return found

    def fetch(
        self,
        remote: str,
        wanted: Mapping[str, str] | Sequence[str],
        *,
        depth: int | None = None,
        timeout_s: float | None = None,
        limit_bytes: int = FETCH_LIMIT_BYTES,
    ) -> None:
        """Fetch refs by exact names, or objects by sha; a mapping names the local ref that each becomes.

        No other fetch into this repository may go on. A `FetchTooLarge`: more than `limit_bytes` come.
        """
        local = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted, "")
        packs = self.objects / "pack"
        before = set(packs.glob("*"))

        def too_large() -> str | None:  # all comes as one pack, see `_OPTIONS`
            if size_of(set(packs.glob("*")) - before) <= limit_bytes:
                return None
            return f"{without_credentials(remote)} sends more than {limit_bytes} bytes"

        flags = [f"--depth={depth}"] if depth else []
        # By standard input, because the system limits what a command line holds.
        lines = "\n".join(f"+{name}:{ref}" if ref else name for name, ref in local.items()).encode()
        done = self._talk(remote, [*_FETCH, *flags], (), timeout_s, input=lines, guard=too_large)
        if done.stopped is not None:
            self.delete_refs(filter(None, local.values()))  # it may have just been finished
            unfinished = [self.objects.glob(name) for name in ("tmp_obj_*", "??/tmp_obj_*", "pack/tmp_*")]
            for path in {*packs.glob("*"), *(path for found in unfinished for path in found)} - before:
                path.unlink(missing_ok=True)
            raise errors.FetchTooLarge(done.stopped)
        if done.exit_code != 0:
            raise unreachable(remote, done.stderr)

    def delete_refs(self, names: Iterable[str]) -> None:
        """Delete local refs."""
        self.run("update-ref", "--stdin", input="".join(f"delete {name}\n" for name in names).encode())

    def list_refs(self, remote: str, *prefixes: str, timeout_s: float | None = None) -> dict[str, str]:
        """Refs of a remote below some prefixes (exact names count as prefixes), by full name.

        Only those travel where the server speaks protocol version 2. Names that are not UTF-8 are left out.
        """
        address, secrets = self._address(remote)
        limit = self.timeout_s if timeout_s is None else timeout_s
        found = remotes.list_refs(self, address, prefixes, timeout_s=limit, env=secrets) if prefixes else None
        if found is None:
            done = self._talk(remote, ["ls-remote", "--quiet", "--refs"], [], timeout_s)
            if done.exit_code != 0:
                raise unreachable(remote, done.stderr)
            lines = [line.partition(b"\t") for line in done.stdout.split(b"\n") if line]
            found = {name: sha.decode() for sha, _, name in lines}
            if any(len(sha) != 40 for sha in found.values()):
                shown = without_credentials(remote)
                raise errors.BusError(f"{shown} has SHA-256 object names", "use one with SHA-1")
        wanted = tuple(prefix.encode() for prefix in prefixes) or (b"",)
        listed = {}
        for name, sha in found.items():
            with contextlib.suppress(UnicodeDecodeError):
                if name.startswith(wanted):
                    listed[name.decode()] = sha
        return listed

    def remote_url(self, remote: str) -> str:
        """A remote's address after the user's ``insteadOf`` rules; with credentials, as it was given."""
        address, secrets = remotes.for_git(remote)
        return remote if secrets else self.run("ls-remote", "--get-url", "--", address).decode().strip()

    def _address(self, remote: str) -> tuple[str, dict[str, str]]:
        """A remote's address for a command line, and the variables that bring its credentials."""
        return remotes.for_git(remote, {**os.environ, **self._environment})

    def _talk(
        self,
        remote: str,
        args: Sequence[str],
        specs: Sequence[str],
        timeout_s: float | None,
        *,
        input: bytes = b"",  # noqa: A002 - see run
        guard: Callable[[], str | None] | None = None,
    ) -> ProgramResult:
        address, secrets = self._address(remote)
        limit = self.timeout_s if timeout_s is None else timeout_s
        words = (*args, "--", address, *specs)
        done = self.attempt(*words, input=input, timeout_s=limit, env=secrets, guard=guard)
        if done.timed_out:
            raise timed_out(remote, limit)
        return done


class Scratch(GitRepo):
    """A repository whose new objects go to another folder. Made by `GitRepo.scratch`."""

    def __init__(self, base: GitRepo, folder: Path) -> None:
        environment = {**base._environment, "GIT_OBJECT_DIRECTORY": str(folder)}
        super().__init__(base.directory, timeout_s=base.timeout_s, environment=environment)
        (folder / "info").mkdir(exist_ok=True)
        (folder / "info" / "alternates").write_text(f"{base.objects}\n")
        self._base = base
        self._folder = folder

    @property
    def objects(self) -> Path:
        """The folder that takes the new objects."""
        return self._folder

    def commit_files(
        self,
        parent: str | None,
        files: Mapping[str, bytes | None],
        message: str,
        *,
        when: datetime | None = None,
        merged: Sequence[str] = (),
    ) -> str:
        """Write a commit that changes some files of its parent; the same arguments give the same commit.

        A file without contents is removed. `merged` are further parents, which keep what they hold reachable.
        A `RevisionError`: the parent has a file where a folder belongs.
        """
        base = None if parent is None else self._reader(parent).commit(parent).tree
        tree = self._tree(base, files, parent or "")
        by = f"{AUTHOR[0]} <{AUTHOR[1]}> {int((when or datetime.now(UTC)).timestamp())} +0000"
        parents = [f"parent {sha}" for sha in (*([] if parent is None else [parent]), *merged)]
        head = "\n".join([f"tree {tree}", *parents, f"author {by}", f"committer {by}"])
        return self._store("commit", f"{head}\n\n{message}".encode())

    def _tree(self, base: str | None, files: Mapping[str, bytes | None], parent: str) -> str:
        entries = {} if base is None else self._reader(base).tree_entries(base)
        folders: dict[str, dict[str, bytes | None]] = {}
        for path, data in files.items():
            name, slash, rest = path.partition("/")
            if slash:
                folders.setdefault(name, {})[rest] = data
            elif data is None:
                entries.pop(name, None)
            else:
                entries[name] = (FILE_MODE, self._store("blob", data))
        for name, inner in folders.items():
            mode, sha = entries.get(name, (TREE_MODE, None))
            if mode != TREE_MODE:
                raise errors.RevisionError(
                    f"the commit {parent[:12]} has a file named {name} where a folder belongs",
                    "rename that file, or ask for another commit",
                )
            entries[name] = (TREE_MODE, self._tree(sha, inner, parent))
        # As bytes, so that a name that is not UTF-8 stays what it is.
        rows = [
            (bytes.fromhex(sha), int(mode, 8), os.fsencode(name)) for name, (mode, sha) in entries.items()
        ]
        # Git compares a folder's name as if it ended in a slash.
        rows.sort(key=lambda row: row[2] + (b"/" if row[1] == int(TREE_MODE, 8) else b""))
        stream = BytesIO()
        _gitpython().objects.fun.tree_to_stream(rows, stream.write)
        return self._store("tree", stream.getvalue())

    def _reader(self, sha: str) -> GitRepo:
        """The base, which has a process open for reading; this one for what was fetched into it."""
        return self._base if self._base.exists(sha) else self

    def _store(self, kind: str, data: bytes) -> str:
        import gitdb

        store = gitdb.LooseObjectDB(str(self._folder))
        try:
            return str(store.store(gitdb.IStream(kind.encode(), len(data), BytesIO(data))).hexsha, "ascii")
        except OSError as error:
            raise errors.MachineError(f"cannot write to {self._folder}: {error.strerror or error}") from None


def size_of(files: Iterable[Path]) -> int:
    """Bytes of files, as far as they are still there."""
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


@functools.cache
def _gitpython() -> Any:
    """GitPython, imported without the two ``git version`` that it starts where it finds git."""
    settings = {"GIT_PYTHON_REFRESH": "quiet", "GIT_PYTHON_GIT_EXECUTABLE": os.devnull}
    os.environ.update(settings)
    try:
        import git
    finally:
        for name in settings:
            os.environ.pop(name, None)
    return git


def _asked(git: Any, name: str, limit: int) -> tuple[str, str, int, bytes] | None:
    try:
        sha, kind, size = git.get_object_header(name)
    except ValueError as error:
        if "SHA is empty" in str(error):  # no answer at all
            raise
        return None
    sha, kind = sha.decode(), kind.decode()
    if not limit:
        return sha, kind, size, b""
    if size > limit:
        raise errors.BrokenObject(f"the {kind} {sha[:12]} has {size} bytes, but at most {limit} are read")
    return sha, kind, size, git.get_object_data(sha)[3]
