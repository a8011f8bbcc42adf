"""Takes what a job left: the evidence report in its result folder, the log, and nothing else.

A job may have left anything there: links, devices, files that share their content with one outside. The
report is opened without following links and must be a plain file of its own, within the size cap.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from bridge.evidence.redact import redact

MAX_EVIDENCE = 32 << 20


class NotCollected(Exception):
    """The report cannot be taken; the message says why."""


def evidence(folder: Path, name: str) -> bytes | None:
    """The bytes of a report; None when the job wrote none.

    Raises:
        NotCollected: What lies there is not a plain file of its own, or too big.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        inside = os.open(folder, flags | os.O_DIRECTORY)  # the job may have put a link in its place, too
        try:
            handle = os.open(name, flags, dir_fd=inside)
        finally:
            os.close(inside)
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


def log(written: IO[bytes], secrets: Mapping[str, str]) -> bytes:
    """The log without secrets, from the open file it was written to; its size was capped on the way."""
    written.seek(0)
    return redact(written.read(), secrets)
