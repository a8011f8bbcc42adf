"""Replay of a report: rows are drawn, the target runs over their tokens, their rounds are drafted again.

Every row is held against what needs no model (see `engine.verification.rows`). Of the drawn rows, and of
others for a few seconds more, the target says whether each token is its best or within rounding of it, and
the drafter drafts each round again. A report made elsewhere may differ by rounding alone; how much that is,
is measured here. Times are not looked at: nothing tells how fast another machine was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from secrets import randbits
from time import monotonic
from typing import Any

import mlx.core as mx

from engine.cache.batch import RaggedKV
from engine.cache.policy import NATIVE, parse_policy
from engine.config import Engine, Options, open_engine
from engine.device import Runtime
from engine.drafters.base import Drafter
from engine.drafters.registry import KINDS, WITH_LOOKUP
from engine.errors import ConfigurationError
from engine.evaluation.arms import OUR_LOOP
from engine.evaluation.environment import LoadWatch, describe
from engine.evaluation.kv import examine, held_after
from engine.evaluation.measure import Progress, under
from engine.evaluation.measure import models as cards_of
from engine.evaluation.report import now, stamp
from engine.networks.projector import ProjectorConfig
from engine.registry import Places
from engine.target.folder import read_json
from engine.target.loading import DTYPES
from engine.verification.claimed import Claimed
from engine.verification.models import find_models, folder_with
from engine.verification.prompts import Asked, Prompts, Switches, make_prompts
from engine.verification.record import Check, Record, finding
from engine.verification.replay import (
    Followed,
    Held,
    follow,
    gaps,
    gaps_of,
    largest_difference,
    plain_steps,
    policy_steps,
    redo,
    width,
)
from engine.verification.rows import check_row, check_set, name_of
from evidence_format.model import Arm, Model, ReportRequest, Sample
from evidence_format.verification import Draw, ReplayedRow, Rounds, Subject, Tokens, Tolerances

# Near ties of a drafter fall otherwise on another machine, in a batch, and in blocks that are not compiled:
# of the rounds of genuine reports one in a hundred confirms another number of drafts. Where acceptance was
# inflated nearly all do.
ROUNDS_MAY_DIFFER = 0.05  # of a row's rounds, but one may always; of the rounds of all rows
# Both logits that are compared may be off by the error.
ROUNDING = 2.0
# So much less than the caches hold here may a row claim. Compiled graphs reserve more, so more is no finding.
RESIDENT = 0.02
# An arm's rounds may claim this share more accepted drafts, plus one block: near ties fall both ways.
ACCEPTED = 0.02
DISTORTION = 0.02  # codes near a boundary fall otherwise where keys are rounded otherwise
# What the gate computes with; the weights digest alone does not hold it.
CARD = ("dtype", "quantization", "parameters", "vocab_size", "largest_block", "cache_layers")
EXTRA_S = 5.0  # rows that were not drawn are looked at as long as this lasts
CHEAP = 2e10  # … but tokens of all rows of a small model in any case: parameters times positions

ArmRow = tuple[Arm, Sample]


@dataclass(frozen=True)
class Verification:
    """What is to be verified, and with what.

    Attributes:
        sample: rows to draw.
        seed: repeats a draw; None takes one from the system's random numbers.
        folders: models by role, where they were given.
        among: further folders that may hold a model of any role.
        prompts: file of prompts, where the report was made with one.
        request: the request that a runner answers with this.
    """

    sample: int = 6
    seed: int | None = None
    folders: Mapping[str, Path | None] = field(default_factory=dict)
    among: tuple[Path, ...] = ()
    prompts: Path | None = None
    request: ReportRequest | None = None

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        if self.sample < 1:
            raise ConfigurationError(f"--sample must be at least 1, not {self.sample}")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ConfigurationError(f"--seed must be from 0 to 2**63 - 1, not {self.seed}")


@dataclass(frozen=True)
class _Row:
    """A row with everything it is run with."""

    arm: Arm
    row: Sample
    asked: Asked
    engine: Engine
    drawn: bool

    @property
    def ours(self) -> bool:
        return self.arm.system.loop == OUR_LOOP

    @property
    def native(self) -> bool:
        return self.engine.policy == NATIVE

    @property
    def positions(self) -> int:
        return len(self.asked.tokens) + len(self.row.tokens)

    @property
    def text(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What one forward is about: rows of several arms may have one text."""
        return self.engine.policy.spec, tuple(self.asked.tokens), self.row.tokens


@dataclass(frozen=True)
class _Seen:
    """What the models said of a row: by how much each token misses the best, and its rounds."""

    row: _Row
    gaps: list[float]
    followed: Followed | None


def verify(
    claimed: Claimed,
    what: Verification,
    runtime: Runtime,
    places: Places,
    *,
    progress: Progress,
    clock: Callable[[], float] = monotonic,
) -> Record:
    """Replay a report.

    Args:
        claimed: the report.
        what: what is to be verified, and with what.
        runtime: what runs here.
        places: where models may lie.
        progress: told before each row.
        clock: seconds, for `EXTRA_S`.

    Returns:
        The record; its verdict says whether anything was found.

    Raises:
        ConfigurationError: a switch makes no sense, a model or the prompts are not at hand, or the report's
            configuration cannot be followed.
    """
    what.check()
    document, watch = claimed.document, LoadWatch()
    request = None if document.request is None else document.request.nonce
    seed = randbits(48) if what.seed is None else what.seed
    record = Record(
        started_at=stamp(now()),
        report=Subject(
            sha256=claimed.sha256,
            kind=document.kind,
            nonce=request,
            source_sha256=document.environment.git.source_sha256,
        ),
        draw=Draw(
            seed=seed,
            source="os" if what.seed is None else "given",
            sample=what.sample,
            rows=sum(1 for _ in claimed.rows),
        ),
        tolerances=Tolerances(
            rounds=ROUNDS_MAY_DIFFER,
            rounding=ROUNDING,
            resident=RESIDENT,
            distortion=DISTORTION,
            accepted=ACCEPTED,
        ),
        environment={},
        request=what.request,
    )
    progress(0, 1, "finding models", "")
    folders = find_models(document.environment.models, what.folders, what.among, places)
    record.findings.extend(folders.findings)
    if record.findings:
        record.environment = describe(runtime, watch, {})
        record.finished_at = stamp(now())
        return record
    progress(0, 1, "loading", document.environment.models["target"].id)
    replayer = _Replayer(claimed, folders.found, what, runtime, record, progress=progress, clock=clock)
    replayer.run()
    record.environment = describe(runtime, watch, replayer.cards)
    if record.environment["git"]["source_sha256"] != record.report.source_sha256:
        record.notes.append("another version of the engine wrote the report")
    record.notes.append("times were not verified")
    record.finished_at = stamp(now())
    return record


def draw_rows(claimed: Claimed, seed: int, sample: int) -> tuple[list[ArmRow], list[ArmRow]]:
    """The rows that are drawn, and all others in the order in which they are looked at.

    Arms take turns, so that none is left out while another has many rows: first those named in a claim, then
    others with rounds. Each arm named in a claim gets at least one row, whatever `sample` is, and one with a
    distortion if it has any.
    """
    source = Random(seed)  # noqa: S311 - repeatable; where it must not be known before, the seed is the system's
    named = {claim.arm for claim in claimed.document.claims}
    arms = [arm for arm in claimed.document.arms if arm.samples]
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


class _Replayer:
    """One replay on its way."""

    def __init__(
        self,
        claimed: Claimed,
        folders: Mapping[str, Path],
        what: Verification,
        runtime: Runtime,
        record: Record,
        *,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self.claimed, self.what, self.record = claimed, what, record
        self.progress, self.clock = progress, clock
        self.switches = Switches(claimed.document.configuration)
        self.command = self.switches.command
        self.engine = _open(claimed, self.switches, folders, what, runtime)
        self._engines: dict[str, Engine] = {self.engine.policy.spec: self.engine}
        self._errors: dict[str, float] = {}  # of rounding, by policy
        self._gaps: dict[Any, list[float]] = {}  # by text
        self._looked_into: set[str] = set()  # arms of which a row was run as the arm ran it
        self._seen: list[_Seen] = []
        self.prompts: Prompts = make_prompts(self.engine, self.switches, what.prompts)

    @property
    def cards(self) -> dict[str, Any]:
        """The models that ran."""
        cards: dict[str, Any] = {}
        for engine in self._engines.values():
            cards |= cards_of(engine)
        return cards

    def run(self) -> None:
        """Everything."""
        self._check_cards()
        self._check_rows()
        rows = self._rows()
        drawn = [row for row in rows if row.drawn]
        for index, row in enumerate(drawn):
            self.progress(index, len(rows), "replaying", name_of(row.arm, row.row))
            self._seen.append(self._run(row))
        self._run_others(rows[len(drawn) :])
        for seen in self._seen:
            if seen.row.engine.policy.spec not in self._errors:
                self._measure(seen.row)
        if self._seen and NATIVE.spec not in self._errors:  # no policy rounds less
            native = replace(self.engine, policy=NATIVE, restoration=None)
            self._measure(replace(self._seen[0].row, engine=native))
        for seen in self._seen:
            self._judge(seen)
        self._check_overall()
        self.progress(len(rows), len(rows), "replayed", f"{len(self._seen)} rows")

    def _find(self, where: str, check: Check, message: str) -> None:
        self.record.findings.append(finding(where, check, message))

    def _check_cards(self) -> None:
        """What the report says of models beside their digests."""
        for role, model in self.claimed.document.environment.models.items():
            card = self.cards.get(role)
            if card is None:
                continue
            stated, computed = model.model_dump(), asdict(card)
            for name in CARD:
                said, found = stated[name], computed[name]
                if said != found:
                    self._find(role, "models", f"{name}: reported {said!r}, computed {found!r}")

    def _check_rows(self) -> None:
        stop_texts = self.switches.listed("stop", str) if self.command == "generate" else ()
        for arm in self.claimed.document.arms:
            asked = self.prompts.of(arm)
            self.record.findings.extend(check_set(arm, asked))
            for row in arm.samples:
                if row.prompt_id in asked:
                    found = check_row(self.engine.target, stop_texts, arm, row, asked[row.prompt_id])
                    self.record.findings.extend(found)

    def _rows(self) -> list[_Row]:
        """The rows to run the models for, in this order: those drawn, then all others."""
        drawn, others = draw_rows(self.claimed, self.record.draw.seed, self.what.sample)
        broken = {
            finding.where
            for finding in self.record.findings
            if finding.check in ("prompts", "rows", "rounds")
        }
        rows: list[_Row] = []
        for index, (arm, row) in enumerate([*drawn, *others]):
            asked = self.prompts.of(arm).get(row.prompt_id)
            if asked is not None and name_of(arm, row) not in broken:  # otherwise a finding says so
                rows.append(_Row(arm, row, asked, self._under(arm), index < len(drawn)))
        if skipped := len(drawn) + len(others) - len(rows):
            self.record.notes.append(
                f"the models were not run for {skipped} rows that already have a finding"
            )
        tokens = {row.prompt_id: row.tokens for _, row in self.claimed.rows if not row.drafted_blocks}

        def late(row: _Row) -> tuple[bool, bool]:
            """Behind the drawn rows, texts that are not plain decoding's come first."""
            return not row.drawn, row.row.tokens == tokens.get(row.row.prompt_id, row.row.tokens)

        return sorted(rows, key=late)

    def _under(self, arm: Arm) -> Engine:
        """The engine under an arm's policy; at block 1 without its drafter, so without room for blocks."""
        policy = parse_policy(arm.system.kv)
        if policy.spec not in self._engines:
            if policy == NATIVE:
                made = replace(self.engine, policy=NATIVE, restoration=None)
            else:
                made = under(self.engine, policy)
            self._engines[policy.spec] = made
        found = self._engines[policy.spec]
        return replace(found, drafter=None) if arm.control == "block_1" else found

    def _run_others(self, rows: Sequence[_Row]) -> None:
        """Rows that were not drawn, for a few seconds: the tokens of all of them first, then their rounds."""
        until, whole = self.clock() + EXTRA_S, len(self._seen) + len(rows)
        texts = {row.text: row for row in rows if row.native and row.text not in self._gaps}
        todo, spent = list(texts.values()), 0
        parameters = self.engine.target.card.parameters
        for start in range(0, len(todo), width()):
            group = todo[start : start + width()]
            if spent > CHEAP and self.clock() >= until:
                break
            spent += parameters * sum(row.positions for row in group)
            self.progress(len(self._seen), whole, "looking at tokens", name_of(group[0].arm, group[0].row))
            found = gaps_of([(row.asked.tokens, row.row.tokens) for row in group], self.engine)
            self._gaps |= {row.text: each for row, each in zip(group, found, strict=True)}
        for row in rows:
            if self.clock() < until:
                self.progress(len(self._seen), whole, "replaying", name_of(row.arm, row.row))
                self._seen.append(self._run(row))
            elif row.native and row.text in self._gaps:
                self._seen.append(_Seen(row, self._gaps[row.text], None))

    def _run(self, row: _Row) -> "_Seen":
        """Run the models over a row."""
        asked, said = row.asked.tokens, row.row
        drafter = self.engine.drafter.drafter if self.engine.drafter and said.drafted_blocks else None
        if not row.native:
            found = redo(row.engine, drafter, asked, said.tokens, said.rounds)
            self._check_held(row, found.held)
            self._check_distortion(row)
            return _Seen(row, gaps(found.logits, said.tokens), found)
        if drafter is None and not row.drawn and row.text in self._gaps:
            return _Seen(row, self._gaps[row.text], None)
        found = follow(row.engine, drafter, asked, said.tokens, said.rounds)
        self._gaps[row.text] = gaps(found.logits, said.tokens)
        if row.drawn and row.arm.name not in self._looked_into:
            self._look_into(row, drafter, found)
        return _Seen(row, self._gaps[row.text], found)

    def _look_into(self, row: _Row, drafter: Drafter | None, found: Followed) -> None:
        """Run the first row drawn of an arm as it was run: how that rounds, and what its caches hold."""
        asked, said = row.asked.tokens, row.row
        self._looked_into.add(row.arm.name)
        if row.ours:
            again = redo(row.engine, drafter, asked, said.tokens, said.rounds)
            logits, held = again.logits, again.held
        else:
            logits, held = plain_steps(row.engine, asked, said.tokens)
        self._note_error(row, found.logits, logits)
        self._check_held(row, held)

    def _measure(self, row: _Row) -> None:
        """How differently the model rounds in the forwards that a row is judged by, and step by step."""
        asked, said = row.asked.tokens, row.row
        if row.native:
            found, singles = (
                follow(row.engine, None, asked, said.tokens, said.rounds).logits,
                plain_steps(row.engine, asked, said.tokens)[0],
            )
        else:
            found = redo(row.engine, None, asked, said.tokens, said.rounds).logits
            singles = policy_steps(row.engine, asked, said.tokens)
        self._note_error(row, found, singles)

    def _note_error(self, row: _Row, one: mx.array, other: mx.array) -> None:
        spec = row.engine.policy.spec
        self._errors[spec] = max(self._errors.get(spec, 0.0), largest_difference(one, other))

    def _judge(self, seen: "_Seen") -> None:
        """Hold a row against what the models say, and enter it into the record."""
        row = seen.row
        tokens = self._check_tokens(seen)
        if not row.row.drafted_blocks:
            rounds = _not_replayed("no speculative rounds")
        elif self.engine.drafter is None:
            rounds = _not_replayed("the report names no drafter")
            where = name_of(row.arm, row.row)
            self._find(where, "rounds", "the row has rounds of drafts, but the configuration no drafter")
        elif seen.followed is None:
            rounds = _not_replayed("row not sampled")
        else:
            rounds = self._check_rounds(row, seen.followed)
        self.record.rows.append(
            ReplayedRow(
                arm=row.arm.name, prompt_id=row.row.prompt_id, drawn=row.drawn, tokens=tokens, rounds=rounds
            )
        )

    def _check_tokens(self, seen: "_Seen") -> Tokens:
        """Every token is the target's best, or within rounding of it."""
        row, found = seen.row, seen.gaps
        worst = max(range(len(found)), key=found.__getitem__)
        allowed = ROUNDING * max(self._errors[row.engine.policy.spec], self._errors[NATIVE.spec])
        wrong = [position for position, gap in enumerate(found) if not gap <= allowed]  # NaN is wrong, too
        if wrong:
            self._find(
                name_of(row.arm, row.row),
                "tokens",
                f"token {row.row.tokens[wrong[0]]} at position {wrong[0]} lies {found[wrong[0]]:.3g} below "
                f"the target's best; rounding explains {allowed:.3g} ({len(wrong)} such tokens)",
            )
        return Tokens(
            checked=len(found),
            forward="one" if row.native else "rounds",
            largest_gap=found[worst],
            at=worst,
            allowed=allowed,
        )

    def _check_rounds(self, row: _Row, followed: Followed) -> Rounds:
        """As many drafts are confirmed as reported, but for a few near ties."""
        claimed = [each for each in row.row.rounds if each.block > 1]
        again = [
            (drafts, accepted)
            for each, drafts, accepted in zip(row.row.rounds, followed.drafts, followed.accepted, strict=True)
            if each.block > 1
        ]
        differing = sum(
            (each.block - 1, each.accepted) != found for each, found in zip(claimed, again, strict=True)
        )
        result = Rounds(
            replayed=len(claimed),
            differing=differing,
            claimed_accepted=sum(each.accepted for each in claimed),
            accepted=sum(accepted for _, accepted in again),
            reason=None,
        )
        if differing > max(1, ROUNDS_MAY_DIFFER * len(claimed)):
            self._find(
                name_of(row.arm, row.row),
                "rounds",
                f"{differing} of {len(claimed)} rounds confirm other drafts when they are drafted again: "
                f"{result.claimed_accepted} drafts by the report, {result.accepted} here",
            )
        return result

    def _check_overall(self) -> None:
        """What is little in each row may be much in all."""
        replayed = [each for each in self.record.rows if each.rounds.replayed]
        rounds = sum(each.rounds.replayed for each in replayed)
        differing = sum(each.rounds.differing for each in replayed)
        if differing > max(1, ROUNDS_MAY_DIFFER * rounds):
            worst = max(replayed, key=lambda each: each.rounds.differing / each.rounds.replayed)
            self._find(
                f"{worst.arm}/{worst.prompt_id}",
                "rounds",
                f"{differing} of the {rounds} rounds of {len(replayed)} rows confirm other drafts when they "
                "are drafted again, in this row most",
            )
        for arm in dict.fromkeys(each.arm for each in replayed):
            of_arm = [each for each in replayed if each.arm == arm]
            claimed = sum(each.rounds.claimed_accepted for each in of_arm)
            found = sum(each.rounds.accepted for each in of_arm)
            rows = [seen.row.row for seen in self._seen if seen.row.arm.name == arm]
            block = max(each.block for row in rows for each in row.rounds)
            if claimed - found > block - 1 + ACCEPTED * claimed:
                worst = max(of_arm, key=lambda each: each.rounds.claimed_accepted - each.rounds.accepted)
                self._find(
                    f"{arm}/{worst.prompt_id}",
                    "rounds",
                    f"the report claims {claimed} accepted drafts in {len(of_arm)} rows, {found} are "
                    "accepted when they are drafted again; most of the difference is in this row",
                )

    def _check_held(self, row: _Row, held: Held | None) -> None:
        """The caches are those that the row names, and hold as much."""
        said, where = row.row, name_of(row.arm, row.row)
        if held is None or RaggedKV.__name__ in said.cache.classes or self.command == "eval server":
            return  # merged caches, of which a row states its share
        if said.cache.classes != held.classes:
            self._find(where, "memory", f"caches: reported {said.cache.classes}, computed {held.classes}")
        if said.cache.resident_bytes < (1 - RESIDENT) * held.resident_bytes:
            self._find(
                where,
                "memory",
                f"resident_bytes: reported {said.cache.resident_bytes}, computed {held.resident_bytes}",
            )
        for name, value, found in (
            ("kept_positions", said.kept_positions, held.kept),
            ("restored_positions", said.restored_positions or 0, held.restored),
        ):
            if value != found:
                self._find(where, "memory", f"{name}: reported {value}, computed {found}")
        if held.kv is None or said.kv is None:
            return
        if said.kv.layers != held.kv.layers:
            self._find(where, "memory", f"kv.layers: reported {said.kv.layers}, computed {held.kv.layers}")
        for name, value, found in (
            ("kv.values", said.kv.values, held.kv.values),
            ("kv.bytes", said.kv.bytes, held.kv.nbytes),
        ):
            if not _near(value, found, RESIDENT):
                self._find(where, "memory", f"{name}: reported {value}, computed {found}")

    def _check_distortion(self, row: _Row) -> None:
        """Keys and values lie as far from native ones as the row says."""
        said = row.row.kv
        if said is None or said.key_distortion is None or said.value_distortion is None or row.native:
            return
        native = replace(row.engine, policy=NATIVE, restoration=None)
        before = held_after(native, row.asked.tokens)
        found = examine(row.engine, row.asked.tokens, row.row.tokens, before).distortion
        for name, value, other in (
            ("key_distortion", said.key_distortion, found.keys),
            ("value_distortion", said.value_distortion, found.values),
        ):
            if not _near(value, other, DISTORTION):
                self._find(
                    name_of(row.arm, row.row),
                    "memory",
                    f"{name}: reported {value:.4g}, computed {other:.4g}",
                )


def _not_replayed(reason: str) -> Rounds:
    return Rounds(replayed=0, differing=0, claimed_accepted=0, accepted=0, reason=reason)


def _near(said: float, found: float, share: float) -> bool:
    return abs(said - found) <= share * max(abs(said), abs(found))


def _open(
    claimed: Claimed,
    switches: Switches,
    folders: Mapping[str, Path],
    what: Verification,
    runtime: Runtime,
) -> Engine:
    """The engine as the report's configuration has it."""
    document = claimed.document
    model = document.environment.models.get("target")
    if model is None:
        raise ConfigurationError("the report names no target")
    name = switches.optional_text("drafter")
    shootout = switches.command == "eval kv"
    projector = folders.get("projector")
    options = Options(
        model=folders["target"],
        drafter=_spec(name, switches, folders, what),
        block=switches.text("block") if name else "1",
        prefill_chunk=switches.number("prefill_chunk"),
        dtype=_dtype(model, document.environment.device, runtime),
        compiled=False,
        kv=NATIVE.spec if shootout else switches.text("kv"),
        quantize=switches.optional_text("quantize"),
        projector=None if shootout else projector,
    )
    engine = open_engine(options)
    return replace(engine, options=replace(options, projector=projector)) if shootout else engine


def _spec(name: str | None, switches: Switches, folders: Mapping[str, Path], what: Verification) -> str:
    """What ``--drafter`` would say."""
    folder = folders.get("drafter")
    if name is None:
        return _silent(folders.get("projector"), what)
    inner = name.removeprefix(WITH_LOOKUP)
    prefix = WITH_LOOKUP if inner != name else ""
    settings = switches.optional_text("drafter_settings")
    if inner == "prompt-lookup":
        return f"{prefix}{inner}" + (f":{settings.removeprefix('shortest=')}" if settings else "")
    if inner not in KINDS:
        raise ConfigurationError(f"the report's drafter {name!r} is none that this engine knows")
    if folder is None:
        raise ConfigurationError(f"the report drafts with {name} and names no weights of it")
    return f"{prefix}{inner}:{folder}" + (f"?{settings}" if settings else "")


def _silent(projector: Path | None, what: Verification) -> str:
    """A drafter that does not draft, which a projector wants all the same; ``none`` without a projector."""
    if projector is None:
        return "none"
    given = what.folders.get("drafter")
    wanted = ProjectorConfig.from_dict(read_json(projector / "config.json")).drafter
    return str(given or folder_with(wanted, what.among) or "none")


def _dtype(model: Model, device: str, runtime: Runtime) -> str | None:
    """What the target computed in; on two machines with Metal, as it is stored."""
    return None if (runtime.metal and device == "metal") or model.dtype not in DTYPES else model.dtype
