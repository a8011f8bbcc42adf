"""The macOS sandbox: a profile for ``sandbox-exec``. It was written without a Mac and has never run on one.

The system is allowed, because Metal needs more of it than anybody can list. Denied are homes, other volumes
and temporary folders except for what `Access` lists, all writes outside the job's folders, the network,
signals to other programs, and services that start programs or hand out keys.

A job may talk to itself through Unix sockets in its folders. The loopback device stays closed: other programs
listen there, too, and no rule can tell them from the job.

Paths are passed as parameters of the profile, so that no path can become a rule.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bridge.errors import MachineError
from bridge.runner.sandbox.base import NOT_ENFORCED, Access, Enforcement, try_sandbox

PROGRAM = "/usr/bin/sandbox-exec"
_READ = "file-read-data file-read-xattr"  # the way to an allowed folder may be looked up, not listed
_PRIVATE = (
    *("/Users", "/Volumes", "/home", "/private/var/root", "/private/tmp", "/private/var/tmp"),
    *("/private/etc/ssh", "/Library/Keychains", "/System/Volumes/Data/Users"),
)
_USER_TEMPORARY = '(regex #"^/private/var/folders/[^/]+/[^/]+/T/")'
_DEVICES = ("/dev/null", "/dev/zero", "/dev/tty", "/dev/ptmx", "/dev/dtracehelper")
# Of the user's terminals, only those that the job itself opened.
_TERMINAL, _OWN_TERMINAL = '(regex #"^/dev/ttys[0-9]+$")', '(extension "com.apple.sandbox.pty")'
_RESOLVER = "/private/var/run/mDNSResponder"
# Services that start programs for others, or hand out keys.
_SERVICES = (
    *("com.apple.coreservices.launchservicesd", "com.apple.coreservices.appleevents", "com.apple.lsd.open"),
    *("com.apple.lsd.mapdb", "com.apple.xpc.smd", "com.apple.SecurityServer", "com.apple.securityd"),
    *("com.apple.securityd.xpc", "com.apple.pasteboard.1"),
)
# Rules that some version of macOS may not know.
_STRICT = (
    "(deny signal) (allow signal (target same-sandbox))",
    "(deny process-info*) (allow process-info* (target same-sandbox))",
    "(deny appleevent-send)",
    "(deny lsopen)",
    "(deny job-creation)",
    "(deny mach-priv-task-port)",
    "(deny mach-lookup {})".format(" ".join(f'(global-name "{name}")' for name in _SERVICES)),
)
_OWN_SOCKETS = (
    '(allow network-bind network-inbound (local unix-socket (subpath (param "JOB"))))',
    '(allow network-outbound (remote unix-socket (subpath (param "JOB"))))',
)


@dataclass(frozen=True)
class SandboxExec:
    """The sandbox; not `strict`: this macOS knows only the rules on files and the network."""

    strict: bool = True
    program: str = PROGRAM
    wrappers: int = 0

    def command(self, argv: Sequence[str], access: Access) -> list[str]:
        """The command line that runs `argv` in the sandbox."""
        parameters, text = self.profile(access)
        given = [word for name, value in parameters.items() for word in ("-D", f"{name}={value}")]
        return [self.program, *given, "-p", text, *argv]

    def profile(self, access: Access) -> tuple[dict[str, str], str]:
        """Parameters and rules; of rules about the same thing the last one decides."""
        places: dict[str, str] = {}
        for rule, paths in (
            (f"(deny {_READ}", [*map(Path, _PRIVATE), *access.hidden]),
            ("(allow file-read*", access.readable),
            ("(allow file-read* file-write*", (*access.writable, access.dirs.root)),
        ):
            places |= {name: rule for path in paths for name in (str(path), os.path.realpath(path))}
        if access.network:
            resolver = f'(allow network-outbound (remote unix-socket (literal "{_RESOLVER}")))'
            network = ["(deny network-outbound (remote unix-socket))", resolver]
        else:
            network = ["(deny network*)", *(_OWN_SOCKETS if self.strict else ())]
        # A folder comes before what lies in it, so the rule about the inner one decides.
        ordered = sorted(places)
        parameters = {f"PATH{number}": path for number, path in enumerate(ordered)}
        parameters["JOB"] = os.path.realpath(access.dirs.root)
        devices = " ".join(f'(literal "{path}")' for path in _DEVICES)
        lines = [
            "(version 1)",
            "(allow default)",
            *network,
            "(deny file-write*)",
            f"(allow file-write* file-ioctl {devices})",
            f"(deny file-read-data {_TERMINAL})",
            f"(allow file-read* file-write* (require-all {_TERMINAL} {_OWN_TERMINAL}))",
            f"(deny {_READ} {_USER_TEMPORARY})",
            *(f'{places[path]} (subpath (param "PATH{number}")))' for number, path in enumerate(ordered)),
            *(_STRICT if self.strict else ()),
        ]
        return parameters, "\n".join(lines) + "\n"

    def enforcement(self, *, network: bool) -> Enforcement:
        """What it enforces. Nothing on macOS holds processes together, so escaped ones are searched for."""
        return Enforcement(
            sandbox="sandbox-exec",
            network="open" if network else "sandbox profile",
            tree="hunted",
            writes="sandbox profile",
            credentials="sandbox profile",
            processes="sandbox profile" if self.strict else NOT_ENFORCED,
        )


@cache  # an exception is not cached: what failed once is tried again
def find_sandbox_exec() -> SandboxExec:
    """The strictest sandbox that this macOS accepts, tried with a program that does nothing.

    Raises:
        MachineError: It accepts none.
    """
    said: str | None = "there is no sandbox-exec"
    for strict in (True, False) if os.access(PROGRAM, os.X_OK) else ():
        sandbox = SandboxExec(strict, PROGRAM)
        if (said := try_sandbox(sandbox, "/usr/bin/true")) is None:
            return sandbox
    raise MachineError(
        f"sandbox-exec cannot start a program here: {said}", "please report this macOS version"
    )
