"""``kakeya_engine generate``: one prompt, text as it comes, then one JSON line."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from engine.cli.options import (
    engine_options,
    report_options,
    sampling_options,
    take_engine,
    take_request,
)
from engine.cli.reports import store
from engine.errors import PromptError

LARGEST_PROMPT = 100_000_000  # characters of a file


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "--file", "file", type=click.Path(path_type=Path), help="Read the prompt from a file ('-': stdin)."
)
@click.option("--chat", is_flag=True, help="Send the prompt as a user's turn through the chat template.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Emit at most so many tokens.")
@sampling_options
@click.option("--repetition-penalty", type=float, default=0.0, help="Divide logits of recent tokens by it.")
@click.option("--presence-penalty", type=float, default=0.0, help="Subtract it from logits of used tokens.")
@click.option("--frequency-penalty", type=float, default=0.0, help="… once for each use.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--text", "text_only", is_flag=True, help="Print nothing but the text.")
@engine_options
@report_options
def command(
    *,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    text_only: bool,
    as_json: bool,
    report_path: Path | None,
    **values: Any,
) -> None:
    """Continue PROMPT; the tokens are those of plain decoding, or distributed like them when sampling.

    \b
    Examples:
      kakeya_engine generate "class BaseProject:"
      kakeya_engine generate --chat "Make a numbered list of: table, window, river."
      kakeya_engine generate --file prompt.txt --block 8 --json
      kakeya_engine generate --temperature 0.8 --top-p 0.95 --seed 7 "class Base"
      kakeya_engine generate --drafter prompt-lookup --stop "def " "class BaseProject:"
      kakeya_engine generate --file prompt.txt --text > continuation.txt
      kakeya_engine generate --model ~/models/qwen3-4b --drafter none "Once"
    """  # noqa: D301 - click wants the character itself
    text = _prompt_text(prompt, file)
    if text_only and as_json:
        raise click.UsageError("give either --text or --json")
    request = take_request(values)
    options = take_engine(values)

    from engine.runtime import prepare

    runtime = prepare()
    from engine.config import open_engine
    from engine.evaluation.prompts import chat_prompt, raw_prompt
    from engine.evaluation.single import GenerateSwitches, generate_report, generate_stream

    switches = GenerateSwitches(**values)
    switches.check()
    engine = open_engine(options)
    asked = chat_prompt([("user", text)]) if chat else raw_prompt(text)

    def show(piece: str) -> None:
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    generation = generate_stream(engine, asked, switches, show)
    if not as_json:
        click.echo()
    path = store(generate_report(engine, runtime, generation, request), report_path)
    if text_only:
        return
    if not as_json:
        click.echo(generation.line(), err=True)
    click.echo(json.dumps(generation.figures() | {"report": str(path)}))


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError("give either PROMPT or --file")
    if prompt is not None:
        return prompt
    try:
        with click.open_file(str(file), encoding="utf-8") as stream:
            text = str(stream.read(LARGEST_PROMPT + 1))
    except (OSError, ValueError) as error:
        raise PromptError(f"{file} cannot be read: {error}") from None
    if len(text) > LARGEST_PROMPT:
        raise PromptError(f"{file} holds more than {LARGEST_PROMPT} characters")
    return text
