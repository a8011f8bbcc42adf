"""`make clients`: run real clients against one real server, and say which features work in which.

FOLDER is what scripts/install_clients.sh installed. Each client has a script of its own in
tests/clients/scripts, which prints a JSON line a feature. Exit code 1: a feature failed. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.target.loading import SHIPPED_TARGET
from tests.clients import CLIENTS, RESULTS, Client
from tests.engine.server import by_heart
from tests.engine.server.conftest import KEY, ROOT, start

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 200  # of one script
CONTEXT = 65_536  # agents' first prompts are longer than the shipped target's 2,048 positions
REGISTRY = """
default = "agent"
[models.demo]
summary = "the shipped pair"
target = "shipped"
drafter = "shipped"
[models.heart]
summary = "knows three answers by heart"
target = {{ path = "{heart}" }}
drafter = "prompt-lookup"
[models.agent]
summary = "the shipped target, said to have a longer context"
target = {{ path = "{agent}" }}
drafter = "prompt-lookup"
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"type": "string", "enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}
GIVEN = {
    "list": "Make a numbered list of: table, window, river.",
    "listed": "Here is the list:",
    "weather": by_heart.WEATHER,
    "asked": by_heart.ASKED,
    "told": by_heart.TOLD[-1]["content"],
    "answer": by_heart.ANSWER,
    "riddle": by_heart.RIDDLE,
    "thought": by_heart.THOUGHT,
    "word": by_heart.WORD,
    "schema": SCHEMA,
    "tokenizer": str(SHIPPED_TARGET),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("installed", type=Path, metavar="FOLDER")
    parser.add_argument("--only", action="append", choices=[*CLIENTS], help="this client alone; repeatable")
    parser.add_argument("--store", action="store_true", help="store what works, for docs/server.md")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    begin_s = time.monotonic()
    installed = given.installed.resolve()
    names = given.only or [*CLIENTS]
    absent = [name for name in names if not CLIENTS[name].is_installed(installed)]
    if absent:
        print(f"clients: not installed, not run: {', '.join(absent)}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kakeya-clients-"))
    # Where the run is ended, the server ends first: scripts without one end soon.
    with ThreadPoolExecutor(2) as pool, Server(folder, installed) as server:
        found = list(pool.map(server.run, [CLIENTS[name] for name in names if name not in absent]))
    failed = [line for each in found for line in each.problems]
    for line in failed:
        print(f"clients: FAILED: {line}", flush=True)
    if failed:
        print(f"clients: logs are in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    rows = [row for each in found for row in each.rows()]
    if given.store and not failed and not absent and not given.only:
        RESULTS.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"clients: stored in {RESULTS.relative_to(ROOT)}; make docs writes the table", flush=True)
    seconds = round(time.monotonic() - begin_s, 1)
    print(json.dumps({"passed": not failed, "seconds": seconds, "clients": rows}))
    return int(bool(failed) or not rows)


@dataclass
class Outcome:
    """What one client's script printed."""

    client: Client
    lines: list[dict[str, Any]]
    problems: list[str]

    def rows(self) -> list[dict[str, Any]]:
        """A row a protocol, as they are stored: of each feature true, false, or why the client cannot."""
        version = next((line["version"] for line in self.lines if "version" in line), None)
        features: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            if "feature" in line:
                told = line["detail"] if line["ok"] is None else line["ok"]
                features.setdefault(line["protocol"], {})[line["feature"]] = told
        return [
            {"client": self.client.title, "version": version, "protocol": protocol, "features": told}
            for protocol, told in features.items()
        ]


class Server:
    """A server with the models that the scripts ask for, and the folder where they run."""

    def __init__(self, folder: Path, installed: Path) -> None:
        self.folder, self.installed = folder, installed
        agent = folder / "agent"
        shutil.copytree(SHIPPED_TARGET, agent)
        config = json.loads((agent / "config.json").read_text())
        (agent / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
        registry = REGISTRY.format(heart=by_heart.FOLDER, agent=agent)
        options = ("--models", "3", "--max-tokens", "200", "--log-content")
        self.running = start(folder / "server", *options, registry=registry)
        # A module finds packages beside its own file alone.
        shutil.copytree(SCRIPTS, folder / "scripts")
        (folder / "scripts" / "node_modules").symlink_to(installed / "npm" / "node_modules")
        root = self.running.url.removesuffix("/v1")
        self.given = GIVEN | {
            "url": self.running.url,
            "root": root,
            "key": KEY,
            "npm": str(installed / "npm" / "node_modules"),
            "codex": self._printed("codex", root),
            "claude-code": self._printed("claude-code", root),
        }

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.stop()

    def _printed(self, client: str, root: str) -> str:
        """What `serve --for CLIENT` prints."""
        registry = self.folder / "server" / "models.toml"
        arguments = ("--for", client, "--port", root.rpartition(":")[2], "--registry", str(registry))
        return subprocess.run(
            [sys.executable, "-m", "engine", "serve", *arguments],
            cwd=ROOT,
            env=os.environ | {"KAKEYA_API_KEY": KEY},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def run(self, client: Client) -> Outcome:
        """Run a client's script, and read what it printed."""
        home = self.folder / client.script
        home.mkdir()
        kept = ("PATH", "LANG", "SSL_CERT_FILE", "TMPDIR")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"HOME": str(home), "KAKEYA_CLIENTS": json.dumps(self.given)}
        begin_s = time.monotonic()
        try:
            done = subprocess.run(
                [client.interpreter(self.installed), self.folder / "scripts" / client.script],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            out, err, code = done.stdout, done.stderr, str(done.returncode)
        except subprocess.TimeoutExpired as error:
            out, err = ((raw or b"").decode() for raw in (error.stdout, error.stderr))
            code = f"no end within {TIMEOUT_S} s"
        (home / "stdout").write_text(out)
        (home / "stderr").write_text(err)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
        told = [line for line in lines if "feature" in line]
        for line in told:
            print(
                f"  {client.title:<28} {line['protocol']:<12} {line['feature']:<15} {line['ok']}", flush=True
            )
        print(f"clients: {client.title}: {time.monotonic() - begin_s:.1f} s", flush=True)
        problems = [
            f"{client.title}, {line['protocol']}, {line['feature']}: {line['detail']}"
            for line in told
            if line["ok"] is False
        ]
        if code != "0" or not told:
            problems.append(f"{client.title}: exit code {code}, {len(told)} features: {err[-2000:]}")
        return Outcome(client, lines, problems)


if __name__ == "__main__":
    sys.exit(main())
