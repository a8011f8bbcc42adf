"""The daemon can push to its remote without a login, or setup says what is missing for that."""

from __future__ import annotations

import plistlib

import pytest

from tests.bridge.mac.tools import FULL, Mac

SERVE = "org.kakeya-mac.serve"


@pytest.fixture
def private(mac: Mac) -> Mac:
    """A Mac whose account has no key that the server knows."""
    (mac.fake / "any-key").unlink()
    return mac


@pytest.mark.slow
def test_no_key_is_made_where_the_account_may_push(mac: Mac) -> None:
    done = mac.setup(*FULL)
    assert (done.code, mac.step(done, "remote access")["state"]) == (0, "done")
    assert not (mac.prefix / "ssh").exists()
    assert "GIT_SSH_COMMAND" not in (mac.prefix / "services" / f"{SERVE}.plist").read_text()


@pytest.mark.slow
def test_new_deploy_key_is_shown_and_used_by_the_daemon(private: Mac) -> None:
    done = private.setup(*FULL)
    step = private.step(done, "remote access")
    assert (done.code, step["state"]) == (1, "missing")
    key = private.prefix / "ssh" / "deploy_key"
    public = key.with_name("deploy_key.pub").read_text().strip()
    assert public in step["fix"]
    assert "write access" in step["fix"]
    assert "Permission denied" in step["finding"]
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700
    assert key.with_name("known_hosts").read_text().startswith("github.com ssh-ed25519 AAAA")
    before = key.read_bytes()
    (private.fake / "deploy-keys").write_text(f"{public}\n")
    assert private.setup(*FULL).code == 0
    assert key.read_bytes() == before
    installed = private.fake / "root" / "Library" / "LaunchDaemons" / f"{SERVE}.plist"
    variables = plistlib.loads(installed.read_bytes())["EnvironmentVariables"]
    assert f"-i {key} " in variables["GIT_SSH_COMMAND"]
    assert private.setup(*FULL).json["changed"] is False


def test_key_is_added_where_gh_may(private: Mac) -> None:
    (private.fake / "gh").touch()
    done = private.setup(*FULL)
    assert done.code == 0, done.err
    added = [call for call in private.changes() if call.startswith("gh repo deploy-key add")]
    assert added == [
        f"gh repo deploy-key add {private.prefix}/ssh/deploy_key.pub --repo github.com/team/workload --title"
        " kakeya-mac studio --allow-write"
    ]
    assert private.setup(*FULL).json["changed"] is False


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
    assert not (mac.prefix / "ssh").exists()


@pytest.mark.exhaustive
def test_other_labels_than_the_registered_ones_are_reported(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    assert mac.setup(*FULL, "--labels", "KAKEYA-mac,self-hosted,macOS,ARM64").code == 0
    step = mac.step(mac.setup(*FULL, "--labels", "self-hosted,fast"), "actions runner")
    assert (step["state"], "uninstall, then setup again" in step["fix"]) == ("missing", True)
    assert "self-hosted,macOS,ARM64,kakeya-mac" in step["finding"]
