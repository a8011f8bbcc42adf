"""The registry: models by name, the KV channels each offers, where their files lie, and whether they match.

A registry is one TOML file, read strictly; `models.toml` in this folder ships with the project and explains
every key. No weight is read here, and only `fetch` uses the network.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from engine.cache.policy import KVPolicy, parse_policy
from engine.cache.transaction import members_of, new_caches
from engine.draft_length import parse_block
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.registry import POLICY_MARK, WITH_LOOKUP, drafter_policy, read_spec, split_policy
from engine.errors import (
    ConfigurationError,
    DrafterMismatchError,
    EngineError,
    InputError,
    MachineError,
    ModelError,
    ModelNotHere,
    UnknownModel,
    wrap_errors,
)
from engine.networks.dflash_config import DFlashConfig
from engine.networks.mtp import SPLIT_FILE, stored_head
from engine.target.attention import refuse_policy
from engine.target.folder import (
    SHIPPED_MODELS,
    Index,
    Size,
    build_unloaded,
    check_config,
    read_json,
    require_folder,
    text_part,
)
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, dtype_of, opened
from engine.target.model import Target
from engine.target.quantize import parse_quantize
from evidence_format.parse import faults_of
from evidence_format.weights import missing_weights

SHIPPED_FILE = Path(__file__).with_name("models.toml")
SEPARATOR = "@"  # between the name of a model and that of a channel
LARGEST_FILE = 2**20  # bytes; people write these files
LONGEST_POLICY = 500  # characters of a policy in a request
ORIGIN = "kakeya_origin.json"  # in a folder that `engine.model_store` wrote: where its weights came from
NAME = "^[a-z0-9][a-z0-9.-]*$"

# What is downloaded of a repository: no Python, and nothing that would be unpickled.
FETCHED = [
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja", SPLIT_FILE,
]  # fmt: skip

_BUILT_IN = """
native               native                 all that the model can see, as it is
full-kv              full-kv                sliding layers keep all positions, to go on from any of them
sliding-bounded-16   sliding-bounded:0,16   sliding layers keep 16 positions; full layers all
sliding-bounded-512  sliding-bounded:0,512  sliding layers keep 512 positions; full layers all
sink-window-256      sink-window:4,256      the first 4 and the last 256 positions; the rest is forgotten
sink-window-1024     sink-window:4,1024     the first 4 and the last 1,024 positions
sink-window-4096     sink-window:4,4096     the first 4 and the last 4,096 positions
affine8              affine:8,64            8 bits a value in mlx's affine code, which attention reads
affine4              affine:4,64            4 bits a value, likewise
rotated8             rotated:8,64           8 bits a value after a Hadamard rotation
rotated4             rotated:4,64           4 bits a value, likewise; what affine4 costs, with less error
lattice-d4           lattice:d4,38          points of the lattice D4 as the published codec gives them
lattice-e8           lattice:e8,38          points of the lattice E8 as the published codec gives them
lattice-packed       lattice-packed:e8,5    points of the lattice E8 in exactly 5 bits a value
auto4                auto:4                 4 bits a value on average, more where a layer's codes err most
"""


@dataclass(frozen=True)
class PolicyRange:
    """Policies that requests may spell out: a policy whose numbers may be ranges, ``lattice:e8,8..64``."""

    text: str
    low: KVPolicy
    high: KVPolicy

    @classmethod
    def parse(cls, text: str) -> "PolicyRange":
        """Read a range; ConfigurationError where an end is no policy, or one that requests cannot have."""
        low, high = (parse_policy(re.sub(r"(\d+)\.\.(\d+)", rf"\{end}", text)) for end in (1, 2))
        found = cls(text, low, high)
        if low.kind == NATIVE.name or low.source is not None or low not in found:
            raise ConfigurationError(f"{text!r} holds no policy that requests may have; leave it out")
        return found

    def __contains__(self, policy: KVPolicy) -> bool:
        parts = [re.split("[:,/@]", each.spec) for each in (self.low, policy, self.high)]
        return len(parts[0]) == len(parts[1]) and all(
            least == value == most
            or (least.isdigit() and value.isdigit() and int(least) <= int(value) <= int(most))
            for least, value, most in zip(*parts, strict=True)
        )


def _by(parse: Callable[[str], Any], *, keep: bool = True) -> PlainValidator:
    """Read a text with a parser of the engine; with ``keep`` the text itself is the value."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f"must be a text, not {_shown(value)}")  # noqa: TRY004 - pydantic takes ValueError
        try:
            parsed = parse(value)
        except EngineError as error:
            raise ValueError(str(error)) from None
        return value if keep else parsed

    return PlainValidator(read)


class _Table(BaseModel, extra="forbid", strict=True, frozen=True):
    """A table of the file."""


def _channel_policy(text: str) -> KVPolicy:
    policy = parse_policy(text)
    if policy.source is not None:
        raise ConfigurationError(f"{text!r} is a policy of generate and eval, not of channels; give another")
    return policy


class Channel(_Table):
    """A KV policy under a name for ids; a policy that a request spells out is its own name."""

    name: str = ""
    policy: Annotated[KVPolicy, _by(_channel_policy, keep=False)] = Field(alias="kv")
    description: str = ""


CHANNELS: Mapping[str, Channel] = {
    name: Channel.model_validate({"name": name, "kv": policy, "description": description})
    for name, policy, description in (line.split(None, 2) for line in _BUILT_IN.strip().splitlines())
}
NATIVE = CHANNELS["native"]


class Source(_Table):
    """Where a target or drafter comes from: one of `shipped`, `path` and `folder`."""

    shipped: bool = False  # one of the demo pair; its drafter has look-ups too
    path: str | None = None  # a folder on this machine, or for a drafter any text of --drafter
    folder: str | None = Field(None, pattern=NAME)  # looked for by this name, and in the hub's cache
    hub: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
    revision: str | None = Field(None, pattern="^[0-9a-f]{40}$")
    lookups: bool = False  # of a drafter: prompt look-ups draft too, where they fare better
    kv: Annotated[str, _by(drafter_policy)] | None = None  # of a drafter's keys and values

    @model_validator(mode="after")
    def _is_one(self) -> "Source":
        if self.shipped + (self.path is not None) + (self.folder is not None) != 1:
            raise ValueError('must be "shipped", or have one of path and folder')
        if (self.hub and not self.folder) or (self.revision and not self.hub):
            raise ValueError("hub needs folder, and revision needs hub; add it")
        if self.kv and POLICY_MARK in (self.path or ""):
            raise ValueError(f"kv is {self.kv}, and path {self.path} says it too; give one of them")
        return self

    def __str__(self) -> str:
        return "shipped" if self.shipped else self.path or self.hub or str(self.folder)


def _source(value: Any, info: ValidationInfo) -> Any:
    match value:
        case "shipped":
            return {"shipped": True}
        case str() if info.field_name == "drafter" and re.fullmatch("prompt-lookup(:[0-9]{1,9})?", value):
            return {"path": value}
        case {"kv": kv} if info.field_name == "target":
            raise ValueError(f"kv {_shown(kv)} is of drafters; name the policies of a target in its channels")
        case {"path": str(path)}:
            folder = os.path.expanduser(path)  # leaves users that it does not know as they are
            if not folder.startswith("/"):
                raise ValueError(f"path must begin with / or ~/, not {_shown(path)}")
            return value | {"path": folder}
        case dict() | Source():
            return value
    forms = '"shipped", { folder = "…", hub = "OWNER/NAME" } or { path = "/…" }'
    raise ValueError(f"must be {forms}, not {_shown(value)}")


class TargetFacts(_Table):
    """What the configuration of a target says about its shape; `head_dims`: all sizes of a row of keys."""

    hidden_size: Size
    layers: Size
    vocab_size: Size
    head_dims: Annotated[
        tuple[Size, ...],
        Field(min_length=1, strict=False),
        AfterValidator(lambda dims: tuple(sorted(set(dims)))),
    ]


class DrafterFacts(_Table):
    """What the configuration of a drafter says about its target; None: it does not say."""

    hidden_size: Size | None = None
    layers: Size | None = None
    vocab_size: Size | None = None
    target_layers: tuple[Index, ...] = Field((), strict=False)  # layers of the target that it reads, from 0
    mask_token: Index | None = None
    block: Size | None = None  # tokens of a block it was made for


class Facts(_Table):
    """What the configurations of an entry's parts are to say."""

    target: TargetFacts | None = None
    drafter: DrafterFacts | None = None


def _offered(value: Any, info: ValidationInfo) -> Mapping[str, Channel]:
    """The channels that a list of names offers; None: native, and those that the file defines."""
    known: Mapping[str, Channel] = info.context or CHANNELS
    if value is None:
        return {name: known[name] for name in known if name not in CHANNELS or name == NATIVE.name}
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, list) or not value or len(set(map(str, value))) < len(value):
        raise ValueError(f"must be a list of names of channels, none of them twice, not {_shown(value)}")
    if unknown := [name for name in value if name not in known]:
        raise ValueError(f"there is no KV channel {unknown[0]!r}; there are {', '.join(known)}")
    return {name: known[name] for name in value}


def _or_first(channel: str, info: ValidationInfo) -> str:
    return channel or next(iter(info.data.get("channels", {})), "")


class ModelEntry(_Table):
    """One model of a registry; `models.toml` explains its keys."""

    name: str = ""  # as clients ask for it
    summary: str
    target: Annotated[Source, BeforeValidator(_source)]
    drafter: Annotated[Source, BeforeValidator(_source)] | None = None
    channels: Annotated[Mapping[str, Channel], PlainValidator(_offered)] = Field(None, validate_default=True)
    default_channel: Annotated[str, AfterValidator(_or_first)] = Field("", validate_default=True)
    block: Annotated[
        str, _by(parse_block), BeforeValidator(lambda value: str(value) if type(value) is int else value)
    ] = "auto"
    dtype: Annotated[str, _by(dtype_of)] | None = None
    quantize: Annotated[str, _by(parse_quantize)] | None = None
    context: Size | None = None
    chat_template_kwargs: dict[Annotated[str, Field(pattern=r"^\w+$")], bool | int | float | str] = {}
    engine: str | None = Field(None, pattern=NAME)
    facts: Facts = Facts()

    @property
    def lookups(self) -> bool:
        """Whether prompt look-ups draft too, where they fare better."""
        return self.drafter is not None and (self.drafter.shipped or self.drafter.lookups)


def _defined(own: dict[str, Channel], info: ValidationInfo) -> dict[str, Channel]:
    """Add a file's channels to those that its models may list."""
    if built_in := own.keys() & CHANNELS.keys():
        raise ValueError(f"{min(built_in)} is built in; choose another name")
    if named := [name for name, each in own.items() if each.name]:
        raise ValueError(f"{named[0]}: unknown field 'name'; its table names it")
    own = {name: each.model_copy(update={"name": name}) for name, each in own.items()}
    (info.context or {}).update(own)
    return own


class _RegistryFile(_Table):
    default: str
    channels: Annotated[
        dict[Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]*$")], Channel], AfterValidator(_defined)
    ] = {}
    requests: dict[Literal["kv"], list[Annotated[PolicyRange, _by(PolicyRange.parse, keep=False)]]] = {}
    models: dict[Annotated[str, Field(pattern=NAME)], ModelEntry]  # after channels, which they name


def _validated(kind: type[Any], where: object, values: Any, context: Any = None) -> Any:
    try:
        return kind.model_validate(values, context=context)
    except ValidationError as error:
        fault = faults_of(error)[0].message.removeprefix("report: ")
        fault = re.sub("Value error, (.*), got .*", r"\1", fault)  # ours say the value themselves
        remedy = "; the comments of the shipped models.toml explain every key" if context else ""
        raise ConfigurationError(f"{where}: {fault}{remedy}") from None


@dataclass(frozen=True)
class Registry:
    """Models by name."""

    default: str  # name of the entry that is meant where none is named
    entries: tuple[ModelEntry, ...]  # at least one, in the order of the file
    channels: Mapping[str, Channel] = field(default_factory=lambda: CHANNELS)  # that entries may offer
    requests: tuple[PolicyRange, ...] = ()  # policies that a request may spell out

    @classmethod
    def load(cls, path: Path | None = None) -> "Registry":
        """Read a registry file, or the one that comes with the project; errors name file, key and value."""
        path, channels = path or SHIPPED_FILE, dict(CHANNELS)
        file = _validated(_RegistryFile, path, _read_toml(path), channels)
        if named := [name for name, entry in file.models.items() if entry.name]:
            raise ConfigurationError(f"{path}: models.{named[0]}: unknown field 'name'; its table names it")
        entries = tuple(entry.model_copy(update={"name": name}) for name, entry in file.models.items())
        registry = cls(file.default, entries, channels, tuple(file.requests.get("kv", ())))
        try:
            registry._check()
        except EngineError as error:
            raise type(error)(f"{path}: {error}") from None
        return registry

    def _check(self) -> None:
        if self.default not in {entry.name for entry in self.entries}:
            raise ConfigurationError(f"default is {self.default!r}, which is no model of this file")
        places: dict[str, Source] = {}
        for entry in self.entries:
            where, target, drafter = f"models.{entry.name}", entry.facts.target, entry.facts.drafter
            if entry.default_channel not in entry.channels:
                offers = ", ".join(entry.channels)
                raise ConfigurationError(
                    f"{where}: default_channel {entry.default_channel} is none of its channels: {offers}"
                )
            if entry.drafter is None and (drafter or entry.block not in ("auto", "1")):
                raise ConfigurationError(f"{where}: block and facts.drafter need a drafter; there is none")
            if entry.engine and entry.drafter and (entry.drafter.kv or POLICY_MARK in str(entry.drafter)):
                raise ConfigurationError(
                    f"{where}: the engine {entry.engine} keeps its drafter's keys and values itself, not as "
                    f"{entry.drafter.kv or entry.drafter}; leave kv out"
                )
            for source in (entry.target, entry.drafter):
                if source is None or source.folder is None:
                    continue
                place = source.model_copy(update={"lookups": False, "kv": None})
                variable = variable_of(source.folder)
                if (other := places.setdefault(variable, place)) != place:
                    raise ConfigurationError(
                        f"{other} and {source} would both be looked for in {variable}; "
                        "give them folders of other names"
                    )
            if target is not None:
                _refuse_pair(target, drafter, (str(entry.target), str(entry.drafter)))
                _refuse_misfits(entry, target.head_dims)

    @classmethod
    def single(
        cls, target: Path, drafter: str | None = None, *, channel: str | None = None, **settings: Any
    ) -> "Registry":
        """A registry of one model, for a folder given on the command line; ``settings`` of its `ModelEntry`.

        ``drafter`` as ``--drafter`` has it; None: what `default_drafter` says.
        """
        model = _unloaded(target)
        spec = default_drafter(target) if drafter is None else drafter
        source = None if spec == "none" else Source(path=spec)
        if drafter is None and target.resolve() == SHIPPED_TARGET.resolve():
            source = Source(shipped=True)
        usable = {}
        for name, each in CHANNELS.items():
            with suppress(ConfigurationError, ModelError):
                refuse_policy(model, each.policy)
                usable[name] = each
        about = {"name": fitting_name(target), "summary": f"the model in {target}", "channels": usable}
        parts = {"target": Source(path=str(target)), "drafter": source}
        entry = _validated(ModelEntry, target, about | parts | settings)
        registry = cls(entry.name, (entry,))
        named = {"default_channel": registry.channel(entry, channel or "native").name}
        return replace(registry, entries=(entry.model_copy(update=named),))

    def without_drafters(self) -> "Registry":
        """The same models, decoded plainly."""
        plain = {"drafter": None, "block": "auto"}
        return replace(self, entries=tuple(entry.model_copy(update=plain) for entry in self.entries))

    def resolve(self, model_id: str, channel: str | None = None) -> tuple[ModelEntry, Channel]:
        """The entry and channel that ``NAME`` or ``NAME@CHANNEL``, and a channel next to it, ask for."""
        name, separator, named = model_id.partition(SEPARATOR)
        if separator and channel is not None and channel != named:
            raise ConfigurationError(
                f"the model {_shown(model_id)} names the KV channel {_shown(named)}, "
                f"and the request {_shown(channel)}; name one"
            )
        entry = self.entry(name)
        return entry, self.channel(entry, named if separator else channel)

    def entry(self, name: str) -> ModelEntry:
        """The entry of that name; UnknownModel, with those there are, where there is none."""
        entries = {entry.name: entry for entry in self.entries}
        if name not in entries:
            raise UnknownModel(f"there is no model {_shown(name)}; there are {closest(name, entries)}")
        return entries[name]

    def channel(self, entry: ModelEntry, text: str | None) -> Channel:
        """The channel of an entry that a text names, or spells out as a policy such as ``lattice:e8,10``."""
        name = entry.default_channel if text is None else text
        if name in entry.channels:
            return entry.channels[name]
        offers = f"it offers {', '.join(entry.channels)}"
        if self.spells_policy(name):
            policy = parse_policy(name, "KV policy")
            if any(policy in each for each in self.requests):
                return Channel.model_validate({"name": policy.spec, "kv": policy.spec})
            ranges = ", ".join(each.text for each in self.requests) or "none"
            raise ConfigurationError(
                f"requests for {entry.name} may not ask for the KV policy {policy.spec}; {offers}; "
                f"of policies, requests may ask for {ranges}"
            )
        if name not in self.channels:
            raise UnknownModel(f"there is no KV channel {_shown(name)}; there are {', '.join(self.channels)}")
        raise ConfigurationError(f"the model {entry.name} does not offer the KV channel {name}; {offers}")

    def spells_policy(self, text: str) -> bool:
        """Whether a request's text is read as a policy: it has parameters, or needs none of a range's."""
        kinds = {each.low.kind for each in self.requests} - (self.channels.keys() - CHANNELS.keys())
        return (":" in text or text.partition("@")[0] in kinds) and len(text) <= LONGEST_POLICY

    def ids(self) -> list[str]:
        """Each name, and after it the name with each of its channels."""
        return [
            model_id
            for entry in self.entries
            for model_id in (entry.name, *(f"{entry.name}{SEPARATOR}{name}" for name in entry.channels))
        ]


def model_name(folder: Path) -> str:
    """A shipped model's name, or that of the folder, or of its repository in the hub's cache."""
    path = folder.absolute()
    if path.parent.name == "snapshots":  # …/models--OWNER--NAME/snapshots/COMMIT
        return path.parents[1].name.split("--")[-1]
    return next((name for name, shipped in SHIPPED_MODELS.items() if shipped == path), path.name)


def fitting_name(folder: Path) -> str:
    """`model_name` in the characters that names may have."""
    return re.sub("[^a-z0-9.-]", "-", model_name(folder).lower()).strip("-.") or "model"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ConfigurationError(f"{path} is not a file; give a registry of models in TOML")
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigurationError(
                f"{path} has more than {LARGEST_FILE} bytes; it is no registry of models"
            )
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError among them
        raise ConfigurationError(f"{path} is not TOML: {error}") from None


def closest(name: str, names: Iterable[str], most: int = 3) -> str:
    """The names that are most like one that is not among them, for an error."""
    known = list(names)
    likely = get_close_matches(name[:100], known, most, 0.0)
    return ", ".join(likely) + (f" and {len(known) - most} more" if len(known) > most else "")


def _shown(value: object) -> str:
    return ascii(value)[:100]


@dataclass(frozen=True)
class Places:
    """Where this machine may hold models."""

    environment: Mapping[str, str]
    home: Path
    hub_cache: Path | None = None  # None: where the hub's library keeps it
    hub: str | None = None  # its address, for `fetch` alone; None: the library's own

    @classmethod
    def of_machine(cls) -> "Places":
        """Those of the running process."""
        return cls(os.environ, Path.home(), hub=os.environ.get("HF_ENDPOINT"))

    def of(self, source: Source, *, cached: bool = True) -> list[tuple[str, Path | None]]:
        """Name every place of a model that is looked for by its folder's name, with the folder found there.

        ``cached``: look into the hub's cache too, without the network. Raises ConfigurationError where the
        variable of the environment names something that is no folder.
        """
        folder, variable = str(source.folder), variable_of(str(source.folder))
        value = self.environment.get(variable)
        named = Path(os.path.expanduser(value)) if value else None
        if named is not None and not named.is_dir():
            raise ConfigurationError(f"{variable} is {value!r}, which is no folder; correct it, or unset it")
        own = self.home / "kakeya-models" / folder
        places = [(variable, named), (f"~/kakeya-models/{folder}", own if own.is_dir() else None)]
        if cached and source.hub is not None:
            at = f" at {source.revision[:12]}" if source.revision else ""
            snapshot = self.snapshot(source.hub, source.revision)
            places.append((f"the hub's cache of {source.hub}{at}", snapshot))
        return places

    def snapshot(self, hub: str, revision: str | None) -> Path | None:
        """The folder of a repository in the hub's cache; None where it is not there, or lacks weights."""
        from huggingface_hub import try_to_load_from_cache

        with wrap_errors(lambda why: ConfigurationError(f"{hub} is no name of the hub: {why}")):
            found = try_to_load_from_cache(hub, "config.json", self.hub_cache, revision)
        folder = Path(found).parent if isinstance(found, str) else None
        return None if folder is None or missing_weights(folder) else folder


@dataclass(frozen=True)
class Located:
    """An entry with its files: folder of the target, and the ``--drafter`` text; None: nothing drafts."""

    entry: ModelEntry
    target: Path
    drafter: str | None

    @property
    def external(self) -> tuple[Path | None, int | None]:
        """The drafter's folder and the block for the entry's external engine; look-ups are ours alone."""
        folder = (self.drafter or "").removeprefix(WITH_LOOKUP)
        return Path(folder) if folder else None, parse_block(self.entry.block)


def variable_of(folder: str) -> str:
    """The variable of the environment that may name the folder of a model."""
    return "KAKEYA_MODEL_" + re.sub("[^A-Z0-9]", "_", folder.upper())


def locate(entry: ModelEntry, places: Places) -> Located:
    """Find the files of an entry, without the network; ModelNotHere if a part is in none of its places."""
    target = Path(_found(entry, "target", entry.target, places))
    if entry.drafter is None:
        return Located(entry, target, None)
    drafter = _found(entry, "drafter", entry.drafter, places)
    if entry.drafter.kv:
        drafter += f"{POLICY_MARK}{entry.drafter.kv}"
    return Located(entry, target, f"{WITH_LOOKUP}{drafter}" if entry.lookups else drafter)


def is_here(entry: ModelEntry, places: Places) -> bool:
    """Whether all files of an entry are on this machine."""
    try:
        locate(entry, places)
    except ModelNotHere:
        return False
    return True


def fetch(entry: ModelEntry, places: Places) -> Located:
    """Download what of an entry people have not put here; then locate it."""
    for source in (entry.target, entry.drafter):
        if source is not None and source.hub and not _first(places.of(source, cached=False)):
            download(source.hub, source.revision, places)
    return locate(entry, places)


def download(hub: str, revision: str | None, places: Places, files: Sequence[str] = FETCHED) -> Path:
    """Bring the files of a repository that are not here yet into the hub's cache; returns their folder.

    Files that were finished before a download broke off are kept; the others start over, since the hub's
    library writes each download to a file of its own.
    """
    from huggingface_hub import snapshot_download

    where: dict[str, Any] = {"cache_dir": places.hub_cache, "endpoint": places.hub}
    with network_errors(hub):
        return Path(snapshot_download(hub, revision=revision, allow_patterns=list(files), **where))


@contextmanager
def network_errors(source: str) -> Iterator[None]:
    """Turn what the hub's library raises into errors that say what to do."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError, of its HTTP library
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise ConfigurationError(
            f"{source} is no name of the hub: {str(error).rstrip('.')}; give OWNER/NAME"
        ) from None
    except GatedRepoError:
        raise ConfigurationError(
            f"{source} needs an account that accepted its terms; do so on its page, then run: hf auth login"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = "revision of " if isinstance(error, RevisionNotFoundError) else "model "
        raise UnknownModel(
            f"the hub has no {what}{source}; look its name up on https://huggingface.co"
        ) from None
    except LocalEntryNotFoundError:
        raise MachineError(
            f"{source} cannot be downloaded: the hub does not answer, and its cache here lacks files of it; "
            "see to the network and HF_HUB_OFFLINE, then run the same command again (finished files are kept)"
        ) from None
    # HTTPError: a connection was cut within a file; RuntimeError: likewise, from the library for large files.
    except (OSError, HTTPError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
        space = "free disk space in the hub's cache, then " if getattr(error, "errno", None) == ENOSPC else ""
        raise MachineError(
            f"{source} cannot be downloaded: {why}; {space}run the same command again to go on "
            "(finished files are kept)"
        ) from None


def default_drafter(folder: Path, places: Places | None = None) -> str:
    """What drafts for the target in a folder where nothing is said, as ``--drafter`` has it.

    The target's own next-token head, or the drafter that the shipped registry pairs with this folder, where
    it is on this machine, with look-ups; else look-ups alone, which need no model. A converted or
    packed copy has the drafter of the model that it was made from.
    """
    folders = [folder.resolve(), *_sources_of(folder)]
    if SHIPPED_TARGET.resolve() in folders:
        return f"{WITH_LOOKUP}{SHIPPED_DRAFTER}"
    if has_head(folder):
        return f"{WITH_LOOKUP}mtp"
    places = places or Places.of_machine()
    for entry in Registry.load().entries:
        with suppress(ModelNotHere, ConfigurationError):
            located = locate(entry, places)
            if located.drafter is not None and located.target in folders:
                return located.drafter
    return PromptLookup.name


def _sources_of(folder: Path) -> list[Path]:
    """The folders that a folder was converted from, the nearest first."""
    found: list[Path] = []
    with suppress(ModelError):  # none is written, or it names what is no folder of this machine
        while (source := read_json(folder / ORIGIN).get("source")) and Path(str(source)).is_absolute():
            folder = Path(str(source))
            if folder in found:
                break
            found.append(folder)
    return found


def has_head(folder: Path) -> bool:
    """Whether a target's folder holds a next-token head of its own; loading says if that is broken."""
    if (folder / SPLIT_FILE).exists():
        return True
    with suppress(ModelError):  # of another family, or without a head
        stored_head(folder)
        return True
    return False


def _first(places: Sequence[tuple[str, Path | None]]) -> Path | None:
    return next((path.resolve() for _, path in places if path is not None), None)


def _found(entry: ModelEntry, part: str, source: Source, places: Places) -> str:
    if source.shipped:
        return str(SHIPPED_TARGET if part == "target" else SHIPPED_DRAFTER)
    if source.path is not None:
        folder = Path(split_policy(source.path)[0])
        if part == "target" or folder.is_absolute():  # of a drafter, any text of --drafter
            try:
                require_folder(folder)
            except ModelError as error:
                text = f"the {part} of the model {entry.name} is not on this machine: {error}"
                raise ModelNotHere(text) from None
        return source.path
    tried = places.of(source)
    if (found := _first(tried)) is not None:
        return str(found)
    pulling = f"run: kakeya_engine model pull {entry.name} (with your --registry, if it is in one), "
    raise ModelNotHere(
        f"the {part} of the model {entry.name} is not on this machine; looked at: "
        f"{'; '.join(name for name, _ in tried)}; {f'{pulling}give --download, or ' if source.hub else ''}"
        f"put {source} in ~/kakeya-models/{source.folder}, or name its folder in {tried[0][0]}"
    )


def check_located(located: Located) -> None:
    """Refuse configurations on this machine that fit neither each other, the entry, nor its channels."""
    entry, model = located.entry, _unloaded(located.target)
    found = target_facts(located.target, model)
    said = dict(entry.facts.target or found)
    if differing := [f"{name} is {value}, not {said[name]}" for name, value in found if value != said[name]]:
        raise ModelError(
            f"{located.target} does not hold the target of the model {entry.name}: {'; '.join(differing)}; "
            "put the right one there, or correct the registry"
        )
    drafter = None if located.drafter is None else drafter_facts(located.drafter)
    _refuse_pair(found, drafter, (str(located.target), str(located.drafter)))
    _refuse_misfits(entry, found.head_dims, model)


def target_facts(folder: Path, model: Any = None) -> TargetFacts:
    """What the configuration of a target's folder says; ``model``: built of it without its weights."""
    model = model or _unloaded(folder)
    dims = opened(folder, "config.json", partial(_head_dims, model), verb="run")
    target = Target(model)
    sizes = {"hidden_size": target.hidden_size, "layers": target.layer_count, "vocab_size": target.vocab_size}
    return TargetFacts(**sizes, head_dims=dims)


def drafter_facts(spec: str) -> DrafterFacts | None:
    """What the drafter of a ``--drafter`` text says about its target; None for one without a model."""
    asked = read_spec(spec)
    if asked.kind == PromptLookup.name:
        return None
    config = read_json(asked.folder / "config.json")
    if asked.kind not in ("dflash", "dflash2"):
        size = text_part(config).get("vocab_size")
        return DrafterFacts(vocab_size=size if type(size) is int else None)
    read = DFlashConfig.from_dict(config)
    sizes = {"hidden_size": read.hidden_size, "layers": read.num_target_layers, "vocab_size": read.vocab_size}
    mask, block = read.mask_token_id, read.block_size
    return DrafterFacts(**sizes, target_layers=read.target_layer_ids, mask_token=mask, block=block)


def _unloaded(folder: Path) -> Any:
    require_folder(folder)
    config = read_json(folder / "config.json")
    check_config(folder / "config.json", config)
    return opened(folder, "config.json", lambda: build_unloaded(config), verb="run")


def _head_dims(model: Any) -> tuple[int, ...]:
    """Values of a row of keys or values as a forward writes them into the caches; nothing is computed."""
    caches = new_caches(model, 1)
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    members = [member for cache in caches for member in members_of(cache)]
    filled = [member for member in members if type(member) is not ArraysCache and not member.empty()]
    return tuple(side.shape[-1] for member in filled for side in (member.keys, member.values))


def _refuse_pair(target: TargetFacts, drafter: DrafterFacts | None, names: tuple[str, str]) -> None:
    """Raise DrafterMismatchError, with all that differs, for a drafter of a target of another shape."""
    if drafter is None:
        return
    differing = [
        f"{what} {ours} in the drafter, {theirs} in the target"
        for what, ours, theirs in (
            ("hidden size", drafter.hidden_size, target.hidden_size),
            ("vocabulary", drafter.vocab_size, target.vocab_size),
            ("number of target layers", drafter.layers, target.layers),
        )
        if ours not in (None, theirs)
    ]
    if drafter.target_layers and (layer := max(drafter.target_layers)) >= target.layers:
        differing.append(f"it reads layer {layer} of a target with {target.layers} layers")
    if (drafter.mask_token or 0) >= target.vocab_size:
        differing.append(f"its mask is token {drafter.mask_token} of a vocabulary of {target.vocab_size}")
    if differing:
        raise DrafterMismatchError(
            f"the drafter {names[1]} was not made for the target {names[0]}: {'; '.join(differing)}"
        )


def _refuse_misfits(entry: ModelEntry, head_dims: Sequence[int], model: Any = None) -> None:
    """Raise ConfigurationError for a channel that does not fit these heads, or the model, where given."""
    for channel in entry.channels.values():
        try:
            _ = [make(dim) for make in channel.policy.codecs for dim in head_dims]
            if model is not None:
                refuse_policy(model, channel.policy)
        except InputError as error:
            raise ConfigurationError(
                f"the model {entry.name}: the KV channel {channel.name} ({channel.policy.spec}) "
                f"does not fit: {error}; leave it out of its channels"
            ) from None


def registry_markdown(registry: Registry) -> str:
    """Models and channels as `docs/reference/models.md` shows them."""
    name = registry.default
    models = "".join(
        f"| `{each.name}` | {each.summary} | {_linked(each.target)} | {_linked(each.drafter)}"
        f"{', with look-ups' if each.lookups else ''} | {', '.join(each.channels)} |\n"
        for each in registry.entries
    )
    channels = "".join(
        f"| `{each.name}` | `{each.policy.spec}` | {each.description} |\n"
        for each in registry.channels.values()
    )
    ranges = ", ".join(f"`{each.text}`" for each in registry.requests) or "none"
    return f"""\
# Models and KV channels of the server

A request names a model by its name, or by name and channel: `{name}`, `{name}{SEPARATOR}affine8`. Where \
none is named, `{name}` is meant, and of each model its default channel, `native` here.

| model | what it is | target | drafter | channels |
| --- | --- | --- | --- | --- |
{models}
Where a folder is looked for, and what is checked of it: [the server](../server.md).

| channel | `--kv` | what it does |
| --- | --- | --- |
{channels}
Instead of a channel, a request may spell out a policy whose numbers lie in these ranges: {ranges}.
"""


def _linked(source: Source | None) -> str:
    if source is None or source.hub is None:
        return str(source or "none")
    at = f" at `{source.revision[:12]}`" if source.revision else ", not pinned"
    return f"`{source.folder}`: [{source.hub}](https://huggingface.co/{source.hub}){at}"
