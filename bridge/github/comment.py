"""The one comment that a request leaves on a pull request: written once, edited afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping

from bridge.errors import ApiError
from bridge.github.api import CommentRecord, GitHub, find_token, repository_of

MARKER = "<!-- kakeya-mac -->"
# Who may have written it: a workflow's token, or a person whose token a workflow uses. Anyone may comment.
_WRITERS = frozenset({"OWNER", "MEMBER", "COLLABORATOR"})


def put_comment(address: str, number: int, text: str, environ: Mapping[str, str] | None = None) -> str:
    """Write `text` into the comment on a pull request of the workflow's repository, else of the remote's.

    Returns the comment's page. An `ApiError`: there is no such API or token, or it may not comment.
    """
    environ = os.environ if environ is None else environ
    server, slug = environ.get("GITHUB_SERVER_URL"), environ.get("GITHUB_REPOSITORY")
    repository = repository_of(f"{server}/{slug}" if server and slug else address, environ)
    token = find_token(environ)
    if repository is None or token is None:
        missing = "its repository is on no known GitHub server" if repository is None else "there is no token"
        raise ApiError(
            f"cannot comment on the pull request {number}: {missing}",
            "set KAKEYA_GITHUB_TOKEN, and KAKEYA_GITHUB_API and KAKEYA_GITHUB_REPOSITORY for another server",
        )
    github = GitHub(repository, token)
    earlier = next(filter(_is_ours, github.comments(number)), None)
    return github.write_comment(number, f"{MARKER}\n{text}", earlier.id if earlier else None).url


def _is_ours(comment: CommentRecord) -> bool:
    is_written_for_us = comment.association in _WRITERS or (comment.author and comment.author.type == "Bot")
    return bool(is_written_for_us) and (comment.body or "").startswith(MARKER)
