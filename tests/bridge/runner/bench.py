"""A runner's test bench: a real bare remote, presets of small programs, requests pushed with git."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bridge import signing
from bridge.bus.claims import Claim, claim
from bridge.bus.requests import RefValue, resolve_handle, submit
from bridge.bus.results import Believed, believe, fetch
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.proc import run_program
from bridge.protocol import refs
from bridge.protocol.manifest import REQUEST_PATH, Manifest
from bridge.runner.child import SUPERVISOR
from bridge.runner.config import RunnerConfig, open_config
from bridge.runner.daemon import Daemon
from tests.houses import House, allowed_line

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
}
TIMEOUTS = {"stubborn": 1}


class Clock:
    """Monotonic seconds and the time of day, moved by hand."""

    def __init__(self, seconds: float = 1000.0, start: datetime | None = None) -> None:
        self.seconds = self._first = seconds
        self._start = start or datetime.now(UTC)

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self.seconds - self._first)


class _Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


@dataclass
class Bench:
    """Builds runners and requests on one house."""

    house: House
    said: list[str] = field(default_factory=list)
    _handler: logging.Handler | None = None

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

    def config_of(self, name: str = "mac", **changes: Any) -> RunnerConfig:
        values = {"state_dir": self.state, "config_dir": self.config, "beat_s": 0.2, **changes}
        return open_config(name, str(self.house.remote), **values)

    def runner(self, name: str = "mac", *, config: RunnerConfig | None = None, **changes: Any) -> Daemon:
        """A runner in this process; `clock`, `now` and `prunes` are the daemon's, the rest the machine's."""
        logger = logging.getLogger("bridge")
        logger.setLevel(logging.INFO)
        if self.handler not in logger.handlers:
            logger.addHandler(self.handler)
        own = {key: changes.pop(key) for key in ("clock", "now", "prunes") if key in changes}
        return Daemon(config or self.config_of(name, **changes), idle_s=0.2, **own)

    @contextmanager
    def serving(self, *runners: Daemon, abort: bool = False) -> Iterator[None]:
        """Runners at work during the block; drained at its end, with `abort` their jobs, too."""
        stop = threading.Event()
        threads = [
            threading.Thread(target=each.serve, kwargs={"stop": stop}, daemon=True) for each in runners
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for each in runners if abort else ():
                each.abort()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)

    def has_said(self, *words: str) -> bool:
        """Whether one log message holds all of these words."""
        return any(all(word in line for word in words) for line in self.said)

    def claimed(self) -> list[str]:
        """Nonces of the requests that were claimed, in that order."""
        return [line.partition(" ")[0].rstrip(":") for line in self.said if ": claimed, attempt" in line]

    def list_signer(self, name: str, *namespaces: str) -> Path:
        """A key that this machine lists, by default for requests and cancel requests."""
        spaces = namespaces or (signing.REQUEST_NAMESPACE, signing.CANCEL_NAMESPACE)
        key = signing.ensure_key(self.house.root / "keys" / name, name)
        with (self.config / "allowed_signers").open("a") as listed:
            listed.write(allowed_line(signing.public_key(key), name, ",".join(spaces)))
        return key

    def ask_signed(self, key: Path, preset: str = "echo", **changes: Any) -> Manifest:
        manifest = self.manifest(preset, **changes)
        signature = signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
        return self.ask(signature=signature, **dict(manifest))

    def hook(self, name: str, script: str) -> Path:
        """Install a hook on the server."""
        path = self.house.remote / "hooks" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def tip(self, ref: str) -> str | None:
        """What a ref of the remote holds."""
        return self.house.git("for-each-ref", "--format=%(objectname)", ref, cwd=self.house.remote) or None

    def point(self, ref: str, commit: str) -> None:
        self.house.git("update-ref", ref, commit, cwd=self.house.remote)

    def delete(self, *names: str) -> None:
        for ref in names:
            self.house.git("update-ref", "-d", ref, cwd=self.house.remote)

    def left(self, nonce: str) -> set[str]:
        """The remote's refs that are about a request."""
        return {ref for ref in self.house.remote_refs() if nonce in ref}

    @property
    def handler(self) -> logging.Handler:
        if self._handler is None:
            self._handler = _Listener(self.said)
        return self._handler

    def serve_once(self, **changes: Any) -> int:
        return self.runner(**changes).serve(once=True, idle_timeout_s=20)

    def manifest(self, preset: str = "echo", **changes: Any) -> Manifest:
        git = GitRepo(self.house.clone)
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
        submit(GitRepo(self.house.clone), str(self.house.remote), manifest, signature)
        return manifest

    def commit(self, files: dict[str, str]) -> None:
        """Commit files in the clone."""
        for name, text in files.items():
            path = self.house.clone / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.house.git("add", "--all")
        self.house.git("-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-qm", "files")

    def push_commit(self, manifest: Manifest, commit: str) -> None:
        """Push any commit as if it were the request of `manifest`."""
        remote, inbox = str(self.house.remote), refs.INBOX + manifest.nonce
        if self.house.git("cat-file", "--batch-check", cwd=self.house.clone, input=commit).endswith(
            "missing"
        ):
            self.house.git("fetch", "-q", remote, commit)  # an answered one lies only on the remote
        self.house.git("push", "-q", remote, f"{commit}:{manifest.result_ref}", f"{commit}:{inbox}")

    def request_commit(self, manifest: Manifest) -> str:
        """A request commit that no ref holds yet."""
        git = GitRepo(self.house.clone)
        with git.scratch() as scratch:
            files = {REQUEST_PATH: manifest.to_bytes()}
            commit = scratch.commit_files(manifest.workload_sha, files, "request\n")
            objects = Path(self.house.git("rev-parse", "--git-path", "objects", cwd=self.house.clone))
            shutil.copytree(scratch.objects, self.house.clone / objects, dirs_exist_ok=True)
        return commit

    def answer(self, nonce: str, trusted: Path = Path("/nonexistent")) -> Believed:
        """The published result, fetched and judged as a client does."""
        git, remote = GitRepo(self.house.clone), str(self.house.remote)
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
            "from bridge import log\nfrom bridge.runner.daemon import Daemon\n"
            "from bridge.runner.config import open_config\nlog.configure()\n"
            "name, remote, state, config = sys.argv[1:5]\n"
            "folders = {'state_dir': Path(state), 'config_dir': Path(config)}\n"
            "config = open_config(name, remote, beat_s=0.2, **folders)\n"
            f"Daemon(config, idle_s=0.2).serve(once={once})\n"
        )
        argv = [sys.executable, "-c", script, name, str(self.house.remote), str(self.state), str(self.config)]
        log = (self.house.root / f"{name}.log").open("ab")
        with log:
            return subprocess.Popen(argv, env=self.house.env, stdout=log, stderr=log, cwd=self.house.root)

    def claim_as(self, other: RunnerConfig, asked: Manifest, *, signed: bool = True, **options: Any) -> Claim:
        """Claim a request as another runner does."""
        cache = GitCache(self.house.root / "by-hand.git", str(self.house.remote))
        commit = self.tip(asked.result_ref) or ""
        assert not cache.bring({asked.result_ref: commit}, [asked.result_ref])
        if signed:
            options["sign"] = other.sign_claim
        place = RefValue(asked.result_ref, commit)
        held = claim(cache, cache.remote, nonce=asked.nonce, place=place, identity=other.identity, **options)
        assert held is not None
        return held

    def in_rooms(self, name: str) -> list[Path]:
        """Where running jobs have a file of this name in the folder they started in."""
        return list((self.state / "runner").glob(f"*/jobs/*/workspace/{name}"))

    def running(self, script: str) -> list[int]:
        """Processes that run one of this bench's programs; supervisors are left out."""
        path = str(self.house.root / script)
        done = run_program(["ps", "-axo", "pid=,stat=,command="], timeout_s=10, limit_bytes=1 << 22)
        rows = [line.split(None, 2) for line in done.stdout.decode("utf-8", "replace").splitlines()]
        return [
            int(pid)
            for pid, state, command in rows
            if path in command and SUPERVISOR[1] not in command and "Z" not in state
        ]
