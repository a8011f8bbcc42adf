"""The entries of a registry: what a model is called, where its parts come from, which channels it offers.

They are made by `engine.registry.reading` from a file and by `engine.registry.registry` for a single folder.
Where the files lie on this machine is in `engine.registry.locate`, whether the parts go together in
`engine.registry.consistency`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from engine.errors import ConfigurationError
from engine.registry.channels import NATIVE, Channel, find_channel

SHIPPED = "shipped"


@dataclass(frozen=True)
class Shipped:
    """One of the demo pair that comes with the project; the drafter has look-ups beside it."""

    def __str__(self) -> str:
        return SHIPPED


@dataclass(frozen=True)
class Published:
    """A model that is found by the name of its folder, or in the hub's cache.

    Attributes:
        folder: that name.
        hub: its repository on the hub, ``OWNER/NAME``; None: it is on none.
        revision: the commit there, 40 hexadecimal digits; None: the newest, and of the cache whatever it
            calls ``main``.
    """

    folder: str
    hub: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.hub or self.folder


@dataclass(frozen=True)
class Given:
    """A folder on this machine by its path, or for a drafter any text that ``--drafter`` takes.

    Attributes:
        spec: the path or text.
    """

    spec: str

    def __str__(self) -> str:
        return self.spec


Source = Shipped | Published | Given


@dataclass(frozen=True)
class TargetFacts:
    """What the configuration of a target says about its shape.

    Attributes:
        hidden_size: width of a row between layers.
        layers: decoder layers.
        vocab_size: token ids it knows.
        head_dims: values of a row of keys or values, every size that an attention layer has, ascending.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    head_dims: tuple[int, ...]


@dataclass(frozen=True)
class DrafterFacts:
    """What the configuration of a drafter says about itself and its target; None: it does not say.

    Attributes:
        hidden_size: width of the target's rows.
        layers: decoder layers of the target.
        vocab_size: token ids of the target.
        taps: layers of the target that it reads, from 0.
        mask_token: id of the token that stands for an unknown one.
        block: tokens of a block it was made for.
    """

    hidden_size: int | None = None
    layers: int | None = None
    vocab_size: int | None = None
    taps: tuple[int, ...] = ()
    mask_token: int | None = None
    block: int | None = None


@dataclass(frozen=True)
class ModelEntry:
    """One model of a registry.

    Attributes:
        name: as clients ask for it.
        summary: one line for people.
        target: where the target comes from.
        drafter: where its drafter comes from; None: nothing drafts.
        lookups: prompt look-ups stand beside that drafter.
        channels: names of the KV channels it offers, each in `engine.registry.channels`.
        default_channel: the one of them that is used where none is named.
        block: ``auto`` or a length, as `engine.config.Options` takes it.
        dtype: likewise.
        quantize: likewise.
        context: no more positions than these are used; None: as many as the model was made for.
        chat_template_kwargs: given to the chat template unless a request says otherwise.
        engine: a foreign engine that is to run it; None: this one.
        target_facts: what its configuration is to say; None: nothing is known beforehand.
        drafter_facts: likewise of the drafter.
    """

    name: str
    summary: str
    target: Source
    drafter: Source | None = None
    lookups: bool = False
    channels: tuple[str, ...] = (NATIVE.name,)
    default_channel: str = NATIVE.name
    block: str = "auto"
    dtype: str | None = None
    quantize: str | None = None
    context: int | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    engine: str | None = None
    target_facts: TargetFacts | None = None
    drafter_facts: DrafterFacts | None = None

    def channel(self, name: str | None) -> Channel:
        """The channel of that name, the default one for None.

        Raises:
            UnknownModel: there is no such channel.
            ConfigurationError: there is, but this model does not offer it; the message lists what it offers.
        """
        channel = find_channel(self.default_channel if name is None else name)
        if channel.name not in self.channels:
            raise ConfigurationError(
                f"the model {self.name} does not offer the KV channel {channel.name}; "
                f"it offers {', '.join(self.channels)}"
            )
        return channel
