"""The real `kakeya_engine serve` as a child process: started, asked for its metrics, counted, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parents[2]
KEY = "a key of this test alone, 0123456789"
START_S = 120.0
GRACE_S = 30.0
_SAMPLE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Census:
    """What a process holds; None where the system does not say.

    Attributes:
        descriptors: open files and sockets.
        threads: of the process.
    """

    descriptors: int | None
    threads: int | None

    def more_than(self, other: Census) -> bool:
        """Whether there is more of anything than there was."""
        mine, others = (self.descriptors, self.threads), (other.descriptors, other.threads)
        return any(a > b for a, b in zip(mine, others, strict=True) if a is not None and b is not None)


@dataclass(frozen=True)
class Serving:
    """A server that takes requests.

    Attributes:
        process: of the server.
        url: of its API, ``http://…/v1``.
        port: of 127.0.0.1.
        log: what it wrote to stderr.
    """

    process: subprocess.Popen[bytes]
    url: str
    port: int
    log: Path

    @property
    def root(self) -> str:
        """The address without the API's path."""
        return self.url.removesuffix("/v1")

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        got = requests.get(f"{self.root}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        return {name: float(value) for name, value in _SAMPLE.findall(got.text)}

    def census(self) -> Census:
        """Descriptors and threads."""
        folder = Path(f"/proc/{self.process.pid}")
        if not folder.exists():
            return Census(None, None)
        return Census(*(len(list((folder / name).iterdir())) for name in ("fd", "task")))

    def stop(self) -> tuple[int, float]:
        """Ask it to end: its exit code, and the seconds it took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(GRACE_S + 30)
        return code, time.monotonic() - began


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Serving]:
    """A server on a free port with the shipped registry and `KEY`; killed at the end if it is still there.

    Args:
        folder: for its output.
        options: of the command besides the port and the grace.

    Raises:
        AssertionError: it did not come up; the message holds what it wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, said = folder / "serve.log", folder / "serve.out"
    argv = [sys.executable, "-m", "engine", "serve", "--port", "0", "--grace", f"{GRACE_S:.0f}", *options]
    env = os.environ | {"KAKEYA_API_KEY": KEY}
    with log.open("wb") as errors, said.open("wb") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=env, cwd=ROOT
        )
    try:
        deadline = time.monotonic() + START_S
        while not said.read_text().endswith("\n"):
            wrote = log.read_text(errors="replace")
            assert process.poll() is None, f"the server ended with {process.returncode}: {wrote}"
            assert time.monotonic() < deadline, f"the server did not come up in {START_S:.0f} s: {wrote}"
            time.sleep(0.05)
        told = json.loads(said.read_text().splitlines()[-1])
        yield Serving(process, told["url"], told["port"], log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
