"""Loaded models, and the sessions that requests are decoded in.

For the engine's thread alone; those that prepare requests read a model's tokenizer and vocabulary.
"""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.cache.auto import measured
from engine.cache.policy import KVPolicy
from engine.decode import SequenceDecoder
from engine.device import fit_threads
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.drafters.base import Drafter
from engine.drafters.registry import open_drafter
from engine.errors import ConfigurationError, InputError, ModelError
from engine.external_engines.engine import ExternalEngine
from engine.external_engines.loops import open_external_engine
from engine.grammar import Vocabulary
from engine.memory import require_memory
from engine.registry import Located, ModelEntry
from engine.server.prompt_cache import CacheKey, PromptCache
from engine.server.schema import invalid, unsupported
from engine.server.sequence import DecodeRequest, RequestDecoder, check_external_request
from engine.session import Session
from engine.target.attention import refuse_policy
from engine.target.loading import LoadedDrafter, LoadedTarget, load_target
from evidence_format.model import Model

logger = logging.getLogger(__name__)
LOOKUP = "prompt-lookup"
MOST_PARALLEL = 32  # requests at once, where memory allows more; mlx-lm's server has the same bound
# times plain decoding that a block must promise in a batch: a network reads the prompt of each sequence that
# joins before it drafts, and that is no cost of a round
BATCH_MARGIN = 1.1
REMEMBERED = 256  # policies whose draft lengths are kept, and those of batches
REQUESTS_SHARE = 0.75  # of the memory that the weights leave; the rest is the prompt cache's


@dataclass
class LoadedModel:
    """A target in memory, with its drafters."""

    located: Located
    target: LoadedTarget
    external: ExternalEngine | None = None  # decodes it; None for our engine
    _drafters: dict[str, LoadedDrafter | None] = field(default_factory=dict)  # by the request's word
    # those in no use, with what they have measured, by policy and the request's word for the drafter
    _draft_lengths: defaultdict[tuple[str, str], list[DraftLength]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _batch_draft_lengths: dict[Any, DraftLength] = field(default_factory=dict)
    parallel: int = 1  # requests for whose keys and values there was memory when it was loaded

    @classmethod
    def load(cls, located: Located) -> "LoadedModel":
        """Load the target and its default drafter; raise InputError."""
        entry = located.entry
        about: dict[str, Any] = {"context": entry.context, "dtype": entry.dtype, "quantize": entry.quantize}
        try:
            fit = require_memory(located.target, drafter=located.drafter, **about)
        except InputError:
            if entry.engine is None:
                raise
            # its drafter may be one that our engine does not know
            fit = require_memory(located.target, **about)
        left = int(REQUESTS_SHARE * (fit.free - fit.weights))
        parallel = min(max(left // max(fit.caches + fit.drafter, 1), 1), MOST_PARALLEL)
        target = load_target(located.target, entry.dtype, entry.quantize)
        fit_threads(target.target.hidden_size)
        if entry.engine is not None:
            external = open_external_engine(entry.engine, target, *located.external)
            return cls(located, target, external, parallel=parallel)
        model = cls(located, target, parallel=parallel)
        model.drafter("default")
        return model

    @property
    def entry(self) -> ModelEntry:
        return self.located.entry

    @property
    def external_drafter(self) -> str | None:
        """What the external engine drafts with; no path of this machine."""
        source = self.entry.drafter
        return None if source is None else Path(source.path).name if source.path else str(source)

    @property
    def block(self) -> int | None:
        """Tokens of a verify forward where a request says nothing; None lets the draft length choose."""
        return None if self.entry.block == "auto" or self.external else int(self.entry.block)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.target.tokenizer, self.target.target.vocab_size)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; where a tokenizer leaves out blanks, a text may be longer."""
        return max(map(len, self.target.tokenizer.get_vocab()))

    @property
    def context(self) -> int | None:
        """Positions of prompt and answer together; None for no bound."""
        known = [bound for bound in (self.target.context, self.entry.context) if bound is not None]
        return min(known, default=None)

    def refuse_tokens(self, param: str, tokens: Iterable[int], **code: str) -> None:
        most = self.target.target.vocab_size
        if odd := [token for token in tokens if token >= most]:
            text = f"{param}: {odd[0]} is no token of this model, whose ids end at {most - 1}"
            raise invalid(param, text, **code)

    def drafter(self, word: str) -> LoadedDrafter | None:
        if self.external is not None:
            return None
        if word not in self._drafters:
            spec = {"default": self.located.drafter, LOOKUP: LOOKUP}.get(word)
            self._drafters[word] = open_drafter(spec, self.target, self.entry.dtype) if spec else None
        return self._drafters[word]

    def check(self, request: DecodeRequest) -> str | None:
        """Raise Refusal for what this model cannot do; return why its external engine cannot decode it."""
        obstacle, external, policy = None, self.external, request.channel.policy
        try:
            if external is None:
                self._check_policy(policy)
            elif reason := external.obstacle(policy):
                obstacle = f"the engine {external.name} cannot decode under {policy.spec}: {reason}"
        except (ConfigurationError, ModelError) as error:
            raise invalid("kv_channel", str(error).removeprefix("--kv ")) from None
        if external is not None and obstacle is None:
            check_external_request(external, request)
            return None
        if external is not None and request.drafter == LOOKUP:
            raise unsupported(f"drafter {LOOKUP} with the engine {external.name}", "drafter")
        drafter, block = self.drafter(request.drafter), request.block or 1
        if block > 1 and drafter is None:
            text = f"block {block} needs a drafter, and this request has none; leave block out"
            raise invalid("block", text)
        if drafter is not None and block > (most := 2 * drafter.drafter.block_size):
            raise invalid("block", f"block {block} is more than {most}, twice what this drafter was made for")
        return obstacle

    @cached_property
    def _check_policy(self) -> Callable[[KVPolicy], None]:
        """Requests may spell out any number of policies."""
        return lru_cache(256)(partial(refuse_policy, self.target.target.model))

    @cached_property
    def _measured(self) -> Callable[[KVPolicy], KVPolicy]:
        own = {"model": self.target.target.model, "tokenizer": self.target.tokenizer}
        return lru_cache(256)(partial(measured, **own))

    def why_off(self, request: DecodeRequest) -> str | None:
        if request.drafter == "none":
            return "the request asked for no drafter"
        if self.drafter(request.drafter) is None:
            return "this model is served without a drafter"
        return "the request asked for a block of 1" if request.block == 1 else None

    def key(self, request: DecodeRequest) -> CacheKey:
        """What snapshots depend on besides their tokens: model and drafter by their weights, the policy, the
        template, and the API key, as how much of a prompt is cached would tell others what was said.
        """
        loaded, policy = self.drafter(request.drafter), self._measured(request.channel.policy)
        card = loaded.card if loaded else None
        drafter = (loaded.drafter.name, loaded.settings, _weights(card)) if loaded else None
        facts = [*self._identity, policy.spec, policy.bits_text, drafter, request.owner]
        return CacheKey(self.entry.name, _digest(json.dumps(facts)))

    @cached_property
    def _identity(self) -> list[Any]:
        """The target with its configuration and template, and the library that computes it."""
        folder, template = self.target.folder, self.target.tokenizer.chat_template
        config = folder / "config.json" if folder else None
        read = config.read_text(encoding="utf-8") if config and config.exists() else ""
        versions = [version("mlx"), version("mlx-lm")]
        return [_weights(self.target.card), _digest(read), _digest(str(template)), *versions]

    def open(
        self,
        request: DecodeRequest,
        cache: PromptCache,
        *,
        chunk: int,
        submitted: float,
        obstacle: str | None,
    ) -> RequestDecoder:
        """Begin to decode a request with our engine; ``obstacle`` is why an external one cannot."""
        why_off, loaded = self.why_off(request), self.drafter(request.drafter)
        if obstacle is not None:
            logger.warning("%s: %s; decoding plainly", self.entry.name, obstacle)
            why_off = f"plain decoding: {obstacle}"
        drafter = loaded.drafter.twin() if loaded else None
        policy = self._measured(request.channel.policy)
        return RequestDecoder(
            request,
            self.target,
            Session(self.target.target, drafter, headroom=self._headroom, policy=policy),
            cache,
            self.key(request),
            draft_length=self._draft_length(request, drafter),
            chunk=chunk,
            submitted=submitted,
            why_off=why_off,
            fallback_from=None if self.external is None else self.external.name,
        )

    def close(self, decoder: RequestDecoder) -> None:
        """Close a request's session, and keep what its draft length has measured."""
        try:
            decoder.session.close()
        except Exception:
            logger.exception("a session cannot be closed")
        drafter, request = decoder.session.drafter, decoder.request
        if drafter is not None and request.block is None:
            _bound(self._draft_lengths)
            self._draft_lengths[request.channel.policy.spec, request.drafter].append(decoder.draft_length)

    @cached_property
    def _headroom(self) -> int:
        """The longest block; the same for all requests, so that those of any drafter share a batch."""
        known = (self.drafter(word) for word in ("default", LOOKUP))
        return max((2 * loaded.drafter.block_size for loaded in known if loaded is not None), default=1)

    def _draft_length(self, request: DecodeRequest, drafter: Drafter | None) -> DraftLength:
        """One that has learnt from earlier requests, or a separate one for a fixed block."""
        if drafter is None:
            return FixedDraftLength(1)
        if request.block is not None:
            return FixedDraftLength(request.block)
        idle = self._draft_lengths[request.channel.policy.spec, request.drafter]
        return idle.pop() if idle else AdaptiveDraftLength.of(drafter)

    def batch_draft_length(self, rows: Sequence[SequenceDecoder]) -> DraftLength:
        """What chooses the blocks of a batch: it has learnt from earlier ones of about this size."""
        drafters = {row.session.drafter.name: row.session.drafter for row in rows if row.session.drafter}
        if not drafters:
            return FixedDraftLength(1)
        policies = frozenset(row.session.policy.spec for row in rows)
        size = (len(rows) - 1).bit_length()  # 2, 4, 8 … sequences
        key = policies, frozenset(drafters), size
        if key not in self._batch_draft_lengths:
            _bound(self._batch_draft_lengths)
            longest = max(drafters.values(), key=lambda drafter: drafter.draft_forwards(1))
            self._batch_draft_lengths[key] = AdaptiveDraftLength.of(longest, margin=BATCH_MARGIN)
        return self._batch_draft_lengths[key]


def _bound(learned: dict[Any, Any]) -> None:
    """Forget the oldest of too many: requests may spell out any number of policies."""
    while len(learned) >= REMEMBERED:
        del learned[next(iter(learned))]


def _weights(card: Model | None) -> tuple[str, str, str | None] | None:
    return None if card is None else (card.weights_sha256, card.dtype, card.quantization)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
