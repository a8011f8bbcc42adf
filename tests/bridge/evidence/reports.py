"""Complete valid reports, built from rows; the summary comes from arithmetic of the tests' own.

Builders return plain documents. `settle` derives everything derivable again (digests, rounds, order, hits,
summary), so that a test can change one thing and keep the rest true.
"""

from __future__ import annotations

import copy
import hashlib
import json
from statistics import median
from typing import Any

Document = dict[str, Any]

NONCE = "20260301t120000z0123456789ab"
WORKLOAD = "ab" * 20
PLAIN_LOOP = "mlx_lm.generate.generate_step"
EMPTY = hashlib.sha256(b"").hexdigest()
QUESTION = hashlib.sha256(b"What is the secret code of {name}?").hexdigest()


def digest(tokens: list[int]) -> str:
    return hashlib.sha256(" ".join(str(token) for token in tokens).encode()).hexdigest()


def filler(seed: int, count: int) -> list[int]:
    """Tokens without repetition."""
    return [(seed * 131 + 7 * i * i + 13 * i) % 1279 for i in range(count)]


def environment() -> Document:
    return {
        "machine": "arm64",
        "system": "Darwin",
        "os_release": "25.1.0",
        "chip": "Apple M4",
        "cpu_count": 10,
        "memory_bytes": 24 * 2**30,
        "metal": True,
        "device": "gpu",
        "blas": "accelerate",
        "power_source": "ac",
        "thermal_state": "nominal",
        "swapping": False,
        "versions": {"python": "3.12.4", "mlx": "0.32.4", "mlx_lm": "0.32.2", "kakeya": "0.1.0"},
        "git": {"sha": "cd" * 20, "dirty": False, "source_sha256": "ef" * 32},
        "models": {
            "target": {
                "id": "demo-target",
                "weights_sha256": "12" * 32,
                "dtype": "float32",
                "quantization": None,
                "parameters": 1_800_000,
            },
            "drafter": {
                "id": "demo-drafter",
                "weights_sha256": "34" * 32,
                "dtype": "float32",
                "quantization": None,
                "parameters": 345_000,
            },
        },
    }


def plain_system() -> Document:
    return {"loop": PLAIN_LOOP, "drafter": None, "block": None, "kv": "native", "restoration": None}


def speculative_system() -> Document:
    return {
        "loop": "kakeya.decode",
        "drafter": "dflash",
        "block": "auto",
        "kv": "native",
        "restoration": None,
    }


def sample(prompt_id: str, tokens: list[int], *, speculative: bool, seconds: float) -> Document:
    return {
        "prompt_id": prompt_id,
        "prompt_sha256": hashlib.sha256(prompt_id.encode()).hexdigest(),
        "instruction_sha256": EMPTY,
        "prompt_tokens": 60,
        "prefill_s": 0.0101 if speculative else 0.0100,
        "decode_s": seconds,
        "tokens": tokens,
        "tokens_sha256": digest(tokens),
        "text": " ".join(f"w{token}" for token in tokens),
        "finish_reason": "length",
        "path": "speculative:dflash" if speculative else "plain:mlx_lm.generate_step",
        "rounds": rounds_for(len(tokens) - 1, seconds) if speculative else [],
        "cache": {
            "classes": {"KVCache": 3, "SlidingRing" if speculative else "RotatingKVCache": 6},
            "resident_bytes": 400_000 + len(tokens),
            "measured": True,
        },
    }


def rounds_for(decoded: int, seconds: float, *, block: int = 8, accepted: int = 3) -> list[Document]:
    """Rounds that emit exactly `decoded` tokens, the last perhaps cut."""
    count = -(-decoded // (accepted + 1))
    share = round(0.9 * seconds / max(count, 1), 7)
    half = round(share / 2, 7)
    return [{"block": block, "accepted": accepted, "draft_s": half, "verify_s": half} for _ in range(count)]


def arm(
    name: str, role: str, system: Document, samples: list[Document], control: str | None = None
) -> Document:
    document = {"name": name, "role": role, "system": system, "timing_scope": "decode", "samples": samples}
    return document if control is None else document | {"control": control}


def base(kind: str, claims: list[Document], arms: list[Document]) -> Document:
    return settle(
        {
            "schema": "kakeya.evidence/1",
            "kind": kind,
            "request": {
                "nonce": NONCE,
                "workload_sha": WORKLOAD,
                "preset_digest": "56" * 32,
                "engine_source": "installed",
            },
            "started_at": "2026-03-01T12:00:05Z",
            "finished_at": "2026-03-01T12:01:05.25Z",
            "claims": claims,
            "environment": environment(),
            "configuration": {"max_tokens": 96, "temperature": 0, "prompts": "code"},
            "arms": arms,
            "order": [],
            "liveness": {"rounds": 0, "drafter_forwards": 0, "restored_positions": 0, "fallbacks": []},
            "rounding": {"max_abs_logit_error": 2e-4, "positions": 128} if arms else None,
            "divergences": [],
            "restarts": [],
            "summary": {},
        }
    )


def throughput() -> Document:
    """Eight prompts, twice as fast, identical."""
    outputs = {f"code-{i:03d}": filler(i, 65 + i) for i in range(8)}
    plain = [
        sample(prompt, tokens, speculative=False, seconds=round(0.005 * len(tokens), 7))
        for prompt, tokens in outputs.items()
    ]
    fast = [
        sample(prompt, list(tokens), speculative=True, seconds=round(0.0025 * len(tokens), 7))
        for prompt, tokens in outputs.items()
    ]
    claims: list[Document] = [
        {"name": "identical_output", "arm": "speculative", "baseline": "plain"},
        {"name": "speedup", "arm": "speculative", "baseline": "plain", "at_least": 1.5},
        {"name": "acceptance_length", "arm": "speculative", "at_least": 3.5},
        {"name": "resident_bytes", "arm": "speculative", "at_most": 500_000},
    ]
    arms = [
        arm("plain", "baseline", plain_system(), plain),
        arm("speculative", "sut", speculative_system(), fast),
    ]
    return base("throughput", claims, arms)


def recall() -> Document:
    """Ten needles found by the speculative loop and by the oracle, none without the needle."""

    def rows(*, speculative: bool, with_needle: bool) -> list[Document]:
        result = []
        for i in range(10):
            answer = str(4821 + 37 * i)
            tokens = filler(i if with_needle else 900 + i, 12)
            row = sample(f"retrieval-{i:03d}", tokens, speculative=speculative, seconds=0.06)
            row["instruction_sha256"] = QUESTION
            row["text"] = f"{answer}." if with_needle else "I do not know."
            row["needle"] = {
                "needle": f"The secret code of N{i} is {answer}.",
                "answer": answer,
                "depth": i / 10,
                "prompt_contains_answer_outside_needle": False,
                "prompt_contains_needle": with_needle,
                "hit": with_needle,
            }
            if not with_needle:
                row["prompt_sha256"] = hashlib.sha256(f"without-{i}".encode()).hexdigest()
            result.append(row)
        return result

    arms = [
        arm("speculative", "sut", speculative_system(), rows(speculative=True, with_needle=True)),
        arm("oracle", "oracle", plain_system(), rows(speculative=False, with_needle=True)),
        arm(
            "no_needle",
            "control",
            speculative_system(),
            rows(speculative=True, with_needle=False),
            control="no_needle",
        ),
    ]
    claims: list[Document] = [
        {"name": "recall_parity", "arm": "speculative"},
        {"name": "recall", "arm": "speculative", "at_least": 0.9},
    ]
    return base("recall", claims, arms)


def restoration() -> Document:
    """The recall report with a restoring arm under test, and its exact and noise controls."""
    document = recall()
    sut, oracle, without = document["arms"]
    sut["system"]["restoration"] = "learned"
    extra = []
    for control in ("exact", "noise"):
        other = copy.deepcopy(sut)
        other |= {"name": control, "role": "control", "control": control}
        other["system"]["restoration"] = control
        for row in other["samples"]:
            if control == "noise":
                row["tokens"] = [token + 1 for token in row["tokens"]]
                row["text"] = "nothing"
        extra.append(other)
    document["arms"] = [sut, oracle, without, *extra]
    document["claims"].append({"name": "restoration", "arm": "speculative"})
    document["liveness"]["restored_positions"] = 512
    return settle(document)


def probe() -> Document:
    return base("probe", [{"name": "machine"}], [])


def settle(document: Document) -> Document:
    """Derive again what can be derived from the rows."""
    drafted = forwards = 0
    for one in document["arms"]:
        for row in one["samples"]:
            row["tokens_sha256"] = digest(row["tokens"])
            if "needle" in row:
                row["needle"]["hit"] = (
                    bool(row["needle"]["answer"]) and row["needle"]["answer"] in row["text"]
                )
            drafted += len(row["rounds"])
            forwards += sum(turn["block"] >= 2 for turn in row["rounds"])
    document["liveness"] |= {"rounds": drafted, "drafter_forwards": forwards}
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
    arms = {one["name"]: _arm_summary(one["samples"]) for one in document["arms"]}
    baselines = [one for one in document["arms"] if one["role"] == "baseline"]
    tested = [one for one in document["arms"] if one["role"] == "sut"]
    return {"arms": arms, "comparisons": [_comparison(a, b) for a in tested for b in baselines]}


def _arm_summary(rows: list[Document]) -> Document:
    generated = decoded = verified = confirmed = 0
    decode_s = total_s = 0.0
    scored = hits = 0
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
    }


def _comparison(tested: Document, plain: Document) -> Document:
    theirs = {row["prompt_id"]: row for row in plain["samples"]}
    both = [(row, theirs[row["prompt_id"]]) for row in tested["samples"] if row["prompt_id"] in theirs]
    fast, slow = _arm_summary([a for a, _ in both]), _arm_summary([b for _, b in both])
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
        "identical_samples": sum(a["tokens"] == b["tokens"] for a, b in both),
        "compared_samples": len(both),
    }


def dump(document: Document) -> bytes:
    return json.dumps(document).encode()
