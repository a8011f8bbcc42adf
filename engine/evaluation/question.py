"""A prompt as a request to the server, and the server's reply as an outcome.

Texts go to the endpoint for texts, conversations to the one for conversations, as any client sends them. The
tokens of a prompt are made apart from the server, and those it says it has read are held against them.
"""

from collections.abc import Sequence
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
    """A prompt and what is sent for it.

    Attributes:
        identifier: of the prompt.
        path: of the endpoint.
        fields: of the request.
        tokens: of the prompt.
    """

    identifier: str
    path: str
    fields: dict[str, Any]
    tokens: list[int]

    @property
    def of_chat(self) -> bool:
        """Whether it is a conversation."""
        return self.path == CHAT_PATH


@dataclass(frozen=True)
class Answer:
    """A whole answer, read and checked.

    Attributes:
        text: as it was said, reasoning excepted.
        apart: whether something of the text was told apart: reasoning, or calls of tools.
        finish: stop or length.
        usage: of the reply.
        how: its ``x_kakeya``.
    """

    text: str
    apart: bool
    finish: str
    usage: Usage
    how: Provenance

    @property
    def tokens(self) -> list[int]:
        """Of the answer."""
        return self.how.token_ids or []


def question(
    prompt: Prompt, tokens: list[int], target: LoadedTarget, common: dict[str, Any], switches: ChatSwitches
) -> Question:
    """The request for a prompt.

    Args:
        prompt: a text or a conversation.
        tokens: what the target reads of it.
        target: whose tokenizer made them.
        common: fields of every request.
        switches: how the prompt is put to the model.
    """
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
    """The answer in a reply.

    Raises:
        ServerFault: it is a refusal, is not as clients expect it, or belongs to another prompt.
    """
    if reply.status != 200:
        raise ServerFault(f"{asked.identifier} was answered with {reply.status}: {str(reply.body)[:300]}")
    try:
        answer = _of_chat(reply.body) if asked.of_chat else _of_text(reply.body)
    except ValidationError as error:
        raise ServerFault(f"the answer to {asked.identifier} is not as clients expect it: {error}") from None
    check(asked, answer.usage, answer.how)
    return answer


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


def _of_text(body: Any) -> Answer:
    read = TextCompletion.model_validate(body)
    [choice] = _one(read.choices)
    if read.usage is None or read.x_kakeya is None or choice.finish_reason is None:
        raise ServerFault("a whole answer lacks its usage, x_kakeya or finish_reason")
    return Answer(choice.text, False, _finish(choice.finish_reason), read.usage, read.x_kakeya)


def _of_chat(body: Any) -> Answer:
    read = ChatCompletion.model_validate(body)
    [choice] = _one(read.choices)
    said = choice.message
    apart = bool(said.reasoning or said.tool_calls)
    return Answer(said.content or "", apart, _finish(choice.finish_reason), read.usage, read.x_kakeya)


def _one(choices: Sequence[Any]) -> Sequence[Any]:
    if len(choices) != 1:
        raise ServerFault(f"an answer has {len(choices)} choices, not one")
    return choices


def _finish(reason: str) -> str:
    """As the decoder calls it."""
    return "length" if reason == "length" else "stop"


def outcome(asked: Question, answer: Answer, target: LoadedTarget) -> Outcome:
    """The row's part of an answer, from what came over HTTP.

    Its text is the one that was sent; where reasoning or calls were told apart, that of its tokens.

    Raises:
        ServerFault: the rounds were not sent.
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
