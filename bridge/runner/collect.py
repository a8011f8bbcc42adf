"""Takes what a job left: the evidence report in its result folder, the log, and nothing else.

A job may have left anything there: links, devices, files that share their content with one outside. The
report is opened without following links and must be a plain file of its own, within the size cap.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from bridge.evidence.redact import Secrets

MAX_EVIDENCE = 32 << 20


class NotCollected(Exception):
    """The report cannot be taken; the message says why."""


def evidence(folder: Path, name: str) -> bytes | None:
    """The bytes of a report; None when the job wrote none.

    Args:
        folder: The job's result folder, in the job's own folder, either of which it may have replaced.
        name: The report's file name.

    Raises:
        NotCollected: What lies there is not a plain file of its own, or too big.
    """
    jobs, own, out = folder.parents[1], folder.parent.name, folder.name
    try:
        handle = _open_inside(jobs, own, out, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotCollected(f"the report {name} cannot be opened: {error.strerror}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(handle)
        raise NotCollected(f"the report {name} is not a plain file of its own")
    with os.fdopen(handle, "rb") as source:
        data = source.read(MAX_EVIDENCE + 1)
    if len(data) > MAX_EVIDENCE:
        raise NotCollected(f"the report {name} has more than {MAX_EVIDENCE} bytes")
    return data


def _open_inside(base: Path, *parts: str) -> int:
    """A file below `base`, opened for reading step by step, so that no part of its path is a link.

    Raises:
        OSError: It is not there, or a part of the path is something else.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for index, part in enumerate(parts, 1):
        try:
            inside = os.open(part, flags | (os.O_DIRECTORY if index < len(parts) else 0), dir_fd=handle)
        finally:
            os.close(handle)
        handle = inside
    return handle


def log(written: IO[bytes], secrets: Secrets, *, broken_off: bool) -> bytes:
    """The log without secrets, from the open file it was written to; its size was capped on the way.

    Args:
        written: The open file.
        secrets: What must not stand in it.
        broken_off: The cap came before the end of the output.
    """
    written.seek(0)
    return secrets.cut(written.read(), broken_off=broken_off)
