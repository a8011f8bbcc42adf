"""What the demo pair can do: recall of held-out needles, acceptance on held-out prompts, loops.

Runs the stock mlx-lm model with its own caches. Acceptance follows the target's greedy continuation
block by block with the engine's drafter, which emits the same tokens as a speculative loop. No timings: those
belong to the engine's evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.drafters.base import Drafter
from engine.drafters.masked_diffusion import MaskedDiffusion
from engine.haystack_text import HELD_OUT, TRAIN, generator, held_out_two_piece_names
from engine.networks.mdlm import MaskedDiffusionModel
from engine.target.model import Target
from tools.demo_models import prompts as prompt_sets
from tools.demo_models.corpora import retrieval
from tools.demo_models.tokenizer import END, EOS, MASK, DemoTokenizer

Progress = Callable[[dict[str, Any]], None]
STOPS = (EOS, END)
CONTEXTS = (128, 256, 400, 480)
KINDS = ("code", "chat", "retrieval")
PROPOSER_BLOCK, PROPOSER_STEPS = 8, (1, 2, 4)
BY_KIND_BLOCK = 8  # block at which code acceptance is split by what was held out


@dataclass(frozen=True)
class Extent:
    """How much an evaluation looks at.

    Attributes:
        needles: held-out needles at each context length, at least one to a quarter of the depths.
        tokens: new tokens a prompt, one measurement each.
        prompts: of each shipped set, from the first on; None: all.
    """

    needles: int = 120
    tokens: tuple[int, ...] = (64, 128)
    prompts: int | None = None


TINY = Extent(needles=4, tokens=(8, 16), prompts=3)


def load_target(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer as mlx-lm loads them, weights cast to float32."""
    from mlx_lm.utils import load

    model, tokenizer = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Up to `count` greedy tokens with the model's own caches; ends with a stop token where one comes."""
    from mlx_lm.generate import generate_step

    out: list[int] = []
    for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=count):
        out.append(int(token))
        if out[-1] in STOPS:
            break
    return out


def recall(
    model: Any, tokenizer: Any, *, length: int, count: int, seed: int, names: Sequence[str] = ()
) -> dict[str, float]:
    """Share of exactly answered needles, all and by depth quarter; `names` as in `retrieval.needle`."""
    demo = DemoTokenizer(tokenizer._tokenizer.backend_tokenizer)
    rng = generator(f"recall/{seed}/{length}")
    hits: dict[str, list[bool]] = {}
    for i in range(count):
        depth = (i + 0.5) / count
        needle = retrieval.needle(rng, demo.count, length=length, depth=depth, names=names)
        answer = greedy(model, tokenizer.encode(needle.prompt), 4)
        hit = tokenizer.decode(answer) == needle.fact.code
        for key in ("all", f"depth_quarter_{int(4 * depth) + 1}"):
            hits.setdefault(key, []).append(hit)
    return {key: round(sum(found) / len(found), 4) for key, found in sorted(hits.items())}


def chat_recall(model: Any, tokenizer: Any, *, length: int, count: int, seed: int) -> float:
    """Share of held-out needles whose code appears in the answer when asked through the chat template."""
    demo = DemoTokenizer(tokenizer._tokenizer.backend_tokenizer)
    rng = generator(f"chat recall/{seed}/{length}")
    hits = 0
    for i in range(count):
        needle = retrieval.needle(rng, demo.count, length=length, depth=(i + 0.5) / count)
        context = needle.prompt.removesuffix(needle.fact.question)
        content = f"Please read.{context} What is the secret code of {needle.fact.name}?"
        tokens = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        hits += needle.fact.code in tokenizer.decode(greedy(model, tokens, 24))
    return round(hits / count, 4)


def loop_period(tokens: Sequence[int], *, longest: int = 40, least: int = 30) -> int:
    """The period in which the end repeats at least three times over `least` tokens; 0 for none."""
    for period in range(1, longest + 1):
        span = max(3 * period, least)
        tail = list(tokens[-span:])
        if len(tail) == span and tail[period:] == tail[:-period]:
            return period
    return 0


def rounds(
    target: Target, drafter: Drafter, prompt: Sequence[int], continuation: Sequence[int], block: int
) -> list[int]:
    """Tokens emitted by each verify while drafting along the target's greedy continuation."""
    tokens, rows = [*prompt, *continuation], None
    if drafter.target_layers:
        taps = target.hook_layers(drafter.target_layers)
        _, rows = target.forward(mx.array([tokens]), target.model.make_cache(), taps)
        taps.close()

    def tell(start: int, end: int) -> None:
        drafter.observe(tokens[start:end], None if rows is None else rows[:, start:end])

    drafter.start()
    tell(0, len(prompt))
    emitted, at = [], 0
    while at < len(continuation) - 1:
        drafts = np.array(drafter.propose(continuation[at], block - 1).tokens).tolist()
        wanted = continuation[at + 1 : at + block]
        accepted = 0
        while accepted < min(len(wanted), block - 1) and drafts[accepted] == wanted[accepted]:
            accepted += 1
        step = min(accepted + 1, len(continuation) - 1 - at)
        tell(len(prompt) + at, len(prompt) + at + step)
        emitted.append(step)
        at += step
    return emitted


def encode_prompt(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    """Tokens of a shipped prompt, through the chat template where it is a conversation."""
    if "messages" in prompt:
        tokens = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True)
    else:
        tokens = tokenizer.encode(prompt["prompt"])
    return [int(token) for token in tokens]


def shipped_sets(
    model: Any,
    tokenizer: Any,
    drafter: Drafter,
    folder: Path,
    *,
    tokens: int,
    most: int | None,
    blocks: Sequence[int],
) -> dict[str, dict[str, Any]]:
    """Acceptance length (tokens emitted per verify) and loops on the first prompts of each shipped set."""
    target = Target(model)
    drafter.bind(target)
    result: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        emitted: dict[int, list[int]] = {block: [] for block in blocks}
        looping, lengths, answered, shipped = [], [], 0, prompt_sets.read(folder / f"{kind}.jsonl")[:most]
        by_kind: dict[str, list[int]] = {}
        for index, prompt in enumerate(shipped):
            encoded = encode_prompt(tokenizer, prompt)
            continuation = greedy(model, encoded, tokens)
            lengths.append(len(continuation))
            answered += tokenizer.decode(continuation).startswith(prompt.get("answer", "\0"))
            if loop_period(continuation):
                looping.append(prompt["id"])
            for block in blocks:
                found = rounds(target, drafter, encoded, continuation, block)
                emitted[block] += found
                if kind == "code" and block == BY_KIND_BLOCK:
                    by_kind.setdefault(prompt_sets.code_kind(index), []).extend(found)
        result[kind] = {
            "prompts": len(shipped),
            "median_tokens": sorted(lengths)[len(lengths) // 2],
            "acceptance": {str(block): round(sum(e) / len(e), 3) for block, e in emitted.items()},
            "looping": looping,
        }
        if by_kind:
            result[kind]["by_kind"] = {key: round(sum(e) / len(e), 3) for key, e in by_kind.items()}
        if kind == "retrieval":
            result[kind]["answered"] = answered
    return result


def evaluate(
    target_folder: Path,
    drafter: Drafter,
    prompts: Path,
    *,
    extent: Extent,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Every figure of the model card."""
    model, tokenizer = load_target(target_folder)
    needles = extent.needles
    report: dict[str, Any] = {"seed": seed, "needles": needles, "recall": {}, "shipped": {}}
    for tokens in extent.tokens:
        report["shipped"][str(tokens)] = shipped_sets(
            model, tokenizer, drafter, prompts, tokens=tokens, most=extent.prompts, blocks=(4, 8, 16)
        )
        progress({"tokens": tokens, **report["shipped"][str(tokens)]})
    for length in CONTEXTS:
        report["recall"][str(length)] = recall(model, tokenizer, length=length, count=needles, seed=seed)
        progress({"context": length, **report["recall"][str(length)]})
    for key, names in (
        ("training_names", TRAIN.names),
        ("single_token_names", HELD_OUT.names),
        ("two_piece_names", held_out_two_piece_names()),
    ):
        found = recall(model, tokenizer, length=400, count=needles, seed=seed, names=names)
        report[f"recall_400_{key}"] = found["all"]
        progress({f"recall_400_{key}": found["all"]})
    report["chat_recall_400"] = chat_recall(model, tokenizer, length=380, count=needles, seed=seed)
    progress({"chat_recall_400": report["chat_recall_400"]})
    return report


def evaluate_proposer(
    target_folder: Path,
    network: MaskedDiffusionModel,
    prompts: Path,
    *,
    extent: Extent,
    progress: Progress,
) -> dict[str, Any]:
    """What the model card says of the proposer: tokens emitted per verify, by its forwards for a block."""
    model, tokenizer = load_target(target_folder)
    target, tokens = Target(model), extent.tokens[0]
    texts = {
        kind: [
            (encoded, greedy(model, encoded, tokens))
            for encoded in (
                encode_prompt(tokenizer, prompt)
                for prompt in prompt_sets.read(prompts / f"{kind}.jsonl")[: extent.prompts]
            )
        ]
        for kind in KINDS
    }
    report: dict[str, Any] = {"tokens": tokens, "block": PROPOSER_BLOCK, "acceptance": {}}
    for steps in PROPOSER_STEPS:
        drafter = MaskedDiffusion(network, MASK, steps=steps)
        drafter.bind(target)
        found = {}
        for kind in KINDS:
            emitted = [
                count
                for prompt, continuation in texts[kind]
                for count in rounds(target, drafter, prompt, continuation, PROPOSER_BLOCK)
            ]
            found[kind] = round(sum(emitted) / len(emitted), 3)
        report["acceptance"][str(steps)] = found
        progress({"steps": steps, **found})
    return report
