"""``kakeya_engine generate``: one prompt, text as it comes, then one JSON line."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from engine.cli.options import engine_options, report_options, take_engine, take_request
from engine.cli.reports import store
from engine.errors import ConfigurationError, PromptError


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "--file", "file", type=click.Path(path_type=Path), help="Read the prompt from a file ('-': stdin)."
)
@click.option("--chat", is_flag=True, help="Send the prompt as a user's turn through the chat template.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Emit at most so many tokens.")
@click.option("--text", "text_only", is_flag=True, help="Print nothing but the text.")
@engine_options
@report_options
def command(
    *,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    max_tokens: int,
    text_only: bool,
    as_json: bool,
    report_path: Path | None,
    **values: Any,
) -> None:
    """Continue PROMPT greedily; the tokens are those of plain decoding.

    \b
    Examples:
      kakeya_engine generate "class BaseProject:"
      kakeya_engine generate --chat "Make a numbered list of: table, window, river."
      kakeya_engine generate --file prompt.txt --block 8 --json
      kakeya_engine generate --file prompt.txt --text > continuation.txt
      kakeya_engine generate --model ~/models/qwen3-4b --drafter none "Once"
    """  # noqa: D301 - click wants the character itself
    text = _prompt_text(prompt, file)
    if max_tokens < 1:
        raise ConfigurationError(f"--max-tokens must be at least 1, not {max_tokens}")
    if text_only and as_json:
        raise click.UsageError("give either --text or --json")
    request = take_request(values)
    options = take_engine(values)

    from engine.runtime import prepare

    runtime = prepare()
    from engine.config import open_engine
    from engine.evaluation.prompts import chat_prompt, raw_prompt
    from engine.evaluation.single import generate_report, generate_stream

    engine = open_engine(options)
    asked = chat_prompt([("user", text)]) if chat else raw_prompt(text)

    def show(piece: str) -> None:
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    generation = generate_stream(engine, asked, max_tokens, show)
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
        return sys.stdin.read() if str(file) == "-" else Path(str(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file} cannot be read: {error}") from None
