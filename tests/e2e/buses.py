"""A bus behind a real server, its client and runners as processes, and a watch for leaked credentials."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from tests.e2e.faults.procs import unpublished
from tests.fixtures.repo import BIN, Done, RepoFixture, build_repo, wait_for
from tests.fixtures.runner import RunnerFixture
from tests.servers.http import http_server
from tests.servers.proxy import Proxy, cut_proxy
from tests.servers.server import Server
from tests.servers.ssh import ssh_server

USER = "us er@x"
PASSWORD = "p%s@: w/7é#?'q"
# Every spelling in which the password could turn up.
SPELLINGS = tuple(
    text.encode()
    for text in (
        PASSWORD,
        quote(PASSWORD),
        quote(PASSWORD, safe=""),
        base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode(),
    )
)
PROGRAMS = {
    "echo": "print('hello from', arg)",
    "pause": "import time; print('began', flush=True); time.sleep(1.5)",
    "large": "import base64, os; print(base64.encodebytes(os.urandom(240_000)).decode())",
}
ASK = """
import sys
from pathlib import Path
from bridge.bus.requests import submit
from bridge.client.remotes import resolve_remote
from bridge.git.repo import GitRepo
from tests.fixtures.repo import RepoFixture
from tests.fixtures.runner import RunnerFixture
repo = RepoFixture(Path(sys.argv[1]))
git = GitRepo(repo.clone)
bus = resolve_remote(git)
for preset in sys.argv[2:]:
    manifest = RunnerFixture(repo).manifest(preset, audience=bus.audience)
    submit(git, bus.address, manifest, None)
    print(manifest.nonce)
"""


@dataclass
class Bus:
    """A repository whose remote is reached through a server, or as a folder.

    Attributes:
        address: As the user wrote it into the clone's configuration.
        server: None: a folder.
        proxy: In front of the server.
        said: Everything that commands printed.
    """

    repo: RepoFixture
    address: str
    server: Server | None = None
    proxy: Proxy | None = None
    said: list[str] = field(default_factory=list)
    _runners: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def remote(self) -> Path:
        """The bare repository itself."""
        return self.repo.remote.resolve()

    def kakeya(self, *args: str, timeout: float = 60, **env: str) -> Done:
        """A command of the client's, in the clone."""
        done = self.repo.program("kakeya_mac", *args, timeout=timeout, **env)
        self.said.append(done.out + done.err)
        return done

    def ask(self, *presets: str) -> list[str]:
        """Push requests for `PROGRAMS`, which only the runner knows; their nonces."""
        argv = [sys.executable, "-c", ASK, str(self.repo.root), *presets]
        env = {**self.repo.env, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(argv, env=env, cwd=self.repo.clone, capture_output=True, text=True, timeout=60)
        self.said.append(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def wait(self, nonce: str, seconds: int = 40) -> Done:
        """Follow a request home."""
        return self.kakeya("wait", nonce, "--seconds", str(seconds), "--json")

    def serve(self, name: str, *args: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a runner with a state folder of its own; it finds the remote in its environment.

        The client trusts its key.
        """
        self.repo.trust_runner(name, KAKEYA_STATE=str(self.state_of(name)))
        with self.log_of(name).open("ab") as log:
            command = [str(BIN / "kakeya_mac"), "runner", "serve", "--name", name, "--idle", "0.2", *args]
            variables = {"KAKEYA_REMOTE": self.address, "KAKEYA_STATE": str(self.state_of(name))}
            process = subprocess.Popen(
                command,
                env={**self.repo.env, **variables, **env},
                cwd=self.repo.root,
                stdout=log,
                stderr=log,
            )
        self._runners.append(process)
        return process

    def state_of(self, name: str) -> Path:
        return self.repo.root / f"state-{name}"

    def log_of(self, name: str) -> Path:
        return self.repo.root / f"{name}.log"

    def logs(self) -> str:
        """What all runners said."""
        return "\n".join(path.read_text(errors="replace") for path in self.repo.root.glob("*.log"))

    def stop(self) -> None:
        """End all runners."""
        for process in self._runners:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._runners:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def is_kept(self, nonce: str) -> bool:
        """Whether a runner keeps the result of a request because it is not published yet."""
        return any(nonce in unpublished(state) for state in self.repo.root.glob("state-*"))

    def cut(self) -> None:
        """Make the repository unreachable."""
        if self.proxy is not None:
            self.proxy.cut()
        else:
            self.remote.rename(self.repo.root / "away.git")

    def restore(self) -> None:
        """It is back."""
        if self.proxy is not None:
            self.proxy.restore()
        else:
            (self.repo.root / "away.git").rename(self.repo.remote)

    def hook(self, name: str, script: str) -> Path:
        """Install a hook of the server's."""
        path = self.remote / "hooks" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def git(self, *args: str) -> str:
        """Git in the bare repository itself."""
        return self.repo.git(*args, cwd=self.remote)

    def results(self, nonce: str) -> int:
        """How many results of a request the remote holds, wherever."""
        path = f".mac-bridge/results/{nonce}/result.json"
        return len(self.git("rev-list", "--all", "--full-history", "--", path).splitlines())


@dataclass
class Watch:
    """Looks at the arguments of every process again and again, and keeps those that hold the password."""

    leaked: set[bytes] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            for line in _command_lines():
                self.names.add(
                    os.path.basename(line.split(b"\0")[0].split(b" ")[0].decode("utf-8", "replace"))
                )
                if any(spelling in line for spelling in SPELLINGS):
                    self.leaked.add(line)


def _command_lines() -> list[bytes]:
    if not Path("/proc/self/cmdline").exists():
        done = subprocess.run(["ps", "-axww", "-o", "command="], capture_output=True)
        return done.stdout.splitlines()
    lines = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/cmdline", "rb") as file:
                lines.append(file.read())
    return [line for line in lines if line]


@contextlib.contextmanager
def open_bus(kind: str, root: Path) -> Iterator[Bus]:
    """A bus over `path`, `http` or `ssh`; at the end its runners are stopped and nothing may have leaked."""
    repo = build_repo(root / "repo", {"README.md": "a workload\n", "tests/test_x.py": "assert True\n"})
    # Over SSH the repository belongs to another account.
    (root / "repo" / "home" / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")
    RunnerFixture(repo).install(PROGRAMS)
    trace_packets(repo)
    with contextlib.ExitStack() as stack:
        bus = Bus(repo, str(repo.remote))
        if kind == "http":
            server = stack.enter_context(http_server(repo.remote, USER, PASSWORD, root / "server"))
            stack.enter_context(_no_leak(bus))
        elif kind == "ssh":
            server = stack.enter_context(ssh_server(repo.remote, root / "server"))
        if kind != "path":
            bus.server, bus.proxy = server, stack.enter_context(cut_proxy(server))
            bus.address = server.address(port=bus.proxy.port)
            repo.env.update(server.env)
        config = repo.clone / ".git" / "config"  # written by hand: `git remote set-url` would show it
        config.write_text(config.read_text().replace(str(repo.remote), bus.address))
        stack.callback(bus.stop)
        yield bus


def trace_packets(repo: RepoFixture) -> None:
    """Let every git of this repository write what it sends and gets into ``packets.txt`` next to it."""
    folder = repo.root / "bin"
    folder.mkdir()
    script = f'#!/bin/sh\nGIT_TRACE_PACKET="{repo.root}/packets.txt" exec {shutil.which("git")} "$@"\n'
    (folder / "git").write_text(script)
    (folder / "git").chmod(0o755)
    repo.env["PATH"] = f"{folder}{os.pathsep}{repo.env['PATH']}"


@contextlib.contextmanager
def _no_leak(bus: Bus) -> Iterator[None]:
    with Watch() as watch:
        yield
    assert "git" in watch.names
    assert not watch.leaked, f"in process arguments: {watch.leaked}"
    kept = bus.repo.clone / ".git" / "config"
    files = [path for path in bus.repo.root.rglob("*") if path.is_file() and path != kept]
    places = [str(path) for path in files if _holds(path.read_bytes())]
    assert not places, f"in files: {places}"
    assert not _holds("\n".join(bus.said).encode()), "in what a command printed"
    objects = subprocess.run(
        ["git", "cat-file", "--batch-all-objects", "--batch"],
        cwd=bus.remote,
        env=bus.repo.env,
        capture_output=True,
        check=True,
    )
    assert not _holds(objects.stdout), "in the remote"


def _holds(data: bytes) -> bool:
    return any(spelling in data for spelling in SPELLINGS)


def wait_for_log(bus: Bus, words: str, seconds: float = 30) -> None:
    """Wait until a runner has said something."""
    deadline = time.monotonic() + seconds
    while words not in bus.logs():
        assert time.monotonic() < deadline, f"no runner said {words!r}: {bus.logs()}"
        time.sleep(0.05)


__all__ = ["PASSWORD", "SPELLINGS", "USER", "Bus", "Watch", "open_bus", "wait_for", "wait_for_log"]
