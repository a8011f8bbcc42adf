"""Options several commands share, and what they turn into."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from engine.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])
BINDING = ("request_nonce", "workload_sha", "preset_digest", "engine_source")
PATH = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
CHARACTERS_A_TOKEN = 3  # of a prompt, for a guess at the memory it takes


class ModelType(click.ParamType[Path]):
    """A model by its name, or by the path of its folder."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, Path):
            return value
        prepare()
        from engine.model_store import find

        return find(value)


MODEL = ModelType()


def group(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that adds options, shown in this order."""
    return lambda command: reduce(lambda made, add: add(made), reversed(options), command)


def option(
    name: str, help_text: str, default: Any = None, *, dest: str | None = None, **more: Any
) -> Callable[[F], F]:
    """An option that shows its default, if it has one, and takes the default's type."""
    if default is not None:
        more = {"default": default, "show_default": True, **more}
    return click.option(name, *([dest] if dest else []), help=help_text, **more)


def flag(name: str, help_text: str, *, dest: str | None = None) -> Callable[[F], F]:
    return option(name, help_text, dest=dest, is_flag=True)


def several(name: str, help_text: str, **more: Any) -> Callable[[F], F]:
    return option(name, f"{help_text} (several times)", multiple=True, **more)


dtype_option = option("--dtype", "float32, float16, bfloat16 [default: float32 on CPU, on Metal as stored].")
no_speculation_option = flag("--no-speculation", "Decode plainly, as with --drafter none.")
kv_option = option(
    "--kv",
    "Which keys and values are kept, and how: native, full-kv, "
    "sliding-bounded[:S,W], sink-window[:S,W], affine[:BITS,GROUP], rotated[:BITS,GROUP], "
    "lattice[:d4|e8,Q], lattice-packed[:d4|e8,BITS], auto[:BITS], "
    "restored:exact|learned|zeros|noise[:S,W]; BITS or Q may be K/V, of keys and of values (rotated:8/4,64); "
    "then perhaps @all, @full, @sliding, @inner:N or @2,5.",
    "native",
    metavar="POLICY",
)
model_option = option("--model", "Name or folder of the target [default: shipped].", type=MODEL)
run_options = group(
    no_speculation_option,
    option("--block", "Tokens a verify forward, or auto.", "auto"),
    kv_option,
    option("--drafter-kv", "The drafter's own: native, sink-window, affine or rotated, as --kv.", "native"),
    option("--drafter-quantize", "Pack the drafter's weights on loading.", metavar="BITS[,GROUP]"),
    option("--quantize", "Pack the target's weights on loading.", metavar="BITS[,GROUP]"),
    option("--projector", "Folder for --kv restored:learned [default: the shipped one].", type=PATH),
    option("--prefill-chunk", "Prompt tokens a forward.", 2048),
    dtype_option,
    option("--compile/--no-compile", "Run short blocks as compiled graphs.", True, dest="compiled"),
    flag("--single-graph", "Diagnostic: evaluate draft and verify as one graph."),
)
engine_options = group(
    model_option,
    option(
        "--drafter",
        "Name or folder of a drafter, KIND:FOLDER, prompt-lookup[:N], prompt-lookup+FOLDER, mtp (the "
        "target's own next-token head) or 'none' [default: mtp if the target has one, else the one "
        "registered for it if that is here, else prompt-lookup].",
    ),
    run_options,
)
sampling_options = group(
    option("--temperature", "0 takes the likeliest.", 0.0),
    option("--top-p", "Draw from the likeliest share.", 1.0),
    option("--min-p", "Drop what lies below this share.", 0.0),
    option("--top-k", "Draw from the k likeliest; 0: all.", 0),
    option("--seed", "Make sampling repeatable [default: new numbers].", type=int),
)
folder_options = group(
    option("--registry", "Models to offer [default: the shipped file].", type=PATH),
    option("--model", "Offer this model alone, instead of a registry: name or folder.", type=MODEL),
    option("--drafter", "With --model: what drafts, as generate takes it."),
    no_speculation_option,
    option("--quantize", "With --model: pack the weights, as generate does."),
)
registry_options = group(
    folder_options,
    option("--kv", "With --model: the default KV channel.", dest="channel"),
    flag("--download", "Fetch models that are not here from the hub."),
)
binding_options = group(
    option("--request-nonce", "Bind the report to a request: its nonce."),
    option("--workload-sha", "… the commit it runs."),
    option("--preset-digest", "… the digest of its preset."),
    option("--engine-source", "… and whose engine runs it.", type=click.Choice(["installed", "workload"])),
)
json_option = flag("--json", "Print nothing but one JSON line.", dest="as_json")
report_options = group(
    json_option,
    option("--report", "Write the report here [default: among the last].", dest="report_path", type=FILE),
    binding_options,
)


def prepare() -> Any:
    """`engine.device.prepare`, before anything that imports mlx."""
    from engine.device import prepare

    return prepare()


def take(kind: Any, values: dict[str, Any], **more: Any) -> Any:
    """Take a dataclass whose fields are called as options are out of ``values``."""
    return kind(**{each.name: values.pop(each.name) for each in fields(kind) if each.name in values}, **more)


def settle_speculation(values: dict[str, Any]) -> None:
    """Make --no-speculation in ``values`` what it means, the drafter ``none``."""
    if not values.pop("no_speculation"):
        return
    if values["drafter"] not in (None, "none"):
        raise click.UsageError(
            f"--no-speculation contradicts --drafter {values['drafter']}; give one of them"
        )
    values["drafter"] = "none"


def take_registry(
    values: dict[str, Any], of_folder: Sequence[str] = ("drafter", "channel", "quantize")
) -> Any:
    """Take the registry of a file, or of one folder, out of ``values``; ``of_folder`` need --model."""
    from engine.registry import Registry

    registry, model = values.pop("registry"), values.pop("model")
    settle_speculation(values)
    given = {name: values.pop(name) for name in dict.fromkeys((*of_folder, "channel"))}
    if model is not None:
        if registry is not None:
            raise click.UsageError("give either --registry or --model")
        return Registry.single(model, **given)
    plain = given["drafter"] == "none"
    for name in of_folder:
        if given[name] is not None and not (name == "drafter" and plain):
            flag = "--kv" if name == "channel" else f"--{name}"
            raise click.UsageError(f"{flag} goes with --model; a registry says it for each of its models")
    loaded = Registry.load(registry)
    return loaded.without_drafters() if plain else loaded


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
