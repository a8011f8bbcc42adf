"""The tokenizer keeps digits and names whole and reads the same through mlx-lm."""

from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from engine.haystack_text import HELD_OUT, TRAIN, Fact, generator
from tools.demo_models import tokenizer
from tools.demo_models.corpora import chat
from tools.demo_models.corpora.document import text_of


@pytest.mark.slow
def test_digits_and_names_are_single_tokens(demo_tokenizer: tokenizer.DemoTokenizer) -> None:
    assert demo_tokenizer.count("4821") == 4
    for name in TRAIN.names + HELD_OUT.names:
        assert demo_tokenizer.count(f" {name}") == 1, name


def test_special_tokens_have_their_ids(demo_tokenizer: tokenizer.DemoTokenizer) -> None:
    assert demo_tokenizer.encode("".join(tokenizer.SPECIALS)) == tuple(range(8))
    assert tokenizer.SPECIALS[tokenizer.MASK] == "<mask>"
    assert tokenizer.SPECIALS[tokenizer.END] == "<end>"


def test_any_bytes_survive_a_round_trip(demo_tokenizer: tokenizer.DemoTokenizer) -> None:
    for text in ("naïve café ✓\n\t0x1F", "  leading", "日本", Fact("Alice", "0042").question):
        assert demo_tokenizer.decode(list(demo_tokenizer.encode(text))) == text


def test_mlx_lm_reads_it_with_bos_and_the_chat_template(
    demo_tokenizer: tokenizer.DemoTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(demo_tokenizer, tmp_path)
    stops = [tokenizer.EOS, tokenizer.END]
    loaded = load_tokenizer(tmp_path, eos_token_ids=stops)
    assert loaded.eos_token_ids == set(stops)
    assert loaded.encode(" The river") == [tokenizer.BOS, *demo_tokenizer.encode(" The river")]
    turn = chat.draw_turn(generator(1), TRAIN)
    messages = [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    asked = loaded.apply_chat_template(messages[:1], add_generation_prompt=True)
    assert loaded.decode(asked) == f"<bos><user>{turn.user}<end><assistant>"
    whole = loaded.apply_chat_template(messages, tokenize=False)
    assert whole == f"<bos><user>{turn.user}<end><assistant>{turn.assistant}<end>"


def test_the_chat_template_writes_what_training_reads(
    demo_tokenizer: tokenizer.DemoTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(demo_tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    turn = chat.draw_turn(generator(5), TRAIN)
    trained = text_of(chat.conversation(generator(5), TRAIN, turns=1))
    messages = [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    assert loaded.apply_chat_template(messages, tokenize=False) + "<eos>" == trained


def test_training_again_gives_the_same_tokenizer(demo_tokenizer: tokenizer.DemoTokenizer) -> None:
    assert tokenizer.train(seed=1, size=300).backend.to_str() == demo_tokenizer.backend.to_str()
