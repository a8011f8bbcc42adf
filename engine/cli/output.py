"""Standard output, told apart from all other files when it fails: a full disk, or a letter it cannot show."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from engine.errors import EngineError


class Output:
    """A text or byte stream whose failures are our errors; a reader that went away stays BrokenPipeError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        if name in {"write", "flush"}:
            return _told()(found)
        return Output(found) if name == "buffer" else found


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EngineError(f"standard output cannot be written: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        letter = error.object[error.start]
        raise EngineError(
            f"standard output cannot show {letter!a} in {error.encoding}; set PYTHONIOENCODING=utf-8"
        ) from error


@contextmanager
def guarded_output() -> Iterator[None]:
    """Let standard output fail as `Output` does while the block runs."""
    stream: Any = sys.stdout
    if stream is None:
        raise EngineError("standard output is closed; send it to a file, or to /dev/null")
    with redirect_stdout(Output(stream)):
        yield


def give_up_output() -> bool:
    """Flush standard output for the last time; return whether that failed. Python does not try again then."""
    stream: Any = sys.stdout
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        with suppress(OSError):  # a stream without a file below
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False
