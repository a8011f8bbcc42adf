"""Landlock: rules of the kernel that a process puts on itself and everything it starts, without privileges.

Here they say where a job may write, and which files it may not read, not even those that are made or put in
their place while it runs; that it signals and traces nothing outside of itself; and, where there is no
network namespace, that no socket with an abstract name is reached. See Linux's
``Documentation/userspace-api/landlock.rst``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from functools import reduce

from bridge.runner.isolation import libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_CHANGE = sum(1 << bit for bit in range(4, 13))  # remove and make entries of folders
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SINCE = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_SCOPES = {6: 1 | 2}  # abstract sockets, signals
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
TERMINALS = ("/dev/pts", "/dev/ptmx")  # everybody's, unless a view has its own


def version() -> int:
    """The version of Landlock that the kernel speaks; 0: none."""
    if not libc.LINUX:
        return 0
    try:
        return libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


class Rules:
    """A set of rules that is not in force yet: nothing may be written, and everything read and run.

    Args:
        hide: Files and folders that cannot be read; everything beside them that is there now can.
        listing: Leave every folder to be listed, because what is hidden is covered.

    Raises:
        OSError: The kernel does not know Landlock.
    """

    def __init__(self, hide: Iterable[str], *, listing: bool = False) -> None:
        known = version()
        reading = _EXECUTE | _READ_FILE | (0 if listing else _READ_DIR)
        self._writing = reduce(
            lambda all_, item: all_ | item[1] if known >= item[0] else all_,
            _SINCE.items(),
            _WRITE_FILE | _CHANGE,
        )
        self._reading = reading
        scopes = sum(bits for since, bits in _SCOPES.items() if known >= since)
        attributes = struct.pack("=QQQ", self._writing | reading, 0, scopes)[: 24 if scopes else 8]
        buffer = ctypes.create_string_buffer(attributes, len(attributes))
        self._ruleset = libc.syscall(_CREATE_RULESET, buffer, len(attributes), 0)
        os.set_inheritable(self._ruleset, False)
        self._allow_reading_beside([os.path.realpath(name) for name in hide])

    def allow_writing(self, places: Iterable[str]) -> None:
        """Let files and folders be written and read; absent ones are left out."""
        for place in places:
            self._allow(place, self._writing | self._reading)

    def enforce(self) -> None:
        """Put the rules in force for this process, for good. It must be unable to gain privileges.

        Raises:
            OSError: The kernel said no.
        """
        libc.syscall(_RESTRICT_SELF, self._ruleset, 0)

    def _allow_reading_beside(self, hidden: list[str]) -> None:
        """Allow every entry beside the ways to hidden places. What is on such a way can only be walked."""
        ways = {"/"}
        for place in hidden:
            while (place := os.path.dirname(place)) != "/":
                ways.add(place)
        for way in ways:
            with contextlib.suppress(OSError):
                for name in os.listdir(way):
                    entry = os.path.join(way, name)
                    # A link is followed to where it leads, which has rules of its own.
                    if entry not in ways and entry not in hidden and not os.path.islink(entry):
                        self._allow(entry, self._reading)

    def _allow(self, place: str, access: int) -> None:
        try:
            handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if not stat.S_ISDIR(os.fstat(handle).st_mode):
                access &= _ON_FILES
            rule = struct.pack("=Qi", access, handle)
            buffer = ctypes.create_string_buffer(rule, len(rule))
            libc.syscall(_ADD_RULE, self._ruleset, _PATH_BENEATH, buffer, 0)
        finally:
            os.close(handle)
