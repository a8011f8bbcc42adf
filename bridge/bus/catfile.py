"""Reading objects through one ``git cat-file`` that stays open: a question costs no process.

It looks again on disk for what it does not know, so objects that a later fetch brings are found. A process
that dies, falls silent or was closed is started anew by the next question. Safe for use by several threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from bridge.bus.child import Process, end
from bridge.errors import BrokenObject, BusError

# Questions on their way at a time: few enough that they and short answers fit into any pipe.
_PIPELINE = 64
_CHUNK = 1 << 16
_MAX_SAID = 4096


class CatFile:
    """One kind of ``cat-file --batch`` process.

    Args:
        start: Starts it with a file as its standard input, leader of its own session.
        contents: Whether answers carry the objects' bytes (``--batch``) or not (``--batch-check``).
    """

    def __init__(self, start: Callable[[BinaryIO], Process], *, contents: bool = False) -> None:
        self._start = start
        self._contents = contents
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._asking = -1
        self._buffer = bytearray()
        self._said = bytearray()

    def ask(
        self, names: Sequence[str], *, timeout_s: float, limit: int | None = None
    ) -> Iterator[tuple[str, str, int, bytes] | None]:
        """The answers in order: sha, kind, size and (with contents) bytes; None for what is not there.

        Args:
            names: Objects as git names them: a sha, ``<commit>:<path>``, a ref.
            timeout_s: Deadline of each bundle of questions.
            limit: Most bytes that one object may have.

        Raises:
            BrokenObject: An object is larger than `limit`.
            BusError: The process died or did not answer in time; what it said is in the message.
        """
        for begin in range(0, len(names), _PIPELINE):
            yield from self._ask(names[begin : begin + _PIPELINE], timeout_s, limit)

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _ask(
        self, names: Sequence[str], timeout_s: float, limit: int | None
    ) -> list[tuple[str, str, int, bytes] | None]:
        # A name with a line break would be two questions; no object of ours has one.
        asked = [name for name in names if "\n" not in name]
        with self._lock:
            try:
                answers = iter(self._exchange(asked, time.monotonic() + timeout_s, limit))
            except BaseException:
                self._end()  # whatever of an answer is still on its way belongs to nobody
                raise
        return [next(answers) if "\n" not in name else None for name in names]

    def _exchange(
        self, names: Sequence[str], deadline: float, limit: int | None
    ) -> list[tuple[str, str, int, bytes] | None]:
        if self._process is None:
            self._open()
        question = b"".join(os.fsencode(name) + b"\n" for name in names)
        try:
            while question:
                question = question[os.write(self._asking, question) :]
        except BrokenPipeError:
            raise self._died() from None
        return [self._answer(deadline, limit) for _ in names]

    def _answer(self, deadline: float, limit: int | None) -> tuple[str, str, int, bytes] | None:
        while (end_of_line := self._buffer.find(b"\n")) < 0:
            self._read(deadline)
        words = self._take(end_of_line + 1).decode("utf-8", "replace").split()
        if len(words) != 3 or not words[2].isdigit():
            return None  # missing, ambiguous, or a name with blanks that is not there
        sha, kind, size = words[0], words[1], int(words[2])
        if not self._contents:
            return sha, kind, size, b""
        if limit is not None and size > limit:
            raise BrokenObject(f"the {kind} {sha[:12]} has {size} bytes, but at most {limit} are read")
        while len(self._buffer) < size + 1:
            self._read(deadline)
        return sha, kind, size, self._take(size + 1)[:size]

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _read(self, deadline: float) -> None:
        process = self._process
        assert process is not None and process.stdout is not None  # noqa: PT018, S101 - opened before
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            raise BusError("git cat-file did not answer in time")
        chunk = os.read(process.stdout.fileno(), _CHUNK)
        self._hear()
        if not chunk:
            raise self._died()
        self._buffer += chunk

    def _hear(self) -> None:
        """Take what it says on standard error, so that a full pipe never blocks it; the beginning is kept."""
        process = self._process
        if process is None or process.stderr is None:
            return
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(process.stderr.fileno(), _CHUNK):
                self._said += chunk[: _MAX_SAID - len(self._said)]

    def _died(self) -> BusError:
        self._hear()
        said = self._said.decode("utf-8", "replace").strip().splitlines()
        return BusError(f"git cat-file ended: {said[0] if said else 'without a word'}")

    def _open(self) -> None:
        reading, self._asking = os.pipe()
        with os.fdopen(reading, "rb") as source:
            self._process = self._start(source)
        if self._process.stderr is not None:
            os.set_blocking(self._process.stderr.fileno(), False)

    def _end(self) -> None:
        process, self._process = self._process, None
        self._buffer.clear()
        self._said.clear()
        if process is not None:
            os.close(self._asking)
            end(process)
