"""A conversation with a model of the registry, in this process: what is said → text as it comes.

It uses the engine's thread (`engine.server.scheduler`) and the server's own `Chat`, one request at a
time: an interrupt never meets the engine midway, and the session keeps what is computed for the next turn.
A turn to which nothing was said leaves the conversation as it was.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import ValidationError

from engine.decode import Step
from engine.draft_length import parse_block
from engine.errors import ConfigurationError, PromptError
from engine.generate import THINKING_NAMES, ChatSwitches
from engine.registry import SEPARATOR, ModelEntry, Places, Registry, check_located, fetch, locate
from engine.sampling import Sampling
from engine.server.parsing import ParsedText, Piece
from engine.server.prompting import RenderedPrompt, chat_prompt, has_switch
from engine.server.response import ChatResponseBuilder
from engine.server.scheduler import Scheduler, SchedulerLimits
from engine.server.schema import ChatRequest, Message, Provenance, Refusal, Usage
from engine.server.sequence import DecodeFailed, DecodeFinished, DecodeRequest, Event, PrefillProgress
from engine.server.sessions import LoadedModel

# One sequence at a time; its session waits for the next turn, however long that takes.
ALONE = SchedulerLimits(parallel=1, models=1, sessions=4, session_s=float("inf"))
SYSTEM_ROLES = ("system", "developer")
INTERRUPTED = "interrupted"


class DoesNotFit(PromptError):
    """The conversation has become longer than the model takes."""


@dataclass(frozen=True)
class ChatOptions:
    """How answers are to be."""

    max_tokens: int = 1024
    sampling: Sampling = field(default_factory=Sampling)  # each answer's seed is one more than the last one's
    block: str | None = None  # ``auto`` or a length; None: the registry's
    thinking: str = "default"  # ``on`` or ``off`` tells the chat template; ``default``: the registry's

    def check(self) -> None:
        self.sampling.check()
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        parse_block("auto" if self.block is None else self.block)
        ChatSwitches(thinking=self.thinking).check()

    @property
    def switches(self) -> dict[str, bool]:
        return {} if self.thinking == "default" else dict.fromkeys(THINKING_NAMES, self.thinking == "on")


@dataclass(frozen=True)
class Transcript:
    """A conversation so far; every change is a new one, so that a turn that fails leaves the old one."""

    system: str | None = None
    turns: tuple[Message, ...] = ()  # of user and assistant, the oldest first

    @property
    def messages(self) -> list[Message]:
        head = [] if self.system is None else [_message("system", self.system)]
        return [*head, *self.turns]

    def asked(self, text: str) -> "Transcript":
        """Add a user's turn; PromptError where the text holds half a character."""
        return replace(self, turns=(*self.turns, _message("user", text)))

    def answered(self, content: str, reasoning: str) -> "Transcript":
        return replace(self, turns=(*self.turns, _message("assistant", content, reasoning or None)))

    def undone(self) -> "Transcript":
        """Drop the last user's turn and what followed it; ConfigurationError where there is none."""
        return replace(self, turns=self.unanswered().turns[:-1])

    def unanswered(self) -> "Transcript":
        """Drop what followed the last user's turn; ConfigurationError where there is none."""
        ends = [end for end, turn in enumerate(self.turns, 1) if turn.role == "user"]
        if not ends:
            raise ConfigurationError("nothing has been said yet")
        return replace(self, turns=self.turns[: ends[-1]])

    def save(self, file: Path) -> None:
        """Write the messages to a new file, one JSON object a line, with the fields the server reads."""
        lines = [each.model_dump_json(exclude_none=True) + "\n" for each in self.messages]
        try:
            with file.open("x", encoding="utf-8") as stream:
                stream.writelines(lines)
        except FileExistsError:
            raise ConfigurationError(f"{file} exists already; give another name") from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{file} cannot be written: {error}") from None

    @classmethod
    def load(cls, file: Path) -> "Transcript":
        """Read a file that `save` wrote, or one like it; PromptError names file and line."""
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PromptError(f"{file} cannot be read: {error}") from None
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        turns = [
            _parsed(f"{file}, line {number}", partial(Message.model_validate_json, extra="forbid"), line)
            for number, line in lines
        ]
        if not turns:
            raise PromptError(f"{file} holds no message")
        system: Any = None
        if turns[0].role in SYSTEM_ROLES and not isinstance(system := turns.pop(0).content, str):
            raise PromptError(f"{file}: the system turn is no text")
        if any(each.role in SYSTEM_ROLES for each in turns):
            raise PromptError(f"{file}: a system turn must come first, and there can be one only")
        return cls(system, tuple(turns))


def _message(role: str, content: str, reasoning: str | None = None) -> Message:
    fields = {"role": role, "content": content, "reasoning": reasoning}
    return _parsed("the text cannot be sent", Message.model_validate, fields)


def _parsed(where: str, parse: Callable[[Any], Message], value: Any) -> Message:
    try:
        return parse(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        parts = [where, ".".join(str(part) for part in first["loc"]), first["msg"]]
        raise PromptError(": ".join(filter(None, parts))) from None


@dataclass(frozen=True)
class Turn:
    """An answer that has ended; one that was stopped is what was said until then."""

    content: str
    reasoning: str
    finish: str  # in OpenAI's words, or `INTERRUPTED`
    usage: Usage
    provenance: Provenance | None  # None of one that was interrupted, as are the figures made of it

    @property
    def said(self) -> bool:
        return bool(self.content or self.reasoning)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return self.usage.prompt_tokens_details.cached_tokens

    @property
    def verify_rounds(self) -> int:
        return self.provenance.verify_rounds if self.provenance else 0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted a verify round, the target's own included; None without one."""
        return self.provenance.acceptance_length if self.provenance else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of decoding, the first token excepted; None for a single one."""
        return self.provenance.decode_tokens_per_s if self.provenance else None


Events = SimpleQueue[Event | None]  # None: stop
Told = Iterator[PrefillProgress | ParsedText | Turn]


class Conversation(AbstractContextManager["Conversation"]):
    """What was said so far, and the model that answers; `close` it, or use it as a context."""

    def __init__(
        self, registry: Registry, places: Places, options: ChatOptions, *, download: bool = False
    ) -> None:
        """Begin an empty conversation with no model; `use` one. Options are checked already."""
        self.registry, self.options, self.transcript = registry, options, Transcript()
        self._find = partial(fetch if download else locate, places=places)
        self._entry, self._channel = registry.resolve(registry.default)
        self._answers = 0
        self._events: Events = SimpleQueue()
        self._worker = Scheduler(lambda entry: partial(LoadedModel.load, locate(entry, places)), ALONE)
        self._worker.start()

    @property
    def model_id(self) -> str:
        return f"{self._entry.name}{SEPARATOR}{self._channel.name}"

    def use(self, model_id: str) -> None:
        """Load a model and let it answer from now on. Where that fails, all stays as it was."""
        entry, channel = self.registry.resolve(model_id)
        check_located(self._find(entry))  # before the present model is dropped
        self._check_template(entry, self.transcript.system)
        self._entry, self._channel = entry, channel

    def instruct(self, text: str | None) -> None:
        """Put this system turn before the conversation, or none; refuse it where the template ignores it."""
        self._check_template(self._entry, text)
        self.transcript = replace(self.transcript, system=text)

    def say(self, text: str) -> Told:
        """Say something: yields how far the prompt is read, pieces of the answer, and at last the turn."""
        return self._answer(self.transcript.asked(text))

    def retry(self) -> Told:
        """Have the last turn answered again, as `say` does."""
        return self._answer(self.transcript.unanswered())

    def stop(self) -> None:
        """End the present answer where it is; may be called by a signal's handler."""
        self._events.put(None)

    def close(self) -> None:
        self._worker.stop()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, asked: Transcript) -> Told:
        self._events = SimpleQueue()  # from now on, before the first event is asked for, it can be stopped
        return self._told(asked, self._events)

    def _told(self, asked: Transcript, events: Events) -> Told:
        lease = self._worker.lease(self._entry)
        try:
            builder = self._prepared(asked, lease.granted.result())
            job = self._worker.submit(lease, builder.decoded, events.put)  # it releases the lease at the end
        except BaseException:
            self._worker.release(lease)
            raise
        try:
            turn = yield from _listen(builder, events)
        finally:
            job.cancelled.set()
        if turn.said:
            self.transcript = asked.answered(turn.content, turn.reasoning)
            self._answers += 1
        yield turn

    def _prepared(self, asked: Transcript, model: LoadedModel) -> ChatResponseBuilder:
        options = self.options
        request, prompt = self._prompt(asked, options.switches, model)
        most, seed = options.max_tokens, options.sampling.seed
        work = DecodeRequest(
            prompt=prompt.tokens,
            stable_prefix=prompt.stable_prefix,
            max_tokens=most if model.context is None else min(most, model.context - len(prompt.tokens)),
            channel=self._channel,
            block=model.block if options.block is None else parse_block(options.block),
            sampling=replace(options.sampling, seed=None if seed is None else (seed + self._answers) % 2**63),
        )
        return ChatResponseBuilder(request, model, prompt, work)

    def _prompt(
        self, asked: Transcript, switches: dict[str, bool], model: LoadedModel
    ) -> tuple[ChatRequest, RenderedPrompt]:
        request = ChatRequest(
            model=self.model_id, messages=asked.messages, chat_template_kwargs=switches or None
        )
        try:
            return request, chat_prompt(request, model)
        except Refusal as refusal:
            kind = DoesNotFit if refusal.code == "context_length_exceeded" else PromptError
            raise kind(str(refusal)) from None

    def _check_template(self, entry: ModelEntry, system: str | None) -> None:
        """Load the model and make sure that no switch is without effect."""
        switches, lease = self.options.switches, self._worker.lease(entry)
        opposite = {key: not value for key, value in switches.items()}

        def tokens(system: str | None, switches: dict[str, bool]) -> list[int]:
            return self._prompt(Transcript(system).asked("?"), switches, lease.granted.result())[1].tokens

        try:
            known = has_switch(lease.granted.result(), switches)
            if switches and (not known or tokens(None, switches) == tokens(None, opposite)):
                raise ConfigurationError(
                    f"--thinking {self.options.thinking}: the chat template of {entry.name} has no such "
                    "switch; leave it out"
                )
            if system is not None and tokens(None, switches) == tokens(system, switches):
                raise ConfigurationError(f"the chat template of {entry.name} ignores system turns")
        finally:
            self._worker.release(lease)


def _listen(
    builder: ChatResponseBuilder, events: Events
) -> Generator[PrefillProgress | ParsedText, None, Turn]:
    """Tell an answer as it comes, until it has ended or is stopped; return the turn."""
    cached, said, ended = None, ParsedText(), None
    while ended is None and (event := events.get()) is not None:
        parsed = ParsedText()
        match event:
            case DecodeFailed():
                raise event.error
            case PrefillProgress():
                cached = event.done if cached is None else cached
                yield event
            case Step():
                parsed = _as_text(builder.hear([event]))
            case DecodeFinished():
                ended, parsed = event, _as_text(builder.rest(event))
        if parsed:
            said += parsed
            yield parsed
    if ended is None:
        return Turn(said.content, said.reasoning, INTERRUPTED, builder.usage(cached or 0), None)
    usage, provenance = builder.usage(ended.cached_tokens), builder.provenance(ended)
    return Turn(said.content, said.reasoning, ended.outcome.finish, usage, provenance)


def _as_text(parsed: ParsedText) -> ParsedText:
    """The same, with tool calls, for which there was no tool, as text."""
    found = ParsedText()
    for piece in parsed.pieces:
        if (call := piece.call) is None:
            found.add(piece)
        else:
            text = f"{call.name}(" if piece.begins else ""
            found.add(Piece("content", f"{text}{piece.text}{')' if piece.complete else ''}"))
    return found
