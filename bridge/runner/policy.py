"""What this machine allows, decided by its owner in ``policy.toml``: see docs/operations.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, model_validator

from bridge.errors import MachineError, PolicyError
from bridge.evidence.redact import is_secret_name
from bridge.presets import Preset, model_parameter
from bridge.presets.values import ParameterBounds
from bridge.proc import write_atomic
from bridge.protocol.sanitize import unsafe_character
from bridge.runner.models import COMPANIONS
from bridge.settings import STRICT, fault_text, parse_toml, read_owned_file
from bridge.signing.keyfiles import NAME_PATTERN, UNSIGNED

FILE_NAME = "policy.toml"
DEFAULT_FILE = Path(__file__).with_name("default_policy.toml")
BRANCHES = "refs/heads/"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

# A key of the policy file: ``("presets", "probe", "timeout_s")``.
Key = tuple[str, ...]

_DAY = 24 * 60  # minutes
_MIB = 1 << 20
_TIB = 1 << 40
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_DAYS = rf"(?:{'|'.join(DAYS)})(?:-(?:{'|'.join(DAYS)}))?"
_SPAN = re.compile(
    rf"(?P<days>{_DAYS}(?:,{_DAYS})*)?(?P<times>(?(days) )(?P<start>{_TIME})-(?P<end>{_TIME}|24:00))?"
)
# Variables that every job gets of its own, that make a program load or run something else, or that lead to
# credentials: whole names, and beginnings.
_RESERVED = {"HOME", "PATH", "PWD", "TMPDIR", "TMP", "TEMP", "LANG", "LC_ALL", "HF_HUB_OFFLINE"}
_RESERVED |= {"NO_COLOR", "ENV", "IFS", "SHELL"}
_STEERING = (
    *("PYTHON", "LD_", "DYLD_", "GLIBC_TUNABLES", "GCONV_PATH", "LOCPATH", "OPENSSL_", "MALLOC_"),
    *("GIT_", "SSH_", "GPG_", "GNUPG", "KRB5", "KAKEYA_", "XDG_", "DBUS_", "DOCKER_", "BASH_"),
    *("PERL", "RUBY", "NODE_", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS"),
)


def _check_text(text: str) -> str:
    if not text.strip() or unsafe_character(text) is not None:
        raise ValueError("must be text on one line without control characters")
    return text


def _check_variable(name: str) -> str:
    if is_secret_name(name):
        raise ValueError(f"{name!r} names a secret, and whatever a job prints is published")
    if name.upper() in _RESERVED or name.upper().startswith(_STEERING):
        raise ValueError(f"{name!r} changes what programs load or run, leads to keys, or is each job's own")
    return name


def _check_path(path: Path) -> Path:
    try:
        path = path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r} names a user who is not known here") from None
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError(f"must be an absolute path, got {str(path)!r}")
    return path


def _check_branch(pattern: str) -> str:
    if pattern.startswith("refs/") and not pattern.startswith(BRANCHES):
        raise ValueError(f"{pattern!r} is no branch, {BRANCHES}…")
    return pattern.removeprefix(BRANCHES)


def _check_endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("https", "http", "ssh", "file") or not parts.path:
        raise ValueError("must begin with https://, http://, ssh:// or file:// and name a path")
    if parts.password is not None or (parts.username is not None and parts.scheme != "ssh"):
        raise ValueError("must not hold credentials: git's credential helper gives them")
    return text


def _check_actions(actions: dict[str, Any]) -> dict[str, Any]:
    """Keys of earlier versions have no effect, but a request is refused rather than run unsandboxed."""
    if (value := actions.get("execute", "here")) != "here":
        raise ValueError(f"{value!r} asks for the walled mode, which no longer exists: see docs/actions.md")
    return actions


def check_span(text: str) -> str:
    """The text itself; a `ValueError` if it is no span of hours."""
    _parse_span(text)
    return text


def is_within(spans: Sequence[str], local: datetime) -> bool:
    """Whether one of the spans holds a moment of the machine's local time."""
    moment = local.weekday() * _DAY + local.hour * 60 + local.minute
    return any(
        (moment - day * _DAY - start) % (7 * _DAY) < minutes
        for days, start, minutes in map(_parse_span, spans)
        for day in days
    )


def next_opening(spans: Sequence[str], local: datetime) -> datetime | None:
    """When the next span begins, by the machine's local time without a zone; None: none does."""
    week = [local.date() + timedelta(days=ahead) for ahead in range(8)]
    parsed = list(map(_parse_span, spans))
    begins = (_at(day, start) for day in week for days, start, _ in parsed if day.weekday() in days)
    return min((moment for moment in begins if moment > local), default=None)


def _at(day: date, minute: int) -> datetime:
    return datetime.combine(day, time(minute // 60, minute % 60))


def _parse_span(text: str) -> tuple[set[int], int, int]:
    """Days (Monday is 0), the minute of the day at which the span begins, and how many minutes it has.

    ``mon-fri 22:00-06:00`` is the night after each of these days, ``08:00-12:30`` is every day.
    """
    match = _SPAN.fullmatch(text)
    if match is None or not text or (match["times"] and match["start"] == match["end"]):
        raise ValueError(f"{text!r}: write days, times or both, like 'mon-fri 22:00-06:00' or 'sat,sun'")
    days = set()
    for part in (match["days"] or "mon-sun").split(","):
        first, _, last = part.partition("-")
        start = DAYS.index(first)
        days |= {(start + step) % 7 for step in range((DAYS.index(last or first) - start) % 7 + 1)}
    begin, end = _minute(match["start"] or "00:00"), _minute(match["end"] or "24:00")
    return days, begin, (end - begin) % _DAY or _DAY


def _minute(text: str) -> int:
    return int(text[:2]) * 60 + int(text[3:])


Text = Annotated[str, AfterValidator(_check_text)]
Names = tuple[Text, ...]
Branches = tuple[Annotated[Text, AfterValidator(_check_branch)], ...]
AbsolutePath = Annotated[Path, AfterValidator(_check_path)]
Seconds = Annotated[int, Field(ge=1, le=86_400)]
Requests = Annotated[int, Field(ge=0, le=100_000)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"), AfterValidator(_check_variable)]
Requester = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]


class PolicySection(BaseModel):
    """A table of the file. In the file a field goes by its alias, if it has one."""

    model_config = STRICT | ConfigDict(validate_by_name=True, validate_by_alias=True)


class JobLimits(PolicySection):
    """What a job may have at most, all its processes together unless said otherwise."""

    # Of memory four fifths of the machine's, where it is None.
    memory_bytes: ByteSize | None = Field(default=None, alias="memory", ge=64 * _MIB, le=64 * _TIB)
    disk_bytes: ByteSize = Field(default=ByteSize(16 << 30), alias="disk", ge=_MIB, le=1024 * _TIB)
    files: int = Field(default=200_000, ge=16, le=100_000_000)  # folders count
    processes: int = Field(default=1024, ge=4, le=1_000_000)  # threads count
    output_bytes: ByteSize = Field(default=ByteSize(8 * _MIB), alias="output", ge=1024, le=64 * _MIB)
    # Of one file and of one process.
    file_bytes: ByteSize = Field(default=ByteSize(4 << 30), alias="file_size", ge=64 << 10, le=1024 * _TIB)
    open_files: int = Field(default=4096, ge=64, le=1_000_000)


class PresetRule(PolicySection):
    """What ``[presets.NAME]`` says of one preset: it can only become narrower."""

    timeout_s: Seconds | None = None
    network: bool = False  # its jobs get the network if they ask for it
    requesters: Names | None = None
    params: dict[str, ParameterBounds] = {}


class LfsRule(PolicySection):
    """What ``[lfs]`` says of workloads that hold Git LFS pointers."""

    # The only server that objects come from, as git-lfs takes it; None: pointers refuse a job.
    endpoint: Annotated[Text, AfterValidator(_check_endpoint)] | None = None
    # What one job is given of them at most, every copy counted.
    max_bytes: ByteSize = Field(default=ByteSize(2 << 30), alias="max", ge=1, le=_TIB)


class PolicyRefusal(PolicyError):
    """The policy refuses a request by a key of the file or of the defaults; no other requester is named."""

    def __init__(self, key: Key, message: str, remedy: str = "") -> None:
        owner = f"its owner can change {'.'.join(key)} in {FILE_NAME}"
        super().__init__(f"policy: {message}", f"{remedy}; {owner}" if remedy else owner)
        self.key = key


class OutsideHours(PolicyRefusal):
    """The owner lets no job begin at this hour."""


class Policy(PolicySection):
    """The owner's decisions, one field a key of the file."""

    allow_presets: Names | None = None
    allow_repo_code: bool = False
    allow_unsandboxed: bool = False
    allow_requesters: Names | None = None
    allow_refs: Branches | None = None
    allow_workloads: Branches | None = None
    require_signature: bool = False
    attestations: bool = False
    labels: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], ...] = ()
    max_timeout_s: Seconds = 7200
    max_queued_per_requester: Annotated[Requests, Field(ge=1)] = 1000
    max_running_per_requester: Requests = 0
    quotas: dict[Requester, Requests] = {}
    hours: tuple[Annotated[str, AfterValidator(check_span)], ...] | None = None
    outside_hours: Literal["wait", "refuse"] = "wait"
    models: dict[str, AbsolutePath] = {}
    environment: tuple[Variable, ...] = ()
    limits: JobLimits = JobLimits()
    presets: dict[str, PresetRule] = {}
    actions: Annotated[dict[str, Any], AfterValidator(_check_actions)] = {}
    lfs: LfsRule = LfsRule()

    @model_validator(mode="after")
    def _is_consistent(self) -> Policy:
        if "outside_hours" in self.model_fields_set and self.hours is None:
            raise ValueError("outside_hours says nothing without hours")
        return self

    def setting(self, key: Key) -> str:
        """The setting that decides: ``policy.toml: max_timeout_s = 60``, or ``default: …``."""
        written: Any = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        default: Any = self.model_dump(mode="json", by_alias=True)
        for part in key:
            written = written.get(part) if isinstance(written, dict) else None
            default = default.get(part) if isinstance(default, dict) else None
        where, value = ("default", default) if written is None else (FILE_NAME, written)
        return f"{where}: {'.'.join(key)} = {json.dumps(value)}"

    def opens_network(self, preset: Preset) -> bool:
        """Whether a preset's jobs get the machine's network: it asks for it, and the owner allows it."""
        return preset.network and self._rule(preset).network

    def check(self, preset: Preset) -> None:
        """Raise a `PolicyRefusal` for a preset that the owner did not allow."""
        if self.allow_presets is not None and preset.name not in self.allow_presets:
            message = f"the preset {preset.name} is not allowed on this machine"
            raise PolicyRefusal(("allow_presets",), message)
        if preset.runs_repo_code and not self.allow_repo_code:
            message = f"the preset {preset.name} runs code of the requested commit, which is not allowed here"
            raise PolicyRefusal(("allow_repo_code",), message)

    def allows(self, preset: Preset) -> bool:
        """Whether the policy allows a preset at all."""
        try:
            self.check(preset)
        except PolicyRefusal:
            return False
        return True

    def check_ref(self, ref: str) -> None:
        """Raise a `PolicyRefusal` for a result branch (``refs/heads/…``) that matches no pattern."""
        branch = ref.removeprefix(BRANCHES)
        if self.allow_refs is not None and not any(fnmatchcase(branch, each) for each in self.allow_refs):
            message = f"requests on the branch {branch} are not allowed on this machine"
            remedy = f"ask on a branch like {', '.join(self.allow_refs) or 'none'}"
            raise PolicyRefusal(("allow_refs",), message, remedy)

    def check_requester(self, preset: Preset, requester: str | None) -> None:
        """Raise a `PolicyRefusal` where a requester (None: unsigned) may not ask, or not for this preset."""
        own_key = ("presets", preset.name, "requesters")
        lists = (("allow_requesters",), self.allow_requesters), (own_key, self._rule(preset).requesters)
        for key, listed in lists:
            if listed is not None and not _is_listed(requester, listed):
                who = "unsigned requests" if requester is None else requester
                what = "ask this machine" if key != own_key else f"run the preset {preset.name}"
                raise PolicyRefusal(key, f"{who} may not {what}")

    def is_open(self, now: datetime) -> bool:
        """Whether jobs may begin at a moment (aware), by this machine's time zone."""
        return self.hours is None or is_within(self.hours, now.astimezone())

    @property
    def hours_text(self) -> str:
        """The hours for people: ``mon-fri 22:00-06:00, sat,sun``."""
        return "always" if self.hours is None else ", ".join(self.hours) or "never"

    def outside(self, now: datetime) -> OutsideHours | None:
        """The refusal of a moment at which no job may begin, with the next that will do; None: one may."""
        if self.hours is None or self.is_open(now):
            return None
        message = f"this machine runs jobs only within {self.hours_text} of its local time"
        opening = next_opening(self.hours, now.astimezone().replace(tzinfo=None))
        if opening is None:
            return OutsideHours(("hours",), message)
        when = f"{opening.astimezone():%a %Y-%m-%d %H:%M %z}"
        return OutsideHours(("hours",), f"{message}; next at {when}", "ask again then")

    def check_hours(self, now: datetime) -> None:
        """Raise the refusal of `outside`, where the owner wants that rather than waiting."""
        if self.outside_hours == "refuse" and (refusal := self.outside(now)) is not None:
            raise refusal

    def timeout_s(self, preset: Preset, requested: int | None) -> int:
        """Seconds a job gets: the least of what the narrowed preset, the policy and the request say."""
        return min(preset.timeout_s, self.max_timeout_s, requested or preset.timeout_s)

    def max_queued(self, requester: str | None) -> int:
        """How many requests of one requester may wait; None: of all unsigned ones together."""
        return self.quotas.get(UNSIGNED if requester is None else requester, self.max_queued_per_requester)

    def narrowed(self, presets: Mapping[str, Preset]) -> dict[str, Preset]:
        """The presets of a machine, each within what ``[presets.NAME]`` says of it."""
        for name in self.presets.keys() - presets.keys():
            message = f"policy: presets.{name} is not a preset of this machine"
            raise PolicyError(message, f"presets: {', '.join(presets)}")
        return {
            name: _narrowed(_with_choices(preset, self.models), self._rule(preset))
            for name, preset in presets.items()
        }

    def _rule(self, preset: Preset) -> PresetRule:
        return self.presets.get(preset.name, PresetRule())


def _with_choices(preset: Preset, models: Iterable[str]) -> Preset:
    """A preset whose requests may choose its own model, or one of the owner's that has what goes with it."""
    key, names = model_parameter(preset), set(models)
    if key is None:
        return preset
    own, parameter = str(preset.params[key].default), preset.params[key]
    needed = [name.removeprefix(own) for name in preset.models if name.startswith(f"{own}-")]
    choices = [
        name
        for name in sorted(names - {own})
        if not name.endswith(COMPANIONS)
        and parameter.fault(name) is None
        and names.issuperset(name + suffix for suffix in needed)
    ]
    narrow = parameter.narrowed(ParameterBounds(enum=(own, *choices)))
    return preset.model_copy(update={"params": {**preset.params, key: narrow}})


def _narrowed(preset: Preset, rule: PresetRule) -> Preset:
    key = f"policy: presets.{preset.name}"
    if rule.timeout_s is not None and rule.timeout_s > preset.timeout_s:
        bound = f"but the preset takes {preset.timeout_s} s at most"
        raise PolicyError(f"{key}.timeout_s is {rule.timeout_s}, {bound}")
    params = dict(preset.params)
    for name, bounds in rule.params.items():
        if name not in params:
            message = f"{key}.params.{name} is no parameter of {preset.name}"
            raise PolicyError(message, f"its parameters: {', '.join(params) or 'none'}")
        try:
            params[name] = params[name].narrowed(bounds)
        except ValueError as error:
            raise PolicyError(f"{key}.params.{name}: {fault_text(error)}") from None
    return preset.model_copy(update={"params": params, "timeout_s": rule.timeout_s or preset.timeout_s})


def _is_listed(requester: str | None, listed: Sequence[str]) -> bool:
    """A pattern never lets unsigned requests in, so ``*`` is everybody whose key this machine knows."""
    if requester is None:
        return UNSIGNED in listed
    return any(fnmatchcase(requester, each) for each in listed if each != UNSIGNED)


def parse(path: Path, data: bytes) -> Policy:
    """The policy in a file's bytes; a `PolicyError` names file, key and value."""
    return parse_toml(Policy, data, where=f"policy {path}", error=PolicyError)


def load(path: Path) -> Policy:
    """The policy in a file that is its owner's alone, or the default where there is none."""
    data = read_owned_file(path, PolicyError, private=True)
    if data is not None and not data.strip():  # as an editor leaves it while it saves
        raise PolicyError(f"the policy {path} is empty", "write it; `runner policy init --force` does")
    return Policy() if data is None else parse(path, data)


def default_text(*, require_signature: bool = False) -> str:
    """The policy file to start with: every default, explained."""
    strict = f"require_signature = {str(require_signature).lower()}"
    return DEFAULT_FILE.read_text(encoding="utf-8").replace("require_signature = false", strict)


def with_model(text: str, name: str, folder: Path) -> str:
    """The text of a policy file with one more line under ``[models]``; the other lines stay as they are."""
    line = f"{name} = {json.dumps(str(folder))}\n"
    header = re.search(r"^[ \t]*\[models\][^\n]*(\n|$)", text, re.MULTILINE)
    if header is None:
        return f"{text.rstrip()}\n\n[models]\n{line}"
    return f"{text[: header.end()].rstrip()}\n{line}{text[header.end() :]}"


def write_default(path: Path, text: str, *, force: bool = False) -> None:
    """Write a policy for the owner alone; one that is there is replaced only by `force`."""
    if path.exists() and not force:
        remedy = "read it with `policy check`; --force replaces it"
        raise PolicyError(f"there is a policy already: {path}", remedy)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, text.encode())
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}") from None
