"""What the owner of a machine decided: one frozen value, asked by everything that takes a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.errors import PolicyError
from bridge.presets import Preset
from bridge.runner.limits import Limits
from bridge.runner.policy.defaults import default_line
from bridge.runner.policy.hours import Span, shown, within
from bridge.runner.policy.lines import Key, Lines

FILE_NAME = "policy.toml"
DEFAULT_TIMEOUT_S = 7200
DEFAULT_QUEUED = 1000
# The name for all unsigned requests together; no pattern but this very word matches them.
UNSIGNED = "unsigned"
BRANCHES = "refs/heads/"


class PolicyRefusal(PolicyError):
    """The policy says no.

    Args:
        key: The decision that refuses, of the file or of the default.
        message: For whoever asked: names the key, and nobody that the file names.
        remedy: What the owner can change.
    """

    def __init__(self, key: Key, message: str, remedy: str | None = None) -> None:
        super().__init__(message, remedy)
        self.key = key


@dataclass(frozen=True)
class PresetRule:
    """What ``[presets.NAME]`` says of one preset.

    Attributes:
        timeout_s: Another upper bound of its time; None: the preset's.
        network: Its jobs get the network if they ask for it.
        requesters: Who may ask for it, names or patterns; None: everybody that may ask at all.
        params: Tighter bounds by parameter, as written: JSON Schema keywords and values.
    """

    timeout_s: int | None = None
    network: bool = False
    requesters: tuple[str, ...] | None = None
    params: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True)
class ActionsRule:
    """What ``[actions]`` says of workflow runs on this machine.

    Attributes:
        execute: Who does their requests: ``here``, the run's own account, or ``daemon``, a `runner serve`
            under another one, while the run waits.
        repository: ``owner/name``, whose runs may begin; None: the hook lets none begin.
        workflows: Paths of the workflow files that may run.
        workflow_sha256: What such a file must be; empty: the one that came with this package.
        actors: Who may start a run, names or patterns; None: whoever can push.
        events: What may start one.
        fetch: Address from which the hook reads files and requests; None: the repository's page.
        key: Private SSH key, of a deploy key that can only read, with which it does; None: as git is set up.
    """

    execute: str = "here"
    repository: str | None = None
    workflows: tuple[str, ...] = (".github/workflows/mac-bridge.yaml",)
    workflow_sha256: tuple[str, ...] = ()
    actors: tuple[str, ...] | None = None
    events: tuple[str, ...] = ("push", "workflow_dispatch")
    fetch: str | None = None
    key: Path | None = None


@dataclass(frozen=True)
class LfsRule:
    """What ``[lfs]`` says of workloads that hold Git LFS pointers.

    Attributes:
        endpoint: The only server that objects come from, as git-lfs takes it; None: pointers refuse a job.
        max_bytes: Upper bound of what one job is given of them, in bytes, every copy counted.
    """

    endpoint: str | None = None
    max_bytes: int = 2 << 30


@dataclass(frozen=True)
class Policy:
    """The owner's decisions.

    Attributes:
        source: The file they come from (or would come from).
        allow_presets: Names that may run; None: all that are installed.
        allow_repo_code: Presets with ``engine = "workload"`` may run.
        allow_requesters: Who may ask, names or patterns; None: everybody.
        allow_refs: Patterns of the branches that requests may come on; None: every one.
        allow_workloads: Patterns of branches, of one of which the commit must be; None: any commit.
        require_signature: Only requests signed by a listed requester are taken.
        max_timeout_s: Upper bound of any job's time, in seconds.
        max_queued_per_requester: How many requests one requester may have waiting.
        max_running_per_requester: How many of one may be served at the same time, by any runner; 0: no limit.
        quotas: Another `max_queued_per_requester` for some, by name; see `UNSIGNED`.
        hours: When jobs may begin, by the machine's clock; None: always.
        refuses_outside_hours: What comes outside of them is refused; otherwise it waits.
        models: Folders of models by name.
        environment: Names of the runner's variables that jobs get beside the usual ones.
        limits: How much one job may take of the machine.
        presets: What is said of single presets, by name.
        actions: What is said of workflow runs.
        lfs: What is said of Git LFS pointers.
        lines: Where in the file each decision stands.
    """

    source: Path
    allow_presets: frozenset[str] | None = None
    allow_repo_code: bool = False
    allow_requesters: tuple[str, ...] | None = None
    allow_refs: tuple[str, ...] | None = None
    allow_workloads: tuple[str, ...] | None = None
    require_signature: bool = False
    max_timeout_s: int = DEFAULT_TIMEOUT_S
    max_queued_per_requester: int = DEFAULT_QUEUED
    max_running_per_requester: int = 0
    quotas: Mapping[str, int] = field(default_factory=dict)
    hours: tuple[Span, ...] | None = None
    refuses_outside_hours: bool = False
    models: Mapping[str, Path] = field(default_factory=dict)
    environment: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    presets: Mapping[str, PresetRule] = field(default_factory=dict)
    actions: ActionsRule = field(default_factory=ActionsRule)
    lfs: LfsRule = field(default_factory=LfsRule)
    lines: Lines = field(default_factory=lambda: Lines(Path(FILE_NAME)), repr=False, compare=False)

    @property
    def network(self) -> frozenset[str]:
        """Names of the presets that get the machine's network if they ask for it."""
        return frozenset(name for name, rule in self.presets.items() if rule.network)

    def decision(self, key: Key) -> str | None:
        """The line of the file that decides a key, or the default: ``policy.toml:12: max_timeout_s = 60``.

        None: it is no decision that a refusal can come from.
        """
        return self.lines.shown(key) or default_line(key)

    def opens_network(self, preset: Preset) -> bool:
        """Whether a preset's jobs get the machine's network: it asks for it, and the owner allows it."""
        return preset.network and preset.name in self.network

    def check(self, preset: Preset) -> None:
        """Refuse a preset that the owner did not allow.

        Raises:
            PolicyRefusal: Naming the decision that refuses and the one that would allow.
        """
        if self.allow_presets is not None and preset.name not in self.allow_presets:
            raise PolicyRefusal(
                ("allow_presets",),
                f"this machine's policy does not allow the preset {preset.name}",
                f"its owner can add {preset.name!r} to allow_presets in {FILE_NAME} on that machine",
            )
        if preset.runs_repo_code and not self.allow_repo_code:
            raise PolicyRefusal(
                ("allow_repo_code",),
                f"the preset {preset.name} runs code of the requested commit, which this machine's policy"
                " does not allow",
                f"its owner can set allow_repo_code = true in {FILE_NAME} on that machine",
            )

    def check_ref(self, ref: str) -> None:
        """Refuse a request that comes on a branch the owner did not allow.

        Args:
            ref: Its result branch, ``refs/heads/…``.

        Raises:
            PolicyRefusal: It matches no pattern.
        """
        branch = ref.removeprefix(BRANCHES)
        if self.allow_refs is not None and not any(fnmatchcase(branch, each) for each in self.allow_refs):
            raise PolicyRefusal(
                ("allow_refs",),
                f"this machine's policy takes no requests on the branch {branch}",
                f"ask on a branch like {', '.join(self.allow_refs) or 'none'}; its owner can add a pattern to"
                f" allow_refs in {FILE_NAME}",
            )

    def check_requester(self, preset: Preset, requester: str | None) -> None:
        """Refuse who may not ask, or not for this preset.

        Args:
            preset: What is asked for.
            requester: Who signed the request; None: nobody this machine knows.

        Raises:
            PolicyRefusal: The owner did not list them.
        """
        who = "unsigned requests" if requester is None else f"requests of {requester}"
        rule = self.presets.get(preset.name, PresetRule())
        for key, listed, what in (
            (("allow_requesters",), self.allow_requesters, "takes no"),
            (("presets", preset.name, "requesters"), rule.requesters, f"runs {preset.name} not for"),
        ):
            if listed is not None and not is_listed(requester, listed):
                raise PolicyRefusal(
                    key,
                    f"this machine's policy {what} {who}",
                    f"its owner can add the requester to {'.'.join(key)} in {FILE_NAME} on that machine",
                )

    def is_open(self, now: datetime) -> bool:
        """Whether jobs may begin at a moment (aware), by this machine's time zone."""
        return self.hours is None or within(self.hours, now.astimezone())

    def check_hours(self, now: datetime) -> None:
        """Refuse what comes outside the hours, where the owner wants that.

        Args:
            now: The moment (aware).

        Raises:
            PolicyRefusal: It is outside.
        """
        if self.refuses_outside_hours and not self.is_open(now):
            raise PolicyRefusal(
                ("hours",),
                f"this machine runs jobs only within {shown(self.hours or ())} of its local time",
                f'ask then; its owner can set outside_hours = "wait" in {FILE_NAME}',
            )

    def timeout_s(self, preset: Preset, requested: int | None) -> int:
        """Seconds a job gets: the least of what preset, policy and request say."""
        own = self.presets.get(preset.name, PresetRule()).timeout_s or preset.timeout_s
        return min(preset.timeout_s, own, self.max_timeout_s, requested or preset.timeout_s)

    def max_queued(self, requester: str | None) -> int:
        """How many requests may wait of who signed them; None: of all unsigned ones together."""
        name = UNSIGNED if requester is None else requester
        return self.quotas.get(name, self.max_queued_per_requester)


def is_listed(requester: str | None, listed: Sequence[str]) -> bool:
    """Whether a list of names and patterns holds who signed; None is listed as `UNSIGNED` and not otherwise.

    A pattern never lets unsigned requests in, so ``*`` is everybody whose key this machine knows.
    """
    if requester is None:
        return UNSIGNED in listed
    return any(fnmatchcase(requester, each) for each in listed if each != UNSIGNED)
