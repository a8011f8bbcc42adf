"""The command that makes the demo pair: corpora, tokenizer, target, drafters, projector, prompts, card."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import engine

ROOT = Path(engine.__file__).resolve().parent
MODELS = ROOT / "models" / "demo"
PROMPTS = ROOT / "evaluation" / "prompts"
MADE = ("target", "drafter", "proposer")


def _progress() -> Callable[[dict[str, Any]], None]:
    """Print one JSON line a report, with the minutes since the start."""
    started = time.monotonic()

    def show(figures: dict[str, Any]) -> None:
        minutes = round((time.monotonic() - started) / 60, 2)
        click.echo(json.dumps({**figures, "minutes": minutes}))

    return show


def _tokenizer(work: Path, seed: int) -> Any:
    """The tokenizer of this run, trained on first use."""
    from tools.demo_models import tokenizer

    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        tokenizer.save(tokenizer.train(seed), folder)
    return tokenizer.DemoTokenizer.load(folder)


@click.group()
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/training"), show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--tiny", is_flag=True, help="A few steps of each stage, to see that everything runs.")
@click.option("--out", type=click.Path(path_type=Path), default=MODELS, help="Folder of the pair.")
@click.option("--prompts", type=click.Path(path_type=Path), default=PROMPTS, help="Folder of prompt sets.")
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Train, evaluate and export the demo pair. Stages resume where they stopped."""
    from engine.device import load_fast_blas
    from tools.demo_models.allocator import keep_freed_memory

    load_fast_blas()
    keep_freed_memory()
    context.obj = options


@main.command()
@click.option("--count", default=2, show_default=True, help="Documents of each kind.")
@click.pass_obj
def corpus(options: dict[str, Any], count: int) -> None:
    """Show documents of the training corpora with their lengths in tokens."""
    from engine.haystack_text import TRAIN, generator
    from tools.demo_models.corpora import chat, retrieval
    from tools.demo_models.corpora.batches import program_document
    from tools.demo_models.corpora.document import text_of

    tokenizer = _tokenizer(options["work"], options["seed"])
    rng = generator(options["seed"])
    for _ in range(count):
        documents = (
            program_document(rng),
            retrieval.document(rng, TRAIN, tokenizer.count, length=256, facts=4),
            chat.conversation(rng),
        )
        for document in documents:
            text = text_of(document)
            click.echo(f"--- {tokenizer.count(text)} tokens\n{text}")


@main.command()
@click.pass_obj
def target(options: dict[str, Any]) -> None:
    """Train the target."""
    from tools.demo_models import demo_target, trainer

    tokenizer = _tokenizer(options["work"], options["seed"])
    curriculum = demo_target.TINY_CURRICULUM if options["tiny"] else demo_target.CURRICULUM
    model = demo_target.build(demo_target.configuration())
    demo_target.initialise(model, options["seed"])
    task = demo_target.TargetTask(model, tokenizer, options["seed"], curriculum)
    schedule = trainer.Schedule(steps=demo_target.curriculum_steps(curriculum))
    trainer.fit(task, schedule, options["work"] / "target", progress=_progress(), every=25)


def _trained_target(options: dict[str, Any]) -> Any:
    from tools.demo_models import demo_target, trainer

    model = demo_target.build(demo_target.configuration())
    trainer.load_weights(options["work"] / "target", model)
    return model


@main.command()
@click.pass_obj
def drafter(options: dict[str, Any]) -> None:
    """Let the target continue training prompts, then train the drafter on that."""
    from tools.demo_models import demo_target, selfplay, trainer
    from tools.demo_models import drafter as drafting

    model = _trained_target(options)
    config = drafting.configuration(demo_target.configuration())
    data = selfplay.collect(
        model,
        _tokenizer(options["work"], options["seed"]),
        options["work"] / "selfplay",
        seed=options["seed"],
        batches=(1, 1) if options["tiny"] else drafting.SELFPLAY_BATCHES,
        rows=16 if options["tiny"] else 128,
        taps=tuple(config["dflash_config"]["target_layer_ids"]),
        progress=_progress(),
    )
    task = drafting.DrafterTask(drafting.build(config, options["seed"]), model, data, options["seed"])
    schedule = trainer.Schedule(steps=20 if options["tiny"] else drafting.STEPS, decay=0.5)
    trainer.fit(task, schedule, options["work"] / "drafter", progress=_progress(), every=100)


@main.command()
@click.pass_obj
def proposer(options: dict[str, Any]) -> None:
    """Let the target continue more prompts, then train the masked diffusion proposer on that.

    The target is the one trained here, else the shipped one; so the proposer of the shipped pair needs
    nothing but this stage.
    """
    from tools.demo_models import evaluate as evaluating
    from tools.demo_models import proposer as proposing
    from tools.demo_models import selfplay, trainer
    from tools.demo_models.tokenizer import DemoTokenizer

    work, tiny = options["work"], options["tiny"]
    if (work / "target").exists():
        model, tokenizer = _trained_target(options), _tokenizer(work, options["seed"])
    else:
        shipped = options["out"] / "target"
        model, tokenizer = evaluating.load_target(shipped)[0], DemoTokenizer.load(shipped)
    data = selfplay.collect(
        model,
        tokenizer,
        work / "proposer-selfplay",
        seed=options["seed"] + proposing.SELFPLAY_SEED,
        batches=(1, 0) if tiny else proposing.SELFPLAY_BATCHES,
        rows=16 if tiny else 128,
        taps=(),
        progress=_progress(),
    )
    config = proposing.configuration(vars(model.args))
    network = proposing.build(config, options["seed"], model.model.embed_tokens.weight)
    folded, single = (4, 2) if tiny else (proposing.FOLDED_STEPS, proposing.SINGLE_STEPS)
    task = proposing.ProposerTask(network, data, options["seed"], folded=folded)
    schedule = trainer.Schedule(steps=folded + single, decay=0.5)
    trainer.fit(task, schedule, work / "proposer", progress=_progress(), every=50, keep_every=50)


@main.command()
@click.option("--only", type=click.Choice(MADE), multiple=True, default=MADE, help="Leave the others alone.")
@click.pass_obj
def export(options: dict[str, Any], only: tuple[str, ...]) -> None:
    """Write the shipped folders from the newest checkpoints."""
    from tools.demo_models import demo_target, trainer
    from tools.demo_models import drafter as drafting
    from tools.demo_models import export as exporting
    from tools.demo_models import proposer as proposing

    out, work = options["out"], options["work"]
    target_config = demo_target.configuration()
    if "target" in only:
        _tokenizer(work, options["seed"])
        exporting.write_model(_trained_target(options), target_config, out / "target")
        exporting.copy_tokenizer(work / "tokenizer", out / "target")
    if "drafter" in only:
        config = drafting.configuration(target_config)
        network = drafting.build(config, options["seed"])
        trainer.load_weights(work / "drafter", network)
        exporting.write_model(network, config, out / "drafter")
    if "proposer" in only:
        config = proposing.configuration(target_config)
        diffusion = proposing.build(config, options["seed"])
        trainer.load_weights(work / "proposer", diffusion)
        exporting.write_model(diffusion, config, out / "proposer")
        exporting.copy_tokenizer(out / "target", out / "proposer")
    exporting.write_digests(out)


@main.command()
@click.pass_obj
def projector(options: dict[str, Any]) -> None:
    """Train the projector of the exported target and drafter, on retrieval documents and programs."""
    from engine.target.loading import load_target
    from engine.training.projector import train_projector
    from engine.training.projector_fit import ProjectorSwitches
    from tools.demo_models.projector_texts import mixture

    out, show = options["out"], _progress()
    switches = ProjectorSwitches(seed=options["seed"])
    if options["tiny"]:
        switches = ProjectorSwitches(window=8, steps=2, batches=1, texts=2, length=192)
    figures = train_projector(
        load_target(out / "target"),
        out / "drafter",
        out / "projector",
        switches,
        texts=mixture,
        progress=lambda done, total, phase, _: show({"phase": phase, "done": done, "of": total}),
    )
    show(figures["held_out"])


@main.command()
@click.pass_obj
def prompts(options: dict[str, Any]) -> None:
    """Write the shipped prompt sets; they depend on the shipped tokenizer and the seed alone."""
    from tools.demo_models import prompts as prompt_sets
    from tools.demo_models.tokenizer import DemoTokenizer

    shipped = options["out"] / "target"
    tokenizer = (
        DemoTokenizer.load(shipped)
        if (shipped / "tokenizer.json").exists()
        else _tokenizer(options["work"], options["seed"])
    )
    prompt_sets.write(tokenizer, options["prompts"], options["seed"])


@main.command()
@click.option("--needles", default=120, show_default=True, help="Held-out needles at each context length.")
@click.option("--proposer-alone", is_flag=True, help="Keep the recorded figures of target and drafter.")
@click.pass_obj
def evaluate(options: dict[str, Any], needles: int, proposer_alone: bool) -> None:
    """Measure the shipped pair; write evaluation.json, the model card and the digests."""
    from engine.drafters.block import BlockDrafter
    from tools.demo_models import card
    from tools.demo_models import drafter as drafting
    from tools.demo_models import evaluate as evaluating
    from tools.demo_models import export as exporting
    from tools.demo_models import proposer as proposing

    out, progress = options["out"], _progress()
    extent = evaluating.TINY if options["tiny"] else evaluating.Extent(needles)
    if proposer_alone:
        report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    else:
        report = evaluating.evaluate(
            out / "target",
            BlockDrafter(drafting.load(out / "drafter")),
            options["prompts"],
            extent=extent,
            seed=options["seed"],
            progress=progress,
        )
    report["proposer"] = evaluating.evaluate_proposer(
        out / "target",
        proposing.load(out / "proposer"),
        options["prompts"],
        extent=extent,
        progress=progress,
    )
    (out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card.render(report), encoding="utf-8")
    exporting.write_digests(out)
    click.echo(json.dumps(report))


@main.command(name="all")
@click.pass_context
def everything(context: click.Context) -> None:
    """Every stage in order: the one command that makes the pair."""
    for stage in (target, drafter, proposer, export, projector, prompts, evaluate):
        click.echo(f"== {stage.name}")
        context.invoke(stage)


if __name__ == "__main__":
    main()
