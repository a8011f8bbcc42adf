"""What a job tries and cannot, at every level of what a machine may permit."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from bridge.proc import run_program
from bridge.runner.child import Supervised
from bridge.runner.isolation import processes
from bridge.runner.isolation.enforced import NOT_ENFORCED
from tests.bridge.runner.jobs import LEVEL, Jobs, as_permitted

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="layers of Linux")
ARRANGEMENTS = {
    "everything": {"level": "full"},
    "no-landlock": {"level": "full", "rules": False},
    "no-namespaces": {"level": "none"},
    "no-filter": {"level": "full", "filters": False},
    "before-linux-5.12": {"level": "full", "rules": False, "old": True},
    "no-process-namespace": {"level": "view"},
    "network-namespace-only": {"level": "network"},
    "landlock-alone": {"level": "none", "filters": False},
}


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


@pytest.fixture(params=ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def walled(
    request: pytest.FixtureRequest, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> tuple[Jobs, dict[str, object]]:
    """Jobs on a machine that permits only so much, with what that is."""
    as_permitted(monkeypatch, **request.param)
    return jobs, request.param


TRY = """
import os, socket, struct, subprocess, sys
def attempt(name, action):
    try:
        print(name, "done", action(), flush=True)
    except OSError as error:
        print(name, "refused", type(error).__name__, flush=True)
"""


def outcomes(jobs: Jobs) -> dict[str, str]:
    """What became of each attempt, by its name: ``done …`` or ``refused …``."""
    return dict(line.split(" ", 1) for line in jobs.lines)


@linux
@pytest.mark.sampled(2, 1)
def test_it_writes_only_into_its_own_folders(walled: tuple[Jobs, dict[str, object]], tmp_path: Path) -> None:
    jobs, _ = walled
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "file").write_text("as it was")
    (jobs.folder / "way-out").symlink_to(beside)
    file, new, moved = (str(beside / name) for name in ("file", "new", "moved"))
    script = f"""{TRY}
attempt("own", lambda: open("own", "w").write("x"))
attempt("append", lambda: open({file!r}, "a").write("x"))
attempt("make", lambda: open({new!r}, "w").write("x"))
attempt("folder", lambda: os.mkdir({new!r}))
attempt("link", lambda: open("way-out/new", "w").write("x"))
attempt("remove", lambda: os.unlink({file!r}))
attempt("rename", lambda: os.rename("own", {moved!r}))
attempt("hard", lambda: os.link({file!r}, "hard"))
attempt("truncate", lambda: os.truncate({file!r}, 0))
attempt("etc", lambda: open("/etc/kakeya-canary", "w").write("x"))
attempt("kernel", lambda: open("/proc/sys/kernel/core_pattern", "a").write(""))
attempt("null", lambda: open("/dev/null", "w").write("x"))
"""
    jobs.run(script, keep=[beside])
    said = outcomes(jobs)
    assert {name for name, how in said.items() if how.startswith("done")} == {"own", "null"}, said
    assert len(said) == 12
    assert [path.name for path in beside.iterdir()] == ["file"]
    assert (beside / "file").read_text() == "as it was"
    assert jobs.enforced.writes != NOT_ENFORCED


@linux
@pytest.mark.sampled(2, 1)
def test_it_reads_no_hidden_file_or_folder(walled: tuple[Jobs, dict[str, object]], tmp_path: Path) -> None:
    jobs, _ = walled
    home = tmp_path / "home"
    key, folder, shown = home / "key", home / "dot", home / "shown"
    folder.mkdir(parents=True)
    for path in (key, folder / "token", shown):
        path.write_text("PRIVATE" if path != shown else "public")
    script = f"""{TRY}
import ctypes
for name in ({str(key)!r}, {str(folder)!r}):
    ctypes.CDLL(None).umount(name.encode())
attempt("key", lambda: open({str(key)!r}).read())
attempt("listing", lambda: os.listdir({str(folder)!r}))
attempt("token", lambda: open({str(folder / "token")!r}).read())
attempt("shown", lambda: open({str(shown)!r}).read())
"""
    jobs.run(script, hide=(key, folder, tmp_path / "absent"), keep=[home])
    log = jobs.log.read_text()
    assert "PRIVATE" not in log
    assert "['token']" not in log
    assert "shown done public" in log
    assert key.read_text() == "PRIVATE"
    assert jobs.enforced.credentials != NOT_ENFORCED


@linux
@pytest.mark.parametrize("level", ["full", "network", "none"])
def test_it_opens_no_device_of_the_machine_and_no_terminal_of_the_user(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    as_permitted(monkeypatch, level=level)
    ends = os.openpty()
    script = f"""{TRY}
for name in sorted(os.listdir("/dev")) if {level == "full"} else {sorted(os.listdir("/dev"))!r}:
    if not os.path.isdir(f"/dev/{{name}}"):
        attempt(name, lambda: os.open(f"/dev/{{name}}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
attempt("listen", lambda: os.open({os.ttyname(ends[1])!r}, os.O_RDONLY | os.O_NOCTTY))
attempt("write", lambda: os.open({os.ttyname(ends[1])!r}, os.O_WRONLY | os.O_NOCTTY))
"""
    jobs.run(script)
    for end in ends:
        os.close(end)
    opened = {name for name, how in outcomes(jobs).items() if how.startswith("done")}
    own = {"ptmx"} if level == "full" else set[str]()
    links = {"fd", "stdin", "stdout", "stderr"}
    assert opened - links == {"null", "zero", "full", "random", "urandom"} | own
    assert len(outcomes(jobs)) >= 8


@linux
@pytest.mark.parametrize("level", ["full", "none"])
def test_what_is_put_in_place_of_a_hidden_file_meanwhile_is_hidden_too(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str
) -> None:
    """As git's credential store does it, after each push."""
    as_permitted(monkeypatch, level=level, scratch=["/dev/shm"])  # else the home would lie in a fresh folder
    home = tmp_path / "home"
    home.mkdir()
    kept, absent, go = home / "kept", home / "absent", jobs.folder / "go"
    kept.write_text("PRIVATE")
    script = f"""{TRY}
import time
print("up", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
for name in ({str(kept)!r}, {str(absent)!r}):
    attempt("read", lambda: open(name).read())
"""

    def replace() -> bool:
        if "up" in jobs.lines and not go.exists():
            (home / "new").write_text("PRIVATE")
            (home / "new").rename(kept)
            absent.write_text("PRIVATE")
            go.touch()
        return False

    jobs.run(script, hide=(kept, absent), stop=replace)
    assert jobs.lines == ["up", *["read refused PermissionError"] * 2]


@linux
@pytest.mark.sampled(2, 1)
def test_it_reaches_nobody(walled: tuple[Jobs, dict[str, object]], tmp_path: Path) -> None:
    """Neither another machine nor a program that listens on this one, by address, name or abstract name."""
    jobs, permitted = walled
    if permitted["level"] == "none" and permitted.get("filters") is False:
        # Nothing keeps a job from the network there, and its result must not claim that anything does.
        jobs.run("print('ran')")
        assert (jobs.lines, jobs.enforced.network) == (["ran"], NOT_ENFORCED)
        return
    listener = socket.create_server(("127.0.0.1", 0))
    named, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    caught = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    names = str(tmp_path / "socket"), f"\0kakeya-{os.getpid()}", str(tmp_path / "datagrams")
    caught.bind(names[2])
    for server, name in zip((named, abstract), names[:2], strict=True):
        server.bind(name)
        server.listen()
    script = f"""{TRY}
def local(name):
    socket.socket(socket.AF_UNIX).connect(name)
def datagram():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53))
attempt("far", lambda: socket.create_connection(("192.0.2.1", 80), 2))
attempt("here", lambda: socket.create_connection({listener.getsockname()!r}, 2))
attempt("datagram", datagram)
attempt("named", lambda: local({names[0]!r}))
attempt("thrown", lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", {names[2]!r}))
attempt("abstract", lambda: local({names[1]!r}))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("pair", lambda: [end.send(b"x") for end in socket.socketpair()][0])
"""
    jobs.run(script, keep=[tmp_path / name for name in ("socket", "datagrams")])
    for server in (listener, named, abstract, caught):
        server.close()
    said = outcomes(jobs)
    assert said.pop("pair") == "done 1"
    assert len(said) == 7
    assert {how.split()[0] for how in said.values()} == {"refused"}, said
    assert jobs.enforced.network not in (NOT_ENFORCED, "open")


@linux
@pytest.mark.parametrize(("level", "rules"), [("full", True), ("full", False), ("none", True)])
def test_with_the_machines_network_it_reaches_addresses_and_no_abstract_socket(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, level: str, rules: bool
) -> None:
    as_permitted(monkeypatch, level=level, rules=rules)
    abstract, name = socket.socket(socket.AF_UNIX), f"\0kakeya-open-{os.getpid()}"
    abstract.bind(name)
    abstract.listen()
    with abstract, socket.create_server(("127.0.0.1", 0)) as listener:
        script = f"""{TRY}
attempt("here", lambda: socket.create_connection({listener.getsockname()!r}, 2).send(b"x"))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect({name!r}))
"""
        jobs.run(script, network=True)
    assert jobs.lines[0] == "here done 1"
    assert jobs.lines[1].startswith("abstract refused")
    assert jobs.enforced.network == "open"


@linux
@pytest.mark.sampled(2, 1)
def test_it_neither_signals_nor_sees_into_other_programs(walled: tuple[Jobs, dict[str, object]]) -> None:
    jobs, _ = walled
    script = f"""{TRY}
attempt("signal", lambda: os.kill({os.getpid()}, 0))
attempt("environment", lambda: open("/proc/{os.getpid()}/environ").read())
attempt("memory", lambda: open("/proc/{os.getpid()}/mem", "rb"))
attempt("supervisor", lambda: open(f"/proc/{{os.getppid()}}/mem", "rb"))
child = subprocess.Popen(["sleep", "9"])
child.kill()
print("own", child.wait())
"""
    jobs.run(script)
    said = outcomes(jobs)
    assert said.pop("own") == "-9"
    assert len(said) == 4
    assert {how.split()[0] for how in said.values()} == {"refused"}, said
    assert jobs.enforced.processes != NOT_ENFORCED


@linux
def test_the_supervisors_memory_is_closed_to_programs_of_the_same_user(jobs: Jobs) -> None:
    standby = jobs.standby()
    with Supervised(standby):
        guard = standby._process.pid
        [keeper] = [each.pid for each in processes.from_proc() if each.parent == guard]
        owners = [Path(f"/proc/{pid}/mem").stat().st_uid for pid in (guard, keeper)]
    # The kernel gives what a program keeps to itself to root; where that is the user, capabilities decide.
    assert owners == [0, 0]


@linux
@pytest.mark.parametrize("level", ["view", "none"])
def test_without_landlock_the_filter_keeps_the_supervisor_alive(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    as_permitted(monkeypatch, level=level, rules=False)
    script = f"""{TRY}
import fcntl, resource, signal
guard = int(open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[1])
def by_descriptor(pid):
    signal.pidfd_send_signal(os.open(f"/proc/{{pid}}", os.O_RDONLY), signal.SIGKILL)
def as_owner(call, pid):
    read, write = os.pipe()
    fcntl.fcntl(read, 10, signal.SIGKILL)
    call(read, pid)
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    os.write(write, b"x")
for pid in (os.getppid(), guard):
    attempt(f"descriptor-{{pid}}", lambda: by_descriptor(pid))
    attempt(f"owner-{{pid}}", lambda: as_owner(lambda read, pid: fcntl.fcntl(read, fcntl.F_SETOWN, pid), pid))
attempt("ioctl", lambda: fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack("i", guard)))
for number, target in enumerate((-1, os.getppid(), os.getpgid(os.getppid()), -os.getpgid(os.getppid()))):
    attempt(f"kill{{number}}", lambda: os.kill(target, signal.SIGKILL))
attempt("limit", lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)))
attempt("runner", lambda: os.kill({os.getpid()}, signal.SIGKILL))
attempt("group", lambda: os.killpg({os.getpgrp()}, signal.SIGKILL))
"""
    ended = jobs.run(script)
    assert ended.exit_code == 0
    assert len(outcomes(jobs)) == 12
    assert {how.split()[0] for how in outcomes(jobs).values()} == {"refused"}, jobs.lines
    assert jobs.enforced.processes == NOT_ENFORCED, "other programs of the user can be signalled there"


INHERITED = """
import ctypes, os, struct
from bridge.runner.isolation import namespaces
libc, header = ctypes.CDLL(None), struct.pack("=Ii", 0x20080522, 0)
sets = ctypes.create_string_buffer(24)
libc.capget(header, sets)
effective, permitted, _, *rest = struct.unpack("=6I", sets)
libc.capset(header, struct.pack("=6I", effective, permitted, permitted, *rest))
libc.prctl(47, 2, 13, 0, 0)
namespaces.drop_privileges()
os.execv("/bin/cat", ["cat", "/proc/self/status"])
"""


@linux
def test_no_capability_is_inherited() -> None:
    """Neither by root nor where a service manager gives the runner some; trivial for everybody else."""
    done = run_program([sys.executable, "-c", INHERITED], timeout_s=30)
    held = dict(re.findall(r"Cap(Inh|Prm|Eff|Amb):\s*([0-9a-f]+)", done.stdout.decode()))
    assert {name: int(word, 16) for name, word in held.items()} == dict.fromkeys(
        ("Inh", "Prm", "Eff", "Amb"), 0
    )


@linux
def test_the_kernel_ends_a_job_before_all_others_when_memory_runs_out(jobs: Jobs) -> None:
    jobs.run("print(open('/proc/self/oom_score_adj').read())")
    assert jobs.lines == ["1000"]
    assert Path("/proc/self/oom_score_adj").read_text() != "1000\n"


@pytest.mark.skipif(LEVEL != "full", reason="this machine permits no view of its own")
def test_the_view_holds_no_more_than_it_says(jobs: Jobs) -> None:
    script = """
import os
print(*sorted(os.listdir("/dev")))
print(os.listdir("/run"), [name for name in os.listdir("/tmp") if not name.startswith("pytest")])
print(min(int(name) for name in os.listdir("/proc") if name.isdigit()))
for name in ("/tmp/kakeya-scratch", "/dev/shm/kakeya-scratch"):
    open(name, "w").write("x")
print(len(open("/dev/urandom", "rb").read(1)), len(os.openpty()))
"""
    jobs.run(script)
    devices = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert jobs.lines[0] == devices
    assert jobs.lines[1].startswith("[] ")
    assert jobs.lines[2:] == ["1", "1 2"]
    assert not Path("/tmp/kakeya-scratch").exists()
