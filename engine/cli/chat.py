"""``kakeya_engine chat``: a conversation in the terminal, or by a script that writes a turn a line."""

import logging
import re
from typing import Any

import click

from engine.cli.options import flag, option, prepare, registry_options, sampling_options, take, take_registry
from engine.errors import ConfigurationError

REVISION = "[0-9a-f]{40}"  # of the hub


@click.command("chat")
@click.argument("model_id", metavar="[ID]", required=False)
@registry_options
@option("--system", "A system turn before the conversation.")
@option("--thinking", "Whether a model reasons: on, off, or as the registry has it.", "default")
@option("--max-tokens", "Tokens of an answer, at most.", 1024)
@sampling_options
@option("--block", "Tokens a verify forward, or auto [default: the registry's].")
@option("--stats/--no-stats", "A line of figures on each answer.", True)
@flag("--json", "Each turn is one JSON line; no text is printed.", dest="as_json")
def command(
    *, model_id: str | None, system: str | None, download: bool, stats: bool, as_json: bool, **values: Any
) -> None:
    """Talk with a model of the registry or of this machine: ID is NAME or NAME@CHANNEL.

    NAME may be OWNER/NAME of the hub's cache; without ID it is the registry's default.

    Text comes as it is decoded. The next turn computes only what is new, if the model and its KV channel
    allow it. Ctrl-C ends an answer and keeps what was said; Ctrl-D ends. A line that ends in a backslash
    goes on in the next one; /help lists the commands that may come instead of a turn.

    Standard input may also be a file or a pipe: each line is a turn then, and standard output holds the
    answers alone, without reasoning.

    \b
    Examples:
      kakeya_engine chat
      kakeya_engine chat demo@affine8 --temperature 0.8 --top-p 0.95
      kakeya_engine chat qwen3-4b --download --thinking on
      kakeya_engine chat --model qwen3-4b --drafter qwen3-4b-dflash --kv affine8
      echo "Make a numbered list of: table, window, river." | kakeya_engine chat --json
    """  # noqa: D301 - click wants the character itself
    if model_id is not None and values["model"] is not None:
        raise click.UsageError("give either ID or --model")
    if system is not None and not system.strip():
        raise ConfigurationError("--system must not be empty")

    prepare()
    from engine.chat import ChatOptions, Conversation
    from engine.cli.chat_terminal import ChatLoop, InputLines, Screen
    from engine.model_store import find, named_here
    from engine.registry import SEPARATOR, Places, Registry
    from engine.sampling import Sampling

    options = take(ChatOptions, values, sampling=take(Sampling, values))
    options.check()
    # it warns of long prompts, which are refused here
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if model_id is not None and values["registry"] is None:  # a model of this machine, as --model has it
        # OWNER/NAME@REVISION@CHANNEL: a revision, as model list shows it, is part of the name
        name, *channel = re.split(f"{SEPARATOR}(?!{REVISION}(?:{SEPARATOR}|$))", model_id, maxsplit=1)
        known = {entry.name for entry in Registry.load().entries}
        if name not in known and ("/" in name or named_here(name) is not None):
            model_id, values["model"] = None, find(name)
            values["channel"] = "".join(channel) or values["channel"]
    registry = take_registry(values)
    model_id = model_id or registry.default
    screen, lines = Screen(as_json=as_json, stats=stats), InputLines(quiet=as_json)
    with Conversation(registry, Places.of_machine(), options, download=download) as conversation:
        screen.passing(f"loading {model_id} …")
        conversation.use(model_id)
        if system is not None:
            conversation.instruct(system)
        if lines.terminal:
            screen.say(f"{conversation.model_id}; /help lists the commands, Ctrl-D ends", dim=True)
        ChatLoop(conversation, screen, lines).run()
