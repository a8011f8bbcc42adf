"""Sequences that come and go in a batch get, each by its own rules, what they get alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from engine.acceptance import Processor, TokenSelector
from engine.batch_decode import ContinuousBatch
from engine.cache.batch import layout_of
from engine.cache.policy import NATIVE, parse_policy
from engine.decode import SequenceDecoder, Step, decode
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.logprobs import Logprobs, TokenLogprob
from engine.sampling import Sampler, Sampling
from engine.session import Session
from engine.stops import Stops
from engine.target.model import Target
from tests.engine import tiny
from tests.engine.batches import FAMILIES, classes_of, drafter_of, mostly_slow, prompt_of, target_of

HEADROOM = 16
KINDS = ("dflash", "prompt-lookup", "mtp", "prompt-lookup+dflash")
NEAR, NEAR_CODED = 2e-4, 0.1  # of log-probabilities: a batch's products are rounded otherwise, and then codes


@dataclass(frozen=True)
class Rules:
    """What one sequence asks for."""

    length: int  # of the prompt
    count: int
    sampling: Sampling | None = None
    penalty: float | None = None
    logprobs: int | None = None
    stop: bool = False  # at the token in the middle of its text
    block: int | None = None  # None: as the draft length of the batch chooses
    drafter: str | None = None

    def processors(self) -> list[Processor]:
        return make_logits_processors(repetition_penalty=self.penalty) if self.penalty else []

    def sampler(self) -> Sampler | None:
        return Sampler(self.sampling, by_position=True) if self.sampling else None

    def alone(self, target: Target, policy: str) -> list[Step]:
        """Plain decoding by itself, without any stop."""
        steps = decode(
            target,
            None,
            prompt_of(self.length),
            max_tokens=self.count,
            sampler=self.sampler(),
            processors=self.processors(),
            logprobs=self.logprobs,
            policy=parse_policy(policy),
        )
        return list(steps)


@dataclass
class Guest:
    """A sequence in the batch, and what it should get."""

    rules: Rules
    row: SequenceDecoder
    expected: list[int]
    records: list[TokenLogprob]
    tokens: list[int] = field(default_factory=list)
    found: list[TokenLogprob] = field(default_factory=list)

    def take(self, step: Step | Exception) -> None:
        assert isinstance(step, Step), step
        self.tokens += step.tokens
        self.found += step.logprobs or ()

    def check(self) -> None:
        assert self.tokens == self.expected, self.rules
        for ours, theirs in zip(self.found, self.records, strict=False):
            near = NEAR if self.row.session.policy == NATIVE else NEAR_CODED
            assert (ours.token, abs(ours.logprob - theirs.logprob) < near) == (theirs.token, True)


def new_guest(family: str, rules: Rules, policy: str) -> Guest:
    """Compute its prompt and its first token."""
    target = target_of(family)
    steps = rules.alone(target, policy)
    expected = [token for step in steps for token in step.tokens]
    records = [record for step in steps for record in step.logprobs or ()]
    stops = Stops()
    if rules.stop:
        end = expected[len(expected) // 2]
        stops, expected = Stops({end}), expected[: expected.index(end) + 1]
    drafter = drafter_of(rules.drafter, family) if rules.drafter else None
    session = Session(target, drafter, headroom=HEADROOM, policy=parse_policy(policy))
    length: DraftLength = AdaptiveDraftLength(8) if drafter else FixedDraftLength(1)
    if rules.block is not None and drafter is not None:
        length = FixedDraftLength(rules.block)
    told = None if rules.logprobs is None else Logprobs(rules.logprobs, target.vocab_size)
    selector = TokenSelector(rules.sampler(), rules.processors(), told)
    row = SequenceDecoder(session, length, stops, selector, rules.count)
    guest = Guest(rules, row, expected, records)
    guest.take(row.prefill(prompt_of(rules.length), 7))
    return guest


def serve(family: str, all_rules: Sequence[Rules], policy: str, seed: int) -> None:
    """Let all of them come and go at random, and check what each got and what its session holds."""
    random, waiting, target = tiny.seeded(seed), list(all_rules), target_of(family)
    guests: dict[SequenceDecoder, Guest] = {}
    before, sizes = classes_of(target.model), set()
    lengths: dict[int, DraftLength] = {}

    def chosen(rows: Sequence[SequenceDecoder]) -> DraftLength:
        return lengths.setdefault(len(rows), AdaptiveDraftLength(8))

    with closing(ContinuousBatch(target, chosen)) as batch:
        while waiting or guests:
            while waiting and (not guests or random.random() < 0.4):
                guest = new_guest(family, waiting.pop(), policy)
                if guest.row.finish is None:
                    guests[guest.row] = guest
                    batch.add(guest.row)
                else:
                    guest.check()
                    guest.row.session.close()
            if not guests:
                continue
            steps = batch.step()
            sizes.add(len(steps))
            for row, step in steps:
                guests[row].take(step)
                if row.finish:
                    batch.remove(row)
                    leave(target, guests.pop(row))
            if guests and random.random() < 0.1:  # one whose client has left
                gone = random.choice(list(guests))
                batch.remove(gone)
                guest = guests.pop(gone)
                assert guest.tokens == guest.expected[: len(guest.tokens)]
                gone.session.close()
    assert max(sizes) > 2
    assert 1 in sizes
    assert classes_of(target.model) == before


def leave(target: Target, guest: Guest) -> None:
    """What it got is right, and its session can go on."""
    guest.check()
    session, text = guest.row.session, [*prompt_of(guest.rules.length), *guest.tokens]
    with session:
        assert session.tokens[: len(text) - 1] == text[:-1]
        on = decode(
            target, session.drafter, text, max_tokens=3, session=session, draft_length=FixedDraftLength(1)
        )
        found = [token for step in on for token in step.tokens]
    policy = session.policy
    expected = [t for step in decode(target, None, text, max_tokens=3, policy=policy) for t in step.tokens]
    assert found == expected


HOT = Sampling(temperature=1.0, top_p=0.9)
ALL_RULES = [
    Rules(3, 20, drafter="own"),
    Rules(30, 12, sampling=replace(HOT, seed=1), drafter="own"),
    Rules(1, 25, penalty=1.3, logprobs=2, drafter="own"),
    Rules(9, 16, stop=True),
    Rules(20, 18, block=4, drafter="own"),
    Rules(5, 1, drafter="own"),
    Rules(12, 22, sampling=replace(HOT, seed=2), penalty=1.1, stop=True, drafter="own"),
    Rules(3, 20, logprobs=0),
    Rules(17, 10, drafter="prompt-lookup"),
]


@pytest.mark.sampled(24, 6)
@pytest.mark.parametrize(("family", "kind"), mostly_slow(FAMILIES, KINDS))
def test_sequences_that_come_and_go_get_what_they_get_alone(family: str, kind: str):
    own = [replace(rules, drafter=kind) if rules.drafter == "own" else rules for rules in ALL_RULES]
    serve(family, own, "native", seed=len(family) + len(kind))


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("policy", ["lattice:e8,152@all", "sink-window:2,6"])
def test_sequences_under_a_policy_come_and_go_too(policy: str):
    own = [replace(rules, drafter="dflash") if rules.drafter == "own" else rules for rules in ALL_RULES]
    serve("gemma3_text", own, policy, seed=3)


def test_an_error_of_one_sequence_is_its_own():
    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.shape[0] > 8:
            raise RuntimeError("broken")
        return logits

    target, rules = target_of("llama"), Rules(3, 14)
    guests = [new_guest("llama", rules, "native") for _ in range(3)]
    guests[1].row.selector.processors = [broken]
    with closing(ContinuousBatch(target, lambda _: FixedDraftLength(1))) as batch:
        for guest in guests:
            batch.add(guest.row)
        errors = []
        while batch.rows:
            for row, step in batch.step():
                if isinstance(step, Exception):
                    errors.append((row, str(step)))
                else:
                    next(guest for guest in guests if guest.row is row).take(step)
                if row.finish:
                    batch.remove(row)
    assert errors == [(guests[1].row, "broken")]
    guests[0].check()
    guests[2].check()


def test_sequences_share_a_batch_where_their_caches_have_one_layout():
    def layout(policy: str, headroom: int = HEADROOM, family: str = "gemma3_text") -> object:
        model = target_of(family).model
        return layout_of(model, parse_policy(policy).new_caches(model, headroom))

    assert layout("native") == layout("native")
    assert layout("native") != layout("native", headroom=4)  # of a ring
    assert (
        len({layout(policy) for policy in ("native", "lattice:e8,10", "lattice:e8,11", "sink-window:4,16")})
        == 4
    )
