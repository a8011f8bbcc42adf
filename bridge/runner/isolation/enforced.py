"""What is enforced around a job on a machine, item by item: facts of every result, and of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

NOT_ENFORCED = "not enforced"


@dataclass(frozen=True)
class Enforced:
    """What keeps a job in, in words that start with the means; `NOT_ENFORCED` where nothing does.

    Attributes:
        network: That it reaches no other machine and no program that listens here; ``open``: it may.
        tree: That nothing it started outlives it.
        writes: That it writes nowhere but into its own folders.
        credentials: That it cannot read the runner's keys and state and the user's credentials.
        processes: That it can neither signal nor look into other programs.
        calls: That kernel interfaces that no job needs are closed.
        memory: That it takes no more memory, processes and threads than it may.
        disk: That its folders hold no more bytes and files than they may.
    """

    network: str = NOT_ENFORCED
    tree: str = NOT_ENFORCED
    writes: str = NOT_ENFORCED
    credentials: str = NOT_ENFORCED
    processes: str = NOT_ENFORCED
    calls: str = NOT_ENFORCED
    memory: str = NOT_ENFORCED
    disk: str = NOT_ENFORCED


def words(*means: tuple[str, bool]) -> str:
    """The means that are there, in words."""
    return " and ".join(name for name, there in means if there) or NOT_ENFORCED
