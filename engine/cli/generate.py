"""``kakeya_engine generate``: one prompt, text as it comes, then one JSON line."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from engine.cli import options as common
from engine.cli.options import FILE, PATH, flag, option, sampling_options, several
from engine.cli.reports import store
from engine.errors import GenerationError, PromptError

LARGEST_PROMPT = 100_000_000  # characters of a file


@click.command("generate")
@click.argument("prompt", required=False)
@option("--file", "Read the prompt from a file ('-': stdin).", type=PATH)
@flag("--chat", "Send the prompt as a user's turn through the chat template.")
@option("--max-tokens", "Emit at most so many tokens.", 128)
@sampling_options
@option("--repetition-penalty", "Divide logits of recent tokens by it.", 0.0, show_default=False)
@option("--presence-penalty", "Subtract it from logits of used tokens.", 0.0, show_default=False)
@option("--frequency-penalty", "… once for each use.", 0.0, show_default=False)
@several("--stop", "End before this text.")
@flag("--text", "Print nothing but the text.", dest="text_only")
@common.engine_options
@common.json_option
@option(
    "--report",
    "Write an evidence report, to PATH or to a new file among the last reports.",
    dest="report_path",
    type=FILE,
    is_flag=False,
    flag_value="-",
    metavar="[PATH]",
)
@common.binding_options
def command(prompt: str | None, file: Path | None, *, as_json: bool, report_path: Any, **values: Any) -> None:
    """Continue PROMPT; the tokens are those of plain decoding, or distributed like them when sampling.

    An evidence report is written with --report, and wherever it is bound to a request. The JSON line says
    where it is.

    \b
    Examples:
      kakeya_engine generate "class BaseProject:"
      kakeya_engine generate --chat "Make a numbered list of: table, window, river."
      kakeya_engine generate --file prompt.txt --block 8 --json
      kakeya_engine generate --temperature 0.8 --top-p 0.95 --seed 7 "class Base"
      kakeya_engine generate --file prompt.txt --text > continuation.txt
      kakeya_engine generate --model qwen3-4b --drafter none "Once"
    """  # noqa: D301 - click wants the character itself
    text, text_only = _prompt_text(prompt, file), values.pop("text_only")
    content = [("user", text)] if values.pop("chat") else text
    if text_only and as_json:
        raise click.UsageError("give either --text or --json")
    request, runtime = common.take_request(values), common.prepare()
    from engine.config import Options, open_engine
    from engine.generate import GenerateSwitches, encode, generate

    common.settle_speculation(values)
    options, switches = common.take(Options, values), common.take(GenerateSwitches, values)
    switches.check()
    wanted = len(text) // common.CHARACTERS_A_TOKEN + switches.max_tokens
    engine = open_engine(options, wanted)
    evaluation = None
    if report_path is not None or request is not None:
        from engine.evaluation.measure import Evaluation

        about = (engine, switches, runtime)
        evaluation = Evaluation("throughput", "generate", *about, request=request, resumable=False)
    target = engine.target
    tokens = encode(content, target.tokenizer, target.target.vocab_size, target.context)
    draft_length = engine.new_draft_length()
    for step in generate(engine, tokens, switches.max_tokens, switches.options(), draft_length=draft_length):
        if not as_json:
            sys.stdout.write(step.text)
            sys.stdout.flush()
    if not as_json:
        click.echo()
    if step.outcome is None:
        raise GenerationError("the text did not come to an end")
    given = None if str(report_path) == "-" else report_path
    path = evaluation and store(evaluation.report_row(content, tokens, step.outcome), given)
    if text_only:
        return
    if not as_json:
        click.echo(_summary(step.outcome), err=True)
    figures = _figures(step.outcome, len(tokens), engine.policy)
    click.echo(json.dumps(figures | ({"report": str(path)} if path else {})))


def _figures(outcome: Any, prompt_tokens: int, policy: Any) -> dict[str, Any]:
    same = ("decode_tokens_per_s", "verify_rounds", "acceptance_length")
    return {
        "text": outcome.text,
        "finish_reason": outcome.finish,
        "prompt_tokens": prompt_tokens,
        "generated_tokens": len(outcome.tokens),
        "prefill_s": round(outcome.prefill_s, 7),
        "decode_s": round(outcome.decode_s, 7),
        **{name: getattr(outcome, name) for name in same},
        "resident_bytes": outcome.resident_bytes + outcome.drafter_resident_bytes,
        "drafter_resident_bytes": outcome.drafter_resident_bytes,
        "path": outcome.path,
        "kv": policy.spec,
        **({"layer_bits": policy.bits_text} if policy.layer_bits else {}),
        "restored_positions": outcome.restored,
    }


def _summary(outcome: Any) -> str:
    text = f"{len(outcome.tokens)} tokens ({outcome.finish})"
    if outcome.decode_tokens_per_s is not None:
        text += f", {outcome.decode_tokens_per_s:.1f} tok/s"
    if outcome.acceptance_length is not None:
        length = f"{outcome.acceptance_length:.2f} tokens emitted per verify"
        text += f", {length} over {outcome.verify_rounds} rounds"
    return text


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
