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
from tests.adversary.attack import Forge, Forged
from tests.adversary.stage import install
from tests.bridge.runner.bench import Bench
from tests.houses import House, wait_for
from tests.objects import Objects


@dataclass
class Listener:
    """A server that nobody may talk to; counts who does."""

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
class Siege:
    """One remote, one runner as a process of its own, and everything hostile that was pushed."""

    bench: Bench
    listener: Listener
    forge: Forge

    @property
    def house(self) -> House:
        return self.bench.house

    def push(self, forged: list[Forged]) -> None:
        """Push all of them, each as a branch and into the inbox, with one plain git."""
        specs = [f"{one.commit}:{ref}" for one in forged for ref in (one.branch, refs.INBOX + one.nonce)]
        for start in range(0, len(specs), 200):
            self.house.git("push", "-q", str(self.house.remote), *specs[start : start + 200])

    def wait(self, nonces: list[str], seconds: float) -> None:
        """Until the inbox holds none of these."""
        inbox = {refs.INBOX + nonce for nonce in nonces}
        wait_for(
            lambda: not inbox & self.house.remote_refs(), seconds, f"an answer to each: {self.said()[-2000:]}"
        )

    def said(self) -> str:
        """What the runner said."""
        return self.house.runner_log()

    def result(self, nonce: str, branch: str) -> Result:
        """The answer, from the bare repository itself."""
        ref = refs.RESULTS + nonce if self.bench.tip(refs.RESULTS + nonce) else branch
        text = self.house.git("show", f"{ref}:{RESULT_ROOT}/{nonce}/{RESULT_NAME}", cwd=self.house.remote)
        return parse_result(text.encode())

    def file(self, nonce: str, branch: str, name: str) -> str:
        """A file beside an answer."""
        git = GitRepo(self.house.remote)
        data = git.read_file(branch, f"{RESULT_ROOT}/{nonce}/{name}", 64 << 20)
        git.close()
        assert data is not None, f"{nonce} has no {name}"
        return data.decode("utf-8", "replace").strip()


@contextlib.contextmanager
def besieged(house: House, prepare: Callable[[Siege], None] = lambda _: None) -> Iterator[Siege]:
    """A house with the owner's presets; afterwards nothing of it may run, be written or have called.

    Args:
        house: Where.
        prepare: What the owner does beside that.
    """
    bench = Bench(house)
    install(bench)
    with listening() as listener:
        forge = Forge(
            Objects(house.clone), refs.audience_of(str(house.remote)), house.root / "canary", listener.address
        )
        siege = Siege(bench, listener, forge)
        prepare(siege)
        main = house.git("rev-parse", "main", cwd=house.remote)
        folders = (house.root / "home", bench.config, house.remote / "hooks")
        untouched = {folder: files_of(folder) for folder in folders}
        settings = (house.remote / "config").read_bytes()
        yield siege
        assert not forge.canary.exists()
        assert not listener.calls
    assert house.git("rev-parse", "main", cwd=house.remote) == main
    assert (house.remote / "config").read_bytes() == settings
    for folder, before in untouched.items():
        assert files_of(folder) == before, f"{folder} was changed"
    assert not bench.running(""), "processes are left"
