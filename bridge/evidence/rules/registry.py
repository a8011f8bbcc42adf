"""The registry: one literal entry a rule, and the codes that other stages raise.

The order is the order of judgement and of the table in the docs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bridge.evidence.case import Case
from bridge.evidence.rules import (
    binding,
    claims,
    effect,
    kinds,
    machine,
    memory,
    output,
    parity,
    paths,
    prompt_sets,
    restoration,
    retrieval,
    rows,
    speed,
    switches,
)

Check = Callable[[Case], Iterator[str]]


@dataclass(frozen=True)
class Explanation:
    """What a code means: when it is raised, and what to do about it."""

    rejected_when: str
    remedy: str


@dataclass(frozen=True)
class Rule(Explanation):
    """A code with the pure function that yields one message for each way the rule is broken."""

    check: Check


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
        "Fetch the result again; if it stays, somebody edited the published files.",
    ),
}

RULES: dict[str, Rule] = {
    "STALE_REPORT": Rule(
        "the report's times are out of order or outside the job's",
        "Judge the report this job wrote; run it again if there is none.",
        binding.stale_report,
    ),
    "WRONG_REQUEST": Rule(
        "nonce, workload commit, preset digest or engine source are another request's, or missing",
        "Judge the report with its own request; a run by hand answers none.",
        binding.wrong_request,
    ),
    "KIND_MISMATCH": Rule(
        "the arms are not those of the report's kind: none, doubled names, two baselines, a probe or parity "
        "report with rows, a comparison with a reference anywhere else, a kv report whose arms differ in "
        "more than their KV policies",
        "One baseline at most, every arm with its own name, rows only where the kind has them.",
        kinds.kind_mismatch,
    ),
    "ROW_INCONSISTENT": Rule(
        "a row contradicts itself (token digest, rounds that cannot give its tokens, hit, text, an answer "
        "that is not the text without its reasoning), holds more tokens than configuration.max_tokens or "
        "tokens outside the target's vocabulary, decoded tokens without a forward, or ran a block longer "
        "than the drafter takes",
        "Do not edit rows; if nobody did, report a bug of the engine.",
        rows.row_inconsistent,
    ),
    "ORDER_MISMATCH": Rule(
        "`order` and the rows do not name the same runs, each once",
        "Report every run that was made.",
        rows.order_mismatch,
    ),
    "MISSING_STAGE_TIMINGS": Rule(
        "a row lacks its prefill or decode time",
        "Time both stages of every row.",
        rows.missing_stage_timings,
    ),
    "TIMINGS_IMPOSSIBLE": Rule(
        "rounds take longer than their row, rows longer than the report, or a forward no time; or, where a "
        "speed is claimed, verifications less than half of a plain step in the median, a single one "
        "less than a quarter, plain steps within the loop less than two fifths on average, or verifications "
        "less than nine tenths of a step of the same loop at block 1",
        "Do not edit times; if nobody did, report a bug of the engine.",
        rows.timings_impossible,
    ),
    "SUMMARY_MISMATCH": Rule(
        "a summary figure is not what its rows give (relative 1e-9)",
        "Derive the summary from the rows, and from nothing else.",
        rows.summary_mismatch,
    ),
    "ENGINE_NEVER_RAN": Rule(
        "a speculative arm has no rounds, none of two tokens or more, or its drafter's network ran less "
        "often than its blocks need; or a preset promises a drafter that an arm under test does not declare",
        "Find out why the drafter did not load or never proposed; see liveness.fallbacks.",
        paths.engine_never_ran,
    ),
    "SILENT_FALLBACK": Rule(
        "a declared loop, drafter, block or other component was not what ran, or the configuration names "
        "another drafter, block, KV policy or dtype; or a preset promises a KV policy or a switch that no "
        "arm declares",
        "Declare what ran, or make the declared component run.",
        paths.silent_fallback,
    ),
    "MIXED_PATHS": Rule(
        "samples of one arm ran on different paths or caches",
        "Give every path an arm of its own.",
        paths.mixed_paths,
    ),
    "BASELINE_AS_SUT": Rule(
        "a claim is about an arm that is not under test, or the arm under test is plain decoding",
        "Claim only of the system under test.",
        paths.baseline_as_sut,
    ),
    "SELF_COMPARISON": Rule(
        "both arms of a comparison are the same system or the same measurements",
        "Compare with another system, measured separately.",
        paths.self_comparison,
    ),
    "CONFIGURATION_UNKNOWN": Rule(
        "the configuration holds a switch that the gate does not know, or that its command does not have",
        "Use an engine and a gate of the same version.",
        switches.configuration_unknown,
    ),
    "PROMPT_SET_MISMATCH": Rule(
        "the prompts of a shipped set are not just those that the set, its limit and the seed select, or "
        "other prompts, needles or answers have their ids",
        "Run the whole set or use a smaller limit; give prompts of your own other ids.",
        prompt_sets.prompt_set_mismatch,
    ),
    "PROMPT_CONTAMINATED": Rule(
        "arms ran different prompts or seek different needles under one id, one prompt stands under several "
        "ids, or a set carries mixed or foreign instructions",
        "Run the same prompts in every arm, and each set with its own instruction only.",
        output.prompt_contaminated,
    ),
    "OUTPUT_DIVERGED": Rule(
        "greedy tokens differ from the plain ones where the plain logits' gap is not below the rounding "
        "error measured in the same run, or at more than half of the prompts, or end for another reason",
        "The speculative path computes something else; look at the cache and the mask at that position.",
        output.output_diverged,
    ),
    "ROUNDING_IMPLAUSIBLE": Rule(
        "block and single forwards differ by more than the dtype's rounding explains",
        "The block forward is wrong; its own error must not excuse divergences.",
        output.rounding_implausible,
    ),
    "OUTPUT_DEGENERATE": Rule(
        "an output that a claim depends on runs away in repetition (controls excepted)",
        "Use prompts the model can answer, or fewer tokens; loops inflate acceptance.",
        output.output_degenerate,
    ),
    "RECALL_VACUOUS": Rule(
        "an empty, one-character or prompt-contained answer counts as a hit; a needle is sought that its "
        "prompt does not hold; recall is claimed without "
        "needles, with one answer for most prompts, of texts that recite the answers of many prompts, or "
        "against an oracle that answers nothing or was cut short",
        "Hide answers that stand nowhere else in the prompt, and vary them; an output that lists answers of "
        "other prompts did not read its own.",
        retrieval.recall_vacuous,
    ),
    "RECALL_TOO_FEW": Rule(
        "recall is claimed of fewer than 5 prompts, or of needles at one depth",
        "Ask more prompts, with needles at several depths.",
        retrieval.recall_too_few,
    ),
    "RECALL_BELOW_ORACLE": Rule(
        "an arm that claims recall parity lies more than 5 points under the oracle",
        "Claim the recall that was measured, without parity.",
        retrieval.recall_below_oracle,
    ),
    "RESTORATION_CLAIM": Rule(
        "restoration is claimed or declared where a row restored nothing, or not what its prompt evicts, or "
        "from another source than its KV policy says; or it is claimed of zeros or noise, which are "
        "controls; or liveness does not count what the rows hold; or no arm under test declares it, or not "
        "from the source that a preset promises",
        "Count restored positions of every row, and declare restoration on the arm that has it.",
        restoration.restoration_claim,
    ),
    "CONTROL_MISSING": Rule(
        "controls over the same prompts are missing: exact and noise of the same policy for an arm that "
        "restores, claimed or not; no_needle for a claim of recall; a plain oracle for parity; ignore_stops "
        "where the configuration says so",
        "Run the control arms with it.",
        restoration.control_missing,
    ),
    "CONTROL_FAILED": Rule(
        "a noise or no_needle control still answers, reasoning included, or was cut short, an exact control "
        "answers less than half of its prompts, or an ignore_stops control ends at a stop token",
        "The mechanism has no effect, or answers leak; the figure means nothing until that is found.",
        restoration.control_failed,
    ),
    "SPEEDUP_SAMPLES": Rule(
        "a speed is claimed with fewer than 5 samples, or different prompts, in an arm",
        "Run more prompts.",
        speed.speedup_samples,
    ),
    "SPEEDUP_TOKENS": Rule(
        "a speed is claimed with a median of fewer than 32 decoded tokens",
        "Allow more tokens, or use prompts with longer answers.",
        speed.speedup_tokens,
    ),
    "SPEEDUP_SUBSET": Rule(
        "the compared arms did not keep the same prompts",
        "Compare over everything that was run.",
        speed.speedup_subset,
    ),
    "SPEEDUP_SCOPE": Rule(
        "the arms are timed over different scopes, or not decode-only",
        "Time decoding alone in both arms; end-to-end figures stand beside it.",
        speed.speedup_scope,
    ),
    "SPEEDUP_BASELINE_LOOP": Rule(
        "the plain arm is not mlx-lm's asynchronous generate_step, or a preset promises one and there "
        "is none",
        "Compare with mlx_lm.generate.generate_step and no drafter.",
        speed.speedup_baseline_loop,
    ),
    "SPEEDUP_IMPOSSIBLE": Rule(
        "the ratio exceeds the mean tokens per forward of the target, plain steps included, by more than a "
        "tenth; held against the same loop at block 1 where the report has that arm, else against plain "
        "decoding",
        "A forward costs a plain step at least: the baseline was disturbed, or forwards are missing. Measure "
        "again on a quiet machine.",
        speed.speedup_impossible,
    ),
    "BASELINE_SLOW": Rule(
        "a plain step took more than 1.25 times its whole prefill, or more than twice (in total 2.25 times) "
        "as long as the same loop at block 1",
        "The baseline was disturbed; measure again on a quiet machine.",
        speed.baseline_slow,
    ),
    "SPEEDUP_NOT_INTERLEAVED": Rule(
        "the arms ran one after the other, or one of them always went first",
        "Run both arms prompt by prompt and alternate which goes first.",
        speed.speedup_not_interleaved,
    ),
    "SPEEDUP_PREFILL_SPREAD": Rule(
        "identical prefills varied more than threefold (and by more than 25 ms)",
        "The machine was busy with something else; run again when it is quiet.",
        speed.speedup_prefill_spread,
    ),
    "SPEEDUP_DECODE_SPREAD": Rule(
        "the plain arm's time per token varied more than threefold between rows of 16 tokens or more",
        "The machine was busy with something else; run again when it is quiet.",
        speed.speedup_decode_spread,
    ),
    "MEMORY_ANALYTIC_AS_MEASURED": Rule(
        "resident bytes are stated or claimed from a formula",
        "Sum the caches' nbytes after the run, or state no resident bytes.",
        memory.memory_analytic_as_measured,
    ),
    "MEMORY_CLAIM_MISMATCH": Rule(
        "the caches held are not those of the declared KV policy, hold nothing, take bits a value that the "
        "policy cannot give, or fewer bytes than its codes or positions need of what native caches hold; the "
        "arms hold different numbers of caches; or fewer bytes than any cache of the policy needs for the "
        "target's layers; or a distortion is less than codes of so many bits can have, or was measured at "
        "other prompts than another arm's, or at none; or rows of a bounding policy do not say how "
        "many positions were kept, or kept more than it allows",
        "Declare the policy that was in use, and measure after the run.",
        memory.memory_claim_mismatch,
    ),
    "POLICY_NO_EFFECT": Rule(
        "the bounding KV policy of an arm under test dropped no position of any row: the model's own windows "
        "are narrower, or every context fits (an arm of which sameness alone is claimed may be such a one)",
        "Give a smaller sink and window, longer prompts or more tokens; or measure native caches as such.",
        effect.policy_no_effect,
    ),
    "PARITY_TOLERANCE": Rule(
        "outputs differ from the reference's by more than the tolerance, are not finite or lead to other "
        "choices; or the tolerance is looser than the dtype's rounding (1e-3 in float32, 0.5 in float16, 1 "
        "in bfloat16); or hidden states are left out where not the target alone was compared; or a preset "
        "promises another dtype, a closer tolerance or hidden states",
        "Find the first round that differs; a wider tolerance hides it. For a preset, compare as it says.",
        parity.parity_tolerance,
    ),
    "PARITY_TOO_FEW": Rule(
        "parity is claimed over fewer than 16 rows",
        "Compare more rounds or more cases.",
        parity.parity_too_few,
    ),
    "PARITY_SELF": Rule(
        "reference and subject have one name or digest, the reference is named by a placeholder, no row was "
        "compared, or nothing differs in any round (blocks of the target alone may equal single steps)",
        "Compare with outputs that another implementation computed.",
        parity.parity_self,
    ),
    "ENVIRONMENT_INCOMPLETE": Rule(
        "machine, versions, source or weight digests are missing or placeholders, two models have one "
        "digest, Metal is said of a system that has none, or a target or drafter leaves out its vocab_size, "
        "cache_layers or largest_block",
        "Let the engine write the environment on the machine that ran. A null git.sha is complete: an "
        "installed engine has no checkout, and source_sha256 names what ran.",
        machine.environment_incomplete,
    ),
    "ENVIRONMENT_IMPOSSIBLE": Rule(
        "chip, system and device contradict each other, the models' parameters exceed the memory, or "
        "weights have a width that no quantization has",
        "Let the engine write the environment on the machine that ran.",
        machine.environment_impossible,
    ),
    "MACHINE_BUSY": Rule(
        "a speed is claimed while other processes used more than 10 % of the CPU time, or Spotlight, Time "
        "Machine or Photos more than 10 % of a core, or while that was not watched",
        "Run again when the machine is quiet; `--claim auto` claims no speed on a busy one.",
        machine.machine_busy,
    ),
    "THERMAL_OR_POWER": Rule(
        "a speed is claimed of a machine that was throttled, on battery or swapping",
        "Plug in, let it cool, close what eats memory, and run again.",
        machine.thermal_or_power,
    ),
    "CLAIM_NOT_MET": Rule(
        "a claim is malformed, names an arm that is not there, leaves out prompts that the arm it is held "
        "against ran, calls another baseline than plain decoding its original, calls ends of texts natural "
        "that other texts go on past, was not asked for by the configuration, or is not reached by the rows",
        "Claim what the rows give.",
        claims.claim_not_met,
    ),
}


def explain(code: str) -> Explanation | None:
    """The meaning and remedy of a code, or None when the gate has no such code."""
    return RULES.get(code) or ELSEWHERE.get(code)


def rules_table() -> str:
    """Every code as a Markdown table, for the docs."""
    lines = ["| code | rejected when | what to do |", "| --- | --- | --- |"]
    for code, entry in (ELSEWHERE | RULES).items():
        lines.append(f"| `{code}` | {entry.rejected_when} | {entry.remedy} |")
    return "\n".join(lines) + "\n"
