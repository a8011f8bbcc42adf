"""Repository code reads nothing but what it was given; without a sandbox it is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.git.repo import GitRepo
from bridge.proc import run_program
from bridge.runner.sandbox import Bubblewrap, find_working
from tests.bridge.runner.jobs import linux, needs_sandbox
from tests.fixtures.runner import RunnerFixture

CANARY = "canary-" + "4f1d9c"  # in two parts, so that the program itself is not found
IN_HOME = (
    *(".ssh/id_ed25519", ".ssh/config", ".gnupg/private-keys-v1.d/key", ".codex/auth.json", ".claude.json"),
    *(".config/gh/hosts.yml", ".config/gcloud/credentials.db", ".config/git/credentials", ".config/other/x"),
    *(".aws/credentials", ".azure/token", ".kube/config", ".docker/config.json", ".netrc", ".pypirc"),
    *(".npmrc", ".git-credentials", ".gitconfig", ".bash_history", ".python_history", ".pgpass"),
    *(".cache/huggingface/token", ".cargo/credentials.toml", ".local/share/keyrings/login.keyring"),
    *(".mozilla/cookies.sqlite", "Library/Keychains/login.keychain-db", "Library/Cookies/x"),
    *("actions-runner/.credentials", "actions-runner/.credentials_rsaparams", "Documents/letter.txt"),
    *("kakeya-models/other-model/config.json", "deploy-keys/read-only"),
)
PROGRAM = """
import json, os, subprocess, sys
canary, places = "canary-" + "4f1d9c", json.load(open("places.json"))
found, tried = [], 0
def look(place, read):
    global tried
    tried += 1
    try:
        if canary in read():
            found.append(place)
    except OSError:
        pass
for place in places:
    look(place, lambda: open(place, errors="replace").read())
    look(f"listing {place}", lambda: canary * (os.path.basename(place) in os.listdir(os.path.dirname(place))))
    look(f"root {place}", lambda: open(f"/proc/1/root{place}", errors="replace").read())
for name in os.listdir("/proc"):
    for file in ("environ", "cmdline") if name.isdigit() and int(name) != os.getpid() else ():
        look(f"/proc/{name}/{file}", lambda: open(f"/proc/{name}/{file}", errors="replace").read())
look("environment", lambda: json.dumps(dict(os.environ)))
look("/etc/shadow", lambda: canary if os.path.exists("/etc/shadow") else "")
print("tried", tried, "found", json.dumps(found))
"""


def commit(runner: RunnerFixture, places: list[str]) -> str:
    """A workload that holds the program and the list of places."""
    (runner.repo.clone / "places.json").write_text(json.dumps(places))
    (runner.repo.clone / "program.py").write_text(PROGRAM)
    runner.repo.git("add", "-A", "-f")
    runner.repo.git("-c", "user.name=M", "-c", "user.email=m@example.org", "commit", "-qm", "hostile")
    return GitRepo(runner.repo.clone).resolve("HEAD")


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A file of another program in the machine's own temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="kakeya-other-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def places(runner: RunnerFixture, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Canaries all over the machine; their paths."""
    home = runner.repo.root / "user"
    other = runner.state / "runner" / "other"
    key = home / "deploy-keys" / "read-only"
    files = [
        *(home / name for name in IN_HOME),
        *(other / "id_ed25519", other / "spool-1" / "result.json", runner.state / "secret"),
        *(runner.config / "allowed_signers.bak", elsewhere / "file", Path("/dev/shm") / elsewhere.name),
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CANARY)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CANARY_VARIABLE", CANARY)
    runner.policy(f'allow_repo_code = true\n[actions]\nkey = "{key}"\n')
    own = [*(runner.state.rglob("id_ed25519")), runner.config / "policy.toml"]
    return [str(file) for file in (*files, *own)]


def preset(runner: RunnerFixture) -> None:
    runner.preset("hostile", ["${python}", "-I", "program.py"], engine="workload", workspace="full")


@linux
@needs_sandbox
def test_repository_code_reads_no_canary(runner: RunnerFixture, places: list[str]) -> None:
    preset(runner)
    asked = runner.ask("hostile", workload_sha=commit(runner, places))
    assert runner.serve_once() == 1
    log = runner.log(asked.nonce)
    assert runner.verdict(asked.nonce) == ("passed", "ok"), log
    [line] = [line for line in log.splitlines() if line.startswith("tried")]
    _, tried, _, found = line.split(" ", 3)
    assert int(tried) > 100, "three ways to each of the places"
    assert json.loads(found) == []
    machine = runner.answer(asked.nonce).result.runner.machine
    assert machine["sandbox"] == "bubblewrap"


@linux
def test_repository_code_is_refused_without_a_sandbox(
    runner: RunnerFixture, places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bubblewrap, "program", "no-such-bwrap")
    find_working.cache_clear()
    preset(runner)
    refused = runner.ask("hostile", workload_sha=commit(runner, places))
    installed = runner.ask("echo")
    for _ in range(2):
        assert runner.serve_once() == 1
    assert runner.verdict(refused.nonce) == ("refused", "machine_unfit")
    message = runner.answer(refused.nonce).result.verdict.message
    assert "apt-get install bubblewrap" in message
    assert "allow_unsandboxed = true" in message
    assert runner.verdict(installed.nonce) == ("passed", "ok")
    assert runner.answer(installed.nonce).result.runner.machine["sandbox"] == "none"


@pytest.mark.slow
@linux
def test_owner_may_allow_it_and_every_result_says_so(
    runner: RunnerFixture, places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also shows that the canaries can be read where nothing keeps a job from them."""
    monkeypatch.setattr(Bubblewrap, "program", "no-such-bwrap")
    find_working.cache_clear()
    runner.policy("allow_repo_code = true\nallow_unsandboxed = true\n")
    preset(runner)
    asked = runner.ask("hostile", workload_sha=commit(runner, places))
    assert runner.serve_once() == 1
    found = json.loads(runner.log(asked.nonce).split("found ")[1])
    assert set(places) - {str(runner.config / "policy.toml")} <= {*found, *places_without_canary(places)}
    machine = runner.answer(asked.nonce).result.runner.machine
    assert machine["sandbox"] == "none (allow_unsandboxed)"
    assert machine["isolation_credentials"] == "not enforced"


def places_without_canary(places: list[str]) -> list[str]:
    return [place for place in places if CANARY not in Path(place).read_text(errors="replace")]


@linux
@needs_sandbox
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_sandbox_works_for_an_ordinary_user(tmp_path: Path) -> None:
    """It reads what it was given, and neither a home that everybody may read nor root's."""
    script = (
        "import os\n"
        "for place in ('/root', '/home', '/opt', '/srv', '/mnt', '/etc/shadow', '/var/log'):\n"
        "    assert not os.path.exists(place), place\n"
        "print('confined', os.getuid())\n"
    )
    code = (
        "import os, sys, tempfile, subprocess; from pathlib import Path\n"
        "sys.path[:0] = [%r]\n"
        "from bridge.runner.sandbox import find_sandbox\n"
        "from bridge.runner.sandbox import Access, JobDirs\n"
        "os.setgroups([]); os.setgid(4321); os.setuid(4321)\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    dirs = JobDirs(Path(folder) / 'job'); dirs.make()\n"
        "    argv = find_sandbox().command(['/usr/bin/python3', '-c', %r], Access(dirs))\n"
        "    print(argv[0]); sys.stdout.flush(); subprocess.run(argv, check=True)\n"
    )
    if shutil.which("python3", path="/usr/bin") is None:
        pytest.skip("there is no Python of the system")
    root = str(Path(__file__).parents[4])
    done = run_program([sys.executable, "-c", code % (root, script)], timeout_s=60)
    assert done.stdout.decode().splitlines()[-1:] == ["confined 4321"], done.stderr.decode()
