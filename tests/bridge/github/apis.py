"""The API of a fake server, asked without real pauses."""

from __future__ import annotations

from datetime import UTC, datetime

from bridge.github import GitHub, Token, repository_of
from tests.servers.github import SLUG, TOKEN, GitHubServer

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def made(server: GitHubServer, slept: list[float], *, token: str | None = TOKEN, **changes) -> GitHub:
    repository = repository_of(f"https://github.com/{SLUG}", {"KAKEYA_GITHUB_API": server.api})
    assert repository is not None
    given = None if token is None else Token(token, "KAKEYA_GITHUB_TOKEN")
    options = {"sleep": slept.append, "now": lambda: NOW, **changes}
    return GitHub(repository, given, **options)
