"""What a job must not reach, by where credentials lie on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.runner.isolation.hidden import hidden, kept


def test_credentials_are_hidden_wherever_the_runners_environment_puts_them() -> None:
    ours = {
        "SSH_AUTH_SOCK": "/tmp/agent",
        "AWS_SHARED_CREDENTIALS_FILE": "/srv/aws",
        "HF_HOME": "/data/hf",
        "KUBECONFIG": "relative",
        "NETRC": "",
        "EDITOR": "/usr/bin/vi",
    }
    found = set(map(str, hidden(Path("/home/me"), ours, Path("/home/me/state"))))
    assert {"/tmp/agent", "/srv/aws", "/data/hf/token", "/data/hf/stored_tokens"} <= found
    assert {"/home/me/.git-credentials", "/home/me/state", "/etc/shadow", "/run/secrets"} <= found
    assert not {"relative", ".", "/usr/bin/vi", "/data/hf"} & found


def test_packages_that_a_pth_file_adds_stay_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tmp_path in kept((), {}, (), network=False)
