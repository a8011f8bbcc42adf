"""Which repository an address means, and which token is used."""

from __future__ import annotations

import pytest

from bridge.errors import ApiError
from bridge.github.api import Repository, find_token, repository_of

HELLO = Repository("octo/hello")
OURS = {"GITHUB_SERVER_URL": "https://git.corp.example", "GITHUB_API_URL": "https://git.corp.example/api/v3"}


@pytest.mark.parametrize(
    "address",
    [
        "https://github.com/octo/hello",
        "https://github.com/octo/hello.git/",
        "https://x-access-token:secret@github.com/octo/hello.git",
        "https://GitHub.com:443/octo/hello",
        "git@github.com:octo/hello.git",
        "ssh://git@github.com/octo/hello.git",
        "ssh://git@ssh.github.com:443/octo/hello.git",
    ],
)
def test_every_spelling_of_an_address_means_the_repository(address: str):
    assert repository_of(address, {}) == HELLO


@pytest.mark.parametrize(
    "address",
    [
        "/srv/git/hello.git",
        "file:///srv/git/hello.git",
        "https://gitlab.com/octo/hello",
        "https://github.com.evil.example/octo/hello",
        "https://evil.example/github.com/octo/hello",
        "git@github.com:hello.git",
        "https://github.com/octo/hello/extra",
        "https://github.com/octo/..",
        "https://github.com/oc%2fto/hello",
        "https://git.corp.example/octo/hello",
    ],
)
def test_other_addresses_mean_none(address: str):
    assert repository_of(address, {}) is None


def test_the_server_of_the_workflow_is_known():
    found = repository_of("git@git.corp.example:octo/hello.git", OURS)
    assert found == Repository("octo/hello", "https://git.corp.example/api/v3")
    plain = repository_of(
        "https://git.corp.example/octo/hello", {"GITHUB_SERVER_URL": OURS["GITHUB_SERVER_URL"]}
    )
    assert plain == found


@pytest.mark.parametrize("address", ["https://acme.ghe.com/octo/hello", "acme@acme.ghe.com:octo/hello.git"])
def test_a_tenant_of_ghe_com_has_an_api_of_its_own(address: str):
    assert repository_of(address, {}) == Repository("octo/hello", "https://api.acme.ghe.com")


@pytest.mark.parametrize(
    ("address", "is_known"),
    [
        ("http://127.0.0.1:3000/octo/hello", True),
        ("http://127.0.0.1:3001/octo/hello", False),
        ("https://127.0.0.1:3000/octo/hello", False),
        ("http://127.0.0.1/octo/hello", False),
        ("ssh://git@127.0.0.1:2222/octo/hello", True),
        ("git@127.0.0.1:octo/hello", True),
    ],
)
def test_another_port_is_another_server(address: str, is_known: bool):
    found = repository_of(address, {"GITHUB_SERVER_URL": "http://127.0.0.1:3000"})
    assert found == (Repository("octo/hello", "http://127.0.0.1:3000/api/v3") if is_known else None)


def test_a_named_api_is_that_of_the_remotes_host():
    found = repository_of(
        "git@git.corp.example:octo/hello.git", {"KAKEYA_GITHUB_API": "https://api.corp.example/"}
    )
    assert found is not None
    assert found == Repository("octo/hello", "https://api.corp.example")


def test_folder_remote_uses_the_named_repository():
    environ = {"KAKEYA_GITHUB_API": "http://127.0.0.1:8000", "KAKEYA_GITHUB_REPOSITORY": "octo/hello"}
    found = repository_of("/srv/git/hello.git", environ)
    assert found is not None
    assert (found.slug, found.api) == ("octo/hello", "http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "api",
    [
        "http://api.github.com",
        "http://127.0.0.1.example.org",
        "ftp://api.github.com",
        "https://user:secret@api.github.com",
        "https://",
        "https://[broken",
        "https://api.github.com:port",
    ],
)
def test_a_token_is_sent_only_over_tls_or_to_this_machine(api: str):
    with pytest.raises(ApiError) as caught:
        repository_of("git@github.com:octo/hello.git", {"KAKEYA_GITHUB_API": api})
    assert "secret" not in f"{caught.value.message} {caught.value.remedy}"


def test_the_nearest_token_is_used():
    environ = {"GH_TOKEN": "c", "GITHUB_TOKEN": "b", "KAKEYA_GITHUB_TOKEN": " a\n"}
    for name, value in (("KAKEYA_GITHUB_TOKEN", "a"), ("GITHUB_TOKEN", "b"), ("GH_TOKEN", "c")):
        token = find_token(environ)
        assert token is not None
        assert (token.value, token.source) == (value, name)
        del environ[name]
    assert find_token(environ) is None


@pytest.mark.parametrize("value", ["a b", "a\nb", "tökén", "a\x00b"])
def test_what_can_be_no_token_is_refused_and_not_shown(value: str):
    with pytest.raises(ApiError) as caught:
        find_token({"GH_TOKEN": value})
    assert value not in f"{caught.value.message} {caught.value.remedy}"
