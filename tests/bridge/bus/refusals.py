"""Commits that are no requests, and the refusals that a runner publishes of them."""

from __future__ import annotations

from bridge.bus.publish import ResultFiles, publish
from bridge.bus.results import ExpectedRequest
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH
from tests.fixtures.bus import BusFixture

BAD_MANIFESTS: dict[str, dict[str, bytes | None]] = {
    "no JSON": {REQUEST_PATH: b"{"},
    "more bytes than are read": {REQUEST_PATH: b" " * (MAX_BYTES + 1)},
    "of another request": {},
    "another file changed": {REQUEST_PATH: b"{", "README.md": b"changed"},
    "no manifest at all": {"README.md": b"changed"},
}


def refusal(bus: BusFixture, nonce: str, files: dict[str, bytes | None], **changes: object) -> str:
    """Push a commit that is no request as one, and refuse it as a runner does; returns the commit."""
    workload = bus.repo.head()
    if not files:
        files = {REQUEST_PATH: bus.manifest().to_bytes()}
    commit = bus.commit(workload, files)
    inbox = refs.INBOX + nonce
    bus.point(refs.request_ref("probe", nonce, None), commit)
    bus.point(inbox, commit)
    assert not bus.cache.bring({inbox: commit}, [inbox])
    verdict = {"status": "refused", "reason": "bad_manifest", "message": "not one"}
    named: dict[str, object] = {"workload_sha": None, "preset": None, "verdict": verdict, **changes}
    answer = ResultFiles(
        nonce=nonce,
        request_commit=commit,
        result_ref=None,
        result=bus.result(ExpectedRequest(nonce, commit, None), {}, **named),
        signature=None,
        files={},
    )
    publish(bus.cache, bus.remote, answer, claim=None)
    return commit
