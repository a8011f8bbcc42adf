"""GitHub's REST API: which repository a remote's address means, the token, and the calls the product makes.

Reads are retried on connection errors and 5xx, changes are sent once: after an error it is unknown whether
they took effect. The token goes to the API's own host only, and no error or representation shows it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, ValidationError

from bridge import __version__, errors
from bridge.bus.requests import WORKFLOW_NAME
from bridge.errors import ApiConflict, ApiError, ApiFault
from bridge.github import servers
from bridge.protocol import refs
from bridge.protocol.sanitize import clean_line

if TYPE_CHECKING:
    import requests  # takes 0.2 s, so commands that need no API do not load it

API = "https://api.github.com"
TOKEN_VARIABLES = ("KAKEYA_GITHUB_TOKEN", "GITHUB_TOKEN", "GH_TOKEN")
MAC_JOB = "run"  # its name in mac-bridge.yaml
MAX_ROWS = 100  # of a list: the API's longest page
MAX_PAGES = 30  # of comments
# Where a token may be sent: over TLS, or to this machine.
_SAFE_API = re.compile(
    r"(https://([\w.-]+|\[[0-9a-f:]+\])|http://(localhost|127(\.\d+){3}|\[::1\]))(:\d{1,5})?(/[^?#@\s]*)?",
    re.IGNORECASE,
)
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}")
_HEADERS = {
    "Accept": "application/vnd.github+json",
    "X-GitHub-Api-Version": "2022-11-28",
    "User-Agent": f"kakeya-mac/{__version__}",
}
_WORKFLOW = f"/actions/workflows/{WORKFLOW_NAME}"
# A secondary limit may be a 403 whose message alone tells.
_LIMIT_MESSAGE = re.compile(r"rate limit|abuse detection", re.IGNORECASE)
# Statuses that mean the same for every call, and what helps.
_REFUSALS: dict[int, tuple[type[ApiError], str]] = {
    401: (
        errors.TokenRejected,
        f"{{source}} is wrong, revoked or expired: set {TOKEN_VARIABLES[0]} to another",
    ),
    403: (errors.ScopeMissing, "{source} needs {needed}; in a workflow, under the job's `permissions:`"),
    404: (errors.ApiNotFound, "check the name, and that {source} may see it: {needed}"),
    409: (ApiConflict, "see the run's page"),
    410: (
        ApiError,
        "logs and artifacts are kept for a while only; kakeya_mac result shows what stays",
    ),
    422: (ApiConflict, "see the run's page"),
}

Text = Annotated[str, AfterValidator(clean_line)]  # others may have written it
# RFC 3339, as the server writes it. Gitea writes the beginning of its calendar for "not yet".
Moment = Annotated[Text, AfterValidator(lambda text: text if text >= "2000" else None)]
Query = Mapping[str, str | int | None] | None
Record = TypeVar("Record", bound=BaseModel)


@dataclass(frozen=True)
class Repository:
    """A repository on a GitHub server."""

    slug: str  # ``owner/name``, without ``.git``
    api: str = API  # without a final slash


@dataclass(frozen=True)
class Token:
    """A token and the variable that held it."""

    value: str = field(repr=False)
    source: str


def repository_of(address: str, environ: Mapping[str, str] | None = None) -> Repository | None:
    """The repository that a remote's address means; None: it is on no known GitHub server.

    Known are ``github.com``, ``ghe.com``, the server of the workflow this runs in (``GITHUB_SERVER_URL``,
    ``GITHUB_API_URL``), and, where ``KAKEYA_GITHUB_API`` names an API, the remote's own host.
    """
    environ = os.environ if environ is None else environ
    api = environ.get("KAKEYA_GITHUB_API", "").strip()
    ours = environ.get("GITHUB_SERVER_URL", "").rstrip("/")
    slug = environ.get("KAKEYA_GITHUB_REPOSITORY", "").strip()
    if not (api and slug):  # else the remote is a mirror of that repository, or a folder on this machine
        if refs.is_local(address):
            return None
        slug = refs.audience_of(address).partition("/")[2]
        api = api or servers.public_api(address) or ""
        if not api and ours and servers.is_on(address, ours):
            api = environ.get("GITHUB_API_URL") or f"{ours}/api/v3"
        if not api:
            return None
    if not _SAFE_API.fullmatch(api):
        raise ApiError(
            "the API address is not one that a token may be sent to",
            "set KAKEYA_GITHUB_API to an address like https://github.example.org/api/v3, without credentials",
        )
    return Repository(slug, api.rstrip("/")) if _SLUG.fullmatch(slug) else None


def find_token(environ: Mapping[str, str] | None = None) -> Token | None:
    """The token of the first variable that holds one."""
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
    server = (environ.get("GITHUB_SERVER_URL") or f"https://{servers.HOST}").rstrip("/")
    own = re.match(r"https?://[^/@]+(?=/)", address)
    if not token or own is None or own[0].lower() != server.lower():
        return address
    return address.replace("://", f"://x-access-token:{quote(token, safe='')}@", 1)


class _Answer(BaseModel):
    """Keys that are not named are ignored, because the API grows; types are strict."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Step(_Answer):
    name: Text
    status: Text | None = None


class JobRecord(_Answer):
    """A job of a run; before a runner has it, `runner_name` and `steps` are empty."""

    id: int
    name: Text
    status: Text | None = None
    conclusion: Text | None = None
    created_at: Moment | None = None
    started_at: Moment | None = None
    completed_at: Moment | None = None
    steps: tuple[_Step, ...] = ()
    runner_name: Text | None = None
    labels: tuple[Text, ...] | None = None

    @property
    def step(self) -> str | None:
        """The step in progress; None: none, or not known: Gitea gives every step the status of its job."""
        live = [step.name for step in self.steps if step.status == "in_progress"]
        return live[0] if len(live) == 1 else None


class RunView(_Answer):
    """A workflow run at one moment; None: there is none, or it is not known."""

    id: int
    url: Text = Field("", alias="html_url")
    # ``queued``, ``pending``, ``waiting``, ``requested``, ``in_progress`` or ``completed``
    state: Text | None = Field(None, alias="status")
    conclusion: Text | None = None
    attempt: int = Field(1, alias="run_attempt")
    branch: Text | None = Field(None, alias="head_branch")  # without ``refs/heads/``
    title: Text = Field("", alias="display_title")
    path: Text | None = None  # of its workflow's file, perhaps with ``@`` and the ref
    created_at: Moment | None = None
    jobs: tuple[JobRecord, ...] | None = None  # of its newest attempt; None: not asked for

    @property
    def mac_job(self) -> JobRecord | None:
        """The Mac's job."""
        return next((job for job in self.jobs or () if job.name.rpartition(" / ")[2] == MAC_JOB), None)

    @property
    def machine(self) -> str | None:
        """The runner of the Mac's job."""
        return (self.mac_job.runner_name or None) if self.mac_job else None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state == "completed"

    @property
    def sentence(self) -> str:
        """Where the run is, on one line, with its page."""
        now = self.as_json()
        if self.is_over:
            said = f"ended: {self.conclusion or 'unknown'}"
        else:
            where = f"on {self.machine}" if self.machine else None
            parts = (now["state"].replace("_", " "), where, now["job"], now["step"])
            said = ", ".join(filter(None, parts))
        again = f", attempt {self.attempt}" if self.attempt > 1 else ""  # Gitea lists 0
        return f"run {said}{again}: {self.url}"

    def as_json(self) -> dict[str, Any]:
        """The keys that commands print with ``--json``."""
        live = next((job for job in self.jobs or () if job.status == "in_progress"), None)
        return {
            "id": self.id,
            "url": self.url,
            "state": self.state or "unknown",
            "conclusion": self.conclusion,
            "attempt": self.attempt,
            "machine": self.machine,
            "job": None if live is None else live.name,  # the job in progress
            "step": None if live is None else live.step,  # and its step
        }


class RepositoryFacts(_Answer):
    """A repository; `permissions` is None where the API does not tell those of the token's user."""

    private: bool
    default_branch: Text
    permissions: dict[str, bool] | None = None


class _Dispatched(_Answer):
    workflow_run_id: int


class _Author(_Answer):
    type: Text = ""  # ``User`` or ``Bot``


class CommentRecord(_Answer):
    """A comment on a pull request. Its text is as it was written."""

    id: int
    url: Text = Field("", alias="html_url")
    body: str | None = None
    author: _Author | None = Field(None, alias="user")
    association: Text = Field("", alias="author_association")


class _CommentList(RootModel[tuple[CommentRecord, ...]]):
    pass


class _Refused(_Answer):
    message: str = ""


class _RunList(_Answer):
    workflow_runs: tuple[RunView, ...]
    total_count: int | None = None


@dataclass(frozen=True)
class RunList:
    """Runs of our workflow, the newest first."""

    rows: tuple[RunView, ...]
    # Every run that was created after this moment is listed
    since: datetime


class _JobList(_Answer):
    jobs: tuple[JobRecord, ...]


@dataclass
class GitHub:
    """One repository's API. Every call raises an `ApiError` when the API does not answer or refuses.

    `timeout_s` is the longest silence of the server, `backoff_s` the base of the pauses between retries.
    """

    repository: Repository
    token: Token | None
    _: KW_ONLY
    retries: int = 4
    timeout_s: float = 30.0
    backoff_s: float = 0.5

    def runs(self, *, head_sha: str | None = None, limit: int = MAX_ROWS) -> RunList:
        """The newest runs of our workflow, of one commit if given (actions: read)."""
        query, what = {"head_sha": head_sha}, f"the workflow runs of {self.repository.slug}"
        try:
            listed = self._read(_RunList, f"{_WORKFLOW}/runs", what, {**query, "per_page": limit})
        except errors.ApiNotFound as missing:
            # Gitea lists only the runs of all workflows, and calls the size of a page `limit`.
            try:
                page = {"per_page": MAX_ROWS, "limit": MAX_ROWS}
                listed = self._read(_RunList, "/actions/runs", what, {**query, **page})
            except errors.ApiNotFound:
                raise missing from None
        rows = [run for run in listed.workflow_runs if _is_ours(run)]
        return RunList(tuple(rows[:limit]), _listed_since(listed))

    def run(self, run_id: int) -> RunView:
        """A run (actions: read)."""
        return self._read(RunView, f"/actions/runs/{run_id}", f"the run {run_id}")

    def jobs(self, run_id: int) -> tuple[JobRecord, ...]:
        """The jobs of a run's newest attempt, with their steps (actions: read)."""
        path = f"/actions/runs/{run_id}/jobs"
        return self._read(_JobList, path, f"the jobs of the run {run_id}", {"per_page": MAX_ROWS}).jobs

    def job_log(self, job_id: int) -> bytes:
        """A job's log, which exists once the job has ended (actions: read)."""
        try:
            return self._call("GET", f"/actions/jobs/{job_id}/logs", f"the log of the job {job_id}").content
        except errors.ApiNotFound as error:
            error.remedy = "the job has not begun, or its log was deleted"
            raise

    def cancel(self, run_id: int) -> None:
        """Cancel a run (actions: write)."""
        try:
            self._call("POST", f"/actions/runs/{run_id}/cancel", f"cancelling the run {run_id}")
        except errors.ApiNotFound as error:
            error.remedy = "it is gone, or this server's API cancels no runs (Gitea): cancel it on its page"
            raise

    def dispatch(self, ref: str, branch: str, commit: str) -> int | None:
        """Start our workflow's file as the branch `ref` has it, for one request (actions: write).

        Returns the run's id where the server tells it. After an `ApiFault` a run may have started.
        """
        path, what = f"{_WORKFLOW}/dispatches", f"starting the workflow {WORKFLOW_NAME}"
        inputs = {"branch": branch.removeprefix("refs/heads/"), "commit": commit}
        body = {"ref": ref, "inputs": inputs}
        try:
            answer = self._call("POST", path, what, body={**body, "return_run_details": True})
        except ApiConflict as error:
            if "return_run_details" not in error.message:
                raise
            answer = self._call("POST", path, what, body=body)  # an older server, which refused
        try:
            return _parse(_Dispatched, answer, what).workflow_run_id
        except ApiError:  # the run started, whatever the body is
            return None

    def comments(self, number: int) -> Iterator[CommentRecord]:
        """The comments on a pull request, the oldest first (pull-requests: read)."""
        what = f"the comments on the pull request {number}"
        for page in range(1, MAX_PAGES + 1):
            query: Query = {"per_page": MAX_ROWS, "page": page}
            answer = self._call("GET", f"/issues/{number}/comments", what, query=query)
            rows = _parse(_CommentList, answer, what).root
            yield from rows
            if len(rows) < MAX_ROWS:
                return

    def write_comment(self, number: int, body: str, comment: int | None) -> CommentRecord:
        """Edit a comment on a pull request, or add one for None (pull-requests: write)."""
        method, path = "POST", f"/issues/{number}/comments"
        if comment is not None:
            method, path = "PATCH", f"/issues/comments/{comment}"
        what = f"writing the comment on the pull request {number}"
        try:
            return _parse(CommentRecord, self._call(method, path, what, body={"body": body}), what)
        except errors.ScopeMissing as error:
            error.remedy = (
                "the token needs pull-requests: write; that of a pull request from a fork never has it"
            )
            raise

    def facts(self) -> RepositoryFacts:
        """Whether the repository is private, and its default branch (metadata: read)."""
        return self._read(RepositoryFacts, "", f"the repository {self.repository.slug}")

    @cached_property
    def _session(self) -> requests.Session:
        import requests
        from urllib3.util import Retry

        retry = Retry(
            total=self.retries,
            status_forcelist=(500, 502, 503, 504),
            respect_retry_after_header=False,
            allowed_methods={"GET"},
            backoff_factor=self.backoff_s,
            raise_on_status=False,
        )
        session = requests.Session()
        for scheme in ("https://", "http://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
        session.headers.update(_HEADERS)
        session.auth = self._authorize
        return session

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As `auth`, so that no .netrc takes the token's place. On a redirect to another host `requests` drops
        # the header, and `auth` is not called again.
        if self.token is not None:
            request.headers["Authorization"] = f"Bearer {self.token.value}"
        return request

    def _read(self, kind: type[Record], path: str, what: str, query: Query = None) -> Record:
        return _parse(kind, self._call("GET", path, what, query=query), what)

    def _call(
        self, method: str, path: str, what: str, *, query: Query = None, body: Mapping[str, Any] | None = None
    ) -> requests.Response:
        """Send one call; a status of 300 or more is raised as the error it means."""
        try:
            answer = self._session.request(
                method,
                f"{self.repository.api}/repos/{self.repository.slug}{path}",
                params=query,
                json=body,
                timeout=self.timeout_s,
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


def _is_ours(run: RunView) -> bool:
    return run.path is None or run.path.partition("@")[0].rpartition("/")[2] == WORKFLOW_NAME


def _listed_since(listed: _RunList) -> datetime:
    """The moment since which a list is complete: that of its last row, unless there are no others."""
    rows, total = listed.workflow_runs, listed.total_count
    if total is not None and len(rows) >= total:
        return datetime.min.replace(tzinfo=UTC)
    try:
        return datetime.fromisoformat((rows[-1].created_at if rows else None) or "").astimezone(UTC)
    except ValueError:  # Gitea does not say when a run was created
        return datetime.max.replace(tzinfo=UTC)


def _refusal(answer: requests.Response, what: str, token: Token | None) -> ApiError:
    status, headers = answer.status_code, answer.headers
    try:
        message = _Refused.model_validate_json(answer.content).message
    except ValidationError:
        message = ""
    needed = headers.get("x-accepted-github-permissions") or headers.get("x-accepted-oauth-scopes") or ""
    if token is not None:  # a server may repeat it
        message, needed = (text.replace(token.value, "[token]") for text in (message, needed))
    wait_s = _wait_s(answer, message)
    kind, fix = _REFUSALS.get(status, (ApiFault, "a fault of the server: try again later"))
    if status < 400:
        kind, fix = ApiError, "the API redirects to another address: was the repository renamed?"
    elif status in (403, 429) and wait_s is not None:
        kind, fix = errors.RateLimited, "rate limited: wait, or use another token"
    elif status < 500 and status not in _REFUSALS:
        kind, fix = ApiError, "the server does not take this call: is the address that of its API?"
    pause = "" if wait_s is None else f", retry after {wait_s:.0f} s"
    pause += " (expired)" if status == 410 else ""
    source = f"the token in {token.source}" if token else "no token"
    fix = fix.format(source=source, needed=clean_line(needed) or "actions: write, contents: write")
    said = f": {clean_line(message)}" if message else ""
    return kind(f"{what}: the API answered {status}{pause}{said}", fix, wait_s=wait_s)


def _wait_s(answer: requests.Response, message: str) -> float | None:
    """Seconds until the API takes calls again; None: no limit was met, and it names no time."""
    headers = answer.headers
    after, reset = headers.get("retry-after", ""), headers.get("x-ratelimit-reset", "")
    is_used_up = headers.get("x-ratelimit-remaining") == "0"
    if after.isdecimal():
        return float(after)
    if is_used_up and reset.isdecimal():
        return max(0.0, float(reset) - time.time())
    is_limit = answer.status_code == 429 or is_used_up or _LIMIT_MESSAGE.search(message) is not None
    # The documentation asks for a minute when a limit names no time.
    return 60.0 if is_limit and answer.status_code in (403, 429) else None
