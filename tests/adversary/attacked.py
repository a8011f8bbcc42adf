"""A real remote and a real runner under attack, and what must be true of the machine afterwards."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, Result, parse_result
from tests.adversary.attack import CommitBuilder, HostileCommit
from tests.adversary.dry_runner import install
from tests.fixtures.repo import RepoFixture, wait_for
from tests.fixtures.runner import RunnerFixture
from tests.objects import Objects


@dataclass
class Listener:
    """A server that must not be contacted; records each connection."""

    port: int
    calls: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    """Such a server on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = Listener(server.getsockname()[1])

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, peer = server.accept()
                    listener.calls.append(str(peer))
                    connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield listener


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file and link below a folder, for before and after."""
    return {
        str(path): str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@dataclass
class AttackedRunner:
    """One remote, one runner as a process of its own, and everything hostile that was pushed."""

    runner: RunnerFixture
    listener: Listener
    builder: CommitBuilder

    @property
    def repo(self) -> RepoFixture:
        return self.runner.repo

    def push(self, hostile: list[HostileCommit]) -> None:
        """Push all of them, each as a branch and into the inbox, with one plain git."""
        specs = [f"{one.commit}:{ref}" for one in hostile for ref in (one.branch, refs.INBOX + one.nonce)]
        for start in range(0, len(specs), 200):
            self.repo.git("push", "-q", str(self.repo.remote), *specs[start : start + 200])

    def wait(self, nonces: list[str], seconds: float) -> None:
        """Until the inbox holds none of these."""
        inbox = {refs.INBOX + nonce for nonce in nonces}
        wait_for(
            lambda: not inbox & self.repo.remote_refs(), seconds, f"an answer to each: {self.said()[-2000:]}"
        )

    def said(self) -> str:
        """What the runner said."""
        return self.repo.runner_log()

    def result(self, nonce: str, branch: str) -> Result:
        """The answer, from the bare repository itself."""
        ref = refs.RESULTS + nonce if self.runner.tip(refs.RESULTS + nonce) else branch
        text = self.repo.git("show", f"{ref}:{RESULT_ROOT}/{nonce}/{RESULT_NAME}", cwd=self.repo.remote)
        return parse_result(text.encode())

    def file(self, nonce: str, branch: str, name: str) -> str:
        """A file next to an answer."""
        git = GitRepo(self.repo.remote)
        data = git.read_file(branch, f"{RESULT_ROOT}/{nonce}/{name}", 64 << 20)
        git.close()
        assert data is not None, f"{nonce} has no {name}"
        return data.decode("utf-8", "replace").strip()


@contextlib.contextmanager
def attacked_runner(
    repo: RepoFixture, prepare: Callable[[AttackedRunner], None] = lambda _: None
) -> Iterator[AttackedRunner]:
    """A repository with the owner's presets; afterwards nothing of it may run, be written or have called.

    Args:
        repo: Where.
        prepare: What the owner does in addition.
    """
    runner = RunnerFixture(repo)
    install(runner)
    with listening() as listener:
        builder = CommitBuilder(
            Objects(repo.clone), refs.audience_of(str(repo.remote)), repo.root / "canary", listener.address
        )
        attacked = AttackedRunner(runner, listener, builder)
        prepare(attacked)
        main = repo.git("rev-parse", "main", cwd=repo.remote)
        folders = (repo.root / "home", runner.config, repo.remote / "hooks")
        untouched = {folder: files_of(folder) for folder in folders}
        settings = (repo.remote / "config").read_bytes()
        yield attacked
        assert not builder.canary.exists()
        assert not listener.calls
    assert repo.git("rev-parse", "main", cwd=repo.remote) == main
    assert (repo.remote / "config").read_bytes() == settings
    for folder, before in untouched.items():
        assert files_of(folder) == before, f"{folder} was changed"
    assert not runner.running(""), "processes are left"
