"""The project's own workflow files, executed by act against a bare repository on this machine.

act does for a workflow what GitHub does: it reads the file, evaluates its expressions, runs its jobs in their
order and their steps with their environments. Three actions are on no package registry, so stand-ins lie in
``actions/``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from bridge.protocol import refs
from tests.fixtures.repo import BIN, RepoFixture
from tests.fixtures.runner import RunnerFixture

ROOT = Path(__file__).resolve().parents[2]
ACT = ROOT / ".act" / "act"
STAND_INS = Path(__file__).parent / "actions"
WORKFLOWS = ROOT / ".github" / "workflows"
_USES = re.compile(r"uses: (actions/[a-z-]+)@([0-9a-f]{40})")
# What a package installer needs to know of this machine's network.
NETWORK = re.compile(r"(?i)(uv|pip)_\w+|ssl_\w+|\w+_ca_bundle|\w+_proxy|\w+_cacert")


def pinned() -> dict[str, str]:
    """The actions that the project's workflows use, each with its one pin."""
    found: dict[str, str] = {}
    for file in WORKFLOWS.glob("*.yaml"):
        for name, sha in _USES.findall(file.read_text()):
            assert found.setdefault(name, sha) == sha, f"{name} is pinned twice, differently"
    return found


@dataclass
class Acted:
    """How a workflow run ended."""

    code: int
    log: str

    def job(self, name: str) -> bool:
        """Whether a job of it succeeded."""
        succeeded = re.search(rf"\[[^\]]*/{name}\s*\] 🏁  Job succeeded", self.log)
        failed = re.search(rf"\[[^\]]*/{name}\s*\] 🏁  Job failed", self.log)
        assert (succeeded is None) != (failed is None), self.log
        return succeeded is not None


@dataclass
class Workshop:
    """A remote whose default branch is this project, a Mac's state, and act to run its workflows."""

    repo: RepoFixture
    env: dict[str, str] = field(default_factory=dict)
    workdir_name: str = "act"

    @property
    def workdir(self) -> Path:
        """Where act works; concurrent runs have one each."""
        return self.repo.root / self.workdir_name

    @property
    def runner(self) -> RunnerFixture:
        return RunnerFixture(self.repo)

    @property
    def store(self) -> Path:
        return self.workdir / "artifacts"

    def move_in(self) -> None:
        """Make the project, as it lies here, the default branch of the remote."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for name in listed.decode().split("\0"):
            source = ROOT / name
            if name and source.is_file():
                target = self.repo.clone / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        self.repo.git("add", "--all")
        who = ("-c", "user.name=owner", "-c", "user.email=owner@example.org")
        self.repo.git(*who, "commit", "--quiet", "-m", "the project")
        self.repo.git("push", "--quiet", "origin", "HEAD:main")

    def push_event(self, ref: str, *, variables: dict[str, str] | None = None, **changes: str) -> Acted:
        """What GitHub does when a request's branch is pushed, in a repository with these variables."""
        commit = self.repo.git("rev-parse", ref, cwd=self.repo.remote)
        event = {
            "ref": ref,
            "after": commit,
            "head_commit": {"id": commit},
            "created": True,
            "deleted": False,
        }
        return self.act("push", "mac-bridge.yaml", event, ref, variables=variables, **changes)

    def dispatch_event(
        self,
        workflow: str,
        inputs: dict[str, str],
        *,
        variables: dict[str, str] | None = None,
        **changes: str,
    ) -> Acted:
        """What GitHub does when a workflow of the default branch is started by hand."""
        event = {"ref": "refs/heads/main", "inputs": inputs}
        ref = "refs/heads/main"
        return self.act("workflow_dispatch", workflow, event, ref, variables=variables, **changes)

    def act(
        self,
        name: str,
        workflow: str,
        event: dict[str, object],
        ref: str,
        *,
        variables: dict[str, str] | None = None,
        **changes: str,
    ) -> Acted:
        """Run a workflow of the commit that `ref` names, for an event."""
        repo = self.repo
        tree, home = self.workdir / "tree", self.workdir / "home"
        for folder in (tree, self.store):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.store, home):
            folder.mkdir(parents=True, exist_ok=True)
        repo.git("clone", "--quiet", str(repo.remote), str(tree), cwd=repo.root)
        repo.git("fetch", "--quiet", "origin", ref, cwd=tree)
        repo.git("checkout", "--quiet", "-B", ref.removeprefix("refs/heads/"), "FETCH_HEAD", cwd=tree)
        repository = {"default_branch": "main", "name": "workload", "full_name": "team/workload"}
        payload = {**event, "repository": {**repository, "owner": {"login": "team", "name": "team"}}}
        (self.workdir / "event.json").write_text(json.dumps(payload))
        given = {
            **{key: value for key, value in os.environ.items() if NETWORK.fullmatch(key)},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(home),
            "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv")),
            "KAKEYA_STATE": str(self.runner.state),
            "KAKEYA_CONFIG": str(self.runner.config),
            "STAND_IN_REMOTE": str(repo.remote),
            "STAND_IN_STORE": str(self.store),
            "KAKEYA_GITHUB_API": "none",  # the network is not asked
            **self.env,
            **changes,
        }
        argv = [str(ACT), name, "-C", str(tree), "-W", f".github/workflows/{workflow}"]
        argv += ["-e", str(self.workdir / "event.json"), "--action-offline-mode", "--no-skip-checkout"]
        argv += ["-P", "self-hosted=-self-hosted", "-P", "ubuntu-latest=-self-hosted"]
        argv += ["--no-cache-server"]
        for key, value in {"KAKEYA_REMOTE": str(repo.remote), **(variables or {})}.items():
            argv += ["--var", f"{key}={value}"]
        for action, sha in pinned().items():
            argv += ["--local-repository", f"{action}@{sha}={STAND_INS / action.removeprefix('actions/')}"]
        if token := given.pop("GITHUB_TOKEN", ""):
            argv += ["--secret", f"GITHUB_TOKEN={token}"]
        for key, value in given.items():
            argv += ["--env", f"{key}={value}"]
        done = subprocess.run(
            argv,
            cwd=repo.root,
            env={"PATH": given["PATH"], "HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=1500,
        )
        return Acted(done.returncode, done.stdout.decode(errors="replace"))

    def ask(self, preset: str = "probe", **changes: object) -> tuple[str, str]:
        """Push a request for the workflow; its nonce and branch."""
        manifest = self.runner.ask(preset, **{"transport": "actions", **changes})
        return manifest.nonce, manifest.result_ref

    def has_inbox(self, nonce: str) -> bool:
        return refs.INBOX + nonce in self.repo.remote_refs()
