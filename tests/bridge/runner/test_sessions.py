"""One process at a time has a runner's name, and claims of its earlier processes are its own."""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.errors import MachineError
from bridge.runner.sessions import note_session
from tests.bridge.runner.bench import Bench
from tests.houses import wait_for


@contextlib.contextmanager
def serving(bench: Bench) -> Iterator[None]:
    """A runner that has its name, and gives it up at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=bench.runner().serve, kwargs={"stop": stop}, daemon=True)
    thread.start()
    lock = bench.station().folder / "lock"
    wait_for(lambda: lock.exists() and lock.read_text() != "", what="the runner to have its name")
    try:
        yield
    finally:
        stop.set()
        thread.join(20)


def test_two_runners_of_one_name_are_a_clear_error(bench: Bench) -> None:
    with serving(bench), pytest.raises(MachineError, match=rf"already runs .*\(process {os.getpid()}\)"):
        bench.runner().serve(once=True, idle_timeout_s=0)


def test_a_child_born_while_a_runner_served_does_not_keep_its_name(bench: Bench) -> None:
    lock = bench.station().folder / "lock"
    with serving(bench):
        [held] = [number for number in range(3, 1024) if is_open_on(number, lock)]
        inherited = os.dup(held)  # as a program that is being started has until it runs
    try:
        assert bench.runner().serve(once=True, idle_timeout_s=0) == 0
    finally:
        os.close(inherited)


def is_open_on(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def test_a_copied_state_folder_knows_no_claim_of_the_original(bench: Bench) -> None:
    original = bench.station()
    assert original.identity.session in note_session(original)
    shutil.copytree(bench.state, bench.house.root / "copy")
    copy = bench.station(state_dir=bench.house.root / "copy")
    assert copy.identity.id == original.identity.id
    assert note_session(copy) == {copy.identity.session}
    again = bench.station()
    assert note_session(again) == {original.identity.session, again.identity.session}
