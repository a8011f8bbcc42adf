"""The owner's files are read within limits, only where no other user can write them, into strict models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import BaseModel

from bridge import settings
from bridge.errors import PolicyError
from bridge.settings import MAX_BYTES, STRICT, SettingsError, parse_toml, read_file, read_owned_file


class Inner(BaseModel):
    model_config = STRICT

    number: int = 1


class Outer(BaseModel):
    model_config = STRICT

    names: tuple[str, ...] = ()
    inner: Inner = Inner()


def parse(text: str) -> Outer:
    return parse_toml(Outer, text.encode(), where="file x", error=PolicyError)


def test_a_file_becomes_a_model() -> None:
    assert parse('names = ["a"]\n[inner]\nnumber = 2') == Outer(names=("a",), inner=Inner(number=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other = 1", "file x: unknown key other"),
        ("[inner]\nother = 1", r"file x: unknown key inner\.other"),
        ("[inner]\nnumber = true", r"file x: inner\.number: should be a valid integer, got True"),
        ("[inner]\nnumber = nan", r"file x: inner\.number: should be"),
        ("names = [2026-01-01]", "file x: not TOML"),
        ("names = ", "file x: not TOML"),
        ("x = " + "[" * 30_000, "file x: not TOML"),
        ("x = " + "9" * 5000, "file x: not TOML"),
        ("\ud800", "file x: not TOML"),
    ],
    ids=range(9),
)
def test_a_fault_is_named_by_file_key_and_value(text: str, message: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    with pytest.raises(PolicyError, match=message):
        parse_toml(Outer, data, where="file x", error=PolicyError)


def test_a_missing_file_is_none_and_a_dangling_link_an_error(tmp_path: Path) -> None:
    assert read_file(tmp_path / "x", PolicyError) is None
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(PolicyError, match="a link to a file that does not exist"):
        read_owned_file(tmp_path / "link", PolicyError)


def test_a_pipe_a_folder_and_a_large_file_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (MAX_BYTES + 1))
    for name, message in (("pipe", "not a plain file"), (".", "Is a directory"), ("large", "at most")):
        with pytest.raises(PolicyError, match=message):
            read_file(tmp_path / name, PolicyError)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("KAKEYA_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KAKEYA_CONFIG", str(tmp_path))
    return tmp_path / "config.toml"


def test_flag_beats_environment_beats_file_beats_default(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings.load().remote is None
    assert (settings.load().request_lifetime_s, settings.load().transport) == (86_400, "auto")
    config.write_text('remote = "file"\nrequest_lifetime_s = 60\nallow_unsigned = true\n')
    found = settings.load()
    assert (found.remote, found.request_lifetime_s, found.allow_unsigned) == ("file", 60, True)
    monkeypatch.setenv("KAKEYA_REMOTE", "environment")
    monkeypatch.setenv("KAKEYA_REQUEST_LIFETIME", "90")
    monkeypatch.setenv("KAKEYA_ALLOW_UNSIGNED", "0")
    found = settings.load()
    assert (found.remote, found.request_lifetime_s, found.allow_unsigned) == ("environment", 90, False)
    assert settings.load(remote="flag").remote == "flag"


@pytest.mark.parametrize(
    ("text", "variable", "message"),
    [
        ("remot = 1", None, "config.toml: unknown key remot"),
        ("remote = 1", None, "config.toml: remote: should be a valid string, got 1"),
        ("request_lifetime_s = 0", None, "request_lifetime_s: should be greater than or equal to 1, got 0"),
        ('transport = "pigeon"', None, "transport: should be 'auto', 'embedded' or 'actions', got 'pigeon'"),
        ("state_dir = 'x'", None, "unknown key state_dir"),
        (
            "",
            ("KAKEYA_REQUEST_LIFETIME", "soon"),
            "KAKEYA_REQUEST_LIFETIME: should be a valid integer, got 'soon'",
        ),
        ("", ("KAKEYA_REQUEST_LIFETIME", "9999999"), "KAKEYA_REQUEST_LIFETIME: should be less than"),
        ("", ("KAKEYA_TRANSPORT", "pigeon"), "KAKEYA_TRANSPORT: should be 'auto'"),
        ("", ("KAKEYA_ALLOW_UNSIGNED", "yes"), "KAKEYA_ALLOW_UNSIGNED: should be a valid boolean, got 'yes'"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_an_error_that_names_it(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    variable: tuple[str, str] | None,
    message: str,
) -> None:
    config.write_text(text)
    if variable is not None:
        monkeypatch.setenv(*variable)
    with pytest.raises(SettingsError) as caught:
        settings.load()
    assert message in caught.value.message
