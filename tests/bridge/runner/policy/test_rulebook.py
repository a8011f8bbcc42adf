"""The owner's files are read again when they change, and what others may write decides nothing."""

import os
from pathlib import Path

import pytest

from bridge.errors import BridgeError, PolicyError
from bridge.runner.config import Rulebook

PRESET = """
name = "echo"
summary = "Says a word."
argv = ["/bin/echo", "hi"]
timeout_s = 30
engine = "installed"
workspace = "none"
"""


class ConfigOwner:
    """A configuration folder whose owner changes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        (folder / "presets").mkdir(mode=0o700)
        self.write("presets/echo.toml", PRESET)
        self.write("policy.toml", 'allow_presets = ["echo"]\n')

    def write(self, name: str, text: str, mode: int = 0o600) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(mode)

    def book(self) -> Rulebook:
        return Rulebook(self.folder)


@pytest.fixture
def owner(tmp_path: Path) -> ConfigOwner:
    return ConfigOwner(tmp_path / "config")


def test_nothing_is_read_again_while_nothing_changes(owner: ConfigOwner) -> None:
    book = owner.book()
    presets = book.presets
    assert not book.refresh()
    assert book.presets is presets


def test_a_change_is_read_and_said_once(owner: ConfigOwner) -> None:
    book = owner.book()
    owner.write("policy.toml", "allow_presets = []\n")
    assert book.refresh()
    assert not book.refresh()
    assert book.policy.allow_presets == ()
    assert book.summary().startswith("presets: none; not allowed: ")


@pytest.mark.parametrize(
    ("name", "text", "mode", "message"),
    [
        ("policy.toml", "allow = 1", 0o600, "unknown key allow"),
        ("policy.toml", "", 0o640, "can be read by others .mode 0640."),
        ("policy.toml", "", 0o604, "can be read by others"),
        ("policy.toml", "", 0o620, "can be written by others"),
        ("policy.toml", "", 0o602, "can be written by others"),
        ("policy.toml", "[presets.none]\ntimeout_s = 1", 0o600, "presets.none is not a preset"),
        ("presets/echo.toml", "name = 1", 0o600, "echo.toml"),
        ("presets/echo.toml", PRESET, 0o620, "echo.toml can be written by others"),
        ("presets/probe.toml", PRESET.replace("echo", "probe"), 0o600, "both answer to 'probe'"),
        ("allowed_signers", "", 0o622, "allowed_signers can be written by others"),
        ("known_runners", "", 0o602, "known_runners can be written by others"),
        ("revoked_keys", "", 0o620, "revoked_keys can be written by others"),
    ],
    ids=str,
)
def test_what_became_wrong_is_a_fault_until_it_is_right_again(
    owner: ConfigOwner, name: str, text: str, mode: int, message: str
) -> None:
    book = owner.book()
    before = (book.policy, book.presets)
    kept = (owner.folder / name).read_text() if (owner.folder / name).exists() else None
    owner.write(name, text, mode)
    assert book.refresh()
    assert book.fault is not None
    with pytest.raises(BridgeError, match=message):
        raise book.fault
    with pytest.raises(BridgeError, match=message):
        owner.book()
    assert (book.policy, book.presets) == before
    assert not book.refresh()
    (owner.folder / name).unlink()
    if kept is not None:
        owner.write(name, kept)
    assert book.refresh()
    assert book.fault is None


@pytest.mark.parametrize("name", ["", "presets"])
def test_a_folder_that_others_may_write_is_a_fault(owner: ConfigOwner, name: str) -> None:
    book = owner.book()
    (owner.folder / name).chmod(0o770)
    assert book.refresh()
    assert book.fault is not None
    assert "can be written by others" in book.fault.message
    assert book.fault.remedy == f"chmod go-w {owner.folder / name}"


@pytest.mark.parametrize("name", ["policy.toml", "presets/echo.toml"])
def test_a_pipe_in_place_of_a_file_is_a_fault_and_is_not_waited_for(owner: ConfigOwner, name: str) -> None:
    (owner.folder / name).unlink()
    os.mkfifo(owner.folder / name, 0o600)
    with pytest.raises(BridgeError, match="not a plain file"):
        owner.book()


def test_a_link_is_followed_to_a_folder_that_others_may_write(owner: ConfigOwner, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (owner.folder / "policy.toml").rename(shared / "policy.toml")
    (owner.folder / "policy.toml").symlink_to(shared / "policy.toml")
    with pytest.raises(PolicyError, match="shared can be written by others"):
        owner.book()


@pytest.mark.parametrize("name", ["policy.toml", "presets/echo.toml", "presets", "revoked_keys"])
def test_dangling_link_does_not_mean_the_default(owner: ConfigOwner, name: str) -> None:
    path = owner.folder / name
    if path.exists():
        path.rename(owner.folder / "away")
    path.symlink_to(owner.folder / "nowhere")
    with pytest.raises(BridgeError, match="a link to a file that does not exist"):
        owner.book()


def test_empty_file_does_not_mean_the_default(owner: ConfigOwner) -> None:
    """An editor that saves leaves it so for a moment."""
    book = owner.book()
    (owner.folder / "policy.toml").write_text("\n")
    assert book.refresh()
    assert book.fault is not None
    assert "policy.toml is empty" in book.fault.message


def test_deleted_file_does_not_mean_the_default(owner: ConfigOwner) -> None:
    book = owner.book()
    (owner.folder / "policy.toml").unlink()
    assert book.refresh()
    assert book.fault is not None
    assert "policy.toml is gone" in book.fault.message
    assert not book.refresh()
    assert owner.book().policy.allow_presets is None  # a start says which policy it serves with
