"""Switches of the chat template reach it or are refused; answers are scored without their reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigurationError, PromptError
from engine.evaluation.prompts import Prompt, answer_of, raw_prompt, tokens_of
from engine.generate import ChatSwitches, chat_tokens
from tests.engine import tiny

TURNS = [("user", "hi")]
THINKS = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{% if message['role'] != 'system' %}<{{ message['role'] }}>"
    "{{ message['content'] }}{% endif %}{% endfor %}<assistant>"
)


def tokenizer_with(folder: Path, template: str | None) -> Any:
    """The tiny target's tokenizer with another chat template."""
    from mlx_lm.utils import load_tokenizer

    path = tiny.save_target(folder / "model")
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return load_tokenizer(path)


def text(tokenizer: Any, switches: ChatSwitches, turns: list[tuple[str, str]] = TURNS) -> str:
    return str(tokenizer.decode(chat_tokens(turns, tokenizer, switches, "p")))


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_is_passed_to_a_template_that_knows_it(tmp_path: Path, name: str):
    tokenizer = tokenizer_with(tmp_path, THINKS.replace("enable_thinking", name))
    assert text(tokenizer, ChatSwitches(thinking="on")) == "<user>hi<assistant><think>"
    assert text(tokenizer, ChatSwitches(thinking="off")) == "<user>hi<assistant>"


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_thinking_is_refused_by_a_template_that_ignores_it(tmp_path: Path, thinking: str):
    tokenizer = tokenizer_with(tmp_path, PLAIN)
    assert text(tokenizer, ChatSwitches()) == "<user>hi<assistant>"
    with pytest.raises(ConfigurationError, match=f"--thinking {thinking}: .* has no such switch"):
        text(tokenizer, ChatSwitches(thinking=thinking))


def test_a_channel_prefix_begins_the_models_turn(tmp_path: Path):
    switches = ChatSwitches(channel_prefix="<|channel|>final<|message|>")
    shown = text(tokenizer_with(tmp_path, PLAIN), switches)
    assert shown == "<user>hi<assistant><|channel|>final<|message|>"


def test_a_system_turn_comes_first_once_and_is_not_lost(tmp_path: Path):
    tokenizer = tokenizer_with(tmp_path, THINKS)
    switches = ChatSwitches(system="Be brief.", thinking="on")
    assert text(tokenizer, switches) == "<system>Be brief.<user>hi<assistant><think>"
    with pytest.raises(PromptError, match="system turn of its own"):
        text(tokenizer, switches, [("system", "Be long."), *TURNS])
    with pytest.raises(ConfigurationError, match="ignores system turns"):
        text(tokenizer_with(tmp_path / "other", PLAIN), ChatSwitches(system="Be brief."))


def test_a_text_becomes_a_users_turn_where_it_is_to_be_one(tmp_path: Path):
    tokenizer = tokenizer_with(tmp_path, PLAIN)

    def shown(prompt: Prompt, **switches: Any) -> str:
        return str(tokenizer.decode(tokens_of(prompt, tokenizer, ChatSwitches(**switches))))

    assert shown(raw_prompt("hi"), chat=True) == shown(raw_prompt(TURNS)) == "<user>hi<assistant>"
    assert shown(raw_prompt("hi"), channel_prefix="x") == "hi"


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (ChatSwitches(thinking="maybe"), "not one of default, on, off"),
        (ChatSwitches(channel_prefix=" "), "--channel-prefix must not be empty"),
        (ChatSwitches(system=""), "--system must not be empty"),
    ],
)
def test_switches_that_make_no_sense_are_refused(switches: ChatSwitches, message: str):
    with pytest.raises(ConfigurationError, match=message):
        switches.check()


class Spelled:
    """A tokenizer whose tokens are the characters' numbers."""

    @staticmethod
    def decode(tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def answer(said: str, prompt: str = "What is it?") -> str:
    return answer_of(Spelled(), [ord(letter) for letter in prompt], said)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (" It is 12.", " It is 12."),
        ("<think>13? 14?</think>\n\nIt is 12.", "It is 12."),
        ("<think>\n\n</think>\n\nIt is 12.", "It is 12."),
        ("13? 14?</think>\nIt is 12.", "It is 12."),
        ("<think>Perhaps 12, or", ""),
        ("One. <think>a</think>Two. <think>b</think>Three.", "One. Two. Three."),
        ("One. <think>a</think>Two. <think>b", "One. Two."),
        ("[THINK]13?[/THINK]12", "12"),
        ("<|channel>thought\n13?<channel|>12", "12"),
        ("<|think:start|>13?<|think:end|>12", "12"),
        ("<|channel|>analysis<|message|>13?<|end|><|start|>assistant<|channel|>final<|message|>12", "12"),
        ("<|channel|>analysis<|message|>13? 14?", ""),
    ],
)
def test_reasoning_is_removed_from_an_answer(said: str, left: str):
    assert answer(said) == left


def test_reasoning_opened_by_the_prompt_is_removed():
    assert answer("13? 14?", "hi<assistant><think>\n") == ""
    assert answer("13? 14?</think>12", "hi<assistant><think>\n") == "12"
    assert answer("13? 14?", "hi<assistant>") == "13? 14?"


def test_a_model_without_a_template_says_so(tmp_path: Path):
    with pytest.raises(PromptError, match="this model has no chat template; leave out --chat"):
        text(tokenizer_with(tmp_path, None), ChatSwitches())
