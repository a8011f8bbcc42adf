"""The published DFlash engines on tiny targets; a program, for they are installed in a folder of their own.

Prints one JSON object: a row for each engine, target and channel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import engine  # noqa: F401 - before mlx
from engine.cache.policy import parse_policy
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.errors import ConfigurationError
from engine.external_engines.engine import DraftCounts
from engine.external_engines.loops import open_external_engine
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, LoadedTarget, load_target
from tests.engine import families, tiny
from tests.engine.external_engines.conftest import PROMPT
from tests.engine.external_engines.test_engine import looks, same
from tests.engine.identity import tokens_of

COUNT = 40
CHANNELS = ("native", "sink-window:2,6", "rotated:4,32", "lattice:e8,38@all")
FAMILIES = ("qwen3", "gemma4_text", "qwen3_5")


def pair(folder: Path, family: str) -> tuple[LoadedTarget, Path]:
    """A random target of a family, and a random drafter for it."""
    target = load_target(families.save(folder / "target", family))
    layers = target.target.layer_count
    hidden_states = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 1, layers - 1]}
    drafter = tiny.save_drafter(
        folder / "drafter", num_target_layers=layers, dflash_config=hidden_states, tie_word_embeddings=True
    )
    return target, drafter


def rows(name: str, pairing: str, target: LoadedTarget, drafter: Path) -> list[dict[str, Any]]:
    """Every channel of one engine on one pair."""
    model = target.target.model
    before = looks(model)
    row: dict[str, Any] = {"engine": name, "pair": pairing}
    try:
        external = open_external_engine(name, target, drafter)
    except ConfigurationError as error:
        return [row | {"refused": str(error), "clean": same(looks(model), before)}]
    found = []
    for channel in CHANNELS:
        policy = parse_policy(channel)
        one = row | {"channel": channel}
        try:
            counts = DraftCounts()
            steps = external.generate(PROMPT, COUNT, policy, counts=counts)
            tokens = [next(steps) for _ in range(COUNT // 2)]
            one["clean_midway"] = "_hidden_states" not in model and bool(
                policy.attended or same(looks(model), before)
            )
            tokens += list(steps)
        except ConfigurationError as error:
            found.append(one | {"refused": str(error), "clean": same(looks(model), before)})
            continue
        plain = decode(
            target.target, None, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(1), policy=policy
        )
        one |= {"strategy": external.strategy, "same": tokens == tokens_of(list(plain))}
        one |= {"rounds": counts.rounds, "accepted": counts.accepted}
        found.append(one | {"clean": same(looks(model), before)})
    return found


def main(folder: Path) -> None:
    """All of them."""
    pairs = {family: pair(folder / family, family) for family in FAMILIES}
    pairs["shipped"] = load_target(SHIPPED_TARGET), SHIPPED_DRAFTER
    found = [
        row
        for name in ("dflash", "dflash-mlx")
        for pairing, (target, drafter) in pairs.items()
        for row in rows(name, pairing, target, drafter)
    ]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
