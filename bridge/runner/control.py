"""A serving runner as other programs of its machine see and steer it: ``runner status``, ``drain``, ``stop``.

`serve` keeps ``status.json`` in the runner's folder; the file ``draining`` there has it take nothing new. A
runner is stopped by SIGTERM, as a service is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from bridge.errors import MachineError
from bridge.proc import write_atomic
from bridge.protocol.manifest import RECORD, Moment, Nonce, PresetName
from bridge.protocol.runner_info import State

STATUS = "status.json"
DRAINING = "draining"
DRAINS = "it is draining: it finishes its job and takes nothing new"
# The clock that tells when a process began may be set meanwhile.
_SAME_PROCESS_S = 2.0


class LocalJob(BaseModel):
    """The running job."""

    model_config = RECORD

    nonce: Nonce
    preset: PresetName
    started_at: Moment


class LocalStatus(BaseModel):
    """What a runner that serves says of itself to its own machine."""

    model_config = RECORD

    name: str
    pid: int
    began: float  # when the process began, Unix seconds: another one may have the same number later
    remote: str
    service: str | None  # what started it and may start it again; None: a person did
    started_at: Moment
    state: State
    job: LocalJob | None = None
    failure: str | None = None  # why its last look at the remote failed, or its policy is not right

    @property
    def is_serving(self) -> bool:
        """Whether that process is still there, and has not said that it stopped."""
        if self.state is State.STOPPED:
            return False
        with contextlib.suppress(psutil.Error):
            return abs(psutil.Process(self.pid).create_time() - self.began) < _SAME_PROCESS_S
        return False


def own_status(name: str, remote: str, started_at: str) -> LocalStatus:
    """The status of this process, which starts to serve."""
    return LocalStatus(
        name=name,
        pid=os.getpid(),
        began=psutil.Process().create_time(),
        remote=remote,
        service=service_of(os.environ),
        started_at=started_at,
        state=State.IDLE,
    )


def service_of(environ: Mapping[str, str]) -> str | None:
    """The service that this process is, ``launchd LABEL`` or ``systemd UNIT``; None: it is none."""
    if sys.platform == "darwin" and os.getppid() == 1:
        return f"launchd {environ.get('XPC_SERVICE_NAME', '')}".strip()
    if environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()):
        with contextlib.suppress(OSError):
            last = Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2]
            return f"systemd {last}".strip()
        return "systemd"
    return None


def ending_command(service: str) -> str:
    """What an administrator types so that a service ends and is not started again."""
    kind, _, name = service.partition(" ")
    if kind == "launchd":
        return f"sudo launchctl bootout system/{name or 'LABEL'}"
    return f"sudo systemctl stop {name or 'UNIT'}"


def keep_status(folder: Path, status: LocalStatus) -> None:
    """Write a runner's status into its folder."""
    write_atomic(folder / STATUS, status.model_dump_json().encode())


def read_status(folder: Path) -> LocalStatus | None:
    """What the runner of a folder last said; None: nothing that can be read."""
    try:
        return LocalStatus.model_validate_json((folder / STATUS).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    except OSError as error:
        raise MachineError(f"cannot read {folder / STATUS}: {error.strerror}") from None


def is_draining(folder: Path) -> bool:
    """Whether the runner of a folder is to take nothing new."""
    return (folder / DRAINING).exists()


def set_draining(folder: Path, on: bool) -> None:
    """Have the runner of a folder take nothing new, or take requests again, from its next look on."""
    if on:
        write_atomic(folder / DRAINING, b"")
    else:
        (folder / DRAINING).unlink(missing_ok=True)


def runner_folders(state_dir: Path) -> list[Path]:
    """The folders of the runners that ever served here."""
    return sorted(path.parent for path in (state_dir / "runner").glob(f"*/{STATUS}"))


def end(status: LocalStatus, *, wait_s: float) -> bool:
    """Have a runner finish its job, and end; whether it ended within `wait_s`."""
    try:
        process = psutil.Process(status.pid)
        if abs(process.create_time() - status.began) >= _SAME_PROCESS_S:
            return True
        process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        message = f"the runner {status.name} belongs to another account (process {status.pid})"
        raise MachineError(message, "stop it as that account") from None
    until = time.monotonic() + wait_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True
