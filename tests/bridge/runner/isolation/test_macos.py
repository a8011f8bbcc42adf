"""What macOS is asked for: profiles, command lines and figures, with a stand-in for its programs.

Nothing here runs in a sandbox: the stand-in of ``sandbox-exec`` records what it was asked and starts the
program as it is. That macOS takes the profiles can only be seen on a Mac.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import struct
import sys
import time
from pathlib import Path

import pytest

from bridge.runner.isolation import darwin, processes, seatbelt
from bridge.runner.isolation.enforced import NOT_ENFORCED
from bridge.runner.isolation.processes import Process
from bridge.runner.isolation.seatbelt import Profile
from tests.bridge.runner.jobs import Jobs, marked

ODD = ["/tmp/a b", '/tmp/q"uote', "/tmp/back\\slash", "/tmp/new\nline", "/tmp/(allow default)", "/tmp/x=y"]

# Takes profiles without any of the words in ``refuses``, as another version of macOS might.
STAND_IN = """#!{python} -I
import json, os, sys
folder = {folder!r}
argv = sys.argv[1:]
with open(os.path.join(folder, "asked"), "a") as file:
    file.write(json.dumps(argv) + "\\n")
given, at = {{}}, 0
while argv[at] in ("-D", "-p"):
    given.setdefault(argv[at], []).append(argv[at + 1])
    at += 2
refused = open(os.path.join(folder, "refuses")).read().split()
if any(word in given["-p"][0] for word in refused):
    sys.exit("sandbox-exec: syntax error")
program = argv[at] if os.path.exists(argv[at]) else "/bin/true"
os.execv(program, [program, *argv[at + 1:]])
"""


class Mac(Jobs):
    """Jobs as on a Mac, with a stand-in for its sandbox program."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self._records = folder / "records"
        self._records.mkdir()
        self.refuse()
        program = folder / "sandbox-exec"
        program.write_text(STAND_IN.format(python=sys.executable, folder=str(self._records)))
        program.chmod(0o755)
        lines = [
            "import json, sys",
            "from bridge.runner import supervisor",
            "from bridge.runner.isolation import darwin, libc, processes, seatbelt",
            "libc.LINUX = False",
            f"seatbelt.PROGRAM = {str(program)!r}",
            "darwin.table = processes.from_proc",
            "darwin.marked.__defaults__ = (('ps', 'axeww', '-o', 'pid=,command='),)",
            "raise SystemExit(supervisor.main(json.loads(sys.argv[1])))",
        ]
        monkeypatch.setattr("bridge.runner.child.SUPERVISOR", ("-c", "\n".join(lines)))

    def refuse(self, *words: str) -> None:
        (self._records / "refuses").write_text(" ".join(words))

    @property
    def asked(self) -> list[list[str]]:
        path = self._records / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="stands in for macOS, with /proc")


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    return Mac(tmp_path, monkeypatch)


@pytest.mark.parametrize("network", [False, True], ids=["no-network", "network"])
@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_a_profile_is_well_formed_and_its_last_word_is_the_room(network: bool, strict: bool) -> None:
    text = Profile(("/one", "/two"), network, strict).text()
    bare = re.sub(r'"[^"]*"', '""', text)
    assert bare.count("(") == bare.count(")")
    assert text.startswith("(version 1)\n(allow default)\n")
    assert ("(deny network*)" in text) is not network
    order = [
        text.index(rule)
        for rule in ("(deny file-write*)", '(param "HIDDEN0")', '(param "HIDDEN1")', '(param "ROOM")')
    ]
    assert order == sorted(order), "of several rules the last one holds"
    [terminals] = [line for line in text.splitlines() if line.startswith("(allow") and "/dev/ttys" in line]
    assert '(extension "com.apple.sandbox.pty")' in terminals, "of the user's terminals, only the job's own"
    assert ("(deny signal)" in text) is strict


def test_a_job_without_the_network_may_talk_to_itself_in_its_room_and_nowhere_else() -> None:
    text = Profile(("/one",), network=False, strict=True, sockets=True).text()
    opened = [line for line in text.splitlines() if line.startswith("(allow network")]
    assert len(opened) == 2
    assert all('unix-socket (subpath (param "ROOM"))' in line for line in opened)
    assert text.index("(deny network*)") < text.index(opened[0]), "of several rules the last one holds"
    assert "(local ip" not in text
    assert "(remote ip" not in text


def test_no_path_is_ever_part_of_the_rules() -> None:
    profile = Profile(tuple(ODD), network=False, strict=True)
    command = profile.command(["/bin/echo", "-p", "x"], ODD[0])
    assert profile.text() == Profile(("/x",) * len(ODD), network=False, strict=True).text()
    assert command[-3:] == ["/bin/echo", "-p", "x"]
    given = dict(part.split("=", 1) for flag, part in itertools.pairwise(command) if flag == "-D")
    assert [given[f"HIDDEN{number}"] for number in range(len(ODD))] == ODD
    assert given["ROOM"] == os.path.realpath(ODD[0])


def test_a_hidden_place_behind_a_link_is_named_both_ways(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "var").symlink_to("private")
    spelled = str(tmp_path / "var" / "key")
    assert seatbelt.hidden_paths([spelled]) == (spelled, str(tmp_path / "private" / "key"))


@linux
def test_a_job_is_started_through_the_profile_that_was_tried(mac: Mac, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("PRIVATE")
    ended = mac.run("print('up')", hide=[key, tmp_path / "absent"])
    assert ended.exit_code == 0
    assert mac.lines == ["up"]
    trial, job = mac.asked
    assert trial[-1] == "/usr/bin/true"
    assert job[job.index("-p") + 1] == trial[trial.index("-p") + 1]
    assert job[:4] == ["-D", f"ROOM={mac.folder.resolve()}", "-D", f"HIDDEN0={key}"]
    assert job[job.index("-p") + 2] == sys.executable
    enforced = mac.enforced
    assert {enforced.network, enforced.writes, enforced.credentials, enforced.processes} == {
        "sandbox profile"
    }
    assert (enforced.calls, enforced.tree) == (NOT_ENFORCED, "hunted")


@linux
def test_a_profile_that_a_machine_does_not_take_is_replaced_by_a_simpler_one_and_said_so(mac: Mac) -> None:
    mac.refuse("same-sandbox")
    assert mac.run("print('up')").exit_code == 0
    assert mac.enforced.writes == "sandbox profile"
    assert mac.enforced.processes == NOT_ENFORCED
    assert "(deny network*)" in mac.asked[-1][mac.asked[-1].index("-p") + 1]


@linux
def test_a_machine_that_does_not_know_sockets_in_a_folder_keeps_all_other_rules(mac: Mac) -> None:
    mac.refuse("network-bind")
    assert mac.run("print('up')").exit_code == 0
    profile = mac.asked[-1][mac.asked[-1].index("-p") + 1]
    assert "unix-socket" not in profile
    assert "(deny network*)" in profile
    assert (mac.enforced.network, mac.enforced.processes) == ("sandbox profile", "sandbox profile")


@linux
def test_where_no_profile_is_taken_the_result_says_that_nothing_holds(mac: Mac) -> None:
    mac.refuse("version")
    assert mac.run("print('up')").exit_code == 0
    assert len(mac.asked) == 4, "four trials, and no job"
    assert {mac.enforced.network, mac.enforced.writes, mac.enforced.credentials} == {NOT_ENFORCED}


@linux
@pytest.mark.parametrize(
    "hides",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["by-its-home", "by-having-been-seen"],
)
def test_what_left_the_tree_is_hunted_down_and_counted(mac: Mac, hides: bool) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    env = {} if hides else {"HOME": f"{mac.folder}/home", "PATH": "/bin"}
    script = f"""
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if {hides}:
                time.sleep(1.5)  # long enough to be seen
            if os.fork() == 0:
                argv = [sys.executable, "-I", "-c", "import time; time.sleep(60)", "{mark}"]
                time.sleep(1.5 if {hides} else 0)
                os.execve(sys.executable, argv, {env!r})
            if {hides}:
                time.sleep(2)
            os._exit(0)
        os.wait()
        time.sleep(0.2)
    """
    ended = mac.run(script)
    assert ended.exit_code == 0, mac.log.read_text()
    assert (ended.strays, ended.survivors) == (1, 0)
    assert marked(mark) == []


@linux
def test_a_job_that_leaves_nothing_has_no_strays(mac: Mac) -> None:
    ended = mac.run("import subprocess; subprocess.run(['sleep', '0.3']); print('done')")
    assert (ended.exit_code, ended.strays, ended.survivors) == (0, 0, 0)


LISTING = """
    1 /sbin/launchd
  501 /usr/bin/python3 -I x PATH=/bin HOME=/Users/me/state/jobs/n1/home TMPDIR=/x
  502 (zombie)
  503 sleep 60 HOME=/Users/me/state/jobs/n1/home
  504 sleep 60 HOME=/Users/me/state/jobs/n1/home2 A=b
  505 sleep 60 XHOME=/Users/me/state/jobs/n1/home A=b
  506 sleep 60 HOME=/Users/me
"""


def test_processes_are_told_by_their_home() -> None:
    assert darwin.parse_marked(LISTING, "/Users/me/state/jobs/n1/home") == {501, 503}


def test_a_listing_that_cannot_be_made_finds_nobody() -> None:
    assert darwin.marked("/x", ["/nonexistent/ps"]) == set()


class Recorded:
    """libproc with three processes: ours, one that tells us less, and one that has just ended."""

    known = ((7, 1, 1_700_000_000, 5, 3, 9 << 30), (8, 7, 1_700_000_001, 6, None, None))

    def proc_listallpids(self, buffer: ctypes.Array[ctypes.c_char] | None, size: int) -> int:
        if buffer is not None:
            buffer[: 4 * 3] = struct.pack("=3i", 7, 8, 9)
        return 3

    def proc_pidinfo(
        self, pid: int, flavour: int, argument: int, buffer: ctypes.Array[ctypes.c_char], size: int
    ) -> int:
        found = [row for row in self.known if row[0] == pid]
        if not found:
            return 0
        [(_, parent, seconds, micro, threads, _)] = found
        if flavour == 3:
            buffer[:136] = struct.pack(
                "=12I16s32s6I2Q", 0, 0, 0, pid, parent, *[0] * 7, b"a", b"b", *[0] * 6, seconds, micro
            )
            return 136
        if threads is None:
            return 0
        buffer[:96] = struct.pack("=6Q12i", *[0] * 6, *[0] * 9, threads, 0, 0)
        return 96

    def proc_pid_rusage(self, pid: int, flavour: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
        footprint = next((row[5] for row in self.known if row[0] == pid), None)
        if footprint is None:
            return -1
        buffer[:96] = struct.pack("=16s10Q", b"", *[0] * 7, footprint, 0, 0)
        return 0


def test_the_figures_of_libproc_are_read_where_its_headers_put_them() -> None:
    assert darwin.table(Recorded()) == [
        Process(7, 1, 3, 9 << 30, started=1_700_000_000_000_005),
        Process(8, 7, 1, 0, started=1_700_000_001_000_006),
    ]


@pytest.mark.skipif(sys.platform != "darwin", reason="asks macOS itself")
def test_on_a_mac_this_process_is_found() -> None:
    found = {each.pid: each for each in processes.table()}
    assert found[os.getpid()].parent == os.getppid()
    assert found[os.getpid()].resident > 1 << 20
