"""Git in one repository: objects read and written, refs listed, pushes and fetches.

Objects go through GitPython's object model: reading keeps one ``git cat-file`` open, writing starts no
process. Everything else is a git command under fixed rules: no shell, an own process group, a deadline,
capped output, the C locale, no prompt, no hook, no automatic maintenance, and no ``GIT_*`` variable that
names another repository. The user's credential helpers, SSH and proxy settings stay in force: a client needs
only a working ``git push``. Nothing here checks out a file, moves HEAD or touches an index. What commits mean
is `bridge.bus`.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.errors import BrokenObject, BusError, FetchTooLarge, MachineError, RevisionError
from bridge.git import errors, ls_refs
from bridge.git.credentials import for_git
from bridge.proc import ProgramResult, find_program, run_program
from bridge.protocol.sanitize import without_credentials

if TYPE_CHECKING:
    import git as gitpython

NETWORK_TIMEOUT_S = 60.0
FETCH_LIMIT_BYTES = 4 * 1024**3
MAX_OUTPUT_BYTES = 256 * 1024 * 1024
# Sizes of objects that are read whole; larger ones were made to cost memory. A folder of 400,000 files fits.
MAX_COMMIT_BYTES = 1 << 20
MAX_TREE_BYTES = 16 << 20
# A few small trees can name more files than memory holds, so only so many changed folders are opened.
MAX_CHANGED_FOLDERS = 64
# Refs named in one fetch: the system limits what a command line holds.
MAX_ARGUMENTS = 1000

TREE_MODE = "040000"
FILE_MODE = "100644"
AUTHOR = ("kakeya-mac", "kakeya-mac@localhost")

_SHA = re.compile(r"[0-9a-f]{40}")
_KEPT_VARIABLES = re.compile(
    r"GIT_(SSH|SSH_COMMAND|SSH_VARIANT|ASKPASS|PROXY_COMMAND|EXEC_PATH|ALLOW_PROTOCOL|CEILING_DIRECTORIES"
    r"|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|KEY_\d+|VALUE_\d+)|SSL_\w+|HTTP_\w+)"
)
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_INDEX_FILE")
_ENVIRONMENT = {
    "LC_ALL": "C",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GCM_INTERACTIVE": "never",
}
_OPTIONS = (
    "--no-pager",
    "--literal-pathspecs",
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.quotePath=false"),
    *("-c", "core.bigFileThreshold=16m"),  # what is larger passes through memory piece by piece
    *("-c", "gc.auto=0"),
    *("-c", "maintenance.auto=false"),
    *("-c", "submodule.recurse=false"),
    *("-c", "fetch.recurseSubmodules=false"),
    *("-c", "fetch.unpackLimit=1"),  # a pack's size can be limited, unpacked objects cannot
    *("-c", "fetch.writeCommitGraph=false"),
    *("-c", "pack.useSparse=true"),
    *("-c", "push.gpgSign=false"),
    *("-c", "push.followTags=false"),
    *("-c", "protocol.version=2"),
    *("-c", "http.lowSpeedLimit=1"),
    *("-c", "http.lowSpeedTime=30"),
)
_PUSH = ("push", "--porcelain", "--no-verify", "--no-signed", "--no-follow-tags", "--recurse-submodules=no")
_FETCH = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance")


@dataclass(frozen=True)
class RefUpdate:
    """One ref to change by a push: to a commit (None deletes it), if it holds `expected` (empty: nothing)."""

    ref: str
    new: str | None
    expected: str


@dataclass(frozen=True)
class CommitData:
    """A commit: its sha, its tree's sha, its parents' shas, its message."""

    sha: str
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
    """Git in one repository. Safe for use by several threads.

    Args:
        directory: A work tree, a bare repository or a folder inside one.
        timeout_s: Deadline of a command, unless the call names another.
        environment: Variables added to every command.
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
        self._settings: list[tuple[str, str]] | None = None

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

    def run(
        self,
        *args: str,
        input: bytes = b"",  # noqa: A002 - the word every process API uses
        timeout_s: float | None = None,
    ) -> bytes:
        """Run a local git command and return its standard output.

        Raises:
            BusError: It failed or ran past its deadline.
        """
        done = self.attempt(*args, input=input, timeout_s=timeout_s)
        if done.timed_out:
            limit = self.timeout_s if timeout_s is None else timeout_s
            raise BusError(f"git {args[0]} did not end within {limit:g} s in {self.directory}")
        if done.exit_code != 0:
            raise errors.command_error(args[0], str(self.directory), done.exit_code, done.stderr)
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
        _require_git()
        return run_program(
            ["git", "-C", str(self.directory), *_OPTIONS, *args],
            input=input,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            env=self._variables(env),
            limit_bytes=MAX_OUTPUT_BYTES,
            guard=guard,
        )

    def _variables(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or _KEPT_VARIABLES.fullmatch(name)
        }
        return {**kept, **_ENVIRONMENT, **self._environment, **(extra or {})}

    # Reading ----------------------------------------------------------------------------------------------

    def resolve(self, rev: str) -> str:
        """The commit a revision names; a `RevisionError` where it names none."""
        if not rev or rev.startswith("-") or not rev.isprintable():
            raise RevisionError(f"{rev!r} is not a revision", "give a branch, a tag or a commit")
        done = self.attempt("rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}")
        if done.exit_code != 0 and b"fatal:" in done.stderr:
            raise errors.command_error("rev-parse", str(self.directory), done.exit_code, done.stderr)
        sha = done.stdout.decode().strip()
        if len(sha) == 64:
            raise RevisionError(
                f"{self.directory} is a SHA-256 repository", "use a repository with SHA-1 object names"
            )
        if done.exit_code != 0 or _SHA.fullmatch(sha) is None:
            raise RevisionError(
                f"no commit is called {rev!r} in {self.directory}",
                "git fetch it first, or check the spelling",
            )
        return sha

    def current_branch(self) -> str | None:
        """The branch HEAD is on, without ``refs/heads/``; None: detached."""
        head = self._opened().head
        with contextlib.suppress(TypeError, ValueError, OSError):  # detached, or no name that could be used
            return head.reference.name
        return None

    def top(self) -> Path:
        """The root of the work tree; of a bare repository, the repository itself."""
        done = self.attempt("rev-parse", "--show-toplevel")
        if done.exit_code != 0:
            done = self.attempt("rev-parse", "--absolute-git-dir")
        return Path(os.fsdecode(done.stdout).rstrip("\n")) if done.exit_code == 0 else self.directory

    def settings(self, pattern: str) -> list[tuple[str, str]]:
        """Configured values whose key (lower-cased but for a middle part) matches a pattern, in order.

        Git's configuration is read once.
        """
        with self._lock:
            if self._settings is None:
                done = self.attempt("config", "--null", "--list")
                items = done.stdout.decode("utf-8", "surrogateescape").split("\0")
                pairs = (item.partition("\n") for item in items)
                self._settings = [(key, value) for key, _, value in pairs if key]
        return [(key, value) for key, value in self._settings if re.search(pattern, key)]

    def is_dirty(self, timeout_s: float) -> bool | None:
        """Whether tracked files differ from HEAD; None: not known in time, or there is no work tree.

        Looks at every tracked file, so its cost grows with their number. Never writes the index.
        """
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
        import git

        data = self._read("commit", sha, MAX_COMMIT_BYTES)
        try:
            commit = git.Commit(self._opened(), bytes.fromhex(sha))._deserialize(BytesIO(data))
            parents = tuple(parent.hexsha for parent in commit.parents)
            head = "".join([f"tree {commit.tree.hexsha}\n", *(f"parent {parent}\n" for parent in parents)])
        except (ValueError, IndexError, AttributeError) as error:
            raise BrokenObject(f"the commit {sha[:12]} is broken: {error}") from None
        if not data.startswith(head.encode()) or data[len(head) :].startswith(b"parent "):
            raise BrokenObject(
                f"the commit {sha[:12]} is broken: it does not begin with its tree and parents"
            )
        message = commit.message
        text = message if isinstance(message, str) else message.decode("utf-8", "replace")
        return CommitData(sha, commit.tree.hexsha, parents, text)

    def tree_entries(self, tree: str) -> dict[str, tuple[str, str]]:
        """Mode and sha of each entry of one tree, by name; `tree`: a sha, or ``<commit>:folder``."""
        from git.objects.fun import tree_entries_from_data

        data = self._read("tree", tree if ":" in tree else f"{tree}^{{tree}}", MAX_TREE_BYTES)
        try:
            rows = tree_entries_from_data(data)
        except ValueError as error:
            raise BrokenObject(f"the tree {tree[:12]} is broken: {error}") from None
        entries = {name: (f"{mode:06o}", sha.hex()) for sha, mode, name in rows}
        if len(entries) != len(rows):
            raise BrokenObject(f"the tree {tree[:12]} is broken: it holds a name twice")
        return entries

    def changes(self, old: str | None, new: str) -> list[FileChange]:
        """What differs between two trees or commits, ordered by path; `old` None: everything in `new`.

        Folders beyond the first `MAX_CHANGED_FOLDERS` come back closed, with the mode `TREE_MODE`.
        """
        found: list[FileChange] = []
        waiting: list[tuple[str, str | None, str]] = [("", old, new)]
        opened = 0
        while waiting:
            inside, before, after = waiting.pop(0)
            was, now = {} if before is None else self.tree_entries(before), self.tree_entries(after)
            opened += 1
            for name in sorted(was.keys() | now.keys()):
                old_entry, new_entry = was.get(name), now.get(name)
                if old_entry == new_entry:
                    continue
                change = _change(inside + name, old_entry, new_entry)
                if change.mode != TREE_MODE or opened + len(waiting) > MAX_CHANGED_FOLDERS:
                    found.append(change)
                    continue
                folder = old_entry[1] if old_entry is not None and old_entry[0] == TREE_MODE else None
                waiting.append((f"{change.path}/", folder, change.sha))
                if not self.tree_entries(change.sha):  # an empty folder would not show otherwise
                    found.append(change)
        return sorted(found, key=lambda change: change.path)

    def read_file(self, commit: str, path: str, limit: int) -> bytes | None:
        """A file's bytes in a commit; None when there is no plain file at that path.

        Raises:
            BrokenObject: The file is larger than `limit` bytes.
        """
        found = self._ask(f"{commit}:{path}", limit)
        return found[3] if found is not None and found[1] == "blob" else None

    def try_read_file(self, commit: str, path: str, limit: int) -> bytes | None:
        """Like `read_file`; None also where the file is too large or cannot be read."""
        try:
            return self.read_file(commit, path, limit)
        except BusError:
            return None

    def read_objects(self, shas: Sequence[str], limit: int) -> list[bytes]:
        """The bytes of many files, in order.

        Raises:
            BusError: One is missing, or together they hold more than `limit` bytes.
        """
        found = [(sha, *self.kind_and_size(sha)) for sha in shas]
        for sha, kind, _ in found:
            if kind == "missing":
                raise BusError(f"the object {sha} is missing in {self.directory}")
        total = sum(size for _, _, size in found)
        if total > limit:
            raise BusError(f"{len(shas)} files with {total} bytes, but at most {limit} are read")
        return [self._read("blob", sha, limit) for sha in shas]

    def refs(self, prefix: str) -> dict[str, str]:
        """Local refs under a prefix, by full name."""
        listed = self.run("for-each-ref", "--format=%(objectname) %(refname)", prefix)
        lines = listed.decode("utf-8", "replace").split("\n")
        return {ref: sha for sha, _, ref in (line.partition(" ") for line in lines if line)}

    def _read(self, kind: str, name: str, limit: int) -> bytes:
        found = self._ask(name, limit)
        if found is None or found[1] != kind:
            what = "missing" if found is None else f"a {found[1]}, not a {kind}"
            raise BusError(f"the object {name} is {what} in {self.directory}")
        return found[3]

    def _ask(self, name: str, limit: int) -> tuple[str, str, int, bytes] | None:
        """Sha, kind, size and bytes of an object; with a limit of 0 the bytes stay unread. None: missing."""
        if "\n" in name:
            return None
        with self._lock:
            for attempt in (1, 2):
                try:
                    return self._asked(self._opened().git, name, limit)
                except (OSError, ValueError, AttributeError) as error:
                    # The process died, or the repository was rebuilt under it: one more try with a new one.
                    self.close()
                    if attempt == 2:
                        raise BusError(f"git cat-file failed in {self.directory}: {error}") from None
        raise AssertionError("unreachable")

    def _asked(self, git: Any, name: str, limit: int) -> tuple[str, str, int, bytes] | None:
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
            raise BrokenObject(f"the {kind} {sha[:12]} has {size} bytes, but at most {limit} are read")
        return sha, kind, size, git.get_object_data(sha)[3]

    def _opened(self) -> gitpython.Repo:
        with self._lock:
            if self._repo is None:
                self._repo = _open(self.directory, self._variables())
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

        An update to the commit that a ref already holds sends nothing, and fails the push if that has
        changed.

        Raises:
            LeaseLost: A ref did not hold what was expected.
            PushRejected: The remote said no; the message has its words.
            RemoteUnreachable: It did not answer, or refused the credentials.
        """
        leases = [f"--force-with-lease={update.ref}:{update.expected}" for update in updates]
        specs = [f"{update.new or ''}:{update.ref}" for update in updates]
        flags = ["--atomic"] if atomic and len(updates) > 1 else []
        limit = self.timeout_s if timeout_s is None else timeout_s
        done = self._talk(remote, *_PUSH, *flags, *leases, specs=specs, timeout_s=limit)
        if done.timed_out:
            raise errors.timed_out(remote, limit)
        if done.exit_code != 0:
            raise errors.push_error(remote, done.stdout, done.stderr)

    def fetch(
        self,
        remote: str,
        wanted: Mapping[str, str] | Sequence[str],
        *,
        depth: int | None = None,
        timeout_s: float | None = None,
        limit_bytes: int = FETCH_LIMIT_BYTES,
    ) -> None:
        """Fetch refs by their exact names, or objects by sha. No other fetch into this repository may go on.

        Args:
            remote: Address of the remote.
            wanted: Exact names or shas; as a mapping, the local ref that each becomes.
            depth: Commits of each history; None: all.
            timeout_s: Deadline.
            limit_bytes: Most that may come.

        Raises:
            RemoteUnreachable: The remote did not answer, or has no such ref.
            FetchTooLarge: It sends more than `limit_bytes`.
        """
        specs = [f"+{ref}:{wanted[ref]}" for ref in wanted] if isinstance(wanted, Mapping) else list(wanted)
        if len(specs) > MAX_ARGUMENTS:
            for start in range(0, len(specs), MAX_ARGUMENTS):
                part = list(wanted)[start : start + MAX_ARGUMENTS]
                some = {ref: wanted[ref] for ref in part} if isinstance(wanted, Mapping) else part
                self.fetch(remote, some, depth=depth, timeout_s=timeout_s, limit_bytes=limit_bytes)
            return
        flags = [f"--depth={depth}"] if depth else []
        limit = self.timeout_s if timeout_s is None else timeout_s
        packs = self.objects / "pack"
        before = set(packs.glob("*"))
        guard = _pack_guard(packs, before, limit_bytes, remote)
        done = self._talk(remote, *_FETCH, *flags, specs=specs, timeout_s=limit, guard=guard)
        if done.stopped is not None:
            # It may have just been finished.
            if isinstance(wanted, Mapping):
                deletions = "".join(f"delete {ref}\n" for ref in wanted.values())
                self.run("update-ref", "--stdin", input=deletions.encode())
            for path in set(packs.glob("*")) - before:
                path.unlink(missing_ok=True)
            remove_unfinished(self.objects)
            raise FetchTooLarge(done.stopped)
        if done.timed_out:
            raise errors.timed_out(remote, limit)
        if done.exit_code != 0:
            raise errors.unreachable(remote, done.stderr)

    def list_refs(self, remote: str, *prefixes: str, timeout_s: float | None = None) -> dict[str, str]:
        """Refs of a remote below some prefixes (exact names count as prefixes), by full name.

        Only those travel where the server speaks protocol version 2. Names that are not UTF-8 are left out.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        address, secrets = for_git(remote, {**os.environ, **self._environment})
        found = ls_refs.list_refs(self, address, prefixes, timeout_s=limit, env=secrets) if prefixes else None
        if found is None:
            done = self.attempt("ls-remote", "--quiet", "--refs", "--", address, timeout_s=limit, env=secrets)
            if done.timed_out:
                raise errors.timed_out(remote, limit)
            if done.exit_code != 0:
                raise errors.unreachable(remote, done.stderr)
            lines = [line.partition(b"\t") for line in done.stdout.split(b"\n") if line]
            found = {name: sha.decode() for sha, _, name in lines}
            if any(len(sha) != 40 for sha in found.values()):
                raise BusError(
                    f"{without_credentials(remote)} is a SHA-256 repository",
                    "use a repository with SHA-1 object names",
                )
        wanted = tuple(prefix.encode() for prefix in prefixes) or (b"",)
        kept = {name: sha for name, sha in found.items() if name.startswith(wanted)}
        return {name.decode(): sha for name, sha in kept.items() if _is_utf8(name)}

    def remote_url(self, remote: str) -> str:
        """A remote's address after the user's ``insteadOf`` rules; a name without one comes back as it is.

        So does an address with credentials, which git is given unchanged by those rules.
        """
        address, secrets = for_git(remote)
        return remote if secrets else self.run("ls-remote", "--get-url", "--", address).decode().strip()

    def _talk(
        self,
        remote: str,
        *args: str,
        specs: Sequence[str],
        timeout_s: float,
        guard: Callable[[], str | None] | None = None,
    ) -> ProgramResult:
        """Run a command that talks to a remote; credentials in its address reach git by the environment."""
        address, secrets = for_git(remote, {**os.environ, **self._environment})
        return self.attempt(*args, "--", address, *specs, timeout_s=timeout_s, env=secrets, guard=guard)


class Scratch(GitRepo):
    """A repository whose new objects go to another folder. Made by `GitRepo.scratch`."""

    def __init__(self, base: GitRepo, folder: Path) -> None:
        from gitdb import LooseObjectDB

        others = base._environment.get("GIT_ALTERNATE_OBJECT_DIRECTORIES")
        reach = [_quoted(str(base.objects)), *([others] if others else [])]
        overlay = {
            "GIT_OBJECT_DIRECTORY": str(folder),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.pathsep.join(reach),
        }
        environment = {**base._environment, **overlay}
        super().__init__(base.directory, timeout_s=base.timeout_s, environment=environment)
        self._base = base
        self._folder = folder
        self._store_to = LooseObjectDB(str(folder))

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

        Args:
            parent: The parent commit; None: a commit without one, of these files alone.
            files: New contents by path; None removes the file.
            message: The commit message.
            when: Date of the commit (aware); None: now.
            merged: Further parents, which keep what they hold reachable.

        Raises:
            BrokenObject: The parent's trees are not ones that git would write, or too large.
            RevisionError: The parent has a file where a folder belongs.
        """
        import git

        base = None if parent is None else self._reader(parent).commit(parent).tree
        tree = self._tree(base, files, parent or "")
        repo = self._base._opened()
        actor, seconds = git.Actor(*AUTHOR), int((when or datetime.now(UTC)).timestamp())
        shas = [*([] if parent is None else [parent]), *merged]
        commit = git.Commit(
            repo,
            git.Commit.NULL_BIN_SHA,
            tree=git.Tree(repo, bytes.fromhex(tree)),
            author=actor,
            authored_date=seconds,
            author_tz_offset=0,
            committer=actor,
            committed_date=seconds,
            committer_tz_offset=0,
            message=message,
            parents=[git.Commit(repo, bytes.fromhex(sha)) for sha in shas],
            encoding="UTF-8",
        )
        stream = BytesIO()
        commit._serialize(stream)  # GitPython's interface of objects that can be stored
        return self._store("commit", stream.getvalue())

    def _tree(self, base: str | None, files: Mapping[str, bytes | None], parent: str) -> str:
        from git.objects.fun import tree_to_stream

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
                raise RevisionError(
                    f"the commit {parent[:12]} has a file named {name} where a folder belongs",
                    "rename that file, or ask for another commit",
                )
            entries[name] = (TREE_MODE, self._tree(sha, inner, parent))
        rows = [(bytes.fromhex(sha), int(mode, 8), name) for name, (mode, sha) in entries.items()]
        # Git compares names as bytes, a folder's as if it ended in a slash.
        rows.sort(key=lambda row: os.fsencode(row[2]) + (b"/" if row[1] == int(TREE_MODE, 8) else b""))
        stream = BytesIO()
        # As bytes, so that a name that is not UTF-8 stays what it is.
        encoded = [(sha, mode, cast("str", os.fsencode(name))) for sha, mode, name in rows]
        tree_to_stream(encoded, stream.write)
        return self._store("tree", stream.getvalue())

    def _reader(self, sha: str) -> GitRepo:
        """The base, which has a process open for reading; this one for what was fetched into it."""
        return self._base if self._base.exists(sha) else self

    def _store(self, kind: str, data: bytes) -> str:
        import gitdb

        try:
            stored = self._store_to.store(gitdb.IStream(kind.encode(), len(data), BytesIO(data)))
        except OSError as error:
            raise MachineError(f"cannot write to {self._folder}: {error.strerror or error}") from None
        return str(stored.hexsha, "ascii") if isinstance(stored.hexsha, bytes) else str(stored.hexsha)


def remove_unfinished(objects: Path) -> None:
    """Remove packs and objects that an ended fetch left unfinished. No other fetch may be going on."""
    for pattern in ("tmp_obj_*", "??/tmp_obj_*", "pack/tmp_*"):
        for path in objects.glob(pattern):
            path.unlink(missing_ok=True)


def _require_git() -> None:
    if find_program("git") is None:
        raise MachineError("git was not found on PATH", "install git 2.31 or later")


def _open(directory: Path, variables: Mapping[str, str]) -> gitpython.Repo:
    _require_git()
    import git

    for name in _MISLEADING:  # as hooks of git set them; GitPython would obey them, and no caller of ours may
        os.environ.pop(name, None)
    try:
        repo = git.Repo(directory, search_parent_directories=True)
    except (git.exc.InvalidGitRepositoryError, git.exc.NoSuchPathError):
        raise BusError(f"{directory} is not a git repository", "run this inside a checkout") from None
    except (configparser.Error, ValueError) as error:
        raise BusError(f"the configuration of {directory} is broken: {error}".replace("\n", " ")) from None
    # Whatever the caller's GIT_DIR says, objects are read here.
    places = {
        "GIT_DIR": str(repo.git_dir),
        "GIT_COMMON_DIR": str(repo.common_dir),
        "GIT_OBJECT_DIRECTORY": str(repo.odb.root_path()),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": "",
    }
    repo.git.update_environment(**{**places, **variables})
    return repo


def _change(path: str, old: tuple[str, str] | None, new: tuple[str, str] | None) -> FileChange:
    if new is None:
        return FileChange("D", path, "000000", "0" * 40)
    if old is None:
        return FileChange("A", path, *new)
    return FileChange("M" if old[0][:3] == new[0][:3] else "T", path, *new)


def _pack_guard(packs: Path, before: set[Path], limit_bytes: int, remote: str) -> Callable[[], str | None]:
    """What stops a fetch that brings more than a limit: it stays one pack, see `_OPTIONS`."""

    def too_large() -> str | None:
        size = 0
        for file in set(packs.glob("*")) - before:
            with contextlib.suppress(FileNotFoundError):
                size += file.stat().st_size
        return errors.too_large(remote, limit_bytes).message if size > limit_bytes else None

    return too_large


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _quoted(path: str) -> str:
    """A path as an element of GIT_ALTERNATE_OBJECT_DIRECTORIES, where a colon separates."""
    if ":" not in path and not path.startswith('"'):
        return path
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
