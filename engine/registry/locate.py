"""An entry of a registry → where its files lie on this machine, or the places that were looked at.

Places of a published model, the first that is a folder: ``KAKEYA_MODEL_<FOLDER>`` of the environment, which
must name one where it is set; ``~/kakeya-models/<folder>``; the hub's cache. Nothing here uses the network
but `fetch`, and that is only for who asks for it in so many words. It takes weights in safetensors files,
configurations and tokenizers: no Python, and nothing that would be unpickled.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.config import Options
from engine.drafters.registry import WITH_LOOKUP
from engine.errors import ConfigurationError, ModelError, ModelNotHere, wrap_errors
from engine.registry.channels import Channel
from engine.registry.entries import Given, ModelEntry, Published, Shipped, Source
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET

FETCHED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files of a repository that are taken, by name."""


@dataclass(frozen=True)
class Places:
    """Where this machine may hold models.

    Attributes:
        environment: the process's environment.
        home: the user's home.
        hub_cache: the hub's cache; None: where its library keeps it.
        hub: address of the hub, for `fetch` alone; None: the library's own.
    """

    environment: Mapping[str, str]
    home: Path
    hub_cache: Path | None = None
    hub: str | None = None

    @classmethod
    def of_machine(cls) -> "Places":
        """Those of the running process."""
        return cls(os.environ, Path.home())

    def of(self, source: Published) -> list[tuple[str, Path | None]]:
        """Every place of a published model in order, with its name for people; None: nothing is there."""
        places = self.folders(source)
        if source.hub is not None:
            named = source.hub if source.revision is None else f"{source.hub} at {source.revision[:12]}"
            places.append((f"the hub's cache of {named}", self._cached(source.hub, source.revision)))
        return places

    def folders(self, source: Published) -> list[tuple[str, Path | None]]:
        """Those of them that people fill by themselves.

        Raises:
            ConfigurationError: the variable names something that is no folder.
        """
        variable = variable_of(source.folder)
        value = self.environment.get(variable)
        named = Path(os.path.expanduser(value)) if value else None
        if named is not None and not named.is_dir():
            raise ConfigurationError(f"{variable} is {value!r}, which is no folder; correct it, or unset it")
        return [
            (variable, named),
            (f"~/kakeya-models/{source.folder}", self.home / "kakeya-models" / source.folder),
        ]

    def _cached(self, repository: str, revision: str | None) -> Path | None:
        """The folder of a repository in the hub's cache, found without the network."""
        from huggingface_hub import try_to_load_from_cache

        def refusal(reason: str) -> ConfigurationError:
            return ConfigurationError(f"{repository} is no repository of the hub: {reason}")

        with wrap_errors(refusal):
            found = try_to_load_from_cache(repository, "config.json", self.hub_cache, revision)
        return Path(found).parent if isinstance(found, str) else None


@dataclass(frozen=True)
class Located:
    """An entry with its files.

    Attributes:
        entry: the entry.
        target: folder of the target, for `engine.target.loading.load_target`.
        drafter: text for `engine.drafters.registry.open_drafter`; None: nothing drafts.
    """

    entry: ModelEntry
    target: Path
    drafter: str | None

    def options(self, channel: Channel) -> Options:
        """The switches of an engine of its own for this model and channel."""
        return Options(
            model=self.target,
            drafter=self.drafter or "none",
            block=self.entry.block,
            dtype=self.entry.dtype,
            kv=channel.policy.spec,
            quantize=self.entry.quantize,
        )


def variable_of(folder: str) -> str:
    """The variable of the environment that may name a published model's folder."""
    return "KAKEYA_MODEL_" + re.sub("[^A-Z0-9]", "_", folder.upper())


def locate(entry: ModelEntry, places: Places) -> Located:
    """Find the files of an entry, target and drafter.

    Raises:
        ConfigurationError: a variable of the environment names a folder for one of them that is not there.
        ModelNotHere: one of them is in none of its places; the message lists them and says what to do.
    """
    target = _folder(entry, "target", entry.target, places)
    if entry.drafter is None:
        return Located(entry, target, None)
    drafter = _spec(entry, entry.drafter, places)
    return Located(entry, target, f"{WITH_LOOKUP}{drafter}" if entry.lookups else drafter)


def fetch(entry: ModelEntry, places: Places) -> Located:
    """Download from the hub what of an entry nobody has put on this machine, then find it all.

    What the hub's cache holds is looked through again: a download may have been broken off.

    Raises:
        ModelNotHere: a part is not here, and no repository is named.
        ModelError: the hub cannot be reached, refuses, or does not have it.
    """
    for source in (entry.target, entry.drafter):
        if isinstance(source, Published) and source.hub is not None and not _first(places.folders(source)):
            _download(source.hub, source.revision, places)
    return locate(entry, places)


def _folder(entry: ModelEntry, part: str, source: Source, places: Places) -> Path:
    """The folder of a target or drafter."""
    if isinstance(source, Shipped):
        return SHIPPED_TARGET if part == "target" else SHIPPED_DRAFTER
    if isinstance(source, Given):
        return Path(source.spec)
    places_of = places.of(source)
    if (folder := _first(places_of)) is not None:
        return folder
    variable = variable_of(source.folder)
    looked = "; ".join(
        f"{place} ({'not set' if path is None and place == variable else 'not there'})"
        for place, path in places_of
    )
    remedy = f"put {source} in ~/kakeya-models/{source.folder}, or name its folder in {variable}"
    if source.hub is not None:
        remedy += ", or let the server fetch it with --download"
    raise ModelNotHere(
        f"the {part} of the model {entry.name} is not on this machine; looked at: {looked}; {remedy}"
    )


def _spec(entry: ModelEntry, source: Source, places: Places) -> str:
    return source.spec if isinstance(source, Given) else str(_folder(entry, "drafter", source, places))


def _first(places: list[tuple[str, Path | None]]) -> Path | None:
    """The first place that is a folder."""
    folders = (path for _, path in places)
    return next((path.resolve() for path in folders if path is not None and path.is_dir()), None)


def _download(repository: str, revision: str | None, places: Places) -> None:
    """Bring a repository's files into the hub's cache."""
    from huggingface_hub import snapshot_download

    def refusal(reason: str) -> ModelError:
        return ModelError(f"{repository} cannot be downloaded: {reason}")

    with wrap_errors(refusal):
        snapshot_download(
            repository,
            revision=revision,
            cache_dir=places.hub_cache,
            endpoint=places.hub,
            allow_patterns=list(FETCHED),
        )
