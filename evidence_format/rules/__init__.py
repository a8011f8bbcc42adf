"""The rules of the gate, and the codes that other stages raise.

A rule is a pure function that yields one message for each way it is broken. Its name in capitals is its code,
its docstring says when a report is rejected. The order is that of judgement and of the table in the docs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from evidence_format.figures import Case
from evidence_format.rules import claims, identity, memory, output, perplexity, recall, rows

Check = Callable[[Case], Iterator[str]]


class Rule(NamedTuple):
    """What a code means: when it is raised, what to do about it, and the check where it is the gate's own."""

    rejected_when: str
    remedy: str
    check: Check = lambda _: iter(())


_NEWER = "Use an engine and a gate of the same version."
_OWN = "Let the engine write the environment on the machine that ran."
_QUIET = "The machine was busy with something else; run again when it is quiet."

# Raised before the rules (the report could not be read), of paired records, or outside the gate.
ELSEWHERE = {
    "SCHEMA": Rule(
        "the bytes are not strict JSON, or a value breaks the report's schema",
        "Write the report with this version's engine; do not edit it.",
    ),
    "LEGACY_SCHEMA": Rule(
        "the report names another schema, or none; reports of the earlier system do not",
        "Run the job again with an engine of this version.",
    ),
    "UNKNOWN_KIND": Rule(
        "the report's kind is not one the gate can judge",
        "Update the gate's side, or produce a kind it knows.",
    ),
    "UNKNOWN_FIELD": Rule("the report carries a field the schema does not know", _NEWER),
    "WRONG_KIND": Rule(
        "the report is not of the kind that the preset promises (checked by the runner)",
        "Use an engine and presets of the same version.",
    ),
    "CLAIM_MISSING": Rule(
        "the report does not make a claim that the preset promises, or makes it of arms without the "
        "components that the preset tests (checked by the runner and the client)",
        "Ask for what the preset measures; an engine that cannot claim it has not done that job.",
    ),
    "NO_EVIDENCE": Rule(
        "the preset promises a report, and the result holds none (checked when a result is read)",
        "Find out why the job wrote no report; its log says what it did.",
    ),
    "PAIRED_ORDER": Rule(
        "the runs of a paired record are not a warm-up of each side and then whole blocks A B B A",
        "Do not edit runs; if they were not edited, report a bug of the runner.",
    ),
    "PAIRED_RUN": Rule(
        "a run of a paired record failed, or its value cannot be that of the metric",
        "Do not edit runs; if they were not edited, report a bug of the runner.",
    ),
    "SECRET_IN_EVIDENCE": Rule(
        "the report contains a secret-named value of the runner's environment (checked by the runner)",
        "Keep secrets out of the runner's environment, or out of what the job writes.",
    ),
    "EVIDENCE_DIGEST": Rule(
        "a file is not the one whose sha256 the signed result names (checked when a result is read)",
        "Fetch the result again; if it stays, the published files were edited.",
    ),
}

_REMEDIES: dict[Check, str] = {
    identity.stale_report: "Judge the report this job wrote; run it again if there is none.",
    identity.wrong_request: "Judge the report with its own request; a run by hand answers none.",
    identity.kind_mismatch: "One baseline at most, names of their own, rows only where the kind has them.",
    rows.row_inconsistent: "Do not edit rows; if they were not edited, report a bug of the engine.",
    rows.order_mismatch: "Report every run that was made.",
    rows.missing_stage_timings: "Time both stages of every row.",
    rows.timings_impossible: "Do not edit times; if they were not edited, report a bug of the engine.",
    rows.summary_mismatch: "Derive the summary from the rows, and from nothing else.",
    rows.engine_never_ran: "Find out why the drafter did not load or never proposed; see liveness.fallbacks.",
    rows.silent_fallback: "Declare what ran, or make the declared component run.",
    rows.mixed_paths: "Give every path an arm of its own.",
    rows.baseline_as_sut: "Claim only of the system under test.",
    rows.self_comparison: "Compare with another system, measured separately.",
    identity.configuration_unknown: _NEWER,
    identity.prompt_set_mismatch: "Run the whole set or a smaller limit; give your own prompts other ids.",
    output.prompt_contaminated: "Run the same prompts in every arm, each set with its own instruction.",
    output.output_diverged: "The speculative path errs; look at the cache and the mask at that position.",
    output.rounding_implausible: "The block forward is wrong; its own error must not excuse divergences.",
    output.output_degenerate: "Use prompts the model can answer, or fewer tokens; loops inflate acceptance.",
    recall.recall_vacuous: "Hide answers that occur nowhere else, and vary them; a list is no recall.",
    recall.recall_too_few: "Ask more prompts, with needles at several depths.",
    recall.recall_below_oracle: "Claim the recall that was measured, without parity.",
    recall.restoration_claim: "Count the restored positions of every row; declare restoration where it is.",
    recall.control_missing: "Run the control arms with it.",
    recall.control_failed: "The mechanism has no effect, or answers leak: find out which, and measure again.",
    claims.speedup_samples: "Run more prompts.",
    claims.speedup_tokens: "Allow more tokens, or use prompts with longer answers.",
    claims.speedup_subset: "Compare over everything that was run.",
    claims.speedup_scope: "Time decoding alone in both arms; end-to-end figures are extra.",
    claims.speedup_baseline_loop: "Compare with mlx_lm.generate.generate_step and no drafter.",
    claims.speedup_impossible: "A forward costs a plain step at least: the baseline was disturbed, or"
    " forwards are missing. Measure again on a quiet machine.",
    claims.baseline_slow: "The baseline was disturbed; measure again on a quiet machine.",
    claims.speedup_not_interleaved: "Run both arms prompt by prompt and alternate which goes first.",
    claims.speedup_prefill_spread: _QUIET,
    claims.speedup_decode_spread: _QUIET,
    memory.memory_analytic_as_measured: "Sum the caches' nbytes after the run, or state no resident bytes.",
    memory.memory_claim_mismatch: "Declare the policy that was in use, and measure after the run.",
    memory.policy_no_effect: "Give a smaller sink and window or longer prompts; or measure native caches.",
    output.parity_tolerance: "Find the first round that differs; compare as tightly as the preset says.",
    output.parity_too_few: "Compare more rounds or more cases.",
    output.parity_self: "Compare with outputs that another implementation computed.",
    perplexity.perplexity_inconsistent: "Do not edit chunks; if they were not edited, report a bug"
    " of the engine.",
    perplexity.perplexity_vacuous: "Score a longer text that the model can read, under a policy that changes"
    " something.",
    identity.environment_incomplete: f"{_OWN} A null git.sha is complete: an installed engine has no"
    " checkout, and source_sha256 names what ran.",
    identity.environment_impossible: _OWN,
    identity.machine_busy: "Run again when it is quiet; `--claim auto` claims no speed on a busy machine.",
    identity.thermal_or_power: "Plug in, let it cool, close what eats memory, and run again.",
    claims.claim_not_met: "Claim what the rows give.",
}


def _rule(check: Check, remedy: str) -> Rule:
    sentence = " ".join((check.__doc__ or "").split()).removesuffix(".")
    return Rule(sentence[:1].lower() + sentence[1:], remedy, check)


RULES = {check.__name__.upper(): _rule(check, remedy) for check, remedy in _REMEDIES.items()}
