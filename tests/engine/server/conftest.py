"""A real server as a child process, one for each worker, and the official client of it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import openai
import pytest

from tests.engine.server.by_heart import FOLDER
from tests.engine.server.raw_server import RawServer, opened, refuse_talk

ROOT = Path(__file__).resolve().parents[3]
KEY = "a-key-of-the-tests-0123456789"
REGISTRY = f"""
default = "demo"
[models.demo]
summary = "the shipped pair"
target = "shipped"
drafter = "shipped"
channels = ["native", "rotated4", "sink-window-256"]
[models.heart]
summary = "knows three answers by heart"
target = {{ path = "{FOLDER}" }}
drafter = "prompt-lookup"
[models.guest]
summary = "the shipped target, decoded by mlx-lm itself"
target = "shipped"
engine = "mlx-lm"
channels = ["native", "rotated4"]
[models.away]
summary = "is on no machine"
target = {{ folder = "no-such-folder" }}
[models.gone]
summary = "its path leads nowhere"
target = {{ path = "/no-such-folder" }}
"""


@dataclass
class Running:
    """A server that was started."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def start(folder: Path, *arguments: str, key: str | None = KEY, registry: str = REGISTRY) -> Running:
    """Start `kakeya_engine serve` on a free port and wait until it says where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.toml").write_text(registry)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAKEYA_")}
    environment |= {"HOME": str(folder)} | ({"KAKEYA_API_KEY": key} if key else {})
    log = folder / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                *("-m", "engine", "serve", "--port", "0", "--registry", str(folder / "models.toml")),
                *arguments,
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    stdout: IO[str] = process.stdout  # type: ignore[assignment]
    line = stdout.readline()
    if not line:
        raise AssertionError(f"the server ended with {process.wait()}: {log.read_text()}")
    return Running(process, json.loads(line)["url"], log)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that all tests of a worker share."""
    running = start(tmp_path_factory.mktemp("server"), "--models", "3", "--max-tokens", "300")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def raw_server() -> Iterator[RawServer]:
    """The real server at a socket of this process."""
    with opened() as found:
        yield found


@pytest.fixture
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that was said is in the log afterwards, and no traceback."""
    caplog.set_level(logging.INFO)
    yield
    refuse_talk(caplog.records)


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    """The official client."""
    return server.client()
