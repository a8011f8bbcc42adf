"""The embedded bus of `make demo`: a bare repository, a workload clone, and a runner as a process of its own.

Only the folders are made here. The request goes through the ordinary client, the runner is the ordinary
`runner serve`, and its key is trusted the way any client trusts one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge import presets, settings
from bridge.errors import MachineError
from bridge.git.repo import GitRepo, RefUpdate
from bridge.proc import ChildProcess, spawn
from bridge.runner import models
from bridge.runner.config import open_config
from bridge.runner.policy import FILE_NAME
from bridge.settings import Settings
from bridge.signing import trust

RUNNER_NAME = "demo-mac"
_DRAIN_S = 20.0
_GRACE_S = 1.0
_README = b"# A workload\n\nAny repository can be one. The preset `throughput` reads nothing of it.\n"


@dataclass(frozen=True)
class DemoSite:
    """One demo: its folder; in it the bus, a clone of that, the runner's log; and a client's settings."""

    folder: Path
    remote: Path
    workload: Path
    log: Path
    settings: Settings


def build(parent: Path | None = None) -> DemoSite:
    """Make the remote with one commit on ``main``, clone it, and trust the runner's key.

    All of it is in a new folder in `parent`; None: in the system's temporary folder.
    """
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="kakeya-demo-", dir=parent)).resolve()
    except OSError as error:
        raise MachineError(f"cannot make a folder for the demo: {error.strerror or error}") from None
    remote, workload = folder / "remote.git", folder / "workload"
    own = {
        "remote": str(remote),
        "signing_key": "none",  # the developer's own key is not asked for a demonstration
        "state_dir": folder / "state",
        "config_dir": folder / "config",
    }
    site = DemoSite(folder, remote, workload, folder / "runner.log", settings.load().model_copy(update=own))
    outside = GitRepo(folder)
    outside.run("init", "--quiet", "--bare", "--initial-branch=main", str(remote))
    with GitRepo(remote).scratch() as scratch:
        first = scratch.commit_files(None, {"README.md": _README}, "a workload\n")
        scratch.push(str(remote), [RefUpdate("refs/heads/main", first, "")])
    outside.run("clone", "--quiet", str(remote), str(workload))
    write_policy(site.settings.config_dir)
    config = open_config(
        RUNNER_NAME,
        str(remote),
        state_dir=site.settings.state_dir,
        config_dir=site.settings.config_dir,
    )
    if config.public_key is not None:
        trust.pin(site.settings.trusted_runners, RUNNER_NAME, config.public_key)
    return site


def write_policy(config_dir: Path) -> None:
    """Name the shipped models, in the owner's policy, for every model that a preset lets them replace.

    A demo shows the way of a request, also on a Mac, where nothing is replaced unless its owner says so.
    """
    lines = {}
    for preset in presets.load_all().values():
        for need in preset.models:
            folder = models.shipped(need.stand_in) if need.stand_in else None
            if folder is not None and folder.is_dir():
                lines[need.name] = f"{need.name} = {json.dumps(str(folder), ensure_ascii=False)}\n"
    config_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    policy = config_dir / FILE_NAME
    policy.touch(mode=0o600)
    policy.write_text(
        "# Written by the demo: its models are the shipped ones.\n[models]\n" + "".join(lines.values())
    )


@contextlib.contextmanager
def runner(site: DemoSite) -> Iterator[ChildProcess]:
    """`kakeya_mac runner serve` on the demo's remote; drained at the end."""
    own = {"KAKEYA_STATE": str(site.settings.state_dir), "KAKEYA_CONFIG": str(site.settings.config_dir)}
    command = [sys.executable, "-I", "-m", "bridge", "runner", "serve"]
    command += ["--remote", str(site.remote), "--name", RUNNER_NAME]
    with site.log.open("ab") as log:
        process = spawn(command, env={**os.environ, **own}, cwd=site.folder, output=log.fileno())
        try:
            yield process
        except BaseException:
            # The second signal stops the running job instead of waiting for it.
            for _ in range(2):
                _terminate(process)
                process.wait(_GRACE_S)
            raise
        finally:
            _terminate(process)
            if process.wait(_DRAIN_S) is None:
                process.kill()


def _terminate(process: ChildProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
