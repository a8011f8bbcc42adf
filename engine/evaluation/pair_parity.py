"""Parity of a whole pair: our loop against a run of the published implementation's, round by round.

A *case* of a pair is a folder with ``target/`` and ``drafter/``, each as the engine loads it, and
``golden.npz`` of one greedy run:

    prompt [P]           the token ids it began with
    drafts [R, B-1]      what was drafted in each round; -1 behind the drafts of a shorter block
    logits [R, B-1, V]   the drafter's logits
    accepted [R]         tokens that the round emitted, the target's own included
    tokens [N]           all tokens: the first comes from the prompt, the others from the rounds
    reference []         the implementation's name, a text; may be missing

Rounds with a full block are compared. The shorter ones at the end depend on how a loop runs out, so only
their tokens are.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from engine.decode import Step, decode
from engine.draft_length import FixedDraftLength
from engine.drafters.base import Draft
from engine.drafters.block import BlockDrafter
from engine.errors import ModelError
from engine.evaluation.parity import (
    GOLDEN,
    REALS,
    WHOLES,
    Arrays,
    RoundParity,
    check_name,
    largest_difference,
    on_host,
    read_arrays,
    refuse_outside,
    take,
)
from engine.evaluation.target_parity import open_target
from engine.networks.dflash import DFlash
from engine.sampling import Sampler
from engine.target.loading import load_drafter
from engine.target.model import Target

TARGET, DRAFTER = "target", "drafter"
PAD = -1


@dataclass(frozen=True)
class PairCase:
    """A case read from disk: target, drafter and the reference arrays, checked.

    Attributes:
        name: of its folder.
        target: loaded in the dtype asked for.
        network: the drafter's, likewise.
        arrays: what ``golden.npz`` holds.
        full_rounds: how many rounds, from the first, have a full block.
    """

    name: str
    target: Target
    network: DFlash
    arrays: Arrays
    full_rounds: int

    @classmethod
    def read(cls, folder: Path, dtype: str = "float32") -> "PairCase":
        """Read and check one case.

        Raises:
            ModelError: a model cannot be loaded, the drafter is for another target, an array is missing, has
                another shape, or holds tokens that do not exist, or the arrays contradict each other.
        """
        target = open_target(folder / TARGET, dtype).target
        drafter = load_drafter(folder / DRAFTER, target, dtype).drafter
        if not isinstance(drafter, BlockDrafter):
            raise ModelError(
                f"{folder / DRAFTER} holds a drafter of the kind {drafter.name}, not a DFlash one"
            )
        arrays = read_arrays(folder / GOLDEN)
        full = _check_arrays(folder / GOLDEN, arrays, target.vocab_size)
        return cls(folder.resolve().name, target, drafter.network, arrays, full)

    def compare(self) -> list[RoundParity]:
        """Run our loop from the prompt and compare the rounds with a full block."""
        tokens = self.arrays["tokens"].tolist()
        block = self.arrays["drafts"].shape[1] + 1
        drafter = _Recorder(self.network)
        drafter.bind(self.target)
        steps = decode(
            self.target,
            drafter,
            self.arrays["prompt"].tolist(),
            max_tokens=len(tokens) + block,  # blocks stay full for as long as the reference's do
            draft_length=FixedDraftLength(block),
        )
        rounds = []
        with closing(steps):
            same = list(next(steps).tokens) == tokens[:1]  # part of the first round
            position = 1
            for index, count in enumerate(self.arrays["accepted"][: self.full_rounds].tolist()):
                step = next(steps, None)
                emitted = [] if step is None else list(step.tokens)[: len(tokens) - position]
                same = same and emitted == tokens[position : position + count]
                position += count
                if index == self.full_rounds - 1:
                    same = same and _following(steps, len(tokens) - position) == tokens[position:]
                rounds.append(self._round(index, step, drafter, same))
                same = True
        return rounds

    def _round(self, index: int, step: Step | None, drafter: "_Recorder", tokens_equal: bool) -> RoundParity:
        """Our drafts of a round beside the reference's."""
        drafts, logits = self.arrays["drafts"][index], self.arrays["logits"][index]
        rows = len(drafts)
        if step is None or step.round is None or step.round.block != rows + 1:
            # ours emitted more than the reference, and has run out
            return RoundParity(self.name, index + 1, None, float("inf"), 0.0, None, rows, False)
        our_drafts, ours = (on_host(array) for array in drafter.drafted.popleft())
        return RoundParity(
            case=self.name,
            round=index + 1,
            hidden_max_abs=None,
            logits_max_abs=largest_difference(ours, logits),
            argmax_agreement=float((our_drafts == drafts).mean()),
            path_equal=None,
            rows=rows,
            tokens_equal=tokens_equal,
        )


class _Recorder(BlockDrafter):
    """A DFlash drafter that keeps the drafts [B-1] and logits [B-1, V] of its blocks."""

    def __init__(self, network: DFlash) -> None:
        super().__init__(network)
        self.drafted: deque[tuple[mx.array, mx.array]] = deque()
        self._logits: mx.array

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """See `Drafter.propose`."""
        draft = super().propose(bonus, count, sampler)
        self.drafted.append((draft.tokens, self._logits))
        return draft

    def _block_rows(self, bonus: int, count: int) -> tuple[mx.array, mx.array]:
        hidden, self._logits = super()._block_rows(bonus, count)
        return hidden, self._logits


def _following(steps: Iterator[Step], count: int) -> list[int]:
    """The next ``count`` tokens of a run."""
    tokens: list[int] = []
    while len(tokens) < count and (step := next(steps, None)) is not None:
        tokens.extend(step.tokens)
    return tokens[:count]


def _check_arrays(file: Path, arrays: Arrays, vocabulary: int) -> int:
    """Check names, kinds and shapes of the arrays, and that they fit together.

    Returns:
        How many rounds have a full block.
    """
    check_name(file, arrays)
    for name in ("prompt", "tokens"):
        if not take(file, arrays, name, WHOLES, None).size:
            raise ModelError(f"{file}: {name} is empty")
        refuse_outside(file, name, arrays[name], vocabulary)
    drafts = take(file, arrays, "drafts", WHOLES, None, None)
    count, most = drafts.shape
    if count < 1 or most < 1:
        raise ModelError(f"{file}: drafts is {drafts.shape}; there must be a round, and a draft in it")
    take(file, arrays, "logits", REALS, count, most, vocabulary, finite=False)
    accepted = take(file, arrays, "accepted", WHOLES, count)
    lengths = (drafts != PAD).sum(axis=1)
    for number, (row, length, emitted) in enumerate(zip(drafts, lengths, accepted, strict=True), 1):
        if (row[:length] == PAD).any() or length < 1:
            raise ModelError(
                f"{file}: drafts of round {number} are {row.tolist()}; -1 may only follow drafts"
            )
        refuse_outside(file, f"drafts of round {number}", row[:length], vocabulary)
        if not 1 <= emitted <= length + 1:
            raise ModelError(
                f"{file}: accepted of round {number} is {emitted}; "
                f"{length} drafts emit 1 to {length + 1} tokens"
            )
    if (total := 1 + int(accepted.sum())) != len(arrays["tokens"]):
        raise ModelError(
            f"{file}: tokens holds {len(arrays['tokens'])}; the first and those accepted are {total}"
        )
    full = int((lengths == most).sum())
    if full < 1 or (lengths[:full] < most).any():
        raise ModelError(
            f"{file}: drafts must begin with full blocks; its rounds have {lengths.tolist()} drafts"
        )
    return full
