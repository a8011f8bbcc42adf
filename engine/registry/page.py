"""A registry as a Markdown page: its models and the KV channels, as `docs/reference/models.md` shows them."""

from engine.registry.channels import CHANNELS, SEPARATOR
from engine.registry.entries import DrafterFacts, ModelEntry, Published, TargetFacts
from engine.registry.locate import variable_of
from engine.registry.registry import Registry

HUB = "https://huggingface.co"


def registry_markdown(registry: Registry) -> str:
    """The page, from its title on."""
    lines = [
        "# Models and KV channels of the server\n",
        "A request names a model by its name, or by name and channel: "
        f"`{registry.default}`, `{registry.default}{SEPARATOR}affine8`. "
        f"Where none is named, `{registry.default}` is meant.\n",
        "| model | what it is | target | drafter |\n| --- | --- | --- | --- |",
        *(_row(entry) for entry in registry.entries),
        "\nA folder is looked for where its variable points (`"
        + variable_of("qwen3-4b")
        + "` for `qwen3-4b`; one that names no folder is an error), then in `~/kakeya-models/`, then in the "
        "hub's cache. The drafter has prompt look-ups beside it where that is said.\n",
        "## Shapes\n",
        "A folder that holds a target of another shape is refused, and so is a drafter for another target.\n",
        "| model | hidden size | layers | vocabulary | head dimensions | drafter reads | mask | block |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_shape(entry, entry.target_facts) for entry in registry.entries if entry.target_facts),
        "\n## Channels\n",
        "| channel | `--kv` | what it does | models |\n| --- | --- | --- | --- |",
        *(_channel(name, registry) for name in CHANNELS),
        "\nWhere a request names no channel: "
        + "; ".join(_default(name, registry) for name in CHANNELS if _default(name, registry))
        + ".",
    ]
    return "\n".join(lines) + "\n"


def _row(entry: ModelEntry) -> str:
    drafter = "none" if entry.drafter is None else _source(entry.drafter)
    if entry.lookups:
        drafter += ", look-ups beside it"
    return f"| `{entry.name}` | {entry.summary} | {_source(entry.target)} | {drafter} |"


def _source(source: object) -> str:
    """A source as a reader finds it."""
    if not isinstance(source, Published):
        return str(source)
    if source.hub is None:
        return f"`{source.folder}`"
    at = f" at `{source.revision[:12]}`" if source.revision else ""
    return f"`{source.folder}`: [{source.hub}]({HUB}/{source.hub}){at}"


def _shape(entry: ModelEntry, target: TargetFacts) -> str:
    drafter = entry.drafter_facts or DrafterFacts()
    taps = ", ".join(map(str, drafter.taps)) or "–"
    mask = "–" if drafter.mask_token is None else f"{drafter.mask_token:,}"
    return (
        f"| `{entry.name}` | {target.hidden_size:,} | {target.layers} | {target.vocab_size:,} "
        f"| {', '.join(map(str, target.head_dims))} | {taps} | {mask} | {drafter.block or '–'} |"
    )


def _default(name: str, registry: Registry) -> str:
    """A channel with the models whose default it is; nothing where there are none."""
    models = [entry.name for entry in registry.entries if entry.default_channel == name]
    return f"`{name}` of {_listed(models, registry)}" if models else ""


def _listed(models: list[str], registry: Registry) -> str:
    return "all" if len(models) == len(registry.entries) else ", ".join(models) or "–"


def _channel(name: str, registry: Registry) -> str:
    channel = CHANNELS[name]
    offering = [entry.name for entry in registry.entries if name in entry.channels]
    return f"| `{name}` | `{channel.policy.spec}` | {channel.help} | {_listed(offering, registry)} |"
