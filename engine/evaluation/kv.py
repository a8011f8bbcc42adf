"""The shoot-out of KV policies: what each stores, and its effect on keys, values, answers, drafts and speed.

The first retrieval prompts are run once more, untimed, to compare live caches with native ones:

    distortion = sum over layers, heads, positions of |x - y|² / sum of |x|²      x native, y the policy's

of what the next query would see in the layers that the policy applies to. A position that the policy's cache
no longer holds counts as lost, y = 0; what it holds beyond the native cache's window is not compared.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from engine.cache.policy import NATIVE, KVPolicy, parse_policy
from engine.cache.stats import KVUse, VisibleRows, held, kv_use
from engine.config import Engine, Options, open_engine
from engine.device import Runtime, read_float, wait
from engine.drafters.prompt_lookup import PromptLookup
from engine.errors import ConfigurationError, GenerationError, PromptError
from engine.evaluation import measure
from engine.evaluation.haystack import Haystack, generate
from engine.evaluation.prompts import Prompt, answer_of, load_prompts
from engine.evaluation.report import sample
from engine.generate import ChatSwitches, Outcome
from engine.model_card import drafters_of
from engine.restoration.sources import LEARNED
from engine.session import Session
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET
from evidence_format.model import Arm, Control, Report, ReportClaim, Sample
from evidence_format.policies import MEANINGFUL

# The acceptance matrix: native caches, and lattices of falling precision in every layer.
MATRIX = ("lattice:e8,38@all", "lattice:e8,10@all", "lattice:e8,4@all")
POLICIES = (
    "sliding-bounded:0,16",  # half of the shipped target's own windows
    "sink-window:4,64",
    "affine:8,64",
    "affine:4,64",
    "rotated:4,64",
    "lattice:d4,38",
    "lattice:e8,38",
    # one pair on the same layers and at equal stored bits: what the lattice adds to the rotation
    "rotated:5,64@inner:2",
    "lattice-packed:e8,5",
    "restored:learned",
    "restored:exact",
    "restored:zeros",
    "restored:noise",
)
DEPTHS = (0.0, 0.2, 0.4, 0.6, 0.8)  # of the retrieval prompts; their other defaults are those of Haystack
BLOCK = "8"
NO_PROMPTS = "none"
EXAMINED = 10  # prompts on which live caches are compared: two of every depth
ORACLE, BASELINE = "oracle", "native"
NO_NEEDLE: Literal["no_needle"] = "no_needle"
MOST_ARMS = 32  # of a report
# Of sources listed together the first is under test; the others, exact and noise always, are its controls.
TESTED: tuple[Any, ...] = (LEARNED, "exact", "zeros", "noise")
CONTROLS = ("exact", "noise")
Layers = dict[int, VisibleRows]


class Distortion(NamedTuple):
    """Relative squared error against native caches."""

    keys: float
    values: float


@dataclass(frozen=True)
class KVSwitches(measure.BoundedSwitches):
    """What the command line can set about a shoot-out; see its help."""

    policies: tuple[str, ...] = POLICIES
    haystack: Haystack = field(default_factory=lambda: Haystack().with_defaults(depths=DEPTHS))
    answer_tokens: int = measure.at_least(16)
    speed_prompts: str = "code"
    speed_limit: int = measure.at_least(8)
    max_tokens: int = measure.at_least(64)
    seed: int = 0
    claim_parity: tuple[str, ...] = ()
    claim_bytes: tuple[str, ...] = ()
    chat: ChatSwitches = field(default_factory=ChatSwitches)
    retrieval: bool = True  # False: no prompts with a needle, so no oracle and no control of them

    def check(self) -> None:
        super().check()
        if self.retrieval and self.answer_tokens > self.max_tokens:
            raise ConfigurationError(
                f"--answer-tokens {self.answer_tokens} is more than --max-tokens {self.max_tokens}"
            )
        parsed = self.parsed
        if NATIVE in parsed:
            raise ConfigurationError("--policies: native is the baseline and always runs; leave it out")
        if not parsed:
            raise ConfigurationError("--policies must name at least one policy")
        if twice := [each.spec for each in parsed if parsed.count(each) > 1]:
            raise ConfigurationError(f"--policies names {twice[0]} twice")
        claimed = [("--claim-parity", parse_policy(text)) for text in self.claim_parity]
        claimed += [("--claim-bytes", policy) for policy, _ in self.bytes_claimed]
        for flag, policy in claimed:
            if policy not in parsed:
                raise ConfigurationError(f"{flag} {policy.spec}: it is none of --policies")
        if self.claim_parity and self.speed_prompts != NO_PROMPTS:
            raise ConfigurationError(
                "--claim-parity claims recall of prompts that all hold a needle; add --speed-prompts none"
            )

    @property
    def parsed(self) -> tuple[KVPolicy, ...]:
        return tuple(parse_policy(text) for text in self.policies)

    @property
    def bytes_claimed(self) -> list[tuple[KVPolicy, int]]:
        found = []
        for text in self.claim_bytes:
            policy, _, count = text.rpartition("=")
            if not count.isascii() or not count.isdigit() or int(count) < 1:
                raise ConfigurationError(f"--claim-bytes {text}: write POLICY=BYTES, e.g. affine:4,64=200000")
            found.append((parse_policy(policy), int(count)))
        return found


def settled(options: Options) -> Options:
    """The switches with the shoot-out's defaults: the shipped drafter alone, and one block length."""
    if options.kv != NATIVE.spec:
        raise ConfigurationError(
            f"eval kv compares policies; give --policies {options.kv!r} in place of --kv"
        )
    shipped = options.model is None or options.model.resolve() == SHIPPED_TARGET.resolve()
    default = str(SHIPPED_DRAFTER) if shipped else "none"
    drafter = default if options.drafter is None else options.drafter
    fixed = drafter != "none" and options.block == "auto"
    return replace(options, drafter=drafter, block=BLOCK if fixed else options.block)


def drafters_here(model: Path | None) -> list[str]:
    """Drafters on this machine that fit a target, networks first; ``--drafter`` texts."""
    found = [each["drafter"] for each in drafters_of(model or SHIPPED_TARGET) if each["here"]]
    return sorted(found, key=lambda spec: spec == PromptLookup.name)


def open_shootout(options: Options, context: int | None = None) -> Engine:
    """The engine that the arms share; a projector is for the policies, not for it."""
    return replace(open_engine(replace(options, projector=None), context), options=options)


def measure_kv(
    engine: Engine, switches: KVSwitches, runtime: Runtime, *, command: str = "eval kv", **context: Any
) -> Report:
    """Run all arms over all prompts."""
    switches.check()
    arms = arms_of(engine, switches.parsed, retrieval=switches.retrieval)
    cards = {role: card for of, _ in arms for role, card in measure.models(of).items()}
    evaluation = measure.Evaluation("kv", command, engine, switches, runtime, **context, cards=cards)
    prompts = made_prompts(engine, switches)
    emptied = [prompt.without_needle() if prompt.needle else prompt for prompt in prompts]
    encoded, empty = (measure.encode_all(engine, some, switches.chat) for some in (prompts, emptied))
    kept = max((each.span for each in switches.parsed if each.source is not None), default=0)
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if len(tokens) <= kept:
            raise PromptError(
                f"prompt {prompt.id} has {len(tokens)} tokens; {kept} are kept, and none is restored; "
                "give longer ones, or --speed-prompts none"
            )
    limits = {
        tuple(tokens): switches.max_tokens if prompt.needle is None else switches.answer_tokens
        for prompt, tokens in zip([*prompts, *prompts], [*encoded, *empty], strict=True)
    }
    native = lru_cache(maxsize=1)(partial(held_after, arms[0][0]))
    examined = {tuple(tokens) for tokens in encoded[:EXAMINED]}

    def run(of: Engine, arm: Arm, some: Sequence[list[int]]) -> list[Outcome]:
        return [
            measure.run_arm(of, arm, tokens, limits[tuple(tokens)], of.new_draft_length()) for tokens in some
        ]

    def row(of: Engine, prompt: Prompt, tokens: Sequence[int], outcome: Outcome) -> Sample:
        found = None
        if of.policy != NATIVE and tuple(tokens) in examined:
            found, use = examine(of, tokens, outcome.tokens, native(tuple(tokens)))
            outcome = outcome if outcome.kv is not None else replace(outcome, kv=use)
        answer = answer_of(of.target.tokenizer, tokens, outcome.text)
        return sample(prompt, tokens, outcome, answer_text=answer, distortion=found)

    for of, arm in arms:
        asked, ids = (emptied, empty) if arm.control == NO_NEEDLE else (prompts, encoded)
        parts = (partial(run, of, arm), partial(row, of), f"running {arm.name}")
        evaluation.runs.append(measure.ArmRun(arm, asked, ids, *parts))

    def warm_up() -> None:
        for number, each in enumerate(evaluation.runs, 1):
            detail = f"{each.arm.name}, {number} of {len(arms)}"
            evaluation.progress(0, evaluation.total, "warming up", detail)
            each.run([each.encoded[0], each.encoded[-1]])

    evaluation.run(warm_up)
    return evaluation.report(_claims([arm for _, arm in arms], switches), "kv")


def made_prompts(engine: Engine, switches: KVSwitches) -> list[Prompt]:
    """Retrieval prompts, their needles before every window, then those that are decoded for longer."""
    made = (
        []
        if not switches.retrieval
        else generate(
            engine.target.tokenizer,
            **asdict(switches.haystack.with_defaults()),
            seed=switches.seed,
            beyond=max((each.span for each in switches.parsed), default=0),
            switches=switches.chat,
        )
    )
    if switches.speed_prompts == NO_PROMPTS:
        return made
    longer = load_prompts(switches.speed_prompts, switches.speed_limit)
    if found := [prompt.id for prompt in longer if prompt.needle is not None]:
        raise PromptError(f"--speed-prompts takes prompts without a needle; {found[0]} has one")
    return [*made, *longer]


def _claims(arms: Sequence[Arm], switches: KVSwitches) -> list[ReportClaim]:
    parity = [
        ReportClaim(name="recall_parity", arm=parse_policy(text).spec, baseline=ORACLE)
        for text in switches.claim_parity
    ]
    resident = [
        ReportClaim(name="resident_bytes", arm=policy.spec, at_most=most)
        for policy, most in switches.bytes_claimed
    ]
    restoring = [arm.name for arm in arms if arm.role == "sut" and arm.system.restoration in MEANINGFUL]
    return [*parity, *resident, *(ReportClaim(name="restoration", arm=name) for name in restoring)]


def arms_of(
    engine: Engine, policies: Sequence[KVPolicy], *, retrieval: bool = True
) -> list[tuple[Engine, Arm]]:
    """Empty arms and their engines: oracle, baseline, policies and their controls, ``no_needle``.

    Without ``retrieval`` neither oracle nor ``no_needle``.
    """
    native = replace(engine, policy=NATIVE, restoration=None)
    oracle, baseline = measure.plain_arm(ORACLE, "oracle"), measure.our_arm(native, BASELINE, "baseline")
    arms = [(native, oracle)] * retrieval + [(native, baseline)]
    for policy, control in with_controls(policies).items():
        ours = measure.under(engine, policy)
        arms.append((ours, measure.our_arm(ours, policy.spec, "control" if control else "sut", control)))
    if retrieval:
        arms.append((native, measure.our_arm(native, NO_NEEDLE, "control", NO_NEEDLE)))
    if len(arms) > MOST_ARMS:
        raise ConfigurationError(
            f"--policies asks for {len(arms)} arms, controls included; a report holds {MOST_ARMS}"
        )
    return arms


def with_controls(policies: Sequence[KVPolicy]) -> dict[KVPolicy, Control | None]:
    """Every policy to run, each with the control it is; restoring ones get the controls they lack."""
    found: dict[KVPolicy, Control | None] = {}
    for policy in policies:
        if policy.source is None:
            found[policy] = None
            continue
        alike = {source: replace(policy, source=source) for source in TESTED}
        listed = [source for source in TESTED if alike[source] in policies]
        for source in dict.fromkeys((*listed, *CONTROLS)):
            found[alike[source]] = None if source == listed[0] else source
    return found


def examine(
    engine: Engine, tokens: Sequence[int], generated: Sequence[int], native: Layers
) -> tuple[Distortion, KVUse]:
    """Run a prompt and what followed once more; compare the policy's layers with native caches."""
    layers = engine.policy.chosen_layers(engine.target.target.model)
    with _prefilled(engine, tokens) as session:
        found = distortion(native, _rows(session.caches), layers)
        if generated[:-1]:  # the last token is in no cache
            session.prefill(generated[:-1])
        if (use := kv_use(session.caches)) is None:
            ours = _rows(session.caches)
            plain = [rows for layer in layers for rows in (ours[layer].keys, ours[layer].values)]
            use = KVUse(tuple(layers), sum(r.size for r in plain), sum(r.nbytes for r in plain))
        return found, use


def held_after(engine: Engine, tokens: Sequence[int]) -> Layers:
    """What caches of the engine's policy hold of a whole prompt, by layer."""
    with _prefilled(engine, tokens) as session:
        return _rows(session.caches)


def distortion(native: Layers, ours: Layers, layers: Sequence[int]) -> Distortion:
    """Relative squared error of keys and of values over some layers; 0 for none."""
    shares = []
    if missing := [layer for layer in layers if layer not in native or layer not in ours]:
        raise GenerationError(f"layer {missing[0]} holds no keys and values to compare")
    for name in ("keys", "values"):
        error = norm = 0.0
        for layer in layers:
            reference, found = native[layer], ours[layer]
            whole = getattr(reference, name).astype(mx.float32)
            aligned = _aligned(found.positions, getattr(found, name), reference).astype(mx.float32)
            error += read_float(mx.square(whole - aligned).sum())
            norm += read_float(mx.square(whole).sum())
        shares.append(error / norm if norm else 0.0)
    return Distortion(*shares)


def _aligned(positions: Sequence[int], rows: mx.array, reference: VisibleRows) -> mx.array:
    """Rows at the reference's positions, zeros for lost ones: [1, KV heads, n, D]."""
    place = {position: index for index, position in enumerate(positions)}
    index = [place.get(position, len(positions)) for position in reference.positions]
    lost = mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype)
    return mx.concatenate([rows, lost], axis=2)[:, :, mx.array(index)]


@contextmanager
def _prefilled(engine: Engine, tokens: Sequence[int]) -> Iterator[Session]:
    """Compute a prompt as decoding does: in chunks, its last token by itself."""
    options = replace(engine.options, compiled=False)
    with replace(engine, options=options, drafter=None).open_session(1) as session:
        for start in range(0, len(tokens) - 1, options.prefill_chunk):
            session.prefill(tokens[start : min(start + options.prefill_chunk, len(tokens) - 1)])
        session.transaction.begin(len(session.uncached) + 1)
        session.forward(mx.array([[*session.uncached, tokens[-1]]], mx.int32))
        session.commit(tokens[-1:], None)
        yield session


def _rows(caches: Sequence[Any]) -> Layers:
    """What the caches hold, computed; layers without keys and values are left out."""
    found = {layer: rows for layer, cache in enumerate(caches) if (rows := held(cache)) is not None}
    wait([(rows.keys, rows.values) for rows in found.values()])
    return found
