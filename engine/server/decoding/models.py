"""Loaded models: which of the registry's are in memory, what drafts for them, and sessions of them.

Used by the engine's thread alone, except for the tokenizer and the vocabulary of a loaded model, which those
who prepare requests read.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from engine.device import fit_threads
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.drafters.registry import WITH_LOOKUP, open_drafter
from engine.external_engines.engine import ExternalEngine, open_guest
from engine.grammar import Vocabulary
from engine.registry.entries import ModelEntry
from engine.registry.locate import Located
from engine.server.decoding.external_sequence import refuse_beyond
from engine.server.decoding.sessions import Kept, Key
from engine.server.decoding.work import Work
from engine.server.refusals import FieldError
from engine.session import Session
from engine.target.attention import refuse_policy
from engine.target.loading import LoadedDrafter, LoadedTarget, load_target

LOOKUP = "prompt-lookup"


@dataclass
class Model:
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
    def load(cls, located: Located) -> "Model":
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

    def check(self, work: Work) -> None:
        """Raise FieldError, ConfigurationError or ModelError for what this model cannot do."""
        if self.guest is not None:
            refuse_beyond(self.guest, work)
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

    def why_off(self, work: Work) -> str | None:
        """Why nothing will be drafted for a request; None where something may be."""
        if work.drafter == "none":
            return "the request asked for no drafter"
        if self.drafter(work.drafter) is None:
            return "this model has no drafter"
        return "the request asked for a block of 1" if work.block == 1 else None

    def key(self, work: Work) -> Key:
        """The kind of session a request needs."""
        return Key(self.entry.name, work.channel.name, work.drafter, work.owner)

    def open_session(self, work: Work) -> Kept:
        """A new session for a request and those that follow it."""
        loaded = self.drafter(work.drafter)
        drafter = loaded.drafter.twin() if loaded else None
        headroom = 2 * drafter.block_size if drafter else 1
        session = Session(self.target.target, drafter, headroom=headroom, policy=work.channel.policy)
        return Kept(self.key(work), session, drafter, self.new_draft_length(work))

    def new_draft_length(self, work: Work, *, repeatable: bool = False) -> DraftLength:
        """A draft length that knows nothing yet; ``repeatable`` if it must not look at time."""
        drafter = self.drafter(work.drafter)
        if drafter is None:
            return FixedDraftLength(1)
        return AdaptiveDraftLength(drafter.drafter.block_size, nominal=repeatable)
