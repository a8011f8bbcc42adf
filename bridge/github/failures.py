"""An answer of the API that is a refusal, as the error that says what was wrong and what to do.

Sources: the REST API's pages on troubleshooting, rate limits and permissions. A secondary limit comes as 403
or 429, with or without ``Retry-After``; a token that lacks a permission gets 403, or 404 where it may not
even know that the thing exists; the permission that would do stands in ``X-Accepted-GitHub-Permissions``
(fine-grained tokens, workflow tokens) or ``X-Accepted-OAuth-Scopes`` (classic ones). A run that cannot be
started again as things stand is a 403, too, which only its words tell from a missing permission.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from bridge.errors import (
    ApiConflict,
    ApiError,
    ApiFault,
    ApiNotFound,
    RateLimited,
    ScopeMissing,
    TokenRejected,
)
from bridge.github.http import Response
from bridge.github.token import NAMES, Token
from bridge.protocol.sanitize import clean_line

_LIMITS = ("rate limit", "abuse detection")
_STATES = ("already running", "unable to retry", "cannot be retried", "cannot be rerun", "cannot be re-run")
# Where no time is given, the documentation asks for a minute.
_UNSAID_S = 60.0


def failure(response: Response, what: str, token: Token | None, now: datetime) -> ApiError:
    """The error for an answer that is not what was asked for.

    Args:
        response: With a status of 300 or more.
        what: What was asked, for people.
        token: With which; None: without one.
        now: The time (aware), for what the server says in dates.
    """
    said = _said(response, token)
    words = f": {said}" if said else ""
    response = replace(response, headers=_shown(response, token))
    status = response.status
    wait_s = wait_of(response, now)
    if status == 429 or (status == 403 and wait_s is not None):
        return _limited(what, words, token, _UNSAID_S if wait_s is None else wait_s)
    if status == 401:
        return _rejected(response, what, words, token)
    if status in (409, 422) or (status == 403 and _is_of_state(response)):
        return ApiConflict(f"{what}: the API refuses that ({status}){words}", "look at the run's page")
    if status == 403:
        return _missing(response, what, words, token)
    if status == 404:
        return ApiNotFound(
            f"{what}: the API knows nothing of it (404){words}",
            f"a private repository is hidden without a token that may read it; set {NAMES[0]}"
            if token is None
            else f"or the token in {token.source} may not see it: it needs access to this repository"
            f"{_accepted(response)}",
        )
    if 300 <= status < 400:
        return ApiError(f"{what}: the API sends us elsewhere ({status})", "was the repository renamed?")
    until = "" if wait_s is None else f" and wants to be left alone for {_duration(wait_s)}"
    return ApiFault(
        f"{what}: the API has a fault of its own ({status}){until}{words}",
        "try again later; git goes on without it",
        wait_s=wait_s,
    )


def wait_of(response: Response, now: datetime) -> float | None:
    """Seconds until the API takes calls again; None: this answer is about no limit, or says no time."""
    headers, status = response.headers, response.status
    if status not in (403, 429) and status < 500:
        return None
    if (after := _after(headers.get("retry-after", ""), now)) is not None:
        return after
    if status >= 500:
        return None
    if headers.get("x-ratelimit-remaining") == "0":
        reset = headers.get("x-ratelimit-reset", "")
        return max(0.0, int(reset) - now.timestamp()) if is_number(reset) else _UNSAID_S
    if any(words in _message(response).lower() for words in _LIMITS):
        return _UNSAID_S
    return None


def is_number(text: str) -> bool:
    """Whether a header's value is a number, of a length that a number has."""
    return text.isascii() and text.isdigit() and len(text) <= 12


def expiry_of(response: Response) -> datetime | None:
    """When the token that was used ends (aware); None: it does not say, or never."""
    text = response.headers.get("github-authentication-token-expiration", "")
    for form in ("%Y-%m-%d %H:%M:%S %Z", "%Y-%m-%d %H:%M:%S %z"):
        try:
            moment = datetime.strptime(text, form)
        except ValueError:
            continue
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return None


def _limited(what: str, words: str, token: Token | None, wait_s: float) -> RateLimited:
    remedy = (
        f"with a token (set {NAMES[0]}) there are 5,000 calls an hour instead of 60"
        if token is None
        else f"wait, or use a token of somebody else than the one in {token.source}"
    )
    return RateLimited(
        f"{what}: too many calls; the API takes more in {_duration(wait_s)}{words}", remedy, wait_s=wait_s
    )


def _rejected(response: Response, what: str, words: str, token: Token | None) -> TokenRejected:
    if token is None:
        return TokenRejected(f"{what}: the API wants a token (401){words}", f"set {NAMES[0]}")
    ended = expiry_of(response)
    when = "" if ended is None else f"; it ended on {ended:%Y-%m-%d %H:%M} UTC"
    return TokenRejected(
        f"{what}: the token in {token.source} is not accepted (401){when}{words}",
        "it is wrong, was revoked or has expired: make a new one; one of a workflow ends with its job",
    )


def _missing(response: Response, what: str, words: str, token: Token | None) -> ScopeMissing:
    if "SAML" in _message(response) or response.headers.get("x-github-sso"):
        return ScopeMissing(
            f"{what}: the organisation wants single sign-on for this token (403){words}",
            "authorise the token for the organisation, on GitHub's page of your tokens",
        )
    whose = "nobody" if token is None else f"the token in {token.source}"
    has = response.headers.get("x-oauth-scopes")
    scopes = "" if not has else f"; it has the scopes {_header(has)}"
    return ScopeMissing(
        f"{what}: {whose} may not do this (403){scopes}{words}",
        f"give it the permission{_accepted(response) or ' (actions: write, contents: write)'}; in a workflow,"
        " under `permissions:` of the job",
    )


def _is_of_state(response: Response) -> bool:
    """Whether a 403 is about how things stand, not about who asks."""
    return any(words in _message(response).lower() for words in _STATES)


def _accepted(response: Response) -> str:
    """The permission that would do, in brackets; empty: it is not said."""
    fine = response.headers.get("x-accepted-github-permissions")
    scopes = response.headers.get("x-accepted-oauth-scopes")
    said = fine or scopes
    return f" ({_header(said)})" if said else ""


def _said(response: Response, token: Token | None) -> str:
    """The server's own words, cleaned; a token that it repeats is cut out."""
    text = _message(response)
    if token is not None:
        text = text.replace(token.value, "[token]")
    return clean_line(text, limit=300)


def _message(response: Response) -> str:
    try:
        document = json.loads(response.body[:65536])
    except (ValueError, RecursionError):
        return ""
    message = document.get("message") if isinstance(document, dict) else None
    return message if isinstance(message, str) else ""


def _shown(response: Response, token: Token | None) -> dict[str, str]:
    """The headers without the token, should the server repeat it."""
    secret = None if token is None else token.value
    return {
        name: value.replace(secret, "[token]") if secret else value
        for name, value in response.headers.items()
    }


def _header(value: str) -> str:
    return clean_line(value, limit=200)


def _after(text: str, now: datetime) -> float | None:
    """Seconds of a ``Retry-After``, which is a number or a date."""
    if is_number(text):
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # of a year that no calendar has
        return None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (aware - now).total_seconds())


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
