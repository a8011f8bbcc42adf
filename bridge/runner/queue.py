"""The requests that wait on the remote: found, read once, and put in the order in which they are tried.

One look is one listing of the bridge's refs and at most one fetch of what is new, by exact names. Requests
of clients whose server takes only branches are found by a listing of the branches' names now and then.
Reading a request and verifying its signature happens once, a bounded number of each in one look, because
anyone with push rights can push thousands of them.

Requesters take turns, the one served longest ago first; within one, the oldest request first. A turn is
whatever the runner does for a request, a refusal included, so a flood of refusals is paid for by who caused
it. Unsigned requests are one requester together. What a requester queues beyond its quota, the newest, is
refused before the next of its requests runs; after some refusals in a row one runs all the same, for unsigned
requests have many authors. What it may not run at the same time waits.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from itertools import chain, islice, zip_longest
from operator import attrgetter

from bridge.bus.requests import CANCELS, CLAIMS, RESULTS, RefValue, bound_manifest, has_result, read_request
from bridge.errors import BrokenObject, BusError, MachineError, ManifestError, describe
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW
from bridge.protocol.result import Reason
from bridge.runner.admission import Refused, Request, find_signer, over_quota
from bridge.runner.config import RunnerConfig
from bridge.runner.store import Store
from bridge.signing.keyfiles import stamps

log = logging.getLogger(__name__)

SCAN_INTERVAL_S = 60.0
# A claim is read when it was seen for so long: those of short jobs are gone before, and no lease is as short.
CLAIM_READ_S = 2.0
MAX_READ = 500
MAX_VERIFIED = 50
# Branches never seen before that one look reads.
MAX_SCANNED = 64
# So many refusals for a quota may come before a request of the same requester that may run.
REFUSALS_IN_A_ROW = 20
# A pause between two scans is so many times as long as a scan, if that is longer than the interval.
_SCAN_SHARE = 300
# How much wider the choice among requests is after a lost claim (twice), and after one that was won.
_MAX_SPREAD, _NARROWER = 8.0, 0.9
_LISTED = ("refs/mac-bridge/", "refs/heads/mac-bridge-")

# A requester is the principal that signed; None: all unsigned requests together.
Requester = str | None


class TurnMemory:
    """Whom a runner served last, since it started. None is forgotten: one that came back would be first."""

    def __init__(self) -> None:
        self._turns = 0
        self._known: dict[Requester, tuple[int, int]] = {}

    def note(self, requester: Requester, *, refused: bool = False) -> None:
        """Something was done for a requester in its turn; `refused`: for its quota."""
        self._turns += 1
        self._known[requester] = (self._turns, self.of(requester)[1] + 1 if refused else 0)

    def of(self, requester: Requester) -> tuple[int, int]:
        """The number of its last turn, 0 where it had none; and how many refusals in a row its last were."""
        return self._known.get(requester, (0, 0))


def order(
    requests: Iterable[Request],
    memory: TurnMemory,
    *,
    requester: Callable[[Request], Requester],
    max_queued: Callable[[Requester], int],
    max_running: int = 0,
) -> list[Request]:
    """The order in which to try what is pending until something was done; sets what is `over_quota`.

    What is claimed keeps a place, because its runner may have fallen silent, and takes no turn: it comes just
    before the next request of its requester. With a `max_running` of 0 any number may be claimed.
    """
    by_age = sorted(requests, key=attrgetter("nonce"))
    known: dict[Requester, list[Request]] = {}
    for request in by_age:
        request.over_quota = None
        if request.is_read:
            known.setdefault(requester(request), []).append(request)
    running = Counter(who for who, own in known.items() for request in own if request.claim is not None)
    turns = sorted(known, key=lambda who: (memory.of(who)[0], running[who], known[who][0].nonce))
    lines = []
    for who in turns:
        limit, refusals = max_queued(who), memory.of(who)[1]
        claimed = [request for request in known[who] if request.claim is not None]
        waiting = [request for request in known[who] if request.claim is None]
        refused = waiting[limit:]
        for request in refused:
            request.over_quota = over_quota(who, limit)
        at_once = max(0, REFUSALS_IN_A_ROW - refusals)
        may_run = max_running == 0 or running[who] < max_running
        line = [*refused[:at_once], *(waiting[:limit] if may_run else ()), *refused[at_once:]]
        lines.append([[*claimed, *line[:1]], *([request] for request in line[1:])])
    rounds = chain.from_iterable(zip_longest(*lines, fillvalue=[]))
    return [*chain.from_iterable(rounds), *(request for request in by_age if not request.is_read)]


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
    claimed: int = field(default=0, init=False)  # requests that some runner has
    found: Mapping[str, str] = field(default_factory=dict, init=False)  # the remote's refs
    _requests: dict[str, Request] = field(default_factory=dict, init=False)
    # Tips of the request branches that hold an open request or are to be read, and of those that hold none.
    _branches: dict[str, str] = field(default_factory=dict, init=False)
    _closed: dict[str, str] = field(default_factory=dict, init=False)
    _scan_at: float | None = field(default=None, init=False)
    _lists: object = field(default=None, init=False)
    _memory: TurnMemory = field(default_factory=TurnMemory, init=False)
    _spread: float = field(default=1.0, init=False)

    def __len__(self) -> int:
        return len(self._requests)

    def scan_soon(self) -> None:
        """Let the next look list the branches, whenever the last one did."""
        self._scan_at = None

    def poll(self, only: Collection[str] | None = None) -> list[Request]:
        """Look at the remote once; the requests that may be tried now, in the order to try them.

        While a job runs, new requests are fetched and read only where `only` has their nonces.
        """
        self._look(only)
        policy, requests = self.config.policy, self._requests.values()
        self.claimed = sum(request.claim is not None for request in requests)
        ordered = order(
            [each for each in requests if each.manifest is None or each.manifest.transport == "embedded"],
            self._memory,
            requester=self._requester,
            max_queued=policy.max_queued,
            max_running=policy.max_running_per_requester,
        )
        due = [request for request in ordered if request.is_read and self._is_due(request)]
        self._shuffle(due)
        return due

    def _is_due(self, request: Request) -> bool:
        """Whether it may be tried; one that was cancelled does not wait for what it was deferred for."""
        is_cancelled = request.cancel is not None and not self.store.get(request.nonce).failures
        return is_cancelled or self.store.is_due(request.nonce)

    def note_claim(self, request: Request, *, won: bool) -> None:
        """A claim was pushed: the more of them other runners win, the wider the choice; see `_shuffle`."""
        self._spread = max(1.0, self._spread * _NARROWER) if won else min(self._spread * 2, _MAX_SPREAD)
        if request.ref and not won:
            self.scan_soon()

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

    def _look(self, only: Collection[str] | None) -> None:
        began = self.clock()
        scans = only is None and (self._scan_at is None or began >= self._scan_at)
        found = self.cache.list_remote(*_LISTED, *((refs.BRANCHES, refs.AGENT_BRANCHES) if scans else ()))
        if scans:
            self._scan(found)
            # Where there are very many branches a listing takes long: it stays a small share of the time.
            pause = max(self.scan_interval_s, _SCAN_SHARE * (self.clock() - began))
            self._scan_at = self.clock() + (pause if self.scan_interval_s else 0.0)
        self.found = found
        self._update()
        self._read_new(only)

    def _scan(self, found: Mapping[str, str]) -> None:
        """Choose the branches that may hold a request, the newest of those never seen before."""
        self._branches = {ref: tip for ref, tip in self._branches.items() if found.get(ref) == tip}
        self._closed = {ref: tip for ref, tip in self._closed.items() if found.get(ref) == tip}
        oldest = refs.nonce_time(self.now() - MAX_LIFETIME - MAX_NONCE_SKEW)
        unknown = (
            (named.nonce, ref)
            for ref in found.keys() - self._branches.keys() - self._closed.keys()
            if (named := refs.parse_request_ref(ref)) is not None and named.nonce > oldest
        )
        newest = sorted(unknown, reverse=True)
        due = (
            ref for nonce, ref in newest if refs.inbox_ref(nonce) not in found and self.store.is_due(nonce)
        )
        self._branches |= {ref: found[ref] for ref in islice(due, MAX_SCANNED)}

    def _update(self) -> None:
        """Carry over what is known of the requests that still wait."""
        known, lists = self._requests, stamps(self.config.allowed_signers, self.config.revoked_keys)
        is_first, self._lists = lists != self._lists, lists  # or whose key is whose has changed
        # What the first look of this process finds is read at once: it may be ours, from before a crash.
        read_claim_at = self.clock() + (0.0 if is_first else CLAIM_READ_S)
        claims, cancels = held_by_nonce(self.found, CLAIMS), held_by_nonce(self.found, CANCELS)
        inbox, results = held_by_nonce(self.found, (refs.INBOX,)), held_by_nonce(self.found, RESULTS)
        found = [Request(nonce, held.commit) for nonce, held in inbox.items()]
        for ref, tip in self._branches.items():
            if (named := refs.parse_request_ref(ref)) is not None and named.nonce not in inbox:
                found.append(Request(named.nonce, tip, ref))
        self._requests = {}
        for new in sorted(found, key=attrgetter("nonce")):
            nonce = new.nonce
            if nonce in results:
                continue
            old = known.get(new.place)
            request = new if is_first or old is None or old.commit != new.commit else old
            was_claimed = request.claim is not None
            request.claim, request.cancel = claims.get(nonce), cancels.get(nonce)
            if request.claim is None:
                request.status, request.claim_counts = None, True
            elif not was_claimed:
                request.read_claim_at = read_claim_at
            self._requests[request.place] = request

    def _read_new(self, only: Collection[str] | None) -> None:
        """Fetch and read what is new, in the order of the nonces, so much in one look."""
        unread = (each for each in self._requests.values() if not each.is_read)
        wanted = (each for each in unread if only is None or each.nonce in only)
        chosen = islice((each for each in wanted if self.store.is_due(each.nonce)), MAX_READ)
        places = {request.place: request for request in chosen}
        failures = self.cache.bring(
            {place: request.commit for place, request in places.items()}, list(places)
        )
        verified = 0
        for place, request in places.items():
            if place in failures:
                self.store.back_off(request.nonce, f"cannot be fetched: {failures[place].message}")
            elif verified < MAX_VERIFIED:
                self._read(request)
                verified += request.data is not None and request.data.signature is not None

    def _read(self, request: Request) -> None:
        """Read a request whose commit is here, and find out who signed it."""
        is_open = True
        try:
            request.data = read_request(self.cache, request.commit)
            request.manifest = bound_manifest(request.data, request.nonce)
            is_open = request.ref is None or not has_result(self.cache, request.commit, request.nonce)
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
        if request.ref is not None and (request.refusal is not None or not is_open):
            # The branch ends in a result, or in a commit of the user's.
            self._closed[request.ref] = self._branches.pop(request.ref)
            del self._requests[request.place]
            return
        find_signer(request, self.config, self.now())
        request.is_read = True


def held_by_nonce(found: Mapping[str, str], prefixes: Sequence[str]) -> dict[str, RefValue]:
    """What refs below these prefixes hold, by nonce; the first prefix wins."""
    return {
        nonce: RefValue(ref, commit)
        for prefix in reversed(prefixes)
        for ref, commit in found.items()
        if (nonce := refs.nonce_of(ref, prefix))
    }
