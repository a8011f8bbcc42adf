"""What a runner knows survives its end; a damaged file is set aside; a full disk is one clear error."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge.bus.publish import ResultFiles
from bridge.errors import MachineError
from bridge.protocol import refs
from bridge.runner.store import FIRST_PAUSE_S, LONGEST_PAUSE_S, RequestRecord, Store
from tests.fixtures.runner import Clock

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NONCE = refs.new_nonce(NOW, b"\1" * 6)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "runner"
    folder.mkdir()
    return folder / "store.sqlite"


@pytest.fixture
def store(path: Path, clock: Clock) -> Store:
    return Store(path, clock=clock)


def reopened(store: Store, path: Path, clock: Clock) -> Store:
    store.close()
    return Store(path, clock=clock)


def result(nonce: str = NONCE, size: int = 10) -> ResultFiles:
    return ResultFiles(nonce, "a" * 40, "refs/heads/x", b"{}", b"signature", {"log.txt": b"x" * size})


def test_all_that_is_known_survives_a_restart(store: Store, path: Path, clock: Clock):
    store.begin(NONCE, 2)
    store.defer(NONCE, 1500.0, "closed")
    store.keep(result())
    sessions = store.add_session("a" * 16)
    store = reopened(store, path, clock)
    assert store.get(NONCE) == RequestRecord(attempts=2, not_before=1500.0, reason="closed")
    assert store.unpublished() == [NONCE]
    assert store.result(NONCE) == result()
    assert store.add_session("b" * 16) == sessions | {"b" * 16}
    store.answer(NONCE)
    store = reopened(store, path, clock)
    assert (store.unpublished(), store.result(NONCE)) == ([], None)
    record = store.get(NONCE)
    assert (record.answered_at, record.attempts) == (1000.0, 2)
    assert (record.not_before, record.reason) == (None, None)
    assert store.get("another") == RequestRecord()


def test_attempt_is_durable_when_the_process_is_killed(path: Path):
    script = (
        "import os, sys; from pathlib import Path; from bridge.runner.store import Store;"
        "store = Store(Path(sys.argv[1])); store.begin('n', 3); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)])
    assert done.returncode == -9
    assert Store(path).get("n").attempts == 3


def test_result_replaces_one_of_the_same_nonce_with_its_files(store: Store):
    store.keep(result())
    other = ResultFiles(NONCE, "b" * 40, None, b"[]", None, {"report.json": b"y"})
    store.keep(other)
    assert store.result(NONCE) == other
    store.drop_result(NONCE)
    assert store.result(NONCE) is None
    store.keep(result())  # no file of the dropped one is in the way
    assert store.result(NONCE) == result()


def paused(store: Store, clock: Clock) -> float:
    store.back_off(NONCE, "away")
    return (store.get(NONCE).not_before or 0.0) - clock()


def test_pause_doubles_with_each_failure_up_to_the_longest(store: Store, clock: Clock):
    pauses = [paused(store, clock) for _ in range(12)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    record = store.get(NONCE)
    assert (record.failures, record.reason) == (12, "away")
    assert record.not_before == clock() + LONGEST_PAUSE_S
    assert not store.is_due(NONCE)
    store.release_deferred()
    assert not store.is_due(NONCE), "a failure is no deferral"
    clock.seconds += LONGEST_PAUSE_S
    assert store.is_due(NONCE)
    store.answer(NONCE)
    assert paused(store, clock) == FIRST_PAUSE_S


def test_deferral_says_whether_its_reason_is_new(store: Store, clock: Clock):
    assert store.defer(NONCE, clock() + 60, "closed")
    assert not store.defer(NONCE, clock() + 90, "closed")
    assert store.defer(NONCE, clock() + 90, "another")
    assert not store.is_due(NONCE)
    store.release_deferred()
    assert store.is_due(NONCE)
    store.defer(NONCE, clock() + 90, "closed")
    store.begin(NONCE, 1)
    assert store.is_due(NONCE)


def test_old_requests_are_forgotten_unless_their_result_waits(store: Store):
    old, kept, new = (refs.new_nonce(NOW - timedelta(days=days), b"\1" * 6) for days in (90, 91, 0))
    for nonce in (old, kept, new):
        store.begin(nonce, 1)
    store.keep(result(kept))
    store.forget_old(NOW)
    assert [store.get(nonce).attempts for nonce in (old, kept, new)] == [0, 1, 1]


def test_damaged_row_harms_no_other(store: Store, path: Path, clock: Clock):
    other = refs.new_nonce(NOW, b"\2" * 6)
    for nonce in (NONCE, other):
        store.keep(result(nonce))
    with store._transaction() as database:
        database.execute("DELETE FROM file")
        database.execute("UPDATE result SET nonce = CAST(X'FF' AS TEXT) WHERE nonce = ?", (NONCE,))
        database.execute("UPDATE result SET body = 'text', result_ref = CAST(X'72FF' AS TEXT)")
    store = reopened(store, path, clock)
    assert store.result(NONCE) is None
    found = store.result(other)
    assert (found and found.result, other in store.unpublished()) == (b"text", True)


def test_clock_that_is_set_back_delays_no_retry(store: Store, clock: Clock):
    clock.seconds += 3600
    paused(store, clock)
    clock.seconds -= 3600
    assert store.is_due(NONCE)


def test_copy_of_the_folder_takes_no_claims_over(store: Store, path: Path, clock: Clock):
    first = store.add_session("a" * 16)
    store.close()
    copied = path.parent.with_name("copied")
    shutil.copytree(path.parent, copied)
    assert Store(copied / path.name, clock=clock).add_session("b" * 16) == {"b" * 16}
    assert Store(path, clock=clock).add_session("c" * 16) == first | {"c" * 16}


def test_machine_without_a_hardware_address_knows_its_sessions(store: Store, monkeypatch: pytest.MonkeyPatch):
    multicast = iter((0x01_0000_0000_01, 0x01_0000_0000_02))  # as `uuid` makes them up
    monkeypatch.setattr("uuid.getnode", lambda: next(multicast))
    store.add_session("a" * 16)
    assert store.add_session("b" * 16) == {"a" * 16, "b" * 16}


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:] = b"x" * (len(data) - 100)
    path.write_bytes(data)


def of_another_version(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()


def of_a_format_to_come(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[18:20] = b"\x09\x09"
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no database": lambda path: path.write_bytes(b"rubbish" * 1000),
    "broken pages": corrupt,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "another version": of_another_version,
    "a format to come": of_a_format_to_come,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_file_is_set_aside(
    store: Store, path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, how: str
):
    store.keep(result(size=50_000))
    store.begin(NONCE, 2)
    store.close()
    DAMAGE[how](path)
    store = Store(path, clock=clock)
    assert store.get(NONCE).attempts == 0
    store.begin(NONCE, 1)
    assert reopened(store, path, clock).get(NONCE).attempts == 1
    assert len(list(path.parent.glob("store.sqlite.damaged-*"))) >= 1
    assert "cannot be used" in caplog.text


def test_full_disk_is_one_clear_error_and_changes_nothing(store: Store):
    store.keep(result())
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(MachineError, match="full") as refused:
        store.keep(result("20260301t120001z0123456789ab", size=1 << 20))
    assert refused.value.remedy == "free disk space"
    assert store.unpublished() == [NONCE]
    assert store.result(NONCE) == result()
    store._database.execute("PRAGMA max_page_count = 100000")
    store.keep(result("20260301t120001z0123456789ab", size=1 << 20))
    assert len(store.unpublished()) == 2


def test_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path):
    with pytest.raises(MachineError, match="cannot write"):
        Store(tmp_path / "none" / "store.sqlite")
