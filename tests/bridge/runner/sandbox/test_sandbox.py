"""What a job tries and cannot: write outside, reach the network, look into others, leave something behind."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from bridge.runner.sandbox import (
    NOT_ENFORCED,
    Access,
    Bubblewrap,
    JobDirs,
    NoSandbox,
    find_sandbox,
    find_working,
    installation,
)
from tests.bridge.runner.jobs import EITHER, Jobs, linux, marked, needs_sandbox


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


TRY = """
import os, socket, subprocess, sys
def attempt(name, action):
    try:
        print(name, "done", action(), flush=True)
    except OSError as error:
        print(name, "refused", type(error).__name__, flush=True)
"""


@linux
@needs_sandbox
def test_job_writes_only_to_its_own_folders(jobs: Jobs, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("as it was")
    (jobs.folder / "way-out").symlink_to(outside)
    file, new, moved = (str(outside / name) for name in ("file", "new", "moved"))
    script = f"""{TRY}
attempt("own", lambda: open("own", "w").write("x"))
attempt("tmp", lambda: open("/tmp/x", "w").write("x"))
attempt("var", lambda: open("/var/tmp/y", "w").write("x"))
attempt("shm", lambda: open("/dev/shm/z", "w").write("x"))
attempt("null", lambda: open("/dev/null", "w").write("x"))
attempt("append", lambda: open({file!r}, "a").write("x"))
attempt("make", lambda: open({new!r}, "w").write("x"))
attempt("folder", lambda: os.mkdir({new!r}))
attempt("link", lambda: open("way-out/new", "w").write("x"))
attempt("remove", lambda: os.unlink({file!r}))
attempt("rename", lambda: os.rename("own", {moved!r}))
attempt("hard", lambda: os.link({file!r}, "hard"))
attempt("truncate", lambda: os.truncate({file!r}, 0))
attempt("root", lambda: os.mkdir("/new"))
attempt("etc", lambda: open("/etc/kakeya-canary", "w").write("x"))
attempt("usr", lambda: open("/usr/kakeya-canary", "w").write("x"))
attempt("device", lambda: open("/dev/new", "w").write("x"))
attempt("python", lambda: open({sys.prefix!r} + "/new", "w").write("x"))
attempt("kernel", lambda: open("/proc/sys/kernel/core_pattern", "a").write(""))
attempt("trigger", lambda: open("/proc/self/oom_score_adj", "w").write("0"))
remount = subprocess.run(["mount", "-o", "remount,rw", "/usr"], stderr=subprocess.DEVNULL)
print("remount", remount.returncode != 0, flush=True)
"""
    jobs.run(script, readable=[outside])
    said = jobs.outcomes()
    assert len(said) == 21, jobs.log.read_text()
    done = {name for name, how in said.items() if how.startswith("done")}
    assert done == {"own", "tmp", "var", "shm", "null"}, said
    assert said["remount"] == "True"
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "as it was"
    used = {
        path.name for folder in (jobs.dirs.temporary, jobs.dirs.shared_memory) for path in folder.iterdir()
    }
    assert {"x", "y", "z"} <= used, "whatever a job writes is in its folders, where it is measured"


@linux
@needs_sandbox
def test_job_sees_only_what_is_listed(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "not-listed").write_text("PRIVATE")
    jobs.run(f"""
        import os
        print(*sorted(os.listdir("/dev")))
        print(os.listdir("/run"), os.listdir("/etc/ssl"), os.listdir({str(tmp_path)!r}))
        print(max(int(name) for name in os.listdir("/proc") if name.isdigit()) < 20)
        print(len(os.openpty()), os.getpid() != 1)
    """)
    devices = "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert jobs.lines[0] == devices
    assert jobs.lines[1] in ("[] ['certs', 'openssl.cnf'] ['job']", "[] ['openssl.cnf', 'certs'] ['job']")
    assert jobs.lines[2:] == ["True", "2 True"]


@linux
@needs_sandbox
def test_hidden_folder_stays_hidden_inside_a_readable_one(jobs: Jobs, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for name in ("data", "state/other", "state/jobs"):
        (shared / name).mkdir(parents=True)
        (shared / name / "file").write_text(name)
    (shared / "key").write_text("PRIVATE")
    script = f"""{TRY}
for name in ("data/file", "state/other/file", "state/jobs/file", "key"):
    attempt(name, lambda: open({str(shared)!r} + "/" + name).read() or os.stat("/nonexistent"))
attempt("plant", lambda: open({str(shared)!r} + "/state/new", "w"))
"""
    jobs.run(
        script,
        readable=[shared, shared / "state" / "jobs"],
        hidden=[shared / "state", shared / "key", shared / "absent"],
    )
    said = jobs.outcomes()
    assert said.pop("data/file") == "done data"
    assert said.pop("state/jobs/file") == "done state/jobs", "the inner entry decides"
    assert {how.split()[0] for how in said.values()} == {"refused"}, said


@linux
@needs_sandbox
def test_job_reaches_no_network_and_no_program_that_listens(jobs: Jobs, tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    named, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    names = str(tmp_path / "socket"), f"\0kakeya-{os.getpid()}"
    for server, name in zip((named, abstract), names, strict=True):
        server.bind(name)
        server.listen()
    script = f"""{TRY}
def local(name):
    socket.socket(socket.AF_UNIX).connect(name)
def datagram():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53))
def itself():
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname(), 5).close()
attempt("itself", itself)
attempt("far", lambda: socket.create_connection(("192.0.2.1", 80), 2))
attempt("here", lambda: socket.create_connection({listener.getsockname()!r}, 2))
attempt("datagram", datagram)
attempt("named", lambda: local({names[0]!r}))
attempt("abstract", lambda: local({names[1]!r}))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
"""
    jobs.run(script)
    for server in (listener, named, abstract):
        server.close()
    said = jobs.outcomes()
    assert said.pop("itself") == "done None"
    assert len(said) == 6
    assert {how.split()[0] for how in said.values()} == {"refused"}, said


@linux
@needs_sandbox
def test_granted_network_reaches_the_machine(jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        jobs.run(
            f"{TRY}\nhere = {listener.getsockname()!r}\n"
            "attempt('here', lambda: socket.create_connection(here, 2).send(b'x'))",
            network=True,
        )
    assert jobs.lines == ["here done 1"]


@linux
@needs_sandbox
def test_job_neither_signals_nor_sees_other_programs(jobs: Jobs) -> None:
    script = f"""{TRY}
attempt("signal", lambda: os.kill({os.getpid()}, 0))
attempt("environment", lambda: open("/proc/{os.getpid()}/environ").read())
attempt("memory", lambda: open("/proc/{os.getpid()}/mem", "rb"))
print("namespace", subprocess.run(["unshare", "-U", "true"], stderr=subprocess.DEVNULL).returncode)
print("capabilities", *{{line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")}})
print("privileges", *(line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNew")))
print("oom", open("/proc/self/oom_score_adj").read())
"""
    jobs.run(script)
    said = jobs.outcomes()
    assert {name: how for name, how in said.items() if how.startswith("refused")}.keys() == {
        *("signal", "environment", "memory")
    }
    assert said["capabilities"] == "0000000000000000"
    assert (said["privileges"], said["oom"]) == ("1", "1000")
    if isinstance(jobs.sandbox, Bubblewrap) and jobs.sandbox.strict:
        assert said["namespace"] != "0"


SURVIVORS = {
    "session": "Popen(ARGV, start_new_session=True)",
    "double-fork": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(ARGV[0], ARGV)
    os._exit(0)
os.wait()
""",
    "orphans-of-orphans": """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        Popen(ARGV, start_new_session=True)
        os._exit(0)
    os.wait()
""",
    "deaf": """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
Popen(ARGV, start_new_session=True)
""",
}


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("sandbox", EITHER)
@pytest.mark.parametrize("way", SURVIVORS.values(), ids=SURVIVORS)
def test_nothing_that_a_job_started_outlives_it(tmp_path: Path, sandbox: NoSandbox, way: str) -> None:
    jobs = Jobs(tmp_path, sandbox)
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    argv = [sys.executable, "-I", "-c", "import time; time.sleep(60)", mark]
    head = f"import os, signal, time\nfrom subprocess import Popen\nARGV = {argv!r}\n"
    ended = jobs.run(f"{head}{way}\nprint('started')")
    assert ended.exit_code == 0, jobs.log.read_text()
    assert ended.survivors == 0
    assert marked(mark) == []


def test_installation_is_packages_and_interpreter_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the folder that the runner was started in, and of a checkout only the packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = installation()
    assert Path(sys.prefix) in found
    assert not {tmp_path, Path(__file__).parents[4], Path.home(), Path("/")} & set(found)


def test_command_line_lists_etc_and_no_value_of_the_environment(tmp_path: Path) -> None:
    words = Bubblewrap().command(["x"], Access(JobDirs(tmp_path)))
    assert {"--unshare-all", "--die-with-parent", "--new-session", "--cap-drop"} <= set(words)
    assert "--setenv" not in words, "command lines can be read by every user of the machine"
    listed = {word for word in words if word.startswith("/etc")}
    assert not listed & {"/etc", "/etc/shadow", "/etc/ssh", "/etc/ssl", "/etc/pki", "/etc/resolv.conf"}
    assert "--share-net" not in words
    granted = Bubblewrap().command(["x"], Access(JobDirs(tmp_path), network=True))
    assert {"--share-net", "/etc/resolv.conf"} <= set(granted)


@linux
@pytest.mark.parametrize("how", ["absent", "broken"])
def test_machine_without_a_working_sandbox_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    program = tmp_path / "bwrap"
    if how == "broken":
        program.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
        program.chmod(0o755)
    monkeypatch.setattr(Bubblewrap, "program", str(program))
    find_working.cache_clear()
    found = find_sandbox()
    assert isinstance(found, NoSandbox)
    wanted = "apt-get install bubblewrap" if how == "absent" else "No permissions to create new namespace"
    assert wanted in found.why
    assert found.enforced(network=False)["isolation_writes"] == NOT_ENFORCED
