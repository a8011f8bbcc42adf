"""Replay of a report: rows are drawn, the target runs over their tokens, their rounds are drafted again.

Every row is held against what needs no model (see `engine.verification.replay`). Of the drawn rows, and of
others for a few seconds more, the target says whether each token is its best or within rounding of it, and
the drafter drafts each round again. A report made elsewhere may differ by rounding alone; how much that is,
is measured here. Times are not looked at: nothing tells how fast another machine was.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from secrets import randbits
from time import monotonic
from typing import Any

import mlx.core as mx

from engine.cache.batch import RaggedKV
from engine.cache.policy import NATIVE, parse_policy
from engine.config import Engine
from engine.device import Runtime
from engine.evaluation.arms import plain
from engine.evaluation.environment import LoadWatch, describe
from engine.evaluation.kv import NO_NEEDLE, examine, held_after
from engine.evaluation.measure import Progress, under
from engine.evaluation.measure import models as cards_of
from engine.evaluation.report import now, stamp
from engine.evaluation.rounding import Run, block_error
from engine.generate import Outcome
from engine.registry import Places
from engine.verification import inputs, replay
from engine.verification.replay import check_row, check_set, differences, finding, name_of
from evidence_format import verification as record
from evidence_format.model import OUR_LOOP, Arm, Model, Report, ReportRequest, Sample

TOLERANCES = record.Tolerances(
    # Near ties of a drafter fall otherwise on another machine, in a batch, and in blocks that are not
    # compiled: of the rounds of genuine reports one in a hundred confirms another number of drafts. Where
    # acceptance was inflated nearly all do.
    rounds=0.05,
    rounding=2.0,  # both logits that are compared may be off by the error
    resident=0.02,  # compiled graphs reserve more than the caches hold here, so more is no finding
    distortion=0.02,  # codes near a boundary fall otherwise where keys are rounded otherwise
    accepted=0.02,  # near ties fall both ways
)
# What the gate computes with; the weights digest alone does not hold it.
CARD = ("dtype", "quantization", "parameters", "vocab_size", "largest_block", "cache_layers")
EXTRA_S = 5.0  # rows that were not drawn are replayed as long as this lasts
CHEAP = 2e10  # … but tokens of all rows of a small model in any case: parameters times positions
MOST_FINDINGS = 20_000  # of a record

ArmRow = tuple[Arm, Sample]
Text = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a prompt, and those of its continuation


@dataclass(frozen=True)
class VerifyOptions:
    """What the command line can set about a replay; a `seed` of None is drawn by the system."""

    sample: int
    seed: int | None
    folders: Mapping[str, Path | None]  # of models, by role
    among: tuple[Path, ...]
    prompts: Path | None
    request: ReportRequest | None


def verify(
    path: Path, options: VerifyOptions, runtime: Runtime, places: Places, *, progress: Progress
) -> record.Verification:
    """Replay a report; return the record, whose verdict says whether anything was found.

    ConfigurationError: the report, models or prompts are not at hand, or its switches cannot be followed.
    """
    report, sha256 = inputs.read_report(path)
    watch, started, source = LoadWatch(), stamp(now()), report.environment.git.source_sha256
    seed, nonce = options.seed, report.request.nonce if report.request else None
    draw = record.Draw(
        seed=randbits(48) if seed is None else seed,
        source="os" if seed is None else "given",
        sample=options.sample,
        rows=sum(len(arm.samples) for arm in report.arms),
    )
    progress(0, 1, "finding models", "")
    folders, differing = inputs.find_models(report, options.folders, options.among, places)
    findings = [finding(role, "models", message) for role, message in differing.items()]
    rows: list[record.ReplayedRow] = []
    notes: list[str] = []
    cards: dict[str, Model] = {}
    if not findings:
        progress(0, 1, "loading", "models")
        replayer = _Replayer(report, draw, options, folders, progress)
        rows, findings, notes, cards = replayer.run(), replayer.findings, replayer.notes, replayer.cards
    environment = describe(runtime, watch, cards)
    if cards and environment["git"]["source_sha256"] != source:
        notes.append("another version of the engine wrote the report")
    return record.Verification.model_validate(
        {
            "schema": "kakeya.verification/1",
            "verdict": "refuted" if findings else "confirmed",
            "started_at": started,
            "finished_at": stamp(now()),
            "report": record.Subject(sha256=sha256, kind=report.kind, nonce=nonce, source_sha256=source),
            "draw": draw,
            "tolerances": TOLERANCES,
            "environment": environment,
            "request": options.request,
            "rows": tuple(rows),
            "findings": tuple(findings[:MOST_FINDINGS]),
            "notes": (*notes, "times were not verified") if cards else (),
        }
    )


def draw_rows(report: Report, seed: int, sample: int) -> tuple[list[ArmRow], list[ArmRow]]:
    """Draw rows; return them, and all others in the order in which they are looked at.

    Arms take turns, so that none is left out while another has many rows: first those named in a claim, then
    others with rounds. Each arm named in a claim gets at least one row, whatever `sample` is, and one with a
    distortion if it has any.
    """
    source = Random(seed)  # noqa: S311 - repeatable; where it must not be known before, the seed is the system's
    named = {claim.arm for claim in report.claims}
    arms = [arm for arm in report.arms if arm.samples]
    source.shuffle(arms)
    arms.sort(key=lambda arm: (arm.name not in named, not any(row.drafted_blocks for row in arm.samples)))
    piles = [source.sample([(arm, row) for row in arm.samples], len(arm.samples)) for arm in arms]
    longest = max(map(len, piles), default=0)
    order = [pile[turn] for turn in range(longest) for pile in piles if turn < len(pile)]
    drawn = order[: max(sample, sum(arm.name in named for arm in arms))]
    for pile in piles:
        with_distortion = [each for each in pile if each[1].is_distortion_known]
        covered = any(arm is pile[0][0] and row.is_distortion_known for arm, row in drawn)
        if pile[0][0].name in named and with_distortion and not covered:
            drawn.append(with_distortion[0])
    drawn_ids = {id(row) for _, row in drawn}
    return drawn, [each for each in order if id(each[1]) not in drawn_ids]


@dataclass
class _Row:
    """A row, what it is run with, and what the models say of it."""

    arm: Arm
    sample: Sample
    prompt: inputs.EncodedPrompt
    engine: Engine
    drawn: bool
    gaps: list[float] | None = None  # by how much each token misses the best; None: it was not looked at
    replayed: replay.RowReplay | None = None

    @property
    def name(self) -> str:
        return name_of(self.arm, self.sample)

    @property
    def policy(self) -> str:
        return self.engine.policy.spec

    @property
    def native(self) -> bool:
        return self.engine.policy == NATIVE

    @property
    def run(self) -> tuple[Engine, list[int], tuple[int, ...]]:
        """What most replays are about: engine, prompt and tokens."""
        return self.engine, self.prompt.tokens, self.sample.tokens

    @property
    def text(self) -> Text:
        """What one forward on native caches is about: rows of several arms may have one text."""
        return tuple(self.prompt.tokens), self.sample.tokens


class _Replayer:
    def __init__(
        self,
        report: Report,
        draw: record.Draw,
        options: VerifyOptions,
        folders: Mapping[str, Path],
        progress: Progress,
    ) -> None:
        self.findings: list[record.ReplayFinding] = []
        self.notes: list[str] = []
        self._report, self._draw, self._progress = report, draw, progress
        self._settings = inputs.RunSettings.of(report)
        given = options.folders, options.among
        self._engine = inputs.open_reported(report, self._settings, folders, *given)
        self._engines = {self._engine.policy.spec: self._engine}
        self._prompts, self._emptied = inputs.make_prompts(self._engine, self._settings, options.prompts)
        self._errors: dict[str, float] = {}  # of rounding, by policy
        self._gaps: dict[Text, list[float]] = {}  # of native rows
        self._arms_run: set[str] = set()

    @property
    def cards(self) -> dict[str, Model]:
        return {role: card for engine in self._engines.values() for role, card in cards_of(engine).items()}

    def run(self) -> list[record.ReplayedRow]:
        """Check everything; return the rows that the models were run for."""
        self.findings.extend(self._check_without_model())
        rows = self._rows_to_run()
        drawn, until, spent = sum(row.drawn for row in rows), 0.0, 0
        for number, row in enumerate(rows):
            if number == drawn:
                until = monotonic() + EXTRA_S
            self._progress(number, len(rows), "replaying", row.name)
            if row.drawn or monotonic() < until:
                self._run(row)
            elif row.native and (row.text in self._gaps or spent < CHEAP):
                if row.text not in self._gaps:
                    spent += self._engine.target.card.parameters * row.sample.positions
                row.gaps = self._native_gaps(row)
        seen = [row for row in rows if row.gaps is not None]
        for row in seen:
            if row.policy not in self._errors:
                self._measure_rounding(row)
        if seen and NATIVE.spec not in self._errors:  # no policy rounds less
            self._measure_rounding(replace(seen[0], engine=_natively(self._engine)))
        records = [
            record.ReplayedRow(
                arm=row.arm.name,
                prompt_id=row.sample.prompt_id,
                drawn=row.drawn,
                tokens=self._check_tokens(row, row.gaps or []),
                rounds=self._check_rounds(row),
            )
            for row in seen
        ]
        self.findings.extend(_check_all_rounds(records, seen))
        self._progress(len(rows), len(rows), "replayed", f"{len(seen)} rows")
        return records

    def _check_without_model(self) -> Iterator[record.ReplayFinding]:
        """What the report says of models besides their digests, and of all rows."""
        cards = self.cards
        for role, said in self._report.environment.models.items():
            if (own := cards.get(role)) is not None:
                pairs = {name: (getattr(said, name), getattr(own, name)) for name in CARD}
                yield from differences(role, "models", pairs)
        settings = self._settings
        stop_texts = settings.stop or () if settings.command == "generate" else ()
        for arm in self._report.arms:
            prompts = self._prompts_of(arm)
            yield from check_set(arm, prompts)
            for row in arm.samples:
                if row.prompt_id in prompts:
                    asked = prompts[row.prompt_id]
                    yield from check_row(self._engine.target, stop_texts, arm, row, asked)

    def _prompts_of(self, arm: Arm) -> inputs.PromptsById:
        return self._emptied if arm.control == NO_NEEDLE else self._prompts

    def _engine_of(self, arm: Arm) -> Engine:
        """The engine under an arm's policy; at block 1 without its drafter, so without space for blocks."""
        policy = parse_policy(arm.system.kv)
        if policy.spec not in self._engines:
            native = policy == NATIVE
            self._engines[policy.spec] = _natively(self._engine) if native else under(self._engine, policy)
        found = self._engines[policy.spec]
        return replace(found, drafter=None) if arm.control == "block_1" else found

    def _rows_to_run(self) -> list[_Row]:
        """Those drawn, then all others: first texts that are not plain decoding's."""
        drawn, others = draw_rows(self._report, self._draw.seed, self._draw.sample)
        broken = {each.where for each in self.findings if each.check in ("prompts", "rows", "rounds")}
        rows: list[_Row] = []
        for index, (arm, sample) in enumerate([*drawn, *others]):
            asked = self._prompts_of(arm).get(sample.prompt_id)
            if asked is not None and name_of(arm, sample) not in broken:  # otherwise a finding says so
                rows.append(_Row(arm, sample, asked, self._engine_of(arm), index < len(drawn)))
        if skipped := len(drawn) + len(others) - len(rows):
            self.notes.append(f"the models were not run for {skipped} rows that already have a finding")
        samples = [sample for arm in self._report.arms for sample in arm.samples]
        plain = {each.prompt_id: each.tokens for each in samples if not each.drafted_blocks}

        def is_plain(sample: Sample) -> bool:
            return plain.get(sample.prompt_id, sample.tokens) == sample.tokens

        return sorted(rows, key=lambda row: (not row.drawn, is_plain(row.sample)))

    def _run(self, row: _Row) -> None:
        """Run the models over a row; the first row drawn of an arm as it was run, whatever it was."""
        engine, prompt, tokens = row.run
        drafted = row.sample.drafted_blocks > 0
        first = row.drawn and row.arm.name not in self._arms_run
        self._arms_run.add(row.arm.name)
        if drafted or not row.native or (first and row.arm.system.loop == OUR_LOOP):
            drafter = self._engine.drafter.drafter if drafted and self._engine.drafter else None
            row.replayed = replay.replay(*row.run, row.sample.rounds, drafter)
            self.findings.extend(self._check_caches(row, row.replayed))
        elif first:
            decoded = plain(engine.target, prompt, len(tokens), engine.options.prefill_chunk)
            self.findings.extend(self._check_caches(row, decoded))
        if row.native:
            row.gaps = self._native_gaps(row, row.replayed.logits if first and row.replayed else None)
        elif row.replayed is not None:
            row.gaps = replay.gaps(row.replayed.logits, tokens)
            self.findings.extend(_check_distortion(row))

    def _native_gaps(self, row: _Row, steps: mx.array | None = None) -> list[float]:
        """The gaps of a native row by one forward; `steps`: its logits by rounds, for the rounding."""
        if row.text not in self._gaps or steps is not None:
            logits = replay.native_logits(*row.run)
            self._gaps[row.text] = replay.gaps(logits, row.sample.tokens)
            if steps is not None:
                self._add_error(row, replay.largest_difference(logits, steps))
        return self._gaps[row.text]

    def _add_error(self, row: _Row, error: float) -> None:
        self._errors[row.policy] = max(self._errors.get(row.policy, 0.0), error)

    def _measure_rounding(self, row: _Row) -> None:
        """How differently the model rounds in the forwards that a row is judged by, and step by step."""
        engine, prompt, tokens = row.run
        if row.native:
            whole = Run(prompt, tokens, [(len(tokens), len(tokens) - 1)])  # one block against single tokens
            found = block_error(engine.target, [whole], engine.options.prefill_chunk)
            self._add_error(row, found["max_abs_logit_error"])
        else:
            by_rounds = replay.replay(*row.run, row.sample.rounds, None).logits
            self._add_error(row, replay.largest_difference(by_rounds, replay.policy_steps(*row.run)))

    def _find(self, row: _Row, check: record.Check, message: str) -> None:
        self.findings.append(finding(row.name, check, message))

    def _check_tokens(self, row: _Row, missing: Sequence[float]) -> record.Tokens:
        """Every token is the target's best, or within rounding of it."""
        worst = max(range(len(missing)), key=missing.__getitem__)
        allowed = TOLERANCES.rounding * max(self._errors[row.policy], self._errors[NATIVE.spec])
        if wrong := [at for at, gap in enumerate(missing) if not gap <= allowed]:  # NaN is wrong, too
            at = wrong[0]
            message = (
                f"token {row.sample.tokens[at]} at position {at} lies {missing[at]:.3g} below the target's "
                f"best; rounding explains {allowed:.3g} ({len(wrong)} such tokens)"
            )
            self._find(row, "tokens", message)
        return record.Tokens(
            checked=len(missing),
            forward="one" if row.native else "rounds",
            largest_gap=missing[worst],
            at=worst,
            allowed=allowed,
        )

    def _check_rounds(self, row: _Row) -> record.Rounds:
        """As many drafts are confirmed as reported, but for a few near ties."""
        replayed = row.replayed
        if not row.sample.drafted_blocks:
            return _not_replayed("no speculative rounds")
        if self._engine.drafter is None:
            self._find(row, "rounds", "the row has rounds of drafts, but the configuration no drafter")
            return _not_replayed("the report names no drafter")
        if replayed is None:
            return _not_replayed("row not sampled")
        found = zip(row.sample.rounds, replayed.drafts, replayed.accepted, strict=True)
        blocks = [((each.block - 1, each.accepted), own) for each, *own in found if each.block > 1]
        rounds = record.Rounds(
            replayed=len(blocks),
            differing=sum(claimed != tuple(own) for claimed, own in blocks),
            claimed_accepted=sum(accepted for (_, accepted), _ in blocks),
            accepted=sum(accepted for _, (_, accepted) in blocks),
            reason=None,
        )
        if rounds.differing > max(1, TOLERANCES.rounds * rounds.replayed):
            message = (
                f"{rounds.differing} of {rounds.replayed} rounds confirm other drafts when they are drafted "
                f"again: {rounds.claimed_accepted} drafts by the report, {rounds.accepted} here"
            )
            self._find(row, "rounds", message)
        return rounds

    def _check_caches(self, row: _Row, found: replay.RowReplay | Outcome) -> Iterator[record.ReplayFinding]:
        """The caches are those that the row names, and hold as much."""
        said = row.sample
        if RaggedKV.__name__ in said.cache.classes or self._settings.command == "eval server":
            return  # a row states its share of merged caches
        pairs: dict[str, tuple[Any, Any]] = {
            "caches": (said.cache.classes, found.cache_classes),
            "kept_positions": (said.kept_positions, found.kept),
            "restored_positions": (said.restored_positions or 0, found.restored),
        }
        if said.cache.resident_bytes < (1 - TOLERANCES.resident) * found.resident_bytes:
            pairs["resident_bytes"] = said.cache.resident_bytes, found.resident_bytes
        if (kv := said.kv) is not None and (own := found.kv) is not None:
            pairs["kv.layers"] = kv.layers, own.layers
            sizes = {"kv.values": (kv.values, own.values), "kv.bytes": (kv.bytes, own.nbytes)}
            yield from differences(row.name, "memory", sizes, TOLERANCES.resident)
        yield from differences(row.name, "memory", pairs)


def _natively(engine: Engine) -> Engine:
    return replace(engine, policy=NATIVE, restoration=None)


def _not_replayed(reason: str) -> record.Rounds:
    return record.Rounds(replayed=0, differing=0, claimed_accepted=0, accepted=0, reason=reason)


def _check_distortion(row: _Row) -> Iterator[record.ReplayFinding]:
    """Keys and values lie as far from native ones as the row says."""
    said = row.sample.kv
    if said is not None and row.sample.is_distortion_known:
        found, _ = examine(*row.run, held_after(_natively(row.engine), row.prompt.tokens))
        pairs = {
            "key_distortion": (said.key_distortion, found.keys),
            "value_distortion": (said.value_distortion, found.values),
        }
        yield from differences(row.name, "memory", pairs, TOLERANCES.distortion)


def _check_all_rounds(
    records: Sequence[record.ReplayedRow], rows: Sequence[_Row]
) -> Iterator[record.ReplayFinding]:
    """What is little in each row may be much in all."""
    replayed = [row for row in records if row.rounds.replayed]
    rounds = sum(row.rounds.replayed for row in replayed)
    differing = sum(row.rounds.differing for row in replayed)
    if differing > max(1, TOLERANCES.rounds * rounds):
        worst = max(replayed, key=lambda row: row.rounds.differing / row.rounds.replayed)
        message = (
            f"{differing} of the {rounds} rounds of {len(replayed)} rows confirm other drafts when they are "
            "drafted again, in this row most"
        )
        yield finding(f"{worst.arm}/{worst.prompt_id}", "rounds", message)
    for arm in dict.fromkeys(row.arm for row in replayed):
        of_arm = [row for row in replayed if row.arm == arm]
        claimed = sum(row.rounds.claimed_accepted for row in of_arm)
        found = sum(row.rounds.accepted for row in of_arm)
        block = max(each.block for row in rows if row.arm.name == arm for each in row.sample.rounds)
        if claimed - found > block - 1 + TOLERANCES.accepted * claimed:
            worst = max(of_arm, key=lambda row: row.rounds.claimed_accepted - row.rounds.accepted)
            message = (
                f"the report claims {claimed} accepted drafts in {len(of_arm)} rows, {found} are accepted "
                "when they are drafted again; most of the difference is in this row"
            )
            yield finding(f"{arm}/{worst.prompt_id}", "rounds", message)
