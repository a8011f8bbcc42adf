"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fixtures.bus import BusFixture, make_bus
from tests.fixtures.repo import RepoFixture, build_repo

# Of the records in tests/frozen, whose files stay as they are, `make test` compares what lies on the remote.
FAST_RECORDS = {
    "test_refs_and_documents",
    "test_signatures_hold_in_their_namespaces",
    "test_documents_keep_the_schema",
    "test_result",
    "test_unknown_handle",
    "test_unreachable_remote",
    "test_run_is_refused",
}


FEW, MANY = 25, 150  # examples of a property
settings.register_profile("few", max_examples=FEW, deadline=None)
settings.register_profile("many", max_examples=MANY, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples of a property are tried, and make their surroundings the same everywhere.

    Signals end programs again where the tests run in a shell's background or under nohup: such a shell has
    them ignored, and every child would inherit that. What tests write is theirs alone to write, whatever the
    developer's umask: others' files decide nothing on a runner's machine. Python keeps what it compiled: a
    third of a short command's time is compiling otherwise, each time.
    """
    settings.load_profile("few" if "not slow" in config.option.markexpr else "many")
    os.umask(0o022)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # before xdist starts its workers
    tempfile.gettempdir()  # is remembered: before a test changes the environment
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)  # before the marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked ``sampled(n, m)``, let one in n be fast; none where n is 0.

    Of the others one in m (without m: every second one) is slow, and the rest are exhaustive. A property is
    tried on a few examples in `make test`, and on many in `make slow`.
    """
    many = settings().max_examples == MANY
    for item in items:
        folder = item.nodeid.split("/")[1]
        if folder == "e2e":
            item.add_marker(pytest.mark.e2e)
        elif folder == "frozen" and item.nodeid.partition("::")[2].partition("[")[0] not in FAST_RECORDS:
            item.add_marker(pytest.mark.slow)
        if many and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.slow)
    seen: Counter[str] = Counter()
    rest: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            fast, slow = (*mark.args, 2)[:2]
            if not fast or seen[test] % fast:
                item.add_marker(pytest.mark.exhaustive if rest[test] % slow else pytest.mark.slow)
                rest[test] += 1
            seen[test] += 1
    # Whole programs take longer than the limit of all tests, in `make e2e` and in a runner's job.
    for item in items:
        if item.get_closest_marker("e2e") and not item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.timeout(600))
    # The longest begin first, so that no worker is busy with one of them when the others have nothing left.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture
def repo(tmp_path: Path) -> RepoFixture:
    """A bare remote, a workload clone, private state and configuration."""
    return build_repo(tmp_path / "repo")


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BusFixture:
    """A bus on real repositories, driven call by call."""
    return make_bus(tmp_path, monkeypatch)
