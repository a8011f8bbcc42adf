"""How much memory a run takes, said beforehand from a model's configuration.

A model is built without its weights. One lazy forward tells what each layer writes into its cache; then the
caches' own code gets lazy zeros in the order of a run: the prompt in chunks, its last token by itself, then
one round; the caches of a batch are merged before the round. Nothing is computed or allocated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache
from mlx_lm.utils import load_model

from engine.cache.batch import merge
from engine.cache.coded import CodedKV
from engine.cache.policy import NATIVE, KVPolicy, RestoredKV, parse_policy
from engine.cache.ring import SlidingRing, WindowedKV
from engine.cache.traced import appended, reserve, stores_of
from engine.cache.transaction import members_of, new_caches
from engine.device import free_memory
from engine.draft_length import AdaptiveDraftLength, check_block, parse_block
from engine.drafters.autoregressive import CHUNK, UNSEEN, Autoregressive
from engine.drafters.base import refuse_mismatch
from engine.drafters.block import BlockDrafter
from engine.drafters.masked_diffusion import MaskedDiffusion
from engine.drafters.mtp import HiddenStateDrafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.registry import DrafterSpec, build_mtp, diffusion_settings, mtp_errors, read_spec
from engine.errors import ConfigurationError, InputError, MachineError, ModelError, wrap_errors
from engine.networks.dflash import Context
from engine.networks.mdlm import build_model
from engine.restoration.session import RestorationPlan
from engine.restoration.sites import sites_of
from engine.target.attention import refuse_policy
from engine.target.compiled import CompiledForward, graph_length
from engine.target.folder import (
    build_unloaded,
    check_config,
    context_length,
    read_json,
    require_folder,
    tensor_shapes,
    text_part,
    weight_files,
)
from engine.target.loading import (
    DRAFTER_QUANTIZE,
    DTYPES,
    block_drafter,
    build_dflash,
    cast_weights,
    check_target,
    dtype_of,
    fill_network,
    opened,
)
from engine.target.model import Target
from engine.target.quantize import pack_as_stored, quantize_target
from evidence_format.policies import KINDS

EVERY = "all"
POLICIES = tuple(f"{kind}:exact" if kind == "restored" else kind for kind in KINDS)
USUAL_CONTEXT = 4096  # tokens, where no context is asked for
LARGEST_BATCH, LARGEST_CONTEXT = 4096, 2**30
DEEPEST = 4096  # layers that are built without weights to say so

Progress = Callable[[int, int, str, str], None]  # done, of how many, what, which


class UnknownGrowth(ModelError):
    """The model runs, with caches whose size cannot be predicted."""


@dataclass(frozen=True)
class Unloaded:
    """A model that is shapes alone."""

    path: Path
    target: Target
    dtype: str  # of its floating weights, and so of keys and values
    dtype_from: str  # who says so
    weights: int  # their bytes
    weights_from: str  # the files, or config.json alone
    context: int | None  # positions it was made for, where the configuration says


def open_unloaded(path: Path, dtype: str | None = None, quantize: str | None = None) -> Unloaded:
    """Build the model of a folder without its weights.

    A ``config.json`` alone will do: then sizes follow from it, and packing from its ``quantization``, as if
    every matrix that can be packed were. ``dtype`` and ``quantize`` are texts of the command line.
    """
    require_folder(path)
    config = read_json(path / "config.json")
    check_config(path / "config.json", config)
    files = _files_of(path)
    if files:
        check_target(path, config, files)
        model = opened(path, "the model", lambda: load_model(path, lazy=True)[0], config)
    else:
        model = opened(path, "config.json", partial(_built, path, config), verb="run")
    if quantize is not None:
        quantize_target(model, quantize)
    name, source = _dtype_name(dtype, model if files else None, config)
    if dtype_of(dtype) is not None or not files:
        cast_weights(model, DTYPES[name])
    with suppress(UnknownGrowth):  # the weights can be told
        opened(path, "config.json", lambda: written_by(model), verb="run")
    weights = _nbytes(model, {} if files else config)
    where = "the headers of its files" if files else "config.json"
    return Unloaded(path, Target(model), name, source, weights, where, context_length(config))


def _files_of(path: Path) -> list[Path]:
    return weight_files(path) if any(path.glob("model*.safetensors")) else []


def _built(path: Path, config: Mapping[str, Any]) -> Any:
    file = path / "config.json"
    if config.get("quantization_config") is not None and config.get("quantization") is None:
        raise ModelError(
            f"{file}: mlx-lm reads quantization_config with the weights; add the model*.safetensors"
        )
    if text_part(config)["num_hidden_layers"] > DEEPEST:
        raise ModelError(f"{file}: num_hidden_layers is more than {DEEPEST}")
    model = build_unloaded(config)
    _pack(file, model, config.get("quantization"))
    return model


def _pack(file: Path, module: nn.Module, quantization: Mapping[str, Any] | None) -> None:
    """Pack every matrix of an unloaded module as a ``quantization`` says."""
    if quantization is not None:
        pack_as_stored(
            file, module, quantization, lambda _, part: not part.weight.shape[-1] % quantization["group_size"]
        )


def _nbytes(model: Any, config: Mapping[str, Any]) -> int:
    """Bytes of the parameters, without a head that was built though ``config`` ties it to the tokens."""
    said = text_part(config).get("tie_word_embeddings", config.get("tie_word_embeddings"))
    tied = said if said is not None else str(config.get("model_type")).startswith("gemma")
    skipped = ("lm_head.", "language_model.lm_head.") if tied else ()
    parameters = dict(tree_flatten(model.parameters()))
    return sum(value.nbytes for name, value in parameters.items() if not name.startswith(skipped))


def _dtype_name(dtype: str | None, model: Any, config: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the weights' type, and who says so; ``model``: as the files hold it, None without files."""
    if (wanted := dtype_of(dtype)) is not None:
        name = next(name for name, known in DTYPES.items() if known == wanted)
        return name, "--dtype" if dtype else "the engine's on a CPU"
    if model is None:
        said = (part.get(name) for part in (config, text_part(config)) for name in ("dtype", "torch_dtype"))
        return next((name for name in said if name in DTYPES), "bfloat16"), "config.json"
    values = dict(tree_flatten(model.parameters())).values()
    sizes = {name: sum(each.size for each in values if each.dtype == known) for name, known in DTYPES.items()}
    return max(sizes, key=sizes.__getitem__), "as stored"


@dataclass(frozen=True)
class RunLengths:
    """What is to be held."""

    context: int  # tokens of each prompt
    batch: int = 1  # sequences; one is decoded alone, several are merged
    block: int = 1  # tokens of the round; 0: none, where the prompt leaves one token alone
    headroom: int = 1  # the largest block that may be verified
    prefill_chunk: int = 2048  # prompt positions a forward


class LayerBytes(NamedTuple):
    """Layers whose caches are alike: what they keep, the caches' class at the end, and all their bytes."""

    holds: str
    cache: str
    layers: int
    bytes: int


def held_by(target: Target, policy: KVPolicy, run: RunLengths) -> list[LayerBytes]:
    """The caches' bytes after a run, by kinds of layers in the order of their first layers."""
    caches = new_caches(target.model, run.headroom, policy)
    compiled = CompiledForward.of(target, (), caches) is not None

    def graph(count: int) -> int | None:
        return graph_length(target, count, run.headroom) if compiled and count <= run.headroom else None

    alike: dict[Any, list[tuple[Any, Any]]] = {}
    for cache, template in zip(caches, written_by(target.model), strict=True):
        shapes = tuple(None if each is None else (each.shape, each.dtype) for each in _arrays(template))
        alike.setdefault((_holds(cache), shapes), []).append((cache, template))
    found = []
    for (holds, _), group in alike.items():
        cache = _replayed(target.model, group[0], policy, run, graph)
        found.append(LayerBytes(holds, type(cache).__name__, len(group), len(group) * int(cache.nbytes)))
    return found


def _replayed(
    model: Any, layer: tuple[Any, Any], policy: KVPolicy, run: RunLengths, graph: Callable[[int], int | None]
) -> Any:
    """One layer's cache at the end of a run; for a batch, of all its sequences."""
    cache, template = layer
    for count in chunks_of(policy, run):
        if _is_full(cache):
            break
        _forward(cache, template, count, graph(count) if policy.source is None else None)
    _forward(cache, template, 1, graph(1))
    if run.batch > 1 and any(each is not None for each in _arrays(template)):
        [cache] = merge(model, [[cache]] * run.batch)
        if run.block:
            feed(cache, template, run.block, run.batch)
    elif run.batch == 1 and run.block:
        _forward(cache, template, run.block, graph(run.block))
    return cache


def _is_full(cache: Any) -> bool:
    """Whether nothing a layer takes in can change its size: its stores are rings with all their rows."""
    return all(
        type(store) is SlidingRing and store.keys is not None and store.keys.shape[2] == store.capacity
        for store in stores_of([cache])
    )


def chunks_of(policy: KVPolicy, run: RunLengths) -> Iterator[int]:
    """Positions of each forward over the prompt, its last token left out."""
    longest = run.prefill_chunk
    if policy.source is not None:
        longest = RestorationPlan(policy.source, policy.sink, policy.window).chunk
    for done in range(0, run.context - 1, run.prefill_chunk):
        part = min(run.prefill_chunk, run.context - 1 - done)
        yield from (min(longest, part - at) for at in range(0, part, longest))


def _forward(cache: Any, template: Any, count: int, size: int | None) -> None:
    """One forward of one sequence, on one layer's cache; ``size``: of the compiled graph."""
    stores = stores_of([cache])
    if size is not None and all(reserve(store, size) for store in stores):
        for store in stores:
            appended(store, count, size)
    else:
        feed(cache, template, count)


def written_by(model: Any) -> list[Any]:
    """A cache of each layer after a lazy forward over two tokens: it tells what the layer writes."""
    caches = new_caches(model, 1)
    kinds = {type(member) for cache in caches for member in members_of(cache)}
    if unknown := kinds - {KVCache, SlidingRing, ChunkedKVCache, ArraysCache}:
        kind = min(each.__name__ for each in unknown)
        raise UnknownGrowth(f"how {kind} layers grow is not known; their memory is not predicted")
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    return caches


def _arrays(cache: Any) -> list[Any]:
    return [
        each
        for part in members_of(cache)
        for each in (part.cache if type(part) is ArraysCache else (part.keys, part.values))
    ]


def feed(cache: Any, template: Any, count: int, batch: int = 1) -> None:
    """Write ``count`` positions of each sequence into a layer's cache; ``template`` is of `written_by`."""
    members: list[Any] = [cache] if type(cache) is CodedKV else list(members_of(cache))
    for member, seen in zip(members, members_of(template), strict=True):
        if type(seen) is ArraysCache:
            if batch == 1:  # a merged state is replaced by one of the same shape
                member.cache = [_blank(each) for each in seen.cache]
        elif seen.keys is not None:
            if type(member) is ChunkedKVCache:
                member.maybe_trim_front()  # type: ignore[no-untyped-call]  # its models do so in every forward
            sides = [(batch, side.shape[1], count, side.shape[3]) for side in (seen.keys, seen.values)]
            keys, values = (mx.zeros(shape, seen.keys.dtype) for shape in sides)
            member.update_and_fetch(keys, values.astype(seen.values.dtype))
    for member in members_of(cache):  # what led to the buffers is forgotten
        if type(member) is not ArraysCache:
            member.keys, member.values = _blank(member.keys), _blank(member.values)


def _blank(value: mx.array | None) -> mx.array | None:
    return None if value is None else mx.zeros(value.shape, value.dtype)


# What a layer's cache keeps, in words; caches of different layouts differ in it.
HOLDS: dict[type, Callable[[Any], str]] = {
    CacheList: lambda cache: " + ".join(map(_holds, cache.caches)),
    CodedKV: lambda cache: f"{_holds(cache.stores[0])}, {cache.code.partition('@')[0]}",
    SlidingRing: lambda ring: f"{f'first {ring.sink} and ' if ring.sink else ''}last {ring.window}",
    WindowedKV: lambda cache: f"all positions, the last {cache.window} seen",
    ArraysCache: lambda _: "recurrent state",
    ChunkedKVCache: lambda cache: f"chunks of {cache.chunk_size}",
    RestoredKV: lambda _: "all positions, restored",
}


def _holds(cache: Any) -> str:
    return HOLDS[type(cache)](cache) if type(cache) in HOLDS else "all positions"


class UnloadedDrafter(NamedTuple):
    """A drafter that is shapes alone."""

    block_size: int  # that it was made for
    weights: int  # their bytes
    state: Callable[[Sequence[int], int], int]  # bytes, by positions observed at a time and tokens of a block


def open_unloaded_drafter(
    spec: str | DrafterSpec, target: Unloaded, dtype: str | None = None
) -> UnloadedDrafter:
    """Build what a ``--drafter`` text names (see `engine.drafters.registry`) without its weights."""
    asked = spec if isinstance(spec, DrafterSpec) else read_spec(spec)
    openers: dict[str, Callable[..., UnloadedDrafter]] = {
        PromptLookup.name: _prompt_lookup,
        Autoregressive.name: _autoregressive,
        MaskedDiffusion.name: _masked_diffusion,
        HiddenStateDrafter.name: _mtp,
    }
    inner = openers.get(asked.kind, _dflash)(asked, target, dtype)
    if not asked.lookups:
        return inner
    lookups = _prompt_lookup(replace(asked, settings={}), target, dtype)
    return inner._replace(state=lambda *run: inner.state(*run) + lookups.state(*run))


def _prompt_lookup(asked: DrafterSpec, _: Unloaded, __: str | None) -> UnloadedDrafter:
    lookup = PromptLookup(**asked.settings)
    return UnloadedDrafter(lookup.block_size, 0, _told(lookup))


def _told(drafter: PromptLookup | MaskedDiffusion) -> Callable[[Sequence[int], int], int]:
    """The state of a drafter that keeps tokens alone; its size does not depend on which."""

    def state(observed: Sequence[int], _: int) -> int:
        drafter.start()
        for count in observed:
            drafter.observe([0] * count, None)
        return drafter.nbytes

    return state


def _dflash(asked: DrafterSpec, target: Unloaded, dtype: str | None) -> UnloadedDrafter:
    raw = read_json(asked.folder / "config.json")
    network = _network(raw, partial(build_dflash, asked.folder / "config.json", raw), asked, dtype)
    block_drafter(network, asked.policy).bind(target.target)
    config, hidden_states = network.config, DTYPES[target.dtype]
    width = len(config.target_layer_ids) * config.hidden_size

    def state(observed: Sequence[int], block: int) -> int:
        context, waiting = Context(config, asked.policy), 0
        for count in observed:
            waiting += count
            if waiting >= BlockDrafter.absorb_at:
                network.absorb(mx.zeros((1, waiting, width), hidden_states), context)
                for layer in context.layers:
                    layer.buffers = [mx.zeros(each.shape, each.dtype) for each in layer.buffers]
                waiting = 0
        if block < 2:  # rows are read when it drafts
            return int(context.nbytes + (waiting + block) * width * hidden_states.size)
        rows = mx.zeros((1, block, config.hidden_size), hidden_states)
        network(rows, mx.zeros((1, waiting, width), hidden_states), context)
        return context.nbytes

    return UnloadedDrafter(config.block_size, _nbytes(network, {}), state)


def _autoregressive(asked: DrafterSpec, target: Unloaded, dtype: str | None) -> UnloadedDrafter:
    small = open_unloaded(asked.folder, dtype, asked.quantize)
    refuse_mismatch("vocabulary", small.target.vocab_size, target.target.vocab_size)
    refuse_policy(small.target.model, asked.policy, "--drafter-kv")
    model, size = small.target.model, Autoregressive(small.target).block_size

    def state(observed: Sequence[int], block: int) -> int:
        if block < 2:  # it reads what it observed when it is asked to draft
            return 0
        unseen, counts = sum(observed), []
        while unseen > UNSEEN:
            counts.append(min(CHUNK, unseen))
            unseen -= counts[-1]
        counts += [unseen + 1, *[1] * (min(block - 1, 2 * size - 1) - 1)]
        caches = new_caches(model, UNSEEN + 2 * size, asked.policy)
        for cache, template in zip(caches, written_by(model), strict=True):
            for count in counts:
                feed(cache, template, count)
        return sum(int(cache.nbytes) for cache in caches)

    return UnloadedDrafter(size, small.weights, state)


def _mtp(asked: DrafterSpec, target: Unloaded, dtype: str | None) -> UnloadedDrafter:
    folder = target.path if asked.in_target else asked.folder
    with mtp_errors(asked, folder):
        drafter, _ = build_mtp(folder)
        _as_loaded(drafter.network, asked, dtype)
        drafter.bind(target.target)
    width = len(drafter.target_layers) * target.target.hidden_size

    def state(observed: Sequence[int], block: int) -> int:
        drafter.start()
        for count in observed:
            drafter.note([0] * count, mx.zeros((1, count, width), DTYPES[target.dtype]))
        if block > 1:
            drafter.propose(0, block - 1)
        return drafter.nbytes

    return UnloadedDrafter(drafter.block_size, _nbytes(drafter.network, {}), state)


def _masked_diffusion(asked: DrafterSpec, target: Unloaded, dtype: str | None) -> UnloadedDrafter:
    config, settings = diffusion_settings(asked)
    network = _network(config, lambda: build_model(config), asked, dtype)
    drafter = MaskedDiffusion(network, **settings)
    drafter.bind(target.target)
    return UnloadedDrafter(drafter.block_size, _nbytes(network, {}), _told(drafter))


def _network(
    config: Mapping[str, Any], build: Callable[[], Any], asked: DrafterSpec, dtype: str | None
) -> Any:
    """A drafter's network with its weights, not read yet; without files, as its configuration says."""
    file, files = asked.folder / "config.json", _files_of(asked.folder)
    tensor_shapes(file, config, files)
    network = opened(asked.folder, "config.json", build)
    if files:
        fill_network(asked.folder, files, network, config.get("quantization"))
    else:
        _pack(file, network, config.get("quantization"))
        cast_weights(network, mx.bfloat16)
    return _as_loaded(network, asked, dtype)


def _as_loaded(network: Any, asked: DrafterSpec, dtype: str | None) -> Any:
    """Pack and cast a drafter's network as loading it does."""
    if asked.quantize is not None:
        quantize_target(network, asked.quantize, DRAFTER_QUANTIZE, whole=False)
    if (wanted := dtype_of(dtype)) is not None:
        cast_weights(network, wanted)
    return network


def predict(
    model: Unloaded,
    policies: Sequence[str],
    contexts: Sequence[int],
    progress: Progress = lambda *_: None,
    *,
    batch: int = 1,
    block: str = "auto",
    prefill_chunk: int = 2048,
    drafter: str | DrafterSpec | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Predict what the caches would hold after each prompt and one round, as the JSON line has it.

    ``policies`` are ``--kv`` texts, `EVERY` among them for all of `POLICIES` that the model can have;
    ``progress`` is told before every row. InputError where an option, the drafter or a policy does not fit.
    """
    _check(model, contexts, batch, block, prefill_chunk, drafter)
    chosen, refused = _chosen(model, policies)
    small = open_unloaded_drafter(drafter, model, dtype) if drafter else None
    run = RunLengths(0, batch, *_blocks(block, small), prefill_chunk)
    weights = model.weights + (small.weights if small else 0)
    rows: list[dict[str, Any]] = []
    states: dict[tuple[int, ...], int] = {}  # of the drafter, by the positions it is told of at a time
    steps = len(contexts) * len(chosen)
    for context in contexts:
        # No run goes beyond the model's positions, and the prompt's forward gives one token.
        left = run.block if model.context is None else min(run.block, model.context - context - 1)
        now = replace(run, context=context, block=left)
        progress(len(rows), steps, "predicting", f"native, {context} tokens")
        native = held_by(model.target, NATIVE, now)
        for policy in chosen:
            progress(len(rows), steps, "predicting", f"{policy.spec}, {context} tokens")
            kinds = native if policy == NATIVE else held_by(model.target, policy, now)
            observed = (*chunks_of(policy, now), 1)
            if small and observed not in states:
                states[observed] = small.state(observed, now.block)
            held, state = (sum(kind.bytes for kind in kinds), batch * states.get(observed, 0))
            rows.append(
                {
                    "kv": policy.spec,
                    "context": context,
                    "batch": batch,
                    "block": left,
                    "cache_bytes": held,
                    "bytes_per_sequence": held // batch,
                    "bytes_per_token": held / (batch * context),
                    "ratio_to_native": sum(kind.bytes for kind in native) / held if held else 1.0,
                    "drafter_state_bytes": state,
                    "total_bytes": weights + state + held,
                    "layers": [kind._asdict() for kind in kinds],
                }
            )
    progress(steps, steps, "predicting", "done")
    return {
        "kind": "analytic",
        "table": "prediction",
        "measured": False,
        "note": "predicted by the caches' own code on shapes, after the prompts and one round; "
        "nothing was allocated and no cache was measured",
        "left_out": [
            "activations, and what the allocator holds",
            "copies that live while a batch is merged or a buffer grows",
            "rows a restored policy keeps until their turn comes, and a projector's weights",
        ],
        "model": str(model.path),
        "dtype": model.dtype,
        "dtype_from": model.dtype_from,
        "weights_bytes": model.weights,
        "weights_from": model.weights_from,
        "drafter": {"spec": str(drafter), "weights_bytes": small.weights} if small else None,
        "batch": batch,
        "block": run.block,
        "headroom": run.headroom,
        "prefill_chunk": prefill_chunk,
        "rows": rows,
        "refused": refused,
    }


class MemoryFit(NamedTuple):
    """What a run is predicted to hold, and what is free for it; bytes."""

    context: int  # tokens of the prompt and of what follows it
    weights: int
    caches: int
    drafter: int  # its weights, and what it keeps of a sequence
    free: int

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return self.weights + self.caches + self.drafter

    @property
    def fits(self) -> bool:
        """Whether no more is needed than is free."""
        return self.needed <= self.free


def fit(
    path: Path,
    *,
    context: int | None = None,
    kv: str = "native",
    drafter: str | DrafterSpec | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    free: int | None = None,
) -> MemoryFit:
    """Predict what a run takes; ``context`` None: `USUAL_CONTEXT`, or what the model was made for if less.

    Activations and what the allocator holds are left out, and where caches cannot be predicted, all but the
    weights; see `predict` for errors.
    """
    model = open_unloaded(path, dtype, quantize)
    positions = max(min(context or USUAL_CONTEXT, (model.context or LARGEST_CONTEXT) - 2), 1)
    free = free_memory() if free is None else free
    try:
        found = predict(model, (kv,), (positions,), drafter=drafter, dtype=dtype)
    except UnknownGrowth:
        return MemoryFit(positions, model.weights, 0, 0, free)
    [row], small = found["rows"], found["drafter"]
    drafting = row["drafter_state_bytes"] + small["weights_bytes"] if small else 0
    return MemoryFit(positions, model.weights, row["cache_bytes"], drafting, free)


def require_memory(path: Path, *, quantize: str | None = None, **run: Any) -> MemoryFit:
    """Return what a run of `fit` needs; raise MachineError, with a way out, where that is more than is free.

    InputError for a folder or switches that loading would refuse, too, so that it does not begin.
    """
    with wrap_errors(lambda why: ModelError(f"{path}: the memory it takes cannot be predicted: {why}")):
        found = fit(path, quantize=quantize, **run)
        if found.fits:
            return found
        ways = ways_out(path, found, quantize=quantize, **run)
    raise MachineError(f"{path} does not fit in memory: {verdict(found)}; {ways}")


def verdict(found: MemoryFit) -> str:
    """Say what is needed and what is free."""
    parts = {"weights": found.weights, f"{found.context:,} tokens": found.caches, "drafter": found.drafter}
    sizes = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in parts.items() if value)
    return (
        f"it takes about {found.needed / 2**30:.2f} GiB ({sizes}), and {found.free / 2**30:.2f} GiB are free"
    )


def ways_out(
    path: Path, found: MemoryFit, *, quantize: str | None = None, kv: str = "native", **run: Any
) -> str:
    """Name the first change that makes a run fit: packed weights, coded keys and values, fewer tokens."""
    run = run | {"free": found.free, "context": found.context}
    trials: list[tuple[str, dict[str, Any]]] = [(f"--quantize {bits}", {"quantize": bits}) for bits in "84"]
    trials += [("--kv affine:4,64", {"kv": "affine:4,64"})]
    trials += [("--quantize 4 --kv affine:4,64", {"quantize": "4", "kv": "affine:4,64"})]
    for switch, change in trials:
        try:
            if fit(path, **({"quantize": quantize, "kv": kv} | run | change)).fits:
                return f"try {switch}"
        except InputError:  # packed already, or a code that does not fit its heads
            continue
    left = found.free - found.weights - found.drafter
    if left > 0 and found.caches and (tokens := found.context * left // found.caches) > 256:
        return f"give a prompt and --max-tokens of at most {tokens:,} tokens together, or free memory"
    return "free memory, or take a smaller model"


def _chosen(model: Unloaded, texts: Sequence[str]) -> tuple[list[KVPolicy], dict[str, str]]:
    """The policies in order, each once; and those of `EVERY` that the model cannot have."""
    policies: dict[str, KVPolicy] = {}
    refused: dict[str, str] = {}
    for text in texts:
        for each in POLICIES if text == EVERY else (text,):
            policy = parse_policy(each)
            try:
                refuse_policy(model.target.model, policy)
                if policy.source is not None:
                    sites_of(model.target.model, policy.chosen_layers(model.target.model))
            except InputError as error:
                if text != EVERY:
                    raise
                refused[policy.spec] = str(error)
            else:
                policies[policy.spec] = policy
    return list(policies.values()), refused


def _blocks(block: str, drafter: UnloadedDrafter | None) -> tuple[int, int]:
    """Tokens of the round, and the largest block that caches must be ready for."""
    if block != "auto":
        if drafter:
            check_block(int(block), drafter.block_size)
        return int(block), int(block)
    if drafter is None:
        return 1, 1
    return drafter.block_size, AdaptiveDraftLength(drafter.block_size).largest


def _check(  # noqa: PLR0917 - all numbers of the command line
    model: Unloaded, contexts: Sequence[int], batch: int, block: str, prefill_chunk: int, drafter: object
) -> None:
    ranges = [("--batch", batch, LARGEST_BATCH), *(("--context", each, LARGEST_CONTEXT) for each in contexts)]
    for name, value, largest in ranges:
        if not 1 <= value <= largest:
            raise ConfigurationError(f"{name} must lie in 1 to {largest}, not {value}")
    if prefill_chunk < 1:
        raise ConfigurationError(f"--prefill-chunk must be at least 1, not {prefill_chunk}")
    if parse_block(block) == 1 and drafter is not None:
        raise ConfigurationError("--block 1 drafts nothing; leave --drafter out")
    if model.context is not None and (longest := max(contexts)) >= model.context:
        raise ConfigurationError(
            f"--context {longest} leaves no token to generate: this model was made for {model.context} "
            f"positions; give at most {model.context - 1}"
        )
