"""One table of a registry file → one entry, checked by itself; ``models.toml`` shows the format.

What an entry says about other entries, about channels and heads, or about files is not looked at here.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.config import LARGEST_BLOCK
from engine.errors import ConfigurationError, UnknownModel
from engine.registry.channels import NATIVE, find_channel
from engine.registry.entries import (
    SHIPPED,
    DrafterFacts,
    Given,
    ModelEntry,
    Published,
    Shipped,
    Source,
    TargetFacts,
)
from engine.registry.tables import Table
from engine.target.loading import DTYPES
from engine.target.quantize import parse_quantize

NAME = "[a-z0-9][a-z0-9.-]*"
REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
LOOK_UPS = "prompt-lookup(:[0-9]{1,9})?"


def read_entry(name: str, table: Table) -> ModelEntry:
    """The entry that a table describes.

    Raises:
        ConfigurationError: a key is missing, unknown or of the wrong kind; file, model and key are named.
    """
    if not re.fullmatch(NAME, name):
        raise table.refusal(f"a model's name must match {NAME}, not {ascii(name)[:100]}")
    target, _ = _source(table, "target")
    drafter, lookups = _source(table, "drafter")
    if target is None:
        raise table.refusal(f"target is missing; it is {_forms('target')}")
    channels, default = _channels(table)
    facts = table.table("facts") or table.within("facts", {})
    entry = ModelEntry(
        name=name,
        summary=table.needed_text("summary"),
        target=target,
        drafter=drafter,
        lookups=lookups or isinstance(drafter, Shipped),
        channels=channels,
        default_channel=default,
        block=_block(table),
        dtype=_dtype(table),
        quantize=_quantize(table),
        context=table.whole("context"),
        chat_template_kwargs=_chat_template_kwargs(table),
        engine=table.text("engine", NAME),
        target_facts=_target_facts(facts.table("target")),
        drafter_facts=_drafter_facts(facts.table("drafter")),
    )
    facts.finish()
    table.finish()
    if drafter is None and (entry.drafter_facts or entry.block not in ("auto", "1")):
        key = "facts.drafter" if entry.drafter_facts else "block"
        raise table.refusal(f"{key} is of a drafter, and there is none")
    return entry


def _source(table: Table, name: str) -> tuple[Source | None, bool]:
    """Where a target or drafter comes from, and whether look-ups stand beside it."""
    value = table.take(name)
    if value is None or isinstance(value, str):
        if value is None:
            return None, False
        if value == SHIPPED:
            return Shipped(), False
        if name == "drafter" and re.fullmatch(LOOK_UPS, value):
            return Given(value), False
        raise table.refusal(f"{name} must be {_forms(name)}, not {ascii(value)[:100]}")
    if not isinstance(value, dict):
        raise table.refusal(f"{name} must be {_forms(name)}, not {ascii(value)[:100]}")
    inner = table.within(name, value)
    lookups = inner.switch("lookups", default=False) if name == "drafter" else False
    path = inner.text("path")
    source: Source
    if path is not None:
        source = Given(str(_absolute(inner, path)))
    else:
        source = Published(
            inner.needed_text("folder", NAME),
            inner.text("hub", REPOSITORY),
            inner.text("revision", "[0-9a-f]{40}"),
        )
        if source.revision is not None and source.hub is None:
            raise inner.refusal("a revision needs the hub's repository; add hub")
    inner.finish()
    return source, lookups


def _forms(name: str) -> str:
    look_ups = '"prompt-lookup", ' if name == "drafter" else ""
    return f'"{SHIPPED}", {look_ups}{{ folder = "…", hub = "OWNER/NAME" }} or {{ path = "/…" }}'


def _absolute(table: Table, path: str) -> Path:
    folder = Path(os.path.expanduser(path))  # leaves users that it does not know as they are
    if not folder.is_absolute() or "\0" in path:
        raise table.refusal(f"path must begin with / or ~/, not {ascii(path)[:100]}")
    return folder


def _channels(table: Table) -> tuple[tuple[str, ...], str]:
    channels = table.texts("channels") or (NATIVE.name,)
    default = table.text("default_channel") or channels[0]
    for name in (*channels, default):
        try:
            find_channel(name)
        except UnknownModel as error:
            raise table.refusal(f"channels: {error}") from None
    if default not in channels:
        raise table.refusal(f"default_channel {default} is none of its channels: {', '.join(channels)}")
    return channels, default


def _block(table: Table) -> str:
    value = table.take("block")
    if value is None or value == "auto":
        return "auto"
    if type(value) is not int or not 1 <= value <= LARGEST_BLOCK:
        raise table.refusal(
            f'block must be "auto" or a number from 1 to {LARGEST_BLOCK}, not {ascii(value)[:100]}'
        )
    return str(value)


def _dtype(table: Table) -> str | None:
    value = table.text("dtype")
    if value is not None and value not in DTYPES:
        raise table.refusal(f"dtype must be one of {', '.join(DTYPES)}, not {ascii(value)[:100]}")
    return value


def _quantize(table: Table) -> str | None:
    value = table.text("quantize")
    if value is not None:
        try:
            parse_quantize(value)
        except ConfigurationError as error:
            raise table.refusal(f"quantize: {error}") from None
    return value


def _chat_template_kwargs(table: Table) -> Mapping[str, Any]:
    """Plain values by name; a template is given nothing else."""
    inner = table.table("chat_template_kwargs")
    if inner is None:
        return MappingProxyType({})
    return MappingProxyType(inner.plain())


def _target_facts(table: Table | None) -> TargetFacts | None:
    if table is None:
        return None
    facts = TargetFacts(
        hidden_size=table.needed_whole("hidden_size"),
        layers=table.needed_whole("layers"),
        vocab_size=table.needed_whole("vocab_size"),
        head_dims=tuple(sorted(set(table.needed("head_dims", table.wholes("head_dims"))))),
    )
    table.finish()
    return facts


def _drafter_facts(table: Table | None) -> DrafterFacts | None:
    if table is None:
        return None
    facts = DrafterFacts(
        hidden_size=table.whole("hidden_size"),
        layers=table.whole("layers"),
        vocab_size=table.whole("vocab_size"),
        taps=table.wholes("taps", least=0) or (),
        mask_token=table.whole("mask_token", least=0),
        block=table.whole("block"),
    )
    table.finish()
    return facts
