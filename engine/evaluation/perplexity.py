"""How much worse does the target predict a text under a KV policy, or with packed weights?

The text is cut into chunks of equal length. Each is read with empty caches, in pieces of ``--piece``
positions, first under the one system, then under the other; what a piece reads of earlier pieces comes out of
the policy's caches. So a chunk gives a pair of figures, and their difference an interval:

    nll       mean of -ln p(token | tokens before it in the chunk), nats
    increase  mean over the chunks of the policy's nll less the native one
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from engine.cache.policy import NATIVE
from engine.cache.stats import KVUse, kv_use
from engine.cache.transaction import resident
from engine.config import Engine, Options, open_engine
from engine.device import Runtime, read_float, wait
from engine.errors import ConfigurationError, MachineError, PromptError
from engine.evaluation import measure
from engine.evaluation.environment import LoadWatch, describe
from engine.evaluation.prompts import SHIPPED_SETS, load_prompts
from engine.evaluation.report import build_report, kv_record, now
from engine.evaluation.throughput import refuse_restoring
from engine.generate import ChatSwitches, tokens_of
from engine.memory import fit, require_memory, verdict
from engine.target.loading import SHIPPED_TARGET
from evidence_format.claims import FEWEST_CHUNKS
from evidence_format.model import (
    PerplexityComparison,
    Report,
    ReportClaim,
    ReportRequest,
    ScoredChunk,
)
from evidence_format.text import text_digest, tokens_digest

SAMPLE = "sample"
TWICE = "does not fit in memory twice, packed and as stored"
MORE = "free memory, or take a smaller model"
SAMPLE_FILE = Path(__file__).parent / "prompts" / "prose-and-code.txt"


@dataclass(frozen=True, kw_only=True)
class PerplexitySwitches(measure.BoundedSwitches):
    """What the command line can set about a perplexity evaluation."""

    text: str = SAMPLE
    chunk: int = measure.at_least(512, 2)
    piece: int = measure.at_least(32)
    limit: int | None = measure.at_least(None)
    max_increase: float | None = measure.at_least(None, 0, 100)

    def check(self) -> None:
        super().check()
        if self.piece >= self.chunk:
            raise ConfigurationError(
                f"--piece {self.piece} is not less than --chunk {self.chunk}: no chunk would read its caches"
            )


class Scores(NamedTuple):
    """What one system makes of a chunk."""

    nll: float  # mean, nats
    nbytes: int  # resident in the caches after it
    kv: KVUse | None


def open_pair(options: Options, context: int | None = None) -> tuple[Engine, Engine]:
    """The engine under test, without a drafter; and its target with native caches and weights as stored."""
    options = replace(options, drafter="none", block="auto")
    if options.quantize is not None:
        require_both(options, context)
    else:
        require_memory(options.model or SHIPPED_TARGET, dtype=options.dtype, context=context)
    ours = open_engine(options, context)
    refuse_restoring(ours)
    if ours.policy == NATIVE and options.quantize is None:
        raise ConfigurationError("there is nothing to compare with native caches; give --kv or --quantize")
    if options.quantize is None:
        return ours, replace(ours, policy=NATIVE)
    try:
        return ours, open_engine(replace(ours.options, kv=NATIVE.spec, quantize=None), context)
    except MachineError:  # the packing of the first took more than was predicted
        raise MachineError(f"{options.model or SHIPPED_TARGET} {TWICE}; {MORE}") from None


def require_both(options: Options, context: int | None) -> None:
    """Raise MachineError where packed weights, and those as stored, do not fit in memory together."""
    model = options.model or SHIPPED_TARGET
    run: dict[str, Any] = {"context": context, "dtype": options.dtype}
    packed = fit(model, kv=options.kv, quantize=options.quantize, **run)
    stored = fit(model, free=max(packed.free - packed.needed, 0), **run)
    if not stored.fits:
        raise MachineError(f"{model} {TWICE}: next to the packed one, {verdict(stored)}; {MORE}")


def measure_perplexity(
    ours: Engine,
    native: Engine,
    switches: PerplexitySwitches,
    runtime: Runtime,
    *,
    progress: Callable[[int, int, str, str], None] = lambda *_: None,
    request: ReportRequest | None = None,
) -> Report:
    """Score the text's chunks under both systems; PromptError for a text too short."""
    switches.check()
    started, watch = now(), LoadWatch()
    text = read_text(switches.text)
    beginning, chunks = chunks_of(native, text, switches)
    rows: list[ScoredChunk] = []
    with watch.timing():
        for number, tokens in enumerate(chunks):
            progress(number, len(chunks), "scoring", f"chunk {number + 1}, {ours.policy.spec}")
            fed = [*beginning, *tokens]
            plain, found = (score(engine, fed, switches.piece) for engine in (native, ours))
            rows.append(
                ScoredChunk(
                    tokens=len(fed) - 1,
                    tokens_sha256=tokens_digest(tokens),
                    native_nll=plain.nll,
                    policy_nll=found.nll,
                    native_bytes=plain.nbytes,
                    policy_bytes=found.nbytes,
                    kv=None if found.kv is None else kv_record(found.kv),
                )
            )
    claims = []
    if switches.max_increase is not None:
        if len(rows) < FEWEST_CHUNKS:
            raise PromptError(
                f"--max-increase is claimed of {FEWEST_CHUNKS} chunks or more, and the text has {len(rows)}; "
                "give a longer --text, a smaller --chunk or a larger --limit"
            )
        claims.append(ReportClaim(name="nll_increase", at_most=switches.max_increase))
    return build_report(
        "perplexity",
        started=started,
        claims=claims,
        environment=describe(runtime, watch, measure.models(ours)),
        configuration=measure.configuration(ours, runtime, "eval perplexity", switches),
        perplexity=PerplexityComparison(
            text_sha256=text_digest(text),
            piece=switches.piece,
            kv=ours.policy.spec,
            quantize=ours.options.quantize,
            chunks=tuple(rows),
        ),
        request=request,
    )


def read_text(name: str) -> str:
    """The shipped sample, the texts of a shipped set, or a file; PromptError where it cannot be read."""
    if name in SHIPPED_SETS:
        return "\n\n".join(prompt.text for prompt in load_prompts(name) if prompt.text)
    file = SAMPLE_FILE if name == SAMPLE else Path(name)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(
            f"--text {name} cannot be read: {error}; give a UTF-8 text file, {SAMPLE}, or a prompt set"
        ) from None


def chunks_of(engine: Engine, text: str, switches: PerplexitySwitches) -> tuple[list[int], list[list[int]]]:
    """What the tokenizer puts before a text, and the text in chunks of equal length, the rest left out."""
    tokenizer, name = engine.target.tokenizer, switches.text
    beginning = tokens_of("", tokenizer, ChatSwitches(), name)
    tokens = tokens_of(text, tokenizer, ChatSwitches(), name)[len(beginning) :]
    size = switches.chunk - len(beginning)
    context = engine.target.context
    if context is not None and switches.chunk > context:
        raise ConfigurationError(f"--chunk {switches.chunk} is more than the context of {context} tokens")
    chunks = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
    if not chunks:
        raise PromptError(f"--text {name} has {len(tokens)} tokens, fewer than --chunk {switches.chunk}")
    return beginning, chunks[: switches.limit]


def score(engine: Engine, tokens: list[int], piece: int) -> Scores:
    """Read a chunk in pieces through new caches of the engine's policy."""
    total = 0.0
    options = replace(engine.options, compiled=False)  # lengths of graphs would differ from chunk to chunk
    with replace(engine, options=options, drafter=None).open_session(piece) as session:
        for start in range(0, len(tokens), piece):
            part = tokens[start : start + piece]
            session.transaction.begin(len(session.uncached) + len(part))
            logits, _ = session.forward(mx.array([[*session.uncached, *part]], mx.int32))
            wanted = tokens[start + 1 : start + len(part) + 1]
            if wanted:  # of a last piece of one token nothing is left to predict
                scores = logits[0, -len(part) :][: len(wanted)].astype(mx.float32)
                chosen = mx.take_along_axis(scores, mx.array(wanted)[:, None], axis=-1)[:, 0]
                total += read_float((mx.logsumexp(scores, axis=-1) - chosen).sum())
            session.commit(part, None)
            wait([cache.state for cache in session.caches])
        return Scores(total / (len(tokens) - 1), resident(session.caches)[1], kv_use(session.caches))
