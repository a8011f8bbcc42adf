"""The loops of mlx-lm, z-lab's dflash and dflash-mlx, opened for a target and a drafter's folder."""

from collections.abc import Generator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.cache.transaction import new_caches
from engine.drafters.base import refuse_mismatch
from engine.errors import ConfigurationError, GenerationError, wrap_errors
from engine.external_engines.engine import DraftCounts, ExternalEngine, ExternalLoop, LoopEntry, replaced
from engine.target.folder import read_json, require_folder
from engine.target.loading import LoadedTarget, load_target
from engine.target.model import Target

ZLAB = "dflash.model_mlx"
QWEN = ("dflash_mlx.engine.target_qwen_gdn:QwenGdnTargetOps", "make_cache")
# Published configs have these outside `dflash_config` too, where z-lab's loop does not look.
NESTED = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}


def open_plain(target: LoadedTarget, drafter: Path | None, block: int | None) -> ExternalLoop:  # noqa: ARG001
    """Open `mlx_lm.generate.generate_step`."""

    def steps(prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:  # noqa: ARG001
        for token, _ in generate_step(mx.array(prompt), target.target.model, max_tokens=limit, **caches):
            yield int(token)

    return 1, steps


def open_speculative(target: LoadedTarget, drafter: Path, block: int | None) -> ExternalLoop:
    """Open `mlx_lm.generate.speculative_generate_step`; the draft model's caches are ours in any case."""
    model, small, block = target.target.model, load_target(drafter).target, block or 3
    refuse_mismatch("vocabulary", small.vocab_size, target.target.vocab_size)

    def steps(prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:
        counts.caches, given = new_caches(small.model, block), caches.get("prompt_cache")
        # It splits one list after as many as the target has layers; layers that share keys have fewer caches.
        if given is not None and len(given) != len(model.layers):
            raise GenerationError(f"mlx-lm wants {len(model.layers)} caches, one a layer, not {len(given)}")
        sizes: Any = {"num_draft_tokens": block - 1, "max_tokens": limit}
        both = given and [*given, *counts.caches]
        rounds = speculative_generate_step(mx.array(prompt), model, small.model, prompt_cache=both, **sizes)
        drafted = False  # the token before; a round ends with one of the target's
        with replaced(small.model, "make_cache", lambda: counts.caches):
            first = list(islice(rounds, 1))
        for token, _, from_draft in chain(first, rounds):
            counts.rounds += not drafted
            drafted = from_draft
            counts.accepted += drafted
            yield int(token)

    return block, steps


def open_zlab(target: LoadedTarget, drafter: Path, block: int | None) -> ExternalLoop:
    """Open z-lab's `dflash.model_mlx.stream_generate`, which asks `make_prompt_cache` for caches."""
    module: Any = import_module(ZLAB)
    with replaced(module, "snapshot_download", lambda path, **_: path):
        draft = module.load_draft(str(drafter))
    config = read_json(drafter / "config.json")
    for name in (config.keys() & NESTED) - config["dflash_config"].keys():
        setattr(draft.config, name, config[name])
    add_unseen_scale(draft, target.target)
    draft.set_dtype(target.target.embed(mx.array([[0]])).dtype)
    mx.eval(draft.parameters())
    size = int(block or draft.config.block_size)
    stream = partial(module.stream_generate, target.target.model, draft, MuteTokenizer(), block_size=size)

    def steps(prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:
        for response in stream(mx.array(prompt), max_tokens=limit, **caches):
            if response.accepted is not None:
                counts.rounds += 1
                counts.accepted += len(response.tokens) - 1
            yield from response.tokens

    return size, steps


def add_unseen_scale(draft: Any, target: Target) -> None:
    """Add the target's embedding scale to a z-lab draft's, which the package sees on Gemma 4 alone."""
    given = draft.config.input_embedding_scale
    if draft.bind(target.model).embed_scale == given:
        draft.config.input_embedding_scale = given * target.embedding_scale


class MuteTokenizer(TokenizerWrapper):
    """A tokenizer without text and stop tokens: z-lab's loop writes text while it decodes."""

    eos_token_ids: frozenset[int] = frozenset()
    last_segment = ""
    detokenizer = property(lambda self: self)  # it has the names that the loop uses
    __init__ = add_token = finalize = lambda *_: None


def open_dflash_mlx(target: LoadedTarget, drafter: Path, block: int | None) -> ExternalLoop:
    """Open `dflash_mlx.runtime.stream_dflash_generate`, which replaces methods of the target's classes."""
    part = partial(import_module, package="dflash_mlx")
    operations, runtime, events = part(".engine.target_ops"), part(".runtime"), part(".engine.events")
    model = target.target.model
    ops = operations.resolve_target_ops(model)
    draft, _ = part(".runtime.loading").load_draft_bundle(str(drafter), lazy=False)
    draft.set_dtype(target.target.embed(mx.array([[0]])).dtype)
    mx.eval(draft.parameters())
    operations.bind_draft_to_target(draft, model, target_ops=ops)
    size = int(block or draft.block_size)
    stream = partial(
        runtime.stream_dflash_generate,
        target_model=model,
        target_ops=ops,
        tokenizer=target.tokenizer,
        draft_model=draft,
        draft_backend=part(".draft_backend").EagerDraftBackend(),
        block_tokens=size,
        stop_token_ids=[],
        runtime_context=part(".runtime.context").build_offline_runtime_context(verify_mode="dflash"),
    )

    def steps(prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:
        ops.install_speculative_hooks(model)
        for event in stream(prompt_tokens_override=prompt, max_new_tokens=limit, **caches):
            if isinstance(event, events.TokenEvent):
                counts.rounds = event.cycles_completed
                counts.accepted = round(event.acceptance_ratio * event.generated_tokens)
                yield int(event.token_id)

    return size, steps


_MLX_LM: dict[str, Any] = {"keyword": "prompt_cache", "makers": (("mlx_lm.generate", "make_prompt_cache"),)}
ENGINES: dict[str, LoopEntry] = {
    "mlx-lm": LoopEntry("mlx_lm", "pip install mlx-lm", open_plain, drafts=False, **_MLX_LM),
    "mlx-lm-speculative": LoopEntry("mlx_lm", "pip install mlx-lm", open_speculative, **_MLX_LM),
    "dflash": LoopEntry(
        "dflash", "pip install --no-deps dflash==0.1.0", open_zlab, makers=((ZLAB, "make_prompt_cache"),)
    ),
    "dflash-mlx": LoopEntry(
        "dflash_mlx", "pip install --no-deps dflash-mlx==0.1.8", open_dflash_mlx, attends=True, makers=(QWEN,)
    ),
}


def check_engine(name: str, drafter: Path | None = None, block: int | None = None) -> LoopEntry:
    """The entry of an engine that `open_external_engine` opens so; InputError where it would not."""
    if name not in ENGINES:
        raise ConfigurationError(f"engine {name!r} is none of {', '.join(ENGINES)}")
    entry = ENGINES[name]
    misfit = block is not None and (block > 1) != entry.drafts
    for refused, why in (
        (find_spec(entry.module) is None, f"is not installed here; run: {entry.install}"),
        (entry.drafts and drafter is None, "needs a drafter's folder; name one"),
        (not entry.drafts and drafter is not None, f"has no drafter; leave {drafter} out"),
        (misfit, f"cannot verify {block} tokens at a time; leave the block out"),
    ):
        if refused:
            raise ConfigurationError(f"engine {name} {why}")
    if drafter is not None:
        require_folder(drafter)
    return entry


def open_external_engine(
    name: str, target: LoadedTarget, drafter: Path | None = None, block: int | None = None
) -> ExternalEngine:
    """Open one of `ENGINES` for a target that others may share; a block counts the bonus, None: its own."""
    entry = check_engine(name, drafter, block)
    with wrap_errors(lambda reason: ConfigurationError(f"engine {name} cannot open these models: {reason}")):
        loop = entry.open(target, drafter, block)
    return ExternalEngine(name, entry, target, loop)
