"""The four protocols as JSON: how a conversation is asked for, and what a whole reply or a stream answers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

PATHS = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
LIMITS = {"responses": "max_output_tokens"}  # the field's name where it is not `max_tokens`
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "name": {"enum": ["table", "river", "window"]}},
    "required": ["count", "name"],
    "additionalProperties": False,
}
NAMED = {"name": "answer", "schema": SCHEMA}
FORMATS: dict[str, dict[str, Any]] = {  # the fields that bind an answer to `SCHEMA`
    "chat": {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    "text": {"guided_json": SCHEMA},
    "responses": {"text": {"format": {"type": "json_schema", **NAMED}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@dataclass(frozen=True)
class Answer:
    """What came back: one choice.

    Attributes:
        text: of the answer.
        finish: why it ended, in the protocol's word.
        tokens: of the answer.
        prompt: tokens of the prompt.
        cached_from: where the beginning of its prompt was.
        batch: sequences of the largest batch it was decoded in.
    """

    text: str
    finish: str
    tokens: tuple[int, ...]
    prompt: tuple[int, ...]
    cached_from: str | None = field(default=None, compare=False)
    batch: int = field(default=1, compare=False)


@dataclass
class Reader:
    """Reads an answer's events as they come; choices are told apart by their index.

    Attributes:
        protocol: one of `PATHS`.
        texts: so far.
    """

    protocol: str
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    _ends: dict[int, str] = field(default_factory=dict)
    _facts: dict[int, dict[str, Any]] = field(default_factory=dict)  # `x_kakeya` of each choice

    def take(self, event: dict[str, Any]) -> None:
        """Read one event."""
        match self.protocol:
            case "responses":
                if event["type"] == "response.output_text.delta":
                    self.texts[0] += event["delta"]
                elif event["type"] in {"response.completed", "response.incomplete"}:
                    self._end(0, event["response"]["status"], event["response"]["x_kakeya"])
            case "messages":
                if event["type"] == "content_block_delta":
                    self.texts[0] += event["delta"].get("text") or ""
                elif event["type"] == "message_delta":
                    self._end(0, event["delta"]["stop_reason"], event["x_kakeya"])
            case _:
                for choice in event["choices"]:
                    said = choice["delta"].get("content") if "delta" in choice else choice["text"]
                    self.texts[choice["index"]] += said or ""
                    self._end(choice["index"], choice["finish_reason"], choice.get("x_kakeya"))
                self._end(0, None, event.get("x_kakeya"))

    def _end(self, index: int, finish: str | None, facts: dict[str, Any] | None) -> None:
        if finish:
            self._ends[index] = finish
        if facts and facts.get("token_ids") is not None:  # a sum of several choices has none
            self._facts[index] = facts

    def answers(self, count: int) -> tuple[Answer, ...]:
        """All choices.

        Raises:
            ValueError: it did not come to its end, and no client had asked for that.
        """
        if set(self._ends) != set(range(count)) or set(self._facts) != set(range(count)):
            raise ValueError(f"the stream broke off after {dict(self.texts)!r}")
        return tuple(_answer(self.texts[at], self._ends[at], self._facts[at]) for at in range(count))


def answers_of(protocol: str, reply: dict[str, Any]) -> tuple[Answer, ...]:
    """The choices of a whole reply."""
    match protocol:
        case "responses":
            parts = [part for item in reply["output"] for part in item["content"]]
            return (_answer(_joined(parts), reply["status"], reply["x_kakeya"]),)
        case "messages":
            return (_answer(_joined(reply["content"]), reply["stop_reason"], reply["x_kakeya"]),)
    found = []
    for choice in reply["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        found.append(
            _answer(text or "", choice["finish_reason"], choice.get("x_kakeya") or reply["x_kakeya"])
        )
    return tuple(found)


def _joined(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def _answer(text: str, finish: str, facts: dict[str, Any]) -> Answer:
    tokens, prompt = tuple(facts["token_ids"]), tuple(facts["prompt_token_ids"])
    return Answer(text, finish, tokens, prompt, facts["cached_from"], facts["batch"])
