"""What a drafter adds: its weights, and what it remembers of each sequence. Nothing is read or computed.

The state is that of a drafter which has observed a prompt and drafted the block of one round, in the order
`engine.session` tells it.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sys import getsizeof
from typing import Any

import mlx.core as mx

from engine.cache.policy import NATIVE
from engine.cache.transaction import new_caches
from engine.drafters.autoregressive import CHUNK, UNSEEN, Autoregressive
from engine.drafters.base import refuse_mismatch
from engine.drafters.block import BlockDrafter
from engine.drafters.masked_diffusion import MaskedDiffusion, settings_of, split_spec
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.registry import KINDS as REGISTERED
from engine.drafters.registry import WITH_LOOKUP, kind_of
from engine.errors import ConfigurationError
from engine.memory.model import Unloaded, cast, files_of, nbytes_of, open_unloaded, pack
from engine.memory.shapes import feed, written_by
from engine.networks.dflash import Context, DFlash
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.networks.mdlm import classes, mask_token
from engine.target.folder import read_json
from engine.target.loading import DTYPES, dtype_of, opened

State = Callable[[Sequence[int], int], int]
"""From the positions observed at a time, and the tokens of a block (under 2: nothing is drafted), to bytes of
one sequence's state."""


@dataclass(frozen=True)
class UnloadedDrafter:
    """A drafter that is shapes alone.

    Attributes:
        block_size: block length it was made for.
        weights: their bytes.
        state: gives the bytes of a sequence's state.
    """

    block_size: int
    weights: int
    state: State


def open_unloaded_drafter(spec: str, target: Unloaded, dtype: str | None = None) -> UnloadedDrafter:
    """Build what a ``--drafter`` text names (see `engine.drafters.registry`) without its weights.

    Raises:
        ConfigurationError: the text does not name a drafter, or its value does not make sense.
        ModelError: the folder cannot be used.
        DrafterMismatchError: it was made for a target of another shape.
    """
    if spec.startswith(WITH_LOOKUP):
        if not (rest := spec.removeprefix(WITH_LOOKUP)):
            raise ConfigurationError(f"--drafter {spec} lacks the drafter behind it; give {spec}FOLDER")
        inner = open_unloaded_drafter(rest, target, dtype)
        beside = _prompt_lookup("", target, dtype)
        return UnloadedDrafter(
            inner.block_size, inner.weights, lambda *run: inner.state(*run) + beside.state(*run)
        )
    kind, _, argument = spec.partition(":")
    if kind not in REGISTERED:
        if "/" not in spec and not Path(spec).exists():
            raise ConfigurationError(
                f"--drafter {spec!r} is neither a folder on this machine nor one of {', '.join(REGISTERED)}"
            )
        return OPENERS[kind_of(Path(spec))](spec, target, dtype)
    if kind == PromptLookup.name:
        return _prompt_lookup(argument, target, dtype)
    if not argument:
        raise ConfigurationError(f"--drafter {spec} lacks its folder; give {kind}:FOLDER")
    folder = split_spec(argument)[0] if kind == MaskedDiffusion.name else Path(argument)
    if (found := kind_of(folder)) != kind:
        raise ConfigurationError(f"--drafter {spec}: the folder holds a drafter of the kind {found}")
    return OPENERS[kind](argument, target, dtype)


def _prompt_lookup(argument: str, target: Unloaded, dtype: str | None) -> UnloadedDrafter:  # noqa: ARG001
    if argument and not (argument.isascii() and argument.isdigit()):
        raise ConfigurationError(f"--drafter prompt-lookup:{argument}: the shortest match must be a number")
    shortest = int(argument or PromptLookup.default_shortest)

    def state(observed: Sequence[int], block: int) -> int:  # noqa: ARG001
        lookup = PromptLookup(shortest)
        for count in observed:  # the size of its tables does not depend on the tokens
            lookup.observe([0] * count, None)
        return lookup.nbytes

    return UnloadedDrafter(PromptLookup(shortest).block_size, 0, state)


def _dflash(argument: str, target: Unloaded, dtype: str | None) -> UnloadedDrafter:
    folder = Path(argument)
    config = read_json(folder / "config.json")
    network = opened(folder, "config.json", lambda: build_network(DFlashConfig.from_dict(config)))
    if config.get("quantization") is not None:
        pack(folder, network, config["quantization"])
    cast(network, _stored(folder, dtype))
    BlockDrafter(network).bind(target.target)
    taps = DTYPES[target.dtype]
    return UnloadedDrafter(network.config.block_size, nbytes_of(network), partial(_context, network, taps))


def _context(network: DFlash, dtype: mx.Dtype, observed: Sequence[int], block: int) -> int:
    """Bytes of a DFlash network's context, as `BlockDrafter` extends it."""
    config = network.config
    context, waiting = Context(config), 0
    width = len(config.target_layer_ids) * config.hidden_size
    for count in observed:
        waiting += count
        if waiting >= BlockDrafter.absorb_at:
            network.absorb(mx.zeros((1, waiting, width), dtype), context)
            _forget(context)
            waiting = 0
    if block > 1:
        network(
            mx.zeros((1, block, config.hidden_size), dtype), mx.zeros((1, waiting, width), dtype), context
        )
    return context.nbytes


def _forget(context: Context) -> None:
    """Zeros in the place of what led to the buffers."""
    for layer in context.layers:
        layer.buffers = [mx.zeros(buffer.shape, buffer.dtype) for buffer in layer.buffers]


def _autoregressive(argument: str, target: Unloaded, dtype: str | None) -> UnloadedDrafter:
    model = open_unloaded(Path(argument), dtype)
    refuse_mismatch("vocabulary", model.target.vocab_size, target.target.vocab_size)
    size = Autoregressive(model.target).block_size
    return UnloadedDrafter(size, model.weights, partial(_small_caches, model.target.model, size))


def _small_caches(model: Any, size: int, observed: Sequence[int], block: int) -> int:
    """Bytes of a drafting model's caches: what it has not seen in chunks, then the bonus, then its drafts."""
    if block < 2:  # it reads what it observed when it is asked to draft
        return 0
    unseen, counts = sum(observed), []
    while unseen > UNSEEN:
        counts.append(min(CHUNK, unseen))
        unseen -= counts[-1]
    drafts = min(block - 1, 2 * size - 1)
    counts += [unseen + 1, *[1] * (drafts - 1)]
    caches = new_caches(model, UNSEEN + 2 * size, NATIVE)
    for cache, written in zip(caches, written_by(model), strict=True):
        for count in counts:
            feed(cache, written, count)
    return sum(int(cache.nbytes) for cache in caches)


def _masked_diffusion(argument: str, target: Unloaded, dtype: str | None) -> UnloadedDrafter:
    folder, asked = split_spec(argument)
    config = read_json(folder / "config.json")
    settings = settings_of(folder / "config.json", config) | asked
    mask = opened(folder, "the mask token", lambda: mask_token(folder, config))

    def built() -> Any:
        network, arguments = classes(config)
        return network(arguments.from_dict(dict(config)))  # type: ignore[no-untyped-call]

    network = opened(folder, "config.json", built)
    if config.get("quantization") is not None:
        pack(folder, network, config["quantization"])
    cast(network, _stored(folder, dtype))
    drafter = MaskedDiffusion(network, mask, **settings)
    drafter.bind(target.target)

    def state(observed: Sequence[int], block: int) -> int:  # noqa: ARG001
        tokens = array("i")
        for count in observed:
            tokens.extend([0] * count)
        return getsizeof(tokens)

    return UnloadedDrafter(drafter.block_size, nbytes_of(network), state)


def _stored(folder: Path, dtype: str | None) -> mx.Dtype:
    """The type a network's weights would be loaded in; as stored: that of the first tensor of its files."""
    if (wanted := dtype_of(dtype)) is not None:
        return wanted
    for file in files_of(folder):
        for value in mx.load(str(file)).values():  # type: ignore[union-attr]  # a safetensors file holds a dict
            if mx.issubdtype(value.dtype, mx.floating):
                return value.dtype
    return mx.bfloat16


OPENERS: dict[str, Callable[[str, Unloaded, str | None], UnloadedDrafter]] = {
    "dflash": _dflash,
    "dflash2": _dflash,
    "autoregressive": _autoregressive,
    "masked-diffusion": _masked_diffusion,
}
"""How each kind of folder is built."""
