"""How much one job may take of the machine: numbers, decided by the policy, enforced by the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True)
class Limits:
    """What a job may have at most, all its processes together unless said otherwise.

    Attributes:
        memory_bytes: Resident memory; None: four fifths of what the machine has.
        disk_bytes: What lies in the job's own folders.
        files: How many files and folders lie there.
        processes: Processes and threads.
        output_bytes: What it prints.
        file_bytes: One file.
        open_files: Open descriptors of one process.
    """

    memory_bytes: int | None = None
    disk_bytes: int = 16 * _GIB
    files: int = 200_000
    processes: int = 1024
    output_bytes: int = 8 << 20
    file_bytes: int = 4 * _GIB
    open_files: int = 4096
