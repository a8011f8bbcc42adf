"""Train the next-token head of `tests/data/mtp/demo` for the shipped target, on text of its own.

    python scripts/make_mtp_demo_head.py tests/data/mtp/demo [STEPS]

The texts are continuations that the target draws behind the evaluation's code prompts but the first.
"""

import json
import sys
from pathlib import Path

from engine.batch_decode import Request, decode_batch
from engine.evaluation.prompts import load_prompts
from engine.sampling import Sampler, Sampling
from engine.target.loading import SHIPPED_TARGET, LoadedTarget, load_target
from engine.training.mtp import train_head, write_head

HELD_OUT = 8  # prompts that a test measures the head on


def own_texts(target: LoadedTarget, prompts: list[list[int]], draws: int, length: int) -> list[list[int]]:
    """Each prompt with ``draws`` continuations of ``length`` tokens."""
    texts = []
    for draw in range(draws):
        requests = [
            Request(prompt, length, sampler=Sampler(Sampling(temperature=0.7, seed=1000 * draw + place)))
            for place, prompt in enumerate(prompts)
        ]
        found = [list(prompt) for prompt in prompts]
        for emitted in decode_batch(target.target, None, requests):
            for each in emitted:
                found[each.request] += each.step.tokens
        texts += found
    return texts


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 400
    target = load_target(SHIPPED_TARGET)
    config = json.loads((SHIPPED_TARGET / "config.json").read_text(encoding="utf-8"))
    prompts = [each.text for each in load_prompts("code")[HELD_OUT:]]
    tokens = [list(target.tokenizer.encode(text)) for text in prompts]
    texts = own_texts(target, tokens, draws=4, length=128)
    network, losses = train_head(target.target, config, texts, steps=steps)
    print(f"loss {losses[0]:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    write_head(network, config, folder)


if __name__ == "__main__":
    main()
