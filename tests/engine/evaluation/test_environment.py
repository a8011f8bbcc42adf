"""A report says which commit ran, and whether what ran is what was committed."""

import subprocess
from pathlib import Path

import pytest

from engine.device import prepare
from engine.evaluation import environment
from engine.evaluation.environment import LoadWatch


def git(folder: Path, *argv: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ("git", *identity, *argv), cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose package replaces this one."""
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "decode.py").write_text("ONE = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(environment, "PACKAGE", folder)
    return folder


def describe() -> dict[str, object]:
    block = environment.describe(prepare(), LoadWatch(), {})["git"]
    assert block["source_sha256"] == environment.source_digest(environment.PACKAGE)
    return {name: block[name] for name in ("sha", "dirty")}


def test_what_was_committed_is_clean(package: Path) -> None:
    (package.parent / "report.json").write_text("{}")  # not of the package
    assert describe() == {"sha": git(package, "rev-parse", "HEAD"), "dirty": False}


def test_a_changed_or_new_file_is_dirty(package: Path) -> None:
    changed = package / "decode.py"
    changed.write_text("ONE = 2\n")
    assert describe()["dirty"] is True
    git(package, "checkout", "-q", "--", ".")
    assert describe()["dirty"] is False
    (package / "extra.py").write_text("TWO = 2\n")
    assert describe()["dirty"] is True


@pytest.mark.parametrize("way", ["not-shown", "excluded", "unwatched"])
def test_no_configuration_hides_a_difference(package: Path, way: str) -> None:
    if way == "unwatched":
        git(package, "update-index", "--assume-unchanged", "decode.py")
        (package / "decode.py").write_text("ONE = 2\n")
    else:
        (package / "extra.py").write_text("TWO = 2\n")
    if way == "not-shown":
        git(package, "config", "status.showUntrackedFiles", "no")
    if way == "excluded":
        (package.parent / ".git" / "info" / "exclude").write_text("extra.py\n")
    assert git(package, "status", "--porcelain") == ""
    assert describe()["dirty"] is True


def test_a_replaced_commit_hides_no_difference(package: Path) -> None:
    (package / "decode.py").write_text("ONE = 2\n")
    committed = git(package, "rev-parse", "HEAD")
    git(package, "commit", "-q", "-a", "-m", "two")
    git(package, "replace", committed, "HEAD")
    git(package, "reset", "-q", "--soft", committed)
    assert describe() == {"sha": committed, "dirty": True}


def test_links_and_longer_digests_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "näch ste.py").write_text("ONE = 1\n")
    (folder / "link").symlink_to("näch ste.py")
    git(tmp_path, "init", "-q", "--object-format=sha256")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(environment, "PACKAGE", folder)
    assert describe()["dirty"] is False
    (folder / "link").unlink()
    (folder / "link").symlink_to("elsewhere")
    assert describe()["dirty"] is True


@pytest.mark.parametrize("started_by", ["fsmonitor", "filter"])
def test_git_configuration_of_a_checkout_starts_nothing(package: Path, started_by: str) -> None:
    mark = package.parent / "started"
    if started_by == "fsmonitor":
        git(package, "config", "core.fsmonitor", f"touch {mark}; false")
    else:
        (package.parent / ".git" / "info" / "attributes").write_text("*.py filter=x\n")
        git(package, "config", "filter.x.clean", f"touch {mark}; cat")
    (package / "decode.py").write_text("TWO = 1\n")  # as long as the committed one
    assert describe()["dirty"] is True
    assert not mark.exists()


def test_a_missing_git_object_is_not_fetched(package: Path) -> None:
    mark = package.parent / "started"
    git(package, "config", "core.repositoryFormatVersion", "1")
    git(package, "config", "extensions.partialClone", "origin")
    git(package, "config", "remote.origin.promisor", "true")
    git(package, "config", "remote.origin.url", str(package.parent))
    git(package, "config", "remote.origin.uploadpack", f"touch {mark}; false")
    tree = git(package, "rev-parse", "HEAD:engine")
    (package.parent / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    assert describe() == {"sha": None, "dirty": None}
    assert not mark.exists()


def test_without_a_checkout_nothing_is_said(package: Path) -> None:
    (package.parent / ".git").rename(package.parent / "elsewhere")
    assert describe() == {"sha": None, "dirty": None}


def test_a_run_that_began_on_battery_was_on_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "power_source", lambda: "battery")
    watch = LoadWatch()
    monkeypatch.setattr(environment, "power_source", lambda: "ac")
    for _ in range(2):  # for the fingerprint of rows, and for the report
        assert environment.describe(prepare(), watch, {})["power_source"] == "battery"
