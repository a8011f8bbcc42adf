"""Speculative against plain decoding of the same prompts, interleaved prompt by prompt.

Measures; whether the figures may be believed is for the gate. Decode-only and end-to-end figures both come
from the rows. One untimed warm-up an arm on the first prompt's real shape. When identical work takes very
different times, something else uses the machine: all of it is measured again, and the report says so.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from engine.blas import threads
from engine.config import Engine
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.arms import OUR_LOOP, PLAIN_LOOP, Outcome, plain, room, speculate
from engine.evaluation.environment import SwapWatch, describe
from engine.evaluation.prompts import Prompt, encode
from engine.evaluation.report import Arm, Report, Request, now, sample
from engine.evaluation.rounding import Run, block_error, plain_gap
from engine.evaluation.steady import disturbance
from engine.pace import Adaptive, Pace, Tour
from engine.runtime import Runtime

Progress = Callable[[int, int, str, str], None]  # done, total, phase, detail

PLAIN, SPECULATIVE = "plain", "speculative"
CLAIMS = ("auto", "speedup", "no-slowdown", "none")
NO_SLOWDOWN = 0.9
ROUNDING_TEXTS = 3
MADE_UP_BLOCKS = (2, 4, 8, 16)
WARM_UPS = 4
RESTARTS = 3
STEP = "drafting/verifying"
# What the gate asks of a speed; with less, `auto` claims identical output alone.
FEWEST_SAMPLES, FEWEST_TOKENS = 5, 32


@dataclass(frozen=True)
class Switches:
    """What the command line can set about a measurement."""

    prompts: str = "all"
    limit: int | None = 8
    max_tokens: int = 96
    seed: int = 0
    claim: str = "auto"
    min_speedup: float = 1.0

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
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


def measure_throughput(
    engine: Engine,
    prompts: Sequence[Prompt],
    switches: Switches,
    runtime: Runtime,
    *,
    progress: Progress,
    request: Request | None = None,
) -> Report:
    """Run the arms over the prompts: both, or plain decoding alone where there is no drafter.

    Raises:
        ConfigurationError: a claim cannot be made without a drafter, or a switch does not make sense.
        PromptError: a prompt does not fit the model, or leaves no room for a second token.
    """
    switches.check()
    if engine.alone and switches.claim not in ("auto", "none"):
        raise ConfigurationError(f"--claim {switches.claim} compares with speculation; give --drafter PATH")
    started, swap = now(), SwapWatch()
    encoded = encode_all(engine, prompts)
    claims = [] if engine.alone else throughput_claims(engine, switches, runtime, len(prompts))
    total = len(_arms(engine)) * len(prompts)
    progress(0, total, "warming up", prompts[0].id)
    pace = warm_up(engine, encoded, switches.max_tokens)
    restarts: list[dict[str, Any]] = []
    disturbed: str | None = None
    while True:
        arms = _arms(engine)
        order: list[tuple[str, str]] = []
        for index, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
            for arm in arms if index % 2 == 0 else reversed(arms):
                progress(len(order), total, "decoding" if arm.role == "baseline" else STEP, prompt.id)
                outcome = run_arm(engine, arm.role == "sut", tokens, switches.max_tokens, pace)
                arm.samples.append(sample(prompt, tokens, outcome))
                order.append((arm.name, prompt.id))
            watched = bool(claims) and len(restarts) < RESTARTS
            disturbed = disturbance(*(arm.samples for arm in arms)) if watched else None
            if disturbed is not None:
                break
        if disturbed is None:
            break
        restarts.append({"after_samples": len(order), "reason": disturbed})
        progress(0, total, "measuring again", f"({disturbed})")
    progress(total, total, "checking", "rounding and divergences")
    divergences = [] if engine.alone else find_divergences(engine, encoded, arms[0], arms[-1])
    rounding = measure_rounding(engine, encoded, arms, {found["prompt_id"] for found in divergences})
    return Report.build(
        "throughput",
        started=started,
        claims=claims,
        environment=describe(runtime, swap, models(engine)),
        configuration=configuration(engine, runtime, "eval throughput", switches),
        arms=arms,
        order=order,
        rounding=rounding,
        divergences=divergences,
        restarts=restarts,
        request=request,
    )


def _arms(engine: Engine) -> list[Arm]:
    """Empty arms: plain decoding, and ours where there is something to compare."""
    baseline = Arm(PLAIN, "baseline", PLAIN_LOOP)
    drafter = engine.drafter.drafter.name if engine.drafter else None
    system = Arm(SPECULATIVE, "sut", OUR_LOOP, drafter=drafter, block=engine.options.block)
    return [baseline] if engine.alone else [baseline, system]


def encode_all(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Tokens of every prompt, checked before any work."""
    target = engine.target
    encoded = [encode(p, target.tokenizer, target.target.vocab_size, target.context) for p in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if room(target, len(tokens), 2) < 2:
            raise PromptError(f"prompt {prompt.id} leaves no room in the context of {target.context}")
    return encoded


def warm_up(engine: Engine, encoded: Sequence[Sequence[int]], max_tokens: int) -> Pace:
    """Run both arms on the first prompt, untimed, and let an adaptive pace learn what its blocks cost.

    Where the first text ends before every block was tried, a few more prompts are used for that.
    """
    plain(engine.target, encoded[0], max_tokens, engine.options.prefill_chunk)
    pace = engine.new_pace()
    if not isinstance(pace, Adaptive):
        speculate(engine, encoded[0], max_tokens, pace)
        return pace
    tour = Tour(pace)
    for tokens in encoded[:WARM_UPS]:
        speculate(engine, tokens, max_tokens, tour)
        if tour.finished:
            break
    return pace


def run_arm(engine: Engine, ours: bool, tokens: Sequence[int], max_tokens: int, pace: Pace) -> Outcome:
    """One prompt through one arm."""
    if ours:
        return speculate(engine, tokens, max_tokens, pace)
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
    """What the report asks to be believed for; known before anything is timed."""
    claim = switches.claim
    if claim == "auto":
        claim = "speedup" if runtime.fast and engine.drafter else "no-slowdown"
        if prompts < FEWEST_SAMPLES or switches.max_tokens <= FEWEST_TOKENS:
            claim = "identity"
    pair = {"arm": SPECULATIVE, "baseline": PLAIN}
    if claim == "none":
        return []
    claims: list[dict[str, Any]] = [{"name": "identical_output", **pair}]
    if claim == "speedup":
        claims.append({"name": "speedup", **pair, "at_least": switches.min_speedup})
    elif claim == "no-slowdown":
        claims.append({"name": "no_slowdown", **pair, "at_least": NO_SLOWDOWN})
    return claims


def models(engine: Engine) -> dict[str, Any]:
    """The model cards of the environment block."""
    cards = {"target": engine.target.card}
    card = engine.drafter.card if engine.drafter else None
    return cards if card is None else {**cards, "drafter": card}


def configuration(engine: Engine, runtime: Runtime, command: str, switches: Any) -> dict[str, Any]:
    """Every switch of the run, flat; ``switches`` is the measurement's own dataclass."""
    options = engine.options
    return {
        "command": command,
        "block": options.block if engine.drafter else "1",
        "drafter": engine.drafter.drafter.name if engine.drafter else None,
        "prefill_chunk": options.prefill_chunk,
        "dtype": engine.target.card.dtype,
        "fused_kernels": runtime.compiles,
        "compiled": options.compiled,
        "single_graph": options.single_graph,
        "blas_threads": threads(),
        **{name: _flat(value) for name, value in asdict(switches).items()},
    }


def _flat(value: Any) -> Any:
    """A list of texts as one line of JSON, or nothing: a configuration holds no lists."""
    return (json.dumps(value) if value else None) if isinstance(value, (list, tuple)) else value
