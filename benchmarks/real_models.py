"""`auto` on published models against mlx-lm's plain loop: every drafter on code, and look-ups on edits.

    HOME=~/.cache/kakeya-mac/real python benchmarks/real_models.py [--model NAME]

The models are those of ``make real``. Runs ``kakeya_engine eval throughput`` for each model and drafter, arms
interleaved prompt by prompt; a report that the gate accepts is stored as
``benchmarks/results/real-<model>-<drafter>-<set>.json``. Ends with one JSON line, and with exit code 1 where
`auto` decodes at less than 0.95 times plain speed or takes 5 % longer to the first token.
"""

from __future__ import annotations

import argparse
import json
import sys

from results_file import evaluate

MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}
LEAST, LONGEST = 0.95, 1.05  # of plain decoding speed, and of plain seconds to the first token
DRAFTERS = {"lookup": "prompt-lookup", "4bit": "{}-4bit", "lookup-4bit": "prompt-lookup+{}-4bit"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    chosen = parser.parse_args().model
    decoding, first_token = {}, {}
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
                report = json.loads(path.read_text(encoding="utf-8"))
                [pair] = report["summary"]["comparisons"]
                seconds = {
                    arm["name"]: sum(each["prefill_s"] for each in arm["samples"]) for arm in report["arms"]
                }
                decoding[path.stem] = round(pair["decode_ratio"], 3)
                first_token[path.stem] = round(seconds[pair["arm"]] / seconds[pair["baseline"]], 3)
    print(json.dumps({"decode_ratios": decoding, "first_token_ratios": first_token}))
    sys.exit(min(decoding.values()) < LEAST or max(first_token.values()) > LONGEST)


if __name__ == "__main__":
    main()
