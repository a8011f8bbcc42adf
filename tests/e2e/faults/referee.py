"""Afterwards: does every accepted request have exactly one result, its own, and is nothing else left?

Everything is read from the remote's objects, the runners' folders and what the witness heard from the jobs.
Each result is judged as a client that trusts the runners' keys judges it.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bridge.bus.requests import bound_manifest, read_request, state_of
from bridge.bus.results import NO_RUNNER_ID, Believed, ExpectedRequest, believe, fetch
from bridge.errors import BridgeError
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from bridge.runner.daemon import MAX_ATTEMPTS
from bridge.signing import trust
from bridge.signing.trust import TrustLevel
from tests.e2e.faults import jobs, procs
from tests.e2e.faults.machines import Machine
from tests.e2e.faults.plan import RequestKind
from tests.e2e.faults.requesters import CLIENT_PRESET, Requester, Visitor
from tests.fixtures.repo import RepoFixture

_RESULT = re.compile(r"kakeya-mac result: \S+ (\S+) \[skip ci\]")
_KEY = re.compile(r"kakeya_mac runners trust (\S+) --key '([^']+)'")
_LEFT_OVER = (refs.INBOX, refs.CLAIMS, refs.CANCELS, refs.BRANCH_CLAIMS, refs.BRANCH_CANCELS)
_DONE = (Status.PASSED, Reason.OK)
# How a request may end although no one asked so: its runners died too often, or were told to stop at once.
_FATES = {(Status.LOST, Reason.ATTEMPTS), (Status.CANCELLED, Reason.SHUTDOWN)}
_ENDINGS = {
    RequestKind.INSTANT: {_DONE},
    RequestKind.WORK: {_DONE},
    RequestKind.FAIL: {(Status.FAILED, Reason.EXIT_CODE)},
    RequestKind.REFUSED: {(Status.REFUSED, Reason.BAD_PARAMETER)},
    RequestKind.CANCEL: {(Status.CANCELLED, Reason.REQUESTED), _DONE},
    RequestKind.CROWDED: {(Status.FAILED, Reason.RESOURCE_LIMIT)},
}
_VISITORS_ENDINGS = {(Status.REJECTED, Reason.EVIDENCE)}


@dataclass
class Report:
    """What the referee saw.

    Attributes:
        problems: One sentence for each thing that does not hold.
        verdicts: Results by status and reason.
        attempts: Results by the attempt they are of.
        runs: Requests by how often their job started.
        arrived: Requests of client processes that were killed and nevertheless arrived, whole.
        results: Results that were believed, by nonce.
    """

    problems: list[str] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)
    arrived: int = 0
    results: dict[str, Believed] = field(default_factory=dict)


def judge(
    repo: RepoFixture,
    machines: list[Machine],
    requester: Requester,
    visitors: list[Visitor],
    *,
    finished: bool,
) -> Report:
    """Look at everything a run left; where it did not finish, what is still open is no fault of its own."""
    report = Report()
    remote = repo.remote
    found = GitRepo(remote).list_refs(str(remote))
    still_open = set() if finished else {refs.nonce_of(ref, refs.INBOX) for ref in found}
    if finished:
        report.problems += [f"left on the remote: {ref}" for ref in found if ref.startswith(_LEFT_OVER)]
        # A killed git leaves the lock of one ref, and no result waits for it; these would block every push.
        report.problems += [f"a lock was left in the remote: {path}" for path in remote.glob("*.lock")]
    report.problems += _broken_objects(repo)
    nonces = _nonces(found)
    strangers = {nonce: _requested_by(repo, found, nonce) for nonce in nonces - requester.accepted.keys()}
    report.problems += _submissions(requester, nonces, strangers)
    report.problems += _visits(report, visitors, strangers, finished=finished)
    copies = _result_commits(repo)
    for nonce in sorted((nonces | copies.keys()) - still_open):
        if len(copies.get(nonce, [])) != 1:
            places = ", ".join(commit[:12] for commit in copies.get(nonce, [])) or "nowhere"
            report.problems.append(f"{nonce}: {len(copies.get(nonce, []))} result commits ({places})")
    trusted = _pin(repo, machines)
    with ThreadPoolExecutor(2) as pool:
        for nonce, believed, problems in pool.map(
            lambda nonce: _believed(repo, found, nonce, requester, trusted), sorted(nonces - still_open)
        ):
            report.problems += problems
            if believed is not None:
                report.results[nonce] = believed
    ledger = jobs.read_ledger(repo)
    report.problems += [f"a line in the jobs' ledger that no job writes: {line!r}" for line in ledger.torn]
    report.problems += [
        f"{nonce}: a job ran, and there is no such request" for nonce in ledger.started.keys() - nonces
    ]
    for nonce, believed in report.results.items():
        result, started = believed.result, ledger.started[nonce]
        ended = ledger.ended[nonce]
        report.verdicts[f"{result.verdict.status}/{result.verdict.reason}"] += 1
        report.attempts[result.attempt] += 1
        report.runs[started] += result.preset != CLIENT_PRESET
        report.problems += [f"{nonce}: {text}" for text in _history(requester, believed, started, ended)]
    for machine in machines if finished else ():
        report.problems += list(_left_by(machine))
    return report


def _history(requester: Requester, believed: Believed, started: int, ended: int) -> Iterator[str]:
    """What does not fit between a result, what was asked, and how often the job says it ran."""
    result = believed.result
    verdict = (result.verdict.status, result.verdict.reason)
    accepted = requester.accepted.get(result.nonce)
    wanted = _ENDINGS[accepted.ask.kind] if accepted else _VISITORS_ENDINGS
    if verdict not in wanted | _FATES:
        names = ", ".join("/".join(pair) for pair in wanted)
        yield f"{'/'.join(verdict)} ({result.verdict.message}), expected {names}"
    withdrawn = _is_withdrawn(believed)
    # The client that withdraws a request knows no attempt.
    if started > result.attempt and not withdrawn:
        yield f"its job started {started} times, the result says attempt {result.attempt}"
    if verdict[0] is Status.LOST and result.attempt != MAX_ATTEMPTS + 1:
        yield f"lost at attempt {result.attempt}, not after {MAX_ATTEMPTS}"
    if verdict[0] is Status.REFUSED and started:
        yield f"refused, and its job started {started} times"
    if accepted is None:
        return
    if verdict in {_DONE, (Status.FAILED, Reason.EXIT_CODE)}:
        log = believed.files.get("log.txt", b"").decode("utf-8", "replace")
        if log.split() != [result.nonce, accepted.ask.word]:
            yield f"the log is not its own, {accepted.ask.word}: {log[:200]!r}"
        if not ended:
            yield "no run of its job came to its end"
    if result.params.get("word") != accepted.ask.word:
        yield f"the result is of the parameters {dict(result.params)}, not of {accepted.ask.word}"


def _believed(
    repo: RepoFixture, found: Mapping[str, str], nonce: str, requester: Requester, trusted: Path
) -> tuple[str, Believed | None, list[str]]:
    accepted = requester.accepted.get(nonce)
    asked = None
    if accepted is not None:
        submitted = accepted.submitted
        asked = ExpectedRequest(nonce, submitted.commit, accepted.workload_sha, None)
    git = GitRepo(repo.remote)
    try:
        fetched = fetch(git, str(repo.remote), state_of(found, nonce), expected=asked)
        if fetched is None:
            return nonce, None, [f"{nonce}: there is no result"]
        believed = believe(fetched, trusted=trusted, expected=asked)
    except BridgeError as error:
        return nonce, None, [f"{nonce}: the result is not believed: {error.message}"]
    finally:
        git.close()
    if _is_withdrawn(believed) and (accepted is None or accepted.ask.kind is RequestKind.CANCEL):
        return nonce, believed, []
    if believed.signature is not TrustLevel.TRUSTED:
        return nonce, believed, [f"{nonce}: {believed.sentence}"]
    if believed.signer != believed.result.runner.name:
        return nonce, believed, [f"{nonce}: of {believed.result.runner.name}, signed by {believed.signer}"]
    return nonce, believed, []


def _is_withdrawn(believed: Believed) -> bool:
    """Whether its client ended the request because no runner had it; such a result has no signature."""
    result = believed.result
    wanted = (Status.CANCELLED, Reason.REQUESTED)
    return result.runner.id == NO_RUNNER_ID and (result.verdict.status, result.verdict.reason) == wanted


def _nonces(found: Mapping[str, str]) -> set[str]:
    """Every request that left any trace among the remote's refs."""
    named = {parsed.nonce for ref in found if (parsed := refs.parse_request_ref(ref))}
    for prefix in (refs.INBOX, refs.RESULTS, refs.BRANCH_RESULTS, refs.CLAIMS, refs.BRANCH_CLAIMS):
        named |= {nonce for ref in found if (nonce := refs.nonce_of(ref, prefix))}
    return named


def _requested_by(repo: RepoFixture, found: Mapping[str, str], nonce: str) -> str:
    """Who asked, as the manifest on the branch says; `unreadable` where it is not a whole request."""
    state = state_of(found, nonce)
    if state.branch is None:
        return "unreadable: it has no branch"
    with contextlib.closing(GitRepo(repo.remote)) as git:
        parents = git.commit(state.branch.commit).parents
        for commit in (*parents[:1], state.branch.commit):
            try:
                return bound_manifest(read_request(git, commit), nonce).requested_by or "no one"
            except BridgeError as error:
                problem = error.message
    return f"unreadable: {problem}"


def _submissions(requester: Requester, nonces: set[str], strangers: Mapping[str, str]) -> list[str]:
    lost = [
        f"{nonce}: was accepted and is nowhere on the remote" for nonce in requester.accepted.keys() - nonces
    ]
    odd = [f"{nonce}: {who}" for nonce, who in strangers.items() if who.startswith("unreadable")]
    failed = [f"a submission failed: {error}" for error in requester.errors]
    return [*lost, *odd, *failed]


def _visits(
    report: Report, visitors: list[Visitor], strangers: Mapping[str, str], *, finished: bool
) -> list[str]:
    """Each client process left nothing, or one whole request, the one it named."""
    problems = []
    for visitor in visitors:
        name = visitor.client.name
        left = [nonce for nonce, who in strangers.items() if who == name]
        if len(left) > 1:
            problems.append(f"{name} left {len(left)} requests")
        if visitor.reported is not None and left != [visitor.reported]:
            problems.append(f"{name} said it submitted {visitor.reported}, the remote has {left}")
        if finished and not visitor.killed and visitor.reported is None:
            problems.append(f"{name} was not killed and failed: {visitor.text().strip()[-300:]}")
        report.arrived += visitor.killed and bool(left)
    known = {visitor.client.name for visitor in visitors} | {"course"}
    problems += [f"{nonce}: asked by {who}, an unknown requester" for nonce, who in strangers.items()
                 if who not in known and not who.startswith("unreadable")]  # fmt: skip
    return problems


def _result_commits(repo: RepoFixture) -> dict[str, list[str]]:
    """Every result commit in anything the remote's refs reach, by nonce."""
    copies: dict[str, list[str]] = {}
    for line in repo.git("log", "--all", "--format=%H %s", cwd=repo.remote).splitlines():
        commit, _, subject = line.partition(" ")
        if match := _RESULT.fullmatch(subject):
            copies.setdefault(match[1], []).append(commit)
    return copies


def _broken_objects(repo: RepoFixture) -> list[str]:
    done = GitRepo(repo.remote).attempt("fsck", "--no-dangling", "--no-progress", timeout_s=300.0)
    return [f"git fsck of the remote: {line}" for line in done.stderr.decode().splitlines()]


def _pin(repo: RepoFixture, machines: list[Machine]) -> Path:
    """An allowed-signers file with the key of every runner that ever was, as each said when it started."""
    trusted = repo.root / "trusted"
    trusted.unlink(missing_ok=True)
    for machine in machines:
        for name, key in dict.fromkeys(_KEY.findall(machine.text())):
            trust.pin(trusted, name, key)
    return trusted


def _left_by(machine: Machine) -> Iterator[str]:
    """Kept results, job folders and held locks in a runner's folders."""
    for state in machine.states:
        for lock in (state / "machine.lock", *state.glob("runner/*/lock")):
            if lock.exists() and not _is_free(lock):
                yield f"{lock} is still held"
        for kept in procs.unpublished(state):
            yield f"a result was kept and not published: {kept}"
        for left in state.glob("runner/*/jobs/*"):
            yield f"a job's folder was left: {left}"


def _is_free(lock: Path) -> bool:
    with lock.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
