"""`auto` on published models against mlx-lm's plain loop: every drafter on code, and look-ups on edits.

    HOME=~/.cache/kakeya-mac/real python benchmarks/real_models.py [--model NAME]

The models are those of ``make real``. Runs ``kakeya_engine eval throughput`` for each model and drafter, arms
interleaved prompt by prompt; a report that the gate accepts is stored as
``benchmarks/results/real-<model>-<drafter>-<set>.json``. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json

from results_file import evaluate

MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}
DRAFTERS = {"lookup": "prompt-lookup", "4bit": "{}-4bit", "lookup-4bit": "prompt-lookup+{}-4bit"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    chosen = parser.parse_args().model
    ratios = {}
    for short, model in MODELS.items():
        if chosen not in (None, short):
            continue
        for name, drafter in DRAFTERS.items():
            runs = [("code", ("--claim", "no-slowdown"))]
            if drafter == "prompt-lookup":
                runs.append(("edits", ("--claim", "speedup", "--min-speedup", "2")))
            for prompts, claim in runs:
                path = evaluate(
                    f"real-{short}-{name}-{prompts}",
                    *("throughput", "--model", model, "--drafter", drafter.format(model)),
                    *("--prompts", prompts, "--limit", "8", "--max-tokens", "96", *claim),
                )
                [pair] = json.loads(path.read_text(encoding="utf-8"))["summary"]["comparisons"]
                ratios[path.stem] = round(pair["decode_ratio"], 3)
    print(json.dumps({"decode_ratios": ratios}))


if __name__ == "__main__":
    main()
