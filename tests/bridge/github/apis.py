"""The API of a fake server, retried without pauses."""

from __future__ import annotations

from typing import Any

from bridge.github.api import GitHub, Token, repository_of
from tests.servers.github import SLUG, TOKEN, GitHubServer


def api(server: GitHubServer, *, token: str | None = TOKEN, **options: Any) -> GitHub:
    repository = repository_of(f"https://github.com/{SLUG}", {"KAKEYA_GITHUB_API": server.api})
    assert repository is not None
    given = None if token is None else Token(token, "KAKEYA_GITHUB_TOKEN")
    return GitHub(repository, given, **{"backoff_s": 0.0, **options})
