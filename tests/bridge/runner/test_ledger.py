"""What was answered is known after a restart, for as long as it could be asked again, and no longer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW
from bridge.runner.ledger import Ledger

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
LONGEST = MAX_LIFETIME + MAX_NONCE_SKEW


def nonce(age: timedelta = timedelta(), number: int = 0) -> str:
    return refs.new_nonce(NOW - age, number.to_bytes(6, "big"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answered"


def test_answers_outlive_the_process(path: Path) -> None:
    ledger = Ledger(path, NOW)
    assert ledger.nonces == set()
    answered = [nonce(number=number) for number in range(3)]
    for one in answered:
        ledger.add(one)
    assert ledger.nonces == set(answered)
    assert Ledger(path, NOW).nonces == set(answered)


def test_a_start_without_anything_to_drop_leaves_the_file_as_it_is(path: Path) -> None:
    Ledger(path, NOW).add(nonce())
    before = path.stat().st_ino, path.read_bytes()
    Ledger(path, NOW + LONGEST - timedelta(seconds=1))
    assert (path.stat().st_ino, path.read_bytes()) == before


def test_a_nonce_is_kept_exactly_as_long_as_its_request_could_be_valid(path: Path) -> None:
    ledger = Ledger(path, NOW)
    just_valid, expired = nonce(LONGEST), nonce(LONGEST + timedelta(seconds=1))
    for one in (just_valid, expired):
        ledger.add(one)
    assert Ledger(path, NOW).nonces == {just_valid}
    assert path.read_text().split() == [just_valid]
    assert Ledger(path, NOW + timedelta(seconds=1)).nonces == set()
    assert path.read_text() == ""


def test_months_of_work_do_not_make_the_file_grow(path: Path) -> None:
    sizes = []
    for day in range(0, 120, 10):
        now = NOW + timedelta(days=day)
        ledger = Ledger(path, now)
        for number in range(50):
            ledger.add(refs.new_nonce(now, number.to_bytes(6, "big")))
        sizes.append(path.stat().st_size)
    assert len(set(sizes[4:])) == 1, sizes
    assert len(Ledger(path, NOW + timedelta(days=110)).nonces) == 200


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 4096, b"\xff\xfe\n", b"20260301t1200", b"x\n\n\n", b"../../etc/passwd\n"]
)
def test_a_damaged_file_costs_what_is_damaged_and_is_mended(path: Path, damage: bytes) -> None:
    first, second = nonce(number=1), nonce(number=2)
    path.write_bytes(f"{first}\n{first}\n".encode() + damage)
    ledger = Ledger(path, NOW)
    assert ledger.nonces == {first}
    assert path.read_text().split() == [first]
    ledger.add(second)
    assert Ledger(path, NOW).nonces == {first, second}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_where_it_cannot_be_written_this_process_knows_it_all_the_same(path: Path) -> None:
    path.mkdir()
    path.rmdir()
    ledger = Ledger(path, NOW)
    path.mkdir()  # nothing can be appended to a folder
    with pytest.raises(OSError):
        ledger.add(nonce())
    assert ledger.nonces == {nonce()}


def test_half_a_line_that_a_full_disk_left_does_not_cost_the_next_answer(path: Path) -> None:
    first, second = nonce(number=1), nonce(number=2)
    ledger = Ledger(path, NOW)
    ledger.add(first)
    with path.open("a") as file:
        file.write(nonce(number=3)[:9])
    ledger.add(second)
    assert Ledger(path, NOW).nonces == {first, second}
