"""Several streams at once: this server beside `mlx_lm.server` and itself without a drafter, on one folder.

    python benchmarks/streams.py [--streams 1,4,8,16] [--repeats N] [--max-tokens N]

All servers run all the time, with the same BLAS, and are measured in turns. A measurement starts so many
clients at once, each of which sends one request after another and reads its stream; tokens are those of
`usage`. No server keeps prompts. Ratios are of the same repetition; the median of all is shown. Besides:

    batch gain     tokens a second with the most streams, by those of one; of the plain servers it is what
                   batches without drafts gain on this machine
    first token    until the first chunk with text, with the most streams: median of all requests
    short question one short answer while six long ones are decoded, less the same answer alone

Prints for people, stores ``benchmarks/unjudged/streams.json``, and ends with one JSON line. Exit code 1 where
a bound of docs/server.md is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from results_file import UNJUDGED, write

from engine.device import load_fast_blas

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "engine/models/demo/target"
SETS = ("code", "chat", "retrieval")
LEAST = {1: 3.0, 4: 2.0, 8: 1.5, 16: 1.2}  # ratio of tokens a second, by streams
# of the most streams over one, where a plain batch on this machine gains as much: over one stream of its own
# server for mlx-lm's, over one that speculates for ours
GAIN = 2.0
LONGER_S = 1.0  # that a short question may take behind six long ones
LONG_TOKENS, SHORT_TOKENS = 400, 8
STARTED_S = 120.0
# what `kakeya_engine` does for itself; without it mlx-lm on Linux would be several times slower
BLAS = {"LD_PRELOAD": "libopenblas.so.0", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Server:
    """A server that listens."""

    name: str
    port: int
    model: str


@dataclass(frozen=True)
class Answer:
    """One request by the client's clock."""

    tokens: int
    first_s: float
    total_s: float


def prompts() -> list[dict[str, Any]]:
    """Bodies of requests, of all shipped sets in turns."""
    sets = []
    for name in SETS:
        lines = (ROOT / f"engine/evaluation/prompts/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        sets.append([json.loads(line) for line in lines])
    mixed = [each for group in zip(*sets, strict=False) for each in group]
    return [
        {"messages": each["messages"]} if "messages" in each else {"prompt": each["prompt"]} for each in mixed
    ]


async def ask(server: Server, body: dict[str, Any], max_tokens: int) -> Answer:
    """One streamed request on a connection of its own, read no further than the lines."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = body | {
        "model": server.model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**22)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    first, usage, seen = 0.0, b"", []
    async for line in reader:
        if not line.startswith(b"data: {"):
            seen.append(line)
            continue
        if not first and has_text(line):
            first = time.perf_counter()
        if b'"usage"' in line:
            usage = line
    ended = time.perf_counter()
    writer.close()
    if not usage:
        raise SystemExit(f"{server.name} did not answer: {b''.join(seen)[:500]!r}")
    tokens = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return Answer(tokens, (first or ended) - started, ended - started)


def has_text(line: bytes) -> bool:
    """Whether a chunk has text."""
    choices = json.loads(line.removeprefix(b"data: "))["choices"]
    return any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)


async def load(
    server: Server, bodies: Sequence[dict[str, Any]], streams: int, max_tokens: int
) -> list[Answer]:
    """All bodies by so many clients at once."""
    waiting, answers = iter(bodies), []

    async def client() -> None:
        for body in waiting:
            answers.append(await ask(server, body, max_tokens))

    await asyncio.gather(*(client() for _ in range(streams)))
    return answers


async def behind(server: Server, bodies: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of a short answer alone, and while six long ones to the longest prompts are on their way."""
    short = {"messages": [{"role": "user", "content": "Name the third word of: table, window, river."}]}
    alone = min([(await ask(server, short, SHORT_TOKENS)).total_s for _ in range(3)])
    longest = sorted(bodies, key=lambda body: -len(json.dumps(body)))[:6]
    long = [asyncio.create_task(ask(server, body, LONG_TOKENS)) for body in longest]
    await asyncio.sleep(0.3)
    crowded = (await ask(server, short, SHORT_TOKENS)).total_s
    if ended := sum(task.done() for task in long):
        raise SystemExit(f"{ended} of six long answers of {server.name} ended before the short one")
    await asyncio.gather(*long)
    return alone, crowded


@contextlib.contextmanager
def servers() -> Iterator[list[Server]]:
    """All, on the shipped target, with nothing kept between requests."""
    load_fast_blas()  # names the processor to OpenBLAS where it does not know it: for all
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env = {name: value for name, value in os.environ.items() if name != "KAKEYA_API_KEY"}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        own = [sys.executable, "-m", "engine", "serve", "--port", "0", "--cache-sessions", "0"]
        commands = {
            "mlx-lm": [
                *(sys.executable, "-m", "mlx_lm", "server", "--model", str(TARGET), "--port", str(port)),
                *("--prompt-cache-size", "0", "--log-level", "WARNING"),
            ],
            "kakeya": own,
            "plain": [*own, "--drafter", "none"],
        }
        started = []
        for name, argv in commands.items():
            log = stack.enter_context((folder / name).open("wb"))
            process = stack.enter_context(
                subprocess.Popen(
                    argv,
                    cwd=ROOT,
                    env=env | (BLAS if name == "mlx-lm" and sys.platform == "linux" else {}),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            )
            stack.callback(process.terminate)
            if name != "mlx-lm":
                said = cast(IO[bytes], process.stdout).readline()
                started.append(Server(name, json.loads(said)["port"], "demo"))
            else:
                wait_for(port)
                started.append(Server(name, port, str(TARGET)))
        yield started


def wait_for(port: int) -> None:
    """Wait until something listens."""
    deadline = time.monotonic() + STARTED_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise SystemExit(f"mlx_lm.server did not listen within {STARTED_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,4,8,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--each", type=int, default=2, help="requests a stream, at least 8 in all")
    options = parser.parse_args()
    counts = [int(each) for each in options.streams.split(",")]
    bodies = itertools.cycle(prompts())
    speeds: dict[tuple[str, int], list[float]] = {}
    firsts: dict[tuple[str, int], list[float]] = {}
    shorts: dict[str, list[tuple[float, float]]] = {}
    with servers() as all_three:
        compared = all_three[:2]
        for repeat in range(options.repeats + 1):  # the first warms up
            for turn, streams in enumerate(counts):
                chosen = list(itertools.islice(bodies, max(8, streams * options.each)))
                measured = all_three if streams in {counts[0], counts[-1]} else compared
                for server in measured if (repeat + turn) % 2 else measured[::-1]:
                    started = time.perf_counter()
                    answers = asyncio.run(load(server, chosen, streams, options.max_tokens))
                    seconds = time.perf_counter() - started
                    if repeat:
                        key = server.name, streams
                        speeds.setdefault(key, []).append(sum(each.tokens for each in answers) / seconds)
                        firsts.setdefault(key, []).extend(each.first_s for each in answers)
            if repeat:
                for server in compared:
                    shorts.setdefault(server.name, []).append(asyncio.run(behind(server, prompts())))
            print(f"repetition {repeat}/{options.repeats}", flush=True)
    report(options, counts, speeds, firsts, shorts)


def report(
    options: argparse.Namespace,
    counts: list[int],
    speeds: dict[tuple[str, int], list[float]],
    firsts: dict[tuple[str, int], list[float]],
    shorts: dict[str, list[tuple[float, float]]],
) -> None:
    """Print and store the figures; end with exit code 1 where a bound is missed."""
    rows, missed = [], []
    for streams in counts:
        ours, theirs = speeds["kakeya", streams], speeds["mlx-lm", streams]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        row = {
            "streams": streams,
            "tokens_per_s": round(statistics.median(ours), 1),
            "mlx_lm_tokens_per_s": round(statistics.median(theirs), 1),
            "ratio": round(ratio, 3),
            "first_token_s": round(statistics.median(firsts["kakeya", streams]), 4),
            "mlx_lm_first_token_s": round(statistics.median(firsts["mlx-lm", streams]), 4),
        }
        rows.append(row)
        if ratio < LEAST.get(streams, 0.0):
            missed.append(f"ratio {ratio:.2f} at {streams} streams, not {LEAST[streams]}")
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    most, least = rows[-1], rows[0]
    gain = most["tokens_per_s"] / least["tokens_per_s"]
    mlx_lm_gain = most["mlx_lm_tokens_per_s"] / least["mlx_lm_tokens_per_s"]
    plain = {streams: statistics.median(speeds["plain", streams]) for streams in (counts[0], counts[-1])}
    over_one = plain[counts[-1]] / least["tokens_per_s"]
    if gain < GAIN <= max(mlx_lm_gain, over_one):
        missed.append(
            f"{most['streams']} streams are {gain:.2f} times one; mlx_lm.server's {mlx_lm_gain:.2f}, and "
            f"plain ones {over_one:.2f} times one that speculates"
        )
    if most["first_token_s"] > most["mlx_lm_first_token_s"]:
        missed.append(f"first token after {most['first_token_s']} s, not {most['mlx_lm_first_token_s']}")
    longer = statistics.median(crowded - alone for alone, crowded in shorts["kakeya"])
    if longer > LONGER_S:
        missed.append(f"a short question takes {longer:.2f} s longer behind six long ones")
    figures = {
        "streams": rows,
        "batch_gain": round(gain, 3),
        "mlx_lm_batch_gain": round(mlx_lm_gain, 3),
        "plain_batch_gain": round(plain[counts[-1]] / plain[counts[0]], 3),
        "plain_tokens_per_s": {str(streams): round(speed, 1) for streams, speed in plain.items()},
        "plain_over_one_speculative_stream": round(over_one, 3),
        "short_question_longer_s": round(longer, 3),
        "mlx_lm_short_question_longer_s": round(
            statistics.median(crowded - alone for alone, crowded in shorts["mlx-lm"]), 3
        ),
        "missed": missed,
        "options": {"repeats": options.repeats, "max_tokens": options.max_tokens, "each": options.each},
    }
    for each in missed:
        print(f"missed: {each}")
    path = write("streams", figures, UNJUDGED)
    print(json.dumps(figures | {"stored": str(path)}))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
