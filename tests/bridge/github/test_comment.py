"""The one comment on a pull request, over the API of a server on this machine."""

from __future__ import annotations

import pytest

from bridge.errors import ApiError, ScopeMissing
from bridge.github.comment import MARKER, put_comment
from tests.servers.github import SLUG, GitHubServer

ADDRESS = f"https://github.com/{SLUG}"


def test_the_comment_is_written_once_and_edited_afterwards(server: GitHubServer) -> None:
    stranger = {"user": {"type": "User"}, "author_association": "NONE", "body": f"{MARKER}\nmine"}
    server.comments = [stranger | {"id": number} for number in range(1, 121)]
    page = put_comment(ADDRESS, 7, "first", server.environ)
    assert page == put_comment(ADDRESS, 7, "second", server.environ)
    assert page.endswith("/pull/7#issuecomment-121")
    assert [each["body"] for each in server.comments[119:]] == [stranger["body"], f"{MARKER}\nsecond"]


def test_a_token_that_may_not_comment_names_the_permission(server: GitHubServer) -> None:
    server.writes_actions = False
    with pytest.raises(ScopeMissing) as caught:
        put_comment(ADDRESS, 7, "text", server.environ)
    assert "pull-requests: write" in (caught.value.remedy or "")
    assert "fork" in (caught.value.remedy or "")


def test_a_remote_without_an_api_takes_no_comment() -> None:
    with pytest.raises(ApiError, match="no known GitHub server"):
        put_comment("/srv/git/bus.git", 7, "text", {"GITHUB_TOKEN": "x"})
