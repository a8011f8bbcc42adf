"""What a job gets before it starts: workspace, models, kernels, argv.

Made in the order of `Preparation`'s methods. What the workload or this machine lacks is a `Refusal`; every
question that needs no folders was asked in `check`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bridge import presets
from bridge.bus.git import Git
from bridge.errors import MachineError, ParameterError, described
from bridge.presets import Preset
from bridge.protocol.manifest import ParamValue
from bridge.protocol.result import Reason
from bridge.runner import lfs, models, replayed, workspace
from bridge.runner.check import Refusal, places
from bridge.runner.isolation.room import Room
from bridge.runner.station import Station

ENGINE = "${engine}"  # how the argv of a preset begins that runs the engine
COMPILING = "compiling kernels, once on this machine"


def decodes(preset: Preset) -> bool:
    """Whether the engine runs a model in a preset's jobs, with mlx's compiled kernels."""
    return preset.argv[0] == ENGINE and (bool(preset.models) or preset.replays)


@dataclass(frozen=True)
class Preparation:
    """The preparation of one job.

    Attributes:
        station: The runner.
        git: A repository that holds the workload.
        nonce: Of the request.
        workload: Commit hash of the workload.
        preset: What is to run.
        params: Checked values with defaults.
        room: The job's folders, empty.
        note: Takes text for the job's log.
        tell: Takes a line for whoever waits.
    """

    station: Station
    git: Git
    nonce: str
    workload: str
    preset: Preset
    params: Mapping[str, ParamValue]
    room: Room
    note: Callable[[str], None]
    tell: Callable[[str], None]

    def lay_out(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Put what the preset wants of the workload into the workspace, objects of Git LFS as well.

        Args:
            stop: Whether to leave it, asked while objects are fetched.

        Raises:
            Refusal: The workload cannot be laid out, or it lacks a file that a parameter names, or an object.
            BusError: Objects of the workload cannot be read here.
        """
        if self.preset.workspace == "none":
            return
        asked = {
            name: str(self.params[name])
            for name, item in self.preset.params.items()
            if item.format == "repo-path"
        }
        whole = self.preset.workspace == "full"
        try:
            laid = workspace.lay_out(
                self.git,
                self.workload,
                self.room.workspace,
                None if whole else list(asked.values()),
            )
        except workspace.WorkloadRefused as error:
            raise Refusal.of(Reason.BAD_WORKLOAD, error) from None
        for name, path in asked.items():
            if not (self.room.workspace / path).exists():
                message = f"parameter {name}: the commit {self.workload[:12]} has no {path!r}"
                raise Refusal(Reason.BAD_PARAMETER, message)
        if laid.pointers:
            self._materialise(laid.pointers, stop)

    def _materialise(self, pointers: frozenset[str], stop: Callable[[], bool]) -> None:
        rule = self.station.policy.lfs
        if rule.endpoint is not None:
            self.tell(f"progress 0/1 fetching {len(pointers)} files of Git LFS")
        try:
            size = lfs.materialise(self.room.workspace, pointers, rule, beside=self.station.jobs, stop=stop)
        except lfs.PointersRefused as error:
            raise Refusal.of(Reason.BAD_WORKLOAD, error) from None
        self.note(f"runner: {len(pointers)} files of Git LFS, {size} bytes\n")
        self.tell(f"progress 1/1 fetching {len(pointers)} files of Git LFS")

    def find_models(self) -> dict[str, models.Found]:
        """Where the preset's models lie here, by name; said in the log and to whoever waits.

        Raises:
            Refusal: One is not here.
        """
        own = places(self.station, workload=self.room.workspace if self.preset.runs_repo_code else None)
        try:
            found = models.resolve(self.preset.models, own)
        except models.ModelMissing as error:
            raise Refusal.of(Reason.MODEL_MISSING, error) from None
        for name, model in found.items():
            self.note(f"runner: model {name}: {model}\n")
            self.tell(f"model {name}: {model}")
        return found

    def argv(self, found: Mapping[str, models.Found]) -> list[str]:
        """The job's command line.

        Args:
            found: What `find_models` found.

        Raises:
            Refusal: A parameter does not fit, or the runner's environment lacks a variable.
        """

        def resolve(kind: str, name: str) -> list[str]:
            return self._resolved(kind, name, found)

        try:
            return presets.argv(self.preset, self.params, resolve)
        except ParameterError as error:
            raise Refusal.of(Reason.BAD_PARAMETER, error) from None

    def provide_kernels(self, stop: Callable[[], bool]) -> None:
        """Give the job the machine's compiled kernels if it can use them. Never fails the job.

        Args:
            stop: Whether to leave it, asked while kernels are made that this machine never had.
        """
        if not decodes(self.preset):
            return
        kernels = self.station.kernels
        try:
            if kernels.wanted:
                self.tell(f"progress 0/1 {COMPILING}")
                kernels.make(stop)
                self.tell(f"progress 1/1 {COMPILING}")
            kernels.copy_to(self.room.temporary)
        except (MachineError, OSError) as error:
            self.note(f"runner: {described(error)}\n")

    def _resolved(self, kind: str, name: str, found: Mapping[str, models.Found]) -> list[str]:
        """What ``${kind:name}`` of a preset stands for on this machine, for this job."""
        if kind in ("engine", "bridge"):
            return [sys.executable, "-I", "-m", kind]
        if kind == "python":
            return [sys.executable]
        if kind == "out":
            return [str(self.room.out / f"{name}.json")]
        if kind == "model":
            return [str(found[name].folder)]
        if kind == "replay":
            return self._replay(str(self.params[name]))
        if kind == "env":
            if name not in self.station.environment:
                raise Refusal(Reason.MACHINE_UNFIT, f"the runner's environment has no {name}")
            return [self.station.environment[name]]
        return self._binding()

    def _replay(self, handle: str) -> list[str]:
        """The report of a finished request, laid out, and where its models may lie here.

        Raises:
            Refusal: There is no such request, it has no result that can be believed, or no report.
            RemoteUnreachable: The remote did not answer.
        """
        report = replayed.find(self.git, self.station, handle)
        path = self.room.workspace / replayed.NAME
        path.write_bytes(report.data)
        for line in (
            f"the report of {report.nonce} ({report.preset}), sha256 {report.sha256}",
            f"its result: {report.authenticity}",
            f"made by {report.runner.name}, verified by {self.station.identity.name}: "
            + ("the same runner" if report.runner.id == self.station.identity.id else "another runner"),
        ):
            self.note(f"runner: {line}\n")
            self.tell(line)
        return [
            str(path),
            *(f"--among={folder}" for folder in replayed.folders(self.station, report.preset)),
        ]

    def _binding(self) -> list[str]:
        """The flags that bind what the engine writes to this request."""
        return [
            *("--request-nonce", self.nonce),
            *("--workload-sha", self.workload),
            *("--preset-digest", self.preset.digest),
            *("--engine-source", self.preset.engine),
        ]
