"""GitHub's REST API: which repository a remote's address means, the token, and the calls the product makes.

Reads are retried on connection errors and 5xx (`urllib3.util.Retry`); a rate limit is an error that says how
long to wait. Calls that change something are sent once: after an error it is unknown whether they took
effect. The token goes to the API's own host only, and no error or representation shows it. Names, titles and
messages in answers are untrusted text.

Sources: the REST API's pages on rate limits, troubleshooting and permissions. A secondary limit is a 403 or
429, with or without ``Retry-After``. A token without a permission gets 403, or 404 where it may not know that
the thing exists. A run that cannot be re-run in its state is a 403, too: only its message tells.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import quote, urlencode, urlsplit

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
from bridge.protocol import refs
from bridge.protocol.sanitize import clean_line

if TYPE_CHECKING:
    import requests  # takes 0.2 s, so commands that need no API do not load it

HOST = "github.com"
API = "https://api.github.com"
TOKEN_VARIABLES = ("KAKEYA_GITHUB_TOKEN", "GITHUB_TOKEN", "GH_TOKEN")
MAX_ROWS = 100  # of a list: the API's longest page
# Where a token may be sent: over TLS, or to this machine.
_SAFE_API = re.compile(
    r"(https://([\w.-]+|\[[0-9a-f:]+\])|http://(localhost|127(\.\d+){3}|\[::1\]))(:\d{1,5})?(/[^?#@\s]*)?",
    re.IGNORECASE,
)
_SLUG = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,99})/(?!\.{1,2}$)([A-Za-z0-9._-]{1,100})")
# Other names of the same host; the first is for networks that block SSH.
_ALIASES = {"ssh.github.com": HOST, "www.github.com": HOST}
_RETRIES = 4
_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 10.0
_BACKOFF_S = 0.5
_MAX_REDIRECTS = 3
_HEADERS = {
    "Accept": "application/vnd.github+json",
    "X-GitHub-Api-Version": "2022-11-28",
    "User-Agent": f"kakeya-mac/{__version__}",
}
_DEFAULT_WAIT_S = 60.0  # what the documentation asks for when a limit names no time
_LIMIT_MESSAGE = re.compile(r"rate limit|abuse detection", re.IGNORECASE)
_STATE_MESSAGE = re.compile(r"already running|unable to retry|cannot be (retried|re-?run)", re.IGNORECASE)

Text = Annotated[str, Field(max_length=2000)]
Record = TypeVar("Record", bound="_Answer")


@dataclass(frozen=True)
class Repository:
    """A repository on a GitHub server; `name` has no ``.git``, the base addresses no final slash."""

    owner: str
    name: str
    api: str = API
    web: str = f"https://{HOST}"

    @property
    def slug(self) -> str:
        """``owner/name``."""
        return f"{self.owner}/{self.name}"

    @property
    def url(self) -> str:
        """Its page."""
        return f"{self.web}/{self.slug}"


@dataclass(frozen=True)
class Token:
    """A token and the variable that held it."""

    value: str = field(repr=False)
    source: str


def repository_of(address: str, environ: Mapping[str, str] | None = None) -> Repository | None:
    """The repository that a remote's address means; None: it is on no known GitHub server.

    Known are ``github.com``, the server of the workflow this runs in (``GITHUB_SERVER_URL``,
    ``GITHUB_API_URL``), and, where ``KAKEYA_GITHUB_API`` names an API, the remote's own host.

    Raises:
        ApiError: The API's address is neither HTTPS nor on this machine.
    """
    environ = os.environ if environ is None else environ
    api = environ.get("KAKEYA_GITHUB_API", "").strip()
    slug = environ.get("KAKEYA_GITHUB_REPOSITORY", "").strip()
    if api and slug:
        # The remote is a mirror of the repository, or a folder on this machine.
        return _repository(slug, api, f"https://{HOST}")
    if refs.is_local(address):
        return None
    host, _, path = refs.audience_of(address).partition("/")
    server = host.partition(":")[0]
    server = _ALIASES.get(server, server)
    if api or server == HOST:
        return _repository(path, api or API, f"https://{server}")
    ours = environ.get("GITHUB_SERVER_URL", "").rstrip("/")
    if ours and server == (urlsplit(ours).hostname or "").lower():
        return _repository(path, environ.get("GITHUB_API_URL") or f"{ours}/api/v3", ours)
    return None


def _repository(slug: str, api: str, web: str) -> Repository | None:
    if not _SAFE_API.fullmatch(api):
        raise ApiError(
            "the API address is not one that a token may be sent to",
            "set KAKEYA_GITHUB_API to an address like https://github.example.org/api/v3, without credentials",
        )
    found = _SLUG.fullmatch(slug)
    return None if found is None else Repository(found[1], found[2], api.rstrip("/"), web)


def find_token(environ: Mapping[str, str] | None = None) -> Token | None:
    """The token of the first variable that holds one.

    Raises:
        ApiError: It holds characters that no token has.
    """
    environ = os.environ if environ is None else environ
    for name in TOKEN_VARIABLES:
        value = environ.get(name, "").strip()
        if value and not re.fullmatch(r"[!-~]+", value):
            raise ApiError(
                f"the value of {name} is not a token: it has blanks or special characters",
                "set it to the token alone, without quotes or line ends",
            )
        if value:
            return Token(value, name)
    return None


def with_token(address: str, environ: Mapping[str, str]) -> str:
    """A remote's address with the workflow run's token in it, for git alone and never to be shown.

    The token is added only when the address is on the server that issued it and names no user.
    """
    token = environ.get("KAKEYA_GITHUB_TOKEN")
    server = (environ.get("GITHUB_SERVER_URL") or f"https://{HOST}").rstrip("/")
    own = re.match(r"https?://[^/@]+(?=/)", address)
    if not token or own is None or own[0].lower() != server.lower():
        return address
    return address.replace("://", f"://x-access-token:{quote(token, safe='')}@", 1)


class _Answer(BaseModel):
    """Keys that are not named are ignored, because the API grows; types are strict."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class RunRecord(_Answer):
    """A workflow run; `run_attempt` counts from 1, `head_branch` has no ``refs/heads/``."""

    id: int
    status: Text | None = None
    conclusion: Text | None = None
    html_url: Text = ""
    head_branch: Text | None = None
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
        retries: int = _RETRIES,
        timeout_s: float = _TIMEOUT_S,
        backoff_s: float = _BACKOFF_S,
    ) -> None:
        self.repository, self.token = repository, token
        self._retries, self._timeout_s, self._backoff_s = retries, timeout_s, backoff_s
        self._base = f"{repository.api}/repos/{repository.owner}/{repository.name}"

    @cached_property
    def _session(self) -> requests.Session:
        import requests
        from urllib3.util import Retry

        retry = Retry(
            total=self._retries,
            status_forcelist=(500, 502, 503, 504),
            respect_retry_after_header=False,
            allowed_methods={"GET"},
            backoff_factor=self._backoff_s,
            raise_on_status=False,
        )
        session = requests.Session()
        for scheme in ("https://", "http://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
        session.max_redirects = _MAX_REDIRECTS
        session.headers.update(_HEADERS)
        session.auth = self._authorize
        return session

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As `auth`, so that no .netrc takes the token's place. On a redirect to another host `requests` drops
        # the header, and `auth` is not called again.
        if self.token is not None:
            request.headers["Authorization"] = f"Bearer {self.token.value}"
        return request

    def runs(
        self, *, workflow: str, head_sha: str | None = None, event: str | None = None, limit: int = MAX_ROWS
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
        try:
            answer = self._session.request(
                method,
                self._base + path,
                json=body,
                timeout=(min(_CONNECT_TIMEOUT_S, self._timeout_s), self._timeout_s),
                allow_redirects=method == "GET",  # a change is not repeated elsewhere
            )
        except (OSError, ValueError) as error:  # every error of `requests` is an OSError
            # Its class alone: the library's messages repeat the address.
            message = f"{what}: the API did not answer, or not in time ({type(error).__name__})"
            fix = f"is {self.repository.api} reachable? check HTTPS_PROXY and REQUESTS_CA_BUNDLE"
            raise ApiFault(message, fix) from None
        if answer.status_code >= 300:
            raise _refusal(answer, what, self.token)
        return answer


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
    status, headers = answer.status_code, answer.headers
    source = f"the token in {token.source}" if token else "no token"

    def shown(text: str) -> str:
        return clean_line(text if token is None else text.replace(token.value, "[token]"), limit=300)

    try:
        message = _Refused.model_validate_json(answer.content).message
    except ValidationError:
        message = ""
    said = f" ({status})" + (f": {shown(message)}" if message else "")
    needed = shown(headers.get("x-accepted-github-permissions") or headers.get("x-accepted-oauth-scopes", ""))
    wait_s = _wait_s(answer, message)
    if status in (403, 429) and wait_s is not None:
        fix = "wait, or use another token" if token else f"set {TOKEN_VARIABLES[0]}: 5,000 calls an hour"
        return RateLimited(f"{what}: rate limited for {_duration(wait_s)}{said}", fix, wait_s=wait_s)
    if status == 401:
        fix = f"{source} is wrong, revoked or expired (one of a workflow run ends with its job); make another"
        fix = fix if token else f"set {TOKEN_VARIABLES[0]}"
        return TokenRejected(f"{what}: the API wants {'another' if token else 'a'} token{said}", fix)
    if status in (409, 422) or (status == 403 and _STATE_MESSAGE.search(message)):
        return ApiConflict(f"{what}: the API refused{said}", "see the run's page")
    if status == 403:
        fix = f"grant it {needed or 'actions: write and contents: write'}; in a workflow, under the job's"
        fix += " `permissions:`; for an organisation with single sign-on, authorise it there"
        return ScopeMissing(f"{what}: {source} lacks a permission{said}", fix)
    if status == 404:
        fix = f"check the name, and that {source} may see it: {needed or 'a repository may be private'}"
        return ApiNotFound(f"{what}: not found{said}", fix)
    if status < 400:
        fix = "update the remote's address if the repository was renamed"
        return ApiError(f"{what}: the API redirects to another address{said}", fix)
    pause = "" if wait_s is None else f", retry after {_duration(wait_s)}"
    return ApiFault(f"{what}: the API failed{pause}{said}", "try again later", wait_s=wait_s)


def _wait_s(answer: requests.Response, message: str) -> float | None:
    """Seconds until the API takes calls again; None: no limit was met, and it names no time."""
    status, headers = answer.status_code, answer.headers
    number = re.compile(r"[0-9]{1,12}")
    is_used_up = headers.get("x-ratelimit-remaining") == "0"
    if after := number.fullmatch(headers.get("retry-after", "")):
        return float(after[0])
    if is_used_up and (reset := number.fullmatch(headers.get("x-ratelimit-reset", ""))):
        return max(0.0, int(reset[0]) - time.time())
    is_limit = status == 429 or is_used_up or _LIMIT_MESSAGE.search(message) is not None
    return _DEFAULT_WAIT_S if is_limit and status in (403, 429) else None


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
