"""An external engine on one of our targets, with the caches of a KV policy in it.

Opening one tries these strategies with a few real tokens and keeps the first after which every layer's cache
has received prompt and text. Every later token is held to the same count before it is yielded.

    keyword     its loop has an argument for them
    instance    the model gets a `make_cache` of its own, which hands them out
    attribute   the name that makes caches in the engine's module hands them out, for this model alone
    native      it keeps its own caches, which are not counted, and decodes under the native policy alone
"""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.models.cache import ArraysCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.cache.policy import NATIVE, KVPolicy
from engine.cache.ring import SlidingRing
from engine.cache.transaction import members_of, new_caches
from engine.drafters.base import refuse_mismatch
from engine.errors import ConfigurationError, GenerationError, wrap_errors
from engine.target.attention import CodedAttention, refuse_policy
from engine.target.loading import LoadedTarget, load_target
from engine.target.model import Target

OWN_CACHES = "native"
STRATEGIES = ("keyword", "instance", "attribute", OWN_CACHES)  # in the order in which they are tried
TRIAL_PROMPT, TRIAL_TOKENS = (1, 2, 3, 4, 5, 6), 4
MOST_POLICIES = 256  # whose obstacles are kept; requests may spell out any number
ZLAB = "dflash.model_mlx"
# Published configs have these outside `dflash_config` too, where z-lab's loop does not look.
NESTED = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}


@dataclass
class DraftCounts:
    """What an engine tells of its drafts; no rounds: it tells nothing."""

    rounds: int = 0  # verify forwards
    accepted: int = 0  # drafts that the target confirmed

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a verify forward gave; None without one."""
        return 1 + self.accepted / self.rounds if self.rounds else None


# The most positions that an engine appends in one forward after the prompt's, and its loop: given a prompt, a
# number of tokens, `DraftCounts` and caches by the engine's keyword, it yields a greedy continuation.
ExternalLoop = tuple[int, Callable[..., Generator[int]]]


@dataclass(frozen=True)
class LoopEntry:
    """What is known of an engine before it is imported."""

    module: str  # the package it needs
    install: str  # what installs that
    open: Callable[[LoadedTarget, Any, int | None], ExternalLoop]  # given a drafter's folder and a block
    drafts: bool = True  # needs a drafter's folder, and takes positions back, which caches must allow
    attends: bool = False  # may attend past the function of the model's module that can read codes
    keyword: str | None = None  # what its loop calls the target's caches
    makers: tuple[tuple[str, str], ...] = ()  # what makes caches, given the model: MODULE[:CLASS] and name


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object's own attribute be ``value``; afterwards it is what it was, or not there at all."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def handed_over(strategy: str, entry: LoopEntry, model: Any, caches: list[Any]) -> Iterator[dict[str, Any]]:
    """Hand caches to an engine, and yield arguments for its loop; to be left at the first token."""
    models, left = models_of(model), [list(caches)]
    places = {"instance": [(each, "make_cache") for each in models], "attribute": entry.makers}.get(
        strategy, ()
    )
    if strategy == "keyword" and entry.keyword is None:
        raise GenerationError("the loop has no argument for caches")

    def maker(before: Callable[..., Any] | None) -> Callable[..., Any]:
        def make(*arguments: Any, **named: Any) -> Any:  # a function also serves as a method
            asked = (*arguments, *named.values())
            if before is not None and not any(one is each for one in asked for each in models):
                return before(*arguments, **named)  # for another model
            if not left:
                raise GenerationError("caches were made for more than one sequence")
            return left.pop()

        return make

    with ExitStack() as replacements:
        for place, name in places:
            owner = resolve_name(place) if isinstance(place, str) else place
            replacements.enter_context(replaced(owner, name, maker(vars(owner).get(name))))
        yield {entry.keyword: list(caches)} if strategy == "keyword" and entry.keyword else {}


def models_of(model: Any) -> list[Any]:
    """A model and the text model inside it, where it has one: some engines ask that."""
    inner = getattr(model, "language_model", None)
    return [model] if inner is None else [model, inner]


def positions_in(cache: Any) -> int | None:
    """Positions that a layer's cache has received; None for a recurrent state, which does not tell."""
    counts = []
    for member in members_of(cache):
        if member.empty():
            counts.append(0)
        elif not isinstance(member, ArraysCache):
            keys = member.keys[0] if isinstance(member.keys, tuple) else member.keys  # three where quantized
            offset, rows = int(member.offset), int(keys.shape[2])
            kept = min(offset, member.capacity) if type(member) is SlidingRing else offset
            counts.append(offset if rows >= kept else rows)
    return min(counts, default=None)


def verify_use(caches: Sequence[Any], at_least: int, where: str) -> None:
    """Raise GenerationError, with ``where`` in front, unless every layer has received so many positions."""
    counts = [(layer, positions_in(cache)) for layer, cache in enumerate(caches)]
    if short := [(layer, count) for layer, count in counts if count is not None and count < at_least]:
        layer, count = short[0]
        raise GenerationError(
            f"{where} did not use the caches it was given: layer {layer} received {count} of at least "
            f"{at_least} positions, {len(short)} of {len(caches)} layers are short"
        )


class ModelState:
    """What an engine leaves on a target during one generation: there while it runs, removed in between.

    Covered: attributes of the model, its text model, the body inside and the classes of all parts, lists in
    attributes, and the default stream. Engines touch no parts of single layers.
    """

    def __init__(self, model: Any) -> None:
        self._roots = models_of(model)
        if isinstance(body := getattr(self._roots[-1], "model", None), nn.Module):
            self._roots.append(body)
        self._classes = {type(part) for part in model.modules()}
        self._restore: Callable[[], None] = lambda: None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put back what the engine left; afterwards all is as it was before."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        restore, self._restore = self._restore, self._remember()
        restore()

    def _remember(self) -> Callable[[], None]:
        """Return what restores the present state."""
        classes = [(kind, dict(vars(kind))) for kind in self._classes]
        dicts = [(each, dict(each)) for root in self._roots for each in (root, vars(root))]
        lists = [(v, list(v)) for root in self._roots for v in root.values() if isinstance(v, list)]
        stream = mx.default_stream(mx.default_device())

        def restore() -> None:
            for kind, attributes in classes:
                for name in vars(kind).keys() - attributes.keys():
                    delattr(kind, name)
                for name, value in attributes.items():
                    if vars(kind).get(name) is not value:
                        setattr(kind, name, value)
            for each, items in dicts:
                dict.clear(each)
                dict.update(each, items)  # a module has an `update` of its own
            for each, entries in lists:
                each[:] = entries
            mx.set_default_stream(stream)

        return restore


class ExternalEngine:
    """An open engine. Between two tokens of its generations nothing of it is on the target."""

    def __init__(self, name: str, entry: LoopEntry, target: LoadedTarget, loop: ExternalLoop) -> None:
        """Find the strategy; ConfigurationError if the engine cannot decode with this target at all."""
        self.name, self._entry = name, entry
        self._model, (self._block, self._loop) = target.target.model, loop
        self._obstacles: dict[str, str] = {}
        failed = [unfit] if (unfit := self._unfit(NATIVE)) else []
        for strategy in [OWN_CACHES] if unfit else STRATEGIES:
            self.strategy, self.why = strategy, "; ".join(failed)  # why: what kept those before from working
            reason = self._failure(NATIVE)
            if reason is None:
                return
            failed.append(f"{strategy}: {reason}")
        raise ConfigurationError(f"engine {name} does not decode with this target: {failed[-1]}")

    def obstacle(self, policy: KVPolicy) -> str | None:
        """Say why the engine cannot decode under a policy; InputError if the target itself cannot."""
        if policy != NATIVE and policy.spec not in self._obstacles:
            refuse_policy(self._model, policy)
            if policy.source is not None:
                why = "old positions are restored by our own prefill, which the engine does not run"
            elif self.strategy == OWN_CACHES:
                why = f"it has no hook and keeps its own caches ({self.why})"
            elif policy.attended and self._entry.attends:
                why = "it attends by itself, which reads no codes; lattice policies are decoded before"
            else:
                why = self._unfit(policy) or self._failure(policy) or ""
            if len(self._obstacles) >= MOST_POLICIES:
                self._obstacles.clear()
            self._obstacles[policy.spec] = why
        return self._obstacles.get(policy.spec) or None

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        policy: KVPolicy = NATIVE,
        *,
        caches: list[Any] | None = None,
        counts: DraftCounts | None = None,
    ) -> Iterator[int]:
        """Continue a prompt greedily; stop tokens stop nothing, close the iterator instead.

        ``caches`` is filled with those handed over before the first token, ``counts`` as tokens come. Raises
        ConfigurationError at once for an `obstacle`; GenerationError later, where the caches are not used.
        """
        if reason := self.obstacle(policy):
            raise ConfigurationError(f"engine {self.name} cannot decode under {policy.spec}: {reason}")
        given = [] if caches is None else caches
        return self._tokens(prompt, max_tokens, policy, given, counts or DraftCounts())

    def _unfit(self, policy: KVPolicy) -> str | None:
        """Why an engine that takes positions back could not do so on the caches of a policy, or None."""
        caches = policy.new_caches(self._model, self._block) if self._entry.drafts else []
        fixed = [type(cache).__name__ for cache in caches if not cache.is_trimmable()]
        return f"it takes positions back by trimming, which a {fixed[0]} cannot do" if fixed else None

    def _failure(self, policy: KVPolicy) -> str | None:
        """Why a trial of a few tokens fails, or None."""
        try:
            given = len(list(self._tokens(TRIAL_PROMPT, TRIAL_TOKENS, policy, [], DraftCounts())))
        except GenerationError as error:
            return str(error)
        return None if given == TRIAL_TOKENS else f"engine {self.name} gave {given} of {TRIAL_TOKENS} tokens"

    def _tokens(
        self, prompt: Sequence[int], limit: int, policy: KVPolicy, caches: list[Any], counts: DraftCounts
    ) -> Iterator[int]:
        """Run the engine from token to token; between two of them the target is as it was."""
        where = f"engine {self.name}, strategy {self.strategy}, policy {policy.spec}"
        own, state = self.strategy == OWN_CACHES, ModelState(self._model)
        caches[:] = [] if own else policy.new_caches(self._model, self._block)

        def steps() -> Generator[int]:
            with ExitStack() as until_first:
                handed = handed_over(self.strategy, self._entry, self._model, caches)
                keywords = until_first.enter_context(handed)
                for token in self._loop(list(prompt), limit, counts, **keywords):
                    until_first.close()
                    yield token

        running = steps()
        with closing(CodedAttention(self._model)) if policy.attended else nullcontext():
            try:
                for given in range(limit):
                    with state.installed(), wrap_errors(lambda reason: GenerationError(f"{where}: {reason}")):
                        token = next(running, None)
                    if token is None:
                        return
                    verify_use(caches, len(prompt) + given, where)
                    yield token
            finally:
                with state.installed():
                    running.close()
                    mx.synchronize(generation_stream)  # a loop launches a forward more than there are tokens
                    mx.synchronize()


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
        own, given = new_caches(small.model, block), caches.get("prompt_cache")
        # It splits one list after as many as the target has layers; layers that share keys have fewer caches.
        if given is not None and len(given) != len(model.layers):
            raise GenerationError(f"mlx-lm wants {len(model.layers)} caches, one a layer, not {len(given)}")
        sizes: Any = {"num_draft_tokens": block - 1, "max_tokens": limit}
        both = given and [*given, *own]
        rounds = speculative_generate_step(mx.array(prompt), model, small.model, prompt_cache=both, **sizes)
        drafted = False  # the token before; a round ends with one of the target's
        with replaced(small.model, "make_cache", lambda: own):
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
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
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
        "dflash_mlx",
        "pip install --no-deps dflash-mlx==0.1.8",
        open_dflash_mlx,
        attends=True,
        makers=(("dflash_mlx.engine.target_qwen_gdn:QwenGdnTargetOps", "make_cache"),),
    ),
}


def open_external_engine(
    name: str, target: LoadedTarget, drafter: Path | None = None, block: int | None = None
) -> ExternalEngine:
    """Open one of `ENGINES` for a target, which several engines and sessions may share.

    ``block``: positions of a verify forward, the bonus included; None leaves it to the engine.
    """
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
    with wrap_errors(lambda reason: ConfigurationError(f"engine {name} cannot open these models: {reason}")):
        loop = entry.open(target, drafter, block)
    return ExternalEngine(name, entry, target, loop)
