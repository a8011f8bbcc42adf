"""The requests of a soak, and what each is answered without other clients.

A course is a conversation: its later turns hold the answers of the earlier ones. Most have one turn. All are
greedy but those that are seeded. Of every prompt under every channel there are several variants (block,
drafter, stop strings, limits), so that sessions of one kind meet requests of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import openai

from engine.evaluation.prompts import load_prompts
from tests.e2e.engines import KEY, Serving

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
    {"stop": "e"},
)
LIMITS = (1, 2, 7, 24, 48, 96, 160)
TURNS = ("How much is two and three?", "And who are you?", "Can you count from 3 to 11?", "Thank you.")
SEEDED = {"temperature": 0.8, "top_p": 0.95}
OURS = ("kv_channel", "block", "drafter", "return_token_ids")


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        name: which one of the pool.
        kind: chat, text, turn or seeded.
        body: of the request, without `stream`.
    """

    name: str
    kind: str
    body: dict[str, Any]

    @property
    def chat(self) -> bool:
        """Whether it is a chat completion; a text completion otherwise."""
        return "messages" in self.body

    @property
    def arguments(self) -> dict[str, Any]:
        """What the official client takes; fields that it does not know go to `extra_body`."""
        body = {key: value for key, value in self.body.items() if key not in OURS}
        return body | {"extra_body": {key: self.body[key] for key in OURS if key in self.body}}


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        text: of the answer.
        finish: why it ended.
        tokens: of the answer.
        prompt: tokens of the prompt.
    """

    text: str
    finish: str
    tokens: tuple[int, ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """A request, and its answer when it was alone."""

    ask: Ask
    answer: Answer


def answer_of(choice: Any, how: dict[str, Any]) -> Answer:
    """An answer from a choice that arrived whole, and from `x_kakeya`."""
    text = choice.message.content if hasattr(choice, "message") else choice.text
    return Answer(text or "", choice.finish_reason, tuple(how["token_ids"]), tuple(how["prompt_token_ids"]))


def collect(server: Serving, seed: int, count: int) -> list[list[Expected]]:
    """So many courses of one turn and a sixth as many of several, asked one after the other.

    Args:
        server: keeps no sessions, so that nothing is left of one request when the next one comes.
        seed: decides the requests.
        count: courses of one turn.
    """
    client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=300)

    def alone(ask: Ask) -> Expected:
        create: Any = client.chat.completions.create if ask.chat else client.completions.create
        reply = create(**ask.arguments)
        return Expected(ask, answer_of(reply.choices[0], reply.x_kakeya))

    random = Random(seed)  # noqa: S311 - to be repeated
    with client:
        courses = [[alone(ask)] for ask in _singles(random, count)]
        for number in range(max(1, count // 6)):
            courses.append(_conversation(random, number, alone))
    return courses


def _singles(random: Random, count: int) -> Iterator[Ask]:
    prompts = [prompt for name in ("code", "chat", "retrieval") for prompt in load_prompts(name)]
    for number in range(count):
        prompt = random.choice(prompts)
        channel = random.choice(CODED if number % 6 == 5 else CHANNELS)
        body = _common(random, channel)
        if prompt.messages is not None:
            kind, body["messages"] = "chat", [_turn(role, text) for role, text in prompt.messages]
        else:
            kind, body["prompt"] = "text", prompt.text
        if random.random() < 0.15:
            kind = "seeded"
            body |= SEEDED | {"seed": random.randrange(1000)}
        yield Ask(f"{kind} {number}: {prompt.id} {channel}", kind, body)


def _conversation(random: Random, number: int, alone: Any) -> list[Expected]:
    channel = random.choice(CHANNELS)
    common = _common(random, channel) | {"max_tokens": 48}
    messages: list[dict[str, str]] = []
    course: list[Expected] = []
    for index, said in enumerate(random.sample(TURNS, 3)):
        messages = [*messages, _turn("user", said)]
        ask = Ask(f"turn {number}.{index} {channel}", "turn", common | {"messages": messages})
        course.append(alone(ask))
        messages = [*messages, _turn("assistant", course[-1].answer.text)]
    return course


def _common(random: Random, channel: str) -> dict[str, Any]:
    named = random.random() < 0.5
    model = {"model": f"demo@{channel}"} if named else {"model": "demo", "kv_channel": channel}
    limit = random.choices(LIMITS, (1, 1, 2, 4, 4, 2, 1))[0]
    return {**model, "max_tokens": limit, "return_token_ids": True, **random.choice(VARIANTS)}


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
