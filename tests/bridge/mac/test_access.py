"""The daemon can push to its remote without a login, or setup says what is missing for that."""

from __future__ import annotations

import pytest

from tests.bridge.mac.tools import FULL, Mac


@pytest.fixture
def private(mac: Mac) -> Mac:
    """A Mac whose account has no key that the server knows."""
    (mac.fake / "any-key").unlink()
    return mac


@pytest.mark.slow
def test_account_without_a_key_is_told_how_to_make_one(private: Mac) -> None:
    done = private.setup(*FULL)
    step = private.step(done, "remote access")
    assert (done.code, step["state"]) == (1, "missing")
    assert "Permission denied" in step["finding"]
    for part in ("ssh-keygen -t ed25519", "write access", "Host github.com", "IdentityFile", "~/.ssh/config"):
        assert part in step["fix"], part
    (private.fake / "any-key").touch()
    assert private.setup(*FULL).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remote", "said"),
    [
        ("ssh://forgejo@git.example.org:2222/me/x", "ssh -p 2222 -T forgejo@git.example.org"),
        ("ssh://git.example.org/me/x", "ssh -T git@git.example.org"),
        ("git@git.example.org:2222/x", "ssh -T git@git.example.org"),
    ],
    ids=["a port", "no user", "a folder that looks like a port"],
)
def test_the_key_is_tried_with_the_user_and_port_of_the_remote(private: Mac, remote: str, said: str) -> None:
    flags = ("--service", "serve", "--remote", remote, "--name", "studio")
    step = private.step(private.run(*flags, "--sudo", "--json"), "remote access")
    assert step["fix"].endswith(said)
    assert "Host git.example.org\\n" in step["fix"]


@pytest.mark.slow
def test_remote_over_https_needs_a_credential_helper(mac: Mac) -> None:
    other = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "url./no/such/repository.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://example.org/me/workload",
    }
    flags = ("--service", "serve", "--remote", "https://example.org/me/workload", "--name", "studio")
    step = mac.step(mac.run(*flags, "--sudo", "--json", **other), "remote access")
    assert step["state"] == "missing"
    assert "credential helper" in step["fix"]


@pytest.mark.exhaustive
def test_other_labels_than_the_registered_ones_are_reported(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    assert mac.setup(*FULL, "--labels", "self-hosted,macOS,ARM64,kakeya-mac").code == 0
    step = mac.step(mac.setup(*FULL, "--labels", "self-hosted,fast"), "actions runner")
    assert (step["state"], "uninstall, then setup again" in step["fix"]) == ("missing", True)
    assert "self-hosted,macOS,ARM64,kakeya-mac" in step["finding"]
