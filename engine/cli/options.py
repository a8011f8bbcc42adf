"""Options several commands share, and what they turn into."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from engine.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])
BINDING = ("request_nonce", "workload_sha", "preset_digest", "engine_source")
PATH = click.Path(path_type=Path)


def with_options(command: F, *options: Callable[[F], F]) -> F:
    """A command with options, shown in this order."""
    for each in reversed(options):
        command = each(command)
    return command


def group(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that adds options, shown in this order."""
    return lambda command: with_options(command, *options)


def option(name: str, help_text: str, default: Any = None, **more: Any) -> Callable[[F], F]:
    """An option that shows its default, if it has one, and takes the default's type."""
    return click.option(name, help=help_text, default=default, show_default=default is not None, **more)


engine_options = group(
    option("--model", "Folder of the target [default: shipped].", type=PATH),
    option(
        "--drafter",
        "Folder of a drafter, KIND:FOLDER, prompt-lookup[:N], prompt-lookup+FOLDER or 'none' "
        "[default: prompt-lookup+ the shipped one for the shipped target].",
    ),
    option("--block", "Tokens a verify forward, or auto.", "auto"),
    option(
        "--kv",
        "Which keys and values are kept, and how: native, full-kv, "
        "sliding-bounded[:S,W], sink-window[:S,W], affine[:BITS,GROUP], rotated[:BITS,GROUP], "
        "lattice[:d4|e8,Q], lattice-packed[:d4|e8,BITS], restored:exact|learned|zeros|noise[:S,W]; "
        "then perhaps @all, @full, @sliding, @inner:N or @2,5.",
        "native",
        metavar="POLICY",
    ),
    option(
        "--drafter-kv",
        "How the drafter keeps its own keys and values: native, sink-window[:S,W], "
        "affine[:BITS,GROUP] or rotated[:BITS,GROUP].",
        "native",
        metavar="POLICY",
    ),
    option("--quantize", "Pack the target's weights on loading.", metavar="BITS[,GROUP]"),
    option(
        "--projector", "Folder of the projector for restored:learned [default: the shipped one].", type=PATH
    ),
    option("--prefill-chunk", "Prompt tokens a forward.", 2048),
    option("--dtype", "float32, float16 or bfloat16 [default: float32 on CPU, as stored on Metal]."),
    click.option(
        "--compile/--no-compile", "compiled", default=True, help="Run short blocks as compiled graphs."
    ),
    click.option("--single-graph", is_flag=True, help="Diagnostic: evaluate draft and verify as one graph."),
)
sampling_options = group(
    option("--temperature", "0 takes the likeliest.", 0.0),
    option("--top-p", "Draw from the likeliest share.", 1.0),
    option("--min-p", "Drop what lies below this share.", 0.0),
    option("--top-k", "Draw from the k likeliest; 0: all.", 0),
    option("--seed", "Make sampling repeatable [default: new numbers].", type=int),
)
registry_options = group(
    option("--registry", "Models to offer [default: the shipped file].", type=PATH),
    option("--model", "Offer this folder alone, instead of a registry.", type=PATH),
    option("--drafter", "With --model: what drafts, as generate takes it."),
    click.option("--kv", "channel", help="With --model: the default KV channel."),
    option("--quantize", "With --model: pack the weights, as generate does."),
    option("--download", "Fetch models that are not here from the hub.", is_flag=True),
)
binding_options = group(
    option("--request-nonce", "Bind the report to a request: its nonce."),
    option("--workload-sha", "… the commit it runs."),
    option("--preset-digest", "… the digest of its preset."),
    option("--engine-source", "… and whose engine runs it.", type=click.Choice(["installed", "workload"])),
)
report_options = group(
    click.option("--json", "as_json", is_flag=True, help="Print nothing but one JSON line."),
    click.option(
        "--report",
        "report_path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the evidence report here [default: a new file among the last reports].",
    ),
    binding_options,
)


def take_engine(values: dict[str, Any]) -> Any:
    """Take `engine.config.Options` from the values of `engine_options`, out of ``values``."""
    from engine.config import Options

    names = (
        "model", "drafter", "block", "prefill_chunk", "dtype", "compiled", "single_graph",
        "kv", "drafter_kv", "quantize", "projector",
    )  # fmt: skip
    return Options(**{name: values.pop(name) for name in names})


def take_registry(values: dict[str, Any]) -> Any:
    """The registry of a file, or of one folder, from the values of `registry_options`."""
    from engine.registry import Registry

    if values["model"] is not None:
        if values["registry"] is not None:
            raise click.UsageError("give either --registry or --model")
        return Registry.single(
            values["model"], values["drafter"], channel=values["channel"], quantize=values["quantize"]
        )
    for name, flag in (("drafter", "--drafter"), ("channel", "--kv"), ("quantize", "--quantize")):
        if values[name] is not None:
            raise click.UsageError(f"{flag} goes with --model; a registry says it for each of its models")
    return Registry.load(values["registry"])


def take_request(values: dict[str, Any]) -> Any:
    """Take the request a report is bound to, or None, out of ``values``; all four flags go together."""
    given = {name: values.pop(name) for name in BINDING}
    if not any(given.values()):
        return None
    if missing := [name for name, value in given.items() if not value]:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigurationError(f"a report is bound to a request by four flags; {flags} missing")
    from pydantic import ValidationError

    from evidence_format.model import ReportRequest

    try:
        return ReportRequest.model_validate({key.removeprefix("request_"): given[key] for key in given})
    except ValidationError as error:
        fault = error.errors()[0]
        flag = next(name for name in given if name.endswith(str(fault["loc"][0])))
        raise ConfigurationError(f"--{flag.replace('_', '-')} {given[flag]!r} has the wrong form") from None
