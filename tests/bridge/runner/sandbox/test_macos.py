"""What macOS is asked for: profiles and command lines, with a stand-in for its program. Never run on a Mac.

The stand-in of ``sandbox-exec`` records what it was asked and starts the program as it is.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from bridge.errors import MachineError
from bridge.runner.sandbox import NOT_ENFORCED, Access, JobDirs, SandboxExec, find_working
from tests.bridge.runner.jobs import Jobs, linux, marked

ODD = ["/tmp/a b", '/tmp/q"uote', "/tmp/back\\slash", "/tmp/new\nline", "/tmp/(allow default)", "/tmp/x=y"]

# Accepts profiles without any of the words in ``refuses``, as another version of macOS might.
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


class FakeSandboxExec:
    """A stand-in for the sandbox program of a Mac."""

    def __init__(self, folder: Path) -> None:
        self._records = folder / "records"
        self._records.mkdir()
        self.refuse()
        self.program = folder / "sandbox-exec"
        self.program.write_text(STAND_IN.format(python=sys.executable, folder=str(self._records)))
        self.program.chmod(0o755)

    def refuse(self, *words: str) -> None:
        (self._records / "refuses").write_text(" ".join(words))

    @property
    def asked(self) -> list[list[str]]:
        path = self._records / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSandboxExec:
    made = FakeSandboxExec(tmp_path)
    monkeypatch.setattr(SandboxExec, "program", str(made.program))
    find_working.cache_clear()
    return made


def access(folder: Path, *readable: str, network: bool = False, hidden: tuple[str, ...] = ()) -> Access:
    return Access(
        JobDirs(folder), tuple(map(Path, readable)), hidden=tuple(map(Path, hidden)), network=network
    )


def rules(text: str, parameters: dict[str, str]) -> list[tuple[str, str]]:
    """Rules on files in order: the path and the rule."""
    found = re.findall(r'\((allow|deny) (file-[a-z* -]+) \(subpath \(param "(\w+)"\)\)\)', text)
    return [(parameters[name], f"{action} {what}") for action, what, name in found]


@pytest.mark.parametrize("network", [False, True], ids=["no-network", "network"])
@pytest.mark.parametrize("strict", [False, True], ids=["simple", "strict"])
def test_profile_is_well_formed(network: bool, strict: bool) -> None:
    _, text = SandboxExec(strict).profile(access(Path("/Users/me/state/jobs/n"), network=network))
    bare = re.sub(r'"[^"]*"', '""', text)
    assert bare.count("(") == bare.count(")")
    assert text.startswith("(version 1)\n(allow default)\n")
    assert ("(deny network*)" in text) is not network
    assert ("(deny signal)" in text) is strict
    assert "(deny file-write*)" in text
    [terminals] = [line for line in text.splitlines() if line.startswith("(allow") and "/dev/ttys" in line]
    assert '(extension "com.apple.sandbox.pty")' in terminals, "of the user's terminals, only the job's own"


def test_homes_are_denied_and_the_inner_rule_comes_last() -> None:
    parameters, text = SandboxExec().profile(
        access(
            Path("/Users/me/state/jobs/n"),
            "/Users/me/venv",
            "/Volumes/models/big",
            hidden=("/Users/me/state", "/opt/kakeya/config"),
        )
    )
    found = rules(text, parameters)
    assert dict(found)["/Volumes/models/big"] == "allow file-read*"
    order = [path for path, _ in found]
    for outer, inner in (
        ("/Users", "/Users/me/venv"),
        ("/Users", "/Users/me/state"),
        ("/Users/me/state", "/Users/me/state/jobs/n"),
        ("/Volumes", "/Volumes/models/big"),
    ):
        assert order.index(outer) < order.index(inner), "of several rules the last one decides"
    denied = {path for path, rule in found if rule == "deny file-read-data file-read-xattr"}
    assert {"/Users", "/Volumes", "/private/var/root", "/Users/me/state", "/opt/kakeya/config"} <= denied
    assert [path for path, rule in found if "file-write*" in rule] == ["/Users/me/state/jobs/n"]


def test_job_without_network_may_use_sockets_in_its_folders_only() -> None:
    _, text = SandboxExec().profile(access(Path("/job")))
    opened = [line for line in text.splitlines() if line.startswith("(allow network")]
    assert len(opened) == 2
    assert all('unix-socket (subpath (param "JOB"))' in line for line in opened)
    assert text.index("(deny network*)") < text.index(opened[0])
    assert "(local ip" not in text
    assert "(remote ip" not in text


def test_no_path_becomes_part_of_the_rules() -> None:
    sandbox = SandboxExec()
    _, text = sandbox.profile(access(Path(ODD[0]), *ODD[1:]))
    assert not any(path in text for path in ODD)
    command = sandbox.command(["/bin/echo", "-p", "x"], access(Path(ODD[0]), *ODD[1:]))
    assert command[-3:] == ["/bin/echo", "-p", "x"]
    given = dict(part.split("=", 1) for flag, part in itertools.pairwise(command) if flag == "-D")
    assert set(ODD) <= set(given.values())
    assert given["JOB"] == os.path.realpath(ODD[0])


def test_place_behind_a_link_is_named_both_ways(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "var").symlink_to("private")
    parameters, _ = SandboxExec().profile(access(tmp_path, hidden=(str(tmp_path / "var" / "key"),)))
    assert {str(tmp_path / "var" / "key"), str(tmp_path / "private" / "key")} <= set(parameters.values())


@linux
def test_job_is_started_through_the_profile(mac: FakeSandboxExec, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, find_working(SandboxExec))
    assert jobs.run("print('up')").exit_code == 0
    assert jobs.lines == ["up"]
    trial, job = mac.asked
    assert trial[-1] == "true"
    assert job[job.index("-p") + 2] == sys.executable
    assert f"JOB={jobs.dirs.root.resolve()}" in job
    enforced = jobs.sandbox.enforced(network=False)
    held = ("network", "writes", "credentials", "processes")
    assert {enforced[f"isolation_{item}"] for item in held} == {"sandbox profile"}
    assert (enforced["isolation_calls"], enforced["isolation_tree"]) == (NOT_ENFORCED, "hunted")


@linux
def test_unknown_rules_are_left_out_and_reported(mac: FakeSandboxExec) -> None:
    mac.refuse("same-sandbox")
    sandbox = find_working(SandboxExec)
    assert not sandbox.strict
    assert sandbox.enforced(network=False)["isolation_processes"] == NOT_ENFORCED
    assert sandbox.enforced(network=False)["isolation_credentials"] == "sandbox profile"


@linux
@pytest.mark.parametrize("how", ["absent", "no profile is accepted"])
def test_mac_without_a_working_sandbox_is_an_error(mac: FakeSandboxExec, how: str) -> None:
    mac.refuse("version")
    if how == "absent":
        mac.program.unlink()
    with pytest.raises(MachineError, match="not installed" if how == "absent" else "syntax error"):
        find_working(SandboxExec)


@linux
@pytest.mark.parametrize(
    "hides",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["by-its-home", "by-having-been-seen"],
)
def test_process_that_left_the_tree_is_found_killed_and_counted(
    mac: FakeSandboxExec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hides: bool
) -> None:
    lines = [
        "import sys",
        "from bridge.runner import supervisor",
        "supervisor._prctl = lambda *_: None",  # orphans go elsewhere, as on macOS
        "raise SystemExit(supervisor.main(*map(int, sys.argv[1:])))",
    ]
    monkeypatch.setattr("bridge.runner.child.SUPERVISOR", ("-c", "\n".join(lines)))
    jobs = Jobs(tmp_path, find_working(SandboxExec))
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    env = {} if hides else {"HOME": str(jobs.dirs.home), "PATH": "/bin"}
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
    ended = jobs.run(script)
    assert ended.exit_code == 0, jobs.log.read_text()
    assert (ended.escaped, ended.survivors) == (1, 0)
    assert marked(mark) == []


@linux
def test_job_that_leaves_nothing_has_no_escaped_processes(mac: FakeSandboxExec, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, find_working(SandboxExec))
    ended = jobs.run("import subprocess; subprocess.run(['sleep', '0.3']); print('done')")
    assert (ended.exit_code, ended.escaped, ended.survivors) == (0, 0, 0)
