"""Sessions kept between requests, so that the next turn of a conversation computes only what is new.

A session belongs to a model, a KV channel and a drafter: what one channel keeps is of no use to another. A
request takes the idle session of its kind that holds the most of its prompt. One that holds other text
mostly, its mark included, is left to whoever comes back to it, as long as there is room. The least recently
used go first, those that nobody came back to for long go too, and nothing is kept of a request that failed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from engine.blas import fit_threads
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.drafters.registry import WITH_LOOKUP, open_drafter
from engine.external_engines.engine import ExternalEngine, open_guest
from engine.grammar import Vocabulary
from engine.registry.entries import ModelEntry
from engine.registry.locate import Located
from engine.server.schema import FieldError
from engine.server.sequence import CachedSession, DecodeRequest, SessionKey, check_external_request
from engine.session import Session
from engine.target.attention import refuse_policy
from engine.target.loading import LoadedDrafter, LoadedTarget, load_target

logger = logging.getLogger(__name__)
LIKENESS = 0.5  # of what a session holds must be of the prompt, so that it is taken while there is room


class SessionCache:
    """Idle sessions; used by the engine's thread alone."""

    def __init__(self, most: int, most_bytes: int | None, seconds: float) -> None:
        """Keep some.

        Args:
            most: idle sessions at most; 0 keeps none.
            most_bytes: of all idle sessions; None for no bound.
            seconds: after which an unused one is closed.
        """
        self._most, self._most_bytes, self._seconds = most, most_bytes, seconds
        self._idle: list[CachedSession] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def nbytes(self) -> int:
        """Bytes of all idle sessions."""
        return sum(kept.nbytes for kept in self._idle)

    def take(
        self, key: SessionKey, prompt: Sequence[int], make: Callable[[], CachedSession]
    ) -> CachedSession:
        """The session that suits a prompt best; it is the caller's until `give_back`.

        Args:
            key: of the kind wanted.
            prompt: token ids.
            make: opens a new one.
        """
        own = [kept for kept in self._idle if kept.key == key]
        best = max(own, key=lambda kept: kept.common(prompt), default=None)
        if best is not None:
            common = best.common(prompt)
            alike = common >= LIKENESS * len(best.session.tokens) or common >= best.session.marked > 0
            if alike or len(self._idle) >= self._most:
                self._idle.remove(best)
                return best
        return make()

    def give_back(self, kept: CachedSession, now: float) -> None:
        """Its request has ended, at this time of the caller's clock."""
        kept.used = now
        self._idle.append(kept)
        while len(self._idle) > self._most or (
            self._most_bytes is not None and self.nbytes > self._most_bytes
        ):
            close_quietly(self._idle.pop(0))

    def expire(self, now: float) -> bool:
        """Close what nobody used for long; whether there was any."""
        old = [kept for kept in self._idle if now - kept.used >= self._seconds]
        for kept in old:
            self._idle.remove(kept)
            close_quietly(kept)
        return bool(old)

    def close(self, model: str | None = None) -> None:
        """Close all, or those of one model."""
        for kept in [kept for kept in self._idle if model in {None, kept.key.model}]:
            self._idle.remove(kept)
            close_quietly(kept)


def close_quietly(kept: CachedSession) -> None:
    """Close a session; where that fails, others are not to suffer for it, and the log has it."""
    try:
        kept.session.close()
    except Exception:
        logger.exception("a session cannot be closed")


LOOKUP = "prompt-lookup"


@dataclass
class LoadedModel:
    """A target in memory, with its drafters.

    Attributes:
        located: its entry of the registry, and where its files are.
        target: the model and its tokenizer.
        guest: the foreign engine that decodes it; None for ours.
        drafters: those opened so far, by the word a request uses.
    """

    located: Located
    target: LoadedTarget
    guest: ExternalEngine | None = None
    drafters: dict[str, LoadedDrafter | None] = field(default_factory=dict)
    _tried: set[str] = field(default_factory=set)  # channels that were seen to work

    @classmethod
    def load(cls, located: Located) -> "LoadedModel":
        """Load the target and what drafts for it by default.

        Raises:
            ModelError: a folder cannot be used.
            ConfigurationError: the default channel does not go together with the model.
        """
        entry = located.entry
        target = load_target(located.target, entry.dtype, entry.quantize)
        fit_threads(target.target.hidden_size)
        if entry.engine is not None:
            spec = (located.drafter or "").removeprefix(WITH_LOOKUP)  # its look-ups are ours alone
            folder = Path(spec) if spec else None
            return cls(located, target, open_guest(entry.engine, target, folder))
        model = cls(located, target)
        model.drafter("default")
        return model

    @property
    def entry(self) -> ModelEntry:
        """Of the registry."""
        return self.located.entry

    @property
    def block(self) -> int | None:
        """Tokens a verification where a request says nothing; None lets the draft length choose."""
        return None if self.entry.block == "auto" else int(self.entry.block)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens, as grammars need them."""
        return Vocabulary(self.target.tokenizer, self.target.target.vocab_size)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; of a tokenizer that leaves out blanks, a text may be longer."""
        return max(map(len, self.target.tokenizer.get_vocab()))

    @property
    def context(self) -> int | None:
        """Positions of prompt and answer together; None for no bound."""
        known = [bound for bound in (self.target.context, self.entry.context) if bound is not None]
        return min(known, default=None)

    def drafter(self, word: str) -> LoadedDrafter | None:
        """What drafts for a request, by its word."""
        if word not in self.drafters:
            spec = {"default": self.located.drafter, LOOKUP: LOOKUP}.get(word)
            self.drafters[word] = open_drafter(spec, self.target, self.entry.dtype) if spec else None
        return self.drafters[word]

    def check(self, work: DecodeRequest) -> None:
        """Raise FieldError, ConfigurationError or ModelError for what this model cannot do."""
        if self.guest is not None:
            check_external_request(self.guest, work)
            return
        drafter = self.drafter(work.drafter)
        if work.block is not None and work.block > 1 and drafter is None:
            raise FieldError(
                "block", f"block {work.block} needs a drafter, and nothing drafts here; leave block out"
            )
        if work.block is not None and drafter is not None and work.block > 2 * drafter.drafter.block_size:
            raise FieldError(
                "block",
                f"block {work.block} is more than {2 * drafter.drafter.block_size}, twice what this drafter "
                "was made for",
            )
        if work.channel.name not in self._tried:
            refuse_policy(self.target.target.model, work.channel.policy)
            self._tried.add(work.channel.name)

    def why_off(self, work: DecodeRequest) -> str | None:
        """Why nothing will be drafted for a request; None where something may be."""
        if work.drafter == "none":
            return "the request asked for no drafter"
        if self.drafter(work.drafter) is None:
            return "this model has no drafter"
        return "the request asked for a block of 1" if work.block == 1 else None

    def key(self, work: DecodeRequest) -> SessionKey:
        """The kind of session a request needs."""
        return SessionKey(self.entry.name, work.channel.name, work.drafter, work.owner)

    def open_session(self, work: DecodeRequest) -> CachedSession:
        """A new session for a request and those that follow it."""
        loaded = self.drafter(work.drafter)
        drafter = loaded.drafter.twin() if loaded else None
        headroom = 2 * drafter.block_size if drafter else 1
        session = Session(self.target.target, drafter, headroom=headroom, policy=work.channel.policy)
        return CachedSession(self.key(work), session, drafter, self.new_draft_length(work))

    def new_draft_length(self, work: DecodeRequest, *, repeatable: bool = False) -> DraftLength:
        """A draft length that knows nothing yet; ``repeatable`` if it must not look at time."""
        drafter = self.drafter(work.drafter)
        if drafter is None:
            return FixedDraftLength(1)
        return AdaptiveDraftLength(drafter.drafter.block_size, nominal=repeatable)
