"""The small programs that runners run here. Each tells the witness that it ran: no runner can forget it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures.repo import RepoFixture

FAIL_CODE = 7
MOST_SECONDS = 30
JOURNAL = "journal"  # in the job's HOME
_HEARD_S = 30

# Its arguments: how it ends, the word and the seconds asked for, and the flags of ${request}.
_PROGRAM = f"""\
import os, signal, sys, time

ending, word, seconds = sys.argv[1:4]
nonce = sys.argv[sys.argv.index("--request-nonce") + 1]
journal = os.path.join(os.environ["HOME"], "{JOURNAL}")


def note(what):
    os.write(witness, f"{{what}} {{nonce}}\\n".encode())


os.mkfifo(journal)
signal.signal(signal.SIGALRM, lambda *_: sys.exit("no witness came within {_HEARD_S} s"))
signal.alarm({_HEARD_S})
witness = os.open(journal, os.O_WRONLY)
signal.alarm(0)
note("start")
print(nonce, word, flush=True)
time.sleep(float(seconds))
note("end")
sys.exit({FAIL_CODE} if ending == "fail" else 0)
"""
_PARAMS = f"""
[params.word]
type = "string"
pattern = "word-.*"
description = "comes back in the log"

[params.seconds]
type = "number"
minimum = 0
maximum = {MOST_SECONDS}
default = 0.0
description = "how long it takes"
"""


@dataclass(frozen=True)
class Ledger:
    """How often each job started and ended, as the witness heard it from the jobs themselves."""

    started: Counter[str]
    ended: Counter[str]
    torn: list[str]


def install(repo: RepoFixture) -> None:
    """Write the presets ``works`` and ``fails`` into the owner's configuration."""
    presets = Path(repo.env["KAKEYA_CONFIG"]) / "presets"
    presets.mkdir(parents=True, exist_ok=True, mode=0o700)
    program = repo.root / "job.py"
    program.write_text(_PROGRAM)
    ledger_of(repo).touch()
    for name, ending in (("works", "well"), ("fails", "fail")):
        argv = ["${python}", "-I", str(program), ending, "{word}", "{seconds}"]
        (presets / f"{name}.toml").write_text(
            f'name = "{name}"\nsummary = "A job of the fault harness."\n'
            f"argv = {[*argv, '${request}']!r}\n"
            'timeout_s = 60\nengine = "installed"\nworkspace = "none"\n' + _PARAMS
        )


def read_ledger(repo: RepoFixture) -> Ledger:
    """What the jobs said so far."""
    started: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    torn = []
    for line in ledger_of(repo).read_text().splitlines():
        match line.split():
            case ["start", nonce]:
                started[nonce] += 1
            case ["end", nonce]:
                ended[nonce] += 1
            case _:
                torn.append(line)
    return Ledger(started, ended, torn)


def ledger_of(repo: RepoFixture) -> Path:
    """The file in which the witness writes down what the jobs say."""
    return repo.root / "ledger.txt"
