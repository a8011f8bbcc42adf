"""The external engines: how each is opened for a target, and how it decodes one sequence greedily."""

import json
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.cache.transaction import new_caches
from engine.drafters.base import refuse_mismatch
from engine.errors import GenerationError
from engine.external_engines.strategies import MAKER, DraftCounts, ExternalLoop, LoopEntry, replaced
from engine.target.loading import LoadedTarget, load_target
from engine.target.model import Target

ZLAB = "dflash.model_mlx"
# Published configs have these outside `dflash_config` too, where z-lab's loop does not look.
NESTED = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def open_plain(target: LoadedTarget, drafter: Path | None, block: int | None) -> ExternalLoop:  # noqa: ARG001
    """Open `mlx_lm.generate.generate_step`."""

    def steps(prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:  # noqa: ARG001
        try:
            for token, _ in generate_step(mx.array(prompt), target.target.model, max_tokens=limit, **caches):
                yield int(token)
        finally:
            mx.synchronize(generation_stream)  # one forward more than there are tokens

    return ExternalLoop(1, steps)


def open_speculative(target: LoadedTarget, drafter: Path, block: int | None) -> ExternalLoop:
    """Open `mlx_lm.generate.speculative_generate_step`; the draft model's caches are ours in any case.

    It wants the target's caches and the draft model's in one list, which it divides by the number of the
    target's layers. Models that share keys and values among layers have fewer caches than layers, so they
    cannot be given that list; they can still be given a `make_cache`.
    """
    model, small, block = target.target.model, load_target(drafter).target, block or 3
    refuse_mismatch("vocabulary", small.vocab_size, target.target.vocab_size)

    def steps(prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:
        own, given = new_caches(small.model, block), caches.get("prompt_cache")
        if given is not None and len(given) != len(model.layers):
            raise GenerationError(
                f"mlx-lm wants a cache for each of {len(model.layers)} layers, not {len(given)}"
            )
        rounds = speculative_generate_step(
            mx.array(prompt),
            model,
            small.model,
            num_draft_tokens=block - 1,
            max_tokens=limit,
            prompt_cache=None if given is None else [*given, *own],
        )
        drafted = False  # the token before; a round ends with one of the target's
        try:
            with replaced(small.model, MAKER, lambda: own):
                step = next(rounds, None)
            while step is not None:
                counts.rounds += not drafted
                drafted = step[2]
                counts.accepted += drafted
                yield int(step[0])
                step = next(rounds, None)
        finally:
            rounds.close()
            mx.synchronize(generation_stream)

    return ExternalLoop(block, steps)


def open_zlab(target: LoadedTarget, drafter: Path, block: int | None) -> ExternalLoop:
    """Open z-lab's `dflash.model_mlx.stream_generate`, which asks `make_prompt_cache` for caches."""
    module: Any = import_module(ZLAB)
    with replaced(module, "snapshot_download", lambda path, **_: path):
        draft = module.load_draft(str(drafter))
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    for name in NESTED:
        if name in config and name not in config["dflash_config"]:
            setattr(draft.config, name, config[name])
    add_unseen_scale(draft, target.target)
    draft.set_dtype(target.target.embed(mx.array([[0]])).dtype)
    mx.eval(draft.parameters())
    size = int(block or draft.config.block_size)

    def steps(prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:
        sizes = {"block_size": size, "max_tokens": limit}
        try:
            for response in module.stream_generate(
                target.target.model, draft, MuteTokenizer(), mx.array(prompt), **sizes, **caches
            ):
                if response.accepted is not None:
                    counts.rounds += 1
                    counts.accepted += len(response.tokens) - 1
                yield from response.tokens
        finally:
            mx.synchronize(generation_stream)

    return ExternalLoop(size, steps)


def add_unseen_scale(draft: Any, target: Target) -> None:
    """Add the target's embedding scale to a z-lab draft's, which the package sees on Gemma 4 alone."""
    given = draft.config.input_embedding_scale
    if draft.bind(target.model).embed_scale == given:
        draft.config.input_embedding_scale = given * target.embedding_scale


class MuteTokenizer(TokenizerWrapper):
    """A tokenizer without text and stop tokens: z-lab's loop writes text while it decodes."""

    eos_token_ids: frozenset[int] = frozenset()
    last_segment = ""

    def __init__(self) -> None:
        """Wrap nothing."""

    def _nothing(self, *_: object) -> None: ...

    add_token = finalize = _nothing
    detokenizer = property(lambda self: self)  # it has the names that the loop uses


def open_dflash_mlx(target: LoadedTarget, drafter: Path, block: int | None) -> ExternalLoop:
    """Open `dflash_mlx.runtime.stream_dflash_generate`, which replaces methods of the target's classes."""
    operations: Any = import_module("dflash_mlx.engine.target_ops")
    loading: Any = import_module("dflash_mlx.runtime.loading")
    contexts: Any = import_module("dflash_mlx.runtime.context")
    runtime: Any = import_module("dflash_mlx.runtime")
    events: Any = import_module("dflash_mlx.engine.events")
    model = target.target.model
    ops = operations.resolve_target_ops(model)
    draft, _ = loading.load_draft_bundle(str(drafter), lazy=False)
    draft.set_dtype(target.target.embed(mx.array([[0]])).dtype)
    mx.eval(draft.parameters())
    operations.bind_draft_to_target(draft, model, target_ops=ops)
    size = int(block or draft.block_size)
    fixed = {
        "target_model": model,
        "target_ops": ops,
        "tokenizer": target.tokenizer,
        "draft_model": draft,
        "draft_backend": import_module("dflash_mlx.draft_backend").EagerDraftBackend(),
        "block_tokens": size,
        "stop_token_ids": [],
        "runtime_context": contexts.build_offline_runtime_context(verify_mode="dflash"),
    }

    def steps(prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:
        ops.install_speculative_hooks(model)
        try:
            for event in runtime.stream_dflash_generate(
                **fixed, prompt_tokens_override=prompt, max_new_tokens=limit, **caches
            ):
                if isinstance(event, events.TokenEvent):
                    counts.rounds = event.cycles_completed
                    counts.accepted = round(event.acceptance_ratio * event.generated_tokens)
                    yield int(event.token_id)
        finally:
            mx.synchronize()

    return ExternalLoop(size, steps)


_MAKERS = (("mlx_lm.generate", "make_prompt_cache"),)
ENGINES: dict[str, LoopEntry] = {
    "mlx-lm": LoopEntry(
        "mlx_lm", "pip install mlx-lm", open_plain, drafts=False, keyword="prompt_cache", makers=_MAKERS
    ),
    "mlx-lm-speculative": LoopEntry(
        "mlx_lm", "pip install mlx-lm", open_speculative, keyword="prompt_cache", makers=_MAKERS
    ),
    "dflash": LoopEntry(
        "dflash", "pip install --no-deps dflash==0.1.0", open_zlab, makers=((ZLAB, "make_prompt_cache"),)
    ),
    "dflash-mlx": LoopEntry(
        "dflash_mlx",
        "pip install --no-deps dflash-mlx==0.1.8",
        open_dflash_mlx,
        attends=True,
        makers=(("dflash_mlx.engine.target_qwen_gdn", "QwenGdnTargetOps.make_cache"),),
    ),
}
