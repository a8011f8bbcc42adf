"""Which drafters there are, and what a ``--drafter`` text opens.

    prompt-lookup, prompt-lookup:3     no model; the number is the shortest match
    FOLDER                             its config.json says which kind it is
    KIND:FOLDER                        likewise, and an error if it is another kind
    masked-diffusion:FOLDER?steps=4    likewise, with other settings than the folder's (block, steps, context)
    mtp, mtp:FOLDER                    the next-token head in the target's folder, or in another one
    prompt-lookup+SPEC                 look-ups where they do better than what SPEC names
    SPEC?quantize=BITS,GROUP           its weights packed on loading, like --drafter-quantize BITS,GROUP
    SPEC?kv=POLICY                     with its own keys and values kept so, like --drafter-kv POLICY

How folders become networks is in `engine.target.loading`.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.cache.policy import NATIVE, KVPolicy, parse_policy
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.masked_diffusion import MaskedDiffusion, settings_of, split_spec
from engine.drafters.mtp import AssistantDrafter, HiddenStateDrafter, MTPDrafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.with_lookup import WithLookup
from engine.errors import ConfigurationError, DrafterMismatchError, ModelError, ModelNotHere
from engine.networks.dflash_config import KINDS as DFLASH_KINDS
from engine.networks.mdlm import CLASSES, MODEL_TYPES, build_model, mask_token
from engine.networks.mtp import SPLIT_SUFFIX, build_head, head_weights, stored_head
from engine.networks.mtp_assistant import MODEL_TYPES as ASSISTANTS
from engine.networks.mtp_assistant import Assistant
from engine.target.attention import refuse_policy
from engine.target.folder import card_of, named_folder, read_json, require_folder, weight_files
from engine.target.loading import (
    DRAFTER_QUANTIZE,
    LoadedDrafter,
    LoadedTarget,
    dtype_of,
    fill_network,
    load_drafter,
    load_target,
    make_ready_drafter,
    opened,
    put_weights,
    tokenizer_of,
)
from engine.target.quantize import parse_quantize

WITH_LOOKUP = "prompt-lookup+"
POLICY_MARK, QUANTIZE_MARK = "?kv=", "?quantize="
ARCHITECTURES = DFLASH_KINDS | dict.fromkeys(CLASSES, MaskedDiffusion.name)  # as config.json names them
WITHOUT_POLICY = {
    PromptLookup.name: "keeps no keys and values",
    MaskedDiffusion.name: "keeps no keys and values",
    HiddenStateDrafter.name: "keeps its own keys and values native",
}
DRAFTER_POLICIES = ("native", "sink-window", "affine", "rotated")


def drafter_policy(text: str) -> KVPolicy:
    """What a ``--drafter-kv`` text says: how a drafter keeps keys and values, the same in all its layers."""
    policy = parse_policy(text, "--drafter-kv")
    if policy.kind not in DRAFTER_POLICIES or policy.layers != "all":
        raise ConfigurationError(
            f"--drafter-kv {text!r}: a drafter takes {', '.join(DRAFTER_POLICIES)}, for all of its layers"
        )
    return policy


def split_policy(spec: str, policy: KVPolicy = NATIVE) -> tuple[str, KVPolicy]:
    """A drafter's text without ``?kv=POLICY``, and that policy, or the one given."""
    rest, mark, text = spec.partition(POLICY_MARK)
    if mark and policy != NATIVE:
        raise ConfigurationError(
            f"--drafter {spec} and --drafter-kv {policy.spec} name two policies; give one"
        )
    return rest, drafter_policy(text) if mark else policy


@dataclass(frozen=True)
class DrafterSpec:
    """What a ``--drafter`` text says."""

    kind: str
    folder: Path
    settings: dict[str, int]  # arguments of `PromptLookup` or `MaskedDiffusion`
    policy: KVPolicy  # of its own keys and values
    lookups: bool  # look-ups where they do better
    in_target: bool = False  # the weights are in the target's folder
    quantize: str | None = None  # bits and group its weights are packed in; None: as stored

    @property
    def shared_settings(self) -> str:
        """What the text says whatever the kind, without the first question mark; may be empty."""
        packed = "" if self.quantize is None else f"{QUANTIZE_MARK}{self.quantize}"
        kept = "" if self.policy.kind == NATIVE.kind else f"{POLICY_MARK}{self.policy.spec}"
        return f"{packed}{kept}".removeprefix("?")


def read_spec(spec: str, policy: KVPolicy = NATIVE, quantize: str | None = None) -> DrafterSpec:
    """Read a ``--drafter`` text; ConfigurationError or, for the folder it names, ModelError."""
    spec, policy = split_policy(spec, policy)
    spec, quantize = _split_quantize(spec, quantize)
    rest = spec
    while rest.startswith(WITH_LOOKUP):
        rest = rest.removeprefix(WITH_LOOKUP)
    if not rest:
        raise ConfigurationError(f"--drafter {spec} lacks the drafter behind it; give {spec}FOLDER")
    kind, folder, settings = _parts_of(rest)
    if policy.kind != NATIVE.kind and kind in WITHOUT_POLICY:
        raise ConfigurationError(f"--drafter-kv {policy.spec}: {kind} {WITHOUT_POLICY[kind]}; leave it out")
    if quantize is not None and kind == PromptLookup.name:
        raise ConfigurationError(f"{DRAFTER_QUANTIZE} {quantize}: {kind} has no weights; leave it out")
    in_target = rest == HiddenStateDrafter.name
    return DrafterSpec(kind, folder, settings, policy, rest != spec, in_target, quantize)


def _split_quantize(spec: str, quantize: str | None) -> tuple[str, str | None]:
    rest, mark, text = spec.partition(QUANTIZE_MARK)
    if mark and quantize not in (None, text):
        raise ConfigurationError(
            f"--drafter {spec} and {DRAFTER_QUANTIZE} {quantize} name two packings; give one"
        )
    found = text if mark else quantize
    if found is not None:
        parse_quantize(found, DRAFTER_QUANTIZE)
    return rest, found


def _parts_of(rest: str) -> tuple[str, Path, dict[str, int]]:
    """Kind, folder and settings that a text without its policy and look-ups names."""
    kind, colon, argument = rest.partition(":")
    folder, settings = Path(argument), {}
    if kind not in KINDS:
        folder = named_folder(rest)
        if "/" not in rest and not folder.exists():
            _refuse_not_pulled(rest)
            raise ConfigurationError(
                f"--drafter {rest!r} is neither a model here nor one of {', '.join(KINDS)}; give a "
                "name or folder, KIND:FOLDER, prompt-lookup, prompt-lookup:N, prompt-lookup+FOLDER or none"
            )
        kind = kind_of(folder)
    elif kind == PromptLookup.name:
        settings = {"shortest": int(argument)} if re.fullmatch("[0-9]{1,9}", argument) else {}
        if colon and not settings:
            raise ConfigurationError(
                f"--drafter {rest}: the shortest match must be a number of tokens, as in prompt-lookup:3"
            )
    elif not argument and rest != HiddenStateDrafter.name:
        raise ConfigurationError(f"--drafter {rest} lacks its folder; give {kind}:FOLDER")
    elif kind != HiddenStateDrafter.name:  # a target's folder, too, may hold a head
        if kind == MaskedDiffusion.name:
            folder, settings = split_spec(argument)
        folder = named_folder(str(folder))
        if (found := kind_of(folder)) != kind:
            raise ConfigurationError(f"--drafter {rest}: the folder holds a drafter of the kind {found}")
    return kind, folder, settings


def _refuse_not_pulled(name: str) -> None:
    """Raise ModelNotHere for a name that the shipped registry knows: of a model, or of its drafter."""
    from engine.registry import Registry  # which imports this module

    for entry in Registry.load().entries:
        if name == entry.name or (entry.drafter is not None and name == entry.drafter.folder):
            raise ModelNotHere(
                f"--drafter {name} is not on this machine; run: kakeya_engine model pull {entry.name}"
            )


def open_drafter(
    spec: str,
    target: LoadedTarget,
    dtype: str | None = None,
    policy: KVPolicy = NATIVE,
    quantize: str | None = None,
) -> LoadedDrafter:
    """Load what a ``--drafter`` text names (see the top of this file) and bind it to a target.

    ``policy`` is of the drafter's own keys and values, ``quantize`` the bits and group its weights are packed
    in; the text may say them instead. Raises as `read_spec`, and DrafterMismatchError where the drafter was
    made for another target.
    """
    asked = read_spec(spec, policy, quantize)
    loaded = KINDS[asked.kind](asked, target, dtype)
    settings = [each for each in (loaded.settings, asked.shared_settings) if each]
    loaded = replace(loaded, settings="?".join(settings) or None)
    return replace(loaded, drafter=WithLookup(loaded.drafter)) if asked.lookups else loaded


def kind_of(folder: Path) -> str:
    """The kind of drafter a folder holds, from its ``config.json``."""
    require_folder(folder)
    config = read_json(folder / "config.json")
    names = config.get("architectures")
    for name, kind in ARCHITECTURES.items():
        if isinstance(names, list) and name in names:
            return kind
    if "dflash_config" in config:
        return "dflash"
    if (model_type := str(config.get("model_type"))).endswith(SPLIT_SUFFIX) or model_type in ASSISTANTS:
        return HiddenStateDrafter.name
    if "model_type" in config:
        return MaskedDiffusion.name if config["model_type"] in MODEL_TYPES else Autoregressive.name
    raise ModelError(
        f"{folder / 'config.json'} names neither architectures nor a model_type; drafters in folders are "
        f"{', '.join(kind for kind in KINDS if kind != PromptLookup.name)}"
    )


def _open_prompt_lookup(spec: DrafterSpec, target: LoadedTarget, _: str | None) -> LoadedDrafter:
    drafter = PromptLookup(**spec.settings)
    drafter.bind(target.target)
    return LoadedDrafter(drafter, None, f"shortest={drafter.shortest}")


def _open_block(spec: DrafterSpec, target: LoadedTarget, dtype: str | None) -> LoadedDrafter:
    return load_drafter(spec.folder, target.target, dtype, spec.policy, spec.quantize)


def _open_autoregressive(spec: DrafterSpec, target: LoadedTarget, dtype: str | None) -> LoadedDrafter:
    model, policy = load_target(spec.folder, dtype, spec.quantize, DRAFTER_QUANTIZE), spec.policy
    refuse_policy(model.target.model, policy, "--drafter-kv")
    drafter = Autoregressive(model.target, policy=policy)
    drafter.bind(target.target)
    refuse_other_tokens(model.tokenizer, target.tokenizer)
    return LoadedDrafter(drafter, model.card)


def diffusion_settings(spec: DrafterSpec) -> tuple[dict[str, Any], dict[str, int]]:
    """The ``config.json`` of a masked diffusion drafter's folder, and the settings of `MaskedDiffusion`."""
    file = spec.folder / "config.json"
    config = read_json(file)
    mask = opened(spec.folder, "the mask token", lambda: mask_token(spec.folder, config))
    return config, {"mask_token_id": mask} | settings_of(file, config) | spec.settings


def _open_masked_diffusion(spec: DrafterSpec, target: LoadedTarget, dtype: str | None) -> LoadedDrafter:
    wanted, folder = dtype_of(dtype), spec.folder
    files = weight_files(folder)
    config, settings = diffusion_settings(spec)
    network = opened(folder, "the model", lambda: build_model(config))
    fill_network(folder, files, network, config.get("quantization"))
    drafter = MaskedDiffusion(network, **settings)
    drafter.bind(target.target)
    logger = logging.getLogger("transformers.configuration_utils")  # does not know the layout
    disabled, logger.disabled = logger.disabled, True
    try:
        tokenizer = tokenizer_of(folder, None)
    finally:
        logger.disabled = disabled
    refuse_other_tokens(tokenizer, target.tokenizer)
    make_ready_drafter(folder, network, wanted, spec.quantize)
    settings_used = f"steps={drafter.steps},block={drafter.block_size},context={drafter.context}"
    return LoadedDrafter(drafter, card_of(folder, files, network), settings_used)


def _open_mtp(spec: DrafterSpec, target: LoadedTarget, dtype: str | None) -> LoadedDrafter:
    folder = target.folder if spec.in_target else spec.folder
    if folder is None:
        raise ConfigurationError("--drafter mtp needs a target from a folder; give mtp:FOLDER")
    with mtp_errors(spec, folder):
        drafter, files = build_mtp(folder)
        make_ready_drafter(folder, drafter.network, dtype_of(dtype), spec.quantize)
        drafter.bind(target.target)
    return LoadedDrafter(drafter, card_of(folder, files, drafter.network))


@contextmanager
def mtp_errors(spec: DrafterSpec, folder: Path) -> Iterator[None]:
    """Say how to do without a head in the target's folder, which was perhaps chosen by default."""
    try:
        yield
    except ModelError as error:
        if not spec.in_target:
            raise
        way_out = "give --drafter prompt-lookup or --no-speculation to go on without it"
        raise type(error)(f"the next-token head of {folder} cannot draft: {error}; {way_out}") from error


def build_mtp(folder: Path) -> tuple[MTPDrafter | AssistantDrafter, list[Path]]:
    """A drafter with the head or assistant a folder holds, its weights not computed yet, and their files."""
    config = read_json(folder / "config.json")
    if config.get("model_type") in ASSISTANTS:
        files = weight_files(folder)
        assistant: Assistant = opened(folder, "config.json", lambda: Assistant(config))
        fill_network(folder, files, assistant, config.get("quantization"))
        return AssistantDrafter(assistant), files
    stored = stored_head(folder, config)
    network, model = opened(folder, "config.json", lambda: build_head(config))
    weights = opened(folder, "the head", lambda: head_weights(stored, config, model))
    put_weights(folder, weights, network, config.get("quantization"))
    return MTPDrafter(network), stored.files


def refuse_other_tokens(drafter: Any, target: Any) -> None:
    """Raise DrafterMismatchError where an id differs that both know: masks may be added to one of them."""
    ours, theirs = ({number: text for text, number in side.get_vocab().items()} for side in (drafter, target))
    differing = sorted(number for number in ours.keys() & theirs.keys() if ours[number] != theirs[number])
    if differing:
        first = differing[0]
        raise DrafterMismatchError(
            f"this drafter is for another target: token {first} is {ours[first]!r} in the drafter, "
            f"{theirs[first]!r} in the target ({len(differing)} tokens differ)"
        )


KINDS: dict[str, Callable[[DrafterSpec, LoadedTarget, str | None], LoadedDrafter]] = {
    "dflash": _open_block,
    "dflash2": _open_block,
    "prompt-lookup": _open_prompt_lookup,
    "autoregressive": _open_autoregressive,
    "masked-diffusion": _open_masked_diffusion,
    "mtp": _open_mtp,
}
