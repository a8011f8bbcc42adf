"""Profiles for macOS's ``sandbox-exec``: what a job may not do there, and the command line that says so.

Everything is allowed that is not denied: Metal needs more of the system than anybody can list. Denied are
the network, writing outside of the job's folders, reading what is hidden, signalling and looking into other
programs, and asking services of the system to start something that would not be in the sandbox.

A job may talk to itself, as to a server it tests, through Unix sockets in its room. The loopback device stays
closed: other programs of the machine listen there, too, and no rule can tell them from the job.

Paths are handed over as parameters beside the profile, never written into it, so no path can be a rule.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bridge.errors import MachineError
from bridge.proc import run_program

PROGRAM = "/usr/bin/sandbox-exec"
_TRIAL = ("/usr/bin/true",)
_TRIAL_S = 10.0
_DEVICES = ("/dev/null", "/dev/zero", "/dev/tty", "/dev/ptmx", "/dev/dtracehelper")
# Of the user's terminals, only those that the job itself opened.
_TERMINAL, _OWN = '(regex #"^/dev/ttys[0-9]+$")', '(extension "com.apple.sandbox.pty")'
_TERMINALS = (
    f"(deny file-read-data {_TERMINAL})",
    f"(allow file-read* file-write* (require-all {_TERMINAL} {_OWN}))",
)
_OWN_SOCKETS = (
    '(allow network-bind network-inbound (local unix-socket (subpath (param "ROOM"))))',
    '(allow network-outbound (remote unix-socket (subpath (param "ROOM"))))',
)
_NAMES = "/private/var/run/mDNSResponder"  # where names become addresses
# Services that start programs for others, or hand out keys.
_SERVICES = (
    *("com.apple.coreservices.launchservicesd", "com.apple.coreservices.appleevents", "com.apple.lsd.open"),
    *("com.apple.lsd.mapdb", "com.apple.xpc.smd", "com.apple.SecurityServer", "com.apple.securityd"),
    *("com.apple.securityd.xpc", "com.apple.pasteboard.1"),
)
# Rules that some version of macOS may not know, from those that matter most to those that matter least.
_STRICT = (
    "(deny signal) (allow signal (target same-sandbox))",
    "(deny process-info*) (allow process-info* (target same-sandbox))",
    "(deny appleevent-send)",
    "(deny lsopen)",
    "(deny job-creation)",
    "(deny mach-priv-task-port)",
    "(deny mach-lookup {})".format(" ".join(f'(global-name "{name}")' for name in _SERVICES)),
)


@dataclass(frozen=True)
class Profile:
    """A profile whose paths are parameters.

    Attributes:
        hidden: Files and folders that cannot be read or listed.
        network: Whether it leaves the job the machine's network.
        strict: Whether it holds all the rules, and not only those on network, files and keys.
        sockets: Whether it leaves a job without the network Unix sockets in its room.
    """

    hidden: tuple[str, ...]
    network: bool
    strict: bool
    sockets: bool = False

    def text(self) -> str:
        """The rules; of those that speak of the same thing, the last one holds."""
        lines = ["(version 1)", "(allow default)", *self._network()]
        lines += ["(deny file-write*)", _rule("allow", "file-write* file-ioctl", map(_literal, _DEVICES))]
        lines += _TERMINALS
        if self.hidden:  # what a file is may be asked: the way to the room leads through hidden folders
            places = [f'(subpath (param "HIDDEN{number}"))' for number in range(len(self.hidden))]
            lines.append(_rule("deny", "file-read-data file-read-xattr file-write*", places))
        lines.append('(allow file-read* file-write* (subpath (param "ROOM")))')
        return "\n".join([*lines, *(_STRICT if self.strict else ())]) + "\n"

    def command(self, argv: Sequence[str], room: str) -> list[str]:
        """The command line that runs `argv` in the sandbox.

        Args:
            argv: The program, by its whole path, and its arguments.
            room: The folder that may be written.
        """
        values = {"ROOM": os.path.realpath(room)}
        values |= {f"HIDDEN{number}": path for number, path in enumerate(self.hidden)}
        given = [part for name, value in values.items() for part in ("-D", f"{name}={value}")]
        return [PROGRAM, *given, "-p", self.text(), *argv]

    def _network(self) -> list[str]:
        if not self.network:
            return ["(deny network*)", *(_OWN_SOCKETS if self.sockets else ())]
        names = f"(remote unix-socket {_literal(_NAMES)})"
        return ["(deny network-outbound (remote unix-socket))", f"(allow network-outbound {names})"]


def hidden_paths(hide: Iterable[str]) -> tuple[str, ...]:
    """Each path as it is written and as it is without links: rules are about the latter, once it exists."""
    return tuple(dict.fromkeys(path for name in hide for path in (name, os.path.realpath(name))))


def best(hide: Iterable[str], room: str, *, network: bool) -> Profile | None:
    """The strictest profile that this machine takes, tried with a program that does nothing; None: none.

    Args:
        hide: Files and folders that a job must not read.
        room: A folder that may be written.
        network: Leave the job the machine's network.
    """
    return next((each for each in _candidates(hide, network=network) if _is_taken(each, room)), None)


def _candidates(hide: Iterable[str], *, network: bool) -> Iterator[Profile]:
    hidden = hidden_paths(hide)
    for strict in (True, False):
        for sockets in (False,) if network else (True, False):
            yield Profile(hidden, network, strict, sockets)


def _is_taken(profile: Profile, room: str) -> bool:
    if not os.access(PROGRAM, os.X_OK):
        return False
    try:
        return run_program(profile.command(_TRIAL, room), timeout_s=_TRIAL_S).ok
    except MachineError:
        return False


def _rule(action: str, what: str, places: Iterable[str]) -> str:
    return f"({action} {what} {' '.join(places)})"


def _literal(path: str) -> str:
    return f'(literal "{path}")'
