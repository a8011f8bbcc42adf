"""How far the keys and values a KV policy leaves lie from the native ones, on live caches.

Two sets of caches take in the same prompt, one under the policy and one natively. Of every layer the policy
applies to, what the next query would see is compared position by position:

    distortion = sum over layers, heads, positions of |x - y|² / sum of |x|²      x native, y the policy's

A position that the native cache sees and the policy's no longer holds counts as lost, y = 0. What the policy
sees beyond the native cache (pinned positions of a sliding layer) has nothing to be compared with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.cache.stats import KVUse, VisibleRows, held, kv_use
from engine.config import Engine
from engine.device import read_float, wait
from engine.errors import GenerationError
from engine.evaluation.report import Distortion
from engine.session import Session


@dataclass(frozen=True)
class Examined:
    """What caches of a policy held after a prompt.

    Attributes:
        distortion: of what they held.
        use: the layers the policy applies to, the numbers of keys and values held there, and their bytes.
            Of plain numbers that is their dtype's; codes count as they are stored.
    """

    distortion: Distortion
    use: KVUse


def held_after(engine: Engine, tokens: Sequence[int]) -> dict[int, VisibleRows]:
    """What caches of the engine's policy hold of a prompt, by layer.

    Args:
        engine: the models and switches.
        tokens: the whole prompt.
    """
    with _session(engine) as session:
        _take_in(session, tokens, engine.options.prefill_chunk)
        return _rows(session.caches)


def distortion(
    native: Mapping[int, VisibleRows], ours: Mapping[int, VisibleRows], layers: Sequence[int]
) -> Distortion:
    """Relative squared error of keys and of values over some layers; 0 for none.

    Raises:
        GenerationError: a layer holds nothing that could be compared.
    """
    keys, values = _Sums(), _Sums()
    for layer in layers:
        if layer not in native or layer not in ours:
            raise GenerationError(f"layer {layer} holds no keys and values to compare")
        reference, found = native[layer], ours[layer]
        keys.add(reference.keys, _aligned(found.positions, found.keys, reference))
        values.add(reference.values, _aligned(found.positions, found.values, reference))
    return Distortion(keys.ratio, values.ratio)


class _Sums:
    """Squared differences and squares, added up on the host layer by layer."""

    def __init__(self) -> None:
        self._difference = self._whole = 0.0

    def add(self, reference: mx.array, ours: mx.array) -> None:
        """Two arrays of one shape."""
        reference, ours = reference.astype(mx.float32), ours.astype(mx.float32)
        self._difference += read_float(mx.square(reference - ours).sum())
        self._whole += read_float(mx.square(reference).sum())

    @property
    def ratio(self) -> float:
        """The relative squared error."""
        return self._difference / self._whole if self._whole else 0.0


def _aligned(positions: Sequence[int], rows: mx.array, reference: VisibleRows) -> mx.array:
    """Rows at the reference's positions, zeros where there is none: [1, KV heads, n, D]."""
    place = {position: index for index, position in enumerate(positions)}
    index = [place.get(position, len(positions)) for position in reference.positions]
    lost = mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype)
    return mx.concatenate([rows, lost], axis=2)[:, :, mx.array(index)]


def examine(
    engine: Engine, tokens: Sequence[int], generated: Sequence[int], native: Mapping[int, VisibleRows]
) -> Examined:
    """Run a prompt and what was generated under the engine's policy once more, and look into the caches.

    Args:
        engine: the models and switches.
        tokens: the prompt.
        generated: what followed; the last token is in no cache.
        native: what `held_after` gave for the prompt and native caches.

    Returns:
        The distortion after the prompt, and what is held after all of it.
    """
    layers = engine.policy.chosen_layers(engine.target.target.model)
    with _session(engine) as session:
        _take_in(session, tokens, engine.options.prefill_chunk)
        found = distortion(native, _rows(session.caches), layers)
        if generated[:-1]:
            session.take_in(generated[:-1])
        return Examined(found, kv_use(session.caches) or _plain_use(session.caches, layers))


def _session(engine: Engine) -> Session:
    return Session(
        engine.target.target,
        None,
        headroom=1,
        compiled=False,
        policy=engine.policy,
        restoration=engine.restoration,
    )


def _take_in(session: Session, tokens: Sequence[int], chunk: int) -> None:
    """Compute a prompt as decoding does: in chunks, its last token by itself."""
    for start in range(0, len(tokens) - 1, chunk):
        session.take_in(tokens[start : min(start + chunk, len(tokens) - 1)])
    session.transaction.begin(len(session.carried) + 1)
    session.forward(mx.array([[*session.carried, tokens[-1]]], mx.int32))
    session.commit(tokens[-1:], None)


def _rows(caches: Sequence[Any]) -> dict[int, VisibleRows]:
    """What the caches hold, computed; layers without keys and values are left out."""
    found = {layer: rows for layer, cache in enumerate(caches) if (rows := held(cache)) is not None}
    wait([(rows.keys, rows.values) for rows in found.values()])
    return found


def _plain_use(caches: Sequence[Any], layers: Sequence[int]) -> KVUse:
    """What some layers hold in plain numbers."""
    found = _rows(caches)
    pairs = [(found[layer].keys, found[layer].values) for layer in layers]
    values = sum(keys.size + rows.size for keys, rows in pairs)
    return KVUse(tuple(layers), values, sum(keys.nbytes + rows.nbytes for keys, rows in pairs))
