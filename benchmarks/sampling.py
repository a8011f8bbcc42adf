"""What true rejection sampling is worth: tokens emitted per verify forward on the shipped pair.

    python benchmarks/sampling.py [--limit N] [--max-tokens N] [--seeds N] [--block N]

Three rules that all emit text distributed as the target's own:

    rejection            a draft d drawn from q is confirmed with probability min(1, p(d) / q(d))
    sample-and-compare   target and drafter each draw; a draft is confirmed where both draws are equal, else
                         the target's draw is emitted
    likeliest-draft      the drafter takes its likeliest token; confirmed with probability p(d)

The first and the last are the engine's; the second lives here alone and takes the place of the engine's rule
in the same loop. At temperature 0 all three are the same. DFlash drafter alone, a fixed block, code, chat and
retrieval prompts, several seeds; only rounds of the full block count. Each rule draws texts of its own, some
easier to draft than others; so rejection and sample-and-compare are also compared on the same rounds, by what
each can expect of the drafts given p and q. The figures do not depend on time. They are stored in
``benchmarks/records/sampling.json``; the last line is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import engine  # noqa: E402, F401 - a fast BLAS, before mlx

# isort: split
import mlx.core as mx  # noqa: E402
from results_file import write  # noqa: E402

from engine import decode as loop  # noqa: E402
from engine.draft_length import FixedDraftLength  # noqa: E402
from engine.drafters.base import Draft  # noqa: E402
from engine.drafters.block import BlockDrafter  # noqa: E402
from engine.evaluation.prompts import SHIPPED_SETS, encode, load_prompts  # noqa: E402
from engine.sampling import Sampler, Sampling  # noqa: E402
from engine.stops import Stops  # noqa: E402
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, load_drafter, load_target  # noqa: E402
from engine.target.model import Target  # noqa: E402

TEMPERATURES = (0.0, 0.6, 1.0)
RULES = ("rejection", "sample-and-compare", "likeliest-draft")


class LikeliestDrafter(BlockDrafter):
    """Takes its likeliest tokens, whoever draws."""

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:  # noqa: ARG002
        """As at temperature 0."""
        return super().propose(bonus, count, None)


def sample_and_compare(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
    """In the form of `engine.acceptance.pack_sampled`: the target draws each row, [B, V] to int32 [1 + B]."""
    tokens = sampler.draw(sampler.distribution(logits))  # [B]
    hits = (draft.tokens == tokens[:-1]).astype(mx.int32)
    return mx.concatenate([mx.cumprod(hits).sum()[None].astype(mx.int32), tokens])


class Rejection:
    """The engine's rule; notes what it and sample-and-compare can expect of each full block it judges."""

    def __init__(self, block: int) -> None:
        self._block, self._own = block, loop.pack_sampled
        self.expected: list[mx.array] = []  # [2] tokens each: by rejection, by sample-and-compare

    def __call__(self, draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
        """As `engine.acceptance.pack_sampled`."""
        if len(draft) == self._block - 1:
            chosen = draft.tokens[:, None]
            p = mx.take_along_axis(sampler.distribution(logits[:-1]), chosen, axis=-1)[:, 0]
            q = mx.take_along_axis(draft.q, chosen, axis=-1)[:, 0]
            chances = mx.stack([mx.minimum(p / q, 1), p])  # of each draft, the drafts before it confirmed
            self.expected.append(1 + mx.cumprod(chances, axis=1).sum(axis=1))
            mx.eval(self.expected[-1])
        return self._own(draft, logits, sampler)


@contextmanager
def accepting_by(rule: Callable[..., mx.array]) -> Iterator[None]:
    """Let the engine's loop accept drawn drafts by another rule for a while."""
    own = loop.pack_sampled
    loop.pack_sampled = rule
    try:
        yield
    finally:
        loop.pack_sampled = own


class Bench:
    """The shipped pair, prompts as tokens, and how much of them is decoded."""

    def __init__(self, options: argparse.Namespace) -> None:
        loaded = load_target(SHIPPED_TARGET)
        self.target: Target = loaded.target
        self.stops, self.options = loaded.stops, options
        self.drafter = load_drafter(SHIPPED_DRAFTER, self.target).drafter
        self.likeliest = LikeliestDrafter(self.drafter.network)
        self.likeliest.bind(self.target)
        self.rejection = Rejection(options.block)
        self.prompts = {
            name: [
                encode(prompt, loaded.tokenizer, self.target.vocab_size, loaded.context)
                for prompt in load_prompts(name, limit=options.limit)
            ]
            for name in SHIPPED_SETS
        }

    def emitted(self, rule: str, name: str, sampling: Sampling) -> list[int]:
        """Tokens that each verify forward of a full block emitted, over the prompts of a set."""
        drafter = self.likeliest if rule == "likeliest-draft" else self.drafter
        accept = {"sample-and-compare": sample_and_compare, "rejection": self.rejection}.get(
            rule, loop.pack_sampled
        )
        counts: list[int] = []
        with accepting_by(accept):
            for prompt in self.prompts[name]:
                steps = loop.decode(
                    self.target,
                    drafter,
                    prompt,
                    max_tokens=self.options.max_tokens,
                    stops=Stops(self.stops),
                    sampler=None if sampling.greedy else Sampler(sampling),
                    draft_length=FixedDraftLength(self.options.block),
                )
                rounds = [step for step in steps if step.round and step.round.block == self.options.block]
                counts.extend(len(step.tokens) for step in rounds)
        return counts

    def rows(self, rule: str, temperature: float) -> list[dict[str, Any]]:
        """A row for each prompt set and one for all of them."""
        seeds = range(1, self.options.seeds + 1) if temperature else (0,)
        runs = {
            name: [self.emitted(rule, name, Sampling(temperature, seed=seed)) for seed in seeds]
            for name in self.prompts
        }
        runs["all"] = [[count for name in self.prompts for count in runs[name][i]] for i in range(len(seeds))]
        return [
            {
                "temperature": temperature,
                "rule": rule if temperature else "greedy",
                "set": name,
                "acceptance_length": sum(map(sum, counts)) / sum(map(len, counts)),
                "by_seed": [sum(run) / len(run) for run in counts],
                "verify_rounds": sum(map(len, counts)),
            }
            for name, counts in runs.items()
        ]


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    return (
        f"{row['temperature']:<5} {row['rule']:<19} {row['set']:<10} {row['acceptance_length']:6.3f}   "
        f"({min(row['by_seed']):.3f} to {max(row['by_seed']):.3f} by seed, {row['verify_rounds']} rounds)"
    )


def paired(bench: Bench, temperature: float) -> dict[str, Any]:
    """Both rules on the same drafts: the rejection arm's rounds since the last call."""
    rounds = [[float(value) for value in pair.tolist()] for pair in bench.rejection.expected]
    bench.rejection.expected.clear()
    own, compared = (sum(column) / len(rounds) for column in zip(*rounds, strict=True))
    return {
        "temperature": temperature,
        "rounds": len(rounds),
        "rejection": own,
        "sample_and_compare": compared,
        "gain": own / compared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=8, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--block", type=int, default=8)
    options = parser.parse_args()
    bench, rows, pairs = Bench(options), [], []
    print("tokens emitted per verify forward of a full block")
    for temperature in TEMPERATURES:
        for rule in RULES if temperature else RULES[:1]:
            rows += bench.rows(rule, temperature)
            print(*map(line, rows[-len(bench.prompts) - 1 :]), sep="\n", flush=True)
        if temperature:
            pairs.append(pair := paired(bench, temperature))
            print(
                f"{temperature:<5} on the same {pair['rounds']} rounds: rejection {pair['rejection']:.3f}, "
                f"sample-and-compare {pair['sample_and_compare']:.3f}, gain {pair['gain']:.3f}",
                flush=True,
            )
    path = write("sampling", {"options": vars(options), "rows": rows, "paired": pairs})
    print(json.dumps({"rows": rows, "paired": pairs, "stored": str(path.relative_to(ROOT))}))


if __name__ == "__main__":
    main()
