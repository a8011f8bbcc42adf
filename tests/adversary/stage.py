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
from tests.adversary.attack import Forge, Forged
from tests.bridge.runner.bench import Bench
from tests.houses import House
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


def install(bench: Bench) -> None:
    """Write the owner's presets."""
    bench.install({"echo": PROGRAMS["echo"]})
    script = bench.house.root / "whole.py"
    script.write_text(PROGRAMS["whole"])
    bench.preset("whole", ["${python}", "-I", str(script)], workspace="full")
    bench.preset("version", ["${bridge}", "--version"], workspace="full")


@dataclass
class Answer:
    """What comes of a request: `ok` and its argv, or the refusal."""

    reason: Reason
    message: str = ""
    argv: tuple[str, ...] = ()


@dataclass
class Stage:
    """A runner's queue and admission; its cache is the remote itself, so torn objects get there, too."""

    config: RunnerConfig
    cache: GitCache
    queue: Queue
    admission: Admission
    forge: Forge

    def ask(self, forged: Forged) -> Answer:
        """Put one request into the inbox, and ask all that the runner asks before it starts a job."""
        inbox = self.cache.directory / f"{refs.INBOX}{forged.nonce}"
        inbox.parent.mkdir(parents=True, exist_ok=True)
        inbox.write_text(f"{forged.commit}\n")
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
            job.lay_out()
            return Answer(Reason.OK, argv=tuple(job.argv()))
        except RequestRefused as error:
            return Answer(verdict_of(error).reason, error.message)
        finally:
            job.clean_up()
            shutil.rmtree(self.config.jobs, ignore_errors=True)


@contextlib.contextmanager
def open_stage(house: House) -> Iterator[Stage]:
    """A stage on a house of its own."""
    bench = Bench(house)
    install(bench)
    config, cache = bench.config_of(), GitCache(house.remote, str(house.remote))
    store = Store(config.folder / "store.sqlite")
    asked_at = {"now": lambda: datetime.now(UTC)}
    queue, admission = Queue(config, cache, store, **asked_at), Admission(config, cache, store, **asked_at)
    yield Stage(
        config,
        cache,
        queue,
        admission,
        Forge(Objects(house.remote), config.audience, house.root / "canary"),
    )
    store.close()
    cache.close()
