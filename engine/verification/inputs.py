"""What a replay needs: the report, the folders of its models, its prompts and an engine, by its own switches.

Nothing of a report is believed. Names choose which folders are hashed, digests decide; a path in a report
is never opened. Prompts are made again from the shipped sets, a given file or a seed, so that the tokens show
a swapped prompt.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from pydantic import BaseModel, ConfigDict, Json, ValidationError

from engine.cache.policy import NATIVE
from engine.config import Engine, Options, open_engine
from engine.drafters.mtp import HiddenStateDrafter
from engine.drafters.registry import KINDS, WITH_LOOKUP
from engine.errors import ConfigurationError, ModelError
from engine.evaluation.haystack import GENERATED, Haystack, retrieval_prompts
from engine.evaluation.kv import NO_PROMPTS, KVSwitches, made_prompts, open_shootout
from engine.evaluation.measure import encode_all
from engine.evaluation.prompts import SHIPPED_SETS, Prompt, load_prompts
from engine.evaluation.recall import reach
from engine.generate import PENALTIES, ChatSwitches, token_limit
from engine.networks.mtp import stored_head
from engine.networks.projector import ProjectorConfig
from engine.registry import Places, Registry
from engine.target.folder import SHIPPED, identity, read_json, weight_files
from engine.target.loading import DTYPES
from evidence_format.model import SCHEMA_ID, Report
from evidence_format.parse import MAX_BYTES, Unreadable, parse
from evidence_format.weights import digest

REPLAYED = ("throughput", "quality", "recall", "kv")
NOT_GREEDY = ("temperature", *PENALTIES)
SHIPPED_FOLDERS = [SHIPPED / name for name in ("target", "drafter", "proposer", "projector")]


def read_report(path: Path) -> tuple[Report, str]:
    """Read a report that can be replayed, and the sha256 of its bytes; ConfigurationError for any other."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        report = parse(data)
    except OSError as error:
        raise ConfigurationError(f"cannot read the report {path}: {error.strerror or error}") from None
    except Unreadable as error:
        message = f"{path} is no report of {SCHEMA_ID}: {error}; kakeya_mac gate says more"
        raise ConfigurationError(message) from None
    if problem := _unreplayable(report):
        raise ConfigurationError(f"nothing to replay: {path} {problem}")
    return report, hashlib.sha256(data).hexdigest()


def _unreplayable(report: Report) -> str | None:
    """Say why no token of a report can be computed again."""
    if report.kind not in REPLAYED:
        return f"is a {report.kind} report, which has no rows of tokens; run it again instead"
    tokens = [row.tokens for arm in report.arms for row in arm.samples]
    if not tokens or not all(tokens):
        return "has no rows, or rows without a token"
    for name in NOT_GREEDY:
        if value := report.configuration.get(name):
            return f"was made with {name} {value}, and other tokens are as right; give a greedy report"
    return None


class RunSettings(BaseModel):
    """The switches of a report by which its run is repeated; see the switches of each evaluation."""

    model_config = ConfigDict(frozen=True, strict=True)

    command: Literal["eval throughput", "eval quality", "eval server", "eval recall", "eval kv", "generate"]
    prefill_chunk: int
    max_tokens: int
    block: str = "1"
    drafter: str | None = None
    drafter_settings: str | None = None
    kv: str = NATIVE.spec
    quantize: str | None = None
    prompts: str | None = None
    limit: int | None = None
    seed: int | None = None
    chat: bool = False
    thinking: str = "default"
    channel_prefix: str | None = None
    system: str | None = None
    context: int | None = None
    depths: Json[tuple[float, ...]] | None = None  # a configuration holds a list as one line of JSON
    per_depth: int | None = None
    policies: Json[tuple[str, ...]] | None = None
    speed_prompts: str = NO_PROMPTS
    speed_limit: int = 1
    answer_tokens: int = 1
    stop: Json[tuple[str, ...]] | None = None

    @classmethod
    def of(cls, report: Report) -> "RunSettings":
        """Read a report's configuration; ConfigurationError where this engine does not write such a one."""
        try:
            return cls.model_validate(report.configuration)
        except ValidationError as error:
            fault = error.errors()[0]
            name, value = fault["loc"][0], str(fault["input"])[:80]
            why = f"{name} = {value} ({fault['msg']}); was it written by this engine?"
            raise ConfigurationError(f"the report cannot be replayed by its configuration: {why}") from None


def find_models(
    report: Report, given: Mapping[str, Path | None], among: Sequence[Path], places: Places
) -> tuple[dict[str, Path], dict[str, str]]:
    """Find the folder of every model that a report names; ConfigurationError where there is none.

    ``given``: folders from the command line, by role; ``among``: further ones, for any role. Returns by role
    the folders with the claimed digests, and what speaks against a folder with another digest.
    """
    found: dict[str, Path] = {}
    differing: dict[str, str] = {}
    heads = str(report.configuration.get("drafter")).removeprefix(WITH_LOOKUP) == HiddenStateDrafter.name
    # the target first: its folder may hold the drafter, too
    for role, model in sorted(report.environment.models.items(), key=lambda each: each[0] != "target"):
        is_head = heads and role == "drafter"
        folder, claim = given.get(role), f"weights {model.weights_sha256[:12]}…"
        if folder is not None:
            digests: dict[Path, str | None] = {folder: digest(_files(folder, is_head))}
        else:
            named = (each for each in _kept(places) if each.is_dir() and identity(each) == model.id)
            own = [found["target"]] if is_head and "target" in found else []
            digests = {each: _digest(each, is_head) for each in (*own, *SHIPPED_FOLDERS, *among, *named)}
        right = [each for each, value in digests.items() if value == model.weights_sha256]
        wrong = [each for each, value in digests.items() if value and (folder or identity(each) == model.id)]
        if right:
            found[role] = right[0]
        elif wrong:
            other = f"{wrong[0]} has {str(digests[wrong[0]])[:12]}…"
            differing[role] = f"the report ran the {role} {model.id!r} with {claim}, but {other}"
        else:
            flag = "--model" if role == "target" else f"--{role}"
            missing = f"the {role} {model.id!r} ({claim}) is not on this machine"
            raise ConfigurationError(f"{missing}; give its folder: {flag}")
    return found, differing


def _kept(places: Places) -> Iterator[Path]:
    """Where this machine's owner, or the hub, puts models."""
    for name, value in places.environment.items():
        if name.startswith("KAKEYA_MODEL_") and value:
            yield Path(os.path.expanduser(value))
    own = places.home / "kakeya-models"
    yield from sorted(own.iterdir()) if own.is_dir() else ()
    for entry in Registry.load().entries:
        for source in (entry.target, entry.drafter):
            if source is not None and source.folder is not None:
                yield from (path for _, path in places.of(source) if path is not None)


def _files(folder: Path, is_head: bool) -> list[Path]:
    """A folder's files of weights, or those that hold its next-token head, as the drafter's card has them."""
    if is_head:
        with suppress(ModelError):  # an assistant, or no head at all
            return stored_head(folder).files
    return weight_files(folder)


def _digest(folder: Path, is_head: bool = False) -> str | None:
    """Digest a folder's weights, see `_files`; None where it holds none."""
    try:
        return digest(_files(folder, is_head))
    except ModelError:
        return None


def open_reported(
    report: Report,
    settings: RunSettings,
    folders: Mapping[str, Path],
    given: Mapping[str, Path | None],
    among: Sequence[Path],
) -> Engine:
    """Open the engine as the report's configuration has it, with its models by role; see `find_models`."""
    model = report.environment.models.get("target")
    if model is None:
        raise ConfigurationError("the report names no target")
    shootout, projector = settings.command == "eval kv", folders.get("projector")
    if settings.drafter is not None:
        spec = _drafter_spec(settings.drafter, settings.drafter_settings, folders.get("drafter"))
    else:
        spec = _projectors_drafter(projector, given.get("drafter"), among)
    both_metal = mx.metal.is_available() and report.environment.device == "metal"
    options = Options(
        model=folders["target"],
        drafter=spec,
        block=settings.block if settings.drafter else "1",
        prefill_chunk=settings.prefill_chunk,
        dtype=None if both_metal or model.dtype not in DTYPES else model.dtype,
        compiled=False,
        kv=NATIVE.spec if shootout else settings.kv,
        quantize=settings.quantize,
        projector=projector,
    )
    return open_shootout(options) if shootout else open_engine(options)


def _drafter_spec(name: str, settings: str | None, folder: Path | None) -> str:
    """What ``--drafter`` would say."""
    kind = name.removeprefix(WITH_LOOKUP)
    if kind == "prompt-lookup":
        return name + (f":{settings.removeprefix('shortest=')}" if settings else "")
    if kind not in KINDS:
        raise ConfigurationError(f"the report's drafter {name!r} is none that this engine knows")
    if folder is None:
        raise ConfigurationError(f"the report drafts with {name} and names no weights of it")
    return f"{name}:{folder}" + (f"?{settings}" if settings else "")


def _projectors_drafter(projector: Path | None, given: Path | None, among: Sequence[Path]) -> str:
    """The drafter whose keys and values a projector maps, also where nothing is drafted."""
    if projector is None:
        return "none"
    wanted = ProjectorConfig.from_dict(read_json(projector / "config.json")).drafter
    return str(
        given or next((each for each in (*SHIPPED_FOLDERS, *among) if _digest(each) == wanted), "none")
    )


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as it was put to an arm: its token ids, and how many may be generated for it."""

    prompt: Prompt
    tokens: list[int]
    limit: int


PromptsById = dict[str, EncodedPrompt]


def make_prompts(
    engine: Engine, settings: RunSettings, given: Path | None
) -> tuple[PromptsById, PromptsById]:
    """Make a report's prompts again: as they are, and without their needles; ``given``: their file."""
    command, seed = settings.command, settings.seed or 0
    chat = ChatSwitches(settings.chat, settings.thinking, settings.channel_prefix, settings.system)
    haystack = Haystack(settings.context, settings.depths, settings.per_depth)
    for switches in (chat, haystack):
        switches.check()
    if command == "eval kv":
        speed = settings.speed_prompts
        shootout = KVSwitches(
            policies=settings.policies or (),
            haystack=haystack,
            speed_prompts=speed if speed == NO_PROMPTS else _named_or_given(speed, given, "all"),
            speed_limit=settings.speed_limit,
            seed=seed,
            chat=chat,
        )
        shootout.check()
        prompts = made_prompts(engine, shootout)
    elif command == "eval recall":
        name, tokenizer = _named_or_given(settings.prompts, given, GENERATED), engine.target.tokenizer
        drawn: dict[str, Any] = {"limit": settings.limit, "seed": seed, "beyond": reach(engine.policy)}
        prompts = retrieval_prompts(name, haystack, tokenizer, switches=chat, **drawn)
    else:  # the seed of `generate` is for drawing tokens
        name, order = _named_or_given(settings.prompts, given, "all"), 0 if command == "generate" else seed
        prompts = load_prompts(name, settings.limit, order)

    def encoded(asked: Sequence[Prompt]) -> PromptsById:
        short = [command == "eval kv" and prompt.needle is not None for prompt in prompts]
        most = [settings.answer_tokens if each else settings.max_tokens for each in short]
        return {
            prompt.id: EncodedPrompt(prompt, ids, token_limit(engine.target, len(ids), limit))
            for prompt, ids, limit in zip(asked, encode_all(engine, asked, chat), most, strict=True)
        }

    if command not in ("eval recall", "eval kv"):
        return encoded(prompts), {}
    emptied = [prompt.without_needle() if prompt.needle else prompt for prompt in prompts]
    return encoded(prompts), encoded(emptied)


def _named_or_given(name: str | None, given: Path | None, made: str) -> str:
    """The shipped sets a switch names, or the given file where it names another."""
    if name is not None and all(part in (*SHIPPED_SETS, made) for part in name.split(",")):
        return name
    if given is None:
        why, line = f"its prompts are {name!r}, no shipped set", ""
        if name is None:
            why, line = "its prompt was typed", ', which holds {"id": "prompt", "prompt": "…"}'
            line += ' or, of --chat, {"id": "prompt", "messages": [{"role": "user", "content": "…"}]}'
        raise ConfigurationError(
            f"the report cannot be replayed by itself ({why}); give the prompts with --prompts FILE{line}"
        )
    return str(given)
