"""A prompt as a request to the server, and the server's reply as an outcome.

Texts go to the endpoint for texts, conversations to the one for conversations, as any client sends them. The
tokens of a prompt are made apart from the server, and those it says it has read are held against them.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from engine.cache.stats import KVUse
from engine.decode import Round
from engine.detokenize import text_of
from engine.evaluation.http import Answered, ServerFault
from engine.evaluation.prompts import Prompt
from engine.generate import THINKING_NAMES, ChatSwitches, Outcome
from engine.server.schema import ChatCompletion, Provenance, TextCompletion, Usage
from engine.stops import Stops
from engine.target.loading import LoadedTarget

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Question:
    """A prompt and the request for it."""

    identifier: str  # of the prompt
    path: str  # of the endpoint
    fields: dict[str, Any]
    tokens: list[int]  # of the prompt

    @property
    def of_chat(self) -> bool:
        """Whether it is a conversation."""
        return self.path == CHAT_PATH


@dataclass(frozen=True)
class Answer:
    """A whole answer, read and checked."""

    text: str  # without reasoning
    apart: bool  # reasoning or tool calls came outside the text
    finish: str  # stop or length
    usage: Usage
    how: Provenance

    @property
    def tokens(self) -> list[int]:
        """Of the answer."""
        return self.how.token_ids or []


def question(
    prompt: Prompt, tokens: list[int], target: LoadedTarget, common: dict[str, Any], switches: ChatSwitches
) -> Question:
    """The request for a prompt: ``tokens`` are the target's, ``common`` are fields of every request."""
    bare = prompt.text or ""
    if prompt.messages is None and not switches.chat:
        begun = target.tokenizer.bos_token is not None and bare.startswith(target.tokenizer.bos_token)
        text: Any = tokens if begun else bare  # as text, it would begin twice
        return Question(prompt.id, TEXT_PATH, common | {"prompt": text}, tokens)
    turns = prompt.messages or (("user", bare),)
    fields = common | {"messages": [{"role": role, "content": content} for role, content in turns]}
    if switches.thinking != "default":
        fields["chat_template_kwargs"] = dict.fromkeys(THINKING_NAMES, switches.thinking == "on")
    return Question(prompt.id, CHAT_PATH, fields, tokens)


def whole(asked: Question, reply: Answered) -> Answer:
    """The answer in a reply; ServerFault where it is a refusal, malformed, or belongs to another prompt."""
    if reply.status != 200:
        raise ServerFault(f"{asked.identifier} was answered with {reply.status}: {str(reply.body)[:300]}")
    try:
        read = (ChatCompletion if asked.of_chat else TextCompletion).model_validate(reply.body)
    except ValidationError as error:
        raise ServerFault(f"the answer to {asked.identifier} is not as clients expect it: {error}") from None
    if len(read.choices) != 1:
        raise ServerFault(f"an answer has {len(read.choices)} choices, not one")
    finish, usage, how = read.choices[0].finish_reason, read.usage, read.x_kakeya
    if usage is None or how is None or finish is None:
        raise ServerFault("a whole answer lacks its usage, x_kakeya or finish_reason")
    if isinstance(read, ChatCompletion):
        said = read.choices[0].message
        text, apart = said.content or "", bool(said.reasoning or said.tool_calls)
    else:
        text, apart = read.choices[0].text, False
    check(asked, usage, how)
    return Answer(text, apart, "length" if finish == "length" else "stop", usage, how)


def check(asked: Question, usage: Usage, how: Provenance) -> None:
    """Raise ServerFault where usage and provenance do not belong to a question, or to each other."""
    read, written = how.prompt_token_ids, how.token_ids
    if read != asked.tokens:
        raise ServerFault(f"{asked.identifier}: the server read other tokens than the prompt's")
    if not written:
        raise ServerFault(f"{asked.identifier}: the answer says no token ids")
    if (usage.prompt_tokens, usage.completion_tokens) != (len(read), len(written)):
        raise ServerFault(
            f"{asked.identifier}: usage says {usage.prompt_tokens} and {usage.completion_tokens} tokens, "
            f"and there are {len(read)} and {len(written)}"
        )


def outcome(asked: Question, answer: Answer, target: LoadedTarget) -> Outcome:
    """The row's part of an answer, from what came over HTTP.

    Its text is the one that was sent; where reasoning or calls came outside it, that of its tokens.
    """
    how = answer.how
    if how.rounds is None:
        raise ServerFault("an answer lacks x_kakeya.rounds, which were asked for")
    coded = how.coded
    text = answer.text
    if answer.apart:
        text = text_of(target.tokenizer, answer.tokens, Stops(target.stops), asked.tokens)
    return Outcome(
        tokens=answer.tokens,
        text=text,
        finish=answer.finish,
        prefill_s=how.prefill_s,
        decode_s=how.decode_s,
        rounds=[Round(*each) for each in how.rounds],
        path=f"speculative:{how.drafter}" if how.drafter else "plain:kakeya.decode",
        cache_classes=how.cache_classes,
        resident_bytes=how.resident_bytes,
        kv=KVUse(tuple(coded.layers), coded.values, coded.bytes) if coded else None,
        kept=how.kept_positions,
        drafter_forwards=how.drafter_forwards,
    )
