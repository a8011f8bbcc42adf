"""What a job gets and what keeps it to that: bubblewrap on Linux, sandbox-exec on macOS."""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import psutil

from bridge.errors import MachineError
from bridge.proc import find_program, run_program
from bridge.runner.policy import JobLimits
from bridge.runner.workspace import remove_tree

# Names that may pass from the runner's environment to a job; none of them is a secret.
PASSED_NAMES = ("KAKEYA_BLAS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TZ", "VECLIB_MAXIMUM_THREADS")
SYSTEM_PATH = ("/opt/homebrew/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
NOT_ENFORCED = "not enforced"
# What may be enforced, and what that keeps a job from.
ITEMS = {
    "network": "reaching the network and programs that listen here",
    "tree": "leaving processes behind",
    "writes": "writing outside its own folders",
    "credentials": "reading keys, runners' state and credentials",
    "processes": "signalling other programs and looking into them",
    "calls": "using kernel interfaces that no job needs",
    "memory": "taking more memory and processes than it may",
    "disk": "taking more of the disk than it may",
}


class JobDirs:
    """The private folders of one job, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.temporary = root / "tmp"  # TMPDIR; in the Linux sandbox also its /tmp and /var/tmp
        self.shared_memory = root / "shm"  # in the Linux sandbox its /dev/shm
        self.workspace = root / "workspace"  # its working directory: what the preset asks for of the commit
        self.out = root / "out"  # for ``${out:NAME}`` files: the only place that reports are read from

    def make(self) -> None:
        """Create the folders, empty, for the owner alone."""
        remove_tree(self.root)
        for folder in vars(self).values():
            folder.mkdir(parents=True, mode=0o700)


@dataclass(frozen=True)
class Access:
    """Everything that one job may reach, besides system libraries.

    Of two entries where one lies inside the other, the inner one decides.
    """

    dirs: JobDirs  # its own folders, which it may write
    readable: tuple[Path, ...] = ()  # to read and run: the installation, models, the owner's programs
    writable: tuple[Path, ...] = ()  # further folders to write: the kernel cache
    hidden: tuple[Path, ...] = ()  # not to be read even inside a readable folder: runners' state and keys
    network: bool = False  # whether it gets the machine's network


@dataclass(frozen=True)
class NoSandbox:
    """Starts a job as it is; `why` says what is missing on this machine."""

    why: str
    wrappers: ClassVar[int] = 0

    def command(self, argv: Sequence[str], access: Access) -> list[str]:  # noqa: ARG002 - nothing is enforced
        """`argv` as it is."""
        return list(argv)

    def enforced(self, *, network: bool) -> dict[str, str]:
        """Only the supervisor's own means: it ends the process tree and measures."""
        return _facts("none", network, tree="adopted" if sys.platform == "linux" else "hunted")


@dataclass(frozen=True)
class Bubblewrap:
    """The Linux sandbox. Not `strict`: this bubblewrap cannot forbid a job namespaces of its own."""

    strict: bool = True
    program: ClassVar[str] = "bwrap"
    remedy: ClassVar[str] = (
        "install bubblewrap (on Debian and Ubuntu: apt-get install bubblewrap), and permit unprivileged user"
        " namespaces (sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
    )
    wrappers: ClassVar[int] = 2  # processes of its own above the job's program

    def command(self, argv: Sequence[str], access: Access) -> list[str]:
        """The command line that runs `argv` in the sandbox. The environment is passed on as it is."""
        dirs = access.dirs  # where also /tmp and /dev/shm lead, so that they are measured with the rest
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
        system = [*_SYSTEM, *(f"/etc/{name}" for name in (*_ETC, *(_ETC_NETWORK if access.network else ())))]
        return [
            # Without --cap-drop a job of root could remount what is read-only.
            *(self.program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *(("--unshare-user", "--disable-userns") if self.strict else ()),  # bubblewrap 0.8 and later
            *(("--share-net",) if access.network else ()),
            *("--proc", "/proc", "--dev", "/dev", "--dir", "/run"),
            *(word for place in system for word in ("--ro-bind-try", place, place)),
            # A folder comes before what lies in it, so the inner mount covers the outer one.
            *(word for place in sorted(mounts) for word in mounts[place]),
            *(word for place in read_only for word in ("--remount-ro", place)),
            *("--chdir", str(dirs.workspace), "--", *argv),
        ]

    def enforced(self, *, network: bool) -> dict[str, str]:
        """What a result says of it; `network`: the job gets the machine's network."""
        means = dict.fromkeys(("writes", "credentials"), "bubblewrap")
        means |= dict.fromkeys(("network", "processes"), "own namespace")
        means |= {"calls": "no new namespaces"} if self.strict else {}
        return _facts("bubblewrap", network, tree="process namespace", **means)


_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/sys/devices/system/cpu")
# Never all of /etc: it holds password hashes, host keys and private keys of certificates.
_ETC = (
    *("alternatives", "ca-certificates", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "passwd", "pki/ca-trust", "pki/tls/certs"),
    *("protocols", "services", "ssl/certs", "ssl/openssl.cnf"),
)
_ETC_NETWORK = ("gai.conf", "resolv.conf")


@dataclass(frozen=True)
class SandboxExec:
    """The macOS sandbox, a profile for ``sandbox-exec``, which was written without a Mac.

    The system is allowed, because Metal needs more of it than anybody can list; see docs/isolation.md for
    what is denied. Not `strict`: this macOS knows only the rules on files and the network.
    """

    strict: bool = True
    program: ClassVar[str] = "/usr/bin/sandbox-exec"
    remedy: ClassVar[str] = "please report this macOS version"
    wrappers: ClassVar[int] = 0

    def command(self, argv: Sequence[str], access: Access) -> list[str]:
        """The command line that runs `argv`. Paths are parameters, so that none can become a rule."""
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
            places |= {name: rule for path in paths for name in _names(path)}
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

    def enforced(self, *, network: bool) -> dict[str, str]:
        """What a result says of it. Nothing here holds processes together: escaped ones are searched for."""
        held = ("network", "writes", "credentials", *(("processes",) if self.strict else ()))
        return _facts("sandbox-exec", network, tree="hunted", **dict.fromkeys(held, "sandbox profile"))


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
    "(deny appleevent-send) (deny lsopen) (deny job-creation) (deny mach-priv-task-port)",
    "(deny mach-lookup {})".format(" ".join(f'(global-name "{name}")' for name in _SERVICES)),
)
_OWN_SOCKETS = (
    '(allow network-bind network-inbound (local unix-socket (subpath (param "JOB"))))',
    '(allow network-outbound (remote unix-socket (subpath (param "JOB"))))',
)
Sandbox = Bubblewrap | SandboxExec | NoSandbox


def _facts(sandbox: str, has_network: bool, **means: str) -> dict[str, str]:
    """The facts of a result: ``sandbox``, and ``isolation_*`` for each of `ITEMS`."""
    means = {**dict.fromkeys(ITEMS, NOT_ENFORCED), "memory": "watched", "disk": "watched", **means}
    means |= {"network": "open"} if has_network else {}
    return {"sandbox": sandbox, **{f"isolation_{item}": how for item, how in means.items()}}


def find_sandbox() -> Sandbox:
    """The sandbox of this machine; `NoSandbox`, which says why, where there is none that works."""
    try:
        return find_working(SandboxExec if sys.platform == "darwin" else Bubblewrap)
    except MachineError as error:
        return NoSandbox(f"{error.message}; {error.remedy}")


@cache  # an exception is not cached: what failed once is tried again
def find_working(kind: type[Bubblewrap | SandboxExec]) -> Bubblewrap | SandboxExec:
    """The strictest sandbox of a kind that starts a program here; a `MachineError`: none does."""
    said = "it is not installed"
    for strict in (True, False) if find_program(kind.program) else ():
        sandbox = kind(strict)
        with tempfile.TemporaryDirectory() as folder:
            dirs = JobDirs(Path(folder) / "job")
            dirs.make()
            done = run_program(sandbox.command(["true"], Access(dirs)), timeout_s=30.0)
        if done.ok:
            return sandbox
        said = done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.exit_code}"
    raise MachineError(f"{kind.program} cannot start a program here: {said}", kind.remedy)


def _names(path: Path) -> tuple[str, ...]:
    """A path as it is written and without links: programs use either."""
    return tuple(dict.fromkeys((os.path.abspath(path), os.path.realpath(path))))


def installation() -> list[Path]:
    """Where the interpreter and our packages are (not the checkout), and what ``.pth`` files add."""
    specs = filter(None, map(importlib.util.find_spec, ("bridge", "engine", "evidence_format")))
    packages = [Path(place) for spec in specs for place in spec.submodule_search_locations or ()]
    # Not sys.path: that holds the folder the runner was started in, which may be the home.
    files = [file for folder in site.getsitepackages() for file in Path(folder).glob("*.pth")]
    lines = [line.strip() for file in files for line in file.read_text("utf-8", "replace").splitlines()]
    parents = {str(package.parent) for package in packages}
    added = [Path(line) for line in lines if os.path.isabs(line) and line not in parents]
    return [path for path in (Path(sys.prefix), Path(sys.base_prefix), *packages, *added) if path.exists()]


def environment(dirs: JobDirs, ours: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
    """The complete environment of a job; of the runner's, `PASSED_NAMES` pass and what `also` names."""
    return {
        **{name: ours[name] for name in (*PASSED_NAMES, *also) if name in ours},
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), *SYSTEM_PATH)),
        "HOME": str(dirs.home),
        "TMPDIR": str(dirs.temporary),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }


def resource_limits(limits: JobLimits) -> dict[str, int]:
    """RLIMIT values: open files, bytes of a file, core dumps, and on Linux processes with their threads."""
    values = {"NOFILE": limits.open_files, "FSIZE": limits.file_bytes, "CORE": 0}
    if sys.platform == "linux":  # the kernel counts everything that this user runs
        owned = (each.info for each in psutil.process_iter(["uids", "num_threads"]) if each.info["uids"])
        running = (info["num_threads"] or 0 for info in owned if info["uids"].real == os.getuid())
        values["NPROC"] = limits.processes + sum(running)
    return values


def allowed(limits: JobLimits) -> dict[str, int]:
    """What a job is measured against, by `bridge.runner.supervisor.Breach.what`."""
    return {
        "memory": limits.memory_bytes or psutil.virtual_memory().total * 4 // 5,
        "processes": limits.processes,
        "disk": limits.disk_bytes,
        "files": limits.files,
        "left": 1 << 30,  # bytes of the disk that no job may fill
    }
