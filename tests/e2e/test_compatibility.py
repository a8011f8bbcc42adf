"""An earlier version, installed from its commit: its clients, runners and archives work with this one.

Both versions run as processes over one bare remote, and the tests read what they wrote with plain git.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.frozen.driver import BIN, Site, build_site, plant_old, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.unsandboxed, pytest.mark.timeout(600)]

OLD = "086d341bd6a23d28a82487dfd039fc7788e61d58"  # before the bridge was rebuilt
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def old_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the earlier version's `kakeya_mac` lies, in an environment that is made without a network."""
    archive = ["git", "archive", "--format=tar", OLD, "bridge"]
    done = subprocess.run(archive, cwd=REPOSITORY, capture_output=True)
    if done.returncode != 0:
        pytest.fail(
            f"no commit {OLD} in the history of {REPOSITORY}; run: git fetch --unshallow", pytrace=False
        )
    root = tmp_path_factory.mktemp("old")
    tree, environment = root / "tree", root / "env"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        tar.extractall(tree, filter="data")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # Jobs run isolated, so PYTHONPATH would not do. Of what a .pth file names no further .pth file is read:
    # the present version, which is installed by one, is not importable there.
    (packages / "old.pth").write_text(f"{tree}\n{sysconfig.get_path('purelib')}\n")
    python, program = environment / "bin" / "python", environment / "bin" / "kakeya_mac"
    program.write_text(f"#!{python}\nimport sys\nfrom bridge.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    for arguments, home in ((str(python), tree), (str(BIN / "python"), REPOSITORY)):
        seen = subprocess.check_output(
            [arguments, "-I", "-c", "import bridge; print(bridge.__file__)"], text=True
        )
        assert Path(seen.strip()) == home / "bridge" / "__init__.py"
    return program.parent


@dataclasses.dataclass(frozen=True)
class Versions:
    """One remote and one configuration for both versions; their runners know each other.

    Attributes:
        old: The earlier version with its own state folder; its runner is called `earlier`.
        new: This version; its runner is called `mac`.
    """

    old: Site
    new: Site

    def write_policy(self, *, signed: bool = True) -> None:
        """The policy of both runners, with a section that only the earlier version obeys."""
        policy = self.new.config / "policy.toml"
        actions = '[actions]\nexecute = "here"\nrepository = "me/workload"\nevents = ["push"]\n'
        policy.write_text(f"require_signature = {str(signed).lower()}\n\n{actions}")
        policy.chmod(0o600)

    def result(self, nonce: str) -> dict[str, Any]:
        """A result that the client of this version believes, because a trusted runner signed it."""
        done = self.new.kakeya("result", nonce, "--json")
        assert (done.json["verified"], done.json["signature"]) == (True, "trusted"), done.out
        return done.json

    def wait_seen_running(self, nonce: str, runner: str) -> None:
        """Until `status` of this version shows the running job with its runner's signed heartbeat."""

        def seen() -> bool:  # a heartbeat that moves the ref just then hides its claim from this look
            status = self.new.kakeya("status", nonce, "--json").json
            claim = {"signer": runner, "standing": "trusted"}
            return (status["status"], status["claim"]) == ("running", claim)

        wait_until(seen, f"a signed heartbeat of {runner}", self.new.runner_log)

    def assert_answered_once(self, nonce: str, preset: str) -> str:
        """One claim, one attempt, one result: no runner took what another one had; the runner's name."""
        updates = (self.new.remote / "updates").read_text().splitlines()
        new_claim = f"refs/mac-bridge/claims/{nonce} {'0' * 40} "
        branch = f"refs/heads/mac-bridge/{preset}-{nonce} "  # holds the request, then its result
        assert sum(update.startswith(new_claim) for update in updates) == 1, self.new.runner_log()
        assert sum(update.startswith(branch) for update in updates) == 2, self.new.runner_log()
        result = self.result(nonce)
        assert result["attempt"] == 1
        return str(result["runner"])


def live_runners(client: Site) -> list[str]:
    """Names of the runners whose registrations a client reads and calls live."""
    return [each["name"] for each in client.kakeya("runners", "--json").json["runners"] if each["live"]]


@pytest.fixture(scope="module")
def both(old_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    new = build_site(tmp_path_factory.mktemp("compatibility"))
    hook = new.remote / "hooks" / "post-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(
        '#!/bin/sh\nwhile read -r before after ref; do echo "$ref $before $after" >>updates; done\n'
    )
    hook.chmod(0o755)
    environment = {**new.env, "KAKEYA_STATE": str(new.root / "state-old")}
    old = dataclasses.replace(new, env=environment, bin=old_bin, name="earlier")
    (new.config / "config.toml").write_text(f'remote = "{new.remote}"\nrequested_by = "ann"\n')
    for site in (old, new):  # the earlier version makes the lists, this one adds to them
        key = site.trust_runner(make=() if site is old else ("--make",))["key"]
        assert site.kakeya("runner", "peers", "add", site.name, "--key", key).code == 0
    key = old.kakeya("key", "--make", "--json").json["key"]
    assert old.kakeya("runner", "signers", "add", "ann", "--key", key).code == 0
    return Versions(old, new)


def test_old_client_is_served_by_new_runner(both: Versions) -> None:
    both.write_policy()
    with both.new.runner():
        done = both.old.kakeya("run", "--preset", "echo", "-p", "word=new", "--wait", "300", "--json")
        assert (done.code, done.json["signature"]) == (0, "trusted"), done.err + both.new.runner_log()
        nonce, stopped = done.json["nonce"], both.old.request("hold")
        both.new.wait_running(stopped)
        assert both.old.kakeya("status", stopped, "--json").json["status"] in ("claimed", "running")
        assert "mac" in live_runners(both.old)
        done = both.old.kakeya("cancel", stopped, "--wait", "300", "--json")
        assert (done.code, done.json["status"]) == (5, "cancelled"), done.err
    assert both.assert_answered_once(nonce, "echo") == "mac"
    for site in (both.old, both.new):
        assert site.kakeya("status", nonce, "--json").json["status"] == "passed"
        assert "hello new" in site.kakeya("logs", nonce).out
        out = site.root / f"fetched by {site.name}"
        assert site.kakeya("fetch", nonce, "-o", str(out)).code == 0
        rows = {row["nonce"]: row["status"] for row in site.kakeya("history", "--json").json["requests"]}
        assert (rows[nonce], rows[stopped]) == ("passed", "cancelled")


def test_new_client_is_served_by_old_runner(both: Versions) -> None:
    both.write_policy()
    with both.old.runner():
        done = both.new.kakeya("run", "--preset", "echo", "--wait", "300", "--json")
        assert (done.code, done.json["signature"]) == (0, "trusted"), done.err + both.new.runner_log()
        nonce, stopped = done.json["nonce"], both.new.request("hold")
        both.old.wait_running(stopped)
        both.wait_seen_running(stopped, "earlier")
        assert "earlier" in live_runners(both.new)
        done = both.new.kakeya("cancel", stopped, "--reason", "wrong word", "--wait", "300", "--json")
        assert (done.code, done.json["reason"]) == (5, "requested"), done.err
        unsigned = both.new.request("echo", "--signing-key", "none")
        both.new.wait_answered(unsigned)
    assert both.assert_answered_once(nonce, "echo") == "earlier"
    assert both.result(unsigned)["reason"] == "bad_signature"


def test_old_and_new_runner_share_one_remote(both: Versions) -> None:
    both.write_policy()
    clients = itertools.cycle((both.old, both.new))
    with both.old.runner():
        first = next(clients).request("hold")
        first_folder = both.old.wait_running(first)
        with both.new.runner():
            while_old_works = [next(clients).request("echo") for _ in range(2)]
            both.new.wait_answered(*while_old_works)
            second = next(clients).request("hold")
            second_folder = both.new.wait_running(second)
            (first_folder / "go").touch()
            while_new_works = [next(clients).request("echo") for _ in range(2)]
            both.new.wait_answered(first, *while_new_works)
            raced = [next(clients).request("echo") for _ in range(4)]
            (second_folder / "go").touch()
            both.new.wait_answered(second, *raced)
    assert both.assert_answered_once(first, "hold") == "earlier"
    assert both.assert_answered_once(second, "hold") == "mac"
    assert {both.assert_answered_once(nonce, "echo") for nonce in while_old_works} == {"mac"}
    assert {both.assert_answered_once(nonce, "echo") for nonce in while_new_works} == {"earlier"}
    assert {both.assert_answered_once(nonce, "echo") for nonce in raced} <= {"mac", "earlier"}


def test_folders_of_old_runner_are_continued(both: Versions) -> None:
    """Killed and started again as the new version, it is who it was, and finishes what it had started."""
    both.write_policy()
    with both.old.runner("--lease", "2") as process:
        interrupted = both.old.request("hold")
        both.old.wait_running(interrupted)
        process.kill()
    key = both.old.kakeya("runner", "key", "--name", "earlier", "--json").json
    identity = (both.old.root / "state-old" / "runner" / "earlier" / "id").read_text().strip()
    claim = f"refs/mac-bridge/claims/{interrupted}"
    upgraded = dataclasses.replace(both.old, bin=BIN)
    with upgraded.runner():
        wait_until(lambda: upgraded.documents(claim)["status.json"]["attempt"] == 2, "the takeover")
        (upgraded.wait_running(interrupted) / "go").touch()
        upgraded.wait_answered(interrupted)
    result = both.result(interrupted)
    assert (result["status"], result["attempt"], result["signer"]) == ("passed", 2, "earlier")
    path = f".mac-bridge/results/{interrupted}/result.json"
    assert both.new.documents(result["result_commit"])[path]["runner"]["id"] == identity
    assert upgraded.kakeya("runner", "key", "--name", "earlier", "--json").json == key


@pytest.mark.exhaustive
def test_archive_of_old_version_is_read_and_continued(both: Versions) -> None:
    both.write_policy(signed=False)
    source = both.new.request("echo")
    with both.old.runner():
        both.old.wait_answered(source)
    recent = plant_old(both.new, source, days=0.2)
    [branch] = both.new.refs(f"refs/heads/mac-bridge/echo-{recent}")
    request = both.new.git("rev-parse", f"{branch}^", cwd=both.new.remote)
    archived: list[str] = []
    for site, days in ((both.old, 40), (both.new, 30), (both.old, 20)):
        planted = plant_old(both.new, source, days=days)
        done = site.kakeya("prune", "--older-than", "2h", "--json")
        assert set(done.json["archived"]) == {planted, *([] if archived else [recent])}, done.err
        archived += done.json["archived"]
        for nonce in archived:
            assert both.result(nonce)["result_ref"] == "refs/heads/mac-bridge-archive"
    assert "hello test" in both.new.kakeya("logs", recent).out
    rows = {row["nonce"] for row in both.new.kakeya("history", "-n", "100", "--json").json["requests"]}
    assert set(archived) <= rows
    again = both.new.kakeya("again", recent, "-p", "word=more", "--signing-key", "none", "--json")
    assert again.code == 0, again.err

    for ref in (branch, f"refs/mac-bridge/inbox/{recent}"):  # anyone who can push can ask again
        both.new.git("update-ref", ref, request, cwd=both.new.remote)
    with both.new.runner():
        both.new.wait_answered(recent, again.json["nonce"])
    assert both.result(recent)["reason"] == "replayed"
    assert "hello more" in both.new.kakeya("logs", again.json["nonce"]).out
