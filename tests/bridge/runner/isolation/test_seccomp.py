"""The filter of kernel calls: what it closes on this machine, and that it leaves the rest alone."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
from pathlib import Path

import pytest

from bridge.proc import run_program
from bridge.runner.isolation import landlock, namespaces, seccomp
from tests.bridge.runner.jobs import LEVEL, Jobs

pytestmark = pytest.mark.skipif(not seccomp.available(), reason="there is no filter for this machine")


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def test_each_closed_call_is_answered_with_no_permission(jobs: Jobs) -> None:
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: pair[column] for name, pair in seccomp.DENIED.items() if pair[column] is not None}
    script = f"""
        import ctypes, json
        libc = ctypes.CDLL(None, use_errno=True)
        said = {{}}
        for name, number in {numbers!r}.items():
            result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(-1) for _ in range(6)))
            said[name] = ctypes.get_errno() if result == -1 else 0
        print(json.dumps(said))
    """
    jobs.run(script)
    assert json.loads(jobs.log.read_text()) == dict.fromkeys(numbers, errno.EPERM)


CALLS = """
import ctypes, fcntl, json, os, socket, resource
libc = ctypes.CDLL(None, use_errno=True)
def answer(call, *arguments):
    result = call(*(ctypes.c_long(item) for item in arguments))
    return ctypes.get_errno() if result == -1 else 0
def number(call):
    try:
        call()
    except OSError as error:
        return error.errno
    return 0
x86 = os.uname().machine == "x86_64"
said = {
    "clone into namespaces": answer(libc.syscall, 56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": answer(libc.syscall, 435, 0, 0),
    "netlink": number(lambda: socket.socket(socket.AF_NETLINK)),
    "vsock": number(lambda: socket.socket(40)),
    "crypto": number(lambda: socket.socket(38, socket.SOCK_SEQPACKET)),
    "typing for others": number(lambda: fcntl.ioctl(1, 0x5412, b"x")),
    "another's limits": number(lambda: resource.prlimit(os.getpid(), resource.RLIMIT_CPU)),
    "own limits": number(lambda: resource.getrlimit(resource.RLIMIT_CPU)),
    "terminal": number(lambda: os.openpty()) if {own_terminals} else 0,
    "internet": number(lambda: socket.socket(socket.AF_INET6)),
    "thread": number(lambda: __import__("threading").Thread(target=print).start()),
}
print(json.dumps(said))
"""


def test_calls_are_closed_by_their_arguments(jobs: Jobs) -> None:
    own_terminals = namespaces.has_view(LEVEL) or not landlock.version()
    jobs.run(CALLS.replace("{own_terminals}", str(own_terminals)))
    said = json.loads(jobs.log.read_text().strip())
    closed = {name for name, answer in said.items() if answer == errno.EPERM}
    assert closed == {
        *("clone into namespaces", "netlink", "vsock", "crypto", "typing for others", "another's limits"),
    }, said
    assert said.pop("clone3") == errno.ENOSYS
    assert {said[name] for name in said if name not in closed} == {0}


OTHERS = """
import ctypes, json, os, subprocess, sys
from bridge.runner.isolation import namespaces, seccomp
libc = ctypes.CDLL(None, use_errno=True)
guard, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
def answers(pid):
    calls = {
        "signal": lambda: os.kill(pid, 0),
        "processors": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
        "schedule": lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, 5),
        "everybody": lambda: os.setpriority(os.PRIO_USER, 0, 0),
    }
    for name, call in calls.items():
        try:
            yield name, call()
        except OSError as error:
            yield name, error.errno
code = seccomp.program(os.uname().machine, seccomp.Closed(signals=(guard.pid,)))
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
seccomp.enforce(code)
print(json.dumps([dict(answers(pid)) for pid in (guard.pid, other.pid)]))
other.kill()
"""


def test_the_supervisors_keep_their_share_of_the_processor() -> None:
    done = run_program([sys.executable, "-c", OTHERS], timeout_s=30)
    assert done.ok, done.stderr
    guard, other = json.loads(done.stdout)
    assert guard == dict.fromkeys(guard, errno.EPERM)
    assert {name for name, answer in other.items() if answer is not None} == {"everybody"}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    "closed", [seccomp.Closed(), seccomp.Closed(True, True, (1, 2, 3))], ids=["least", "most"]
)
def test_a_program_jumps_only_forward_and_within_itself(machine: str, closed: seccomp.Closed) -> None:

    code = seccomp.program(machine, closed)
    lines = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    assert len(lines) < 4096
    for at, (kind, if_true, if_false, _) in enumerate(lines):
        if kind in (0x15, 0x35, 0x45):
            assert at + 1 + max(if_true, if_false) < len(lines)
    assert lines[-1] == (0x06, 0, 0, 0x7FFF0000), "whatever is not closed is allowed"
