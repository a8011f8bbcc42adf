"""KV policies on published models with heads of 64 and of 256 values: what they cost, and what they hold.

    python benchmarks/kv_real.py [--models NAME…] [--limit N] [--chunk N]

The models are those of `make real`, in the folder KAKEYA_REAL [default: ~/.cache/kakeya-mac/real]. For each
of them ``eval perplexity`` runs under every policy and ``eval acceptance`` under two: speed and bytes, the
model packed in 4 bits drafting for itself under codes, too. A report that the gate accepts is stored as
``benchmarks/results/…-MODEL….json``; a rejected one ends the run. What drafters hold, which no report says,
goes to ``benchmarks/records/kv-MODEL.json``. `make docs` then writes the tables of docs/kv.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from pathlib import Path

from results_file import BIN, evaluate, write

MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
# Policy -> the increase that is claimed of it at most, nats a token, at the upper end of its interval.
POLICIES = {
    "affine:4,64": 4.0,
    "rotated:4,64": 2.0,
    "lattice-packed:e8,4@all": 2.0,
    "rotated:8/4,64": 1.0,
    "rotated:4,64@inner:2": 1.0,
    "auto:4": 1.0,
    "lattice:e8,38": 0.1,
}
FAST = ("rotated:4,64", "auto:4")  # attention reads their codes
MOST_BYTES = 3_000_000  # that the target's caches hold under the first, as is claimed
DRAFTERS_OWN = ("native", "rotated:4,64")
PROMPT = "def is_sorted(numbers: list[int]) -> bool:\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--limit", type=int, default=12, help="chunks; the claims need 8")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one")
    options = parser.parse_args()
    folder = Path(os.environ.get("KAKEYA_REAL", Path.home() / ".cache/kakeya-mac/real")) / "kakeya-models"
    for name in options.models:
        perplexities(name, folder / name, options.chunk, options.limit)
        speeds(name, folder / name)


def perplexities(name: str, model: Path, chunk: int, limit: int) -> None:
    """What each policy adds to the loss."""
    for policy, most in POLICIES.items():
        evaluate(
            f"perplexity-{name}-{re.sub('[^a-z0-9]+', '-', policy)}",
            *("perplexity", "--model", str(model), "--kv", policy, "--max-increase", str(most)),
            *("--chunk", str(chunk), "--piece", str(chunk // 2), "--limit", str(limit)),
        )


def speeds(name: str, model: Path) -> None:
    """Speed and bytes under `FAST`, and what the drafter holds under `DRAFTERS_OWN`."""
    drafting = ("--model", str(model), "--drafter", f"{model}-4bit", "--block", "4")
    evaluate(
        f"kv-{name}",
        *("acceptance", *drafting, "--drafter-kv", DRAFTERS_OWN[-1], "--policies", " ".join(FAST)),
        *("--claim-bytes", f"{FAST[0]}={MOST_BYTES}"),
        *("--speed-prompts", "code", "--speed-limit", "2", "--max-tokens", "32"),
    )
    held = {own: _held((*drafting, "--drafter-kv", own)) for own in DRAFTERS_OWN}
    stored = write(f"kv-{name}", {"model": name, "kv": FAST[0], "drafter_kv": held})
    print(json.dumps({"stored": str(stored)}))


def _held(arguments: tuple[str, ...]) -> dict[str, int]:
    """Bytes that a run of 64 tokens held in the end, the target under the first of `FAST`."""
    command = [
        str(BIN / "kakeya_engine"),
        "generate",
        *arguments,
        "--kv",
        FAST[0],
        "--max-tokens",
        "64",
        "--json",
    ]
    done = subprocess.run([*command, PROMPT], check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    return {key: figures[key] for key in ("prompt_tokens", "resident_bytes", "drafter_resident_bytes")}


if __name__ == "__main__":
    main()
