"""``make fuzz``: one reader of hostile documents under a coverage-guided fuzzer, until the time is over.

``python -m tests.adversary.fuzz KIND [SECONDS]``. Needs atheris, which ``make fuzz`` installs into an
environment of its own where it has a wheel for this Python (Linux, and macOS by its own build). An input that
raises something else than the reader's own error, is accepted where the oracle refuses, or takes more than
ten seconds ends the run, and is left in a file named ``crash-…`` or ``timeout-…``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.adversary.mutants import WORDS


def main() -> int:
    """Fuzz one reader."""
    import atheris

    with atheris.instrument_imports(include=["bridge"]):
        from tests.adversary.doors import DOORS
        from tests.adversary.families import RECORDS
        from tests.adversary.oracle import ORACLES
        from tests.adversary.records import Record
        from tests.adversary.test_fuzz import HONEST

    if len(sys.argv) not in (2, 3) or sys.argv[1] not in DOORS:
        sys.stderr.write(f"usage: python -m tests.adversary.fuzz {'|'.join(DOORS)} [SECONDS]\n")
        return 2
    kind, seconds = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "60"
    door = DOORS[kind]

    def one(data: bytes) -> None:
        try:
            door.read(data)
        except door.refusal:
            return
        ORACLES[kind](data)

    with tempfile.TemporaryDirectory(prefix="kakeya-mac-fuzz-") as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        (corpus / "honest").write_bytes(HONEST[kind])
        for family in RECORDS.values():
            for name, record in family.attacks.items() if family.door == kind else ():
                assert isinstance(record, Record)
                data = record.made_of(door.honest)
                if len(data) <= 1 << 16:
                    (corpus / name).write_bytes(data)
        words = Path(folder) / "words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS))
        options = [f"-max_total_time={seconds}", "-timeout=10", "-max_len=70000", f"-dict={words}"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], one)
        atheris.Fuzz()
    return 0


def _escaped(word: bytes) -> str:
    """A word as the fuzzer's dictionary writes it."""
    return "".join(f"\\x{byte:02x}" for byte in word[:60])


if __name__ == "__main__":
    sys.exit(main())
