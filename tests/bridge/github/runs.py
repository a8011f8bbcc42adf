"""A workflow run's two jobs as the real programs, in the environment that GitHub's runner would give them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from bridge.protocol.manifest import Manifest
from tests.fixtures.repo import Done, RepoFixture
from tests.fixtures.runner import RunnerFixture

_BLOCK = re.compile(r"^(?P<name>\w+)<<(?P<mark>\S+)\n(?P<value>.*?)\n(?P=mark)$", re.MULTILINE | re.DOTALL)


@dataclass
class Run:
    """One workflow run of one request."""

    repo: RepoFixture
    commit: str
    branch: str
    attempt: int = 1
    number: int = 1
    env: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """What only this run has."""
        return self.repo.root / f"run-{self.number}-{self.attempt}"

    @property
    def out(self) -> Path:
        """Where `execute` lays out its result, and `publish` finds it."""
        return self.folder / "result"

    def environment(self, job: str) -> dict[str, str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return {
            "GITHUB_ACTIONS": "true",
            "GITHUB_SERVER_URL": "https://git.example",
            "GITHUB_REPOSITORY": "team/workload",
            "GITHUB_SHA": self.commit,
            "GITHUB_REF": self.branch,
            "GITHUB_RUN_ID": "4711",
            "KAKEYA_GITHUB_API": "none",  # the network is not asked
            "GITHUB_RUN_ATTEMPT": str(self.attempt),
            "GITHUB_OUTPUT": str(self.folder / f"{job}.output"),
            "GITHUB_STEP_SUMMARY": str(self.folder / f"{job}.md"),
            "KAKEYA_REMOTE": str(self.repo.remote),
            **self.env,
        }

    def execute(self, *args: str, **env: str) -> Done:
        return self.repo.kakeya(
            *("runner", "execute", "--out", str(self.out), "--name", "mac", *args),
            cwd=self.repo.root,
            **{**self.environment("run"), **env},
        )

    def publish(self, *args: str, digest: str | None = None, **env: str) -> Done:
        given = self.outputs("run").get("digest", "") if digest is None else digest
        # A hosted machine of its own: nothing of the Mac's state is there.
        own = {"KAKEYA_STATE": str(self.folder / "state"), "KAKEYA_CONFIG": str(self.folder / "config")}
        return self.repo.kakeya(
            *("runner", "publish", "--results", str(self.out), "--digest", given, *args),
            cwd=self.repo.root,
            **{**self.environment("publish"), **own, **env},
        )

    def outputs(self, job: str) -> dict[str, str]:
        path = self.folder / f"{job}.output"
        return (
            {match["name"]: match["value"] for match in _BLOCK.finditer(path.read_text())}
            if path.exists()
            else {}
        )

    def summary(self, job: str = "publish") -> str:
        return (self.folder / f"{job}.md").read_text()


def ask(runner: RunnerFixture, preset: str = "echo", **changes: object) -> tuple[Manifest, Run]:
    """Push a request for the workflow, and the run that GitHub starts for it."""
    manifest = runner.ask(preset, **{"transport": "actions", **changes})
    commit = runner.repo.git("rev-parse", manifest.result_ref, cwd=runner.repo.remote)
    return manifest, Run(runner.repo, commit, manifest.result_ref)
