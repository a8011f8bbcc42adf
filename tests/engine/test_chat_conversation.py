"""Conversations in this process: what is computed once, what is kept of a stopped answer, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.chat import ChatOptions, Conversation, DoesNotFit, Transcript, Turn
from engine.errors import ConfigurationError, GenerationError, ModelError, PromptError, UnknownModel
from engine.registry import Places, Registry
from engine.sampling import Sampling
from engine.server.parsing import ParsedText
from engine.server.sequence import PrefillProgress
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET

pytestmark = pytest.mark.slow

LIST = "Make a numbered list of: table, window, river."
LONG = "The table is in the window. " * 90  # more than one chunk of a prompt
Told = Iterator[PrefillProgress | ParsedText | Turn]
Open = Callable[..., Conversation]


def copy_of(folder: Path, changes: dict[str, object], *, template: str | None = None) -> Path:
    """The shipped target with another configuration or chat template."""
    folder.mkdir()
    for file in SHIPPED_TARGET.iterdir():
        (folder / file.name).symlink_to(file)
    for name, table in (("config.json", changes), ("tokenizer_config.json", {"chat_template": template})):
        told = json.loads((folder / name).read_text())
        (folder / name).unlink()
        new = {key: value for key, value in table.items() if value is not None}
        (folder / name).write_text(json.dumps(told | new))
    return folder


@pytest.fixture(scope="module")
def shipped() -> Iterator[Conversation]:
    """A conversation with the demo pair; each test begins with an empty one."""
    with Conversation(Registry.load(), Places({}, Path("/nowhere")), ChatOptions()) as conversation:
        conversation.use("demo")
        yield conversation


@pytest.fixture
def demo(shipped: Conversation) -> Conversation:
    shipped.transcript, shipped.options = Transcript(), ChatOptions(max_tokens=48)
    shipped.use("demo")
    return shipped


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens conversations with a folder, and closes them."""
    conversations = []

    def open_one(folder: Path, **options: object) -> Conversation:
        registry = Registry.single(folder, str(SHIPPED_DRAFTER))
        conversations.append(Conversation(registry, Places.of_machine(), ChatOptions(**options)))  # type: ignore[arg-type]
        return conversations[-1]

    yield open_one
    for conversation in conversations:
        conversation.close()


def end(told: Told) -> Turn:
    """The last that is told."""
    *_, turn = told
    assert isinstance(turn, Turn)
    return turn


def test_the_next_turn_computes_only_what_is_new_and_says_the_same(demo: Conversation):
    first = end(demo.say(LIST))
    assert (first.cached_tokens, first.finish) == (0, "stop")
    second = end(demo.say("How many things are in it?"))
    assert second.cached_tokens >= first.usage.total_tokens - 1
    assert second.provenance is not None
    assert second.provenance.cached_tokens == second.cached_tokens
    said = demo.transcript
    end(demo.say(LONG))  # another text takes the session
    demo.transcript = Transcript().asked("Hello.").answered("Hello.", "")
    end(demo.say("Name the third word."))
    demo.transcript = said.undone()
    again = end(demo.say("How many things are in it?"))
    assert again.cached_tokens < second.cached_tokens
    assert again.content == second.content
    assert demo.transcript == said


def test_pieces_are_the_answer_and_figures_are_told(demo: Conversation):
    told = list(demo.say(LIST))
    turn = told[-1]
    assert isinstance(turn, Turn)
    assert "".join(piece.content for piece in told if isinstance(piece, ParsedText)) == turn.content
    assert turn.content.startswith("Here is")
    assert turn.usage.completion_tokens <= 48
    assert turn.tokens_per_s is not None
    assert turn.provenance is not None
    assert turn.acceptance_length == pytest.approx(turn.provenance.acceptance_length, abs=1e-4)
    assert [message.role for message in demo.transcript.messages] == ["user", "assistant"]


def test_an_answer_that_is_stopped_keeps_what_was_said(opened: Open, tmp_path: Path):
    endless = copy_of(tmp_path / "endless", {"eos_token_id": [3]})
    conversation = opened(endless, max_tokens=800)
    conversation.use("endless")
    told = conversation.say(LIST)
    pieces = []
    for event in told:
        if isinstance(event, ParsedText):
            pieces.append(event.content)
            conversation.stop()
        elif isinstance(event, Turn):
            assert event.finish == "interrupted"
            assert event.provenance is None
            assert event.content == "".join(pieces)
            assert 0 < event.usage.completion_tokens < 800
    assert conversation.transcript.turns[-1].content == "".join(pieces)
    conversation.options = replace(conversation.options, max_tokens=4)
    assert end(conversation.say("And then?")).cached_tokens > len(LIST.split())


def test_a_turn_to_which_nothing_was_said_is_not_kept(demo: Conversation):
    before = demo.transcript
    told = demo.say(LONG)
    demo.stop()
    turn = end(told)
    assert (turn.said, turn.finish, turn.usage.completion_tokens) == (False, "interrupted", 0)
    assert demo.transcript == before
    assert end(demo.say(LIST)).finish == "stop"


def test_an_answer_that_is_not_read_to_its_end_changes_nothing(demo: Conversation):
    told = demo.say(LIST)
    next(told)
    told.close()  # type: ignore[attr-defined]
    assert demo.transcript == Transcript()
    assert end(demo.say(LIST)).finish == "stop"


def test_what_does_not_fit_is_refused_and_the_conversation_kept(demo: Conversation):
    end(demo.say(LIST))
    before = demo.transcript
    with pytest.raises(DoesNotFit, match="demo takes 1024"):
        end(demo.say(LONG * 2))
    assert demo.transcript == before
    assert end(demo.say("Hello.")).cached_tokens > 0


def test_an_answer_ends_where_the_context_does(demo: Conversation):
    demo.options = ChatOptions(max_tokens=4096)
    turn = end(demo.say(LONG))
    assert turn.usage.total_tokens <= 1024


def test_an_answer_ends_where_the_registrys_smaller_context_does(tmp_path: Path):
    file = tmp_path / "models.toml"
    file.write_text('default = "one"\n[models.one]\nsummary = "a"\ntarget = "shipped"\ncontext = 40\n')
    with Conversation(Registry.load(file), Places.of_machine(), ChatOptions()) as conversation:
        conversation.use("one")
        turn = end(conversation.say(LIST))
    assert (turn.usage.total_tokens, turn.finish) == (40, "length")


def test_a_seed_repeats_the_conversation_but_not_the_answer(demo: Conversation):
    sampled = ChatOptions(max_tokens=24, sampling=Sampling(temperature=1.5, seed=11))

    def answers() -> list[str]:
        with Conversation(demo.registry, Places.of_machine(), sampled) as conversation:
            conversation.use("demo")
            first = end(conversation.say("Tell me of the river."))
            return [first.content, end(conversation.retry()).content]

    first, retried = answers()
    assert first != retried
    assert answers() == [first, retried]


def test_another_channel_or_none_answers(demo: Conversation):
    end(demo.say(LIST))
    demo.use("demo@affine8")
    assert demo.model_id == "demo@affine8"
    turn = end(demo.say("Hello."))
    assert turn.provenance is not None
    assert (turn.provenance.kv_channel, turn.cached_tokens) == ("affine8", 0)
    for wrong, kind in (("poems", UnknownModel), ("demo@best", UnknownModel), ("qwen3-4b", UnknownModel)):
        with pytest.raises(kind):
            demo.use(wrong)
    assert demo.model_id == "demo@affine8"
    assert end(demo.say("Hello.")).cached_tokens > 0


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(tmp_path: Path):
    broken = copy_of(tmp_path / "broken", {})
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").write_bytes(b"nothing")
    file = tmp_path / "models.toml"
    file.write_text(
        'default = "one"\n[models.one]\nsummary = "a"\ntarget = "shipped"\ndrafter = "shipped"\n'
        f'[models.two]\nsummary = "b"\ntarget = {{ path = "{broken}" }}\n'
    )
    options = ChatOptions(max_tokens=4)
    with Conversation(Registry.load(file), Places.of_machine(), options) as conversation:
        conversation.use("one")
        end(conversation.say("Hello."))
        with pytest.raises(ModelError, match="broken"):
            conversation.use("two")
        assert conversation.model_id == "one@native"
        end(conversation.say("Hello."))
        assert len(conversation.transcript.turns) == 4


def test_a_system_turn_is_read_and_one_that_changes_nothing_refused(
    demo: Conversation, opened: Open, tmp_path: Path
):
    demo.instruct("Be brief.")
    turn = end(demo.say("Hello."))
    demo.instruct(None)
    assert end(demo.retry()).usage.prompt_tokens < turn.usage.prompt_tokens
    deaf = "{{ messages[-1]['content'] }}"
    conversation = opened(copy_of(tmp_path / "deaf", {}, template=deaf))
    conversation.use("deaf")
    with pytest.raises(ConfigurationError, match="template of deaf ignores system turns"):
        conversation.instruct("Be brief.")
    assert conversation.transcript.system is None


def test_thinking_is_told_to_templates_that_listen_and_refused_with_others(
    demo: Conversation, opened: Open, tmp_path: Path
):
    demo.options = ChatOptions(thinking="on")
    with pytest.raises(
        ConfigurationError, match="--thinking on: the chat template of demo has no such switch"
    ):
        demo.use("demo")
    listening = "{% if enable_thinking %}river{% else %}table window{% endif %}"
    counts = []
    for thinking in ("on", "off"):
        folder = copy_of(tmp_path / thinking, {}, template=listening)
        conversation = opened(folder, thinking=thinking, max_tokens=1)
        conversation.use(thinking)
        counts.append(end(conversation.say("Hello.")).usage.prompt_tokens)
    assert counts[0] < counts[1]


def test_a_template_that_refuses_leaves_the_conversation_as_it_was(opened: Open, tmp_path: Path):
    refused = "{% if messages|length > 1 %}{{ raise_exception('one is enough') }}{% endif %}"
    template = refused + "{{ messages[0].content }}"
    conversation = opened(copy_of(tmp_path / "short", {}, template=template), max_tokens=4)
    conversation.use("short")
    end(conversation.say("Hello."))
    before = conversation.transcript
    with pytest.raises(PromptError, match="one is enough"):
        end(conversation.say("And then?"))
    assert conversation.transcript == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ChatOptions(max_tokens=0), "--max-tokens must be at least 1, not 0"),
        (ChatOptions(block="many"), "--block must be auto or a number"),
        (ChatOptions(thinking="maybe"), "--thinking 'maybe' is not one of default, on, off"),
        (ChatOptions(sampling=Sampling(top_p=2)), "top-p must lie in"),
    ],
)
def test_a_option_that_makes_no_sense_is_refused(options: ChatOptions, message: str):
    with pytest.raises(ConfigurationError, match=message):
        options.check()


def test_a_block_that_the_drafter_was_not_made_for_is_refused_turn_by_turn(demo: Conversation):
    demo.options = ChatOptions(max_tokens=8, block="400")
    with pytest.raises(ConfigurationError, match="block 400 is more than"):
        end(demo.say("Hello."))
    demo.options = ChatOptions(max_tokens=8, block="4")
    assert end(demo.say("Hello.")).verify_rounds > 0


def test_what_is_closed_says_so_instead_of_waiting():
    conversation = Conversation(Registry.load(), Places.of_machine(), ChatOptions())
    conversation.close()
    with pytest.raises(GenerationError, match="has ended"):
        conversation.use("demo")
