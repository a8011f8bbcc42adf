"""What the caches of a model would hold under some policies, at some lengths: the table of predictions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.cache.policy import NATIVE, KVPolicy, parse_policy
from engine.config import LARGEST_BLOCK
from engine.draft_length import AdaptiveDraftLength
from engine.errors import ConfigurationError, InputError
from engine.memory.drafters import UnloadedDrafter, open_unloaded_drafter
from engine.memory.model import Unloaded
from engine.memory.replay import LayerKind, Run, chunks_of, held_by, total
from engine.restoration.sites import sites_of
from engine.target.attention import refuse_policy

EVERY = "all"
POLICIES = (
    "native", "full-kv", "sliding-bounded", "sink-window", "affine", "rotated", "lattice", "lattice-packed",
    "restored:exact",
)  # fmt: skip
LARGEST_BATCH, LARGEST_CONTEXT = 4096, 2**30

Progress = Callable[[int, int, str, str], None]  # done, of how many, what, which


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes:
        policies: ``--kv`` texts, `EVERY` among them for all of `POLICIES` the model can have.
        contexts: tokens of each prompt.
        batch: sequences.
        block: ``auto`` or tokens of a verify forward.
        prefill_chunk: prompt positions a forward.
        drafter: a ``--drafter`` text, or None.
        dtype: of the drafter's weights, as for the target's.
    """

    policies: tuple[str, ...] = ("native",)
    contexts: tuple[int, ...] = ()
    batch: int = 1
    block: str = "auto"
    prefill_chunk: int = 2048
    drafter: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Row:
    """One policy at one length.

    Attributes:
        kv: the policy, in full.
        context: tokens of each prompt.
        batch: sequences.
        kinds: the caches by kinds of layers.
        block: tokens of the round, as asked for or as the model's positions leave room for; 0: no round.
        native: bytes of the native policy's caches in the same run.
        drafter: bytes of what the drafter remembers of all sequences; 0 without one.
    """

    kv: str
    context: int
    batch: int
    kinds: tuple[LayerKind, ...]
    block: int
    native: int
    drafter: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all caches of all sequences."""
        return total(self.kinds)

    @property
    def per_sequence(self) -> int:
        """… of one sequence."""
        return self.nbytes // self.batch

    @property
    def per_token(self) -> float:
        """… for each token of the prompts."""
        return self.nbytes / (self.batch * self.context)

    @property
    def ratio(self) -> float:
        """How many times as much the native policy's caches take; 1 where neither takes anything."""
        return self.native / self.nbytes if self.nbytes else 1.0


@dataclass(frozen=True)
class Prediction:
    """All rows, and the runs they are for.

    Attributes:
        run: the run of the first row, its block as asked for; rows differ in ``context`` and in ``block``.
        rows: by context, then by policy.
        drafter_weights: bytes; 0 without a drafter.
        refused: policies of `EVERY` that do not go together with the model, and why.
    """

    run: Run
    rows: tuple[Row, ...]
    drafter_weights: int
    refused: dict[str, str]


def predict(model: Unloaded, asked: Asked, progress: Progress) -> Prediction:
    """Predict what the caches would hold after each prompt and one round.

    Args:
        model: the target.
        asked: policies, lengths and the like.
        progress: told before every row.

    Raises:
        ConfigurationError: a number is out of range, or a policy does not go together with the model.
        ModelError: the drafter's folder cannot be used, or caches of the model cannot be predicted or merged.
        DrafterMismatchError: the drafter was made for another target.
    """
    _check(model, asked)
    policies, refused = _policies(model, asked)
    drafter = open_unloaded_drafter(asked.drafter, model, asked.dtype) if asked.drafter else None
    run = _run(asked, drafter)
    rows: list[Row] = []
    states: dict[tuple[int, ...], int] = {}  # of the drafter, by the positions it is told of at a time
    steps = len(asked.contexts) * len(policies)
    for context in asked.contexts:
        now = replace(run, context=context, block=_left(model, context, run.block))
        progress(len(rows), steps, "predicting", f"native, {context} tokens")
        native = held_by(model.target, NATIVE, now)
        for policy in policies:
            progress(len(rows), steps, "predicting", f"{policy.spec}, {context} tokens")
            kinds = native if policy == NATIVE else held_by(model.target, policy, now)
            observed = (*chunks_of(policy, now), 1)
            if drafter and observed not in states:
                states[observed] = drafter.state(observed, now.block)
            state = states.get(observed, 0)
            bytes_of = {"native": total(native), "drafter": asked.batch * state}
            rows.append(Row(policy.spec, context, asked.batch, tuple(kinds), now.block, **bytes_of))
    progress(steps, steps, "predicting", "done")
    weights = drafter.weights if drafter else 0
    return Prediction(replace(run, context=asked.contexts[0]), tuple(rows), weights, refused)


def _left(model: Unloaded, context: int, block: int) -> int:
    """Tokens of the round: no run goes beyond the model's positions, and the prompt's forward gives one."""
    return block if model.context is None else min(block, model.context - context - 1)


def _policies(model: Unloaded, asked: Asked) -> tuple[list[KVPolicy], dict[str, str]]:
    """The policies in order, each once; and those of `EVERY` that the model cannot have."""
    policies: dict[str, KVPolicy] = {}
    refused: dict[str, str] = {}
    for text in asked.policies:
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


def _run(asked: Asked, drafter: UnloadedDrafter | None) -> Run:
    """The run without its length."""
    if asked.block != "auto":
        block = headroom = int(asked.block)
        most = 2 * drafter.block_size if drafter else block
        if block > most:
            raise ConfigurationError(
                f"--block {block} is more than {most}, twice what this drafter was made for"
            )
    elif drafter is not None:
        block, headroom = drafter.block_size, AdaptiveDraftLength(drafter.block_size).largest
    else:
        block = headroom = 1
    return Run(0, asked.batch, block, headroom, asked.prefill_chunk)


def _check(model: Unloaded, asked: Asked) -> None:
    """Refuse numbers that make no sense, by name and value."""
    if not 1 <= asked.batch <= LARGEST_BATCH:
        raise ConfigurationError(f"--batch must lie in 1 to {LARGEST_BATCH}, not {asked.batch}")
    if asked.prefill_chunk < 1:
        raise ConfigurationError(f"--prefill-chunk must be at least 1, not {asked.prefill_chunk}")
    number = int(asked.block) if asked.block.isascii() and asked.block.isdigit() else 0
    if asked.block != "auto" and not 1 <= number <= LARGEST_BLOCK:
        raise ConfigurationError(
            f"--block must be auto or a number from 1 to {LARGEST_BLOCK}, not {asked.block!r}"
        )
    if asked.drafter is not None and number == 1:
        raise ConfigurationError("--block 1 drafts nothing; leave --drafter out")
    for context in asked.contexts:
        if not 1 <= context <= LARGEST_CONTEXT:
            raise ConfigurationError(f"--context must lie in 1 to {LARGEST_CONTEXT}, not {context}")
        if model.context is not None and context >= model.context:
            raise ConfigurationError(
                f"--context {context} leaves no token to generate: this model was made for {model.context} "
                f"positions; give at most {model.context - 1}"
            )
