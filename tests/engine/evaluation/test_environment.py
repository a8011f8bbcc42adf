"""A report says which commit ran, and whether what ran is what was committed."""

import subprocess
from pathlib import Path

import pytest

from engine.evaluation import environment
from engine.evaluation.strain import SwapWatch
from engine.runtime import prepare


def git(folder: Path, *argv: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ("git", *identity, *argv), cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose package is taken for this one."""
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "decode.py").write_text("ONE = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(environment, "PACKAGE", folder)
    return folder


def described() -> dict[str, object]:
    block = environment.describe(prepare(), SwapWatch(), {})["git"]
    assert block["source_sha256"] == environment.source_digest()
    return {name: block[name] for name in ("sha", "dirty")}


def test_what_was_committed_is_clean(package: Path) -> None:
    (package.parent / "report.json").write_text("{}")  # not of the package
    assert described() == {"sha": git(package, "rev-parse", "HEAD"), "dirty": False}


def test_a_changed_or_new_file_is_dirty(package: Path) -> None:
    changed = package / "decode.py"
    changed.write_text("ONE = 2\n")
    assert described()["dirty"] is True
    git(package, "checkout", "-q", "--", ".")
    assert described()["dirty"] is False
    (package / "extra.py").write_text("TWO = 2\n")
    assert described()["dirty"] is True


def test_what_the_configuration_of_a_checkout_starts_is_not_started(package: Path) -> None:
    mark = package.parent / "started"
    git(package, "config", "core.fsmonitor", f"touch {mark}; false")
    described()
    assert not mark.exists()


def test_without_a_checkout_nothing_is_said(package: Path) -> None:
    (package.parent / ".git").rename(package.parent / "elsewhere")
    assert described() == {"sha": None, "dirty": None}
