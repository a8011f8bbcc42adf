"""The requests that wait on the remote: found, read once, and put in the order in which they are tried.

One look is one listing of the bridge's refs and at most one fetch of what is new, by exact names; its cost
follows what is pending, not what ever was. Requests of clients whose server takes only branches are found by
a listing of the branches' names now and then. Reading a request and verifying its signature happens once, a
bounded number of each in one look, because anyone with push rights can push thousands of them.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime

from bridge.bus.claims import read_status
from bridge.bus.requests import bound_manifest, has_result, read_request
from bridge.bus.state import RefValue
from bridge.errors import BrokenObject, BusError, MachineError, ManifestError, describe
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW
from bridge.protocol.result import Reason
from bridge.runner.admission import find_signer
from bridge.runner.config import RunnerConfig
from bridge.runner.fairness import Requester, TurnMemory, WaitingRequest, order
from bridge.runner.request import Refused, Request
from bridge.runner.store import Store
from bridge.signing.keyfiles import stamps

log = logging.getLogger(__name__)

SCAN_INTERVAL_S = 60.0
# A claim is read when it was seen for so long: no lease is as short.
CLAIM_READ_S = 2.0
MAX_READ = 500
MAX_VERIFIED = 50
# Branches never seen before that one scan reads; the newest first, the others later.
MAX_SCANNED = 64
# A pause between two scans is so many times as long as a scan, if that is longer than the interval.
_SCAN_SHARE = 300
# How much wider the choice among requests is after a lost claim (twice), and after one that was won.
_MAX_SPREAD, _NARROWER = 8.0, 0.9
_CLAIMS = (refs.BRANCH_CLAIMS, refs.CLAIMS)
CANCELS = (refs.BRANCH_CANCELS, refs.CANCELS)
_RESULTS = (refs.BRANCH_RESULTS, refs.RESULTS)
_LISTED = ("refs/mac-bridge/", "refs/heads/mac-bridge-")


@dataclass
class Queue:
    """What waits on one remote; its branches are listed every `scan_interval_s`, with 0 at every look."""

    config: RunnerConfig
    cache: GitCache
    store: Store
    _: KW_ONLY
    now: Callable[[], datetime]
    clock: Callable[[], float] = time.monotonic
    scan_interval_s: float = SCAN_INTERVAL_S
    claimed: int = field(default=0, init=False)
    found: Mapping[str, str] = field(default_factory=dict, init=False)
    _scan_at: float | None = field(default=None, init=False)
    _requests: dict[str, Request] = field(default_factory=dict, init=False)
    # Request branches and the tip at which each was found to be an open request, or not to be one.
    _open: dict[str, str] = field(default_factory=dict, init=False)
    _closed: dict[str, str] = field(default_factory=dict, init=False)
    _has_looked: bool = field(default=False, init=False)
    _lists: object = field(default=None, init=False)
    _memory: TurnMemory = field(default_factory=TurnMemory, init=False)
    _spread: float = field(default=1.0, init=False)

    def __len__(self) -> int:
        return len(self._requests)

    def scan_soon(self) -> None:
        """Let the next look list the branches, whenever the last one did."""
        self._scan_at = None

    def poll(self) -> list[Request]:
        """Look at the remote once; the requests that may be tried now, in the order to try them.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        self._look()
        self.claimed = sum(request.claim is not None for request in self._requests.values())
        waiting = [
            WaitingRequest(
                request.nonce,
                self._requester(request),
                known=request.is_read,
                claimed=request.claim is not None,
            )
            for request in self._requests.values()
            if request.manifest is None or request.manifest.transport == "embedded"
        ]
        policy = self.config.policy
        turns = order(
            waiting,
            self._memory,
            max_queued=policy.max_queued,
            max_running=policy.max_running_per_requester,
        )
        moment = self.now().timestamp()
        due = []
        for turn in turns:
            request = self._requests[turn.nonce]
            request.over_quota = turn.over_quota
            record = self.store.get(turn.nonce)
            cancelled = request.cancel is not None and not record.failures
            if request.is_read and (cancelled or record.is_due(moment)):
                due.append(request)
        self._shuffle(due)
        return due

    def read_claim(self, request: Request) -> None:
        """Read what the claim on a request says now."""
        claim = request.claim
        if claim is not None and not self.cache.bring({claim.ref: claim.commit}, [claim.ref], depth=1):
            request.status = read_status(self.cache, claim.commit)

    def note_claim(self, *, won: bool) -> None:
        """A claim was pushed: the more of them other runners win, the wider the choice; see `_shuffle`."""
        self._spread = max(1.0, self._spread * _NARROWER) if won else min(self._spread * 2, _MAX_SPREAD)

    def _shuffle(self, due: list[Request]) -> None:
        """Choose by chance among the first requests while other runners work.

        Runners that all begin with the same request lose most of their pushes to each other.
        """
        if self.claimed or self._spread > 1.0:
            unclaimed = [index for index, request in enumerate(due) if request.claim is None]
            chosen = unclaimed[: int(2 * (self.claimed + 1) * self._spread)]
            picked = [due[index] for index in chosen]
            random.shuffle(picked)
            for index, request in zip(chosen, picked, strict=True):
                due[index] = request

    def _requester(self, request: Request) -> Requester:
        """Whose it is. An expired one counts as unsigned: anyone can push an old signed request again."""
        expired = request.manifest is None or self.now() >= request.manifest.expires_at
        return None if expired else request.requester

    def note_turn(self, request: Request) -> None:
        """Something was done for a request: its requester comes last in the next round."""
        self._memory.note(self._requester(request), refused=request.over_quota is not None)

    # One look ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        scans = self._scan_at is None or self.clock() >= self._scan_at
        began = self.clock()
        found = self.cache.list_remote(*_LISTED, *((refs.BRANCHES, refs.AGENT_BRANCHES) if scans else ()))
        pending: dict[str, tuple[str, str | None]] = {}
        for ref, commit in found.items():
            if nonce := refs.nonce_of(ref, refs.INBOX):
                pending[nonce] = (commit, None)
        if scans:
            self._scan(found, pending.keys())
            took = self.clock() - began
            # Where there are very many branches a listing takes long: it stays a small share of the time.
            pause = max(self.scan_interval_s, _SCAN_SHARE * took) if self.scan_interval_s else 0.0
            self._scan_at = self.clock() + pause
        for ref, commit in self._open.items():
            if (named := refs.parse_request_ref(ref)) is not None:
                pending.setdefault(named.nonce, (commit, ref))
        for nonce in held_by_nonce(found, _RESULTS):
            pending.pop(nonce, None)
        self.found = found
        self._take_over(pending, held_by_nonce(found, _CLAIMS), held_by_nonce(found, CANCELS))
        self._read_new()
        self._read_claims()

    def _take_over(
        self,
        pending: Mapping[str, tuple[str, str | None]],
        claims: Mapping[str, RefValue],
        cancels: Mapping[str, RefValue],
    ) -> None:
        lists = stamps(self.config.allowed_signers, self.config.revoked_keys)
        known = self._requests if lists == self._lists else {}  # whose key is whose may have changed
        self._lists = lists
        self._requests = {}
        for nonce in sorted(pending):
            commit, ref = pending[nonce]
            request = known.get(nonce)
            if request is None or (request.commit, request.ref) != (commit, ref):
                request = Request(nonce, commit, ref)
            request.claim, request.cancel = claims.get(nonce), cancels.get(nonce)
            self._requests[nonce] = request

    def _read_new(self) -> None:
        """Fetch and read what is new, in the order of the nonces, so much in one look."""
        moment = self.now().timestamp()
        new = [request for request in self._requests.values() if not request.is_read]
        chosen = [request for request in new if self.store.get(request.nonce).is_due(moment)][:MAX_READ]
        names = {request.ref or refs.inbox_ref(request.nonce): request for request in chosen}
        failures = self.cache.bring({name: request.commit for name, request in names.items()}, list(names))
        verified = 0
        for name, request in names.items():
            if (failure := failures.get(name)) is not None:
                pause = self.store.back_off(request.nonce, failure.message)
                log.warning(
                    "%s: cannot be fetched, retrying in %g s: %s", request.nonce, pause, failure.message
                )
            elif verified < MAX_VERIFIED:
                self._read(request)
                verified += request.data is not None and request.data.signature is not None

    def _read(self, request: Request) -> None:
        """Read a request whose commit is here, and find out who signed it."""
        try:
            request.data = read_request(self.cache, request.commit)
            request.manifest = bound_manifest(request.data, request.nonce)
        except ManifestError as error:
            reason = Reason.BAD_COMMIT if request.data is None else Reason.BAD_MANIFEST
            request.refusal = Refused(reason, error.message, error.remedy)
        except BrokenObject as error:
            request.refusal = Refused(Reason.BAD_COMMIT, error.message, error.remedy)
        except (BusError, MachineError) as error:  # the copy here may be at fault; if not, others go on
            self.store.back_off(request.nonce, error.message)
            raise
        except Exception as error:  # whatever one request provokes, the others must be read
            request.refusal = Refused(Reason.BAD_COMMIT, describe(error))
        find_signer(request, self.config, self.now())
        request.is_read = True

    def look_up(self, nonce: str, cancel: RefValue) -> Request | None:
        """One request that waits unclaimed, by a look of its own; safe to call next to another thread's work.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        names = (refs.inbox_ref(nonce), *refs.claim_places(nonce), refs.result_ref(nonce))
        found = self.cache.list_remote(*names)
        commit = found.get(refs.inbox_ref(nonce))
        if commit is None or len(found) > 1 or self.cache.bring(found, list(found)):
            return None
        request = Request(nonce, commit, None, cancel=cancel)
        self._read(request)
        return request

    def _read_claims(self) -> None:
        """Read each claim once: its lease, its attempt, its runner. Those of short jobs are gone before.

        What the first look of this process finds is read at once: it may be ours, from before a crash.
        """
        now = self.clock()
        first, self._has_looked = now if self._has_looked else now - CLAIM_READ_S, True
        due = []
        for request in self._requests.values():
            if (claim := request.claim) is None:
                request.claimed_since = request.status = request.counted = None
                request.claim_read = False
                continue
            request.claimed_since = request.claimed_since or first
            if not request.claim_read and now - request.claimed_since >= CLAIM_READ_S:
                due.append((request, claim))
        new = {claim.ref: claim.commit for _, claim in due}
        failures = self.cache.bring(new, list(new), depth=1)
        for request, claim in due:
            if claim.ref not in failures:
                request.status = read_status(self.cache, claim.commit)
                request.claim_read = True

    def _scan(self, found: Mapping[str, str], inbox: Container[str]) -> None:
        """Find requests that are on their branches alone."""
        oldest = refs.nonce_time(self.now() - MAX_LIFETIME - MAX_NONCE_SKEW)
        names = {ref: named.nonce for ref in found if (named := refs.parse_request_ref(ref)) is not None}
        candidates = {ref: nonce for ref, nonce in names.items() if nonce > oldest and nonce not in inbox}
        self._open = {
            ref: tip for ref, tip in self._open.items() if found.get(ref) == tip and ref in candidates
        }
        self._closed = {ref: tip for ref, tip in self._closed.items() if found.get(ref) == tip}
        moment = self.now().timestamp()
        unknown = sorted(
            (nonce, ref)
            for ref, nonce in candidates.items()
            if ref not in self._open and ref not in self._closed and self.store.get(nonce).is_due(moment)
        )
        chosen = [ref for _, ref in unknown[-MAX_SCANNED:]]
        failures = self.cache.bring(found, chosen)
        for ref in chosen:
            if ref in failures:
                self.store.back_off(names[ref], failures[ref].message)
            else:
                is_open = self._is_open(names[ref], found[ref])
                (self._open if is_open else self._closed)[ref] = found[ref]

    def _is_open(self, nonce: str, tip: str) -> bool:
        """Whether a branch ends in an open request, and not in a result or a commit of the user's."""
        try:
            bound_manifest(read_request(self.cache, tip), nonce)
            return not has_result(self.cache, tip, nonce)
        except (ManifestError, BrokenObject):
            return False
        except BusError as error:  # the copy here may be at fault; if not, others go on
            self.store.back_off(nonce, error.message)
            raise
        except Exception as error:  # whatever one branch provokes, the others must be seen
            log.warning("%s: its branch cannot be read: %s", nonce, describe(error))
            return False


def held_by_nonce(found: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, RefValue]:
    """What refs below these prefixes hold, by nonce; the last prefix wins."""
    return {
        nonce: RefValue(ref, commit)
        for prefix in prefixes
        for ref, commit in found.items()
        if (nonce := refs.nonce_of(ref, prefix))
    }
