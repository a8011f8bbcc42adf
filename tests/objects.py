"""Git objects written straight into a repository, also such as git would never write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import gitdb

from bridge.git.repo import GitRepo, Scratch

PLAIN, PROGRAM, LINK, GITLINK, FOLDER = "100644", "100755", "120000", "160000", "40000"
Row = tuple[str, bytes | str, str]  # mode, name, sha


class Objects:
    """Writes loose objects of any content.

    Args:
        repository: A bare repository or a work tree.
    """

    def __init__(self, repository: Path) -> None:
        inner = repository / ".git"
        self.repository = repository
        self.folder = (inner if inner.is_dir() else repository) / "objects"
        self._store = gitdb.LooseObjectDB(str(self.folder))

    def write(self, kind: str, data: bytes) -> str:
        stored = self._store.store(gitdb.IStream(kind.encode(), len(data), BytesIO(data)))
        return str(stored.hexsha, "ascii")

    def blob(self, data: bytes) -> str:
        return self.write("blob", data)

    def tree(self, rows: Iterable[Row]) -> str:
        """A tree of these rows, in git's order; rows that come twice stay twice."""
        raw = [(mode, name.encode() if isinstance(name, str) else name, sha) for mode, name, sha in rows]
        raw.sort(key=lambda row: row[1] + b"/" if row[0] == FOLDER else row[1])
        parts = [mode.encode() + b" " + name + b"\0" + bytes.fromhex(sha) for mode, name, sha in raw]
        return self.write("tree", b"".join(parts))

    def commit(self, tree: str, parents: Sequence[str] = (), message: str = "by hand\n") -> str:
        who = "Mallory <mallory@example.org> 1772366400 +0000"
        lines = [f"tree {tree}", *(f"parent {parent}" for parent in parents), f"author {who}"]
        return self.write("commit", "\n".join([*lines, f"committer {who}", "", message]).encode())

    def commit_files(
        self, parent: str | None, files: Mapping[str, bytes | None], message: str = "by hand\n"
    ) -> str:
        """A commit that changes some files of its parent, by the bridge's own code."""
        repo = GitRepo(self.repository)
        scratch = Scratch(repo, self.folder)
        try:
            return scratch.commit_files(parent, files, message)
        finally:
            scratch.close()
            repo.close()
