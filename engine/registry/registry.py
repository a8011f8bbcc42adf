"""The registry: which models a server offers, and what an id such as ``demo@affine8`` asks for.

A registry is one TOML file; the one that comes with the project lies beside this file. Entries that
contradict themselves are errors as the file is read. Where their files are is for `engine.registry.locate`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.config import parse_block
from engine.errors import ConfigurationError, EngineError, UnknownModel
from engine.registry.channels import NATIVE, SEPARATOR, Channel, find_channel
from engine.registry.consistency import check_declared, usable_channels
from engine.registry.entries import Given, ModelEntry, Published, Shipped, Source
from engine.registry.locate import variable_of
from engine.registry.reading import read_entry
from engine.registry.tables import Table, read_table
from engine.target.loading import SHIPPED_TARGET

SHIPPED_FILE = Path(__file__).with_name("models.toml")


@dataclass(frozen=True)
class Registry:
    """Models by name.

    Attributes:
        path: the file it was read from; None: it was made for one folder.
        default: name of the entry that is meant where none is named.
        entries: at least one, in the order of the file; no name twice.
    """

    path: Path | None
    default: str
    entries: tuple[ModelEntry, ...]

    @classmethod
    def load(cls, path: Path | None = None) -> "Registry":
        """Read a registry file; None: the one that comes with the project.

        Raises:
            ConfigurationError: the file cannot be used, a key is wrong, or an entry contradicts itself; file,
                model and key are named.
            DrafterMismatchError: what an entry says of its drafter does not go with its target.
        """
        file = path or SHIPPED_FILE
        table = read_table(file)
        default = table.needed_text("default")
        models = table.table("models") or Table(str(file), {}, ("models",))
        table.finish()
        entries = []
        for name in models.names():
            inner = models.table(name)
            entries.append(read_entry(name, models.needed(name, inner)))
        if default not in {entry.name for entry in entries}:
            raise table.refusal(f"default is {ascii(default)[:100]}, which is no model of this file")
        _refuse_shared_places(table, entries)
        for entry in entries:
            try:
                check_declared(entry)
            except EngineError as error:
                raise type(error)(f"{file}: {error}") from None
        return cls(file, default, tuple(entries))

    @classmethod
    def single(
        cls,
        target: Path,
        drafter: str | None = None,
        *,
        channel: str | None = None,
        block: str = "auto",
        dtype: str | None = None,
        quantize: str | None = None,
        context: int | None = None,
    ) -> "Registry":
        """A registry of one model, for a folder given on the command line.

        Args:
            target: folder of the model; its name, made fitting, is the model's.
            drafter: as ``--drafter`` takes it, ``none`` included; None: the shipped one for the shipped
                target, and none for others.
            channel: the default channel; None: native.
            block: see `engine.config.Options`.
            dtype: likewise.
            quantize: likewise.
            context: no more positions than these are used; None: as many as the model was made for.

        Raises:
            ModelError: the folder's configuration cannot be used.
            UnknownModel: there is no such channel.
            ConfigurationError: the channel does not fit the model, or the block is none.
        """
        parse_block(block)
        source = _given_drafter(target, drafter)
        entry = ModelEntry(
            name=fitting_name(target),
            summary=f"the model in {target}",
            target=Given(str(target)),
            drafter=source,
            lookups=isinstance(source, Shipped),
            channels=usable_channels(target),
            default_channel=NATIVE.name if channel is None else find_channel(channel).name,
            block=block,
            dtype=dtype,
            quantize=quantize,
            context=context,
        )
        entry.channel(entry.default_channel)
        return cls(None, entry.name, (entry,))

    def resolve(self, model_id: str, channel: str | None = None) -> tuple[ModelEntry, Channel]:
        """The entry and channel that a request asks for.

        Args:
            model_id: ``NAME`` or ``NAME@CHANNEL``.
            channel: a channel that is named beside the id; None: none is.

        Raises:
            UnknownModel: no entry has that name, or there is no such channel; what there is is listed.
            ConfigurationError: the model does not offer the channel, or two channels are named.
        """
        name, separator, named = model_id.partition(SEPARATOR)
        if separator and channel is not None and channel != named:
            raise ConfigurationError(
                f"the model {ascii(model_id)[:100]} names the KV channel {ascii(named)[:100]}, "
                f"and the request {ascii(channel)[:100]}; name one"
            )
        entry = self.entry(name)
        return entry, entry.channel(named if separator else channel)

    def entry(self, name: str) -> ModelEntry:
        """The entry of that name.

        Raises:
            UnknownModel: there is none; the message lists those there are.
        """
        for entry in self.entries:
            if entry.name == name:
                return entry
        known = ", ".join(entry.name for entry in self.entries)
        raise UnknownModel(f"there is no model {ascii(name)[:100]}; there are {known}")

    def ids(self) -> list[str]:
        """Every id that `resolve` takes: each name, and after it the name with each of its channels."""
        return [
            model_id
            for entry in self.entries
            for model_id in (entry.name, *(f"{entry.name}{SEPARATOR}{name}" for name in entry.channels))
        ]


def fitting_name(folder: Path) -> str:
    """A model's name made of that of its folder, or of its repository where that is in the hub's cache."""
    path = folder.absolute()
    name = path.parents[1].name.split("--")[-1] if path.parent.name == "snapshots" else path.name
    return re.sub("[^a-z0-9.-]", "-", name.lower()).strip("-.") or "model"


def _given_drafter(target: Path, drafter: str | None) -> Source | None:
    if drafter is None:
        return Shipped() if target.resolve() == SHIPPED_TARGET.resolve() else None
    return None if drafter == "none" else Given(drafter)


def _refuse_shared_places(table: Table, entries: Iterable[ModelEntry]) -> None:
    """One variable of the environment cannot name the folders of two models."""
    owners: dict[str, Published] = {}
    for source in (source for entry in entries for source in (entry.target, entry.drafter)):
        if not isinstance(source, Published):
            continue
        variable = variable_of(source.folder)
        if owners.setdefault(variable, source) != source:
            raise table.refusal(
                f"{owners[variable]} and {source} would both be looked for in {variable}; "
                "give them folders of other names"
            )
