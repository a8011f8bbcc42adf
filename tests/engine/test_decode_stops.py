"""Stop strings through decoding: the text ends before them to the character, at every block length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from engine.cache.transaction import new_caches
from engine.config import Engine, Options, open_engine
from engine.decode import Step, decode
from engine.detokenize import TextStream, text_of
from engine.draft_length import AdaptiveDraftLength, FixedDraftLength
from engine.drafters.prompt_lookup import PromptLookup
from engine.evaluation.prompts import encode, load_prompts
from engine.stops import Stops
from engine.target.loading import SHIPPED_DRAFTER
from tests.engine import tiny

COUNT = 40
CHOICES = {
    "plain": partial(FixedDraftLength, 1),
    **{f"block {block}": partial(FixedDraftLength, block) for block in (3, 8, 16)},
    "auto": partial(AdaptiveDraftLength, 8),
}


@pytest.fixture(scope="module")
def shipped() -> Engine:
    return open_engine(Options(drafter=str(SHIPPED_DRAFTER)))


class Text:
    """The plain continuation of a shipped prompt, and what the engine makes of it with stop strings."""

    def __init__(self, engine: Engine, prompts: str = "code", number: int = 1) -> None:
        loaded = engine.target
        self.target, self.tokenizer = loaded.target, loaded.tokenizer
        assert engine.drafter is not None
        self.drafters = (engine.drafter.drafter, PromptLookup())
        prompt = load_prompts(prompts, limit=number)[-1]
        self.prompt = encode(prompt, loaded.tokenizer, loaded.target.vocab_size, loaded.context)
        self.tokens = tiny.plain_tokens(loaded.target.model, self.prompt, COUNT)
        self.text = text_of(loaded.tokenizer, self.tokens, Stops())

    def tokens_until(self, stop: str) -> list[int]:
        """The shortest beginning whose text holds the stop string."""
        ends = (n for n in range(1, COUNT + 1) if stop in text_of(self.tokenizer, self.tokens[:n], Stops()))
        return self.tokens[: next(ends)]

    def stopped(
        self,
        texts: Sequence[str],
        draft_length: FixedDraftLength | AdaptiveDraftLength,
        which: int,
        count: int,
    ) -> list[Step]:
        """The steps; that text and caches are exact is checked here."""
        stops, caches = Stops(texts=texts, tokenizer=self.tokenizer), new_caches(self.target.model, 16)
        stream, shown, emitted, steps = TextStream(self.tokenizer, stops), "", [], []
        for step in decode(
            self.target,
            self.drafters[which],
            self.prompt,
            max_tokens=count,
            stops=stops,
            draft_length=draft_length,
            caches=caches,
        ):
            shown += stream.add(step.tokens)
            emitted.extend(step.tokens)
            steps.append(step)
            assert not any(stop in shown for stop in texts)
        shown += stream.finish()
        assert shown == text_of(self.tokenizer, emitted, stops)
        assert {cache.offset for cache in caches} == {len(self.prompt) + len(emitted) - 1}
        assert all(step.finish is None for step in steps[:-1])
        self.shown, self.emitted, self.finish = shown, emitted, steps[-1].finish
        return steps


@pytest.fixture(scope="module")
def text(shipped: Engine) -> Text:
    return Text(shipped)


@pytest.fixture(scope="module")
def counting(shipped: Engine) -> Text:
    """5, 6, 7, …: every space is a token of its own, which detokenizers hold back until the next one."""
    return Text(shipped, "chat", number=3)


@pytest.mark.sampled(14, 3)
@pytest.mark.parametrize("draft_length", CHOICES)
@pytest.mark.parametrize("which", [0, 1], ids=["dflash", "prompt-lookup"])
def test_the_text_ends_before_the_stop_string_wherever_it_lies(text: Text, draft_length: str, which: int):
    stops = [text.text[at : at + size] for size, at in [(1, 9), (3, 20), (9, 31), (25, 12), (4, 60)]]
    for stop in stops:
        text.stopped([stop], CHOICES[draft_length](), which, COUNT)
        assert text.shown == text.text[: text.text.index(stop)], stop
        assert text.emitted == text.tokens_until(stop), stop
        assert text.finish == "stop"


@pytest.mark.slow
def test_a_stop_string_is_found_that_begins_in_one_block_and_ends_in_the_next(text: Text):
    steps = text.stopped(["no such text"], FixedDraftLength(4), 0, COUNT)
    assert (text.finish, text.shown, text.emitted) == ("length", text.text, text.tokens)
    spans = 0
    done = 0
    for step in steps[:-1]:
        done += len(step.tokens)
        before = len(text_of(text.tokenizer, text.tokens[:done], Stops()))
        stop = text.text[before - 2 : before + 2]
        if text.text.index(stop) != before - 2:
            continue
        spans += 1
        text.stopped([stop], FixedDraftLength(4), 0, COUNT)
        assert text.shown == text.text[: before - 2]
    assert spans > 3


def test_the_first_of_several_stop_strings_to_be_complete_ends_the_text(text: Text):
    first, second = text.text[30:34], text.text[18:24]
    text.stopped([first, second, "no such text"], FixedDraftLength(8), 0, COUNT)
    assert text.shown == text.text[: min(text.text.index(first), text.text.index(second))]


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("draft_length", ["plain", "block 8"])
def test_the_limit_is_exact_before_at_and_after_a_stop_string(text: Text, draft_length: str):
    stop = text.text[40:46]
    needed = len(text.tokens_until(stop))
    for count in (needed - 1, needed, needed + 1):
        text.stopped([stop], CHOICES[draft_length](), 0, count)
        assert len(text.emitted) == min(count, needed)
        assert text.finish == ("length" if count < needed else "stop")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("draft_length", CHOICES)
def test_a_stop_string_that_ends_in_a_space_ends_the_text_with_the_space(counting: Text, draft_length: str):
    for stop in (" ", ", ", "7, ", ", 6, 7, "):
        counting.stopped([stop], CHOICES[draft_length](), 0, COUNT)
        assert (counting.finish, counting.shown) == ("stop", counting.text[: counting.text.index(stop)])
        assert counting.emitted == counting.tokens_until(stop), "a token late"
        assert counting.tokenizer.decode(counting.emitted).endswith(stop)


def test_a_stop_string_may_end_with_the_last_space_before_the_limit(counting: Text):
    needed = len(counting.tokens_until("8, "))
    counting.stopped(["8, "], FixedDraftLength(4), 0, needed)
    assert (counting.finish, len(counting.emitted)) == ("stop", needed)


def test_a_stop_string_of_the_prompt_alone_ends_nothing(text: Text):
    prompt_text = text.tokenizer.decode(text.prompt)
    stop = next(
        part for at in range(len(prompt_text) - 12) if (part := prompt_text[at : at + 12]) not in text.text
    )
    text.stopped([stop], FixedDraftLength(8), 0, COUNT)
    assert (text.finish, text.shown) == ("length", text.text)
