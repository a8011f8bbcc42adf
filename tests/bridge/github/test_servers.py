"""Which server a remote is on, as its address tells."""

from __future__ import annotations

import pytest

from bridge.github.servers import server_of


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("https://github.com/octo/hello", "github.com"),
        ("ssh://git@ssh.github.com:443/octo/hello.git", "github.com"),
        ("https://me:secret@Acme.ghe.com/octo/hello", "acme.ghe.com"),
        ("acme@acme.ghe.com:octo/hello.git", "acme.ghe.com"),
    ],
)
def test_artifacts_work_on_github_com_and_ghe_com(address: str, host: str):
    found = server_of(address, {})
    assert (found.has_artifacts, found.host) == (True, host)
    assert "or by the workflow" in found.summary


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://me:secret@127.0.0.1:3333/team/x", "127.0.0.1:3333"),
        ("https://git.example.org/team/x", "git.example.org"),
        ("ssh://git@git.example.org:2222/team/x", "git.example.org:2222"),
        ("git@git.example.org:team/x.git", "git.example.org"),
        ("http://[::1]:3000/team/x", "[::1]:3000"),
        ("https://github.com.example.org/octo/hello", "github.com.example.org"),
        ("https://ghe.com.example.org/octo/hello", "ghe.com.example.org"),
    ],
)
def test_other_hosts_are_shown_with_their_port(address: str, host: str):
    found = server_of(address, {})
    assert (found.has_artifacts, found.host) == (False, host)
    assert found.summary.startswith(
        f"{host}, neither github.com nor ghe.com: requests travel by a runner's daemon"
    )


@pytest.mark.parametrize(
    ("api", "host"),
    [
        ("https://api.github.com", "github.com"),
        ("https://api.acme.ghe.com", "acme.ghe.com"),
        ("https://git.example.org/api/v3", "git.example.org"),
        ("https://[broken", "[broken"),
    ],
)
def test_a_mirror_is_on_the_server_of_the_api(api: str, host: str):
    environ = {"KAKEYA_GITHUB_API": api, "KAKEYA_GITHUB_REPOSITORY": "octo/hello"}
    assert server_of("/srv/hello.git", environ).host == host
    assert server_of("/srv/hello.git", {}).summary.startswith("a folder: ")
