"""The calls that the product makes, each with the permission it needs.

Reading calls are tried again when the server has a fault or asks for a pause that is short. Calls that change
something are sent again only where a limit (429, or a 403 that is one) kept them out: of one that was not
answered, or with a fault (5xx), nobody knows whether it took effect. The token goes to the API's own address
and nowhere else, wherever an answer points.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit

from bridge.errors import ApiConflict, ApiError, ApiFault, ApiNotFound
from bridge.github import types
from bridge.github.failures import expiry_of, failure, is_number, wait_of
from bridge.github.http import NoAnswer, Request, Response, Transport, Web
from bridge.github.repository import Repository
from bridge.github.token import Token
from bridge.github.types import Artifact, Job, RepositoryFacts, Run, RunnerRow

TRIES = 4
TIMEOUT_S = 30.0
PATIENCE_S = 20.0
_FIRST_PAUSE_S = 0.5
_PAGE = 100
_MAX_PAGES = 50
_MAX_REDIRECTS = 3
_NEXT = re.compile(r'<([^<>]{1,4000})>;[^,]{0,200}\brel="next"')


@dataclass(frozen=True)
class TokenFacts:
    """What the API says of a token.

    Attributes:
        scopes: Of a classic token; None: it is another kind, which does not say.
        expires_at: When it ends (aware); None: never, or it does not say.
        remaining: Calls left in this hour; None: it does not say.
    """

    scopes: tuple[str, ...] | None
    expires_at: datetime | None
    remaining: int | None


class GitHub:
    """One repository's API.

    Args:
        repository: Which.
        token: With which it is asked; None: without one, which public repositories allow 60 times an hour.
        transport: Sends requests.
        patience_s: Longest pause before a call is tried again; where a longer one is due, it is an error.
        timeout_s: Seconds for one request.
        sleep: Waits that many seconds.
        now: The time (aware), for limits that are given as dates.
    """

    def __init__(
        self,
        repository: Repository,
        token: Token | None,
        *,
        transport: Transport | None = None,
        patience_s: float = PATIENCE_S,
        timeout_s: float = TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.repository = repository
        self.token = token
        self._transport: Transport = transport or Web()
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._now = now
        self._base = f"{repository.api}/repos/{repository.owner}/{repository.name}"

    def runs(
        self,
        *,
        head_sha: str | None = None,
        branch: str | None = None,
        event: str | None = None,
        status: str | None = None,
        workflow: str | None = None,
        limit: int = 100,
    ) -> Iterator[Run]:
        """Workflow runs, the newest first (actions: read).

        Args:
            head_sha: Only those of this commit.
            branch: Only those of this branch, without ``refs/heads/``.
            event: Only those that this event started.
            status: Only those of this status or conclusion.
            workflow: Only those of this workflow file, by its name.
            limit: At most so many.

        Raises:
            ApiError: See `bridge.errors`.
        """
        asked = {"head_sha": head_sha, "branch": branch, "event": event, "status": status}
        wanted = {name: value for name, value in asked.items() if value is not None}
        place = "/actions/runs" if workflow is None else f"/actions/workflows/{_part(workflow)}/runs"
        query = urlencode({**wanted, "per_page": min(limit, _PAGE)})
        yield from self._listed(Run, f"{place}?{query}", "workflow_runs", "the workflow runs", limit)

    def run(self, run_id: int) -> Run:
        """One run, as it is now (actions: read)."""
        what = f"the run {run_id}"
        return types.read(Run, self._get(f"/actions/runs/{run_id}", what), what)

    def jobs(self, run_id: int) -> list[Job]:
        """The jobs of a run's newest attempt, with their steps (actions: read)."""
        path = f"/actions/runs/{run_id}/jobs?filter=latest&per_page={_PAGE}"
        return list(self._listed(Job, path, "jobs", f"the jobs of the run {run_id}", 500))

    def artifacts(self, run_id: int) -> list[Artifact]:
        """What a run uploaded (actions: read)."""
        path = f"/actions/runs/{run_id}/artifacts?per_page={_PAGE}"
        return list(self._listed(Artifact, path, "artifacts", f"the artifacts of the run {run_id}", 500))

    def job_log(self, job_id: int) -> bytes:
        """A job's log; the API has it when the job has ended (actions: read)."""
        what = f"the log of the job {job_id}"
        return self._bytes(f"/actions/jobs/{job_id}/logs", what)

    def rerun(self, run_id: int) -> None:
        """Start a run again, as its next attempt (actions: write)."""
        self._change("POST", f"/actions/runs/{run_id}/rerun", f"starting the run {run_id} again")

    def cancel(self, run_id: int, *, force: bool = False) -> None:
        """Ask a run to stop; `force` does not wait for its ``always()`` steps (actions: write)."""
        verb = "force-cancel" if force else "cancel"
        self._change("POST", f"/actions/runs/{run_id}/{verb}", f"stopping the run {run_id}")

    def dispatch(self, workflow: str, ref: str, inputs: Mapping[str, str]) -> int | None:
        """Start a workflow by hand (actions: write).

        Args:
            workflow: Its file's name, e.g. ``mac-bridge.yaml``.
            ref: Branch whose file is run.
            inputs: Its inputs.

        Returns:
            The run's id; None: this server does not say, or what it said broke off.

        Raises:
            ApiFault: Nobody knows whether it took effect.
            ApiError: It did not.
        """
        path, what = f"/actions/workflows/{_part(workflow)}/dispatches", f"starting the workflow {workflow}"
        asked: dict[str, object] = {"ref": ref, "inputs": dict(inputs)}
        try:
            answer = self._change("POST", path, what, {**asked, "return_run_details": True})
        except ApiConflict as error:
            if "return_run_details" not in error.message:
                raise
            answer = self._change("POST", path, what, asked)  # an older server, which has begun nothing
        try:
            return types.read(types.Dispatched, self._json(answer, what), what).workflow_run_id
        except ApiError:  # it took effect all the same
            return None

    def facts(self) -> RepositoryFacts:
        """What the repository is (metadata: read)."""
        what = f"the repository {self.repository.slug}"
        return types.read(RepositoryFacts, self._get("", what), what)

    def runners(self) -> list[RunnerRow]:
        """The repository's own self-hosted runners (administration: read)."""
        path = f"/actions/runners?per_page={_PAGE}"
        return list(self._listed(RunnerRow, path, "runners", "the self-hosted runners", 1000))

    def registration_token(self) -> str:
        """A token to register a runner with, good for an hour (administration: write)."""
        return self._issued("registration-token", "a token to register a runner with")

    def remove_token(self) -> str:
        """A token to remove a runner with, good for an hour (administration: write)."""
        return self._issued("remove-token", "a token to remove a runner with")

    def file(self, path: str, ref: str) -> bytes | None:
        """A file of the repository of at most 1 MB; None: there is none (contents: read).

        Args:
            path: From the root.
            ref: Branch, tag or commit.
        """
        what = f"the file {path} of {ref}"
        try:
            document = self._get(f"/contents/{quote(path)}?{urlencode({'ref': ref})}", what)
        except ApiNotFound:
            return None
        if isinstance(document, list):  # a folder
            return None
        found = types.read(types.Content, document, what)
        if found.type != "file" or found.encoding != "base64":
            return None
        try:
            return base64.b64decode(found.content, validate=False)
        except binascii.Error:
            raise ApiError(f"the API's answer to {what} is not base64") from None

    def token_facts(self) -> TokenFacts:
        """What the token may do and for how long, as far as the API says so. Costs no call of the limit."""
        response = self._send("GET", f"{self.repository.api}/rate_limit", "what the token may do")
        left = response.headers.get("x-ratelimit-remaining", "")
        scopes = response.headers.get("x-oauth-scopes")
        return TokenFacts(
            scopes=None if scopes is None else tuple(s.strip() for s in scopes.split(",") if s.strip()),
            expires_at=expiry_of(response),
            remaining=int(left) if is_number(left) else None,
        )

    def _issued(self, kind: str, what: str) -> str:
        answer = self._change("POST", f"/actions/runners/{kind}", what)
        return types.read(types.Issued, self._json(answer, what), what).token

    def _listed(
        self, kind: type[types.Row], path: str, key: str, what: str, limit: int
    ) -> Iterator[types.Row]:
        """The rows of every page, up to `limit`."""
        url: str | None = self._base + path
        given = 0
        for _ in range(_MAX_PAGES):
            if url is None or given >= limit:
                return
            response = self._send("GET", url, what)
            for row in types.rows(kind, self._json(response, what), key, what):
                if given >= limit:
                    return
                yield row
                given += 1
            url = self._next(response, what)

    def _next(self, response: Response, what: str) -> str | None:
        """The next page's address, which must be of this API: the token goes there."""
        found = _NEXT.search(response.headers.get("link", ""))
        if found is None:
            return None
        if not self._is_ours(found[1]):
            raise ApiError(f"{what}: the API's next page lies on another server, which is not asked")
        return found[1]

    def _get(self, path: str, what: str) -> Any:
        return self._json(self._send("GET", self._base + path, what), what)

    def _bytes(self, path: str, what: str) -> bytes:
        return self._send("GET", self._base + path, what).body

    def _change(self, method: str, path: str, what: str, body: object = None) -> Response:
        return self._send(method, self._base + path, what, {} if body is None else body)

    def _send(self, method: str, url: str, what: str, body: object = None) -> Response:
        """One call to its end: with its redirects, and tried again where that is right."""
        data = None if body is None else json.dumps(body).encode()
        reads, pause = method == "GET", _FIRST_PAUSE_S
        for attempt in range(TRIES):
            last = attempt == TRIES - 1
            try:
                response = self._followed(method, url, what, data)
            except NoAnswer as error:
                if not reads and error.status is not None and error.status < 300:
                    return Response(error.status, {}, b"")  # it took effect, whatever broke off
                if last or not reads or pause > self._patience_s:
                    raise ApiFault(
                        f"{what}: the API did not answer: {error}", f"is {self.repository.api} reachable?"
                    ) from None
            else:
                if response.status < 300:
                    return response
                asked = wait_of(response, self._now())
                again = reads if response.status >= 500 else asked is not None
                pause = max(pause, asked or 0.0)
                if last or not again or pause > self._patience_s:
                    raise failure(response, what, self.token, self._now())
            self._sleep(pause)
            pause *= 2
        raise AssertionError("unreachable: the last try returns or raises")

    def _followed(self, method: str, url: str, what: str, data: bytes | None) -> Response:
        """One request and its redirects; the token goes along to this API only.

        Raises:
            NoAnswer: None came.
            ApiError: It leads somewhere that is not asked.
        """
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._transport.send(self._request(method, url, data), self._timeout_s)
            if response.status not in (301, 302, 307, 308) or "location" not in response.headers:
                return response
            try:
                target = urljoin(url, response.headers["location"])
                same_scheme = urlsplit(target).scheme == urlsplit(url).scheme
            except ValueError:
                raise ApiError(f"{what}: the API leads to an address that is none") from None
            # Of a call that changes something only this API itself may say where it belongs.
            if not self._is_ours(target) and not (method == "GET" and same_scheme):
                raise ApiError(f"{what}: the API leads to another server, which is not asked")
            url = target
        raise ApiError(f"{what}: the API leads from place to place")

    def _request(self, method: str, url: str, data: bytes | None) -> Request:
        headers = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if not self._is_ours(url):
            return Request(method, url)
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token.value}"
        return Request(method, url, headers, data)

    def _is_ours(self, url: str) -> bool:
        """Whether an address is of this API: same scheme, host and port."""
        try:
            mine, other = urlsplit(self.repository.api), urlsplit(url)
            same = (mine.scheme, mine.hostname, mine.port) == (other.scheme, other.hostname, other.port)
        except ValueError:
            return False
        return same and other.username is None and other.password is None

    def _json(self, response: Response, what: str) -> Any:
        try:
            return json.loads(response.body)
        except (ValueError, RecursionError):
            raise ApiError(
                f"the API's answer to {what} is no JSON, or it broke off after {len(response.body)} bytes",
                "try again; is the address that of a GitHub API, and no proxy in between?",
            ) from None


def _part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")
