"""``python -m tests.e2e.soak``: many clients at one server, random disconnects, every answer compared.

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
from pathlib import Path
from typing import Any

import click
import openai

from benchmarks import results_file
from tests.e2e.engines import GRACE_S, KEY, Census, Serving, serving
from tests.e2e.soak.clients import Client
from tests.e2e.soak.pool import Expected, collect
from tests.e2e.soak.referee import MOST_SHOWN, TIE, Referee, gap

SETTLE_S = 20.0  # in which a server without clients has emptied the prompt cache, `--cache-seconds 1`
# Some 40 KiB more were seen after 1,400 requests; the same ones again add less and less, so that it is what
# new shapes leave behind, not what requests do. A session that was left would be twice this bound.
MEMORY_BOUND = 2**18
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
        root, seconds=options.seconds, clients=options.clients, seed=options.seed, pool=options.pool
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


def soak(root: Path, *, seconds: float, clients: int, seed: int, pool: int) -> dict[str, Any]:
    """Collect the answers of a quiet server, then have a server under load give them.

    Args:
        root: for logs.
        seconds: of load.
        clients: at once.
        seed: decides the requests and what clients do; when things meet depends on the machine.
        pool: distinct requests, conversations aside.

    Returns:
        Counts; ``problems`` is empty if everything held.
    """
    with serving(root / "quiet", "--cache-sessions", "0") as quiet:
        courses = collect(quiet, seed, pool)
    referee = Referee()
    with serving(root / "loaded", "--cache-seconds", "1") as server:
        once = [Client(server, courses, referee, seed).once()]  # every drafter opened, every shape compiled
        asyncio.run(_together(once))
        before, census = _settled(server), server.census()
        until = time.monotonic() + seconds
        began = time.monotonic()
        asyncio.run(
            _together(
                [Client(server, courses, referee, seed + 1 + number).run(until) for number in range(clients)]
            )
        )
        took = time.monotonic() - began
        after, left = _settled(server), _census_like(server, census)
        finish, code, ending_s = _stopped(server)
    problems = [
        *_of_answers(referee),
        *_of_state(before, after),
        *_of_census(census, left),
        *_of_end(finish, code, ending_s),
        *_of_log(server.log, courses),
    ]
    return {
        "seed": seed,
        "clients": clients,
        "seconds": round(took, 1),
        "pool": sum(len(course) for course in courses),
        **referee.figures(),
        "mismatches": len(referee.divergences),
        "memory_bytes": [before["kakeya_memory_bytes"], after["kakeya_memory_bytes"]],
        "descriptors": [census.descriptors, left.descriptors],
        "threads": [census.threads, left.threads],
        "ended_s": round(ending_s, 2),
        "problems": problems,
    }


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


def _of_answers(referee: Referee) -> list[str]:
    """Errors, parts that begin no answer, and answers that differ where the logits were no tie."""
    problems = [*referee.errors, *referee.no_prefix]
    for divergence in referee.divergences:
        told = divergence.told()
        if divergence.expected.ask.kind != "seeded" and len(problems) < MOST_SHOWN:
            told["gap"] = gap(divergence)
            if told["gap"] < TIE:
                continue
        problems.append(f"another answer: {json.dumps(told, ensure_ascii=False)}")
    return problems


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
    said = [expected.answer.text for course in courses for expected in course]
    if any(len(each) > 20 and each in text for each in said):
        problems.append(f"an answer in the log, {log}")
    return problems


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.soak",
        description="Clients at one server, some of which vanish in the middle. Every answer must be that"
        " of the same request alone, and nothing may be left of any of them.",
    )
    parser.add_argument("--seconds", type=float, default=20, help="of load (default: 20)")
    parser.add_argument("--clients", type=int, default=16, help="at once (default: 16)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="default: a fresh one")
    parser.add_argument("--pool", type=int, default=60, help="distinct requests (default: 60)")
    parser.add_argument("--store", action="store_true", help="write benchmarks/records/server-soak.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
