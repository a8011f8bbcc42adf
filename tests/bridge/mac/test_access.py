"""The hook can read the repository whose jobs it judges, or setup says what is missing for that."""

from __future__ import annotations

import pytest

from tests.bridge.mac.tools import FULL, URL, Mac


@pytest.fixture
def private(mac: Mac) -> Mac:
    """A Mac whose repository knows no key yet."""
    (mac.fake / "any-key").unlink()
    return mac


@pytest.mark.exhaustive
def test_a_key_that_github_does_not_know_is_said_with_the_page_to_add_it(private: Mac) -> None:
    done = private.setup(*FULL)
    step = private.step(done, "hook access")
    assert (done.code, step["state"]) == (1, "missing")
    public = (private.prefix / "hook" / "deploy_key.pub").read_text().strip()
    assert public.startswith("ssh-ed25519 ")
    assert f"{URL}/settings/keys" in step["fix"]
    assert "read-only" in step["fix"]
    assert public in step["fix"]
    key = (private.prefix / "hook" / "deploy_key").read_bytes()
    (private.fake / "deploy-keys").write_text(f"{public}\n")
    assert private.setup(*FULL).code == 0
    assert (private.prefix / "hook" / "deploy_key").read_bytes() == key


@pytest.mark.slow
def test_a_key_is_added_where_gh_may(private: Mac) -> None:
    (private.fake / "gh").touch()
    done = private.setup(*FULL)
    assert done.code == 0, done.err
    added = [call for call in private.changes() if call.startswith("gh repo deploy-key add")]
    assert added == [
        f"gh repo deploy-key add {private.prefix}/hook/deploy_key.pub --repo github.com/team/workload --title"
        " kakeya-mac studio"
    ]
    assert private.setup(*FULL).json["changed"] is False


@pytest.mark.exhaustive
def test_a_known_key_that_still_does_not_read_is_no_bug_of_ours(private: Mac) -> None:
    assert private.setup(*FULL).code == 1
    key = private.prefix / "hook" / "deploy_key.pub"
    (private.fake / "gh").write_text("x")
    (private.fake / "deploy-keys").write_text(f"1 a read-only {key.read_text()}")
    (private.prefix / "hook" / "deploy_key").chmod(0o600)
    (private.folder / "tools" / "ssh").write_text("#!/bin/sh\necho 'no route to host' >&2; exit 255\n")
    step = private.step(private.setup(*FULL), "hook access")
    assert step["state"] == "missing"
    assert "bug" not in step["fix"]


def policy(mac: Mac, text: str) -> None:
    path = mac.home / ".config" / "kakeya-mac" / "policy.toml"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(text)
    path.chmod(0o600)


@pytest.mark.exhaustive
def test_a_policy_for_another_repository_is_said(mac: Mac) -> None:
    policy(mac, '[actions]\nrepository = "team/other"\n')
    step = mac.step(mac.setup(*FULL), "hook access")
    assert (step["state"], "lets runs of team/other begin" in step["finding"]) == ("missing", True)


@pytest.mark.exhaustive
def test_an_older_policy_without_a_key_is_told_the_lines(private: Mac) -> None:
    policy(private, '[actions]\nrepository = "team/workload"\nfetch = "git@github.com:team/workload.git"\n')
    (private.folder / "tools" / "ssh").write_text("#!/bin/sh\necho 'Permission denied' >&2; exit 255\n")
    step = private.step(private.setup(*FULL), "hook access")
    assert step["state"] == "missing"
    assert f'key = "{private.prefix}/hook/deploy_key" under [actions]' in step["fix"]
    assert "/settings/keys" in step["fix"]


@pytest.mark.exhaustive
def test_of_an_organisation_the_policy_names_the_repository(mac: Mac) -> None:
    policy(mac, '[actions]\nrepository = "Team/workload"\nfetch = "git@github.com:Team/workload.git"\n')
    (mac.folder / "tools" / "ssh").write_text(
        '#!/bin/sh\n[ -e "$FAKE/repository" ] || git init -q --bare "$FAKE/repository"\n'
        'exec git upload-pack "$FAKE/repository"\n'
    )
    done = mac.setup("--service", "actions", "--sudo", "--json", url="https://github.com/team")
    assert done.code == 0, done.err
    policy(mac, '[actions]\nrepository = "else/workload"\n')
    done = mac.setup("--service", "actions", "--sudo", "--json", url="https://github.com/team")
    assert mac.step(done, "hook access")["state"] == "missing"


@pytest.mark.exhaustive
def test_other_labels_than_the_registered_ones_are_said(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    assert mac.setup(*FULL, "--labels", "KAKEYA-mac,self-hosted,macOS,ARM64").code == 0
    step = mac.step(mac.setup(*FULL, "--labels", "self-hosted,fast"), "actions runner")
    assert (step["state"], "uninstall, then setup again" in step["fix"]) == ("missing", True)
    assert "self-hosted,macOS,ARM64,kakeya-mac" in step["finding"]
