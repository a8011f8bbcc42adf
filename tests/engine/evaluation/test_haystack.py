"""Made-up retrieval prompts: from a seed, of the length asked for, the needle where it is said to be."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.errors import ConfigurationError, PromptError
from engine.evaluation.haystack import (
    DEPTHS,
    FACTS,
    Haystack,
    generate,
    refuse_near,
    retrieval_prompts,
)
from engine.evaluation.prompts import Prompt, load_prompts, tokens_of
from engine.generate import ChatSwitches
from engine.haystack_text import HELD_OUT, TRAIN, held_out_two_piece_names
from engine.target.loading import SHIPPED_TARGET, load_target

LONGEST = 26  # tokens of the longest sentence
TOLERANCE = 16  # tokens between the depth asked for and the one met


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_target(SHIPPED_TARGET).tokenizer


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def parts(prompt: Prompt) -> tuple[str, str, str]:
    """The text before the needle, between it and the question, and the question."""
    assert prompt.needle is not None
    assert prompt.text is not None
    before, after = prompt.text.split(f" {prompt.needle.sentence}")
    start = re.search(r" (Question: )?[Ww]hat is the secret", after)
    assert start is not None
    return before, after[: start.start()], after[start.start() :]


def met(tokenizer: Any, prompt: Prompt) -> tuple[float, int]:
    """Tokens before the needle in excess of its depth, and tokens of the haystack."""
    assert prompt.needle is not None
    before, after, _ = parts(prompt)
    hay = count(tokenizer, before) + count(tokenizer, after)
    return count(tokenizer, before) - prompt.needle.depth * hay, hay


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("context", [200, 480, 2000])
def test_needle_has_its_depth_and_prompt_its_length(tokenizer: Any, context: int, chat: bool):
    switches = ChatSwitches(chat=chat)
    made = generate(tokenizer, context=context, per_depth=4, seed=11, switches=switches)
    assert len(made) == 4 * len(DEPTHS)
    for prompt in made:
        assert context - LONGEST <= len(tokens_of(prompt, tokenizer, switches)) <= context
        excess, _ = met(tokenizer, prompt)
        assert abs(excess) <= TOLERANCE
    by_depth = {depth: [p for p in made if p.needle and p.needle.depth == depth] for depth in DEPTHS}
    assert {len(prompts) for prompts in by_depth.values()} == {4}
    assert all(parts(prompt)[0].strip() in ("", "Please read.") for prompt in by_depth[0.0])
    assert all(parts(prompt)[1] == "" for prompt in by_depth[1.0])


def test_the_answer_is_in_the_needle_alone_and_no_fact_shares_it(tokenizer: Any):
    for prompt in generate(tokenizer, context=400, per_depth=20, seed=12):
        assert prompt.needle is not None
        assert re.fullmatch("[0-9]{4}", prompt.needle.answer)
        assert prompt.needle.answer in prompt.needle.sentence
        assert prompt.needle.answer not in (prompt.without_needle().text or "")
        facts = re.findall(r"The secret code of (\w+) is (\d{4})\.", prompt.text or "")
        assert len(facts) == len(dict(facts)) == len({code for _, code in facts}) == FACTS


def test_names_are_held_out_from_training(tokenizer: Any):
    allowed = {*HELD_OUT.names, *held_out_two_piece_names()}
    for prompt in generate(tokenizer, context=300, per_depth=10, seed=13):
        names = set(re.findall(r"The secret code of (\w+) is", prompt.text or ""))
        assert names <= allowed
        assert names.isdisjoint(TRAIN.names)


def test_same_seed_gives_the_same_prompts(tokenizer: Any):
    one = generate(tokenizer, context=300, per_depth=2, seed=5)
    assert one == generate(tokenizer, context=300, per_depth=2, seed=5)
    assert one == generate(tokenizer, context=300, per_depth=3, seed=5)[: len(one)]
    other = generate(tokenizer, context=300, per_depth=2, seed=6)
    assert not {prompt.text for prompt in one} & {prompt.text for prompt in other}
    assert len({prompt.id for prompt in one}) == len(one)
    assert len({prompt.instruction for prompt in one}) == 1


@pytest.mark.parametrize("beyond", [64, 128])
def test_a_needle_is_kept_out_of_a_window(tokenizer: Any, beyond: int):
    for prompt in generate(tokenizer, context=400, per_depth=4, seed=7, beyond=beyond):
        _, after, question = parts(prompt)
        assert count(tokenizer, after + question) >= beyond
        assert prompt.needle is not None
        excess, hay = met(tokenizer, prompt)
        assert abs(excess) <= TOLERANCE
        assert prompt.needle.depth <= 1 - (beyond - count(tokenizer, question) - TOLERANCE) / hay


def test_prompts_whose_needle_is_in_a_window_are_refused(tokenizer: Any):
    refuse_near(generate(tokenizer, context=400, per_depth=1, beyond=68), tokenizer, 68)
    refuse_near(load_prompts("code", 1), tokenizer, 68)
    with pytest.raises(PromptError, match=r"needle-400-1-001 has \d+ tokens after its needle"):
        refuse_near(generate(tokenizer, context=400, per_depth=1), tokenizer, 68)


def test_a_context_that_is_too_short_is_refused(tokenizer: Any):
    with pytest.raises(PromptError, match="--context 60 is too short: facts and question take"):
        generate(tokenizer, context=60)
    with pytest.raises(PromptError, match="too short for a needle 180 tokens before the end"):
        generate(tokenizer, context=160, beyond=180)


@pytest.mark.parametrize(
    ("haystack", "message"),
    [
        (Haystack(context=0), "--context must be at least 1"),
        (Haystack(depths=(0.5, 1.5)), "--depths must be numbers from 0 to 1"),
        (Haystack(depths=(float("nan"),)), "--depths must be numbers from 0 to 1"),
        (Haystack(depths=(0.5, 0.5)), "names a depth twice"),
        (Haystack(per_depth=0), "--per-depth must be at least 1"),
    ],
)
def test_switches_that_make_no_sense_are_refused(haystack: Haystack, message: str):
    for checked in (haystack, haystack.filled("retrieval")):
        with pytest.raises(ConfigurationError, match=message):
            checked.check()


def test_shipped_set_is_read_unless_prompts_are_made_up(tokenizer: Any):
    def chosen(name: str, haystack: Haystack, limit: int | None = None) -> list[Prompt]:
        return retrieval_prompts(name, haystack, tokenizer, limit=limit, seed=0, switches=ChatSwitches())

    assert chosen("retrieval", Haystack(), 3) == load_prompts("retrieval", 3)
    made = chosen("generated", Haystack())
    assert made == generate(tokenizer)
    assert chosen("retrieval", Haystack(per_depth=4)) == made
    assert chosen("retrieval", Haystack().filled("generated"), 3) == made[:3]
    assert not Haystack().filled("retrieval").wanted
    assert not Haystack().filled("own.jsonl", unfit=True).wanted
    assert Haystack().filled("retrieval", unfit=True).wanted
    with pytest.raises(ConfigurationError, match="leave them out, or --prompts code"):
        chosen("code", Haystack(context=300))
