"""Fields that clients of other servers send: ignored by name, supported, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.engine.server import by_heart
from tests.engine.server.conftest import Running, start
from tests.engine.server.test_openai_client import LIST, SCHEMA, always, asked, completed


def body(**fields: Any) -> dict[str, Any]:
    return {"extra_body": fields}


BOOKKEEPING = {
    "user": "u",
    "store": True,
    "prediction": {"type": "content", "content": "x"},
    "cache_prompt": True,
    "x_trace": {"a": [1]},
    "best_of": 1,
    "modalities": ["text"],
    "colour": None,
    "stream_options": {"include_obfuscation": False, "include_usage": True},
}


def test_unknown_fields_are_ignored_and_listed_by_their_dotted_names(client: openai.OpenAI):
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Hi.", "cache_control": {}}], "id": 7},
        {"role": "assistant", "content": "Yes.", "annotations": [], "refusal": None},
        {"role": "user", "content": [{"type": "text", "text": "Hi.", "cache_control": {}}]},
    ]
    tools = [{**by_heart.WEATHER, "cached": True}]
    extra = {**BOOKKEEPING, "messages": talk, "tools": tools}
    expected = {
        *("user", "store", "prediction", "cache_prompt", "x_trace", "stream_options.include_obfuscation"),
        *("messages.content.cache_control", "messages.id", "tools.cached"),
    }
    whole = asked(client, max_tokens=2, extra_body=extra)
    assert sorted(whole.x_kakeya["ignored"]) == sorted(expected)
    *_, last = asked(client, max_tokens=2, stream=True, extra_body=extra)
    assert last.x_kakeya["ignored"] == whole.x_kakeya["ignored"]
    assert asked(client, max_tokens=2).x_kakeya["ignored"] == []


@pytest.mark.slow
def test_other_names_of_a_turns_parts_are_read(client: openai.OpenAI):
    def read(**turn: Any) -> Any:
        talk = [*LIST, {"role": "assistant", **turn}, {"role": "user", "content": "Why?"}]
        fields = {"model": "heart", "max_tokens": 1, "extra_body": {"return_token_ids": True}}
        return asked(client, messages=talk, **fields).x_kakeya["prompt_token_ids"]

    assert read(refusal="No.") == read(content="No.") != read(content="Yes.")
    assert read(content=[{"type": "refusal", "refusal": "No."}]) == read(content="No.")
    turn = {"content": "No.", "tool_calls": None}
    assert read(reasoning_content="so", **turn) == read(reasoning="so", **turn)


def test_the_list_of_ignored_fields_is_bounded(client: openai.OpenAI):
    many = {f"x{number}" + "y" * 500: 1 for number in range(200)}
    ignored = asked(client, max_tokens=1, extra_body=many).x_kakeya["ignored"]
    assert len(ignored) == 64
    assert max(map(len, ignored)) == 100


@pytest.mark.parametrize("effort", ["high", "max", "utmost"])
def test_an_effort_without_a_switch_is_ignored(client: openai.OpenAI, effort: Any):
    reply = asked(client, max_tokens=2, reasoning_effort=effort)
    assert reply.x_kakeya["ignored"] == ["reasoning_effort"]


def test_a_null_prompt_is_the_token_that_begins_a_text(client: openai.OpenAI):
    reply = completed(client, max_tokens=2, **body(prompt=None, return_token_ids=True))
    assert (reply.x_kakeya["prompt_token_ids"], reply.usage.prompt_tokens) == ([1], 1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose template reads the effort, and whose texts begin with no token of their own."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(by_heart.FOLDER, folder / "effort", ignore=shutil.ignore_patterns("DIGESTS.json"))
    file = folder / "effort" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("bos_token", None)
    config["chat_template"] = "{{ reasoning_effort }}\n" + config["chat_template"]
    file.write_text(json.dumps(config))
    registry = (
        f'default = "effort"\n[models.effort]\nsummary = "x"\ntarget = {{ path = "{folder / "effort"}" }}\n'
    )
    running = start(folder / "server", registry=registry)
    yield running
    running.stop()


@pytest.mark.slow
def test_what_a_model_lacks_or_knows_is_said(other: Running):
    client = other.client()
    with pytest.raises(openai.BadRequestError, match="send a text, or token ids") as caught:
        completed(client, model="effort", **body(prompt=None))
    assert caught.value.param == "prompt"
    effort: Any = "max"
    assert asked(client, model="effort", max_tokens=1, reasoning_effort=effort).x_kakeya["ignored"] == []
    effort = "utmost"
    with pytest.raises(openai.BadRequestError, match="'utmost' is none of none, minimal,") as caught:
        asked(client, model="effort", reasoning_effort=effort)
    assert caught.value.param == "reasoning_effort"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="effort", input="Hi.", reasoning={"effort": effort})
    assert caught.value.param == "reasoning.effort"


def test_as_many_choices_as_openai_takes(client: openai.OpenAI):
    reply = completed(client, n=18, max_tokens=1, **body(best_of=20))
    assert (len(reply.choices), reply.usage.completion_tokens) == (18, 20)


NOTHING: list[dict[str, Any]] = [
    {"top_p": 0, "temperature": 1},
    {"temperature": 1e-9},
    {"stop": ""},
    {"stop": []},
    {"stop": ["", ""]},
    {"tools": []},
    {"logit_bias": {}},
    {"metadata": {}},
    {"n": 1},
    {"top_logprobs": 0},
    {"logprobs": False},
    {"response_format": {"type": "text"}},
    body(ignore_eos=False, min_tokens=0, stop_token_ids=[], continue_final_message=False),
    body(skip_special_tokens=True, length_penalty=1.0, use_beam_search=False, guided_grammar=None),
    body(
        **dict.fromkeys(
            [
                *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs", "top_logprobs"),
                *("presence_penalty", "frequency_penalty", "logit_bias", "response_format", "tools", "user"),
                *("tool_choice", "parallel_tool_calls", "reasoning_effort", "stream", "stream_options"),
                *("functions", "function_call", "modalities", "audio", "verbosity", "metadata", "store"),
                "max_completion_tokens",
            ]
        )
    ),
]


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("fields", NOTHING, ids=lambda fields: str(fields)[:40])
def test_values_that_ask_for_nothing_change_nothing(client: openai.OpenAI, fields: dict[str, Any]):
    expected = asked(client, max_tokens=12).choices[0].message.content
    assert asked(client, max_tokens=12, **fields).choices[0].message.content == expected


OUTPUT_CHANGES: dict[str, tuple[Any, Any]] = {  # field -> a value that asks for something, one that does not
    "repeat_last_n": (8, None),
    "custom_logit_processor": ("x", ""),
    "sampling_seed": (7, None),
    "thinking_token_budget": (9, -1),
    "repetition_detection": ({"min_pattern_size": 2}, None),
    "think": (True, None),
    "num_predict": (9, -1),
    "adapters": ("folder", None),
    "repetition_context_size": (9, 20),
    "presence_context_size": (100, 20),
    "frequency_context_size": (9, 20),
    "t_max_predict_ms": (500, -1),
    "no_repeat_ngram_size": (3, 0),
    "moderation": ({"model": "x"}, None),
}


def test_fields_that_would_change_the_output_are_refused_by_name(client: openai.OpenAI):
    for name, (value, _) in OUTPUT_CHANGES.items():
        with pytest.raises(openai.InternalServerError, match=name) as caught:
            asked(client, **body(**{name: value}))
        assert (caught.value.status_code, caught.value.param) == (501, name)
    neutral = {name: value for name, (_, value) in OUTPUT_CHANGES.items()}
    assert asked(client, max_tokens=1, **body(**neutral)).x_kakeya["ignored"] == []


LIMIT = "stop has 17 items, and at most 16 are accepted"
REMEDIES = [
    (
        {"verbosity": "low"},
        501,
        'verbosity: "low" is not supported by this server; leave it out or send "medium"',
    ),
    (body(moderation={"a": "b" * 200}), 501, 'moderation: {"a": "b'),
    (body(num_predict=9), 501, "leave it out or send -1; max_tokens asks for it here"),
    (
        body(length_penalty=2),
        501,
        "length_penalty: 2 is not supported by this server; leave it out or send 1",
    ),
    ({"stop": list("abcdefghijklmnopq")}, 400, LIMIT),
    ({"messages": []}, 400, "messages is empty; send a message or more"),
]


@pytest.mark.parametrize(("fields", "status", "says"), REMEDIES, ids=lambda value: str(value)[:40])
def test_a_refusal_says_the_value_and_what_to_send(
    client: openai.OpenAI, fields: Any, status: int, says: str
):
    with pytest.raises(openai.APIStatusError) as caught:
        asked(client, **fields)
    message = str(caught.value.body["message"])  # type: ignore[index]
    assert (caught.value.status_code, says in message, len(message) < 250) == (status, True, True)


def test_an_empty_prompt_or_input_says_what_is_missing(client: openai.OpenAI):
    for ask in (
        lambda: completed(client, prompt=[]),
        lambda: client.responses.create(model="demo", input=[]),
    ):
        with pytest.raises(openai.BadRequestError, match="is empty; send a text"):
            ask()


def test_minus_one_is_no_limit_of_top_k(client: openai.OpenAI):
    drawn = [asked(client, temperature=1, seed=3, **body(top_k=most)) for most in (-1, 0)]
    assert drawn[0].choices[0].message.content == drawn[1].choices[0].message.content
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, **body(top_k=-2))
    assert caught.value.param == "top_k"


def test_text_completions_take_what_asks_for_nothing(client: openai.OpenAI):
    expected = completed(client, max_tokens=8).choices[0]
    fields = body(logprobs=False, echo=False, suffix="", best_of=1, stop=[""], n=None)
    assert completed(client, max_tokens=8, **fields).choices[0] == expected


@pytest.mark.slow
def test_max_tokens_above_the_limit_is_clamped_and_said(client: openai.OpenAI):
    for fields in ({"max_tokens": 100_000}, {"max_tokens": 3, "max_completion_tokens": 301}):
        reply = asked(client, **fields)
        assert (reply.x_kakeya["max_tokens_clamped_to"], reply.choices[0].finish_reason) == (300, "stop")
    assert "max_tokens_clamped_to" not in completed(client, max_tokens=4).x_kakeya


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start(tmp_path_factory.mktemp("strict"), "--strict")
    yield running
    running.stop()


@pytest.mark.slow
def test_a_strict_server_refuses_unknown_fields(strict: Running):
    client = strict.client()
    assert asked(client, max_tokens=2, user="u", metadata={"a": "b"}).x_kakeya["ignored"]
    for fields, param in (
        ({"colour": 1}, "colour"),
        ({"messages": [{**LIST[0], "colour": 1}]}, "messages.colour"),
        ({"stream_options": {"colour": 1}}, "stream_options.colour"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            asked(client, max_tokens=2, extra_body=fields)
        assert (caught.value.param, caught.value.code) == (param, "unknown_parameter")


# --- extensions -----------------------------------------------------------------------------------------


def ended(reply: Any) -> tuple[int, str]:
    return reply.usage.completion_tokens, reply.choices[0].finish_reason


@pytest.mark.slow
def test_what_the_context_leaves_bounds_max_tokens(client: openai.OpenAI):
    full = completed(client, prompt=[[5] * 1020], max_tokens=300, **body(ignore_eos=True))
    assert (full.usage.completion_tokens, full.x_kakeya["max_tokens_clamped_to"]) == (4, 4)


@pytest.mark.slow
def test_ignore_eos_goes_on_to_max_tokens(client: openai.OpenAI):
    count, why = ended(asked(client, max_tokens=60))
    assert (why, count < 60) == ("stop", True)
    assert ended(asked(client, max_tokens=60, **body(ignore_eos=True))) == (60, "length")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["default", "none"])
def test_min_tokens_holds_off_what_ends_the_text(client: openai.OpenAI, drafter: str):
    count, _ = ended(asked(client, max_tokens=80))
    longer = asked(client, max_tokens=80, **body(min_tokens=count + 5, drafter=drafter))
    assert ended(longer)[0] >= count + 5
    stopped = completed(client, stop="Sort", max_tokens=40, **body(ignore_eos=True, drafter=drafter))
    free = completed(client, max_tokens=40, **body(ignore_eos=True)).choices[0].text
    assert stopped.choices[0].text == free.partition("Sort")[0]


def test_min_tokens_holds_off_stop_strings(client: openai.OpenAI):
    fields = always("the") | {"max_tokens": 8, "stop": " the the"}
    assert completed(client, **fields).choices[0].text == ""
    held = completed(client, **fields, **body(min_tokens=5))
    assert ended(held) == (5, "stop")
    chunks = list(completed(client, stream=True, **fields, **body(min_tokens=5)))
    assert "".join(chunk.choices[0].text for chunk in chunks) == held.choices[0].text


def test_stop_token_ids_end_the_text_without_being_in_it(client: openai.OpenAI):
    fields = always("the")
    [token] = map(int, fields["logit_bias"])
    reply = completed(client, **fields, **body(stop_token_ids=[token]))
    assert (reply.choices[0].text, *ended(reply)) == ("", 1, "stop")


def test_a_prefilled_turn_of_the_assistant_is_continued(client: openai.OpenAI):
    whole = asked(client).choices[0].message.content
    talk = [*LIST, {"role": "assistant", "content": whole[:20]}]
    fields = body(continue_final_message=True, add_generation_prompt=False)
    assert asked(client, messages=talk, **fields).choices[0].message.content == whole[20:]
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, messages=talk, **body(continue_final_message=True, add_generation_prompt=True))
    assert caught.value.param == "add_generation_prompt"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
@pytest.mark.parametrize("model", ["demo", "heart"])
def test_guided_json_is_response_format_by_another_name(
    client: openai.OpenAI, fields: dict[str, Any], model: str
):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    given = {"model": model, "max_tokens": 120}
    expected = asked(client, response_format=form, **given).choices[0].message
    assert asked(client, **given, **body(**fields)).choices[0].message == expected
    json.loads(expected.content)


@pytest.mark.slow
def test_guided_choice_and_regex_bind_the_text(client: openai.OpenAI):
    for fields in ({"guided_choice": ["a/b", "c d"]}, {"structured_outputs": {"choice": ["a/b", "c d"]}}):
        assert completed(client, **body(**fields)).choices[0].text in {"a/b", "c d"}
    for fields in ({"guided_regex": "[0-9]{3}/[a-c]"}, {"structured_outputs": {"regex": "[0-9]{3}/[a-c]"}}):
        text = completed(client, **body(**fields)).choices[0].text
        assert (len(text), text[3], text[:3].isdigit(), text[4] in "abc") == (5, "/", True, True)
    riddle = [{"role": "user", "content": by_heart.RIDDLE}]
    reply = asked(client, model="heart", messages=riddle, **body(guided_choice=["yes", "no"]))
    assert reply.choices[0].message.content.strip() in {"yes", "no"}


@pytest.mark.slow
def test_continuous_usage_is_in_every_chunk(client: openai.OpenAI):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask in (asked, completed):
        chunks = list(ask(client, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == ask(client).usage.completion_tokens
        assert len(set(counts)) > 2


def test_a_request_that_is_not_supported_is_not_sent_again(server: Running):
    with pytest.raises(openai.InternalServerError) as caught:
        completed(server.client().with_options(max_retries=3), suffix="x")
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
