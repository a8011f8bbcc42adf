"""GitHub's REST API: the calls the product makes, typed results, and refusals as errors with a remedy.

Reads are retried on connection errors and 5xx (`urllib3.util.Retry`); a rate limit is an error that says how
long to wait. Calls that change something are sent once: after an error it is unknown whether they took
effect. The token goes to the API's own host only. Names, titles and messages in answers are untrusted text.

Sources: the REST API's pages on rate limits, troubleshooting and permissions. A secondary limit is a 403 or
429, with or without ``Retry-After``. A token without a permission gets 403, or 404 where it may not know that
the thing exists. A run that cannot be re-run in its state is a 403, too: only its message tells.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge import __version__
from bridge.errors import (
    ApiConflict,
    ApiError,
    ApiFault,
    ApiNotFound,
    RateLimited,
    ScopeMissing,
    TokenRejected,
)
from bridge.github.repository import TOKEN_VARIABLES, Repository, Token
from bridge.protocol.sanitize import clean_line

if TYPE_CHECKING:
    import requests  # takes 0.2 s, so commands that need no API do not load it

RETRIES = 4
TIMEOUT_S = 30.0
MAX_ROWS = 100  # of a list: the API's longest page
_CONNECT_TIMEOUT_S = 10.0
_BACKOFF_S = 0.5
_RETRY_STATUS = (500, 502, 503, 504)
_MAX_REDIRECTS = 3
_HEADERS = {
    "Accept": "application/vnd.github+json",
    "X-GitHub-Api-Version": "2022-11-28",
    "User-Agent": f"kakeya-mac/{__version__}",
}
_DEFAULT_WAIT_S = 60.0  # what the documentation asks for when a limit names no time
_LIMIT_MESSAGES = ("rate limit", "abuse detection")
_STATE_MESSAGES = (
    "already running",
    "unable to retry",
    "cannot be retried",
    "cannot be rerun",
    "cannot be re-run",
)

Text = Annotated[str, Field(max_length=2000)]
Record = TypeVar("Record", bound="_Answer")


class _Answer(BaseModel):
    """Keys that are not named are ignored, because the API grows; types are strict."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class RunRecord(_Answer):
    """A workflow run; `run_attempt` counts from 1, `head_branch` has no ``refs/heads/``."""

    id: int
    status: Text | None = None
    conclusion: Text | None = None
    html_url: Text = ""
    head_sha: Text = ""
    head_branch: Text | None = None
    event: Text = ""
    run_attempt: int = 1
    display_title: Text = ""


class StepRecord(_Answer):
    """A step of a job."""

    name: Text
    status: Text | None = None


class JobRecord(_Answer):
    """A job of a run; before a runner has it, `runner_name` and `steps` are empty."""

    id: int
    name: Text
    status: Text | None = None
    steps: list[StepRecord] = []
    runner_name: Text | None = None
    labels: list[Text] = []

    @property
    def step(self) -> StepRecord | None:
        """The step in progress; None: none."""
        return next((step for step in self.steps if step.status == "in_progress"), None)


class _Permissions(_Answer):
    push: bool = False


class RepositoryFacts(_Answer):
    """A repository; `permissions` is None where the API does not tell those of the token's user."""

    private: bool
    visibility: Text = ""
    default_branch: Text
    permissions: _Permissions | None = None


class _Dispatched(_Answer):
    workflow_run_id: int


class _Refused(_Answer):
    message: str = ""


class _RunList(_Answer):
    workflow_runs: list[RunRecord]


class _JobList(_Answer):
    jobs: list[JobRecord]


class GitHub:
    """One repository's API. Every call raises an `ApiError` when the API does not answer or refuses.

    Without a token public repositories allow 60 calls an hour. `timeout_s` is the server's longest silence,
    `backoff_s` the base of the exponential pause between retries.
    """

    def __init__(
        self,
        repository: Repository,
        token: Token | None,
        *,
        retries: int = RETRIES,
        timeout_s: float = TIMEOUT_S,
        backoff_s: float = _BACKOFF_S,
    ) -> None:
        self.repository, self.token = repository, token
        self._retries, self._timeout_s, self._backoff_s = retries, timeout_s, backoff_s
        self._base = f"{repository.api}/repos/{repository.owner}/{repository.name}"
        self._session: requests.Session | None = None

    def runs(
        self,
        *,
        workflow: str,
        head_sha: str | None = None,
        event: str | None = None,
        limit: int = MAX_ROWS,
    ) -> list[RunRecord]:
        """The newest runs of a workflow's file, of one commit or event if given (actions: read)."""
        filters = {"head_sha": head_sha, "event": event, "per_page": limit}
        query = urlencode({name: value for name, value in filters.items() if value is not None})
        path = f"/actions/workflows/{quote(workflow, safe='')}/runs?{query}"
        return self._read(_RunList, path, "the workflow runs").workflow_runs

    def run(self, run_id: int) -> RunRecord:
        """A run (actions: read)."""
        return self._read(RunRecord, f"/actions/runs/{run_id}", f"the run {run_id}")

    def jobs(self, run_id: int) -> list[JobRecord]:
        """The jobs of a run's newest attempt, with their steps (actions: read)."""
        path = f"/actions/runs/{run_id}/jobs?filter=latest&per_page={MAX_ROWS}"
        return self._read(_JobList, path, f"the jobs of the run {run_id}").jobs

    def job_log(self, job_id: int) -> bytes:
        """A job's log, which exists once the job has ended (actions: read)."""
        return self._send("GET", f"/actions/jobs/{job_id}/logs", f"the log of the job {job_id}").content

    def rerun(self, run_id: int) -> None:
        """Re-run a run, as its next attempt (actions: write)."""
        self._send("POST", f"/actions/runs/{run_id}/rerun", f"re-running the run {run_id}")

    def cancel(self, run_id: int) -> None:
        """Cancel a run (actions: write)."""
        self._send("POST", f"/actions/runs/{run_id}/cancel", f"cancelling the run {run_id}")

    def dispatch(self, workflow: str, ref: str, inputs: Mapping[str, str]) -> int | None:
        """Start a workflow's file as the branch `ref` has it (actions: write).

        Returns:
            The run's id; None: the server does not tell it.

        Raises:
            ApiFault: The server did not answer; a run may have started.
            ApiError: No run was started.
        """
        path = f"/actions/workflows/{quote(workflow, safe='')}/dispatches"
        what = f"starting the workflow {workflow}"
        body: dict[str, object] = {"ref": ref, "inputs": dict(inputs)}
        try:
            answer = self._send("POST", path, what, {**body, "return_run_details": True})
        except ApiConflict as error:
            if "return_run_details" not in error.message:
                raise
            answer = self._send("POST", path, what, body)  # an older server, which refused
        try:
            return _parse(_Dispatched, answer, what).workflow_run_id
        except ApiError:  # the run started, whatever the body is
            return None

    def facts(self) -> RepositoryFacts:
        """The repository's visibility and default branch (metadata: read)."""
        return self._read(RepositoryFacts, "", f"the repository {self.repository.slug}")

    def _read(self, kind: type[Record], path: str, what: str) -> Record:
        return _parse(kind, self._send("GET", path, what), what)

    def _send(
        self, method: str, path: str, what: str, body: Mapping[str, object] | None = None
    ) -> requests.Response:
        """Send one call; a status of 300 or more is raised as the error it means."""
        import requests

        if self._session is None:
            self._session = _open_session(self.token, self._retries, self._backoff_s)
        try:
            answer = self._session.request(
                method,
                self._base + path,
                json=body,
                timeout=(min(_CONNECT_TIMEOUT_S, self._timeout_s), self._timeout_s),
                allow_redirects=method == "GET",  # a change is not repeated elsewhere
            )
        except requests.exceptions.TooManyRedirects:
            raise ApiError(f"{what}: too many redirects") from None
        except (OSError, ValueError) as error:  # every error of `requests` is an OSError
            raise ApiFault(
                f"{what}: the API did not answer: {_reason(error)}", f"is {self.repository.api} reachable?"
            ) from None
        if answer.status_code >= 300:
            raise _refusal(answer, what, self.token)
        return answer


def _open_session(token: Token | None, retries: int, backoff_s: float) -> requests.Session:
    import requests
    from urllib3.util import Retry

    retry = Retry(
        total=retries,
        status_forcelist=_RETRY_STATUS,
        respect_retry_after_header=False,
        allowed_methods={"GET"},
        backoff_factor=backoff_s,
        raise_on_status=False,
    )
    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    session.max_redirects = _MAX_REDIRECTS
    session.headers.update(_HEADERS)

    def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As `auth`, so that no .netrc takes the token's place. On a redirect to another host `requests` drops
        # the header, and `auth` is not called again.
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token.value}"
        return request

    session.auth = authorize
    return session


def _parse(kind: type[Record], answer: requests.Response, what: str) -> Record:
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        message = f"the API's answer to {what} is not as documented: {where}: {first['msg']}"
        raise ApiError(message, "is the address that of a GitHub API, with no proxy in between?") from None


def _refusal(answer: requests.Response, what: str, token: Token | None) -> ApiError:
    """The error that an answer with a status of 300 or more means."""
    status, headers, source = (
        answer.status_code,
        answer.headers,
        f"the token in {token.source}" if token else "no token",
    )

    def shown(text: str) -> str:
        return clean_line(text if token is None else text.replace(token.value, "[token]"), limit=300)

    try:
        message = _Refused.model_validate_json(answer.content).message
    except ValidationError:
        message = ""
    said = f": {shown(message)}" if message else ""
    wait_s = _wait_s(answer, message.lower())
    if status == 429 or (status == 403 and wait_s is not None):
        wait_s = _DEFAULT_WAIT_S if wait_s is None else wait_s
        fix = "wait, or use another token" if token else f"set {TOKEN_VARIABLES[0]}: 5,000 calls an hour"
        return RateLimited(f"{what}: rate limited for {_duration(wait_s)}{said}", fix, wait_s=wait_s)
    if status == 401 and token is None:
        return TokenRejected(f"{what}: the API wants a token (401){said}", f"set {TOKEN_VARIABLES[0]}")
    if status == 401:
        fix = "it is wrong, revoked or expired: make a new one; one of a workflow run ends with its job"
        return TokenRejected(f"{what}: {source} is not accepted (401){said}", fix)
    if status in (409, 422) or (status == 403 and any(words in message.lower() for words in _STATE_MESSAGES)):
        return ApiConflict(f"{what}: the API refused ({status}){said}", "see the run's page")
    needed = shown(headers.get("x-accepted-github-permissions") or headers.get("x-accepted-oauth-scopes", ""))
    if status == 403:
        scopes = shown(headers.get("x-oauth-scopes", ""))
        has = f"; it has the scopes {scopes}" if scopes else ""
        fix = f"grant it {needed or 'actions: write and contents: write'}; in a workflow, under the job's"
        fix += " `permissions:`; for an organisation with single sign-on, authorise it there"
        return ScopeMissing(f"{what}: {source} lacks a permission (403){has}{said}", fix)
    if status == 404:
        fix = f"check the name, and that {source} may see it: {needed or 'a repository may be private'}"
        return ApiNotFound(f"{what}: not found (404){said}", fix)
    if status < 400:
        fix = "update the remote's address if the repository was renamed"
        return ApiError(f"{what}: the API redirects to another address ({status})", fix)
    pause = "" if wait_s is None else f", retry after {_duration(wait_s)}"
    return ApiFault(f"{what}: the API failed ({status}{pause}){said}", "try again later", wait_s=wait_s)


def _wait_s(answer: requests.Response, message: str) -> float | None:
    """Seconds until the API takes calls again; None: the answer is about no limit, or names no time."""
    headers, status = answer.headers, answer.status_code
    if status not in (403, 429) and status < 500:
        return None
    if _is_number(after := headers.get("retry-after", "")):
        return float(after)
    if status >= 500:
        return None
    if headers.get("x-ratelimit-remaining") == "0":
        reset = headers.get("x-ratelimit-reset", "")
        return max(0.0, int(reset) - time.time()) if _is_number(reset) else _DEFAULT_WAIT_S
    return _DEFAULT_WAIT_S if any(words in message for words in _LIMIT_MESSAGES) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _reason(error: Exception) -> str:
    """Why no answer came, without the library's own message, which repeats the address."""
    import requests

    kinds: tuple[tuple[type[Exception], str], ...] = (
        (requests.exceptions.SSLError, "its certificate is not trusted (set REQUESTS_CA_BUNDLE)"),
        (requests.exceptions.ProxyError, "the proxy refused"),
        (requests.exceptions.ChunkedEncodingError, "the answer was truncated"),
        (requests.exceptions.Timeout, "no answer in time"),
        (requests.exceptions.ConnectionError, "no connection, or no answer in time"),
        (ValueError, "the address is invalid"),
    )
    return next((text for kind, text in kinds if isinstance(error, kind)), type(error).__name__)
