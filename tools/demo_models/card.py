"""The model card of the demo pair, written from the figures of `evaluate`."""

from __future__ import annotations

from typing import Any

from engine.haystack_text import HELD_OUT
from tools.demo_models.corpora.chat import TOPICS
from tools.demo_models.corpora.code import HELD_OUT_TEMPLATES, TRAINING_TEMPLATES

_HEAD = """\
---
license: apache-2.0
library_name: mlx
---
# The demo pair

A small language model (`target/`), a drafter for it (`drafter/`) and a proposer of another kind
(`proposer/`), trained from nothing on generated text so that the whole engine can be shown and
tested on any machine. Written by `python -m tools.demo_models evaluate`.

- **target**: `gemma3_text`, 9 layers (sliding window 32, every third layer full), hidden 128, 4
  heads and 2 KV heads of 32, feed-forward 384, a tied head over 1,280 byte-level tokens; 1.94 M
  parameters. Digits and most names are single tokens. Stops at `<eos>` or `<end>`.
- **drafter**: DFlash in the published checkpoint layout, 2 layers, hidden 128, taps of layers 1, 3,
  5 and 8, trained with blocks of 4, 8 and 16. Its input is the target's own scaled embedding
  (11.3125 times the token table's rows); `input_embedding_scale` is 1 on top of that.
- **proposer**: a masked diffusion model in the Qwen3 MDLM layout (`a2d-qwen3`), 5 layers, hidden
  128, 4 heads and 2 KV heads of 32, feed-forward 384, the target's tokenizer and its `<mask>`;
  1.15 M parameters. It sees the last 256 tokens and nothing of the target.
- **projector** (`projector/`): for each full layer a linear map from the drafter's features of a
  position to the target's keys and values there, used by `--kv restored:learned`; 0.2 M parameters.
  Its `config.json` records how it was trained and its held-out errors.
- Weights are float16; on a CPU they are best cast to float32.

## What it can and cannot do
It continues Python-like programs of the trained kinds, answers a few kinds of short chat messages
(greetings, sums of two digits, counting, an invented atlas, lists, descriptions, small classes,
questions about facts in the message) and retrieves four-digit codes from contexts of up to about
480 tokens. Words it never saw are several tokens each and often copied wrongly ("lantern" becomes
"lanter"), chat phrasings that were held out are often misunderstood, held-out sums are often wrong,
and any text unlike its corpora gives nonsense. It knows nothing of the world. Trained to 640
positions; past that nothing is promised. It is a test object: do not use it to decide anything.
"""

_TRAINING = """\
## How it was trained
All text comes from the generators in `tools/demo_models/corpora`: templates and word lists written
for this project, invented words and a seed. No third-party text and no other model's output is
used. `python -m tools.demo_models --seed 0 all` makes tokenizer, target, drafter, prompts and this
card from the seed. By its step times that takes between one and a half and five hours on two CPU
cores with a fast BLAS (the less, the better the processor deals with denormal numbers); nobody has
timed it in one go.

That command makes a like pair, not these bits: sums of floats differ between machines, and the
shipped target was trained while its recipe was being found. It was stopped and resumed several
times: until step 1500 Muon's weight decay was on (the feed-forward layers shrank to nothing and
grew again without it), the share of made-up words rose at steps 1800, 2200 and 2800, and the rate
was raised again at each of these. The drafter was stopped after 3,300 of the 4,500 steps that the
recipe gives it, on 24 batches of the target's own text. The first 300 of the proposer's 1,200 steps
had eight rows, half of them code, where the recipe has four. It had about a quarter of an hour of one
core, and was still learning. The recipe in the code is the last one, from the first step on.

1. **Target**: Muon on matrices, AdamW on the rest; rows of 64, then 128, 256, 512 and 640 tokens;
   about 45 % retrieval, 40 % programs, 15 % chat (the first rows are mostly retrieval). Digits of
   answers weigh five times.
2. **Drafter**: the target continues training prompts greedily; the drafter learns those
   continuations from the target's taps, anchored at random positions of code, retrieval and chat.
3. **Proposer** (`python -m tools.demo_models proposer`): likewise, from the tokens alone, on streams
   of its own; it starts from the target's token table. Blocks of 4, 8 and 16 behind a known token,
   half of them partly filled with the true tokens. Many blocks share one context at first, each
   seeing what comes before it; at last there is one block a row and every row sees every row, as
   in drafting.
4. **Projector** (`python -m tools.demo_models projector`, with the switches on record): a regression
   on texts of the same generators, then attention outputs are distilled.
"""


def _held_out() -> str:
    return (
        "## What was held out\n"
        "The recall figures and the chat and retrieval prompts use, and no training saw, what follows. "
        "Of the shipped code prompts five in twelve are of held-out templates, four are new draws of "
        "training templates, three are training templates with held-out fields and nouns.\n\n"
        f"- names in facts and questions, of two kinds alike: {', '.join(HELD_OUT.names)}, which have "
        "a token of their own and occur in training only in greetings and rows of people; and one in five "
        "of the made-up two-piece names (Belan, Torin and the like), which occur nowhere in training;\n"
        f"- fields of programs: {', '.join(HELD_OUT.fields)};\n"
        f"- nouns of programs, filler and chat: {', '.join(HELD_OUT.nouns)}; adjectives "
        f"{', '.join(HELD_OUT.adjectives)}; class prefixes {', '.join(HELD_OUT.prefixes)};\n"
        "- all three filler sentences of the evaluation;\n"
        f"- the program templates {', '.join(HELD_OUT_TEMPLATES)} (training uses "
        f"{', '.join(TRAINING_TEMPLATES)});\n"
        f"- one phrasing of each chat topic ({', '.join(TOPICS)}), and one sum in seven.\n"
    )


def _recall(report: dict[str, Any]) -> str:
    columns = ["all", *(f"depth_quarter_{i}" for i in range(1, 5))]
    lines = [
        "| context | " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "| ---: |" + " ---: |" * len(columns),
    ]
    for length, found in report["recall"].items():
        cells = (f"{found[column]:.2f}" if column in found else "" for column in columns)
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _acceptance(report: dict[str, Any]) -> str:
    blocks = list(next(iter(next(iter(report["shipped"].values())).values()))["acceptance"])
    lines = [
        "| set | new tokens | " + " | ".join(f"block {block}" for block in blocks) + " | looping |",
        "| --- | ---: |" + " ---: |" * len(blocks) + " ---: |",
    ]
    for tokens, sets in report["shipped"].items():
        for kind, found in sets.items():
            cells = " | ".join(f"{found['acceptance'][block]:.2f}" for block in blocks)
            lines.append(f"| {kind} | {tokens} | {cells} | {len(found['looping'])} of {found['prompts']} |")
    return "\n".join(lines)


def _longest(report: dict[str, Any]) -> str:
    return str(max(report["shipped"], key=int))


def _by_kind(report: dict[str, Any]) -> str:
    found = report["shipped"][_longest(report)]["code"]["by_kind"]
    return ", ".join(f"{kind} {length:.2f}" for kind, length in sorted(found.items()))


def _proposer(report: dict[str, Any]) -> str:
    found = report["proposer"]
    kinds = list(next(iter(found["acceptance"].values())))
    lines = ["| forwards a block | " + " | ".join(kinds) + " |", "| ---: |" + " ---: |" * len(kinds)]
    for steps, lengths in found["acceptance"].items():
        lines.append(f"| {steps} | " + " | ".join(f"{lengths[kind]:.2f}" for kind in kinds) + " |")
    return (
        f"The proposer, block {found['block']} and {found['tokens']} new tokens, likewise by set:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def render(report: dict[str, Any]) -> str:
    """The card as Markdown; a report holds what `evaluate.evaluate` returns."""
    figures = (
        f"## Figures\n`python -m tools.demo_models evaluate`, seed {report['seed']}, stock mlx-lm caches, "
        f"float32.\n\nExact recall of one code among five facts, {report['needles']} held-out needles a row, "
        f"by context length in tokens:\n\n{_recall(report)}\n\n"
        "At 400 tokens, when all five names are of one kind: names of the training facts "
        f"{report['recall_400_training_names']:.2f}, held-out single-token names "
        f"{report['recall_400_single_token_names']:.2f}, held-out two-piece names, which share their pieces, "
        f"{report['recall_400_two_piece_names']:.2f}.\n"
        f"Asked through the chat template at about 400 tokens: {report['chat_recall_400']:.2f}.\n\n"
        "Acceptance length (tokens emitted per verify, greedy) on the shipped prompt sets:\n\n"
        f"{_acceptance(report)}\n\n"
        f"Code at block 8 and {_longest(report)} new tokens by what was held out: {_by_kind(report)}. "
        "Copying identifiers it has never seen is what the drafter does worst.\n\n"
        f"{_proposer(report)}"
    )
    return "\n".join((_HEAD, _TRAINING, _held_out(), figures, "## Licence\nApache-2.0, as the project.\n"))
