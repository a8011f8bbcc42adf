"""Reports whose outputs differ, run away or come from other prompts."""

from __future__ import annotations

from tests.bridge.evidence import reports
from tests.bridge.evidence.breakers import Breaker, Rules, both, chain, change, claims, env, put, rows
from tests.bridge.evidence.reports import Document, filler, settle


def different_prompts(document: Document) -> None:
    rows(document, "speculative")[1]["prompt_sha256"] = "78" * 32


def mixed_set(document: Document) -> None:
    for arm in ("speculative", "oracle"):
        rows(document, arm)[0]["instruction_sha256"] = reports.EMPTY
    rows(document, "no_needle")[0]["instruction_sha256"] = reports.EMPTY


def diverge(document: Document, plain_gap: float) -> None:
    row = rows(document, "speculative")[2]
    row["tokens"][40] += 1
    row["text"] += "!"
    entry = {"arm": "speculative", "prompt_id": row["prompt_id"], "position": 40, "plain_gap": plain_gap}
    entry |= {"speculative_token": row["tokens"][40], "plain_token": row["tokens"][40] - 1}
    document["divergences"] = [entry]
    settle(document)


def unlisted_divergence(document: Document) -> None:
    diverge(document, 1e-5)
    document["divergences"] = []


def misplaced_divergence(document: Document) -> None:
    diverge(document, 1e-5)
    document["divergences"][0]["position"] = 39


def unmeasured_rounding(document: Document) -> None:
    claims(document, "speedup")
    diverge(document, 1e-5)
    document["rounding"] = None


def invented_divergence(document: Document) -> None:
    diverge(document, 1e-5)
    row = rows(document, "speculative")[2]
    row["tokens"][40] -= 1
    row["text"] = row["text"].rstrip("!")
    settle(document)


def longer_output(document: Document) -> None:
    put(document, rows(document, "speculative")[0], filler(0, 67), 0.17)
    settle(document)


def prompt_contaminated(document: Document) -> None:
    for row in both(document):
        row["instruction_sha256"] = reports.QUESTION


def output_diverged(document: Document) -> None:
    diverge(document, plain_gap=0.5)


def rounding_implausible(document: Document) -> None:
    document["rounding"]["max_abs_logit_error"] = 3.5


def output_degenerate(document: Document) -> None:
    for row in (rows(document, "plain")[0], rows(document, "speculative")[0]):
        put(document, row, filler(3, 16) + [5, 6, 7, 8] * 12, row["decode_s"])
    settle(document)


def cut_loops(how: str) -> Breaker:
    return change("configuration", "loops", to=how)


def excused_tie(document: Document) -> None:
    diverge(document, plain_gap=1e-4)


def loops(*arms: str) -> Breaker:
    """Give the first rows of the arms the same text without an end."""

    def apply(document: Document) -> None:
        for arm in arms:
            row = rows(document, arm)[0]
            put(document, row, filler(5, 16) + [3] * 60, row["decode_s"])
            row["text"] += row["needle"]["answer"]
        settle(document)

    return apply


def an_unclaimed_policy_that_loops(document: Document) -> None:
    loops("sink-window:4,64@all")(document)
    rows(document, "no_needle")[0]["finish_reason"] = "stop"


def another_needle(document: Document) -> None:
    """A control that listens for something else."""
    for row in rows(document, "no_needle"):
        row["needle"] |= {"answer": "9999", "needle": "The secret code is 9999."}


def one_prompt_twice(*names: str) -> Breaker:
    """The second prompt is the first, in every arm that may be asked the same."""

    def apply(document: Document) -> None:
        claims(document, *names)
        for arm in document["arms"]:
            if arm["role"] != "control":
                first, second = arm["samples"][:2]
                second["prompt_sha256"] = first["prompt_sha256"]

    return apply


RULES = Rules(
    alone={
        "PROMPT_CONTAMINATED": ("throughput", prompt_contaminated),
        "OUTPUT_DIVERGED": ("throughput", output_diverged),
        "ROUNDING_IMPLAUSIBLE": ("throughput", rounding_implausible),
        "OUTPUT_DEGENERATE": ("throughput", output_degenerate),
    },
    variants=[
        ("PROMPT_CONTAMINATED", "recall", another_needle),
        ("PROMPT_CONTAMINATED", "recall", change("arms", 0, "samples", 0, "prompt_tokens", to=61)),
        ("PROMPT_CONTAMINATED", "throughput", different_prompts),
        ("PROMPT_CONTAMINATED", "quality", one_prompt_twice("identical_output")),
        ("PROMPT_CONTAMINATED", "quality", one_prompt_twice("exact_match")),
        ("PROMPT_CONTAMINATED", "throughput", one_prompt_twice("speedup")),
        ("PROMPT_CONTAMINATED", "throughput", one_prompt_twice()),
        ("PROMPT_CONTAMINATED", "recall", one_prompt_twice("recall")),
        ("PROMPT_CONTAMINATED", "recall", one_prompt_twice("recall_parity")),
        ("PROMPT_CONTAMINATED", "recall", mixed_set),
        ("OUTPUT_DIVERGED", "throughput", unlisted_divergence),
        ("OUTPUT_DIVERGED", "throughput", misplaced_divergence),
        ("OUTPUT_DIVERGED", "throughput", unmeasured_rounding),
        ("OUTPUT_DIVERGED", "throughput", invented_divergence),
        ("OUTPUT_DIVERGED", "throughput", longer_output),
        ("ROUNDING_IMPLAUSIBLE", "throughput", env("models", "target", "dtype", to="int3")),
        ("OUTPUT_DEGENERATE", "throughput", chain(cut_loops("keep"), output_degenerate)),
        (
            "SUMMARY_MISMATCH",
            "throughput",
            chain(output_degenerate, change("configuration", "loops", to="cut")),
        ),
        ("OUTPUT_DEGENERATE", "kv", loops("affine:4,64@all", "native")),
        ("OUTPUT_DEGENERATE", "kv", loops("oracle")),
    ],
    honest=[
        ("quality", output_degenerate),
        ("throughput", chain(cut_loops("cut"), output_degenerate)),
        ("throughput", excused_tie),
        ("kv", an_unclaimed_policy_that_loops),
    ],
)
