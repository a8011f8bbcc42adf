"""What a job gets before it starts: workspace, models, argv, and the list of what it may reach.

What the workload or this machine lacks is a `Refusal`; every question that needs no folders was asked by
`admission`. A job that replays a report gets that of a finished request: the requester names a handle, and
what is replayed is decided by the refs, the digests and the signature of that request's result.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from bridge import presets
from bridge.bus import results
from bridge.bus.archive import find_archived
from bridge.bus.state import ALL_REFS, find, state_of
from bridge.errors import EvidenceError, ParameterError, ResultError, UnknownHandle
from bridge.evidence.parse import parse
from bridge.git.cache import GitCache
from bridge.presets.argv import switches
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Reason
from bridge.runner import lfs, models, workspace
from bridge.runner.config import RunnerConfig
from bridge.runner.models import FoundModel
from bridge.runner.request import Admitted, Refusal
from bridge.runner.sandbox.base import Access, JobDirs, installation

ENGINE = "${engine}"  # how the argv of a preset begins that runs the engine
MLX_CACHE = "mlx"  # the folder below TMPDIR in which mlx's CPU backend keeps the kernels it compiles


@dataclass
class Preparation:
    """The preparation of one job. Its methods are called in their order.

    Attributes:
        config: The runner.
        cache: A repository that holds the workload.
        manifest: The request's.
        admitted: What is to run.
        dirs: The job's folders, empty.
        note: Takes text for the job's log.
        tell: Takes a line for the requester.
        models: Where the preset's models lie, once they were found.
    """

    config: RunnerConfig
    cache: GitCache
    manifest: Manifest
    admitted: Admitted
    dirs: JobDirs
    _: KW_ONLY
    note: Callable[[str], None]
    tell: Callable[[str], None]
    models: Mapping[str, FoundModel] = field(default_factory=dict, init=False)
    _replayed_models: list[Path] = field(default_factory=list, init=False)

    def lay_out(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Put what the preset wants of the workload into the workspace, objects of Git LFS as well.

        Args:
            stop: Whether to leave it, asked while objects are fetched.

        Raises:
            Refusal: The workload cannot be laid out, or it lacks a file that a parameter names, or an object.
            BusError: Objects of the workload cannot be read here.
        """
        if self.admitted.preset.workspace == "none":
            return
        workload, folder = self.manifest.workload_sha, self.dirs.workspace
        paths = {
            name: str(self.admitted.params[name])
            for name, item in self.admitted.preset.params.items()
            if item.format == "repo-path"
        }
        wanted = None if self.admitted.preset.workspace == "full" else list(paths.values())
        try:
            pointers = workspace.lay_out(self.cache, workload, folder, wanted)
            for name, path in paths.items():
                if not (folder / path).exists():
                    message = f"parameter {name}: the commit {workload[:12]} has no {path!r}"
                    raise Refusal(Reason.BAD_PARAMETER, message)
            if pointers:
                self._replace_pointers(pointers, stop)
        except (workspace.WorkloadRefused, lfs.PointersRefused) as error:
            raise Refusal.of(Reason.BAD_WORKLOAD, error) from None

    def _replace_pointers(self, pointers: frozenset[str], stop: Callable[[], bool]) -> None:
        what, rule = f"fetching {len(pointers)} files of Git LFS", self.config.policy.lfs
        if rule.endpoint is not None:
            self.tell(f"progress 0/1 {what}")
        size = lfs.replace_pointers(
            self.dirs.workspace, pointers, rule, scratch_dir=self.config.jobs, stop=stop
        )
        self.note(f"runner: {len(pointers)} files of Git LFS, {size} bytes\n")
        self.tell(f"progress 1/1 {what}")

    def find_models(self) -> None:
        """Find the preset's models on this machine.

        Raises:
            Refusal: One is not here.
        """
        workload = self.dirs.workspace if self.admitted.preset.runs_repo_code else None
        try:
            self.models = models.resolve(
                self.admitted.preset.models, self.config.model_places(workload=workload)
            )
        except models.ModelMissing as error:
            raise Refusal.of(Reason.MODEL_MISSING, error) from None
        for name, model in self.models.items():
            self._say(f"model {name}: {model}")

    def argv(self) -> list[str]:
        """The job's command line.

        Raises:
            Refusal: A parameter does not fit, or the runner's environment lacks a variable.
        """
        try:
            return presets.argv(self.admitted.preset, self.admitted.params, self._words)
        except ParameterError as error:
            raise Refusal.of(Reason.BAD_PARAMETER, error) from None

    def access(self) -> Access:
        """Everything that the job may reach. The kernel cache is put in place.

        The preset, the policy and this machine's models decide it, never a value of the request.
        """
        folders = [*(model.folder for model in self.models.values()), *self._replayed_models]
        # A model may be a folder of links, as in the cache of Hugging Face.
        linked = [path.resolve() for folder in folders for path in folder.rglob("*") if path.is_symlink()]
        own = [Path(word) for word in self._own_words() if os.path.isabs(word)]
        return Access(
            self.dirs,
            readable=(*installation(), *own, *folders, *linked),
            writable=self._kernel_cache(),
            hidden=self.config.private,
            network=self.config.policy.opens_network(self.admitted.preset),
        )

    def _own_words(self) -> Iterator[str]:
        """What the preset's own argv names: programs and data of the owner."""
        for element in self.admitted.preset.argv:
            value = element.rpartition("=")[2] if element.startswith("--") else element
            yield self.config.environment.get(value[6:-1], "") if value.startswith("${env:") else value

    def _kernel_cache(self) -> tuple[Path, ...]:
        """Let mlx keep compiled kernels between jobs of the installed engine, and of no other program.

        Code of a requester could leave kernels there that a later job would run.
        """
        if self.admitted.preset.runs_repo_code or self.admitted.preset.argv[0] != ENGINE:
            return ()
        self.config.kernel_cache.mkdir(mode=0o700, exist_ok=True)
        (self.dirs.temporary / MLX_CACHE).symlink_to(self.config.kernel_cache)
        return (self.config.kernel_cache,)

    def _words(self, kind: str, name: str) -> list[str]:
        """The words for ``${kind:name}`` of a preset on this machine, for this job."""
        if (program := program_words(kind)) is not None:
            return program
        if kind == "out":
            return [str(self.dirs.out / f"{name}.json")]
        if kind == "model":
            return [str(self.models[name].folder)]
        if kind == "replay":
            return self._replay(str(self.admitted.params[name]))
        if kind == "env":
            if name not in self.config.environment:
                raise Refusal(Reason.MACHINE_UNFIT, f"the runner's environment has no {name}")
            return [self.config.environment[name]]
        return [
            *("--request-nonce", self.manifest.nonce),
            *("--workload-sha", self.manifest.workload_sha),
            *("--preset-digest", self.admitted.preset.digest),
            *("--engine-source", self.admitted.preset.engine),
        ]

    def _replay(self, handle: str) -> list[str]:
        """Lay out the report of a finished request; the words that name it, and where its models may lie."""
        believed, report = _find_report(self.cache, self.config, handle)
        path, result = self.dirs.workspace / "report.json", believed.result
        path.write_bytes(report)
        same = result.runner.id == self.config.identity.id
        self._say(
            f"the report of {result.nonce} ({result.preset}), sha256 {hashlib.sha256(report).hexdigest()}"
        )
        self._say(f"its result: {believed.sentence}")
        self._say(
            f"made by {result.runner.name}, verified by {self.config.identity.name}: "
            + ("the same runner" if same else "another runner")
        )
        self._replayed_models = _model_folders(self.config, result.preset)
        return [str(path), *(f"--among={folder}" for folder in self._replayed_models)]

    def _say(self, line: str) -> None:
        self.note(f"runner: {line}\n")
        self.tell(line)


def program_words(kind: str) -> list[str] | None:
    """The words for a placeholder that is a program of this installation; None: it is something else."""
    if kind == "python":
        return [sys.executable]
    return [sys.executable, "-I", "-m", kind] if kind in ("engine", "bridge") else None


def _find_report(cache: GitCache, config: RunnerConfig, handle: str) -> tuple[results.Believed, bytes]:
    """The result of a finished request, and the report in it.

    Raises:
        Refusal: No request, or several, are called so; it has no result yet, or none that can be believed; or
            that holds no report of this request.
        RemoteUnreachable: The remote did not answer.
    """
    try:
        fetched = _fetch(cache, handle)
        believed = results.believe(fetched, trusted=config.allowed_signers.with_name("trusted_runners"))
        data = results.evidence_report(believed)
    except (UnknownHandle, ResultError, EvidenceError) as error:
        raise _no_report(error.message) from None
    report, faults = parse(data)
    if report is None:
        raise _no_report(f"the report of {fetched.nonce} cannot be read: {faults[0].message}")
    if report.request is None or report.request.nonce != fetched.nonce:
        raise _no_report(f"the report in the result of {fetched.nonce} is not of that request")
    return believed, data


def _fetch(cache: GitCache, handle: str) -> results.FetchedResult:
    found = cache.list_remote(*ALL_REFS)
    try:
        state = state_of(found, find(found, handle), handle)
    except UnknownHandle:
        return find_archived(cache, handle, found=found)
    held = {value.ref: value.commit for value in (*state.branches, state.result) if value is not None}
    cache.bring(held, list(held), depth=3)
    fetched = results.fetch(cache, cache.remote, state, depth=3)
    if fetched is None:
        raise _no_report(f"the request {state.nonce} is not finished, so it has no report to verify")
    return fetched


def _no_report(message: str) -> Refusal:
    return Refusal(Reason.BAD_PARAMETER, f"parameter request: {message}", "see: kakeya_mac history")


def _model_folders(config: RunnerConfig, name: str | None) -> list[Path]:
    """Where the models of an installed preset lie on this machine.

    None where it is not installed, or they are not here: then the shipped ones do, or the engine, which
    compares their digests, says what is missing.
    """
    preset = config.installed.get(name or "")
    if preset is None:
        return []
    wanted = {switch.model for switch in switches(preset.argv)}
    try:
        found = models.resolve(preset.models, config.model_places(workload=None))
    except models.ModelMissing:
        return []
    return [model.folder for model_name, model in found.items() if model_name in wanted]
