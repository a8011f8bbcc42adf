"""One measuring loop for every evaluation: arms x prompts, interleaved.

Every prompt (or batch) goes through all arms before the next one starts, every second one in reverse order.
A journal keeps finished rows. A disturbed machine makes the loop start over, never a result.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

from engine.cache.auto import measured
from engine.cache.policy import NATIVE, KVPolicy
from engine.config import Engine
from engine.device import Runtime, threads
from engine.draft_length import AdaptiveDraftLength, DraftLength
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.arms import plain, speculate, speculate_batch
from engine.evaluation.calibration import Calibration
from engine.evaluation.environment import LoadWatch, describe, target_card
from engine.evaluation.journal import Entry, Journal, fingerprint
from engine.evaluation.prompts import Prompt, answer_of, encode, raw_prompt
from engine.evaluation.report import build_report, now, sample
from engine.evaluation.rounding import compare_with_plain
from engine.generate import ChatSwitches, Messages, Outcome, SamplingOptions, token_limit
from engine.restoration.loading import open_restoration
from engine.restoration.sources import LEARNED
from engine.target.attention import refuse_policy
from evidence_format import model as evidence
from evidence_format.model import CUT_LOOPS, OUR_LOOP, PLAIN_LOOP, Arm, Model, Report, ReportRequest, Sample

Progress = Callable[[int, int, str, str], None]  # done, total, phase, detail
MakeRow = Callable[[Prompt, Sequence[int], Outcome], Sample]
COMPARING = "rounding and divergences"
RESTARTS = 3
WARM_UPS = 4


@dataclass
class ArmRun:
    """One arm, its prompts, and how to run them."""

    arm: Arm  # without rows
    prompts: Sequence[Prompt]  # the same ids in the same order for every arm of a measurement
    encoded: Sequence[list[int]]
    run: Callable[[Sequence[list[int]]], Sequence[Outcome]]  # from token ids of prompts to an outcome each
    row: MakeRow
    phase: str  # in the progress
    batched: bool = False  # all prompts of a turn are given to `run` at once
    samples: list[Sample] = field(default_factory=list)
    drafter_forwards: int = 0  # behind the samples, for `liveness`; the rows do not hold them


@dataclass
class Measured:
    """How a measurement went."""

    order: list[tuple[str, str]] = field(default_factory=list)  # arm and prompt id of every row, as run
    restarts: list[evidence.Restart] = field(default_factory=list)  # abandoned measurements, and why
    resumed: int = 0  # rows that an earlier process had finished


def measure(
    runs: Sequence[ArmRun],
    *,
    progress: Progress,
    batch: int = 1,
    journal: Journal | None = None,
    watch: Callable[[], str | None] | None = None,
    restarts: int = RESTARTS,
) -> Measured:
    """Fill the arms; ``watch``, called after every turn, may give a reason for one of the ``restarts``."""
    measured = Measured(restarts=[evidence.Restart(**each) for each in journal.restarts] if journal else [])
    kept = deque(journal.kept if journal else ())
    total = sum(len(run.prompts) for run in runs)

    def add_rows(run: ArmRun, part: slice) -> None:
        prompts = run.prompts[part]
        ids = [prompt.id for prompt in prompts]
        if kept:
            entry = kept.popleft()
            if (entry.arm, [row["prompt_id"] for row in entry.rows]) != (run.arm.name, ids):
                raise ConfigurationError(
                    f"the journal has rows of {entry.arm} where {run.arm.name} comes next; "
                    "use --no-resume to start over"
                )
            measured.resumed += len(ids)
            rows = [Sample.model_validate(row, strict=False) for row in entry.rows]
            forwards = entry.drafter_forwards
        else:
            progress(len(measured.order), total, run.phase, f"{ids[0]}{rate_text(run.samples)}")
            outcomes = run.run(run.encoded[part])
            rows = [run.row(*each) for each in zip(prompts, run.encoded[part], outcomes, strict=True)]
            forwards = sum(outcome.drafter_forwards for outcome in outcomes)
            if journal:
                values = [row.model_dump(mode="json", exclude_unset=True) for row in rows]
                journal.add(Entry(run.arm.name, values, forwards))
        run.samples.extend(rows)
        run.drafter_forwards += forwards
        measured.order.extend((run.arm.name, identifier) for identifier in ids)

    while True:
        reason, watched = None, watch if len(measured.restarts) < restarts else None
        for turn in _turns(runs, batch):
            for run, part in turn:
                add_rows(run, part)
            if watched and not kept and (reason := watched()):
                break
        if reason is None:
            return measured
        abandoned = evidence.Restart(after_samples=len(measured.order), reason=reason)
        if journal:
            journal.restart(abandoned.model_dump())
        measured = Measured(restarts=[*measured.restarts, abandoned])
        for run in runs:
            run.samples.clear()
            run.drafter_forwards = 0
        progress(0, total, "measuring again", f"({reason})")


def rate_text(rows: Sequence[Sample]) -> str:
    """What rows decoded per second so far, as the client of a runner reads it off the progress line."""
    seconds = sum(row.decode_s or 0.0 for row in rows)
    return f" {sum(row.decoded for row in rows) / seconds:.1f} tok/s" if seconds else ""


def _turns(runs: Sequence[ArmRun], batch: int) -> Iterator[list[tuple[ArmRun, slice]]]:
    count = len(runs[0].prompts)
    for turn, start in enumerate(range(0, count, batch)):
        end = min(start + batch, count)
        steps = []
        for run in runs if turn % 2 == 0 else reversed(runs):
            size = batch if run.batched else 1
            steps += [(run, slice(at, min(at + size, end))) for at in range(start, end, size)]
        yield steps


@dataclass
class Evaluation:
    """One evaluation: create it before any work, `add` arms, `run` them, then build the `report`."""

    kind: evidence.Kind  # of the report
    command: str  # as the configuration names it
    engine: Engine
    switches: Any
    runtime: Runtime
    progress: Progress = lambda *_: None
    request: ReportRequest | None = None
    journal: Journal | None = None
    cards: dict[str, Model] = field(default_factory=dict)  # of models that only some arms run
    resumable: bool = True  # the report counts the rows of earlier processes

    def __post_init__(self) -> None:
        self.started, self.watch = now(), LoadWatch()
        self.settings = configuration(self.engine, self.runtime, self.command, self.switches)
        self.draft_length = self.engine.new_draft_length()
        self.batch: int = getattr(self.switches, "batch", 1)
        self.runs: list[ArmRun] = []
        self.measured = Measured()
        self.warm_up_forwards = 0

    @property
    def arms(self) -> list[Arm]:
        return [run.arm.model_copy(update={"samples": tuple(run.samples)}) for run in self.runs]

    def add(
        self,
        arm: Arm,
        prompts: Sequence[Prompt],
        encoded: Sequence[list[int]],
        phase: str,
        *,
        engine: Engine | None = None,
        options: SamplingOptions | None = None,
    ) -> None:
        """Add an arm that decodes the switches' ``max_tokens``, our loop in batches where they ask for it."""
        used = engine or self.engine
        length = self.draft_length if used.drafter else used.new_draft_length()
        batched = self.batch > 1 and arm.system.loop == OUR_LOOP
        most = self.switches.max_tokens

        def run(some: Sequence[list[int]]) -> Sequence[Outcome]:
            if batched:
                return speculate_batch(used, some, most, length)
            return [run_arm(used, arm, tokens, most, length, options=options) for tokens in some]

        row = partial(scored_row, used.target.tokenizer)
        self.runs.append(ArmRun(arm, prompts, encoded, run, row, phase, batched))

    def run(
        self,
        warm_up: Callable[[], object] | None = None,
        watch: Callable[[], str | None] | None = None,
        restarts: int = RESTARTS,
    ) -> None:
        first = self.runs[0]
        if self.journal:
            marks = (self._environment(), self.settings, first.prompts, first.encoded, self.request)
            self.journal.open(fingerprint(*marks))
            self.started = self.journal.started
        self.progress(0, self.total, "warming up", first.prompts[0].id)
        (warm_up or self.warm_up)()
        with self.watch.timing():
            self.measured = measure(
                self.runs,
                progress=self.progress,
                batch=self.batch,
                journal=self.journal,
                watch=watch,
                restarts=restarts,
            )

    @property
    def total(self) -> int:
        return sum(len(run.prompts) for run in self.runs)

    def warm_up(self) -> None:
        """Run plain decoding and our loop, untimed; an adaptive draft length measures its blocks."""
        engine, encoded, length = self.engine, self.runs[0].encoded, self.draft_length
        most, chunk, longest = self.switches.max_tokens, engine.options.prefill_chunk, max(encoded, key=len)
        plain(engine.target, encoded[0], most, chunk)
        if self.batch == 1 and len(longest) > len(encoded[0]):  # so that its shapes are not new in a row
            plain(engine.target, longest, 1, chunk)
            self.warm_up_forwards += speculate(engine, longest, 1, length).drafter_forwards
        tried = Calibration(length) if isinstance(length, AdaptiveDraftLength) else length
        # the first text may end before every block was tried
        for turn in range(WARM_UPS if self.batch > 1 else min(WARM_UPS, len(encoded))):
            start = turn * self.batch % len(encoded)
            if self.batch > 1:
                warm = speculate_batch(engine, encoded[start : start + self.batch], most, tried)
            else:
                warm = [speculate(engine, encoded[start], most, tried)]
            self.warm_up_forwards += sum(outcome.drafter_forwards for outcome in warm)
            if not isinstance(tried, Calibration) or tried.finished:
                break

    def report(
        self,
        claims: Sequence[evidence.ReportClaim],
        checking: str = COMPARING,
        compared: int = 0,
        **settings: Any,
    ) -> Report:
        """Build the report; the first arms, ``compared`` of them, are compared by `compare_with_plain`."""
        self.progress(self.total, self.total, "checking", checking)
        arms, encoded = self.arms, self.runs[0].encoded
        found = compare_with_plain(self.engine, encoded, arms[:compared]) if compared else {}
        resumed = {"resumed": self.measured.resumed} if self.resumable else {}
        return build_report(
            self.kind,
            started=self.started,
            claims=claims,
            environment=self._environment(),
            configuration=self.settings | resumed | settings,
            arms=arms,
            drafter_forwards=sum(run.drafter_forwards for run in self.runs),
            warm_up_forwards=self.warm_up_forwards,
            order=self.measured.order,
            restarts=self.measured.restarts,
            request=self.request,
            **found,
        )

    def report_row(self, content: str | Messages, tokens: list[int], outcome: Outcome) -> Report:
        prompt = raw_prompt(content)
        arm = our_arm(self.engine, "speculative" if self.engine.drafter else "kakeya")
        self.add(arm, [prompt], [tokens], "generating")
        self.runs[0].samples.append(sample(prompt, tokens, outcome))
        self.runs[0].drafter_forwards = outcome.drafter_forwards
        self.measured.order.append((arm.name, prompt.id))
        return self.report([], "")

    def _environment(self) -> dict[str, Any]:
        return describe(self.runtime, self.watch, models(self.engine) | self.cards)


def plain_arm(name: str, role: evidence.ArmRole = "baseline") -> Arm:
    """An empty arm of mlx-lm's plain decoding."""
    system = evidence.System(loop=PLAIN_LOOP, drafter=None, block=None, kv=NATIVE.spec, restoration=None)
    return Arm(name=name, role=role, control=None, system=system, timing_scope="decode", samples=())


def our_arm(
    engine: Engine, name: str, role: evidence.ArmRole = "sut", control: evidence.Control | None = None
) -> Arm:
    """An empty arm of our loop with the engine's drafter, block and policy."""
    system = evidence.System(
        loop=OUR_LOOP,
        drafter=engine.drafter.drafter.name if engine.drafter else None,
        block=None if engine.alone else engine.options.block,
        kv=engine.policy.spec,
        restoration=engine.policy.source,
    )
    return Arm(name=name, role=role, control=control, system=system, timing_scope="decode", samples=())


def under(engine: Engine, policy: KVPolicy) -> Engine:
    """The same engine under another policy, refused where it does not fit the model or lacks a projector."""
    model, options = engine.target.target.model, engine.options
    refuse_policy(model, policy)
    policy = measured(policy, model, engine.target.tokenizer)
    restoration = open_restoration(
        policy,
        engine.target,
        model=options.model,
        projector=options.projector if policy.source == LEARNED else None,
        drafter=options.drafter,
        dtype=options.dtype,
    )
    return replace(engine, policy=policy, restoration=restoration)


def run_arm(
    engine: Engine, arm: Arm, tokens: Sequence[int], max_tokens: int, length: DraftLength, **options: Any
) -> Outcome:
    """One prompt through one arm."""
    if arm.system.loop == PLAIN_LOOP:
        return plain(engine.target, tokens, max_tokens, engine.options.prefill_chunk)
    return speculate(engine, tokens, max_tokens, length, **options)


def scored_row(tokenizer: Any, prompt: Prompt, tokens: Sequence[int], outcome: Outcome) -> Sample:
    """The row of one outcome, with the answer that its text gives."""
    return sample(prompt, tokens, outcome, answer_text=answer_of(tokenizer, tokens, outcome.text))


def encode_all(
    engine: Engine, prompts: Sequence[Prompt], switches: ChatSwitches | None = None
) -> list[list[int]]:
    """Tokens of every prompt, checked: two more fit the context, a switch of the template has a use."""
    switches = switches or ChatSwitches()
    if switches.given and not switches.chat and all(prompt.messages is None for prompt in prompts):
        raise ConfigurationError(
            f"{switches.given[0]} is for the chat template, and none of these prompts is a conversation; "
            "add --chat to make them some"
        )
    target = engine.target
    size, context = target.target.vocab_size, target.context
    encoded = [encode(prompt, target.tokenizer, size, context, switches) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if token_limit(target, len(tokens), 2) < 2:
            raise PromptError(f"prompt {prompt.id} leaves no space in the context of {target.context} tokens")
    return encoded


def models(engine: Engine) -> dict[str, Model]:
    """The model cards of the environment block, by role."""
    drafter, restoration = engine.drafter, engine.restoration
    cards = {"target": target_card(engine.target)}
    if drafter and drafter.card:
        cards["drafter"] = drafter.card.model_copy(update={"largest_block": 2 * drafter.drafter.block_size})
    if restoration and restoration.learned:
        cards["projector"] = restoration.learned.card
    return cards


def configuration(engine: Engine, runtime: Runtime, command: str, switches: Any) -> dict[str, Any]:
    """Every switch of the run, flat; ``switches`` is the evaluation's own dataclass."""
    options = engine.options
    return {
        "command": command,
        "block": options.block if engine.drafter else "1",
        "drafter": engine.drafter.drafter.name if engine.drafter else None,
        "drafter_settings": engine.drafter.settings if engine.drafter else None,
        "kv": engine.policy.spec,
        **({"layer_bits": engine.policy.bits_text} if engine.policy.layer_bits else {}),
        "quantize": options.quantize,
        "projector": options.projector.name if options.projector else None,
        "prefill_chunk": options.prefill_chunk,
        "dtype": engine.target.card.dtype,
        "fused_kernels": runtime.compiles,
        "compiled": options.compiled,
        "single_graph": options.single_graph,
        "blas_threads": threads(),
        "loops": CUT_LOOPS,
        **_flattened(asdict(switches)),
    }


def _flattened(values: dict[str, Any]) -> dict[str, Any]:
    """Groups of switches without their level; a list as one line of JSON, or None where it is empty."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flattened(value)
        else:
            flat[name] = (json.dumps(value) if value else None) if isinstance(value, list | tuple) else value
    return flat


def at_least(default: int | None, low: float = 1, high: float = math.inf) -> Any:
    """A switch with bounds that `BoundedSwitches.check` checks; None is always allowed."""
    return field(default=default, metadata={"low": low, "high": high})


class BoundedSwitches:
    """Dataclasses of switches whose bounds are with the fields."""

    def check(self) -> None:
        for each in fields(cast(Any, self)):
            value, bounds = getattr(self, each.name), each.metadata
            if hasattr(value, "check"):
                value.check()
            if bounds and value is not None and not bounds["low"] <= value <= bounds["high"]:
                low, high = bounds["low"], bounds["high"]
                wanted = f"be at least {low}" if high == math.inf else f"lie in [{low}, {high}]"
                raise ConfigurationError(f"--{each.name.replace('_', '-')} must {wanted}, not {value}")


@dataclass(frozen=True, kw_only=True)
class SetSwitches(BoundedSwitches):
    """What the command line can set about an evaluation over a set of prompts; see `load_prompts`."""

    prompts: str = "all"
    limit: int | None = at_least(8)
    max_tokens: int = at_least(96)
    seed: int = 0
    chat: ChatSwitches = field(default_factory=ChatSwitches)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigurationError for a value that is none of the choices."""
    if value not in choices:
        raise ConfigurationError(f"{name} {value!r} is not one of {', '.join(choices)}")
