"""Credentials of an address reach git through the environment, and nowhere else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import BusError
from bridge.git.remote import for_git
from tests.fixtures.repo import RepoFixture

NASTY = "p%s@:w d/é'\"#?$(touch x)`\\ {}"


def git(repo: RepoFixture, env: dict[str, str], *args: str, ask: str = "") -> str:
    """What git says with these variables; no configuration of the developer's counts."""
    done = subprocess.run(
        ["git", *args],
        cwd=repo.clone,
        env={**repo.env, "GIT_TERMINAL_PROMPT": "0", **env},
        input=ask.encode(),
        capture_output=True,
    )
    return os.fsdecode(done.stdout)


def filled(repo: RepoFixture, env: dict[str, str], scheme: str, host: str) -> dict[str, str]:
    """The credentials git comes to for a host."""
    said = git(repo, env, "credential", "fill", ask=f"protocol={scheme}\nhost={host}\n\n")
    pairs = dict(line.split("=", 1) for line in said.splitlines())
    return {key: value for key, value in pairs.items() if key in ("username", "password")}


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("word", ["secret", NASTY, "", " ", "=", "-n", "%41", "50%"])
@pytest.mark.parametrize("host", ["example.org", "Example.org:8080", "[::1]:8080"])
def test_git_finds_name_and_password_and_the_address_holds_neither(repo: RepoFixture, word: str, host: str):
    address, env = for_git(f"HTTPS://{quote(NASTY, safe='')}:{quote(word, safe='')}@{host}/a/b.git?c=%20", {})
    assert address == f"https://{host}/a/b.git?c=%20"
    assert filled(repo, env, "https", host) == {"username": NASTY, "password": word}
    assert filled(repo, env, "https", "elsewhere.example.org") == {}
    assert filled(repo, env, "http", host) == {}


def test_a_raw_at_sign_belongs_to_the_password(repo: RepoFixture):
    address, env = for_git("http://me:p@ss@w@example.org/r.git", {})
    assert address == "http://example.org/r.git"
    assert filled(repo, env, "http", "example.org") == {"username": "me", "password": "p@ss@w"}


def test_bytes_that_are_no_text_reach_git_unchanged(repo: RepoFixture):
    _, env = for_git("http://me:%ff%fe@example.org/", {})
    assert filled(repo, env, "http", "example.org")["password"] == os.fsdecode(b"\xff\xfe")


def test_the_users_own_helpers_are_not_asked_nor_told(repo: RepoFixture, tmp_path: Path):
    log = tmp_path / "asked"
    repo.git("config", "--global", "credential.helper", f"!f() {{ echo $1 >> '{log}'; }}; f")
    _, env = for_git("http://me:secret@example.org/", {})
    assert filled(repo, env, "http", "example.org")["password"] == "secret"
    spoken = "protocol=http\nhost=example.org\nusername=me\npassword=secret\n\n"
    for verb in ("approve", "reject"):
        git(repo, env, "credential", verb, ask=spoken)
    assert not log.exists()


def test_name_alone_asks_the_users_helpers(repo: RepoFixture):
    address, env = for_git("http://tok%40en@example.org/", {})
    assert address == "http://example.org/"
    known = '!f() { grep -q "^username=tok@en$" && echo password=kept; }; f'
    repo.git("config", "--global", "credential.helper", known)
    assert filled(repo, env, "http", "example.org") == {"username": "tok@en", "password": "kept"}


def test_settings_that_the_environment_brings_stay_in_force(repo: RepoFixture):
    before = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_VALUE_0": "Environment"}
    for remote in ("http://me:secret@example.org/", "http://me@example.org/"):
        _, env = for_git(remote, before)
        assert not set(env) & set(before) - {"GIT_CONFIG_COUNT"}
        assert git(repo, {**before, **env}, "config", "user.name") == "Environment\n"
        if "secret" in remote:
            assert filled(repo, {**before, **env}, "http", "example.org")["username"] == "me"


def test_rewriting_rule_does_not_change_where_it_goes(repo: RepoFixture):
    for rule in ("insteadOf", "pushInsteadOf"):
        repo.git("config", "--global", f"url.git@example.org:.{rule}", "https://example.org/")
    address, env = for_git("https://me:secret@example.org/r.git", {})
    assert git(repo, {}, "ls-remote", "--get-url", address) == "git@example.org:r.git\n"
    assert git(repo, env, "ls-remote", "--get-url", address) == f"{address}\n"


@pytest.mark.parametrize(
    "remote",
    [
        "/srv/r.git",
        "../a:b@c/r.git",
        "file:///srv/a:b@c/r.git",
        "git@example.org:team/r.git",
        "ssh://example.org/r.git",
        "ssh://git@example.org:2222/r.git",
        "git://example.org/a@b",
        "https://example.org/r.git",
        "https://example.org:8443/a@1/r.git",
        "https://[::1]/a@1",
        "ext::sh -c x@y",
        "",
    ],
)
def test_what_holds_no_secret_stays_as_it_is(remote: str):
    assert for_git(remote, {}) == (remote, {})


def test_ssh_keeps_the_name_and_loses_the_password():
    assert for_git("ssh://git:secret@example.org:22/r.git", {}) == ("ssh://git@example.org:22/r.git", {})
    assert for_git("https://@example.org/r.git", {}) == ("https://example.org/r.git", {})


@pytest.mark.parametrize("hidden", ["%0A", "%0d", "%00", "/", "#", "?", " ", "\n", "\t"])
@pytest.mark.parametrize("scheme", ["https", "ssh"])
def test_what_cannot_travel_is_refused_without_being_shown(hidden: str, scheme: str):
    with pytest.raises(BusError) as caught:
        for_git(f"{scheme}://me:sec{hidden}ret@example.org/r.git", {})
    shown = f"{caught.value.message} {caught.value.remedy}"
    assert "sec" not in shown.replace("second", "")
    assert "ret" not in shown


@given(st.text(min_size=1).filter(lambda t: not set(t) & set("\n\r\0") and t.isprintable()))
def test_no_address_keeps_a_password(word: str):
    address, env = for_git(f"http://me:{quote(word, safe='')}@example.org/r.git", {})
    assert address == "http://example.org/r.git"
    assert env == {**for_git("http://me:other@example.org/r.git", {})[1], "KAKEYA_REMOTE_PASSWORD": word}
