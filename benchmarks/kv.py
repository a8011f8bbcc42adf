"""KV policies side by side on the shipped pair: memory, distortion, recall, acceptance, speed beside native.

    python benchmarks/kv.py [--per-depth K] [--policies 'SPEC SPEC …'] [--seed N]

Runs ``kakeya_engine eval kv`` (all policies in turn on each prompt), has the gate judge the report, stores
the figures in ``benchmarks/results/kv.json`` and ends with one JSON line.
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-depth", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies")
    options = parser.parse_args()
    chosen = [] if options.policies is None else ["--policies", options.policies]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "kv.json"
        command = [
            *(str(BIN / "kakeya_engine"), "eval", "kv", "--report", str(report), *chosen),
            *("--per-depth", str(options.per_depth), "--seed", str(options.seed)),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        gate = subprocess.run([str(BIN / "kakeya_mac"), "gate", str(report)], capture_output=True, text=True)
    *table, line = done.stdout.splitlines()
    print("\n".join(table))
    figures = json.loads(line)
    rows = {
        "options": vars(options),
        "blas": figures["blas"],
        "policies": figures["policies"],
        "gate": "accepted" if gate.returncode == 0 else gate.stdout + gate.stderr,
    }
    path = write("kv", rows)
    print(json.dumps({**rows, "stored": str(path)}))


if __name__ == "__main__":
    main()
