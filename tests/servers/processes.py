"""Programs of the test servers: found, started with a log, waited for and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

INSTALLER = "scripts/install_test_servers.sh"
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"))
_START_S = 10.0


def program(name: str) -> str:
    """The path of a program.

    Raises:
        AssertionError: It is not installed; the message says how to install it.
    """
    found = shutil.which(name, path=PATH)
    assert found, f"{name} is not installed, and these tests need it: run {INSTALLER} (as root on Debian)"
    return found


def exec_path() -> Path:
    """Where git keeps its own programs."""
    done = subprocess.run([program("git"), "--exec-path"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def free_port() -> int:
    """A port of 127.0.0.1 without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(argv: list[str], log: object, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server process and all it starts, ended at the end."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log,  # type: ignore[call-overload]
        stderr=log,
        env=env,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_port(port: int, log: str) -> None:
    """Wait until something listens."""

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    wait_until(answers, f"a server on port {port}", log)


def wait_until(condition: object, what: str, log: str) -> None:
    """Wait for a server; fail with what it wrote."""
    assert callable(condition)
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come up; it wrote: {Path(log).read_text(errors='replace')}")
        time.sleep(0.02)
