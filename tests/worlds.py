"""A bus on real repositories: a bare remote, a client's clone, a runner's cache, the moves tests make."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.bus.claims import Claim, RunnerIdentity, claim
from bridge.bus.publish import ResultFiles, publish
from bridge.bus.requests import RefValue, Submitted, submit
from bridge.bus.results import ExpectedRequest
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import File, Reason, Result, RunnerFacts, Status, Verdict
from tests.bridge.evidence import reports
from tests.houses import House, build_house

RUNNER = RunnerIdentity("testmac", "0123456789abcdef", "00000000000000aa")
FILES = {"report.json": b'{"kind": "probe"}\n', "logs/run.log": b"hello\n"}


@dataclass
class World:
    """One bus and everybody on it."""

    house: House
    root: Path
    git: GitRepo = field(init=False)
    cache: GitCache = field(init=False)

    def __post_init__(self) -> None:
        self.git = GitRepo(self.house.clone)
        self.cache = GitCache(self.root / "state" / "cache.git", self.remote)
        self.cache.prepare()

    @property
    def remote(self) -> str:
        return str(self.house.remote)

    def manifest(self, **changes: object) -> Manifest:
        now = datetime.now(UTC).replace(microsecond=0)
        if "nonce" in changes:  # its time and `created_at` must fit
            now = datetime.strptime(str(changes["nonce"])[:16], "%Y%m%dt%H%M%Sz").replace(tzinfo=UTC)
        nonce = str(changes.get("nonce") or refs.new_nonce(now, secrets.token_bytes(6)))
        fields: dict[str, object] = {
            "nonce": nonce,
            "preset": "probe",
            "workload_sha": self.house.head(),
            "result_ref": refs.request_ref("probe", nonce, None),
            "created_at": now,
            "expires_at": now + timedelta(hours=1),
            "audience": refs.audience_of(self.remote),
        }
        return Manifest.model_validate({**fields, **changes})

    def submit(self, **changes: object) -> Submitted:
        return submit(self.git, self.remote, self.manifest(**changes), None)

    def claim(self, submitted: Submitted, identity: RunnerIdentity = RUNNER, **options: Any) -> Claim:
        """Claim a request as a runner does that found it in the inbox, or on its branch alone."""
        self.bring(submitted)
        held = claim(
            self.cache,
            self.remote,
            nonce=submitted.nonce,
            place=self.place(submitted),
            identity=identity,
            **options,
        )
        assert held is not None
        return held

    def place(self, submitted: Submitted) -> RefValue:
        """Where a runner finds a request."""
        ref = refs.INBOX + submitted.nonce if submitted.in_inbox else submitted.ref
        return RefValue(ref, submitted.commit)

    def bring(self, submitted: Submitted) -> None:
        """Fetch a request into the runner's cache."""
        assert not self.cache.bring({submitted.commit: submitted.commit}, [submitted.commit])

    def expected(self, submitted: Submitted) -> ExpectedRequest:
        return ExpectedRequest(submitted.nonce, submitted.commit, self.house.head())

    def result(
        self,
        expected: ExpectedRequest,
        files: dict[str, bytes] | None = None,
        roles: dict[str, str] | None = None,
        **changes: object,
    ) -> bytes:
        listed, roles = FILES if files is None else files, roles or {}
        fields: dict[str, object] = {
            "nonce": expected.nonce,
            "request_commit": expected.commit,
            "workload_sha": expected.workload_sha,
            "preset": "probe",
            "preset_digest": "0" * 64,
            "engine_source": "installed",
            "runner": RunnerFacts(
                name=RUNNER.name,
                id=RUNNER.id,
                version="0.1.0",
                machine=reports.runner_facts(reports.throughput()),
            ),
            "attempt": 1,
            "started_at": "2026-03-01T12:00:00Z",
            "finished_at": "2026-03-01T12:00:01Z",
            "files": tuple(
                File(
                    path=path,
                    sha256=hashlib.sha256(data).hexdigest(),
                    bytes=len(data),
                    role=roles.get(path, "other"),
                )
                for path, data in listed.items()
            ),
            "verdict": Verdict(status=Status.PASSED, reason=Reason.OK),
        }
        return Result.model_validate({**fields, **changes}).to_bytes()

    def answer(
        self,
        submitted: Submitted,
        *,
        held: Claim | None = None,
        result: bytes | None = None,
        signature: bytes | None = None,
        files: dict[str, bytes] | None = None,
    ) -> RefValue:
        self.bring(submitted)
        listed = FILES if files is None else files
        answer = ResultFiles(
            nonce=submitted.nonce,
            request_commit=submitted.commit,
            result_ref=submitted.ref,
            result=result or self.result(self.expected(submitted), listed),
            signature=signature,
            files=listed,
        )
        return publish(self.cache, self.remote, answer, claim=held, sleep=lambda _: None)

    def hook(self, name: str, script: str) -> None:
        """Install a server-side hook."""
        path = self.house.remote / "hooks" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def take_branches_only(self) -> None:
        """Make the server decline every ref outside refs/heads/."""
        self.hook(
            "update", 'case "$1" in refs/heads/*) exit 0;; *) echo "only branches are taken"; exit 1;; esac'
        )

    def commit(self, parent: str, files: dict[str, bytes | None], message: str = "by hand\n") -> str:
        """Write a commit into the remote itself, as somebody with push rights could; None deletes a path."""
        remote, index = self.house.remote, str(self.root / f"index-{secrets.token_hex(4)}")
        env = {**self.house.env, "GIT_INDEX_FILE": index}
        hand = House(self.house.root, env)
        hand.git("read-tree", parent, cwd=remote)
        for path, data in files.items():
            if data is None:
                nothing = f"0 {'0' * 40}\t{path}\n"
                hand.git("update-index", "--index-info", cwd=remote, input=nothing)
                continue
            blob = hand.git("hash-object", "-w", "--stdin", cwd=remote, input=data.decode())
            hand.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", cwd=remote)
        tree = hand.git("write-tree", cwd=remote)
        who = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
        return hand.git(*who, "commit-tree", tree, "-p", parent, cwd=remote, input=message)

    def point(self, ref: str, commit: str) -> None:
        """Move a ref of the remote."""
        self.house.git("update-ref", ref, commit, cwd=self.house.remote)


def make_world(root: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose git sees none of the developer's configuration, and no user name at all."""
    house = build_house(root / "house")
    for name in [name for name in os.environ if name not in house.env]:
        monkeypatch.delenv(name)
    for name, value in house.env.items():
        monkeypatch.setenv(name, value)
    return World(house, root)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, for before-and-after comparisons."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
