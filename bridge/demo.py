"""The embedded bus of `make demo`: a bare repository, a workload clone, and a runner as a process of its own.

Only the house is built here. The request goes through the ordinary client, the runner is the ordinary
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
from dataclasses import dataclass, replace
from pathlib import Path

from bridge import presets, settings
from bridge.bus.git import Git, Update
from bridge.client import trust
from bridge.errors import MachineError
from bridge.proc import Spawned, spawn
from bridge.runner import models
from bridge.runner.policy import FILE_NAME
from bridge.runner.station import open_station
from bridge.settings import Settings

RUNNER_NAME = "demo-mac"
_DRAIN_S = 20.0
_GRACE_S = 1.0
_README = b"# A workload\n\nAny repository can be one. The preset `throughput` reads nothing of it.\n"


@dataclass(frozen=True)
class DemoHouse:
    """The folders of one demo, all below `folder`."""

    folder: Path

    @property
    def remote(self) -> Path:
        """The bare repository that carries the bus."""
        return self.folder / "remote.git"

    @property
    def workload(self) -> Path:
        """A clone of it, as a requester would have."""
        return self.folder / "workload"

    @property
    def log(self) -> Path:
        """What the runner says."""
        return self.folder / "runner.log"

    @property
    def settings(self) -> Settings:
        """The client's settings, with state and trusted keys of this demo only."""
        return replace(
            settings.load(),
            remote=str(self.remote),
            signing_key="none",  # the developer's own key is not asked for a demonstration
            state_dir=self.folder / "state",
            config_dir=self.folder / "config",
        )


def build(parent: Path | None = None) -> DemoHouse:
    """Make the remote with one commit on ``main``, clone it, and trust the runner's key.

    Args:
        parent: Where to make the demo's folder; None: the system's temporary folder.

    Raises:
        BusError: git failed.
        MachineError: The folder cannot be made.
    """
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        house = DemoHouse(Path(tempfile.mkdtemp(prefix="kakeya-demo-", dir=parent)).resolve())
    except OSError as error:
        raise MachineError(f"cannot make a folder for the demo: {error.strerror or error}") from None
    outside = Git(house.folder)
    outside.run("init", "--quiet", "--bare", "--initial-branch=main", str(house.remote))
    bare = Git(house.remote)
    with bare.scratch() as scratch:
        tree = scratch.run("mktree", input=_row(scratch.write_blob(_README))).decode().strip()
        first = scratch.commit_tree(tree, [], "a workload\n")
        scratch.push(str(house.remote), [Update("refs/heads/main", first, "")])
    outside.run("clone", "--quiet", str(house.remote), str(house.workload))
    write_policy(house.settings.config_dir)
    station = open_station(
        RUNNER_NAME,
        str(house.remote),
        state_dir=house.settings.state_dir,
        config_dir=house.settings.config_dir,
    )
    if station.public_key is not None:
        trust.add(house.settings.trusted_runners, RUNNER_NAME, station.public_key)
    return house


def write_policy(config_dir: Path) -> None:
    """Name the shipped models, in the owner's policy, for every model that a preset lets them stand in for.

    A demo shows the way of a request, also on a Mac, where nothing stands in unless its owner says so.

    Args:
        config_dir: Where ``policy.toml`` is written; made for the owner alone if it is not there.
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
def runner(house: DemoHouse) -> Iterator[Spawned]:
    """`kakeya_mac runner serve` on the demo's remote; drained at the end."""
    own = {"KAKEYA_STATE": str(house.settings.state_dir), "KAKEYA_CONFIG": str(house.settings.config_dir)}
    command = [sys.executable, "-I", "-m", "bridge", "runner", "serve"]
    command += ["--remote", str(house.remote), "--name", RUNNER_NAME]
    with house.log.open("ab") as log:
        process = spawn(command, env={**os.environ, **own}, cwd=house.folder, output=log.fileno())
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


def _terminate(process: Spawned) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)


def _row(blob: str) -> bytes:
    return f"100644 blob {blob}\tREADME.md\n".encode()
