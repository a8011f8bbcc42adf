"""Our engine against mlx-lm, z-lab's dflash, dflash-mlx and mlx-vlm: same weights, one process, in turns.

    .venv-peers/bin/python benchmarks/peers.py [--size tiny|mid|demo] [--block 8,16,auto]
        [--mode plain,oracle,noisy] [--tokens 256] [--against COMMIT] [--json]

plain: the drafter as it is (of the random weights of tiny and mid nothing is ever accepted); oracle: its
tokens replaced by the true continuation, its cost still paid; noisy: every fifth token wrong. Every arm's
tokens are compared with mlx-lm's plain decoding, its speed is a ratio to that. Prints a table, stores
``benchmarks/unjudged/peers-<size>.json``, a section a mode, and with --json ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peerbench  # noqa: F401 - before anything imports mlx or the package `engine`
import results_file
from peerbench.engines.base import AUTO, MissingEngineError
from peerbench.engines.registry import BASELINE, ENGINES, require
from peerbench.summary import summarise, table

DEFAULT_BLOCKS = {"tiny": "8,16,auto", "mid": "8,16,auto", "demo": "4,8,16,auto"}
DEFAULT_TOKENS = {"tiny": 256, "mid": 256, "demo": 128}
REPETITIONS = {"tiny": 7, "mid": 3, "demo": 2}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=tuple(DEFAULT_BLOCKS), default="tiny")
    parser.add_argument(
        "--block",
        help="block lengths, the bonus token included, and auto, by commas "
        "(default 8,16,auto; demo 4,8,16,auto)",
    )
    parser.add_argument("--mode", default="plain", help="plain, oracle, noisy, by commas (default plain)")
    parser.add_argument("--tokens", type=int, help="new tokens a prompt (256; demo 128)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which to run, by commas (default all)")
    parser.add_argument("--repetitions", type=int, help="turns of all arms (tiny 7, mid 3, demo 2)")
    parser.add_argument("--against", metavar="COMMIT", help="measure this engine as it was there too")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    chosen = parser.parse_args(arguments)
    chosen.blocks = [
        _block(parser, text) for text in (chosen.block or DEFAULT_BLOCKS[chosen.size]).split(",")
    ]
    chosen.modes = chosen.mode.split(",")
    if unknown := [mode for mode in chosen.modes if mode not in ("plain", "oracle", "noisy")]:
        parser.error(f"--mode {unknown[0]!r} is not one of plain, oracle, noisy")
    chosen.tokens = DEFAULT_TOKENS[chosen.size] if chosen.tokens is None else chosen.tokens
    chosen.repetitions = REPETITIONS[chosen.size] if chosen.repetitions is None else chosen.repetitions
    if chosen.tokens < 2 or chosen.repetitions < 1:
        parser.error("--tokens must be at least 2 and --repetitions at least 1")
    chosen.names = chosen.engines.split(",")
    return chosen


def is_whole(chosen: argparse.Namespace) -> bool:
    """Whether nothing that is measured by default is left out."""
    return (
        set(ENGINES) <= set(chosen.names)
        and {str(block) for block in chosen.blocks} >= set(DEFAULT_BLOCKS[chosen.size].split(","))
        and chosen.tokens >= DEFAULT_TOKENS[chosen.size]
        and not chosen.against
    )


def _block(parser: argparse.ArgumentParser, text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 2:
        parser.error(f"--block {text!r} is neither auto nor a length of at least 2")
    return int(text)


def run(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the models below ``folder``, measure all modes, and return the document's sections by mode."""
    from peerbench.engines.base import World
    from peerbench.engines.earlier import unpack
    from peerbench.engines.lm import plain
    from peerbench.engines.registry import EARLIER, open_engines
    from peerbench.measure import Case, Setting, measure
    from peerbench.script import script_for
    from peerbench.sizes import make_folders, prompts_of

    from engine.cli.progress import shown_progress
    from engine.device import fit_threads, prepare
    from engine.target.loading import load_target

    if chosen.against:
        unpack(chosen.against, Path(tempfile.mkdtemp(dir=folder)))
    runtime = prepare()
    folders = make_folders(chosen.size, folder)
    world = World(folders, load_target(folders.target))
    fit_threads(world.target.target.hidden_size)
    names = [*chosen.names, *(EARLIER if chosen.against else ())]
    engines, left_out = open_engines(names, world)
    prompts, baseline = prompts_of(chosen.size, world.target), plain(world)
    truths = []
    for prompt in prompts:
        batches = baseline.run(prompt.tokens, chosen.tokens, None)
        truths.append([token for batch in batches for token in batch.tokens])
    sections = {}
    for mode in chosen.modes:
        cases = []
        for prompt, truth in zip(prompts, truths, strict=True):
            script = script_for(mode, truth, len(prompt.tokens), world.target.target.vocab_size)
            cases.append(Case(prompt.part, prompt.tokens, truth, script))
        reference = Setting(BASELINE, 1, mode)
        arms = {reference: baseline}
        for block in chosen.blocks:
            arms |= {Setting(name, block, mode): one.arm(block) for name, one in engines.items()}
        with shown_progress() as progress:
            samples = measure(arms, cases, chosen.tokens, chosen.repetitions, progress)
        parts = dict.fromkeys(prompt.part for prompt in prompts)
        by_part = {part: [sample for sample in samples if sample.part == part] for part in parts}
        sections[mode] = {
            "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "machine": results_file.machine() | {"device": runtime.device, "blas": runtime.blas.name},
            "tokens": chosen.tokens,
            "repetitions": chosen.repetitions,
            "prompts": len(prompts),
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "left_out": left_out,
            "rows": summarise(samples, chosen.size, reference),
            "parts": {
                part: summarise(some, chosen.size, reference)
                for part, some in by_part.items()
                if len(parts) > 1
            },
        }
    return sections


def store(size: str, sections: dict[str, Any], *, whole: bool) -> Path:
    """Write the sections, keeping those of modes that were measured at another time.

    A run of fewer engines, blocks or tokens than by default goes to a file of its own, and never
    takes the place of a whole one.
    """
    name = f"peers-{size}" if whole else f"peers-{size}-part"
    file = results_file.UNJUDGED / f"{name}.json"
    kept = json.loads(file.read_text(encoding="utf-8"))["modes"] if file.exists() else {}
    return results_file.write(name, {"size": size, "modes": kept | sections}, results_file.UNJUDGED)


def show(sections: dict[str, Any]) -> None:
    """Print the tables: all prompts together, then the parts of a mixed set."""
    for section in sections.values():
        print(table(section["rows"]))
        for name, reason in section["left_out"].items():
            print(f"left out: {name}: {reason}")
        for part, rows in section["parts"].items():
            print(f"\n{part} alone")
            print(table(rows))
        print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, store; 1 where an engine is missing or our tokens differ from plain decoding's."""
    chosen = options(arguments)
    try:
        require(chosen.names)
        with tempfile.TemporaryDirectory() as folder:
            sections = run(chosen, Path(folder))
    except MissingEngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(sections)
    path = store(chosen.size, sections, whole=is_whole(chosen))
    print(f"stored in {path}")
    rows = [row for section in sections.values() for row in section["rows"]]
    if chosen.json:
        left_out = {name: why for section in sections.values() for name, why in section["left_out"].items()}
        print(json.dumps({"rows": rows, "left_out": left_out, "stored": str(path)}))
    return 0 if all(row["identical"] for row in rows if row["engine"] == "kakeya") else 1


if __name__ == "__main__":
    sys.exit(main())
