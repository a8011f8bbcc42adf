"""What follows from a report's rows, by arithmetic of the tests' own, apart from the gate's and the engine's.

`settle` derives everything derivable again (digests, counters, order, hits, summary), so that a test can
change one thing and keep the rest true.
"""

from __future__ import annotations

import hashlib
import math
from statistics import median
from typing import Any

from evidence_format.figures import mean_interval

Document = dict[str, Any]


def digest(tokens: list[int]) -> str:
    return hashlib.sha256(" ".join(str(token) for token in tokens).encode()).hexdigest()


def settle(document: Document) -> Document:
    """Derive again what can be derived from the rows."""
    drafted = forwards = restored = 0
    for one in document["arms"]:
        for row in one["samples"]:
            row["tokens_sha256"] = digest(row["tokens"])
            if "needle" in row:
                answer = row["needle"]["answer"]
                row["needle"]["hit"] = bool(answer) and answer in row.get("answer_text", row["text"])
            restored += row.get("restored_positions", 0)
            drafted += len(row["rounds"])
            forwards += sum(turn["block"] >= 2 for turn in row["rounds"])
    document["liveness"] |= {"rounds": drafted, "drafter_forwards": forwards, "restored_positions": restored}
    document["order"] = interleaved(document["arms"])
    document["summary"] = summary(document)
    return document


def interleaved(arms: list[Document]) -> list[list[str]]:
    """Prompt by prompt, turning the arms' order round each time."""
    order: list[list[str]] = []
    prompts = list(dict.fromkeys(row["prompt_id"] for one in arms for row in one["samples"]))
    for i, prompt in enumerate(prompts):
        names = [one["name"] for one in arms if any(row["prompt_id"] == prompt for row in one["samples"])]
        order += [[name, prompt] for name in (names if i % 2 == 0 else reversed(names))]
    return order


def summary(document: Document) -> Document:
    """The summary, written independently of the gate's own arithmetic."""
    cut = document["configuration"].get("loops") == "cut"
    arms = {one["name"]: _arm_summary(one["samples"], cut=cut) for one in document["arms"]}
    baselines, oracles, tested = (
        [one for one in document["arms"] if one["role"] == role] for role in ("baseline", "oracle", "sut")
    )
    pairs = [(a, b) for a in tested for b in (baselines if baselines else oracles)]
    found: Document = {"arms": arms, "comparisons": [_comparison(a, b, cut=cut) for a, b in pairs]}
    if document["configuration"].get("single_graph") is True:
        for one in document["arms"]:
            arms[one["name"]]["block_s"] = _block_times(one["samples"])
    if "parity" in document:
        found["parity"] = _parity_summary(document["parity"]["rounds"])
    if "perplexity" in document:
        found["perplexity"] = _perplexity_summary(document["perplexity"]["chunks"])
    return found


def _perplexity_summary(chunks: list[Document]) -> Document:
    count = len(chunks)
    native, policy = (sum(each[name] for each in chunks) / count for name in ("native_nll", "policy_nll"))
    differences = [each["policy_nll"] - each["native_nll"] for each in chunks]
    middle, interval = sum(differences) / count, None
    if count >= 8:
        interval = list(mean_interval(differences))  # tests.evidence_format.test_figures has a table of it
    stored, values = (sum(each["kv"][of] for each in chunks if each["kv"]) for of in ("bytes", "values"))
    return {
        "chunks": count,
        "tokens": sum(each["tokens"] for each in chunks),
        "native_nll": native,
        "policy_nll": policy,
        "native_perplexity": math.exp(native),
        "policy_perplexity": math.exp(policy),
        "nll_increase": middle,
        "nll_interval": interval,
        "stored_bits_per_value": 8 * stored / values if values else None,
        "native_bytes": max(each["native_bytes"] for each in chunks),
        "policy_bytes": max(each["policy_bytes"] for each in chunks),
    }


def _block_times(rows: list[Document]) -> Document | None:
    seconds = [turn["draft_s"] + turn["verify_s"] for row in rows for turn in row["rounds"]]
    return (
        {"first": seconds[:8], "max": max(seconds), "mean": sum(seconds) / len(seconds)} if seconds else None
    )


def _parity_summary(rounds: list[Document]) -> Document:
    def worst(name: str) -> float | None:
        figures = [turn[name] for turn in rounds]
        return None if None in figures or not figures else max(figures)

    same = sum(round(turn["argmax_agreement"] * turn["rows"]) for turn in rounds)
    rows = sum(turn["rows"] for turn in rounds)
    return {
        "cases": len({turn["case"] for turn in rounds}),
        "rounds": len(rounds),
        "rows": rows,
        "hidden_max_abs": worst("hidden_max_abs"),
        "logits_max_abs": worst("logits_max_abs"),
        "argmax_agreement": same / rows if rows else None,
        "paths_equal": sum(turn["path_equal"] is True for turn in rounds),
        "paths_compared": sum(turn["path_equal"] is not None for turn in rounds),
    }


def _before_loop(row: Document, *, cut: bool) -> Document:
    """The row, or where loops are cut what it is up to the first repetition."""
    tokens = row["tokens"]
    if not cut or not _loops(tokens):
        return row
    cycle = next(each for each in range(1, 17) if tokens[-48:][each:] == tokens[-48:][:-each])
    start = len(tokens)
    while start > cycle and tokens[start - 1] == tokens[start - 1 - cycle]:
        start -= 1
    steps, rounds, spent = 0, [], 0.0
    for turn in row["rounds"]:
        if steps < start - 1:
            rounds.append(turn)
            steps += turn["accepted"] + 1
            spent += turn["draft_s"] + turn["verify_s"]
    whole = sum(turn["draft_s"] + turn["verify_s"] for turn in row["rounds"])
    steps = steps if rounds else start - 1
    share = spent / whole if rounds else steps / (len(tokens) - 1)
    return row | {"tokens": tokens[: steps + 1], "rounds": rounds, "decode_s": row["decode_s"] * share}


def _arm_summary(rows: list[Document], *, cut: bool = False) -> Document:
    timed = [_before_loop(row, cut=cut) for row in rows]
    return _whole_rows(rows) | {
        name: figure for name, figure in _whole_rows(timed).items() if name in _OF_SPEED
    }


_OF_SPEED = {"median_decoded_tokens", "decode_tokens_per_s", "end_to_end_tokens_per_s", "acceptance_length"}
_OF_SPEED |= {"verify_rounds"}


def _whole_rows(rows: list[Document]) -> Document:
    generated = decoded = verified = confirmed = 0
    decode_s = total_s = 0.0
    scored = hits = 0
    coded = [row["kv"] for row in rows if "kv" in row]
    for row in rows:
        generated += len(row["tokens"])
        decoded += len(row["tokens"]) - 1
        decode_s += row.get("decode_s") or 0
        total_s += (row.get("decode_s") or 0) + (row.get("prefill_s") or 0)
        for turn in row["rounds"]:
            if turn["block"] > 1:
                verified += 1
                confirmed += turn["accepted"] + 1
        if "needle" in row:
            scored += 1
            hits += row["needle"]["hit"]
    return {
        "samples": len(rows),
        "generated_tokens": generated,
        "decoded_tokens": decoded,
        "median_decoded_tokens": median([len(row["tokens"]) - 1 for row in rows]) if rows else 0,
        "decode_tokens_per_s": decoded / decode_s if decode_s else None,
        "end_to_end_tokens_per_s": generated / total_s if total_s else None,
        "verify_rounds": verified,
        "acceptance_length": confirmed / verified if verified else None,
        "recall": hits / scored if scored else None,
        "max_resident_bytes": max(row["cache"]["resident_bytes"] for row in rows) if rows else None,
        "stored_bits_per_value": 8 * sum(kv["bytes"] for kv in coded) / sum(kv["values"] for kv in coded)
        if coded
        else None,
        "key_distortion": _mean([kv["key_distortion"] for kv in coded]),
        "value_distortion": _mean([kv["value_distortion"] for kv in coded]),
        "runaway_samples": sum(_loops(row["tokens"]) for row in rows),
    }


def _mean(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if known else None


def _loops(tokens: list[int]) -> bool:
    """Loops as the builders make them: forty-eight tokens at the end that repeat a cycle of at most 16."""
    tail = tokens[-48:]
    return len(tail) == 48 and any(tail[cycle:] == tail[:-cycle] for cycle in range(1, 17))


def _comparison(tested: Document, plain: Document, *, cut: bool) -> Document:
    theirs = {row["prompt_id"]: row for row in plain["samples"]}
    both = [(row, theirs[row["prompt_id"]]) for row in tested["samples"] if row["prompt_id"] in theirs]
    equal = sum(a["tokens"] == b["tokens"] for a, b in both)
    both = [(_before_loop(a, cut=cut), _before_loop(b, cut=cut)) for a, b in both]
    fast, slow = _whole_rows([a for a, _ in both]), _whole_rows([b for _, b in both])
    ratios = []
    for a, b in both:
        if (
            len(a["tokens"]) > 1
            and len(b["tokens"]) > 1
            and a.get("decode_s")
            and b.get("decode_s") is not None
        ):
            mine, other = a["decode_s"] / (len(a["tokens"]) - 1), b["decode_s"] / (len(b["tokens"]) - 1)
            ratios.append(other / mine)

    def over(key: str) -> float | None:
        return fast[key] / slow[key] if fast[key] is not None and slow[key] else None

    return {
        "arm": tested["name"],
        "baseline": plain["name"],
        "decode_ratio": over("decode_tokens_per_s"),
        "median_decode_ratio": median(ratios) if ratios else None,
        "end_to_end_ratio": over("end_to_end_tokens_per_s"),
        "identical_samples": equal,
        "compared_samples": len(both),
    }
