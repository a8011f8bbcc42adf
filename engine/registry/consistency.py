"""Whether the parts of an entry go together, from configurations alone: no weight is read.

A target's shape is that of the model mlx-lm would build from its ``config.json``, never computed: what a
family fills in, how it nests, and how many values its heads really write is then mlx-lm's to say. A drafter's
is what its own configuration says of the target it was made for. Tokenizers are compared when a drafter is
opened, not here.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.cache.policy import KVPolicy
from engine.cache.transaction import members_of, new_caches
from engine.drafters.masked_diffusion import MaskedDiffusion, split_spec
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.registry import KINDS, WITH_LOOKUP, kind_of
from engine.errors import ConfigurationError, DrafterMismatchError, EngineError, ModelError, ModelNotHere
from engine.memory.shapes import ATTENDING
from engine.networks.dflash_config import DFlashConfig
from engine.registry.channels import CHANNELS, find_channel, refuse_channel
from engine.registry.entries import DrafterFacts, ModelEntry, TargetFacts
from engine.registry.locate import Located, Places, locate
from engine.target.attention import refuse_policy
from engine.target.folder import build_unloaded, check_config, read_json, require_folder, text_part
from engine.target.loading import opened
from engine.target.model import Target


def check_declared(entry: ModelEntry) -> None:
    """Hold what an entry says about its parts against itself; needs no files.

    Raises:
        DrafterMismatchError: its drafter was not made for its target.
        ConfigurationError: a channel that it offers does not fit its target's heads.
    """
    target, drafter = entry.target_facts, entry.drafter_facts
    if target is None:
        return
    if drafter is not None:
        refuse_pair(target, drafter, (str(entry.target), str(entry.drafter)))
    _refuse_channels(entry, target.head_dims)


def check_located(located: Located) -> None:
    """Hold the configurations that are on this machine against each other and against the entry.

    Raises:
        ModelError: a configuration cannot be read, or is of another model than the entry says.
        DrafterMismatchError: the drafter was not made for the target.
        ConfigurationError: a channel that the entry offers does not fit the target's heads or layers.
    """
    entry = located.entry
    model = _unloaded(located.target)
    target = _facts_of(located.target, model)
    if entry.target_facts is not None:
        _refuse_other(entry, entry.target_facts, located.target, target)
    drafter = None if located.drafter is None else drafter_facts(located.drafter)
    if drafter is not None:
        refuse_pair(target, drafter, (str(located.target), str(located.drafter)))
    _refuse_channels(entry, target.head_dims)
    for name in entry.channels:
        refuse_policy(model, find_channel(name).policy)


def problems(entries: Iterable[ModelEntry], places: Places) -> dict[str, EngineError]:
    """What is wrong with those entries whose files are on this machine, by the entry's name."""
    found: dict[str, EngineError] = {}
    for entry in entries:
        try:
            check_located(locate(entry, places))
        except ModelNotHere:
            continue
        except EngineError as error:
            found[entry.name] = error
    return found


def refuse_pair(target: TargetFacts, drafter: DrafterFacts, names: tuple[str, str]) -> None:
    """Make sure that a drafter was made for a target of this shape.

    Args:
        target: the target's.
        drafter: what the drafter's configuration says.
        names: of both, for the message.

    Raises:
        DrafterMismatchError: naming both, and everything that differs.
    """
    differing = [
        f"{what} {ours} in the drafter, {theirs} in the target"
        for what, ours, theirs in (
            ("hidden size", drafter.hidden_size, target.hidden_size),
            ("vocabulary", drafter.vocab_size, target.vocab_size),
            ("number of target layers", drafter.layers, target.layers),
        )
        if ours is not None and ours != theirs
    ]
    if beyond := [layer for layer in drafter.taps if not 0 <= layer < target.layers]:
        differing.append(f"it reads layer {beyond[0]} of a target with {target.layers} layers")
    if drafter.mask_token is not None and drafter.mask_token >= target.vocab_size:
        differing.append(f"its mask is token {drafter.mask_token} of a vocabulary of {target.vocab_size}")
    if differing:
        raise DrafterMismatchError(
            f"the drafter {names[1]} was not made for the target {names[0]}: {'; '.join(differing)}"
        )


def target_facts(folder: Path) -> TargetFacts:
    """The shape of the target in a folder, from its ``config.json``.

    Raises:
        ModelError: there is none, or mlx-lm has no model for it.
    """
    return _facts_of(folder, _unloaded(folder))


def usable_channels(folder: Path) -> tuple[str, ...]:
    """Names of the channels that the target in a folder can be served with, in their order.

    Raises:
        ModelError: its configuration cannot be used.
    """
    model = _unloaded(folder)
    return tuple(name for name, channel in CHANNELS.items() if _takes(model, channel.policy))


def drafter_facts(spec: str) -> DrafterFacts | None:
    """What the drafter of a ``--drafter`` text says about its target; None for one without a model.

    Raises:
        ModelError: its folder or configuration cannot be used.
        ConfigurationError: the settings behind its folder make no sense.
    """
    kind, _, argument = spec.removeprefix(WITH_LOOKUP).partition(":")
    if kind == PromptLookup.name:
        return None
    if kind not in KINDS:
        argument = spec.removeprefix(WITH_LOOKUP)
    folder = split_spec(argument)[0] if kind == MaskedDiffusion.name else Path(argument)
    kind = kind_of(folder)
    config = read_json(folder / "config.json")
    if kind in ("dflash", "dflash2"):
        read = DFlashConfig.from_dict(config)
        return DrafterFacts(
            hidden_size=read.hidden_size,
            layers=read.num_target_layers,
            vocab_size=read.vocab_size,
            taps=read.target_layer_ids,
            mask_token=read.mask_token_id,
            block=read.block_size,
        )
    size = text_part(config).get("vocab_size")
    return DrafterFacts(vocab_size=size if type(size) is int else None)


def _unloaded(folder: Path) -> Any:
    """The model of a folder's ``config.json``, its weights neither read nor computed."""
    require_folder(folder)
    path = folder / "config.json"
    config = read_json(path)
    check_config(path, config)
    return opened(folder, "config.json", lambda: build_unloaded(config), verb="run")


def _facts_of(folder: Path, model: Any) -> TargetFacts:
    target = Target(model)
    dims = opened(folder, "config.json", partial(_head_dims, model), verb="run")
    return TargetFacts(target.hidden_size, target.layer_count, target.vocab_size, dims)


def _head_dims(model: Any) -> tuple[int, ...]:
    """Values of a row of keys or values as a forward writes them into the caches; nothing is computed."""
    caches = new_caches(model, 1)
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    members = [member for cache in caches for member in members_of(cache) if type(member) in ATTENDING]
    filled = [member for member in members if not member.empty()]
    return tuple(sorted({side.shape[-1] for member in filled for side in (member.keys, member.values)}))


def _takes(model: Any, policy: KVPolicy) -> bool:
    try:
        refuse_policy(model, policy)
    except (ConfigurationError, ModelError):
        return False
    return True


def _refuse_channels(entry: ModelEntry, head_dims: tuple[int, ...]) -> None:
    for name in entry.channels:
        try:
            refuse_channel(find_channel(name), head_dims)
        except ConfigurationError as error:
            raise ConfigurationError(f"the model {entry.name}: {error}") from None


def _refuse_other(entry: ModelEntry, said: TargetFacts, folder: Path, found: TargetFacts) -> None:
    """Raise ModelError where a folder holds a target of another shape than its entry says."""
    differing = [
        f"{name} is {_shown(value)}, not {_shown(getattr(said, name))}"
        for name, value in vars(found).items()
        if value != getattr(said, name)
    ]
    if differing:
        raise ModelError(
            f"{folder} does not hold the target of the model {entry.name}: {'; '.join(differing)}; "
            "put the right one there, or mend the registry"
        )


def _shown(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else ", ".join(map(str, value))
