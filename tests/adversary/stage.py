"""What a runner answers to a hostile request, asked without a runner: every question up to its start."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bridge.bus.git import Git
from bridge.protocol.result import Reason
from bridge.runner.check import Refusal, examine
from bridge.runner.isolation.room import Room
from bridge.runner.prepare import Preparation
from bridge.runner.station import Station
from tests.adversary.attack import Forge, Forged
from tests.bridge.runner.bench import Bench

# What the owner of the machine installed: it prints its argument, or the files it was given.
PROGRAMS = {
    "echo": "print(ascii(arg))",
    "whole": (
        "import os\n"
        "for folder, _, files in os.walk('.'):\n"
        "    for name in files: print(ascii(os.path.join(folder, name)))\n"
    ),
}


def install(bench: Bench) -> None:
    """Write the owner's presets."""
    bench.install({"echo": PROGRAMS["echo"]})
    script = bench.house.root / "whole.py"
    script.write_text(PROGRAMS["whole"])
    bench.preset("whole", ["${python}", "-I", str(script)], workspace="full")
    bench.preset("version", ["${bridge}", "--version"], workspace="full")


@dataclass
class Answer:
    """What comes of a request: `ok` and its argv, or the refusal."""

    reason: Reason
    message: str = ""
    argv: tuple[str, ...] = ()


@dataclass
class Stage:
    """A station without a runner, and a repository that holds what is forged."""

    station: Station
    git: Git
    forge: Forge

    @property
    def canary(self) -> Path:
        return self.forge.canary

    def ask(self, forged: Forged) -> Answer:
        """Everything that the runner asks before it starts a job, with its own code."""
        checked = examine(self.git, forged.pending, self.station, now=datetime.now(UTC), answered=())
        if checked.refusal is not None:
            return Answer(checked.refusal.reason, checked.refusal.message)
        assert checked.manifest is not None
        assert checked.preset is not None
        room = Room(self.station.jobs / forged.nonce)
        room.make()
        preparation = Preparation(
            self.station,
            self.git,
            forged.nonce,
            checked.manifest.workload_sha,
            checked.preset,
            checked.params,
            room,
            note=lambda _: None,
            tell=lambda _: None,
        )
        try:
            preparation.lay_out()
            return Answer(Reason.OK, argv=tuple(preparation.argv({})))
        except Refusal as refusal:
            return Answer(refusal.reason, refusal.message)
        finally:
            shutil.rmtree(self.station.jobs, ignore_errors=True)
