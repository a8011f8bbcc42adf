"""Both jobs of a workflow run in this process: requests executed, results forged and published."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Result, parse_result
from bridge.runner.spool import Entry
from bridge.runner.station import Station
from bridge.workflow import parcel
from bridge.workflow.asked import Asked
from bridge.workflow.execute import Executed, Executor
from bridge.workflow.log import Log
from bridge.workflow.publish import Delivery, Outcome, Publisher
from tests.bridge.runner.bench import Bench
from tests.bridge.workflow.runs import ask


class Desk:
    """Executes requests of one bench in this process."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.lines: list[str] = []
        self.stop = threading.Event()
        self.number = 0

    def request(self, preset: str = "echo", **changes: Any) -> Manifest:
        return ask(self.bench, preset, **changes)[0]

    def asked(self, manifest: Manifest) -> Asked:
        commit = self.bench.house.git("rev-parse", manifest.result_ref, cwd=self.bench.house.remote)
        return Asked(manifest.nonce, commit, manifest.result_ref)

    def execute(self, asked: Asked | Manifest, *, attempt: int = 1, **station: Any) -> Executed | None:
        self.number += 1
        out = self.bench.house.root / f"out-{self.number}"
        log = Log(self.lines.append, is_actions=True)
        executor = Executor(self.bench.station(**station), log, self.stop)
        named = asked if isinstance(asked, Asked) else self.asked(asked)
        return executor.execute(named, out, attempt=attempt)

    def result(self, asked: Asked | Manifest, **changes: Any) -> Result:
        done = self.execute(asked, **changes)
        assert done is not None
        return parse_result(done.parcel.files["result.json"])

    def verdict(self, asked: Asked | Manifest, **changes: Any) -> tuple[str, str]:
        found = self.result(asked, **changes).verdict
        return found.status.value, found.reason.value

    def sealed(self, asked: Asked) -> tuple[Path, Executed]:
        """Execute a request; where its result lies, and what it is."""
        done = self.execute(asked)
        assert done is not None
        return self.bench.house.root / f"out-{self.number}", done

    def forge(self, entry: Entry) -> tuple[Path, str]:
        """Lay any result out as a run would; where, and its digest."""
        self.number += 1
        folder = self.bench.house.root / f"out-{self.number}"
        parcel.require_free(folder)
        return folder, parcel.write(entry, folder).digest

    def trust(self, station: Station) -> Path:
        """A list of runner keys that count, with this one's."""
        path = self.bench.house.root / "pinned"
        path.write_text(f"{station.identity.name} {station.public_key}\n")
        return path

    def publish(
        self, asked: Asked, folder: Path, digest: str, *, trusted: Path | None = None, **changes: Any
    ) -> Outcome:
        """The other job, on a machine of its own."""
        self.number += 1
        root = self.bench.house.root / f"hosted-{self.number}"
        publisher = Publisher(
            root / "bus.git",
            str(self.bench.house.remote),
            trusted=trusted or root / "trusted_runners",
            say=self.lines.append,
        )
        return publisher.publish(asked, Delivery(folder, digest, **changes))

    def entry(self, done: Executed, asked: Asked) -> Entry:
        """What was sealed, to be forged."""
        files = dict(done.parcel.files)
        result, signature = files.pop("result.json"), files.pop("result.json.sig", None)
        return Entry(asked.nonce, asked.commit, asked.branch, result, signature, files)
