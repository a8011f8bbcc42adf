"""What the client costs: ``--help``, and a submit in a clone of 10 files against one of 50,000.

    python benchmarks/client.py [--rounds N] [--files N]

The two clones take turns, so the ratio holds when the machine's speed drifts. Prints for people, stores
``benchmarks/records/client.json``, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results_file import write

KAKEYA = Path(sys.executable).with_name("kakeya_mac")


def git(folder: Path, *args: str, text: str | None = None) -> str:
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *args], input=text, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def make_clone(root: Path, name: str, files: int) -> Path:
    """A clone with `files` committed files, its bare remote beside it."""
    remote, clone = root / f"{name}.git", root / name
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(remote)], check=True)
    subprocess.run(["git", "clone", "-q", str(remote), str(clone)], check=True, stderr=subprocess.DEVNULL)
    lines = [
        "commit refs/heads/main",
        "committer bench <bench@example.org> 1700000000 +0000",
        "data 4",
        "many",
    ]
    for number in range(files):
        text = f"file {number}\n"
        lines += [f"M 100644 inline src/{number // 100:04d}/{number:05d}.txt", f"data {len(text)}", text]
    git(clone, "fast-import", "--quiet", text="\n".join(lines) + "\n")
    git(clone, "checkout", "-q", "-B", "main", "main")
    git(clone, "push", "-q", "origin", "main")
    return clone


def seconds(command: list[str], folder: Path, env: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--files", type=int, default=50_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        env = {**os.environ, "KAKEYA_STATE": str(root / "state"), "KAKEYA_CONFIG": str(root / "config")}
        small, large = make_clone(root, "small", 10), make_clone(root, "large", options.files)
        submit = [str(KAKEYA), "run", "--preset", "probe", "--json"]
        rows = []
        for number in range(options.rounds + 1):
            row = {
                "help_s": seconds([str(KAKEYA), "--help"], small, env),
                "submit_small_s": seconds(submit, small, env),
                "submit_large_s": seconds(submit, large, env),
            }
            print(f"round {number}/{options.rounds}: " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
            if number:  # round 0 warms the caches
                rows.append(row)
    medians = {f"median_{key}": statistics.median(row[key] for row in rows) for key in rows[0]}
    ratio = statistics.median(row["submit_large_s"] / row["submit_small_s"] for row in rows)
    figures = {"files": options.files, "rows": rows, **medians, "median_large_to_small": ratio}
    path = write("client", figures)
    print(
        f"--help {medians['median_help_s']:.3f} s; "
        f"a submit in {options.files} files takes {ratio:.2f} times one in 10"
    )
    print(json.dumps({**medians, "median_large_to_small": ratio, "stored": str(path)}))


if __name__ == "__main__":
    main()
