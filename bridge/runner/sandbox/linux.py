"""The Linux sandbox: bubblewrap, with namespaces of its own for mounts, processes, network, users and IPC.

The job's root is empty but for what is mounted here. Its /tmp, /var/tmp and /dev/shm are folders of the job,
so that the watchdog measures them with the rest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bridge.errors import MachineError
from bridge.proc import find_program
from bridge.runner.sandbox.base import NOT_ENFORCED, Access, Enforcement, try_sandbox

PROGRAM = "bwrap"
REMEDY = "install bubblewrap, on Debian and Ubuntu: apt-get install bubblewrap"
# Without --cap-drop a job of root would keep capabilities with which it could remount what is read-only.
_ISOLATE = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL")
_NO_NESTING = ("--unshare-user", "--disable-userns")  # bubblewrap 0.8 and later
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/sys/devices/system/cpu")
# Never all of /etc: it holds password hashes, host keys and private keys of certificates.
_ETC = (
    *("alternatives", "ca-certificates", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "passwd", "pki/ca-trust", "pki/tls/certs"),
    *("protocols", "services", "ssl/certs", "ssl/openssl.cnf"),
)
_ETC_NETWORK = ("gai.conf", "resolv.conf")


@dataclass(frozen=True)
class Bubblewrap:
    """The sandbox; with `nesting` this bubblewrap cannot forbid that a job makes namespaces of its own."""

    program: str
    nesting: bool = False
    wrappers: int = 2

    def command(self, argv: Sequence[str], access: Access) -> list[str]:
        """The command line that runs `argv` in the sandbox. The environment is passed on as it is."""
        dirs = access.dirs
        mounts = {place: ["--bind", str(dirs.temporary), place] for place in ("/tmp", "/var/tmp")}  # noqa: S108 - in the sandbox
        mounts["/dev/shm"] = ["--bind", str(dirs.shared_memory), "/dev/shm"]  # noqa: S108 - in the sandbox
        # Of /proc, too: a job of a runner that is root could set kernel parameters of the machine.
        read_only = ["/proc", "/dev", "/"]
        shown = [place for path in (*map(Path, _SYSTEM), *access.readable) for place in _names(path)]
        for place in (name for path in access.hidden for name in _names(path)):
            if not any(Path(place).is_relative_to(outer) for outer in shown):
                continue  # it does not exist for the job
            if os.path.isdir(place):
                mounts[place] = ["--tmpfs", place]
                read_only.insert(0, place)
            elif os.path.exists(place):
                mounts[place] = ["--ro-bind", "/dev/null", place]
        for option, paths in (("--ro-bind", access.readable), ("--bind", (*access.writable, dirs.root))):
            for path in paths:
                if path.exists():
                    mounts |= {place: [option, str(path), place] for place in _names(path)}
        return [
            *(self.program, *_ISOLATE, *(() if self.nesting else _NO_NESTING)),
            *(("--share-net",) if access.network else ()),
            *("--proc", "/proc", "--dev", "/dev", "--dir", "/run", *_system(network=access.network)),
            # A folder comes before what lies in it, so the inner mount covers the outer one.
            *(word for place in sorted(mounts) for word in mounts[place]),
            *(word for place in read_only for word in ("--remount-ro", place)),
            *("--chdir", str(dirs.workspace), "--", *argv),
        ]

    def enforcement(self, *, network: bool) -> Enforcement:
        """What it enforces; ``open`` where the job gets the machine's network."""
        return Enforcement(
            sandbox="bubblewrap",
            network="open" if network else "own namespace",
            tree="process namespace",
            writes="bubblewrap",
            credentials="bubblewrap",
            processes="own namespace",
            calls=NOT_ENFORCED if self.nesting else "no new namespaces",
        )


@cache  # an exception is not cached: what failed once is tried again
def find_bubblewrap() -> Bubblewrap:
    """The sandbox, tried with a program that does nothing.

    Raises:
        MachineError: It is not installed, or this machine does not let it make namespaces.
    """
    program = find_program(PROGRAM)
    if program is None:
        raise MachineError("bubblewrap is not installed", REMEDY)
    for nesting in (False, True):
        sandbox = Bubblewrap(program, nesting)
        if (said := try_sandbox(sandbox, "true")) is None:
            return sandbox
    raise MachineError(
        f"bubblewrap cannot start a program here: {said}",
        "permit unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone,"
        " kernel.apparmor_restrict_unprivileged_userns)",
    )


def _system(*, network: bool) -> list[str]:
    words = []
    for place in _SYSTEM:
        if os.path.islink(place):  # /bin -> usr/bin
            words += ["--symlink", os.readlink(place), place]
        else:
            words += ["--ro-bind-try", place, place]
    for name in (*_ETC, *(_ETC_NETWORK if network else ())):
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return words


def _names(path: Path) -> tuple[str, ...]:
    """A path as it is written and without links: programs use either."""
    return tuple(dict.fromkeys((os.path.abspath(path), os.path.realpath(path))))
