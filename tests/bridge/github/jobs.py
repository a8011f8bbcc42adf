"""Both jobs of a workflow run in this process: requests executed, results forged and published."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from bridge.bus.publish import ResultFiles
from bridge.git.cache import GitCache
from bridge.github.api import GitHub
from bridge.github.dispatch import RequestRef
from bridge.github.execute import WorkflowExecutor
from bridge.github.publish import Delivery, PublishOutcome, WorkflowPublisher
from bridge.github.workflow import Artifact, require_empty, write_artifact
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Result, parse_result
from tests.bridge.github.runs import ask
from tests.fixtures.runner import RunnerFixture


class WorkflowJobs(logging.Handler):
    """Executes requests of one runner in this process; `lines` is the log of the workflow's steps."""

    def __init__(self, runner: RunnerFixture) -> None:
        super().__init__(logging.INFO)
        self.runner = runner
        self.lines: list[str] = []
        self.stop = threading.Event()
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def request(self, preset: str = "echo", **changes: Any) -> Manifest:
        return ask(self.runner, preset, **changes)[0]

    def ref(self, manifest: Manifest) -> RequestRef:
        commit = self.runner.repo.git("rev-parse", manifest.result_ref, cwd=self.runner.repo.remote)
        return RequestRef(manifest.nonce, manifest.result_ref, commit)

    def execute(
        self,
        asked: RequestRef | Manifest,
        *,
        attempt: int = 1,
        limit_s: float | None = None,
        **config: Any,
    ) -> Artifact | None:
        self.number += 1
        out = self.runner.repo.root / f"out-{self.number}"
        runner = self.runner.config_of(**config)
        executor = WorkflowExecutor(runner, self.lines.append, self.stop, limit_s=limit_s)
        named = asked if isinstance(asked, RequestRef) else self.ref(asked)
        return executor.execute(named, out, attempt=attempt)

    def result(self, asked: RequestRef | Manifest, **changes: Any) -> Result:
        done = self.execute(asked, **changes)
        assert done is not None
        return parse_result(done.files["result.json"])

    def verdict(self, asked: RequestRef | Manifest, **changes: Any) -> tuple[str, str]:
        found = self.result(asked, **changes).verdict
        return found.status.value, found.reason.value

    def sealed(self, asked: RequestRef) -> tuple[Path, Artifact]:
        """Execute a request; where its result lies, and what it is."""
        done = self.execute(asked)
        assert done is not None
        return self.runner.repo.root / f"out-{self.number}", done

    def forge(self, result: ResultFiles) -> tuple[Path, str]:
        """Lay any result out as a run would; where, and its digest."""
        self.number += 1
        folder = self.runner.repo.root / f"out-{self.number}"
        require_empty(folder)
        return folder, write_artifact(result, folder).digest

    def trust(self) -> Path:
        """A list of runner keys that count, with the fixture's runner's."""
        path, config = self.runner.repo.root / "pinned", self.runner.config_of()
        path.write_text(f"{config.identity.name} {config.public_key}\n")
        return path

    def publish(
        self,
        asked: RequestRef,
        folder: Path,
        digest: str,
        *,
        trusted: Path | None = None,
        github: GitHub | None = None,
        **changes: Any,
    ) -> PublishOutcome:
        """The other job, on a machine of its own."""
        self.number += 1
        root = self.runner.repo.root / f"hosted-{self.number}"
        cache = GitCache(root / "bus.git", str(self.runner.repo.remote))
        publisher = WorkflowPublisher(cache, trusted=trusted or root / "trusted_runners", github=github)
        return publisher.publish(asked, Delivery(folder, digest, **changes))

    def entry(self, done: Artifact, asked: RequestRef) -> ResultFiles:
        """What was sealed, to be forged."""
        files = dict(done.files)
        result, signature = files.pop("result.json"), files.pop("result.json.sig", None)
        return ResultFiles(asked.nonce, asked.commit, asked.branch, result, signature, files)
