"""Sequences decoded together get the tokens they would have got alone, and leave the model as it was."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine import together
from engine.decode import Step, decode
from engine.detokenize import text_of
from engine.drafters.base import NOTHING, Draft, Drafter
from engine.errors import ConfigurationError, ModelError, PromptError
from engine.loading import tokenizer_of
from engine.pace import Adaptive, Fixed, Pace
from engine.sampling import Sampler, Sampling
from engine.stops import Stops
from engine.target import Target
from engine.together import Emitted, Request, decode_together
from tests.engine import families, tiny
from tests.engine.cache.invariants import failing
from tests.engine.random_drafters import make
from tests.engine.statistics import assert_drawn_from, joint_distribution

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "gemma4_text", "qwen3_5", "qwen3_next")
SCRIPTED = "scripted"
DRAFTERS = ("dflash", "prompt-lookup", "autoregressive", "prompt-lookup+dflash", SCRIPTED)
ALWAYS_DRAFTING = ("dflash", "dflash2", "autoregressive", "prompt-lookup+dflash")
PACES: dict[str, Callable[[], Pace]] = {
    **{f"block {block}": partial(Fixed, block) for block in (1, 2, 8)},
    "auto": partial(Adaptive, 8),
}
LENGTHS = (3, 4 * tiny.WINDOW + 2, 1, tiny.WINDOW)  # below, beyond and at the window
COUNT = 28


def mostly_slow(*axes: Iterable[Any]) -> list[Any]:
    """All combinations; a share of them is fast, in which each value of two axes meets each of the other."""
    sized = [list(enumerate(axis)) for axis in axes]
    rows = []
    for combined in product(*sized):
        slow = sum(index for index, _ in combined) % len(sized[-1])
        rows.append(pytest.param(*(value for _, value in combined), marks=[pytest.mark.slow] if slow else []))
    return rows


def prompt_of(length: int) -> tuple[int, ...]:
    random = tiny.seeded(length)
    return tuple(random.randrange(5, 60) for _ in range(length))


@cache
def target_of(family: str) -> Target:
    return Target(families.build(family))


@cache
def plain(family: str, length: int) -> list[int]:
    """mlx-lm's continuation, one prompt by itself."""
    return tiny.plain_tokens(target_of(family).model, prompt_of(length), COUNT)


class Scripted:
    """Knows the texts of all sequences, gets a share of their tokens wrong, and checks what it is told.

    It learns from the tokens observed which of the texts it is in. Some proposals are shorter than asked.
    """

    name = SCRIPTED
    block_size = 8
    tap_layers = (0, 2)
    nbytes = 0
    twins = 0

    def __init__(self, texts: Sequence[Sequence[int]], wrong: float = 0.3, seed: int = 0) -> None:
        self._texts, self._wrong, self._random = [list(text) for text in texts], wrong, tiny.seeded(seed)
        self.seen: list[int] = []

    def bind(self, target: Target) -> None:
        pass

    def twin(self) -> Scripted:
        self.twins += 1
        return Scripted(self._texts, self._wrong, self.twins)

    def start(self) -> None:
        self.seen = []

    def observe(self, tokens: Sequence[int], taps: mx.array | None) -> None:
        assert taps is not None
        assert taps.shape[:2] == (1, len(tokens)), "one row of taps for each token"
        self.seen.extend(tokens)
        assert self._matching(self.seen), "these tokens are no sequence's"

    def rewind(self, count: int) -> bool:
        return False

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        text = self._matching([*self.seen, bonus])[0]
        at = len(self.seen) + 1
        right = text[at : at + self._random.randint(0, count)]
        return Draft(
            mx.array([(t + (self._random.random() < self._wrong)) % tiny.VOCAB for t in right], mx.int32)
        )

    def _matching(self, start: list[int]) -> list[list[int]]:
        return [text for text in self._texts if text[: len(start)] == start]


class Silent:
    """A drafter that speaks only now and then, so that spells of plain steps begin and end."""

    name = "silent"
    block_size = 4
    tap_layers = ()
    nbytes = 0

    def __init__(self, seed: int = 0) -> None:
        self._random = tiny.seeded(seed)

    def bind(self, target: Target) -> None:
        pass

    def twin(self) -> Silent:
        return Silent(self._random.randrange(1000))

    def start(self) -> None:
        pass

    def observe(self, tokens: Sequence[int], taps: mx.array | None) -> None:
        assert taps is None

    def rewind(self, count: int) -> bool:
        return False

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        if self._random.random() < 0.9:
            return NOTHING
        return Draft(mx.array([7] * count, mx.int32))


class Seams:
    """A pace that goes back and forth between plain steps and blocks."""

    largest = 6

    def __init__(self) -> None:
        self._random = tiny.seeded(2)

    def start(self) -> None:
        pass

    def choose(self, remaining: int) -> int:
        return min(self._random.choice((1, 1, 1, 2, 6)), remaining)

    def record(self, block: int, accepted: int, seconds: float) -> None:
        assert 0 <= accepted < block
        assert seconds > 0


def drafter_of(kind: str, family: str) -> Drafter:
    if kind == SCRIPTED:
        return Scripted([[*prompt_of(length), *plain(family, length)] for length in LENGTHS])
    return make(kind, target_of(family))


def gather(rounds: Any, count: int) -> list[list[Emitted]]:
    """What each request got."""
    found: list[list[Emitted]] = [[] for _ in range(count)]
    for emitted in rounds:
        for each in emitted:
            found[each.request].append(each)
    return found


def tokens_of(steps: Sequence[Emitted | Step]) -> list[int]:
    return [token for each in steps for token in (each.step if isinstance(each, Emitted) else each).tokens]


def run(
    family: str, kind: str | None, pace: Pace, requests: Sequence[Request], chunk: int = 2048
) -> list[list[Emitted]]:
    drafter = drafter_of(kind, family) if kind else None
    rounds = decode_together(target_of(family), drafter, requests, pace=pace, prefill_chunk=chunk)
    return gather(rounds, len(requests))


def classes_of(model: Any) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize(("family", "kind", "pace"), mostly_slow(FAMILIES, DRAFTERS, PACES))
def test_every_sequence_gets_the_tokens_it_gets_alone(family: str, kind: str, pace: str):
    before = classes_of(target_of(family).model)
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    found = run(family, kind, PACES[pace](), requests, chunk=5)
    for length, steps in zip(LENGTHS, found, strict=True):
        assert tokens_of(steps) == plain(family, length), f"the prompt of {length}"
        assert [each.step.finish for each in steps] == [None] * (len(steps) - 1) + ["length"]
    if kind == SCRIPTED and pace == "block 8":
        accepted = [[each.step.round.accepted for each in steps if each.step.round] for steps in found]
        assert len({tuple(row) for row in accepted}) == len(LENGTHS), "acceptance is not each one's own"
    assert classes_of(target_of(family).model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_plain_steps_in_turn_change_nothing(family: str):
    requests = [Request(prompt_of(length), COUNT - 3 * i) for i, length in enumerate(LENGTHS)]
    found = run(family, SCRIPTED, Seams(), requests)
    for length, request, steps in zip(LENGTHS, requests, found, strict=True):
        assert tokens_of(steps) == plain(family, length)[: request.max_tokens]
    blocks = [each.step.round.block for steps in found for each in steps if each.step.round]
    assert blocks.count(1) > 4
    assert max(blocks) > 2


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_drafters_that_fall_silent_and_speak_again_change_nothing(family: str):
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    found = gather(decode_together(target_of(family), Silent(), requests, pace=Fixed(4)), len(requests))
    assert [tokens_of(steps) for steps in found] == [plain(family, length) for length in LENGTHS]
    blocks = [each.step.round.block for steps in found for each in steps if each.step.round]
    assert blocks.count(1) > len(blocks) / 2
    assert max(blocks) == 4


@pytest.mark.parametrize(("family", "pace"), mostly_slow(FAMILIES, ("block 1", "block 8")))
def test_the_limit_of_each_is_exact(family: str, pace: str):
    drafter = drafter_of(SCRIPTED, family)
    for counts in (
        (1, 23, 7, 16),
        (9, 2, 22, 3),
        (4, 8, 5, 10),
        (13, 6, 19, 11),
        (12, 17, 15, 14),
        (18, 20, 21, 1),
    ):
        requests = [Request(prompt_of(length), count) for length, count in zip(LENGTHS, counts, strict=True)]
        rounds = decode_together(target_of(family), drafter, requests, pace=PACES[pace]())
        for length, count, steps in zip(LENGTHS, counts, gather(rounds, 4), strict=True):
            assert tokens_of(steps) == plain(family, length)[:count]
            assert steps[-1].step.finish == "length"


@pytest.mark.parametrize(("family", "pace"), mostly_slow(FAMILIES, PACES))
def test_a_stop_token_ends_its_sequence_alone(family: str, pace: str):
    places = (0, 9, 17, 3)  # the first of them ends with its first token
    requests, expected = [], []
    for length, place in zip(LENGTHS, places, strict=True):
        truth = plain(family, length)
        requests.append(Request(prompt_of(length), COUNT, Stops({truth[place]})))
        expected.append(truth[: truth.index(truth[place]) + 1])
    found = run(family, SCRIPTED, PACES[pace](), requests)
    assert [tokens_of(steps) for steps in found] == expected
    assert [steps[-1].step.finish for steps in found] == ["stop"] * 4


@pytest.mark.parametrize("pace", ["block 1", "block 8"])
def test_a_stop_string_ends_its_sequence_alone(tmp_path: Path, pace: str):
    tiny.save_tokenizer(tmp_path)
    tokenizer, family = tokenizer_of(tmp_path, None), "gemma3_text"

    def request(length: int, truth: list[int]) -> Request:
        readable = re.search("[!-~]{2}", text_of(tokenizer, truth, Stops())[3:])
        assert readable is not None
        return Request(prompt_of(length), COUNT, Stops((), (readable[0],), tokenizer))

    requests = [request(length, plain(family, length)) for length in LENGTHS]
    found = run(family, SCRIPTED, PACES[pace](), requests)
    for length, steps in zip(LENGTHS, found, strict=True):
        one = request(length, plain(family, length))
        alone = decode(target_of(family), None, one.prompt, max_tokens=COUNT, stops=one.stops)
        assert tokens_of(steps) == tokens_of(list(alone))
        assert len(tokens_of(steps)) < COUNT
        assert steps[-1].step.finish == "stop"


@pytest.mark.parametrize("kind", [None, *DRAFTERS])
def test_one_sequence_is_a_batch_too(kind: str | None):
    pace = Fixed(8) if kind else Fixed(1)
    [steps] = run("gemma3_text", kind, pace, [Request(prompt_of(LENGTHS[1]), COUNT)])
    assert tokens_of(steps) == plain("gemma3_text", LENGTHS[1])


def test_a_batch_may_end_with_its_first_tokens():
    requests = [Request(prompt_of(length), 1) for length in LENGTHS]
    found = run("qwen3_5", "dflash", Fixed(8), requests)
    assert [tokens_of(steps) for steps in found] == [plain("qwen3_5", length)[:1] for length in LENGTHS]
    assert all(steps[0].share and steps[0].share.nbytes for steps in found)


def test_the_same_prompt_may_be_there_several_times():
    requests = [Request(prompt_of(3), COUNT), Request(prompt_of(3), COUNT), Request(prompt_of(3), 11)]
    found = run("gemma3_text", "dflash", Fixed(4), requests)
    truth = plain("gemma3_text", 3)
    assert [tokens_of(steps) for steps in found] == [truth, truth, truth[:11]]


@pytest.mark.parametrize(
    ("block", "family", "kind"), mostly_slow((1, 4), ("llama", "gemma3_text", "qwen3_next"), ALWAYS_DRAFTING)
)
def test_a_seed_gives_the_text_it_gives_alone(family: str, kind: str, block: int):
    def sampler(index: int) -> Sampler | None:  # one of them is greedy
        return None if index == 2 else Sampler(Sampling(temperature=0.8, top_p=0.95, seed=index))

    counts = (28, 23, 26, 28)
    requests = [
        Request(prompt_of(length), count, sampler=sampler(index))
        for index, (length, count) in enumerate(zip(LENGTHS, counts, strict=True))
    ]
    found = run(family, kind, Fixed(block), requests)
    for index, request in enumerate(requests):
        alone = decode(
            target_of(family),
            drafter_of(kind, family),
            request.prompt,
            max_tokens=request.max_tokens,
            sampler=sampler(index),
            pace=Fixed(block),
        )
        assert tokens_of(found[index]) == tokens_of(list(alone)), f"sequence {index}"


@cache
def four_tokens() -> Target:
    """Four tokens, so that every continuation is likely enough to be counted."""
    changes = {"vocab_size": 4, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny.build("llama", seed=3, num_hidden_layers=2, intermediate_size=32, **changes)
    model.lm_head.weight = 0.5 * model.lm_head.weight
    return Target(model)


def draws_of(count: int) -> list[tuple[int, ...]]:
    """The first three tokens of many sequences decoded together, each with a seed of its own."""
    prompt, drafts = [0, 1, 2, 3, 1, 0, 2, 1], make("prompt-lookup", four_tokens())
    found: list[tuple[int, ...]] = []
    for start in range(0, count, 50):
        samplers = [Sampler(Sampling(temperature=1.0, seed=start + i)) for i in range(50)]
        requests = [Request(prompt, 3 + i % 3, sampler=sampler) for i, sampler in enumerate(samplers)]
        rounds = decode_together(four_tokens(), drafts, requests, pace=Fixed(3))
        found += [tuple(tokens_of(steps)[:3]) for steps in gather(rounds, 50)]
    return found


def test_drawn_tokens_have_the_targets_joint_distribution():
    exact = joint_distribution(four_tokens().model, [0, 1, 2, 3, 1, 0, 2, 1], Sampling(temperature=1.0))
    assert_drawn_from(draws_of(600), exact)


def test_a_wrong_acceptance_fails_the_same_test(monkeypatch: pytest.MonkeyPatch):
    def careless(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
        following = sampler.draw(sampler.distribution(logits)[-1:])
        return mx.concatenate([mx.array([len(draft)], mx.int32), draft.tokens, following])

    monkeypatch.setattr(together, "pack_sampled", careless)
    exact = joint_distribution(four_tokens().model, [0, 1, 2, 3, 1, 0, 2, 1], Sampling(temperature=1.0))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_drawn_from(draws_of(600), exact)


@pytest.mark.parametrize("pace", ["block 1", "block 8"])
@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "qwen3_next"])
def test_whoever_stops_listening_leaves_the_model_as_it_was(family: str, pace: str):
    target = target_of(family)
    before = classes_of(target.model)
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    for rounds_taken in (1, 4, 5, 6):
        rounds = decode_together(target, drafter_of("dflash", family), requests, pace=PACES[pace]())
        for _ in range(rounds_taken):
            next(rounds)
        rounds.close()
        assert classes_of(target.model) == before, f"after {rounds_taken} yields"
    found = run(family, "dflash", PACES[pace](), requests)
    assert [tokens_of(steps) for steps in found] == [plain(family, length) for length in LENGTHS]


@pytest.mark.parametrize("pace", ["block 1", "block 8"])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_an_exception_in_a_round_leaves_the_model_as_it_was(family: str, pace: str):
    target = target_of(family)
    before = classes_of(target.model)
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    for rounds_taken in (2, 4, 5):  # before a prompt, before a round, between rounds
        rounds = decode_together(target, drafter_of("dflash", family), requests, pace=PACES[pace]())
        for _ in range(rounds_taken):
            next(rounds)
        layer = target.model.layers[1]
        with failing(layer), pytest.raises(RuntimeError):
            list(rounds)
        assert classes_of(target.model) == before, f"after {rounds_taken} yields"
    assert tokens_of(run(family, "dflash", PACES[pace](), requests)[1]) == plain(family, LENGTHS[1])


def test_a_generator_nobody_finishes_gives_the_model_back():
    target = target_of("qwen3_5")
    before = classes_of(target.model)
    rounds = decode_together(
        target, drafter_of("dflash", "qwen3_5"), [Request(prompt_of(3), 9)], pace=Fixed(4)
    )
    next(rounds)
    next(rounds)
    assert classes_of(target.model) != before
    del rounds
    gc.collect()
    assert classes_of(target.model) == before


def test_the_prompts_are_handed_out_one_by_one_and_rounds_as_one():
    requests = [Request(prompt_of(length), 12) for length in LENGTHS]
    rounds = list(decode_together(target_of("gemma3_text"), None, requests))
    assert [[each.request for each in emitted] for emitted in rounds[:4]] == [[0], [1], [2], [3]]
    assert [[each.request for each in emitted] for emitted in rounds[4:]] == [[0, 1, 2, 3]] * 11


def test_what_a_sequence_held_is_told_when_it_ends():
    counts = (12, 28, 1, 20)
    requests = [Request(prompt_of(length), count) for length, count in zip(LENGTHS, counts, strict=True)]
    found = run("gemma3_text", SCRIPTED, Fixed(8), requests)
    for steps in found:
        assert [each.share is not None for each in steps] == [False] * (len(steps) - 1) + [True]
        share = steps[-1].share
        assert share is not None
        assert share.classes == {"RaggedKV": 6}
        rings, full = 4 * (tiny.WINDOW + 8), 2 * 256  # positions a sequence
        assert share.nbytes == (rings + full) * 2 * 2 * 8 * 4  # keys and values, heads, width, bytes


def test_a_round_reads_from_the_device_once(monkeypatch: pytest.MonkeyPatch):
    reads: list[int] = []

    def counted(array: mx.array) -> list[int]:
        reads.append(array.size)
        return [int(token) for token in array.tolist()]  # type: ignore[union-attr, arg-type]

    monkeypatch.setattr(together, "read_tokens", counted)
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    for block in (1, 8):
        reads.clear()
        rounds = decode_together(
            target_of("gemma3_text"), drafter_of("dflash", "gemma3_text"), requests, pace=Fixed(block)
        )
        assert len(list(rounds)) - len(requests) == len(reads)


def test_plain_steps_are_launched_before_the_last_ones_are_read(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    launch, read = together.launch, together.read_tokens
    monkeypatch.setattr(together, "launch", lambda *trees: (events.append("launch"), launch(*trees))[1])
    monkeypatch.setattr(together, "read_tokens", lambda array: (events.append("read"), read(array))[1])
    requests = [Request(prompt_of(3), 12), Request(prompt_of(1), 7)]
    for _ in decode_together(target_of("llama"), None, requests):
        events.append("yield")
    spell = events[2:]  # two prompts
    assert spell == ["launch", *["launch", "read", "yield"] * 10, "read", "yield"]


def test_the_next_drafts_are_launched_before_tokens_are_handed_out(monkeypatch: pytest.MonkeyPatch):
    proposals: list[int] = []
    drafter = drafter_of("dflash", "gemma3_text")
    propose = type(drafter).propose
    monkeypatch.setattr(
        type(drafter), "propose", lambda self, *given: (proposals.append(1), propose(self, *given))[1]
    )
    requests = [Request(prompt_of(3), 20), Request(prompt_of(1), 20)]
    rounds = decode_together(target_of("gemma3_text"), drafter, requests, pace=Fixed(4))
    next(rounds), next(rounds)
    assert not proposals
    next(rounds)
    assert len(proposals) == 4  # of the round just handed out, and of the next one
    rounds.close()


def test_bad_requests_are_refused_before_any_work():
    target = target_of("llama")
    with pytest.raises(ConfigurationError, match="nothing to decode"):
        next(decode_together(target, None, []))
    with pytest.raises(PromptError, match="empty"):
        next(decode_together(target, None, [Request([5], 3), Request([], 3)]))
    with pytest.raises(ConfigurationError, match="at least 1, not 0"):
        next(decode_together(target, None, [Request([5], 0)]))
    with pytest.raises(ConfigurationError, match="block of 4 needs a drafter"):
        next(decode_together(target, None, [Request([5], 3)], pace=Fixed(4)))


def test_a_model_whose_caches_cannot_be_merged_is_refused_by_name():
    from tests.engine.cache import models

    model = models.model("rwkv7")
    with pytest.raises(ModelError, match="rwkv7"):
        list(decode_together(Target(model), None, [Request([5, 6], 3), Request([7], 3)]))
