"""``python -m tests.e2e.soak``: many clients at one server, which is killed at random, every answer compared.

Exit code 0: all held. 1: something did not; what, is the last line, and the folder with the logs is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import click
import openai

from benchmarks import results_file
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET
from tests.e2e.engines import GRACE_S, KEY, Census, Serving, serving
from tests.e2e.soak.clients import Client, Life
from tests.e2e.soak.pool import CHANNELS, CODED, LONG, Asker, Expected, collect, long_asks
from tests.e2e.soak.protocols import answers_of
from tests.e2e.soak.referee import Judge, Referee

SETTLE_S = 20.0  # in which a server without clients has emptied the prompt cache, `--cache-seconds 1`
# Some 40 KiB more were seen after 1,400 requests; the same ones again add less and less, so that it is what
# new shapes leave behind, not what requests do. A session that was left would be twice this bound.
MEMORY_BOUND = 2**18
CONTEXT = 4096  # positions of the model, which is the shipped one otherwise: that has 1024
REGISTRY = """
default = "demo"
[models.demo]
summary = "the shipped pair for longer prompts"
target = {{ path = "{target}" }}
drafter = {{ path = "{drafter}" }}
channels = {channels}
"""
REWOUND = 16  # tokens at a prompt's end that may be computed again
KEPT_S = 30.0  # in which a prompt is on disk
LAST_WORDS = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Can you count from 5 to 17?"}],
    "max_tokens": 200,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, judge, print, and perhaps store."""
    options = _options(argv)
    root = Path(tempfile.mkdtemp(prefix="kakeya-soak-"))
    figures = soak(
        root,
        seconds=options.seconds,
        clients=options.clients,
        seed=options.seed,
        pool=options.pool,
        kills=options.kills,
    )
    for name, value in figures.items():
        click.echo(f"  {name:<16} {json.dumps(value, ensure_ascii=False)}")
    if figures["problems"]:
        click.echo(f"the folder with the logs is kept: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
        if options.store:
            click.echo(f"stored in {results_file.write('server-soak', figures)}", err=True)
    click.echo(json.dumps(figures, sort_keys=True))
    return int(bool(figures["problems"]))


def soak(root: Path, *, seconds: float, clients: int, seed: int, pool: int, kills: int = 0) -> dict[str, Any]:
    """Collect the answers of a quiet server, then have servers under load give them.

    All but the last of these are killed, at random moments. Each writes its prompts to the same folder, and
    has to read the long ones there that those before it were asked.

    Args:
        root: for logs, the model's registry and the prompts on disk.
        seconds: of load, of all lives together.
        clients: at once.
        seed: decides the requests and what clients do; when things meet depends on the machine.
        pool: distinct requests, conversations aside.
        kills: servers that are killed before the last one.

    Returns:
        Counts; ``problems`` is empty if everything held.
    """
    common = ("--registry", str(_registry(root)))
    with serving(root / "quiet", *common, "--cache-sessions", "0") as quiet:
        courses = collect(quiet, seed, pool)
        alone = [Expected(ask, Asker(quiet).ask(ask)) for ask in long_asks(seed + 1, kills)]
    random, referee, judge = Random(seed), Referee(), Judge()  # noqa: S311 - to be repeated
    parts = [random.uniform(0.5, 1.5) for _ in range(kills + 1)]
    lengths = [seconds * part / sum(parts) for part in parts]
    options = (*common, "--cache-seconds", "1", "--cache-dir", str(root / "kept"))
    reused: list[int] = []
    problems: list[str] = []
    logs, port, took = [], 0, 0.0
    for number, length in enumerate(lengths):
        with serving(root / f"life {number}", *options, "--port", str(port)) as server:
            port = server.port
            logs.append(server.log)
            for expected in alone[:number]:
                problems += _from_disk(server, expected, referee, reused)
            if number == kills:
                warm = Client(Life(server, 0), courses, referee, seed)
                asyncio.run(_together([warm.once()]))  # every drafter opened, every shape compiled
                before, census = _settled(server), server.census()
            else:
                _keep(server, alone[number], referee)
            began = time.monotonic()
            life = Life(server, began + length)
            numbers = range(clients * number, clients * (number + 1))
            runs = [Client(life, courses, referee, seed + 1 + each).run() for each in numbers]
            asyncio.run(_together([*runs, life.kill()] if number < kills else runs))
            took += time.monotonic() - began
            if number == kills:
                after, left = _settled(server), _census_like(server, census)
                finish, code, ending_s = _stopped(server)
    answers = _of_answers(referee, judge)
    problems += [
        *answers.problems,
        *_of_state(before, after),
        *_of_census(census, left),
        *_of_end(finish, code, ending_s),
        *(problem for log in logs for problem in _of_log(log, courses)),
    ]
    return {
        "seed": seed,
        "clients": clients,
        "seconds": round(took, 1),
        "pool": sum(len(course) for course in courses),
        "kills": kills,
        "long_from_disk": reused,
        **referee.figures(),
        "ties": answers.ties,
        "mismatches": answers.mismatches,
        "memory_bytes": [before["kakeya_memory_bytes"], after["kakeya_memory_bytes"]],
        "descriptors": [census.descriptors, left.descriptors],
        "threads": [census.threads, left.threads],
        "ended_s": round(ending_s, 2),
        "problems": problems,
    }


def _registry(root: Path) -> Path:
    """The shipped pair with a longer context, in a registry of its own."""
    target = root / "target"
    shutil.copytree(SHIPPED_TARGET, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    path, channels = root / "models.toml", json.dumps([*CHANNELS, *CODED])
    path.write_text(REGISTRY.format(target=target, drafter=SHIPPED_DRAFTER, channels=channels))
    return path


def _keep(server: Serving, expected: Expected, referee: Referee) -> None:
    """Ask a long prompt, and wait until it is on disk."""
    name = "kakeya_prompt_cache_disk_entries"
    before = server.metrics()[name]
    referee.asked(expected.ask, "whole")
    referee.arrived(expected, Asker(server).ask(expected.ask))
    deadline = time.monotonic() + KEPT_S
    while server.metrics()[name] <= before:
        if time.monotonic() > deadline:
            raise AssertionError(f"{expected.ask.name} is not on disk after {KEPT_S:.0f} s: {server.log}")
        time.sleep(0.1)


def _from_disk(server: Serving, expected: Expected, referee: Referee, reused: list[int]) -> list[str]:
    """Ask a long prompt that a server before this one has kept; note how many of its tokens were there."""
    referee.asked(expected.ask, "whole")
    client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)
    with client:
        reply: Any = client.completions.create(**expected.ask.arguments)
    referee.arrived(expected, answers_of("text", reply.model_dump(warnings=False)))
    facts = reply.x_kakeya
    reused.append(facts["cached_tokens"])
    if facts["cached_from"] != "disk" or facts["cached_tokens"] < LONG - REWOUND:
        told = f"{facts['cached_tokens']} tokens from {facts['cached_from']}"
        return [f"{expected.ask.name}, asked again after a kill, began from {told}"]
    return []


async def _together(runs: list[Any]) -> None:
    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(run)


def _settled(server: Serving) -> dict[str, float]:
    """The metrics once nothing goes on and the prompt cache is empty; the last ones, if that never is."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = server.metrics()
        if not any(found[name] for name in STATE) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _census_like(server: Serving, before: Census) -> Census:
    """What the server holds once it is no more than before; the last count, if that never is."""
    deadline = time.monotonic() + SETTLE_S
    while (found := server.census()).more_than(before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


STATE = (
    'kakeya_kv_cache_bytes{state="active"}',
    'kakeya_kv_cache_bytes{state="cached"}',
    "kakeya_requests_admitted",
    "kakeya_requests_active",
    "kakeya_prompt_cache_entries",
)


def _stopped(server: Serving) -> tuple[str | None, int, float]:
    """Ask the server to end in the middle of an answer: how that ended, the exit code, and the seconds."""
    client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)
    finish = None
    with client, client.chat.completions.create(**LAST_WORDS, stream=True) as stream:  # type: ignore[call-overload]
        chunks = iter(stream)
        next(chunks)
        began = time.monotonic()
        server.process.terminate()
        for chunk in chunks:
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
    code = server.process.wait(GRACE_S + 30)
    return finish, code, time.monotonic() - began


@dataclass
class Compared:
    """What is to be said of the answers.

    Attributes:
        problems: errors, and what differs though the logits were no tie.
        ties: choices and parts that differ where rounding may choose.
        mismatches: … where it may not.
    """

    problems: list[str] = field(default_factory=list)
    ties: int = 0
    mismatches: int = 0


def _of_answers(referee: Referee, judge: Judge) -> Compared:
    """Judge what differs, each place of each request once."""
    found = Compared(list(referee.errors))
    parts = [judge.divergence_of(*each) for each in referee.no_prefix]
    known: dict[tuple[str, int, int], tuple[bool, float]] = {}
    for divergence in (*referee.divergences, *parts):
        place = divergence.expected.ask.name, divergence.index, divergence.at
        if place not in known:
            known[place] = judge.is_tie(divergence)
        tie, gap = known[place]
        found.ties += tie
        found.mismatches += not tie
        if not tie:
            told = divergence.told() | {"gap": gap}
            found.problems.append(f"another answer: {json.dumps(told, ensure_ascii=False)}")
    return found


def _of_state(before: dict[str, float], after: dict[str, float]) -> list[str]:
    problems = [f"{name} is {after[name]:.0f}, not 0" for name in STATE if after[name]]
    more = after["kakeya_memory_bytes"] - before["kakeya_memory_bytes"]
    if more > MEMORY_BOUND:
        problems.append(f"{more:.0f} more bytes of arrays are in use than before")
    return problems


def _of_census(before: Census, after: Census) -> list[str]:
    return [f"the server holds {after}, and held {before} before"] if after.more_than(before) else []


def _of_end(finish: str | None, code: int, seconds: float) -> list[str]:
    problems = []
    if finish is None:
        problems.append("the answer that was under way when the server was stopped did not come to its end")
    if code != 0 or seconds > GRACE_S:
        problems.append(f"SIGTERM: exit code {code} after {seconds:.1f} s")
    return problems


def _of_log(log: Path, courses: list[list[Expected]]) -> list[str]:
    text = log.read_text(errors="replace")
    problems = [f"a traceback in the log, {log}"] if "Traceback" in text else []
    said = [each.text for course in courses for expected in course for each in expected.answers]
    if any(len(each) > 20 and each in text for each in said):
        problems.append(f"an answer in the log, {log}")
    return problems


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.soak",
        description="Clients at one server, some of which vanish in the middle, as does the server. Every"
        " answer must be that of the same request alone, and nothing may be left of any of them.",
    )
    parser.add_argument("--seconds", type=float, default=20, help="of load (default: 20)")
    parser.add_argument("--clients", type=int, default=16, help="at once (default: 16)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="default: a fresh one")
    parser.add_argument("--pool", type=int, default=60, help="distinct requests (default: 60)")
    parser.add_argument("--kills", type=int, default=1, help="of the server, with SIGKILL (default: 1)")
    parser.add_argument("--store", action="store_true", help="write benchmarks/records/server-soak.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
