"""Which server a remote is on: told by the address, else by the server itself."""

from __future__ import annotations

import pytest

from bridge.github.servers import ServerKind, identify, server_of
from tests.servers.pages import page_server

GITEA = {"/api/v1/version": {"version": "1.26.0"}}


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
    assert (found.kind, found.host) == (ServerKind.UNKNOWN, host)
    assert found.summary.startswith(
        f"{host}, neither github.com nor ghe.com: requests travel by a runner's daemon"
    )


@pytest.mark.parametrize(
    ("api", "kind"),
    [
        ("https://api.github.com", ServerKind.GITHUB),
        ("https://api.acme.ghe.com", ServerKind.GHE),
        ("https://git.example.org/api/v3", ServerKind.UNKNOWN),
        ("https://[broken", ServerKind.UNKNOWN),
    ],
)
def test_a_mirror_is_on_the_server_of_the_api(api: str, kind: ServerKind):
    environ = {"KAKEYA_GITHUB_API": api, "KAKEYA_GITHUB_REPOSITORY": "octo/hello"}
    assert server_of("/srv/hello.git", environ).kind is kind
    assert server_of("/srv/hello.git", {}).kind is ServerKind.FOLDER


def test_it_is_asked_where_its_pages_are():
    with page_server() as server:
        server.pages = {f"/git{path}": page for path, page in GITEA.items()}
        below = f"{server.url.replace('//', '//me:secret@')}/git/team/x.git"
        assert identify(below, {}, timeout_s=5).version == "1.26.0"
        assert not any("authorization" in headers for _, headers in server.asked)
        server.pages = dict(GITEA)
        ssh = "ssh://git@127.0.0.1:2222/team/x"
        by_api = identify(ssh, {"KAKEYA_GITHUB_API": f"{server.url}/api/v1"}, timeout_s=5)
        inside = identify(ssh, {"GITHUB_SERVER_URL": server.url}, timeout_s=5)
    assert by_api == inside
    assert (inside.kind, inside.host) == (ServerKind.GITEA, "127.0.0.1:2222")
    assert "Gitea 1.26.0" in inside.summary


@pytest.mark.parametrize("page", [["1"], {"version": 1}, {"version": ""}, "text", {"other": "1"}])
def test_what_is_no_version_tells_nothing(page: object):
    with page_server() as server:
        server.pages = {"/api/v1/version": page}
        assert identify(f"{server.url}/team/x", {}, timeout_s=5).kind is ServerKind.UNKNOWN


def test_a_version_cannot_drive_a_terminal():
    with page_server() as server:
        server.pages = {"/api/v1/version": {"version": "1\x1b[2J\n2" * 100}}
        found = identify(f"{server.url}/team/x", {}, timeout_s=5)
    assert "\x1b" not in found.version
    assert "\n" not in found.version
    assert len(found.version) <= 60
