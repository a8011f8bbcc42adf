"""Where the host meets the device: launching graphs, waiting for them, and reading numbers back.

Decoding goes through these, so that the transfers of a round can be counted.
"""

from typing import Any

import mlx.core as mx


def launch(*trees: Any) -> None:
    """Start computing arrays (None stands for nothing) without waiting."""
    mx.async_eval([tree for tree in trees if tree is not None])  # type: ignore[no-untyped-call]


def wait(*trees: Any) -> None:
    """Compute arrays and wait for them; no transfer."""
    mx.eval([tree for tree in trees if tree is not None])


def wait_for(array: mx.array) -> None:
    """Wait for one launched array and nothing queued after it (`mx.eval` would wait for the whole stream)."""
    memoryview(array).release()  # type: ignore[arg-type]  # the stub does not know the buffer protocol


def read_token(array: mx.array) -> int:
    """One integer of an array [] or [1]: waits and transfers."""
    return int(array.item())  # type: ignore[arg-type]  # typed as any scalar


def read_float(array: mx.array) -> float:
    """One number of an array []: waits and transfers."""
    return float(array.item())  # type: ignore[arg-type]  # typed as any scalar


def read_tokens(array: mx.array) -> list[int]:
    """The integers of an array [N]: waits and transfers, once."""
    return [int(token) for token in array.tolist()]  # type: ignore[arg-type, union-attr]  # typed as any nesting


def read_tail(array: mx.array, start: int) -> list[int]:
    """The integers of an array [N] from ``start`` on: waits for this array alone and copies no others."""
    with memoryview(array) as view:  # type: ignore[arg-type]  # the stub does not know the buffer protocol
        return view[start:].tolist()
