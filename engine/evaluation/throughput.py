"""Speculative against plain decoding of the same prompts, interleaved prompt by prompt.

Measures; whether the figures may be believed is for the gate. Decode-only and end-to-end figures both come
from the rows. One untimed warm-up an arm on the first prompt, and one prefill of the longest. When identical
work takes very different times, something else uses the machine: all of it is measured again, and the report
says so.

Where a speed may be claimed, a third arm runs our own loop at block 1. On small models a step of our loop is
quicker than one of mlx-lm's, and only this arm tells how much of a ratio is that, and how much is drafting.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from engine.cache.policy import NATIVE
from engine.config import Engine
from engine.device import Runtime, threads
from engine.draft_length import AdaptiveDraftLength, DraftLength, Tour
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.arms import OUR_LOOP, PLAIN_LOOP, Outcome, SamplingOptions, plain, room, speculate
from engine.evaluation.environment import describe, target_card
from engine.evaluation.fingerprint import fingerprint
from engine.evaluation.interleave import Lane, Progress, run_interleaved, scored_rows
from engine.evaluation.journal import Journals
from engine.evaluation.prompts import Prompt, encode
from engine.evaluation.report import Arm, Report, now
from engine.evaluation.rounding import Run, block_error, plain_gap
from engine.evaluation.stability import disturbance
from engine.evaluation.system_load import StrainWatch, idle_load
from engine.evaluation.templates import ChatSwitches
from evidence_format.claims import CLAIMS as CLAIMED
from evidence_format.claims import FEWEST_SAMPLES, FEWEST_TOKENS, SPEED_CLAIMS, WATCHED
from evidence_format.model import ReportRequest

PLAIN, SPECULATIVE, BLOCK_1 = "plain", "speculative", "block-1"
IGNORE_STOPS = "ignore_stops"  # the arm, and the control it is
CLAIMS = ("auto", "speedup", "no-slowdown", "identity", "none")
LEAST_STOPS = CLAIMED["natural_stops"].lowest
NO_SLOWDOWN = 0.9
ROUNDING_TEXTS = 3
MADE_UP_BLOCKS = (2, 4, 8, 16)
WARM_UPS = 4
STEP = "drafting/verifying"
# What the gate asks of a speed; with less, `auto` claims identical output alone.
TOO_FEW_TO_TIME = f"a speed needs {FEWEST_SAMPLES} prompts and more than {FEWEST_TOKENS} tokens of each"


@dataclass(frozen=True)
class Switches:
    """What the command line can set about a measurement.

    With ``ignore_stops`` a control arm decodes every prompt past its stop tokens up to ``max_tokens``, which
    shows what forced over-generation does to acceptance and speed. ``min_stops`` claims the share of texts
    that end at a stop token.
    """

    prompts: str = "all"
    limit: int | None = 8
    max_tokens: int = 96
    seed: int = 0
    claim: str = "auto"
    min_speedup: float = 1.0
    min_stops: float | None = None
    ignore_stops: bool = False
    chat: ChatSwitches = field(default_factory=ChatSwitches)

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        self.chat.check()
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError(f"--limit must be at least 1, not {self.limit}")
        if self.claim not in CLAIMS:
            raise ConfigurationError(f"--claim {self.claim!r} is not one of {', '.join(CLAIMS)}")
        if not 1 <= self.min_speedup < inf:
            raise ConfigurationError(
                f"--min-speedup must be a finite number of at least 1, not {self.min_speedup}"
            )
        if self.min_stops is not None and not LEAST_STOPS <= self.min_stops <= 1:
            raise ConfigurationError(f"--min-stops must lie in [{LEAST_STOPS}, 1], not {self.min_stops}")


def measure_throughput(
    engine: Engine,
    prompts: Sequence[Prompt],
    switches: Switches,
    runtime: Runtime,
    *,
    progress: Progress,
    request: ReportRequest | None = None,
    journals: Journals | None = None,
) -> Report:
    """Run the arms over the prompts: both, or plain decoding alone where there is nothing of ours to compare.

    Raises:
        ConfigurationError: a claim cannot be made without a drafter, a switch does not make sense, or the
            journal belongs to another run.
        PromptError: a prompt does not fit the model, or leaves no room for a second token.
    """
    switches.check()
    if engine.policy.source is not None:
        raise ConfigurationError(
            f"--kv {engine.policy.spec} means nothing without its controls: eval recall and eval kv run them"
        )
    if engine.alone and switches.claim not in ("auto", "none"):
        raise ConfigurationError(f"--claim {switches.claim} compares with speculation; give --drafter PATH")
    if not _compares(engine) and (switches.ignore_stops or switches.min_stops is not None):
        raise ConfigurationError("--ignore-stops and --min-stops need a drafter; give --drafter PATH")
    started, watch = now(), StrainWatch()
    encoded = encode_all(engine, prompts, switches.chat)
    claims = throughput_claims(engine, switches, runtime, len(prompts)) if _compares(engine) else []
    of_speed = any(claim["name"] in SPEED_CLAIMS for claim in claims)
    # What `auto` claims depends on what else the machine does, and never on the speed that came out.
    reason = None
    if switches.claim == "auto" and claims:
        reason = idle_load().busy if of_speed else TOO_FEW_TO_TIME
    settings = configuration(engine, runtime, "eval throughput", switches)
    environment = describe(runtime, watch, models(engine))
    marks = fingerprint(environment, settings, prompts, encoded, request)
    journal = journals.open(marks) if journals else None
    arms = _arms(engine)
    ran = list(arms)
    if of_speed and engine.drafter:
        ran.append(our_arm(replace(engine, drafter=None, alone=True), BLOCK_1, "control", "block_1"))
    if switches.ignore_stops:
        ran.append(our_arm(engine, IGNORE_STOPS, "control", IGNORE_STOPS))
    total = len(ran) * len(prompts)
    if reason and of_speed:
        progress(0, total, "skipping the speed claim", reason)
    progress(0, total, "warming up", prompts[0].id)
    draft_length = warm_up(engine, encoded, switches.max_tokens)
    row = scored_rows(engine.target.tokenizer)
    plainly = replace(engine, drafter=None)
    if any(arm.name == BLOCK_1 for arm in ran):
        speculate(plainly, encoded[0], switches.max_tokens, plainly.new_draft_length())

    def disturbed() -> str | None:
        own = [row for arm in ran if arm.name == BLOCK_1 for row in arm.samples]
        plain_rows, our_rows = (arm.samples for arm in arms)
        return disturbance(plain_rows, our_rows, own)

    with watch.timing():
        course = run_interleaved(
            [
                Lane(
                    arm,
                    prompts,
                    encoded,
                    run=partial(_run, plainly, arm, switches.max_tokens, plainly.new_draft_length())
                    if arm.name == BLOCK_1
                    else partial(_run, engine, arm, switches.max_tokens, draft_length),
                    row=row,
                    phase="decoding" if arm.drafter is None else STEP,
                )
                for arm in ran
            ],
            progress=progress,
            journal=journal,
            watch=disturbed if of_speed and reason is None else None,
        )
    if of_speed and switches.claim == "auto":
        reason = reason or watch.timed_load.busy or _unwatched(watch, ran) or disturbed()
        if reason:
            claims = [claim for claim in claims if claim["name"] not in SPEED_CLAIMS]
    progress(total, total, "checking", reason if of_speed and reason else "rounding and divergences")
    divergences = [] if len(arms) == 1 else find_divergences(engine, encoded, *arms)
    rounding = measure_rounding(engine, encoded, arms, {found["prompt_id"] for found in divergences})
    return Report.build(
        "throughput",
        started=journal.started if journal else started,
        claims=claims,
        environment=describe(runtime, watch, models(engine)),
        configuration=settings | {"resumed": course.resumed, "speed_not_claimed": reason},
        arms=ran,
        order=course.order,
        rounding=rounding,
        divergences=divergences,
        restarts=course.restarts,
        request=request,
    )


def _compares(engine: Engine) -> bool:
    """Whether anything of ours differs from plain decoding."""
    return not engine.alone or engine.policy != NATIVE


def _arms(engine: Engine) -> list[Arm]:
    """Empty arms: plain decoding, and ours where there is something to compare."""
    baseline = Arm(PLAIN, "baseline", PLAIN_LOOP)
    return [baseline, our_arm(engine, SPECULATIVE)] if _compares(engine) else [baseline]


def _unwatched(watch: StrainWatch, arms: Sequence[Arm]) -> str | None:
    """Why the load says nothing of most rows: an earlier process ran them."""
    timed = sum(row["prefill_s"] + row["decode_s"] for arm in arms for row in arm.samples)
    seconds = watch.timed_load.seconds
    if seconds < WATCHED * timed:
        return f"the load was measured for {seconds:.1f} s of {timed:.1f} timed seconds (a resumed run)"
    return None


def our_arm(engine: Engine, name: str, role: str = "sut", control: str | None = None) -> Arm:
    """An empty arm of our loop, saying what the engine runs it with."""
    drafter = engine.drafter.drafter.name if engine.drafter else None
    block = None if engine.alone else engine.options.block
    policy = engine.policy
    return Arm(
        name,
        role,
        OUR_LOOP,
        drafter=drafter,
        block=block,
        control=control,
        kv=policy.spec,
        restoration=policy.source,
    )


def _run(
    engine: Engine, arm: Arm, max_tokens: int, draft_length: DraftLength, encoded: Sequence[list[int]]
) -> list[Outcome]:
    """Prompts through one arm, one after the other."""
    if arm.control == IGNORE_STOPS:
        options = SamplingOptions(ignore_stops=True)
        return [speculate(engine, tokens, max_tokens, draft_length, options=options) for tokens in encoded]
    return [run_arm(engine, arm.loop == OUR_LOOP, tokens, max_tokens, draft_length) for tokens in encoded]


def encode_all(
    engine: Engine, prompts: Sequence[Prompt], switches: ChatSwitches | None = None
) -> list[list[int]]:
    """Tokens of every prompt, checked before any work.

    Raises:
        ConfigurationError: a switch of the chat template is given, and no prompt goes through it.
        PromptError: a prompt does not fit the model.
    """
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
        if room(target, len(tokens), 2) < 2:
            raise PromptError(f"prompt {prompt.id} leaves no room in the context of {target.context}")
    return encoded


def warm_up(engine: Engine, encoded: Sequence[Sequence[int]], max_tokens: int) -> DraftLength:
    """Run both arms on the first prompt, untimed, and let an adaptive draft length measure its blocks.

    Where the first text ends before every block was tried, a few more prompts are used for that. The longest
    prompt is prefilled once by each arm, so that none of its shapes is met first in a row.
    """
    plain(engine.target, encoded[0], max_tokens, engine.options.prefill_chunk)
    draft_length = engine.new_draft_length()
    longest = max(encoded, key=len)
    if len(longest) > len(encoded[0]):
        plain(engine.target, longest, 1, engine.options.prefill_chunk)
        speculate(engine, longest, 1, draft_length)
    if not isinstance(draft_length, AdaptiveDraftLength):
        speculate(engine, encoded[0], max_tokens, draft_length)
        return draft_length
    tour = Tour(draft_length)
    for tokens in encoded[:WARM_UPS]:
        speculate(engine, tokens, max_tokens, tour)
        if tour.finished:
            break
    return draft_length


def run_arm(
    engine: Engine, ours: bool, tokens: Sequence[int], max_tokens: int, draft_length: DraftLength
) -> Outcome:
    """One prompt through one arm."""
    if ours:
        return speculate(engine, tokens, max_tokens, draft_length)
    return plain(engine.target, tokens, max_tokens, engine.options.prefill_chunk)


def measure_rounding(
    engine: Engine, encoded: Sequence[Sequence[int]], arms: Sequence[Arm], divergent: Collection[str]
) -> dict[str, float | int] | None:
    """Block-against-single logit error along the rounds of the longest texts, and of all that diverge.

    Without drafts the rounds are made up, so that the figure is there. None if all texts are too short.
    """
    prompts = dict(zip((row["prompt_id"] for row in arms[0].samples), encoded, strict=True))
    ours = {row["prompt_id"]: row for row in arms[-1].samples}
    runs, longest = [], 0
    for plain_row in sorted(arms[0].samples, key=lambda row: len(row["tokens"]), reverse=True):
        identifier, tokens = plain_row["prompt_id"], plain_row["tokens"]
        if longest >= ROUNDING_TEXTS and identifier not in divergent:
            continue
        longest += 1
        rounds = [(item["block"], item["accepted"]) for item in ours[identifier]["rounds"]]
        if len(arms) == 1:
            rounds = [(block, block - 1) for block in MADE_UP_BLOCKS]
        runs.append(Run(prompts[identifier], tokens[:-1], rounds))
    error = block_error(engine.target, runs, engine.options.prefill_chunk)
    return error if error["positions"] else None


def find_divergences(
    engine: Engine, encoded: Sequence[Sequence[int]], baseline: Arm, system: Arm
) -> list[dict[str, Any]]:
    """The first differing position of every prompt whose tokens differ, with plain decoding's gap there."""
    plain_rows = {row["prompt_id"]: row["tokens"] for row in baseline.samples}
    prompts = dict(zip(plain_rows, encoded, strict=True))
    found = []
    for row in system.samples:
        identifier, ours = row["prompt_id"], row["tokens"]
        theirs = plain_rows[identifier]
        pairs = zip(ours, theirs, strict=False)
        position = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if position is None:
            continue
        gap = plain_gap(engine.target, prompts[identifier], position, engine.options.prefill_chunk)
        found.append(
            {
                "arm": system.name,
                "prompt_id": identifier,
                "position": position,
                "plain_token": theirs[position],
                "speculative_token": ours[position],
                "plain_gap": gap,
            }
        )
    return found


def throughput_claims(
    engine: Engine, switches: Switches, runtime: Runtime, prompts: int
) -> list[dict[str, Any]]:
    """What the report asks to be believed for; known before anything is timed, but that `auto` may take a
    speed back where the machine was busy.

    A policy may change the output, so that by itself nothing is claimed of it here.
    """
    claim = switches.claim
    if claim == "auto" and engine.policy != NATIVE:
        claim = "none"
    if claim == "auto":
        claim = "speedup" if runtime.fast and engine.drafter else "no-slowdown"
        if prompts < FEWEST_SAMPLES or switches.max_tokens <= FEWEST_TOKENS:
            claim = "identity"
    pair = {"arm": SPECULATIVE, "baseline": PLAIN}
    claims: list[dict[str, Any]] = []
    if switches.min_stops is not None:
        claims.append({"name": "natural_stops", "arm": SPECULATIVE, "at_least": switches.min_stops})
    if claim == "none":
        return claims
    claims.append({"name": "identical_output", **pair})
    if claim == "speedup":
        claims.append({"name": "speedup", **pair, "at_least": switches.min_speedup})
    elif claim == "no-slowdown":
        claims.append({"name": "no_slowdown", **pair, "at_least": NO_SLOWDOWN})
    return claims


def models(engine: Engine) -> dict[str, Any]:
    """The model cards of the environment block."""
    learned = engine.restoration.learned if engine.restoration else None
    target, drafter = engine.target, engine.drafter
    cards = {
        "target": target_card(target),
        "drafter": replace(drafter.card, largest_block=2 * drafter.drafter.block_size)
        if drafter and drafter.card
        else None,
        "projector": learned.card if learned else None,
    }
    return {role: card for role, card in cards.items() if card is not None}


def configuration(engine: Engine, runtime: Runtime, command: str, switches: Any) -> dict[str, Any]:
    """Every switch of the run, flat; ``switches`` is the measurement's own dataclass."""
    options = engine.options
    return {
        "command": command,
        "block": options.block if engine.drafter else "1",
        "drafter": engine.drafter.drafter.name if engine.drafter else None,
        "drafter_settings": engine.drafter.settings if engine.drafter else None,
        "kv": engine.policy.spec,
        "quantize": options.quantize,
        "projector": options.projector.name if options.projector else None,
        "prefill_chunk": options.prefill_chunk,
        "dtype": engine.target.card.dtype,
        "fused_kernels": runtime.compiles,
        "compiled": options.compiled,
        "single_graph": options.single_graph,
        "blas_threads": threads(),
        **_flattened(asdict(switches)),
    }


def _flattened(values: dict[str, Any]) -> dict[str, Any]:
    """Groups of switches spread out: a configuration has no levels."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flattened(value) if isinstance(value, dict) else {name: _flat(value)}
    return flat


def _flat(value: Any) -> Any:
    """A list of texts as one line of JSON, or nothing: a configuration holds no lists."""
    return (json.dumps(value) if value else None) if isinstance(value, (list, tuple)) else value
