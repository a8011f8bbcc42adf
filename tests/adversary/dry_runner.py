"""What a runner decides about a hostile request, up to the start of its job; nothing is run or published."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge.errors import RequestRefused
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.result import Reason
from bridge.runner.admission import Admission, Admitted, Refusal
from bridge.runner.config import RunnerConfig
from bridge.runner.job import Job, verdict_of
from bridge.runner.queue import Queue
from bridge.runner.store import Store
from tests.adversary.attack import CommitBuilder, HostileCommit
from tests.fixtures.repo import RepoFixture
from tests.fixtures.runner import RunnerFixture
from tests.objects import Objects

# What the owner of the machine installed: it prints its argument, or the files it was given.
PROGRAMS = {
    "echo": "print(ascii(arg))",
    "whole": (
        "import os\n"
        "for folder, _, files in os.walk('.'):\n"
        "    for name in files: print(ascii(os.path.join(folder, name)))\n"
    ),
}


def install(runner: RunnerFixture) -> None:
    """Write the owner's presets."""
    runner.install({"echo": PROGRAMS["echo"]})
    script = runner.repo.root / "whole.py"
    script.write_text(PROGRAMS["whole"])
    runner.preset("whole", ["${python}", "-I", str(script)], workspace="full")
    runner.preset("version", ["${bridge}", "--version"], workspace="full")


@dataclass
class Answer:
    """What comes of a request: `ok` and its argv, or the refusal."""

    reason: Reason
    message: str = ""
    argv: tuple[str, ...] = ()


@dataclass
class DryRunner:
    """A runner's queue and admission; its cache is the remote itself, so torn objects get there, too."""

    config: RunnerConfig
    cache: GitCache
    queue: Queue
    admission: Admission
    builder: CommitBuilder

    def ask(self, hostile: HostileCommit) -> Answer:
        """Put one request into the inbox, and ask all that the runner asks before it starts a job."""
        inbox = self.cache.directory / f"{refs.INBOX}{hostile.nonce}"
        inbox.parent.mkdir(parents=True, exist_ok=True)
        inbox.write_text(f"{hostile.commit}\n")
        try:
            [request] = self.queue.poll()
        finally:
            inbox.unlink()
        decision = self.admission.check(request, self.queue.found)
        if isinstance(decision, Refusal):
            return Answer(decision.reason, decision.message)
        assert isinstance(decision, Admitted), decision
        job = Job(self.config, self.cache, request, decision, attempt=1)
        try:
            [side] = job.sides()
            job.lay_out(side)
            return Answer(Reason.OK, argv=tuple(job.argv(side)))
        except RequestRefused as error:
            return Answer(verdict_of(error).reason, error.message)
        finally:
            job.clean_up()
            shutil.rmtree(self.config.jobs, ignore_errors=True)


@contextlib.contextmanager
def open_dry_runner(repo: RepoFixture) -> Iterator[DryRunner]:
    """A dry runner on a repository of its own."""
    runner = RunnerFixture(repo)
    install(runner)
    config, cache = runner.config_of(), GitCache(repo.remote, str(repo.remote))
    store = Store(config.folder / "store.sqlite")
    asked_at = {"now": lambda: datetime.now(UTC)}
    queue, admission = Queue(config, cache, store, **asked_at), Admission(config, cache, store, **asked_at)
    yield DryRunner(
        config,
        cache,
        queue,
        admission,
        CommitBuilder(Objects(repo.remote), config.audience, repo.root / "canary"),
    )
    store.close()
    cache.close()
