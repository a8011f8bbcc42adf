"""What the server adds to the engine: one stream over HTTP against ``kakeya_engine generate``.

    python benchmarks/server.py [--repeats N] [--prompts N] [--max-tokens N] [--no-command]

Three arms decode the same prompts with the same limits, in turns:

    command    ``kakeya_engine generate``, which loads the models each time; its own figures, loading aside
    loaded     what that command does after loading, again and again in one process
    stream     a stream of ``kakeya_engine serve``, by the client's clock

Decoding is the tokens after the first over the time from the first to the last; end-to-end begins before the
prompt is taken in (at the client: before the request is sent). No session is kept, so each arm computes every
prompt again with a new draft length. Ratios are of the same repetition, the median of all; one more is
that of the fastest repetitions, which a busy machine disturbs less, and one that of the processor's time (of
the server, without its client; on Linux), which it disturbs least. Where more wants to run than there are
cores, a client may see first and last token at once, and only that last ratio says anything. The client does
no more than keep the lines it reads. Prints for people, stores ``benchmarks/unjudged/server.json``, and ends
with one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any, cast

from results_file import UNJUDGED, write

ROOT = Path(__file__).resolve().parents[1]
ENGINE = (sys.executable, "-m", "engine")
SETS = ("code", "chat", "retrieval")
MODES = {  # what the command, and what a request is told
    "auto": (("--block", "auto"), {"block": "auto"}),
    "block 8": (("--block", "8"), {"block": 8}),
    "plain": (("--drafter", "none"), {"drafter": "none"}),
}
SHOWN = ("decode_ratio", "decode_ratio_of_the_fastest", "end_to_end_ratio", "cpu_ratio")


@dataclass(frozen=True)
class Row:
    """One answer, or several together.

    Attributes:
        decoded: tokens after the first.
        prefill_s: until the first.
        decode_s: from there to the last.
        total_s: all of it.
        cpu_s: of the processor, for all of it; 0 where that is not known.
    """

    decoded: int
    prefill_s: float
    decode_s: float
    total_s: float
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Taken:
    """A measurement."""

    mode: str
    arm: str
    repeat: int
    prompt: str
    row: Row


Arm = Callable[[str, dict[str, Any]], Row]  # mode and prompt → figures


def with_cpu(pid: int, ask: Arm) -> Arm:
    """An arm whose figures hold what its process took of the processor, too."""

    def asked(mode: str, prompt: dict[str, Any]) -> Row:
        before = cpu_s(pid)
        row = ask(mode, prompt)
        return replace(row, cpu_s=cpu_s(pid) - before)

    return asked


def cpu_s(pid: int) -> float:
    """Seconds of the processor that a process has taken; 0 where /proc does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command(prompt: dict[str, Any], mode: str, max_tokens: int) -> Row:
    """The arm of the command."""
    text, chat = said(prompt)
    argv = [*ENGINE, "generate", *MODES[mode][0], "--max-tokens", str(max_tokens), "--json"]
    argv += [*(["--chat"] if chat else []), "--file", "-"]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return of_figures(json.loads(done.stdout.splitlines()[-1]))


def of_figures(figures: dict[str, Any]) -> Row:
    prefill, decode = figures["prefill_s"], figures["decode_s"]
    return Row(figures["generated_tokens"] - 1, prefill, decode, prefill + decode)


def said(prompt: dict[str, Any]) -> tuple[str, bool]:
    """The text of a prompt, and whether it goes through the chat template."""
    if "messages" in prompt:
        return prompt["messages"][0]["content"], True
    return prompt["prompt"], False


@contextlib.contextmanager
def loaded(max_tokens: int) -> Iterator[Arm]:
    """The arm of one process that does what the command does, without its start."""
    argv = [sys.executable, __file__, "--serve-lines", "--max-tokens", str(max_tokens)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
    ) as process:
        written, read = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

        def ask(mode: str, prompt: dict[str, Any]) -> Row:
            written.write(json.dumps([mode, prompt]) + "\n")
            written.flush()
            return of_figures(json.loads(read.readline()))

        yield with_cpu(process.pid, ask)


def serve_lines(max_tokens: int) -> None:
    """The process of `loaded`: a mode and a prompt a line, figures a line."""
    from engine.device import prepare

    prepare()
    from engine.config import Options, open_engine
    from engine.generate import Outcome, encode, generate

    engines = {
        "auto": open_engine(Options()),
        "block 8": open_engine(Options(block="8")),
        "plain": open_engine(Options(drafter="none")),
    }
    for line in sys.stdin:
        mode, prompt = json.loads(line)
        text, chat = said(prompt)
        engine = engines[mode]
        if engine.drafter is not None:  # one that knows nothing of earlier prompts, as the command's
            twin = engine.drafter.drafter.twin()
            engine = replace(engine, drafter=replace(engine.drafter, drafter=twin))
        target = engine.target
        content = [("user", text)] if chat else text
        tokens = encode(content, target.tokenizer, target.target.vocab_size, target.context)
        steps = generate(engine, tokens, max_tokens, draft_length=engine.new_draft_length())
        outcome = cast(Outcome, [step.outcome for step in steps][-1])
        figures = {"prefill_s": outcome.prefill_s, "decode_s": outcome.decode_s}
        print(json.dumps(figures | {"generated_tokens": len(outcome.tokens)}), flush=True)


@contextlib.contextmanager
def stream(max_tokens: int) -> Iterator[Arm]:
    """The arm of a client that reads streams of a server."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
        argv = [*ENGINE, "serve", "--port", "0", "--cache-sessions", "0"]
        env = {name: value for name, value in os.environ.items() if name != "KAKEYA_API_KEY"}
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=env
        ) as process:
            port = json.loads(cast(IO[bytes], process.stdout).readline())["port"]
            try:
                yield with_cpu(process.pid, lambda mode, prompt: streamed(port, mode, prompt, max_tokens))
            finally:
                process.terminate()


def streamed(port: int, mode: str, prompt: dict[str, Any], max_tokens: int) -> Row:
    """One stream by the client's clock."""
    text, chat = said(prompt)
    body = {
        "model": "demo",
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
        **MODES[mode][1],
    }
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.connect()
        sent = time.perf_counter()
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        lines = [(time.perf_counter(), line) for line in answer if line.startswith(b"data: {")]
    chunks = [(at, json.loads(line.removeprefix(b"data: "))) for at, line in lines]
    first = next(at for at, chunk in chunks if said_in(chunk["choices"][0]))
    last, end = chunks[-1]
    return Row(len(end["x_kakeya"]["token_ids"]) - 1, first - sent, last - first, last - sent)


def said_in(choice: dict[str, Any]) -> str:
    """The text of a chunk."""
    text: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


def prompts_of(count: int) -> list[dict[str, Any]]:
    """So many of each shipped set."""
    found = []
    for name in SETS:
        lines = (
            (ROOT / "engine/evaluation/prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        )
        found += [json.loads(line) for line in lines[:count]]
    return found


def measure(arms: dict[str, Arm], prompts: list[dict[str, Any]], repeats: int) -> list[Taken]:
    """What each arm did with each prompt in each mode and repetition; a first round warms up."""
    taken = []
    for repeat in range(repeats + 1):
        for mode in MODES:
            for index, prompt in enumerate(prompts):
                names = list(arms)
                turn = (repeat + index) % len(names)
                for name in names[turn:] + names[:turn]:
                    row = arms[name](mode, prompt)
                    if repeat:
                        taken.append(Taken(mode, name, repeat, prompt["id"], row))
        print(f"repetition {repeat}/{repeats}", flush=True)
    return taken


def summary(taken: list[Taken], arms: Iterable[str]) -> list[dict[str, Any]]:
    """Of every mode and arm: medians of the repetitions, each of all prompts together."""
    return [entry(taken, mode, arm) for mode in MODES for arm in arms]


def entry(taken: list[Taken], mode: str, arm: str) -> dict[str, Any]:
    """One arm in one mode, and what the stream reached of it."""
    ours, streams = (sums(taken, mode, name) for name in (arm, "stream"))
    found: dict[str, Any] = {
        "mode": mode,
        "arm": arm,
        "decode_tokens_per_s": statistics.median(each.decoded / each.decode_s for each in ours),
        "prefill_s": statistics.median(each.prefill_s for each in ours),
        "total_s": statistics.median(each.total_s for each in ours),
    }
    cpu = [sum(each.cpu_s for each in rows) for rows in (ours, streams)]
    if cpu[0]:
        found["cpu_ms_per_token"] = 1e3 * cpu[0] / sum(each.decoded for each in ours)
    if arm != "stream":
        pairs = list(zip(ours, streams, strict=True))
        decode = [mine.decode_s / stream.decode_s for mine, stream in pairs]
        found |= {
            "stream_decode_ratio": statistics.median(decode),
            "stream_decode_ratios": [min(decode), max(decode)],
            "stream_decode_ratio_of_the_fastest": fastest(taken, mode, arm) / fastest(taken, mode, "stream"),
            "stream_end_to_end_ratio": statistics.median(m.total_s / s.total_s for m, s in pairs),
            "stream_cpu_ratio": cpu[0] / cpu[1] if all(cpu) else None,
        }
    return found


def sums(taken: list[Taken], mode: str, arm: str) -> list[Row]:
    """All prompts together, a repetition each."""
    rows: dict[int, list[Row]] = defaultdict(list)
    for each in taken:
        if (each.mode, each.arm) == (mode, arm):
            rows[each.repeat].append(each.row)
    return [
        Row(*(sum(getattr(row, name) for row in group) for name in Row.__dataclass_fields__))
        for group in rows.values()
    ]


def fastest(taken: list[Taken], mode: str, arm: str) -> float:
    """Seconds of decoding, of each prompt its fastest: what it takes where nothing else has the processor."""
    least: dict[str, float] = {}
    for each in taken:
        if (each.mode, each.arm) == (mode, arm):
            least[each.prompt] = min(each.row.decode_s, least.get(each.prompt, each.row.decode_s))
    return sum(least.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=2, help="of each shipped set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--no-command", action="store_true", help="leave out the arm that loads each time")
    parser.add_argument("--serve-lines", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_lines:
        serve_lines(options.max_tokens)
        return
    prompts = prompts_of(options.prompts)
    with loaded(options.max_tokens) as inside, stream(options.max_tokens) as outside:
        arms: dict[str, Arm] = {"loaded": inside, "stream": outside}
        if not options.no_command:
            arms = {"command": lambda mode, prompt: command(prompt, mode, options.max_tokens), **arms}
        table = summary(measure(arms, prompts, options.repeats), arms)
    for found in table:
        ratios = (found.get(f"stream_{name}") for name in SHOWN)
        print(
            f"{found['mode']:<8} {found['arm']:<8} {found['decode_tokens_per_s']:8.1f} tok/s  "
            f"all prompts {found['total_s']:7.3f} s  "
            + "  ".join(f"{ratio:.3f}" for ratio in ratios if ratio is not None)
        )
    print(f"ratios: what the stream reached of it: {', '.join(SHOWN)}")
    given = {"repeats": options.repeats, "prompts": len(prompts), "max_tokens": options.max_tokens}
    path = write("server", {"options": given, "rows": table}, UNJUDGED)
    print(json.dumps({"rows": table, "stored": str(path)}))


if __name__ == "__main__":
    main()
