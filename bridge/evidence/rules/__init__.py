"""The rules of the gate, and the codes that other stages raise.

A rule is a pure function that yields one message for each way it is broken; its docstring says when a report
is rejected. The order is the order of judgement and of the table in the docs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bridge.evidence.figures import Case
from bridge.evidence.rules import claims, identity, machine, memory, output, paths, recall, rows, speed


@dataclass(frozen=True)
class Explanation:
    """What a code means: when it is raised, and what to do about it."""

    rejected_when: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """A rule of the gate, and what to do where it is broken."""

    check: Callable[[Case], Iterator[str]]
    remedy: str

    @property
    def rejected_when(self) -> str:
        """When a report is rejected: the docstring as a part of a sentence."""
        text = " ".join((self.check.__doc__ or "").split()).removesuffix(".")
        return text[:1].lower() + text[1:]


# Raised before the rules (the report could not be read) or outside the gate (files against a signed result).
ELSEWHERE: dict[str, Explanation] = {
    "SCHEMA": Explanation(
        "the bytes are not strict JSON, or a value breaks the report's schema",
        "Write the report with this version's engine; do not edit it.",
    ),
    "LEGACY_SCHEMA": Explanation(
        "the report names another schema, or none; reports of the earlier system do not",
        "Run the job again with an engine of this version.",
    ),
    "UNKNOWN_KIND": Explanation(
        "the report's kind is not one the gate can judge",
        "Update the gate's side, or produce a kind it knows.",
    ),
    "UNKNOWN_FIELD": Explanation(
        "the report carries a field the schema does not know",
        "Use an engine and a gate of the same version.",
    ),
    "WRONG_KIND": Explanation(
        "the report is not of the kind that the preset promises (checked by the runner)",
        "Use an engine and presets of the same version.",
    ),
    "CLAIM_MISSING": Explanation(
        "the report does not make a claim that the preset promises, or makes it of arms without the "
        "components that the preset tests (checked by the runner and the client)",
        "Ask for what the preset measures; an engine that cannot claim it has not done that job.",
    ),
    "NO_EVIDENCE": Explanation(
        "the preset promises a report, and the result holds none (checked when a result is read)",
        "Find out why the job wrote no report; its log says what it did.",
    ),
    "SECRET_IN_EVIDENCE": Explanation(
        "the report contains a secret-named value of the runner's environment (checked by the runner)",
        "Keep secrets out of the runner's environment, or out of what the job writes.",
    ),
    "EVIDENCE_DIGEST": Explanation(
        "a file is not the one whose sha256 the signed result names (checked when a result is read)",
        "Fetch the result again; if it stays, the published files were edited.",
    ),
}

RULES: dict[str, Rule] = {
    "STALE_REPORT": Rule(
        identity.stale_report, "Judge the report this job wrote; run it again if there is none."
    ),
    "WRONG_REQUEST": Rule(
        identity.wrong_request, "Judge the report with its own request; a run by hand answers none."
    ),
    "KIND_MISMATCH": Rule(
        identity.kind_mismatch,
        "One baseline at most, every arm with its own name, rows only where the kind has them.",
    ),
    "ROW_INCONSISTENT": Rule(
        rows.row_inconsistent, "Do not edit rows; if they were not edited, report a bug of the engine."
    ),
    "ORDER_MISMATCH": Rule(rows.order_mismatch, "Report every run that was made."),
    "MISSING_STAGE_TIMINGS": Rule(rows.missing_stage_timings, "Time both stages of every row."),
    "TIMINGS_IMPOSSIBLE": Rule(
        rows.timings_impossible, "Do not edit times; if they were not edited, report a bug of the engine."
    ),
    "SUMMARY_MISMATCH": Rule(
        rows.summary_mismatch, "Derive the summary from the rows, and from nothing else."
    ),
    "ENGINE_NEVER_RAN": Rule(
        paths.engine_never_ran,
        "Find out why the drafter did not load or never proposed; see liveness.fallbacks.",
    ),
    "SILENT_FALLBACK": Rule(paths.silent_fallback, "Declare what ran, or make the declared component run."),
    "MIXED_PATHS": Rule(paths.mixed_paths, "Give every path an arm of its own."),
    "BASELINE_AS_SUT": Rule(paths.baseline_as_sut, "Claim only of the system under test."),
    "SELF_COMPARISON": Rule(paths.self_comparison, "Compare with another system, measured separately."),
    "CONFIGURATION_UNKNOWN": Rule(
        identity.configuration_unknown, "Use an engine and a gate of the same version."
    ),
    "PROMPT_SET_MISMATCH": Rule(
        identity.prompt_set_mismatch,
        "Run the whole set or use a smaller limit; give prompts of your own other ids.",
    ),
    "PROMPT_CONTAMINATED": Rule(
        output.prompt_contaminated,
        "Run the same prompts in every arm, and each set with its own instruction only.",
    ),
    "OUTPUT_DIVERGED": Rule(
        output.output_diverged,
        "The speculative path computes something else; look at the cache and the mask at that position.",
    ),
    "ROUNDING_IMPLAUSIBLE": Rule(
        output.rounding_implausible, "The block forward is wrong; its own error must not excuse divergences."
    ),
    "OUTPUT_DEGENERATE": Rule(
        output.output_degenerate,
        "Use prompts the model can answer, or fewer tokens; loops inflate acceptance.",
    ),
    "RECALL_VACUOUS": Rule(
        recall.recall_vacuous,
        "Hide answers that occur nowhere else in the prompt, and vary them; an output that lists answers "
        "of other prompts did not read its own.",
    ),
    "RECALL_TOO_FEW": Rule(recall.recall_too_few, "Ask more prompts, with needles at several depths."),
    "RECALL_BELOW_ORACLE": Rule(
        recall.recall_below_oracle, "Claim the recall that was measured, without parity."
    ),
    "RESTORATION_CLAIM": Rule(
        recall.restoration_claim,
        "Count restored positions of every row, and declare restoration on the arm that has it.",
    ),
    "CONTROL_MISSING": Rule(recall.control_missing, "Run the control arms with it."),
    "CONTROL_FAILED": Rule(
        recall.control_failed,
        "The mechanism has no effect, or answers leak; the figure means nothing until that is found.",
    ),
    "SPEEDUP_SAMPLES": Rule(speed.speedup_samples, "Run more prompts."),
    "SPEEDUP_TOKENS": Rule(speed.speedup_tokens, "Allow more tokens, or use prompts with longer answers."),
    "SPEEDUP_SUBSET": Rule(speed.speedup_subset, "Compare over everything that was run."),
    "SPEEDUP_SCOPE": Rule(
        speed.speedup_scope, "Time decoding alone in both arms; end-to-end figures are extra."
    ),
    "SPEEDUP_BASELINE_LOOP": Rule(
        speed.speedup_baseline_loop, "Compare with mlx_lm.generate.generate_step and no drafter."
    ),
    "SPEEDUP_IMPOSSIBLE": Rule(
        speed.speedup_impossible,
        "A forward costs a plain step at least: the baseline was disturbed, or forwards are missing. "
        "Measure again on a quiet machine.",
    ),
    "BASELINE_SLOW": Rule(
        speed.baseline_slow, "The baseline was disturbed; measure again on a quiet machine."
    ),
    "SPEEDUP_NOT_INTERLEAVED": Rule(
        speed.speedup_not_interleaved, "Run both arms prompt by prompt and alternate which goes first."
    ),
    "SPEEDUP_PREFILL_SPREAD": Rule(
        speed.speedup_prefill_spread, "The machine was busy with something else; run again when it is quiet."
    ),
    "SPEEDUP_DECODE_SPREAD": Rule(
        speed.speedup_decode_spread, "The machine was busy with something else; run again when it is quiet."
    ),
    "MEMORY_ANALYTIC_AS_MEASURED": Rule(
        memory.memory_analytic_as_measured,
        "Sum the caches' nbytes after the run, or state no resident bytes.",
    ),
    "MEMORY_CLAIM_MISMATCH": Rule(
        memory.memory_claim_mismatch, "Declare the policy that was in use, and measure after the run."
    ),
    "POLICY_NO_EFFECT": Rule(
        memory.policy_no_effect,
        "Give a smaller sink and window, longer prompts or more tokens; or measure native caches as such.",
    ),
    "PARITY_TOLERANCE": Rule(
        output.parity_tolerance,
        "Find the first round that differs; a wider tolerance hides it. For a preset, compare as it says.",
    ),
    "PARITY_TOO_FEW": Rule(output.parity_too_few, "Compare more rounds or more cases."),
    "PARITY_SELF": Rule(output.parity_self, "Compare with outputs that another implementation computed."),
    "ENVIRONMENT_INCOMPLETE": Rule(
        machine.environment_incomplete,
        "Let the engine write the environment on the machine that ran. A null git.sha is complete: an "
        "installed engine has no checkout, and source_sha256 names what ran.",
    ),
    "ENVIRONMENT_IMPOSSIBLE": Rule(
        machine.environment_impossible, "Let the engine write the environment on the machine that ran."
    ),
    "MACHINE_BUSY": Rule(
        machine.machine_busy,
        "Run again when the machine is quiet; `--claim auto` claims no speed on a busy one.",
    ),
    "THERMAL_OR_POWER": Rule(
        machine.thermal_or_power, "Plug in, let it cool, close what eats memory, and run again."
    ),
    "CLAIM_NOT_MET": Rule(claims.claim_not_met, "Claim what the rows give."),
}


def explain(code: str) -> Explanation | Rule | None:
    """The meaning and remedy of a code, or None when the gate has no such code."""
    return RULES.get(code) or ELSEWHERE.get(code)


def rules_table() -> str:
    """Every code as a Markdown table, for the docs."""
    lines = ["| code | rejected when | what to do |", "| --- | --- | --- |"]
    for code, entry in (ELSEWHERE | RULES).items():
        lines.append(f"| `{code}` | {entry.rejected_when} | {entry.remedy} |")
    return "\n".join(lines) + "\n"
