"""The engine against mlx-lm's own loop on the shipped pair, per prompt set.

    python benchmarks/throughput.py [--limit N] [--max-tokens N] [--block auto|N]

Runs ``kakeya_engine eval throughput`` (arms interleaved prompt by prompt), has the gate judge each report,
stores the figures in ``benchmarks/results/throughput.json`` and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from results_file import write

BIN = Path(sys.executable).parent
SETS = ("code", "chat", "retrieval")


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """One prompt set: summary figures of its report, and the gate's verdict."""
    report = folder / f"{name}.json"
    command = [
        *(str(BIN / "kakeya_engine"), "eval", "throughput", "--prompts", name, "--report", str(report)),
        *("--limit", str(options.limit), "--max-tokens", str(options.max_tokens), "--block", options.block),
        *("--claim", "none"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    gate = subprocess.run([str(BIN / "kakeya_mac"), "gate", str(report)], capture_output=True, text=True)
    document = json.loads(report.read_text(encoding="utf-8"))
    arms, comparison = document["summary"]["arms"], document["summary"]["comparisons"][0]
    return {
        "set": name,
        "samples": comparison["compared_samples"],
        "identical": comparison["identical_samples"],
        "plain_tokens_per_s": arms[comparison["baseline"]]["decode_tokens_per_s"],
        "speculative_tokens_per_s": arms[comparison["arm"]]["decode_tokens_per_s"],
        "decode_ratio": comparison["decode_ratio"],
        "end_to_end_ratio": comparison["end_to_end_ratio"],
        "acceptance_length": arms[comparison["arm"]]["acceptance_length"],
        "gate": "accepted" if gate.returncode == 0 else gate.stdout + gate.stderr,
        "blas": document["environment"]["blas"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--block", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name in SETS:
            row = measure(name, options, Path(folder))
            rows.append(row)
            print(
                f"{name:<10} plain {row['plain_tokens_per_s']:7.1f} tok/s  speculative "
                f"{row['speculative_tokens_per_s']:7.1f} tok/s  ratio {row['decode_ratio']:.2f}  "
                f"acceptance {row['acceptance_length'] or 0:.2f}  "
                f"identical {row['identical']}/{row['samples']}"
            )
    path = write("throughput", {"options": vars(options), "rows": rows})
    print(json.dumps({"rows": rows, "stored": str(path)}))


if __name__ == "__main__":
    main()
