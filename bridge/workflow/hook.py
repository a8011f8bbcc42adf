"""May this job of a self-hosted runner begin? Asked by the hook that the runner calls before the first step.

A push runs the workflow file of the pushed commit, so the file is compared, byte by byte, with those that the
machine's owner knows; then who asked, and what. Everything is read from git objects, under the limits of the
bus, and everything that cannot be found out refuses.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.bus.git import Git
from bridge.bus.mirror import Pending
from bridge.bus.requests import bound_manifest, read_request
from bridge.errors import BusError, ManifestError, RequestRefused
from bridge.protocol.refs import parse_request_ref
from bridge.protocol.sanitize import quoted
from bridge.runner.check import Checked, judge
from bridge.runner.policy.types import FILE_NAME, ActionsRule
from bridge.runner.station import survey_station
from bridge.workflow.access import using_key
from bridge.workflow.local import LEFT, TRANSPORT, Copy
from bridge.workflow.started import Started

MAX_FILE = 256 * 1024
SHIPPED = Path(__file__).with_name("mac-bridge.yaml")
_TABLE = f"[actions] in {FILE_NAME}"
_PATIENCE_S = 120.0
_PAUSE_S = 0.2


def admit(
    started: Started, *, state_dir: Path, config_dir: Path, say: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Ask every question about a job until one refuses.

    Args:
        started: The job.
        state_dir: Where this machine keeps runners' state.
        config_dir: Where the owner's files lie.
        say: Takes one line for people.

    Returns:
        What was found, one sentence each.

    Raises:
        RequestRefused: The job may not begin, with the reason.
        BridgeError: Something could not be found out; the job may not begin either.
    """
    address = f"{started.server}/{started.repository}"
    rule = survey_station(address, state_dir=state_dir, config_dir=config_dir).policy.actions
    found = [_origin(started, rule), _actor(started, rule), _ref(started)]
    address = rule.fetch or address
    folder = state_dir / "hook"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    tag = hashlib.sha256(address.encode()).hexdigest()[:12]
    with alone(folder / f"{tag}.lock"), using_key(rule):
        copy = Copy(folder / f"{tag}.git", address, say=say)
        if started.workflow_sha == started.asked.commit:
            copy.bring(started.asked)
        else:
            copy.bring_alone(started.workflow_sha, started.asked)
        found.append(_file(copy.git, started, rule))
        if started.workflow_sha != started.asked.commit:
            copy.bring(started.asked)  # nothing of it came here before
        station = survey_station(address, state_dir=state_dir, config_dir=config_dir)
        if not copy.holds(started.asked.commit):
            raise RequestRefused(f"the commit {started.asked.commit[:12]} is not to be had from the remote")
        try:
            request = read_request(copy.git, started.asked.commit)
            manifest = bound_manifest(request, started.asked.nonce)
        except (ManifestError, BusError) as error:
            raise RequestRefused(error.message, error.remedy) from None
        if manifest.transport != TRANSPORT:
            return [*found, LEFT]
        pending = Pending(started.asked.nonce, started.asked.commit, started.asked.branch)
        checked = judge(
            Checked(pending, request=request),
            station,
            now=datetime.now(UTC),
            answered=(),
            lineage=lambda _: None,  # asked when it is executed
        )
    if checked.refusal is not None:
        raise checked.refusal
    return [*found, f"the request {started.asked.nonce} for {manifest.preset} is one that this machine takes"]


def known_digests(rule: ActionsRule) -> tuple[str, ...]:
    """SHA-256 of the workflow files that may run."""
    return rule.workflow_sha256 or (hashlib.sha256(SHIPPED.read_bytes()).hexdigest(),)


def _origin(started: Started, rule: ActionsRule) -> str:
    if rule.repository is None:
        raise RequestRefused(
            "this machine's policy names no repository whose runs may begin",
            f'its owner can name it: repository = "{started.repository}" under {_TABLE}',
        )
    for what, slug in (("run", started.repository), ("workflow file", started.workflow_repository)):
        if slug.lower() != rule.repository.lower():
            raise RequestRefused(
                f"the {what} is of {quoted(slug)}, and this machine serves {rule.repository}",
                f"its owner decides that with repository under {_TABLE}",
            )
    if started.event not in rule.events:
        raise RequestRefused(
            f"runs that {quoted(started.event)} starts may not begin here", f"events, {_TABLE}"
        )
    if started.workflow not in rule.workflows:
        raise RequestRefused(
            f"the workflow {quoted(started.workflow)} may not run here; {', '.join(rule.workflows)} may",
            f"its owner decides that with workflows under {_TABLE}",
        )
    return f"{started.workflow} of {started.repository}, started by {started.event}"


def _actor(started: Started, rule: ActionsRule) -> str:
    for name in started.actors:
        if rule.actors is not None and not any(_is_meant(name, each) for each in rule.actors):
            raise RequestRefused(
                f"{quoted(name)} may not start runs on this machine",
                f"its owner decides that with actors under {_TABLE}",
            )
    return f"actor {' and '.join(started.actors)}"


def _is_meant(name: str, listed: str) -> bool:
    """Whether an account is one of the list: by its name, in which case is no matter, or by a pattern."""
    return name.lower() == listed.lower() or fnmatchcase(name.lower(), listed.lower())


def _ref(started: Started) -> str:
    """The run's own branch: the request's, where a push started it, or the default one, for a dispatch."""
    if started.event == "push":
        if parse_request_ref(started.ref) is None:
            raise RequestRefused(f"{quoted(started.ref)} is not a branch of a request")
    elif started.ref != f"refs/heads/{started.default_branch}":
        raise RequestRefused(
            f"a run that is started by hand must be one of the default branch, not of {quoted(started.ref)}",
            "start it with `kakeya_mac run`, or choose the default branch",
        )
    return f"ref {started.ref}"


def _file(git: Git, started: Started, rule: ActionsRule) -> str:
    """The workflow file's bytes, at the commit that it is taken from."""
    if git.kind_and_size(started.workflow_sha)[0] == "missing":
        raise RequestRefused(f"the commit {started.workflow_sha[:12]} is not to be had from the remote")
    data = _blob(git, started)
    digest = hashlib.sha256(data).hexdigest()
    if digest not in known_digests(rule):
        raise RequestRefused(
            f"{started.workflow} at {started.workflow_sha[:12]} is no file that this machine knows (SHA-256"
            f" {digest})",
            "use the one that came with the Mac's kakeya-mac; its owner can add the digest to workflow_sha256"
            f" under {_TABLE}",
        )
    return f"{started.workflow} at {started.workflow_sha[:12]} is known"


def _blob(git: Git, started: Started) -> bytes:
    try:
        data = git.read_blob(started.workflow_sha, started.workflow, MAX_FILE)
    except BusError as error:
        raise RequestRefused(f"the workflow file cannot be read: {error.message}", error.remedy) from None
    if data is None:
        raise RequestRefused(f"the commit {started.workflow_sha[:12]} has no {started.workflow}")
    return data


@contextmanager
def alone(
    path: Path,
    *,
    patience_s: float = _PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """One hook at a time: they share a copy of the remote.

    Args:
        path: Of the lock.
        patience_s: Seconds to wait for another one.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.

    Raises:
        RequestRefused: The other one goes on for longer.
    """
    deadline = clock() + patience_s
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock() >= deadline:
                    raise RequestRefused(
                        f"another hook on this machine has not ended for {patience_s:.0f} s",
                        f"its owner looks for it: lsof {path}",
                    ) from None
            sleep(_PAUSE_S)
        yield
