"""Git in one repository: objects read and written, refs listed, pushes and fetches.

Objects are read through a ``cat-file`` that stays open and written without git's help (`bridge.bus.catfile`,
`bridge.bus.objects`), so that a request's way costs few processes beyond its pushes and fetches. What the
commits mean is in the modules around it. Nothing here checks out a file, moves HEAD or touches an index.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bridge.bus import changes, failures
from bridge.bus.address import for_git
from bridge.bus.catfile import CatFile
from bridge.bus.changes import Change
from bridge.bus.command import FETCH_LIMIT_BYTES, NETWORK_TIMEOUT_S, Command
from bridge.bus.objects import Commit, Entry, Store, commit_bytes, parse_commit, tree_bytes
from bridge.errors import BusError, MachineError, RevisionError

# What is larger was made to cost memory and time. A folder of 400,000 files fits.
_LARGEST = {"commit": 1 << 20, "tree": 16 << 20}
_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


@dataclass(frozen=True)
class Update:
    """One ref to change by a push.

    Attributes:
        ref: Full name on the remote.
        new: The commit it shall hold; None deletes it.
        expected: The commit it must hold now; empty: it must not exist.
    """

    ref: str
    new: str | None
    expected: str


class Git(Command):
    """Git in one repository.

    Args:
        directory: A work tree, a bare repository or a folder inside one.
        timeout_s: Deadline of a command, unless the call names another.
        environment: Variables added to every command.
        store: Where new objects go; None: the repository's own place, asked for when it is needed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        timeout_s: float = NETWORK_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(directory, timeout_s=timeout_s, environment=environment)
        self._known_store = store
        self._kinds = CatFile(lambda source: self.keep_open("cat-file", "--batch-check", source=source))
        self._contents = CatFile(
            lambda source: self.keep_open("cat-file", "--batch", source=source), contents=True
        )

    def close(self) -> None:
        """End the processes that were kept for reading; the next question starts them anew."""
        self._kinds.close()
        self._contents.close()

    @contextlib.contextmanager
    def scratch(self) -> Generator[Git, None, None]:
        """The same repository, with new objects going to a temporary folder that is removed at the end.

        What is written inside can be read and pushed inside; the repository's own object store never sees it.
        """
        own = self._store
        # Inside another scratch its alternates stay in reach, too.
        others = self._environment.get("GIT_ALTERNATE_OBJECT_DIRECTORIES")
        reach = [quoted(str(own.folder)), *([others] if others else [])]
        with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
            overlay = {
                "GIT_OBJECT_DIRECTORY": folder,
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.pathsep.join(reach),
            }
            inside = Git(
                self.directory,
                timeout_s=self.timeout_s,
                environment={**self._environment, **overlay},
                store=Store(Path(folder), own.algorithm),
            )
            try:
                yield inside
            finally:
                inside.close()

    def layout(self) -> tuple[Store, Path] | None:
        """Where objects are, and the file that says how shallow the repository is; None: there is none."""
        asked = ("--path-format=absolute", "--git-path", "objects", "--git-path", "shallow")
        done = self.attempt("rev-parse", *asked, "--show-object-format")
        if done.exit_code != 0:
            return None
        objects, shallow, algorithm = done.stdout.removesuffix(b"\n").rsplit(b"\n", 2)
        return Store(Path(os.fsdecode(objects)), algorithm.decode()), Path(os.fsdecode(shallow))

    def forget_store(self) -> None:
        """Ask anew where objects go: the repository was made again."""
        self._known_store = None

    @property
    def _store(self) -> Store:
        known = self._known_store  # another thread may forget it meanwhile
        if known is None:
            layout = self.layout()
            if layout is None:
                self.run("rev-parse", "--git-dir")  # says what is wrong
                raise BusError(f"git does not say where {self.directory} keeps objects")
            known = self._known_store = layout[0]
        return known

    # Reading ----------------------------------------------------------------------------------------------

    def resolve(self, rev: str) -> str:
        """The commit a revision names.

        Raises:
            RevisionError: It names none, or is not a revision at all.
        """
        if not rev or rev.startswith("-") or not rev.isprintable():
            raise RevisionError(f"{rev!r} is not a revision", "give a branch, a tag or a commit")
        done = self.attempt("rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}")
        if done.exit_code != 0 and b"fatal:" in done.stderr:
            raise failures.command_error("rev-parse", str(self.directory), done.exit_code, done.stderr)
        sha = done.stdout.decode().strip()
        if done.exit_code != 0 or _SHA.fullmatch(sha) is None:
            raise RevisionError(
                f"no commit is called {rev!r} in {self.directory}",
                "git fetch it first, or check the spelling",
            )
        return sha

    def current_branch(self) -> str | None:
        """The branch HEAD is on, without ``refs/heads/``; None: detached."""
        done = self.attempt("symbolic-ref", "--quiet", "--short", "HEAD")
        return done.stdout.decode("utf-8", "replace").strip() or None if done.exit_code == 0 else None

    def top(self) -> Path:
        """The root of the work tree; of a bare repository, the repository itself."""
        done = self.attempt("rev-parse", "--show-toplevel")
        if done.exit_code != 0:
            done = self.attempt("rev-parse", "--absolute-git-dir")
        return Path(os.fsdecode(done.stdout).rstrip("\n")) if done.exit_code == 0 else self.directory

    def settings(self, pattern: str) -> list[tuple[str, str]]:
        """Configured values whose key matches a regular expression of git's, in order, keys lower-cased."""
        done = self.attempt("config", "--null", "--get-regexp", pattern)
        pairs = []
        for item in done.stdout.decode("utf-8", "surrogateescape").split("\0"):
            key, _, value = item.partition("\n")
            if key:
                pairs.append((key, value))
        return pairs

    def is_dirty(self, timeout_s: float) -> bool | None:
        """Whether tracked files differ from HEAD; None: it could not be told in time, or there is no work
        tree.

        Looks at every tracked file, so its cost grows with their number. Never writes the index.
        """
        flags = ("--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all")
        done = self.attempt("diff", *flags, "HEAD", timeout_s=timeout_s)
        return None if done.timed_out or done.exit_code not in (0, 1) else done.exit_code == 1

    def exists(self, sha: str) -> bool:
        """Whether this repository holds the object."""
        return self.kind_and_size(sha)[0] != "missing"

    def commit(self, sha: str) -> Commit:
        """Read one commit.

        Raises:
            BusError: The object is missing or not a commit.
        """
        return parse_commit(sha, self._read("commit", sha))

    def entries(self, tree: str) -> list[Entry]:
        """The rows of one tree (not of its subtrees); `tree` may be any tree-ish: ``<commit>:folder``."""
        rows = []
        for line in self.run("ls-tree", "-z", tree).split(b"\0"):
            if line:
                head, _, name = line.partition(b"\t")
                mode, kind, sha = head.decode("ascii").split(" ")
                rows.append(Entry(mode, kind, sha, os.fsdecode(name)))
        return rows

    def read_tree(self, tree: str) -> bytes:
        """The raw bytes of one tree object, for `bridge.bus.trees`; `tree` may be any tree-ish."""
        return self._read("tree", tree if ":" in tree else f"{tree}^{{tree}}")

    def changes(self, old: str, new: str) -> list[Change]:
        """What differs between two trees or commits; see `bridge.bus.changes`."""
        return changes.between(self.read_tree, old, new)

    def files(self, tree: str) -> list[Change]:
        """Every file of a tree or commit as a change from nothing; folders as in `changes`."""
        return changes.between(self.read_tree, None, tree)

    def read_blob(self, commit: str, path: str, limit: int) -> bytes | None:
        """A file's bytes in a commit; None when there is no plain file at that path.

        Raises:
            BusError: The file is larger than `limit` bytes.
        """
        [answer] = self._contents.ask([f"{commit}:{path}"], timeout_s=self.timeout_s, limit=limit)
        return answer[3] if answer is not None and answer[1] == "blob" else None

    def oid(self, name: str) -> str | None:
        """The sha of what a name stands for, a ref for instance; None when there is nothing."""
        [answer] = self._kinds.ask([name], timeout_s=self.timeout_s)
        return None if answer is None else answer[0]

    def kind_and_size(self, name: str) -> tuple[str, int]:
        """An object's kind (``missing`` when there is none) and its size in bytes."""
        [answer] = self._kinds.ask([name], timeout_s=self.timeout_s)
        return ("missing", 0) if answer is None else answer[1:3]

    def read_objects(self, shas: Sequence[str], limit: int) -> list[bytes]:
        """The bytes of many objects, in order.

        Raises:
            BusError: One is missing, or together they hold more than `limit` bytes.
        """
        total = 0
        for sha, answer in zip(shas, self._kinds.ask(shas, timeout_s=self.timeout_s), strict=True):
            if answer is None:
                raise BusError(f"the object {sha} is missing in {self.directory}")
            total += answer[2]
        if total > limit:
            raise BusError(f"{len(shas)} files with {total} bytes, but at most {limit} are read")
        found = self._contents.ask(shas, timeout_s=self.timeout_s)
        contents = [answer[3] for answer in found if answer is not None]
        if len(contents) < len(shas):
            raise BusError(f"objects that were just there are missing in {self.directory}")
        return contents

    def _read(self, kind: str, name: str) -> bytes:
        """The bytes of an object of that kind."""
        [answer] = self._contents.ask([name], timeout_s=self.timeout_s, limit=_LARGEST[kind])
        if answer is None or answer[1] != kind:
            what = "missing" if answer is None else f"a {answer[1]}, not a {kind}"
            raise BusError(f"the object {name} is {what} in {self.directory}")
        return answer[3]

    def refs(self, prefix: str) -> dict[str, str]:
        """Local refs under a prefix, by full name."""
        listed = self.run("for-each-ref", "--format=%(objectname) %(refname)", prefix)
        output = listed.decode("utf-8", "replace")  # anyone may push a name of any bytes; it is none of ours
        return {ref: sha for sha, _, ref in (line.partition(" ") for line in output.split("\n") if line)}

    # Writing objects --------------------------------------------------------------------------------------

    def write_blob(self, data: bytes) -> str:
        """Store a file's bytes; returns its sha."""
        return self._write("blob", data)

    def write_tree(self, entries: Sequence[Entry]) -> str:
        """Store one tree; returns its sha. Children need not be present (a partial clone lacks some)."""
        return self._write("tree", tree_bytes(entries))

    def write_raw_tree(self, data: bytes) -> str:
        """Store a tree from its raw bytes; returns its sha. What an old tree has odd in it stays as it is."""
        return self._write("tree", data)

    def commit_tree(
        self, tree: str, parents: Sequence[str], message: str, *, when: datetime | None = None
    ) -> str:
        """Store one commit under the bridge's own name, dated `when` (aware) or now; returns its sha."""
        return self._write("commit", commit_bytes(tree, parents, message, when or datetime.now(UTC)))

    def _write(self, kind: str, data: bytes) -> str:
        try:
            return self._store.put(kind, data)
        except OSError as error:
            raise MachineError(f"cannot write to {self._store.folder}: {error.strerror or error}") from None

    # The network ------------------------------------------------------------------------------------------

    def push(
        self, remote: str, updates: Sequence[Update], *, timeout_s: float | None = None, atomic: bool = True
    ) -> None:
        """Change refs of a remote, each only if it still holds what is expected; all of them or none.

        Raises:
            LeaseLost: A ref did not hold what was expected.
            PushRejected: The remote said no; the message has its words.
            RemoteUnreachable: It did not answer, or refused the credentials.
        """
        leases = [f"--force-with-lease={update.ref}:{update.expected}" for update in updates]
        specs = [f"{update.new or ''}:{update.ref}" for update in updates]
        flags = ["--atomic"] if atomic and len(updates) > 1 else []
        limit = self.timeout_s if timeout_s is None else timeout_s
        done = self.talk(
            remote,
            *("push", "--porcelain", "--no-verify", "--no-signed", "--no-follow-tags"),
            *("--recurse-submodules=no", *flags, *leases),
            specs=specs,
            timeout_s=limit,
        )
        if done.timed_out:
            raise failures.timed_out(remote, limit)
        if done.exit_code != 0:
            raise failures.push_error(remote, done.stdout, done.stderr)

    def fetch(
        self,
        remote: str,
        refspecs: Sequence[str],
        *,
        depth: int | None = None,
        prune: bool = False,
        timeout_s: float | None = None,
        limit_bytes: int = FETCH_LIMIT_BYTES,
        guard: Callable[[], str | None] | None = None,
    ) -> None:
        """Fetch refs; writes no FETCH_HEAD, and no ref that a refspec does not name.

        Args:
            remote: Address of the remote.
            refspecs: What to fetch, and the refs it becomes here.
            depth: Commits of each history; None: all.
            prune: Whether refs here that match and are gone there are removed.
            timeout_s: As in `attempt`.
            limit_bytes: Most that may come. It then stays one pack, for what git unpacks cannot be counted.
            guard: As in `attempt`, in place of `limit_bytes`.

        Raises:
            RemoteUnreachable: The remote did not answer, or has no such ref.
            BusError: It sends more than `limit_bytes`, or `guard` stopped it.
        """
        # What is unpacked may be a thousand times what came, unless it is compressed again.
        settings: tuple[str, ...] = ("-c", "core.looseCompression=1")
        if guard is None:
            settings, guard = ("-c", "fetch.unpackLimit=1"), self._store.pack_guard(limit_bytes)
        flags = [f"--depth={depth}"] if depth else []
        flags += ["--prune"] if prune else []
        limit = self.timeout_s if timeout_s is None else timeout_s
        done = self.talk(
            remote,
            *(*settings, "fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance"),
            *("--no-recurse-submodules", *flags),
            specs=refspecs,
            timeout_s=limit,
            guard=guard,
        )
        if done.stopped is not None:
            raise BusError(done.stopped)
        if done.timed_out:
            raise failures.timed_out(remote, limit)
        # With --depth, patterns that match nothing end in 1 without a word; what is gone was pruned.
        nothing_matched = depth is not None and done.exit_code == 1 and not done.stderr.strip()
        if done.exit_code != 0 and not nothing_matched:
            raise failures.unreachable(remote, done.stderr)

    def ls_remote(self, remote: str, *patterns: str, timeout_s: float | None = None) -> dict[str, str]:
        """Refs of a remote by full name. The server sends them all; patterns only choose what is returned.

        Raises:
            RemoteUnreachable: The remote did not answer, or refused the credentials.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        done = self.talk(remote, "ls-remote", "--quiet", "--refs", specs=patterns, timeout_s=limit)
        if done.timed_out:
            raise failures.timed_out(remote, limit)
        if done.exit_code != 0:
            raise failures.unreachable(remote, done.stderr)
        lines = done.stdout.decode("utf-8", "replace").split("\n")
        return {ref: sha for sha, _, ref in (line.partition("\t") for line in lines) if ref}

    def remote_url(self, remote: str) -> str:
        """A remote's address after the user's ``insteadOf`` rules; a name without one comes back as it is.

        So does an address with credentials, which git is given unchanged by those rules.
        """
        address, secrets = for_git(remote)
        return remote if secrets else self.run("ls-remote", "--get-url", "--", address).decode().strip()


def quoted(path: str) -> str:
    """A path as an element of GIT_ALTERNATE_OBJECT_DIRECTORIES, where a colon separates."""
    if ":" not in path and not path.startswith('"'):
        return path
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
