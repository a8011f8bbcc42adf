"""The switches of a run, checked once, and the engine they open."""

import re
from dataclasses import dataclass
from pathlib import Path

from engine.cache.policy import NATIVE, KVPolicy, parse_policy
from engine.device import fit_threads
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.drafters.registry import WITH_LOOKUP, drafter_policy, open_drafter, split_policy
from engine.errors import ConfigurationError
from engine.restoration.loading import open_restoration
from engine.restoration.session import RestorationPlan
from engine.session import Session
from engine.target.attention import refuse_policy
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, LoadedDrafter, LoadedTarget, load_target

LARGEST_BLOCK = 1024


@dataclass(frozen=True)
class Options:
    """What the command line can set about the engine itself."""

    model: Path | None = None  # folder of the target; None: the shipped one
    # what `engine.drafters.registry` opens, or ``none``; None: the shipped one with look-ups, on the shipped
    # target
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


@dataclass(frozen=True)
class Engine:
    """A target, perhaps a drafter bound to it, and how to run them."""

    options: Options
    target: LoadedTarget
    drafter: LoadedDrafter | None  # None where nothing is drafted: no drafter, or every block is to be 1
    alone: bool  # no drafter was given, so there is nothing to compare with plain decoding
    policy: KVPolicy = NATIVE
    restoration: RestorationPlan | None = None  # of a restored policy

    def new_draft_length(self, *, repeatable: bool = False) -> DraftLength:
        """What chooses the blocks; ``repeatable`` if it must not depend on time."""
        if self.drafter is None:
            return FixedDraftLength(1)
        if self.options.block != "auto":
            return FixedDraftLength(int(self.options.block))
        return AdaptiveDraftLength(self.drafter.drafter.block_size, nominal=repeatable)

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


def open_engine(options: Options) -> Engine:
    """Check the switches and load the models: ConfigurationError or ModelError where that fails."""
    block = parse_block(options.block)
    if options.prefill_chunk < 1:
        raise ConfigurationError(f"--prefill-chunk must be at least 1, not {options.prefill_chunk}")
    policy, drafters_own = parse_policy(options.kv), drafter_policy(options.drafter_kv)
    model = options.model or SHIPPED_TARGET
    spec = None if options.drafter == "none" else options.drafter
    if options.drafter is None and model.resolve() == SHIPPED_TARGET.resolve():
        spec = f"{WITH_LOOKUP}{SHIPPED_DRAFTER}"
    split_policy(spec or "", drafters_own)  # before the target is loaded, and for --block 1, too
    if spec is None and drafters_own != NATIVE:
        raise ConfigurationError(f"--drafter-kv {options.drafter_kv} needs a drafter; give --drafter")
    if spec is None and options.drafter_quantize is not None:
        raise ConfigurationError(
            f"--drafter-quantize {options.drafter_quantize} needs a drafter; give --drafter"
        )
    if spec is None and block is not None and block > 1:
        raise ConfigurationError(f"--block {block} needs a drafter; give --drafter")
    target = load_target(model, options.dtype, options.quantize)
    refuse_policy(target.target.model, policy)
    restoration = open_restoration(
        policy, target, model=options.model, projector=options.projector, drafter=spec, dtype=options.dtype
    )
    fit_threads(target.target.hidden_size)
    drafter = None
    if spec is not None and block != 1:
        drafter = open_drafter(spec, target, options.dtype, drafters_own, options.drafter_quantize)
    if drafter and block:
        check_block(block, drafter.drafter.block_size)
    return Engine(options, target, drafter, alone=spec is None, policy=policy, restoration=restoration)


def check_block(block: int, nominal: int) -> None:
    """Refuse a block of more than twice the length that a drafter was made for."""
    if block > 2 * nominal:
        raise ConfigurationError(
            f"--block {block} is more than {2 * nominal}, twice what this drafter was made for"
        )


def parse_block(block: str) -> int | None:
    """A ``--block`` text as a length, None for ``auto``; ConfigurationError for anything else."""
    if block == "auto":
        return None
    if not re.fullmatch("[0-9]{1,9}", block) or not 1 <= int(block) <= LARGEST_BLOCK:
        raise ConfigurationError(f"--block must be auto or a number from 1 to {LARGEST_BLOCK}, not {block!r}")
    return int(block)
