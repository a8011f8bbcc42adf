"""Complete valid reports of every kind, built from rows. Builders return plain documents."""

from __future__ import annotations

import copy
import hashlib
import json

from bridge.client.binding import MACHINE
from bridge.protocol.result import ENGINE_FACT, WEIGHTS_FACT
from evidence_format.prompt_sets import known_sets
from tests.bridge.evidence.derived import Document, digest, settle, summary

__all__ = ["Document", "digest", "settle", "summary"]

NONCE = "20260301t120000z0123456789ab"
GEMMA = "gemma-4-26b-a4b"
WORKLOAD = "ab" * 20
PLAIN_LOOP = "mlx_lm.generate.generate_step"
EMPTY = hashlib.sha256(b"").hexdigest()
QUESTION = hashlib.sha256(b"What is the secret code of {name}?").hexdigest()


SLIDING, FULL = (
    {"kind": "sliding", "values": 128, "window": 32},
    {"kind": "full", "values": 128, "window": None},
)
# What only a target says: every third layer of nine sees everything.
TARGET: Document = {"vocab_size": 1280, "cache_layers": [SLIDING, SLIDING, FULL] * 3}


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
        "load": {
            "seconds": 60,
            "other_cpu_share": 0.02,
            "services": {"spotlight": 0.5, "time_machine": 0.0, "photos": 0.0},
        },
        "versions": {"python": "3.12.4", "mlx": "0.32.4", "mlx_lm": "0.32.2", "kakeya": "0.1.0"},
        "git": {"sha": "cd" * 20, "dirty": False, "source_sha256": "ef" * 32},
        "models": {
            "target": model("demo-target", "12" * 32, 1_800_000) | TARGET,
            "drafter": model("demo-drafter", "34" * 32, 345_000) | {"largest_block": 16},
        },
    }


def runner_facts(document: Document) -> Document:
    """What the runner of such a report says of its machine, its engine and its weights."""
    environment = document["environment"]
    return {
        **{name: environment[name] for name in MACHINE},
        ENGINE_FACT: environment["git"]["source_sha256"],
        **{
            WEIGHTS_FACT + name: environment["models"][role]["weights_sha256"]
            for role, name in (("target", GEMMA), ("drafter", f"{GEMMA}-dflash"))
        },
    }


def model(name: str, weights: str, parameters: int) -> Document:
    return {
        "id": name,
        "weights_sha256": weights,
        "dtype": "float32",
        "quantization": None,
        "parameters": parameters,
        "vocab_size": None,
        "largest_block": None,
        "cache_layers": None,
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
        "source_sha256": source_of(prompt_id),
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


def source_of(prompt_id: str) -> str:
    """The digest of a shipped prompt's source, or any other for ids that no shipped prompt has."""
    known = known_sets().prompts.get(prompt_id)
    return known.source_sha256 if known else hashlib.sha256(f"source of {prompt_id}".encode()).hexdigest()


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
            "configuration": {"max_tokens": 96, "seed": 0},
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
    outputs = {f"code-{i:03d}": filler(i, 65 + i) for i in range(1, 9)}
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
    document = base("throughput", claims, arms)
    document["configuration"] |= {"prompts": "code", "limit": 8}
    return document


def recall() -> Document:
    """Ten needles found by the speculative loop and by the oracle, none without the needle."""

    def rows(*, speculative: bool, with_needle: bool) -> list[Document]:
        result = []
        for i in range(10):
            answer = str(4821 + 37 * i)
            tokens = filler(i if with_needle else 900 + i, 12)
            row = sample(f"needle-{i:03d}", tokens, speculative=speculative, seconds=0.06)
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
    document["environment"]["models"]["projector"] = model("demo-projector", "78" * 32, 12_000)
    sut, oracle, without = document["arms"]
    for row in oracle["samples"]:
        row["prompt_tokens"] = 200
        row["cache"]["resident_bytes"] = 900_000
    sut |= restoring(sut, "learned")
    extra = []
    for control in ("exact", "noise"):
        other = restoring(sut, control) | {"name": control, "role": "control", "control": control}
        for row in other["samples"] if control == "noise" else ():
            row["tokens"] = [token + 1 for token in row["tokens"]]
            row["text"] = "nothing"
        extra.append(other)
    document["arms"] = [sut, oracle, without, *extra]
    document["claims"].append({"name": "restoration", "arm": "speculative"})
    return settle(document)


def restoring(one: Document, source: str) -> Document:
    """The arm as it would be with three full layers restored behind a window of 4 + 64 positions."""
    other = copy.deepcopy(one)
    other["system"] |= {"kv": f"restored:{source}:4,64@full", "restoration": source}
    for row in other["samples"]:
        row["prompt_tokens"] = 200
        row["cache"]["classes"] = {"RestoredKV": 3, "SlidingRing": 6}
        row["restored_positions"] = 3 * (200 - 68)
    return other


def kv() -> Document:
    """Policies against native caches: codes that keep the answers, and a window that loses them."""
    document = recall()
    native, oracle, without = document["arms"]
    native |= {"name": "native", "role": "baseline"}
    coded, bounded = copy.deepcopy(native), copy.deepcopy(native)
    coded |= {"name": "affine:4,64@all", "role": "sut"}
    bounded |= {"name": "sink-window:4,64@all", "role": "sut"}
    for i, row in enumerate(coded["samples"]):
        row["decode_s"] = 0.07
        row["cache"]["classes"] = {"CodedKV": 9}
        row["cache"]["resident_bytes"] = 70_000
        row["kv"] = {"layers": list(range(9)), "values": 100_000, "bytes": 56_250}
        row["kv"] |= {"key_distortion": 0.01 + i / 1000, "value_distortion": 0.02}
    for i, row in enumerate(bounded["samples"]):
        row["decode_s"], row["tokens"], row["text"] = 0.055, filler(500 + i, 12), "nothing"
        row["cache"] |= {"classes": {"SlidingRing": 9}, "resident_bytes": 160_000}
        row["kept_positions"] = 67
        row["kv"] = {"layers": list(range(9)), "values": 7_000, "bytes": 28_000}
        row["kv"] |= {"key_distortion": 0.6, "value_distortion": 0.7}
    for one in (coded, bounded):
        one["system"]["kv"] = one["name"]
    claims: list[Document] = [
        {"name": "recall_parity", "arm": coded["name"]},
        {"name": "recall", "arm": coded["name"], "at_least": 0.9},
        {"name": "resident_bytes", "arm": coded["name"], "at_most": 80_000},
    ]
    return base("kv", claims, [oracle, native, coded, bounded, without])


def quality() -> Document:
    """The throughput report's rows, held to nothing but their sameness."""
    document = throughput()
    claims: list[Document] = [
        {"name": "identical_output", "arm": "speculative", "baseline": "plain"},
        {"name": "exact_match", "arm": "speculative", "baseline": "plain", "at_least": 0.95},
    ]
    return document | {"kind": "quality", "claims": claims}


def parity() -> Document:
    """Two cases of two rounds, one of them with paths."""
    document = base("parity", [{"name": "parity", "at_most": 1e-4}], [])
    document["parity"] = {
        "tolerance": 1e-4,
        "dtype": "float32",
        "reference": {"implementation": "torch package 0.1.0", "sha256": "9a" * 32},
        "subject": {"implementation": "kakeya engine 0.1.0 (mlx 0.32.4)", "sha256": "ef" * 32},
        "rounds": [
            {
                "case": case,
                "round": number,
                "hidden_max_abs": number * 1e-6,
                "logits_max_abs": number * 2e-6,
                "argmax_agreement": 1.0,
                "path_equal": path,
                "rows": 8,
            }
            for case, path in (("dflash", None), ("dflash2", True))
            for number in (1, 2)
        ],
    }
    return settle(document)


def perplexity() -> Document:
    """Twelve chunks; a token costs 0.02 to 0.04 nats more under the policy."""
    document = base("perplexity", [{"name": "nll_increase", "at_most": 0.05}], [])
    document["configuration"] = {"kv": "rotated:4,64@all", "quantize": None, "piece": 32}
    document["perplexity"] = {
        "text_sha256": digest([1, 2, 3]),
        "piece": 32,
        "kv": "rotated:4,64@all",
        "quantize": None,
        "chunks": [
            {
                "tokens": 511,
                "tokens_sha256": digest(filler(number, 512)),
                "native_nll": 2.5 + 0.1 * (number % 4),
                "policy_nll": 2.52 + 0.1 * (number % 4) + 0.005 * (number % 5),
                "native_bytes": 2_000_000,
                "policy_bytes": 400_000,
                "kv": {
                    "layers": [0, 1],
                    "values": 512 * 256,
                    "bytes": 512 * 256 * 9 // 16,
                    "key_distortion": None,
                    "value_distortion": None,
                },
            }
            for number in range(12)
        ],
    }
    return settle(document)


def probe() -> Document:
    return base("probe", [{"name": "machine"}], [])


def dump(document: Document) -> bytes:
    return json.dumps(document).encode()
