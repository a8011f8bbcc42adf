"""Real repositories, real programs: what the tests stand on.

`House` is a bare remote, a workload clone of it, and folders of its own for state and configuration, so that
a test never reads or writes the developer's. `House.kakeya` runs a command in the test's process, because a
start of Python takes a third of a second; `House.program` runs the installed console script.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.cli import cli, run_edge

BIN = Path(sys.executable).parent
_RUNNER_NAMESPACES = "kakeya-mac-result,kakeya-mac-claim,kakeya-mac-runner"
_FIRST = tempfile.TemporaryDirectory(prefix="kakeya-houses-")  # gone with the process


def allowed_line(public: Path, name: str, namespaces: str) -> str:
    """The line of a list that lets the public key in a file sign as `name`."""
    return f'{name} namespaces="{namespaces}" {public.read_text(encoding="utf-8").strip()}\n'


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of standard output."""
        assert self.out.strip(), f"nothing on stdout; stderr: {self.err}"
        document = json.loads(self.out.strip().splitlines()[-1])
        assert isinstance(document, dict)
        return document


@dataclass
class House:
    """A remote, a clone of it, and private state."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def remote(self) -> Path:
        return self.root / "remote.git"

    @property
    def clone(self) -> Path:
        return self.root / "clone"

    def git(self, *args: str, cwd: Path | None = None, input: str | None = None) -> str:
        done = subprocess.run(
            ["git", *args],
            cwd=cwd or self.clone,
            env=self.env,
            capture_output=True,
            text=True,
            input=input,
        )
        assert done.returncode == 0, f"git {' '.join(args)}: {done.stderr}"
        return done.stdout.strip()

    def head(self) -> str:
        """The commit that the clone is on."""
        folder = self.clone / ".git"
        _, _, branch = (folder / "HEAD").read_text().strip().partition("ref: ")
        return (folder / (branch or "HEAD")).read_text().strip()

    def kakeya(self, *args: str, cwd: Path | None = None, **env: str) -> Done:
        """What `kakeya_mac` does with these words, environment and folder."""
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            stack.callback(_set_environment, dict(os.environ))
            _set_environment({**self.env, **env})
            stack.enter_context(contextlib.chdir(cwd or self.clone))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            code = run_edge(cli, list(args))
            out.seek(0), err.seek(0)
            return Done(code, out.read(), err.read())

    def program(
        self, name: str, *args: str, cwd: Path | None = None, timeout: float = 100, **env: str
    ) -> Done:
        done = subprocess.run(
            [str(BIN / name), *args],
            cwd=cwd or self.clone,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def trust_runner(self, name: str = "testmac", **env: str) -> Path:
        """Pin the key of a runner on this machine for the client; its private half."""
        own = {**self.env, **env}
        key = Path(own["KAKEYA_STATE"]) / "runner" / name / "id_ed25519"
        if not key.exists():
            key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"kakeya-mac runner {name}"]
            subprocess.run([*make, "-f", str(key)], check=True, stdin=subprocess.DEVNULL)
        trusted = Path(self.env["KAKEYA_CONFIG"]) / "trusted_runners"
        trusted.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        line = f'{name} namespaces="{_RUNNER_NAMESPACES}" {key.with_name("id_ed25519.pub").read_text()}'
        known = trusted.read_text() if trusted.exists() else ""
        if line not in known:
            trusted.write_text(known + line)
        return key

    @contextlib.contextmanager
    def runner(
        self, *args: str, name: str = "testmac", trusted: bool = True, **env: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """An embedded runner as a process of its own, which the client trusts; drained at the end."""
        if trusted:
            self.trust_runner(name, **env)
        log = (self.root / f"{name}.log").open("ab")
        command = [
            str(BIN / "kakeya_mac"),
            "runner",
            "serve",
            "--remote",
            str(self.remote),
            "--name",
            name,
            *args,
        ]
        process = subprocess.Popen(command, env={**self.env, **env}, cwd=self.root, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            log.close()

    def runner_log(self, name: str = "testmac") -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def remote_refs(self) -> set[str]:
        lines = self.git("for-each-ref", "--format=%(refname)", cwd=self.remote).splitlines()
        return set(lines)


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def isolated_env(root: Path) -> dict[str, str]:
    """The developer's environment without their git configuration, state, settings or workflow run."""
    foreign = ("KAKEYA_", "GIT_", "SSH_AUTH", "GITHUB_", "GH_", "ACTIONS_", "RUNNER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    home = root / "home"
    home.mkdir(exist_ok=True)
    return {
        **kept,
        "HOME": str(home),
        "KAKEYA_STATE": str(root / "state"),
        "KAKEYA_CONFIG": str(root / "config"),
        "GIT_CONFIG_NOSYSTEM": "1",
        "XDG_CONFIG_HOME": str(home / ".config"),
        "PYTHONUNBUFFERED": "1",
    }


def build_house(root: Path, files: dict[str, str] | None = None) -> House:
    """A bare remote with one commit on ``main``, and a clone of it."""
    root.mkdir(parents=True, exist_ok=True)
    house = House(root, isolated_env(root))
    built = _built(
        tuple((files or {"README.md": "a workload\n"}).items()), house.env.get("GIT_DEFAULT_HASH", "sha1")
    )
    shutil.copytree(built, root, symlinks=True, dirs_exist_ok=True)
    config = house.clone / ".git" / "config"
    config.write_text(config.read_text().replace(str(built / "remote.git"), str(house.remote)))
    return house


@functools.cache
def _built(files: tuple[tuple[str, str], ...], hashed: str) -> Path:
    """The first house of its kind and hash in this process; the others are copies of it."""
    root = Path(_FIRST.name) / secrets.token_hex(4)
    root.mkdir()
    house = House(root, isolated_env(root))
    options = ("--quiet", "--bare", "--initial-branch=main", f"--object-format={hashed}")
    house.git("init", *options, str(house.remote), cwd=root)
    house.git("clone", "--quiet", str(house.remote), str(house.clone), cwd=root)
    for name, text in files:
        path = house.clone / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    house.git("checkout", "--quiet", "-B", "main")
    house.git("add", "--all")
    house.git(
        "-c", "user.name=Tester", "-c", "user.email=tester@example.org", "commit", "--quiet", "-m", "workload"
    )
    house.git("push", "--quiet", "origin", "main")
    house.git("config", "core.checkStat", "minimal")  # a copy has other inodes, and is as clean
    house.git("config", "core.trustCtime", "false")
    house.git("config", "receive.autogc", "false", cwd=house.remote)  # a process less of every push
    for sample in root.rglob("*.sample"):
        sample.unlink()
    return root


def wait_for(condition: Any, seconds: float = 30, what: str = "the condition") -> None:
    """Poll until `condition()` is true; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds} s"
        time.sleep(0.05)
