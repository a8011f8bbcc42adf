"""Text in, text out: a prompt's tokens, its continuation as it comes, and the record of what that cost.

The command line, the server, chat and evaluation use this module; it uses none of them.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from engine.acceptance import Processor
from engine.cache.stats import KVUse, kept_positions, kv_use
from engine.cache.transaction import resident
from engine.config import Engine
from engine.decode import Diagnosis, Round, Step, decode
from engine.detokenize import TextStream
from engine.draft_length import DraftLength
from engine.errors import ConfigurationError, GenerationError, ModelError, PromptError, wrap_errors
from engine.sampling import Sampler, Sampling
from engine.session import Session
from engine.stops import Stops
from engine.target.loading import LoadedTarget

Messages = Sequence[tuple[str, str]]  # (role, content)

THINKING = ("default", "on", "off")
# What templates call the switch. A template that knows none of the names ignores them.
THINKING_NAMES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ChatSwitches:
    """How conversations are put to the model."""

    chat: bool = False  # texts go through the chat template too, as a user's turn
    thinking: str = "default"  # ``on`` or ``off`` tells the template; ``default`` leaves it to the template
    channel_prefix: str | None = None  # text that the model's turn begins with
    system: str | None = None  # a system turn before the conversation

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        if self.thinking not in THINKING:
            raise ConfigurationError(f"--thinking {self.thinking!r} is not one of {', '.join(THINKING)}")
        for name, value in (("--channel-prefix", self.channel_prefix), ("--system", self.system)):
            if value is not None and not value.strip():
                raise ConfigurationError(f"{name} must not be empty")

    @property
    def given(self) -> list[str]:
        """The switches that say something to the chat template."""
        thinking = None if self.thinking == "default" else self.thinking
        named = {"--thinking": thinking, "--channel-prefix": self.channel_prefix, "--system": self.system}
        return [name for name, value in named.items() if value is not None]


def encode(
    content: str | Messages,
    tokenizer: Any,
    vocab_size: int,
    context: int | None,
    switches: ChatSwitches | None = None,
    *,
    name: str = "prompt",
) -> list[int]:
    """Token ids of a text or a conversation, as mlx-lm's `stream_generate` would make them.

    PromptError where it says nothing, is not Unicode, does not fit the context or is refused by the chat
    template, ConfigurationError where the template ignores a switch, ModelError where the tokenizer is
    another model's.
    """
    texts = [content] if isinstance(content, str) else [text for _, text in content]
    if not any(text.strip() for text in texts):
        raise PromptError(f"prompt {name} is empty")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"prompt {name} is not valid Unicode: {error.reason}") from None
    tokens = tokens_of(content, tokenizer, switches or ChatSwitches(), name)
    if not tokens:
        raise PromptError(f"prompt {name} is empty: the tokenizer makes nothing of it")
    if max(tokens) >= vocab_size:
        raise ModelError(f"the tokenizer gives token {max(tokens)}, the model knows {vocab_size}")
    if context is not None and len(tokens) >= context:
        raise PromptError(f"prompt {name} has {len(tokens)} tokens; the model's context is {context}")
    return tokens


def tokens_of(content: str | Messages, tokenizer: Any, switches: ChatSwitches, name: str) -> list[int]:
    """Token ids, through the chat template for conversations and with ``switches.chat``; see `encode`."""
    if not isinstance(content, str) or switches.chat:
        turns = [("user", content)] if isinstance(content, str) else content
        return chat_tokens(turns, tokenizer, switches, name)
    with wrap_errors(lambda reason: PromptError(f"prompt {name} cannot be tokenized: {reason}")):
        special = tokenizer.bos_token is None or not content.startswith(tokenizer.bos_token)
        return [int(token) for token in tokenizer.encode(content, add_special_tokens=special)]


def chat_tokens(messages: Messages, tokenizer: Any, switches: ChatSwitches, name: str) -> list[int]:
    """Token ids of a conversation and the beginning of the model's turn; see `encode`.

    A switch that changes nothing is refused, so that no report says a model was told what it was not.
    """
    if not tokenizer.has_chat_template:
        raise PromptError(
            f"prompt {name} is a conversation, and this model has no chat template; leave out --chat, or "
            "take a model that was tuned for chat"
        )
    turns = [{"role": role, "content": content} for role, content in messages]
    told = dict.fromkeys(THINKING_NAMES, switches.thinking == "on") if "--thinking" in switches.given else {}

    def render(turns: list[dict[str, str]], told: dict[str, bool]) -> list[int]:
        tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, **told)
        return [int(token) for token in tokens]

    failed = f"prompt {name} does not go through the chat template"
    with wrap_errors(lambda reason: PromptError(f"{failed}: {reason}")):
        if told and render(turns, told) == render(turns, {key: not value for key, value in told.items()}):
            raise ConfigurationError(
                f"--thinking {switches.thinking}: this model's chat template has no such switch; "
                "leave it out, or begin the model's turn with --channel-prefix"
            )
        if switches.system is not None:
            if turns[0]["role"] == "system":
                raise PromptError(f"prompt {name} has a system turn of its own; leave out --system")
            bare, turns = turns, [{"role": "system", "content": switches.system}, *turns]
            if render(turns, told) == render(bare, told):
                raise ConfigurationError("--system: this model's chat template ignores system turns")
        tokens = render(turns, told)
        if switches.channel_prefix is not None:
            tokens += [int(t) for t in tokenizer.encode(switches.channel_prefix, add_special_tokens=False)]
        return tokens


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, and what ends the text."""

    sampling: Sampling = field(default_factory=Sampling)
    processors: tuple[Processor, ...] = ()
    stop_texts: tuple[str, ...] = ()
    ignore_stops: bool = False  # go on past the model's stop tokens
    stop_tokens: tuple[int, ...] = ()  # further ones
    min_tokens: int = 0  # before which no stop string ends the text, see `hold_off` for tokens
    logprobs: int | None = None  # see `engine.decode.decode`

    def sampler(self) -> Sampler | None:
        """What draws the tokens; None for the likeliest."""
        if self.sampling.greedy:
            return None
        return Sampler(self.sampling, by_position=self.sampling.seed is not None)

    def stops(self, target: LoadedTarget) -> Stops:
        """The stop tokens and strings for a target."""
        tokens = {*self.stop_tokens, *(() if self.ignore_stops else target.stops)}
        return Stops(tokens, self.stop_texts, target.tokenizer, least=self.min_tokens)


def hold_off(stops: Stops, prompt_length: int, vocab_size: int) -> Processor:
    """A logits processor under which no stop token comes before ``stops.least`` tokens of a text."""
    ends = mx.array([[index in stops.tokens for index in range(vocab_size)]])  # bool [1, V]

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.shape[0] - prompt_length >= stops.least:
            return logits
        return mx.where(ends[:, : logits.shape[-1]], -mx.inf, logits)

    return process


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class _Limit:
    max_tokens: int


@dataclass(frozen=True)
class GenerateSwitches(Sampling, _Limit):
    """What the command line can set about one generation; penalties are mlx-lm's, 0 for none."""

    repetition_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        for name in PENALTIES:
            if not isfinite(value := getattr(self, name)):
                raise ConfigurationError(f"--{name.replace('_', '-')} must be a finite number, not {value}")
        if self.repetition_penalty and not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigurationError(
                f"--repetition-penalty must be 0 or lie in 0.01 to 100, not {self.repetition_penalty}"
            )
        if not all(self.stop):
            raise ConfigurationError("--stop must not be empty")
        super().check()

    def options(self) -> SamplingOptions:
        """The same as the loop takes it."""
        processors = make_logits_processors(**{name: getattr(self, name) or None for name in PENALTIES})
        return SamplingOptions(self, tuple(processors), self.stop)


@dataclass(frozen=True)
class Outcome:
    """What one system made of one prompt. Seconds; ``tokens`` includes a final stop token."""

    tokens: list[int]
    text: str
    finish: str
    prefill_s: float  # until the first token is known to the host
    decode_s: float  # from the first token to the last
    rounds: list[Round]
    path: str
    cache_classes: dict[str, int]
    resident_bytes: int
    kv: KVUse | None = None  # of a policy that codes or replaces values
    kept: int | None = None  # positions, see `kept_positions`
    restored: int = 0  # positions times layers whose keys and values were injected
    drafter_forwards: int = 0  # of the drafter's network, counted where it runs
    drafter_resident_bytes: int = 0  # of its own state: keys and values, or its index of the text

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, a second; None for a single token."""
        seconds = round(self.decode_s, 7)
        return (len(self.tokens) - 1) / seconds if seconds else None

    @property
    def verify_rounds(self) -> int:
        """Forwards over a block of at least two tokens."""
        return sum(record.block > 1 for record in self.rounds)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted a verify round, the target's own included; None without one."""
        verified = [record.accepted + 1 for record in self.rounds if record.block > 1]
        return sum(verified) / len(verified) if verified else None


@dataclass(frozen=True)
class TextStep(Step):
    """A step with the text that became certain with it; the last one has the outcome."""

    text: str = ""
    outcome: Outcome | None = None


def generate(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int,
    options: SamplingOptions | None = None,
    *,
    draft_length: DraftLength,
    text: bool = True,
) -> Generator[TextStep]:
    """Continue a prompt with the engine's drafter, if it has one, in a session of its own.

    At most ``max_tokens`` are emitted, fewer where the model's context ends; without options the likeliest,
    up to the model's stop tokens. Without ``text`` steps and outcome have none.
    """
    started, switches = perf_counter(), engine.options
    with engine.open_session(draft_length.largest) as session:
        yield from generate_in_session(
            engine.target,
            session,
            prompt,
            token_limit(engine.target, len(prompt), max_tokens),
            options,
            draft_length=draft_length,
            prefill_chunk=switches.prefill_chunk,
            diagnosis=Diagnosis(stage_times=True, single_graph=switches.single_graph),
            started=started,
            text=text,
        )


def generate_in_session(
    target: LoadedTarget,
    session: Session,
    prompt: Sequence[int],
    max_tokens: int,
    options: SamplingOptions | None = None,
    *,
    draft_length: DraftLength,
    prefill_chunk: int = 2048,
    diagnosis: Diagnosis | None = None,
    started: float | None = None,
    text: bool = True,
) -> Generator[TextStep]:
    """Continue a prompt in an open session of the target, which stays open.

    See `generate` and `engine.decode.decode`; ``started`` is when the prefill began, by `perf_counter`.
    """
    options = options or SamplingOptions()
    stops = options.stops(target)
    record = OutcomeRecord(target, session, prompt, stops if text else None, started)
    steps = decode(
        target.target,
        session.drafter,
        prompt,
        max_tokens=max_tokens,
        stops=stops,
        sampler=options.sampler(),
        processors=options.processors,
        logprobs=options.logprobs,
        draft_length=draft_length,
        prefill_chunk=prefill_chunk,
        session=session,
        diagnosis=diagnosis,
    )
    finish = None
    with closing(steps):
        for step in steps:
            finish = step.finish
            yield record.add(step)
    if finish is None:
        raise GenerationError("the text did not come to an end")


class OutcomeRecord:
    """Collects the steps of one text, and at its end what they cost."""

    def __init__(
        self,
        target: LoadedTarget,
        session: Session,
        prompt: Sequence[int],
        stops: Stops | None,
        started: float | None = None,
    ) -> None:
        """Begin with a prefill that ``started`` then, by `perf_counter`; without stops there is no text."""
        drafter = session.drafter
        self._session, self._forwards = session, drafter.forwards if drafter else 0
        self._stream = TextStream(target.tokenizer, stops, prompt) if stops else None
        self._tokens, self._rounds, self._pieces = list[int](), list[Round](), list[str]()
        self._started = perf_counter() if started is None else started
        self._first: float | None = None

    def add(self, step: Step) -> TextStep:
        """Note a step, the last one while the session has the caches of the text."""
        last = perf_counter()
        if self._first is None:
            self._first = last
        self._tokens.extend(step.tokens)
        if step.round is not None:
            self._rounds.append(step.round)
        piece, outcome = "", None
        if self._stream is not None:
            piece = self._stream.add(step.tokens) + (self._stream.finish() if step.finish else "")
            self._pieces.append(piece)
        if step.finish:
            outcome = self._outcome(step.finish, self._first, last)
        return TextStep(step.tokens, step.round, step.finish, step.logprobs, piece, outcome)

    def _outcome(self, finish: str, first: float, last: float) -> Outcome:
        session, drafter = self._session, self._session.drafter
        classes, nbytes = resident(session.caches)
        return Outcome(
            tokens=self._tokens,
            text="".join(self._pieces),
            finish=finish,
            prefill_s=first - self._started,
            decode_s=last - first,
            rounds=self._rounds,
            path=f"speculative:{drafter.name}" if drafter else "plain:kakeya.decode",
            cache_classes=classes,
            resident_bytes=nbytes,
            kv=kv_use(session.caches),
            kept=kept_positions(session.caches),
            restored=session.restored,
            drafter_forwards=drafter.forwards - self._forwards if drafter else 0,
            drafter_resident_bytes=drafter.nbytes if drafter else 0,
        )


def token_limit(target: LoadedTarget, prompt_tokens: int, max_tokens: int) -> int:
    """``max_tokens``, or what the model's context leaves."""
    return max_tokens if target.context is None else min(max_tokens, target.context - prompt_tokens)
