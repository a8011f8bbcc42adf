"""A conversation with a model of the registry, in this process: what is said → text as it comes.

It goes to the engine's thread (`engine.server.scheduler`) as the server's requests do, one at a time,
and reads answers with the server's own `Chat`. So an interrupt never meets the engine midway, a session keeps
what is computed for the next turn, and channels, drafters and foreign engines are those of the server. It
stands beside `engine.server.service`, which does the same for HTTP; terminals are in `engine.cli.chat`.

A turn to which nothing was said leaves the conversation as it was.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue

from engine.chat.transcript import Transcript, message
from engine.chat.turn import Listening, Turn
from engine.config import parse_block
from engine.errors import ConfigurationError, GenerationError, PromptError
from engine.generate import THINKING, THINKING_NAMES
from engine.registry import SEPARATOR, ModelEntry, Places, Registry, check_located, fetch, locate
from engine.sampling import Sampling
from engine.server.parsing import ParsedText
from engine.server.prompting import RenderedPrompt, chat_prompt, has_switch
from engine.server.response import ChatResponseBuilder
from engine.server.scheduler import DecodeJob, Scheduler, SchedulerLimits
from engine.server.schema import ChatRequest, Message, Refusal
from engine.server.sequence import DecodeRequest, Event, EventCallback, PrefillProgress
from engine.server.sessions import LoadedModel

# One sequence at a time; its session waits for the next turn, however long that takes.
ALONE = SchedulerLimits(parallel=1, models=1, sessions=1, session_s=float("inf"))
PROBE = (message("user", "?"),)  # what the template's switches are tried on


class DoesNotFit(PromptError):
    """The conversation has become longer than the model takes."""


@dataclass(frozen=True)
class Manner:
    """How answers are to be.

    Attributes:
        max_tokens: of an answer.
        sampling: how tokens are drawn; an answer's seed is this one and the number of those before it.
        block: ``auto`` or a length; None: the registry's.
        thinking: ``on`` or ``off`` tells the chat template; ``default`` leaves it to registry and template.
    """

    max_tokens: int = 1024
    sampling: Sampling = field(default_factory=Sampling)
    block: str | None = None
    thinking: str = "default"

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        self.sampling.check()
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if self.block is not None:
            parse_block(self.block)
        if self.thinking not in THINKING:
            raise ConfigurationError(f"--thinking {self.thinking!r} is not one of {', '.join(THINKING)}")

    @property
    def switches(self) -> Mapping[str, bool]:
        """Of the chat template, beside the registry's."""
        return {} if self.thinking == "default" else dict.fromkeys(THINKING_NAMES, self.thinking == "on")


class Conversation:
    """What was said so far, and the model that answers; `close` it, or use it as a context."""

    def __init__(self, registry: Registry, places: Places, manner: Manner, *, download: bool = False) -> None:
        """Begin an empty conversation with no model; `use` one.

        Args:
            registry: the models there are.
            places: where their files may be.
            manner: checked.
            download: fetch models that are not here.
        """
        self.registry, self.manner, self.transcript = registry, manner, Transcript()
        self._places, self._download = places, download
        self._entry, self._channel = registry.resolve(registry.default)
        self._answers = 0
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None: stop
        self._worker = Scheduler(self._find, ALONE)
        self._worker.start()

    @property
    def model_id(self) -> str:
        """``NAME@CHANNEL`` of what answers."""
        return f"{self._entry.name}{SEPARATOR}{self._channel.name}"

    def use(self, model_id: str) -> None:
        """Let a model answer from now on; it is loaded. Where that fails, all stays as it was.

        Raises:
            EngineError: the registry does not have it, it cannot be loaded, or its chat template ignores
                a switch or the system turn.
        """
        entry, channel = self.registry.resolve(model_id)
        find = fetch if self._download else locate
        check_located(find(entry, self._places))  # before the present model makes room
        with self._leased(entry) as leased:
            self._check_template(leased.model, self.transcript.system)
        self._entry, self._channel = entry, channel

    def instruct(self, text: str | None) -> None:
        """Put this system turn before the conversation, or none.

        Raises:
            ConfigurationError: the chat template ignores system turns.
            PromptError: the text cannot be sent.
        """
        instructed = self.transcript.with_system(text)
        with self._leased(self._entry) as leased:
            self._check_template(leased.model, text)
        self.transcript = instructed

    def say(self, text: str) -> Iterator[PrefillProgress | ParsedText | Turn]:
        """Say something.

        Yields:
            How far the prompt is read, pieces of the answer, and at last the turn.

        Raises:
            DoesNotFit: the conversation is too long for the model.
            EngineError: the answer could not be given.
        """
        return self._answer(self.transcript.asked(text))

    def retry(self) -> Iterator[PrefillProgress | ParsedText | Turn]:
        """Have the last turn answered again, as `say` does."""
        return self._answer(self.transcript.unanswered())

    def stop(self) -> None:
        """End the present answer where it is; may be called by a signal's handler."""
        self._events.put(None)

    def close(self) -> None:
        """Give the model and its caches back."""
        self._worker.stop()

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, entry: ModelEntry) -> Callable[[], LoadedModel]:
        """Called in the engine's thread."""
        return partial(LoadedModel.load, locate(entry, self._places))

    def _leased(self, entry: ModelEntry) -> "_Leased":
        if not self._worker.healthy:
            raise GenerationError("the engine's thread has ended; begin anew")
        return _Leased(self._worker, entry)

    def _answer(self, asked: Transcript) -> Iterator[PrefillProgress | ParsedText | Turn]:
        events = self._events = SimpleQueue[Event | None]()  # from now on it can be stopped
        return self._told(asked, events)

    def _told(
        self, asked: Transcript, events: "SimpleQueue[Event | None]"
    ) -> Iterator[PrefillProgress | ParsedText | Turn]:
        with self._leased(self._entry) as leased:
            listening = Listening(*self._prepared(asked, leased.model))
            job = leased.submit(listening.work, events.put)
            try:
                yield from listening.until_end(events)
            finally:
                job.cancelled.set()
        turn = listening.turn
        if turn.said:
            self.transcript = asked.answered(turn.content, turn.reasoning)
            self._answers += 1
        yield turn

    def _prepared(self, asked: Transcript, model: LoadedModel) -> tuple[ChatResponseBuilder, DecodeRequest]:
        request = self._request(asked.messages, self.manner.switches)
        prompt = _prompt(request, model)
        manner, most = self.manner, self.manner.max_tokens
        seed = manner.sampling.seed
        work = DecodeRequest(
            prompt=prompt.tokens,
            stable_prefix=prompt.stable_prefix,
            max_tokens=most if model.context is None else min(most, model.context - len(prompt.tokens)),
            channel=self._channel,
            block=model.block if manner.block is None else parse_block(manner.block),
            sampling=replace(manner.sampling, seed=None if seed is None else (seed + self._answers) % 2**63),
        )
        return ChatResponseBuilder(request, model, prompt, work), work

    def _request(self, messages: list[Message], switches: Mapping[str, bool]) -> ChatRequest:
        return ChatRequest(
            model=self.model_id, messages=messages, chat_template_kwargs=dict(switches) or None
        )

    def _check_template(self, model: LoadedModel, system: str | None) -> None:
        """Make sure that no switch is without effect."""
        switches = self.manner.switches
        useless = ConfigurationError(
            f"--thinking {self.manner.thinking}: the chat template of {model.entry.name} has no such "
            "switch; leave it out"
        )
        if switches and not has_switch(model, switches):
            raise useless

        def tokens(system: str | None, switches: Mapping[str, bool]) -> list[int]:
            return _prompt(self._request(Transcript(system, PROBE).messages, switches), model).tokens

        plain = tokens(None, switches)
        if switches and plain == tokens(None, {name: not value for name, value in switches.items()}):
            raise useless
        if system is not None and plain == tokens(system, switches):
            raise ConfigurationError(f"the chat template of {model.entry.name} ignores system turns")


class _Leased:
    """A model in memory, for as long as the block lasts."""

    def __init__(self, worker: Scheduler, entry: ModelEntry) -> None:
        self._worker, self._lease, self._held = worker, worker.lease(entry), True

    @property
    def model(self) -> LoadedModel:
        """What was leased."""
        return self._lease.granted.result()

    def submit(self, work: DecodeRequest, deliver: EventCallback) -> DecodeJob:
        """Have something decoded; the worker releases the model after it."""
        job = self._worker.submit(self._lease, work, deliver)
        self._held = False
        return job

    def __enter__(self) -> "_Leased":
        try:
            self._lease.granted.result()
        except BaseException:
            self._worker.release(self._lease)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._worker.release(self._lease)


def _prompt(request: ChatRequest, model: LoadedModel) -> RenderedPrompt:
    """The tokens of a conversation.

    Raises:
        DoesNotFit: there are too many of them.
        PromptError: the chat template refuses it.
    """
    try:
        return chat_prompt(request, model)
    except Refusal as refusal:
        kind = DoesNotFit if refusal.code == "context_length_exceeded" else PromptError
        raise kind(refusal.message) from None
