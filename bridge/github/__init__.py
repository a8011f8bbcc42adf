"""GitHub's REST API: workflow runs, their jobs and artifacts, and what a token may do. The only door to HTTP.

    http.py        one request, one answer: time and size are bounded, redirects are the caller's
    repository.py  which repository an address of a remote means, and where its API is
    token.py       the token, which nothing ever prints
    types.py       what the API answers, parsed once into frozen values
    failures.py    an answer that is none, as an error that says what to do
    client.py      the calls

Everything here is optional: over GitHub Actions, too, requests and results travel by git.
"""

from bridge.github.client import GitHub
from bridge.github.repository import Repository, repository_of
from bridge.github.token import Token, find_token

__all__ = ["GitHub", "Repository", "Token", "find_token", "repository_of"]
