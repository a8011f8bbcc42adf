"""KV channels: the names under which clients choose which keys and values are kept, and how.

A channel stands for one policy of `engine.cache.policy`, whole, so that an id such as ``demo@affine8`` says
all there is to say. Bounds are part of the name: how much of a text a model still sees is nothing to look up.
Which models offer a channel is in `engine.registry.registry`; here is only whether its code fits their heads.
Whether a model's attention can read it is for `engine.target.attention.refuse_policy` to say.

Restored policies have no channel: they need a projector of the model, and bound nothing here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.cache.policy import CODES, KVPolicy, parse_policy
from engine.errors import ConfigurationError, UnknownModel

SEPARATOR = "@"  # between the name of a model and that of a channel


@dataclass(frozen=True)
class Channel:
    """A named policy.

    Attributes:
        name: lower-case letters, digits and hyphens.
        policy: what it stands for.
        help: one line for people.
    """

    name: str
    policy: KVPolicy
    help: str


def _table(*rows: tuple[str, str, str]) -> dict[str, Channel]:
    return {name: Channel(name, parse_policy(policy), text) for name, policy, text in rows}


CHANNELS: dict[str, Channel] = _table(
    ("native", "native", "all that the model can see, as it is"),
    ("full-kv", "full-kv", "sliding layers keep all positions, to go on from any of them"),
    ("sliding-bounded-16", "sliding-bounded:0,16", "sliding layers keep 16 positions; full layers all"),
    ("sliding-bounded-512", "sliding-bounded:0,512", "sliding layers keep 512 positions; full layers all"),
    ("sink-window-256", "sink-window:4,256", "the first 4 and the last 256 positions; the rest is forgotten"),
    ("sink-window-1024", "sink-window:4,1024", "the first 4 and the last 1,024 positions"),
    ("sink-window-4096", "sink-window:4,4096", "the first 4 and the last 4,096 positions"),
    ("affine8", "affine:8,64", "8 bits a value in mlx's affine code, which attention reads"),
    ("affine4", "affine:4,64", "4 bits a value, likewise"),
    ("rotated8", "rotated:8,64", "8 bits a value after a Hadamard rotation"),
    ("rotated4", "rotated:4,64", "4 bits a value, likewise; what affine4 costs, with less error"),
    ("lattice-d4", "lattice:d4,38", "points of the lattice D4 as the published codec gives them"),
    ("lattice-e8", "lattice:e8,38", "points of the lattice E8 as the published codec gives them"),
    ("lattice-packed", "lattice-packed:e8,5", "points of the lattice E8 in exactly 5 bits a value"),
)
"""Every channel by its name, in the order in which they are listed."""
NATIVE = CHANNELS["native"]


def find_channel(name: str) -> Channel:
    """The channel of that name.

    Raises:
        UnknownModel: there is none; the message lists those there are.
    """
    if name not in CHANNELS:
        raise UnknownModel(f"there is no KV channel {ascii(name)[:100]}; there are {', '.join(CHANNELS)}")
    return CHANNELS[name]


def refuse_channel(channel: Channel, head_dims: Iterable[int]) -> None:
    """Make sure that a channel's code can be made for every head of a model.

    Args:
        channel: the channel.
        head_dims: values of a row of keys or values, of every attention layer; repeated or not.

    Raises:
        ConfigurationError: one of them does not fit; the message names it and what the code would need.
    """
    dims = sorted(set(head_dims))
    if misfit := _misfit(channel, dims):
        raise ConfigurationError(
            f"the KV channel {channel.name} ({channel.policy.spec}) does not fit this model's heads: "
            f"{misfit}; channels that fit: {', '.join(fitting(dims))}"
        )


def fitting(head_dims: Iterable[int]) -> list[str]:
    """Names of the channels whose code fits heads of these dimensions; the native one always does."""
    dims = sorted(set(head_dims))
    return [name for name, channel in CHANNELS.items() if _misfit(channel, dims) is None]


def _misfit(channel: Channel, head_dims: Iterable[int]) -> str | None:
    """Why no code can be made for one of these dimensions; None if it can for all."""
    code = CODES.get(channel.policy.kind)
    if code is None:
        return None
    try:
        for dim in head_dims:
            code.codec(channel.policy.values, dim)
    except ConfigurationError as error:
        return str(error)
    return None
