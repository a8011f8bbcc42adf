"""A runner's test bench: a real bare remote, presets of small programs, requests pushed with git."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bridge.bus.git import Git
from bridge.bus.handles import resolve_handle
from bridge.bus.requests import build, submit
from bridge.bus.results import Believed, believe, fetch
from bridge.proc import run_program
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.runner.child import SUPERVISOR
from bridge.runner.serve import Runner
from bridge.runner.station import Station, open_station
from tests.houses import House

# Every program an owner's preset may run here, by preset name. `arg` is the request's parameter.
PROGRAMS = {
    "echo": "print('hello from', arg)",
    "fail": "import sys; print('about to fail'); sys.exit(3)",
    "sleep": "import time; print('progress 1/4 sleeping soundly', flush=True); time.sleep(60)",
    "stubborn": (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    ),
    "flood": "while True: print('x' * 100000)",
    "environment": "import json, os; print(json.dumps(dict(os.environ)))",
    "leak": "print('the token is', arg)",
}
TIMEOUTS = {"stubborn": 1}


@dataclass
class Bench:
    """Builds runners and requests on one house."""

    house: House
    said: list[str] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.house.root / "config"

    @property
    def state(self) -> Path:
        return self.house.root / "state"

    def install(self, programs: dict[str, str] | None = None) -> None:
        """Write the owner's presets."""
        folder = self.config / "presets"
        folder.mkdir(parents=True, exist_ok=True)
        for name, program in (programs or PROGRAMS).items():
            script = self.house.root / f"{name}.py"
            script.write_text("import sys\narg = sys.argv[1]\n" + textwrap.dedent(program))
            self.preset(name, ["${python}", "-I", str(script), "{word}"], timeout=TIMEOUTS.get(name, 30))

    def preset(self, name: str, argv: list[str], timeout: int = 30, tail: str = "", **keys: str) -> None:
        """Write one preset of the owner."""
        values = {"engine": "installed", "workspace": "none", **keys}
        lines = [
            f'name = "{name}"',
            'summary = "A test program."',
            f"argv = {argv!r}",
            f"timeout_s = {timeout}",
        ]
        lines += [f'{key} = "{value}"' for key, value in values.items()]
        word = (
            '[params.word]\ntype = "string"\npattern = "[^-].*"\ndefault = "test"\ndescription = "a word"\n'
        )
        lines += [word if "{word}" in argv else "", tail]
        folder = self.config / "presets"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.toml").write_text("\n".join(lines))

    def policy(self, text: str) -> None:
        self.config.mkdir(exist_ok=True)
        (self.config / "policy.toml").write_text(text)
        (self.config / "policy.toml").chmod(0o600)

    def station(self, name: str = "mac", **changes: Any) -> Station:
        values = {"state_dir": self.state, "config_dir": self.config, "beat_s": 0.2, **changes}
        return open_station(name, str(self.house.remote), **values)

    def runner(self, name: str = "mac", **changes: Any) -> Runner:
        return Runner(self.station(name, **changes), say=self.said.append, idle_s=0.2)

    def serve_once(self, **changes: Any) -> int:
        return self.runner(**changes).serve(once=True, idle_timeout_s=20)

    def manifest(self, preset: str = "echo", **changes: Any) -> Manifest:
        git = Git(self.house.clone)
        now = datetime.now(UTC).replace(microsecond=0)
        nonce = refs.new_nonce(now, os.urandom(6))
        values: dict[str, Any] = {
            "nonce": nonce,
            "preset": preset,
            "workload_sha": git.resolve("HEAD"),
            "result_ref": refs.request_ref(preset, nonce, None),
            "created_at": now,
            "expires_at": now + timedelta(hours=1),
            "audience": refs.audience_of(str(self.house.remote)),
        }
        return Manifest(**{**values, **changes})

    def ask(self, preset: str = "echo", *, signature: bytes | None = None, **changes: Any) -> Manifest:
        """Push a request as the client does."""
        manifest = self.manifest(preset, **changes)
        submit(Git(self.house.clone), str(self.house.remote), manifest, signature)
        return manifest

    def push_commit(self, manifest: Manifest, commit: str) -> None:
        """Push any commit as if it were the request of `manifest`."""
        remote, inbox = str(self.house.remote), refs.inbox_ref(manifest.nonce)
        if self.house.git("cat-file", "--batch-check", cwd=self.house.clone, input=commit).endswith(
            "missing"
        ):
            self.house.git("fetch", "-q", remote, commit)  # an answered one lies only on the remote
        self.house.git("push", "-q", remote, f"{commit}:{manifest.result_ref}", f"{commit}:{inbox}")

    def request_commit(self, manifest: Manifest) -> str:
        return build(Git(self.house.clone), manifest, None)

    def answer(self, nonce: str, trusted: Path = Path("/nonexistent")) -> Believed:
        """The published result, fetched and judged as a client does."""
        git, remote = Git(self.house.clone), str(self.house.remote)
        fetched = fetch(git, remote, resolve_handle(git, remote, nonce))
        assert fetched is not None, f"no result of {nonce}; the runner said {self.said}"
        return believe(fetched, trusted=trusted)

    def verdict(self, nonce: str) -> tuple[str, str]:
        """Status and reason of the published result."""
        found = self.answer(nonce).result.verdict
        return found.status.value, found.reason.value

    def log(self, nonce: str) -> str:
        return self.answer(nonce).files["log.txt"].decode()

    def daemon(self, name: str = "mac", *, once: bool = False) -> subprocess.Popen[bytes]:
        """The same runner as a process of its own."""
        script = (
            "import sys\nfrom pathlib import Path\n"
            "from bridge.runner.serve import Runner\nfrom bridge.runner.station import open_station\n"
            "name, remote, state, config = sys.argv[1:5]\n"
            "folders = {'state_dir': Path(state), 'config_dir': Path(config)}\n"
            "station = open_station(name, remote, beat_s=0.2, **folders)\n"
            f"Runner(station, say=lambda line: print(line, flush=True), idle_s=0.2).serve(once={once})\n"
        )
        argv = [sys.executable, "-c", script, name, str(self.house.remote), str(self.state), str(self.config)]
        log = (self.house.root / f"{name}.log").open("ab")
        with log:
            return subprocess.Popen(argv, env=self.house.env, stdout=log, stderr=log, cwd=self.house.root)

    def daemon_log(self, name: str = "mac") -> str:
        return (self.house.root / f"{name}.log").read_text(errors="replace")

    def in_rooms(self, name: str) -> list[Path]:
        """Where running jobs have a file of this name in the folder they started in."""
        return list((self.state / "runner").glob(f"*/jobs/*/workspace/{name}"))

    def running(self, script: str) -> list[int]:
        """Processes that run one of this bench's programs; a supervisor that waits for one only names it."""
        path = str(self.house.root / script)
        done = run_program(["ps", "-axo", "pid=,stat=,command="], timeout_s=10, limit_bytes=1 << 22)
        rows = [line.split(None, 2) for line in done.stdout.decode("utf-8", "replace").splitlines()]
        return [
            int(pid)
            for pid, state, command in rows
            if path in command and SUPERVISOR[1] not in command and "Z" not in state
        ]
