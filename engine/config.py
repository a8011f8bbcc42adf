"""The switches of a run, checked once, and the engine they open."""

from dataclasses import dataclass
from pathlib import Path

from engine.cache.auto import measured
from engine.cache.policy import NATIVE, KVPolicy, parse_policy
from engine.device import fit_threads
from engine.draft_length import (
    AdaptiveDraftLength,
    DraftLength,
    FixedDraftLength,
    check_block,
    parse_block,
)
from engine.drafters.registry import drafter_policy, open_drafter, read_spec, split_policy
from engine.errors import ConfigurationError
from engine.memory import require_memory
from engine.registry import Channel, Located, default_drafter
from engine.restoration.loading import open_restoration
from engine.restoration.session import RestorationPlan
from engine.session import Session
from engine.target.attention import refuse_policy
from engine.target.loading import SHIPPED_TARGET, LoadedDrafter, LoadedTarget, load_target


@dataclass(frozen=True)
class Options:
    """What the command line can set about the engine itself."""

    model: Path | None = None  # folder of the target; None: the shipped one
    # what `engine.drafters.registry` opens, or ``none``; None: see `engine.registry.default_drafter`
    drafter: str | None = None
    block: str = "auto"  # or a length of at least 1, the bonus token included
    prefill_chunk: int = 2048  # prompt positions per forward
    dtype: str | None = None  # float32, float16, bfloat16; None: the device's default
    compiled: bool = True  # run short blocks as compiled graphs where the model allows it
    single_graph: bool = False  # evaluate draft and verify as one graph, to see what two are worth
    kv: str = "native"  # see `engine.cache.policy`
    drafter_kv: str = "native"  # of the drafter's own keys and values; see `engine.drafters.registry`
    drafter_quantize: str | None = None  # pack the drafter's weights
    quantize: str | None = None  # pack the target's weights, see `engine.target.quantize`
    projector: Path | None = None  # folder, for ``restored:learned``; None: the shipped one

    @classmethod
    def of(cls, located: Located, channel: Channel) -> "Options":
        """The switches of an engine of its own for a model of a registry and a channel of it."""
        entry, drafter = located.entry, located.drafter or "none"
        own = {name: getattr(entry, name) for name in ("block", "dtype", "quantize")}
        return cls(model=located.target, drafter=drafter, kv=channel.policy.spec, **own)


@dataclass(frozen=True)
class Engine:
    """A target, perhaps a drafter bound to it, and how to run them."""

    options: Options
    target: LoadedTarget
    drafter: LoadedDrafter | None  # None where nothing is drafted: no drafter, or every block is to be 1
    alone: bool  # no drafter was given, so there is nothing to compare with plain decoding
    policy: KVPolicy = NATIVE
    restoration: RestorationPlan | None = None  # of a restored policy

    def new_draft_length(self) -> DraftLength:
        """What chooses the blocks."""
        if self.drafter is None:
            return FixedDraftLength(1)
        if self.options.block != "auto":
            return FixedDraftLength(int(self.options.block))
        return AdaptiveDraftLength.of(self.drafter.drafter)

    def open_session(self, headroom: int) -> Session:
        """A new session for blocks up to ``headroom`` tokens."""
        return Session(
            self.target.target,
            self.drafter.drafter if self.drafter else None,
            headroom=max(headroom, 1),
            compiled=self.options.compiled,
            policy=self.policy,
            restoration=self.restoration,
        )


def open_engine(options: Options, context: int | None = None) -> Engine:
    """Check the switches and load the models: ConfigurationError or ModelError where that fails.

    MachineError where they, and keys and values of ``context`` tokens, would not fit in memory.
    """
    block = parse_block(options.block)
    if options.prefill_chunk < 1:
        raise ConfigurationError(f"--prefill-chunk must be at least 1, not {options.prefill_chunk}")
    policy, drafters_own = parse_policy(options.kv), drafter_policy(options.drafter_kv)
    model = options.model or SHIPPED_TARGET
    text = options.drafter or default_drafter(model)
    spec = None if text == "none" else text
    split_policy(spec or "", drafters_own)  # before the target is loaded, and for --block 1, too
    if spec is None and drafters_own != NATIVE:
        raise ConfigurationError(f"--drafter-kv {options.drafter_kv} needs a drafter; give --drafter")
    if spec is None and options.drafter_quantize is not None:
        raise ConfigurationError(
            f"--drafter-quantize {options.drafter_quantize} needs a drafter; give --drafter"
        )
    if spec is None and block is not None and block > 1:
        raise ConfigurationError(f"--block {block} needs a drafter; give --drafter")
    drafting = None if block == 1 else spec
    own = {name: getattr(options, name) for name in ("kv", "dtype", "quantize")}
    try:
        asked = read_spec(drafting, drafters_own, options.drafter_quantize) if drafting else None
    except ConfigurationError as error:
        if options.drafter is not None:
            raise
        raise ConfigurationError(f"{error}, or give --drafter: by default {text} drafts") from None
    require_memory(model, context=context, drafter=asked, **own)
    target = load_target(model, options.dtype, options.quantize)
    refuse_policy(target.target.model, policy)
    policy = measured(policy, target.target.model, target.tokenizer)
    restoration = open_restoration(
        policy, target, model=options.model, projector=options.projector, drafter=spec, dtype=options.dtype
    )
    fit_threads(target.target.hidden_size)
    drafter = None
    if drafting is not None:
        drafter = open_drafter(drafting, target, options.dtype, drafters_own, options.drafter_quantize)
    if drafter and block:
        check_block(block, drafter.drafter.block_size)
    return Engine(options, target, drafter, alone=spec is None, policy=policy, restoration=restoration)
