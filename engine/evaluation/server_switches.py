"""What a comparison of the server's answers can be set to: what is served, how it is asked."""

from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import parse_block
from engine.errors import ConfigurationError
from engine.evaluation.server_checks import LONG
from engine.generate import ChatSwitches
from engine.registry import Channel, ModelEntry, Registry
from engine.server.scheduler import SchedulerLimits
from engine.server.serve import ServerSettings
from engine.server.service import RequestLimits

IDLE_S = 1.0  # after which an idle session is closed, where checks look at that


@dataclass(frozen=True)
class ServerSwitches:
    """What the command line can set about the comparison.

    Attributes:
        prompts, limit, seed: see `engine.evaluation.prompts.load_prompts`.
        max_tokens: tokens to generate a prompt.
        clients: that ask at once.
        block: ``auto`` or a length, as requests name it.
        prefill_chunk: prompt positions a turn, of both arms.
        transport: see `engine.evaluation.http.listening`.
        chat: how prompts are put to the model.
    """

    prompts: str = "all"
    limit: int | None = 8
    max_tokens: int = 96
    seed: int = 0
    clients: int = 4
    block: str = "auto"
    prefill_chunk: int = 512
    transport: str | None = None
    chat: ChatSwitches = field(default_factory=ChatSwitches)

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        self.chat.check()
        parse_block(self.block)
        for name, value, least in (
            ("--max-tokens", self.max_tokens, 1),
            ("--limit", self.limit, 1),
            ("--clients", self.clients, 2),
            ("--prefill-chunk", self.prefill_chunk, 1),
        ):
            if value is not None and value < least:
                raise ConfigurationError(f"{name} must be at least {least}, not {value}")

    @property
    def fields(self) -> dict[str, Any]:
        """Of every request."""
        speculation: dict[str, Any] = {"block": int(self.block)} if self.block not in ("auto", "1") else {}
        if self.block == "1":
            speculation = {"drafter": "none"}
        return speculation | {"temperature": 0, "return_token_ids": True, "return_rounds": True}

    @property
    def serving(self) -> ServerSettings:
        """The server whose answers are compared: it keeps nothing between requests."""
        return ServerSettings(
            request_limits=RequestLimits(max(self.max_tokens, LONG), self.max_tokens, 2 * self.clients),
            limits=SchedulerLimits(parallel=self.clients, sessions=0, chunk=self.prefill_chunk),
        )

    @property
    def keeping(self) -> ServerSettings:
        """The same, with sessions kept for a short while."""
        limits = replace(self.serving.limits, sessions=self.clients, session_s=IDLE_S)
        return replace(self.serving, limits=limits)


@dataclass(frozen=True)
class Offer:
    """What is served.

    Attributes:
        registry: its default is the entry.
        entry: the model.
        channel: its KV channel.
        model_id: as requests name both.
    """

    registry: Registry
    entry: ModelEntry
    channel: Channel
    model_id: str

    @classmethod
    def of(cls, registry: Registry, model_id: str | None = None, channel: str | None = None) -> "Offer":
        """What an id of a registry means, with a channel named beside it; None: the default one.

        Raises:
            UnknownModel: there is no such model or channel.
            ConfigurationError: the model does not offer the channel, or another engine decodes it.
        """
        entry, found = registry.resolve(model_id or registry.default, channel)
        if entry.engine is not None:
            raise ConfigurationError(
                f"{entry.name} is decoded by the engine {entry.engine}, which tells no rounds; "
                "only models of this engine can be compared"
            )
        named = f"{entry.name}@{found.name}"
        return cls(replace(registry, default=entry.name), entry, found, named)
