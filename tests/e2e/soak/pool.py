"""The requests of a soak, and what each is answered without other clients.

A course is a conversation: its later turns hold the answers of the earlier ones. Most have one turn. All are
greedy but those that are seeded. Of every prompt under every channel there are several variants (protocol,
block, drafter, choices, grammar, stop strings, limits), so that sequences of one kind meet those of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import anthropic
import openai

from engine.evaluation.prompts import load_prompts
from tests.e2e.engines import KEY, Serving
from tests.e2e.soak.protocols import FORMATS, LIMITS, Answer, answers_of

CHANNELS = ("native", "sliding-bounded-16", "sink-window-256", "affine8", "affine4", "rotated8", "rotated4")
CODED = ("lattice-d4", "lattice-e8", "lattice-packed")  # slower, so that there are fewer of them
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"drafter": "none"},
    {"drafter": "prompt-lookup"},
    {"block": 1},
    {"block": 4},
    {"block": 16},
    {"block": "auto", "stop": ["the", "8"]},
    {"stop": ["e"]},
)
LENGTHS = (1, 2, 7, 24, 48, 96, 160)
TURNS = ("How much is two and three?", "And who are you?", "Can you count from 3 to 11?", "Thank you.")
SEEDED = {"temperature": 0.8, "top_p": 0.95}
REQUIRED = ("model", "messages", "prompt", "input")  # what the official clients ask for by name
LONG = 2000  # tokens of a long prompt
WORDS = range(16, 1200)  # tokens of the shipped vocabulary that are no marks

Said = Sequence[tuple[str, str]]  # (role, text), …


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        name: which one of the pool.
        kind: chat, text, turn, long or seeded.
        protocol: in which it is asked.
        body: of the request, without `stream`.
        count: choices of the answer.
    """

    name: str
    kind: str
    protocol: str
    body: dict[str, Any]
    count: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        """What the official client takes; what is not demanded by name goes to `extra_body`."""
        named = (*REQUIRED, *(("max_tokens",) if self.protocol == "messages" else ()))
        rest = {key: value for key, value in self.body.items() if key not in named}
        return {key: self.body[key] for key in named if key in self.body} | {"extra_body": rest}


@dataclass(frozen=True)
class Expected:
    """A request, and its answer when it was alone."""

    ask: Ask
    answers: tuple[Answer, ...]


class Asker:
    """Asks one server, one request after the other, by the official clients."""

    def __init__(self, server: Serving) -> None:
        self._openai = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=300)
        self._anthropic = anthropic.Anthropic(base_url=server.root, api_key=KEY, max_retries=0, timeout=300)

    def ask(self, ask: Ask) -> tuple[Answer, ...]:
        """The choices of the whole answer."""
        reply = create_of(self._openai, self._anthropic, ask.protocol)(**ask.arguments)
        return answers_of(ask.protocol, reply.model_dump(warnings=False))


def create_of(ours: Any, theirs: Any, protocol: str) -> Any:
    """The method of OpenAI's or Anthropic's client that asks in a protocol."""
    methods = {
        "chat": ours.chat.completions,
        "text": ours.completions,
        "responses": ours.responses,
        "messages": theirs.messages,
    }
    return methods[protocol].create


def collect(server: Serving, seed: int, count: int) -> list[list[Expected]]:
    """So many courses of one turn and a sixth as many of several, asked one after the other.

    Args:
        server: keeps no prompts, so that nothing is left of one request when the next one comes.
        seed: decides the requests.
        count: courses of one turn.
    """
    asker, random = Asker(server), Random(seed)  # noqa: S311 - to be repeated

    def alone(ask: Ask) -> Expected:
        return Expected(ask, asker.ask(ask))

    courses = [[alone(ask)] for ask in _singles(random, count)]
    for number in range(max(1, count // 6)):
        courses.append(_conversation(random, number, alone))
    courses += [[alone(ask)] for ask in long_asks(seed, max(1, count // 20))]
    return courses


def long_asks(seed: int, count: int) -> list[Ask]:
    """Requests of `LONG` tokens that share no beginning."""
    random, found = Random(f"long {seed}"), []  # noqa: S311 - to be repeated
    for number in range(count):
        channel = CHANNELS[number % len(CHANNELS)]
        body = {"model": f"demo@{channel}", "max_tokens": 16, "return_token_ids": True}
        body["prompt"] = [random.choice(WORDS) for _ in range(LONG)]
        found.append(Ask(f"long {number} {channel}", "long", "text", body))
    return found


def _singles(random: Random, count: int) -> Iterator[Ask]:
    prompts = [prompt for name in ("code", "chat", "retrieval") for prompt in load_prompts(name)]
    for number in range(count):
        prompt = random.choice(prompts)
        channel = random.choice(CODED if number % 6 == 5 else CHANNELS)
        options, kind, choices = _common(random, channel), "chat", 1
        protocol = random.choice(("chat", "chat", "responses", "messages"))
        said = prompt.messages or (("user", prompt.text or ""),)
        if prompt.messages is None and random.random() < 0.6:
            protocol = kind = "text"
        if random.random() < 0.15:
            options |= FORMATS[protocol] | {"limit": max(24, options["limit"])}
            options.pop("stop", None)
        if random.random() < 0.25:
            kind = "seeded"
            options |= SEEDED | {"seed": random.randrange(1000)}
        body = body_of(protocol, said, options)
        if protocol in {"chat", "text"} and random.random() < 0.2:
            body["n"] = choices = random.randrange(2, 5)
        if protocol == "text" and random.random() < 0.15:
            body["prompt"] = [body["prompt"], random.choice(TURNS)]
            choices *= 2
        yield Ask(f"{kind} {number}: {protocol} {prompt.id} {channel}", kind, protocol, body, choices)


def _conversation(random: Random, number: int, alone: Any) -> list[Expected]:
    channel = random.choice(CHANNELS)
    common = _common(random, channel) | {"limit": 48}
    protocol = ("chat", "responses", "messages")[number % 3]
    messages: list[tuple[str, str]] = []
    course: list[Expected] = []
    for index, said in enumerate(random.sample(TURNS, 3)):
        messages = [*messages, ("user", said)]
        body = body_of(protocol, messages, common)
        course.append(alone(Ask(f"turn {number}.{index} {protocol} {channel}", "turn", protocol, body)))
        # a text of nothing is no turn of Anthropic's
        messages = [*messages, ("assistant", course[-1].answers[0].text or "…")]
    return course


def _common(random: Random, channel: str) -> dict[str, Any]:
    named = random.random() < 0.5
    model = {"model": f"demo@{channel}"} if named else {"model": "demo", "kv_channel": channel}
    limit = random.choices(LENGTHS, (1, 1, 2, 4, 4, 2, 1))[0]
    return {**model, "limit": limit, "return_token_ids": True, **random.choice(VARIANTS)}


def body_of(protocol: str, said: Said, options: dict[str, Any]) -> dict[str, Any]:
    """The request for what follows, in the protocol's fields.

    Args:
        protocol: one of the four.
        said: roles and texts; a text completion continues the last text.
        options: fields; `limit` and `stop` get the protocol's names.
    """
    body = dict(options)
    body[LIMITS.get(protocol, "max_tokens")] = body.pop("limit")
    stop = body.pop("stop", None)
    if stop and protocol != "responses":  # which has none
        body["stop_sequences" if protocol == "messages" else "stop"] = stop
    if protocol == "text":
        return body | {"prompt": said[-1][1]}
    turns = [{"role": role, "content": text} for role, text in said]
    return body | {"input" if protocol == "responses" else "messages": turns}
