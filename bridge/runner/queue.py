"""The requests that wait on the remote: found, read once, and put in the order in which they are tried."""

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
from bridge.runner.admission import Refusal, Request, find_signer
from bridge.runner.config import RunnerConfig
from bridge.runner.store import Store
from bridge.signing.keyfiles import stamps

log = logging.getLogger(__name__)

SCAN_INTERVAL_S = 60.0  # branches are listed for clients whose server takes only these
# A claim is read when it was seen for so long: those of short jobs are gone before, and no lease is as short.
CLAIM_READ_S = 2.0
MAX_READ = 500  # in one look: anyone with push rights can push thousands
MAX_VERIFIED = 50
MAX_SCANNED = 64  # branches never seen before that one look reads
# So many refusals for a quota may come before a request of the same requester that may run.
REFUSALS_IN_A_ROW = 20
# How much wider the choice among requests is after a lost claim (twice), and after one that was won.
_MAX_SPREAD, _NARROWER = 8.0, 0.9
_LISTED = ("refs/mac-bridge/", "refs/heads/mac-bridge-")

# A requester is the principal that signed; None: all unsigned requests together.
Requester = str | None


# The number of a requester's last turn, and how many refusals for a quota its last ones were.
Turns = dict[Requester, tuple[int, int]]


def order(
    requests: Iterable[Request],
    turns: Turns,
    *,
    requester: Callable[[Request], Requester],
    max_queued: Callable[[Requester], int],
    max_running: int = 0,
) -> list[Request]:
    """The order in which to try what is pending until something was done; sets what is `over_quota`.

    Requesters take turns, the one served longest ago first; within one, the oldest request first. A refusal
    is a turn, too, so a flood of them is paid for by who caused it. What exceeds a quota, the newest, is
    refused first; after some refusals in a row one request runs all the same, for unsigned ones have many
    authors. What is claimed takes no turn, and keeps a place just before the next of its requester, because
    its runner may have fallen silent. A `max_running` of 0 is no bound.
    """
    by_age = sorted(requests, key=attrgetter("nonce"))
    known: dict[Requester, list[Request]] = {}
    for request in by_age:
        request.over_quota = False
        if request.is_read:
            known.setdefault(requester(request), []).append(request)
    running = Counter(who for who, own in known.items() for request in own if request.claim is not None)
    lines = []
    last = {who: turns.get(who, (0, 0)) for who in known}
    for who in sorted(known, key=lambda who: (last[who][0], running[who], known[who][0].nonce)):
        claimed = [request for request in known[who] if request.claim is not None]
        waiting = [request for request in known[who] if request.claim is None]
        waiting, refused = waiting[: max_queued(who)], waiting[max_queued(who) :]
        for request in refused:
            request.over_quota = True
        if 0 < max_running <= running[who]:
            waiting = []
        at_once = max(0, REFUSALS_IN_A_ROW - last[who][1])
        line = [*refused[:at_once], *waiting, *refused[at_once:]]
        lines.append([[*claimed, *line[:1]], *([request] for request in line[1:])])
    rounds = chain.from_iterable(zip_longest(*lines, fillvalue=[]))
    return [*chain.from_iterable(rounds), *(request for request in by_age if not request.is_read)]


def note_turn(turns: Turns, requester: Requester, *, refused: bool = False) -> None:
    """Something was done for a requester in its turn; `refused`: for its quota."""
    number = max((number for number, _ in turns.values()), default=0) + 1
    turns[requester] = (number, turns.get(requester, (0, 0))[1] + 1 if refused else 0)


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
    # Tips of the request branches that were chosen to be read, and those of them that hold no open request.
    _branches: dict[str, str] = field(default_factory=dict, init=False)
    _closed: set[str] = field(default_factory=set, init=False)
    _scan_at: float = field(default=float("-inf"), init=False)
    _lists: object = field(default=None, init=False)
    _turns: Turns = field(default_factory=dict, init=False)
    _spread: float = field(default=1.0, init=False)

    def __len__(self) -> int:
        return len(self._requests)

    def poll(self, only: Collection[str] | None = None) -> list[Request]:
        """Look at the remote once; the requests that may be tried now, in the order to try them.

        While a job runs, new requests are fetched and read only where `only` has their nonces.
        """
        scans = only is None and self.clock() >= self._scan_at
        branches = (refs.BRANCHES, refs.AGENT_BRANCHES) if scans else ()
        self.found = self.cache.list_remote(*_LISTED, *branches)
        if scans:
            self._scan()
            self._scan_at = self.clock() + self.scan_interval_s
        self._update()
        self._read_new(only)
        policy, requests = self.config.policy, self._requests.values()
        self.claimed = sum(request.claim is not None for request in requests)
        ordered = order(
            [each for each in requests if each.manifest is None or each.manifest.transport == "embedded"],
            self._turns,
            requester=self._requester,
            max_queued=policy.max_queued,
            max_running=policy.max_running_per_requester,
        )
        return self._shuffled([each for each in ordered if each.is_read and self._is_due(each)])

    def _is_due(self, request: Request) -> bool:
        """Whether it may be tried; one that was cancelled does not wait for what it was deferred for."""
        is_cancelled = request.cancel is not None and not self.store.get(request.nonce).failures
        return is_cancelled or self.store.is_due(request.nonce)

    def note_claim(self, request: Request, *, won: bool) -> None:
        """A claim was pushed: the more of them other runners win, the wider the choice; see `_shuffled`."""
        self._spread = max(1.0, self._spread * _NARROWER) if won else min(self._spread * 2, _MAX_SPREAD)
        if request.ref and not won:
            self._scan_at = self.clock()  # the branch may hold the result by now

    def _shuffled(self, due: list[Request]) -> list[Request]:
        """Choose by chance among the first requests while other runners work.

        Runners that all begin with the same request lose most of their pushes to each other.
        """
        if not self.claimed and self._spread == 1.0:
            return due
        first = due[: int((3 * self.claimed + 2) * self._spread)]
        return [*random.sample(first, len(first)), *due[len(first) :]]

    def _requester(self, request: Request) -> Requester:
        """Whose it is. An expired one counts as unsigned: anyone can push an old signed request again."""
        expired = request.manifest is None or self.now() >= request.manifest.expires_at
        return None if expired else request.requester

    def note_turn(self, request: Request) -> None:
        """Something was done for a request: its requester comes last in the next round."""
        note_turn(self._turns, self._requester(request), refused=request.over_quota)

    def _scan(self) -> None:
        """Choose the branches that may hold a request, the newest of those never seen before."""
        found = self.found
        self._branches = {ref: tip for ref, tip in self._branches.items() if found.get(ref) == tip}
        self._closed &= self._branches.keys()
        oldest = refs.nonce_time(self.now() - MAX_LIFETIME - MAX_NONCE_SKEW)
        unknown = (
            (named.nonce, ref)
            for ref in found.keys() - self._branches.keys()
            if (named := refs.parse_request_ref(ref)) is not None and named.nonce > oldest
        )
        due = (
            ref
            for nonce, ref in sorted(unknown, reverse=True)
            if refs.INBOX + nonce not in found and self.store.is_due(nonce)
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
        for ref in self._branches.keys() - self._closed:
            if (named := refs.parse_request_ref(ref)) is not None and named.nonce not in inbox:
                found.append(Request(named.nonce, self._branches[ref], ref))
        self._requests = {}
        # The newest are read first: thousands of made-up requests that wait hold up no later one.
        for new in sorted(found, key=lambda each: (each.place not in known, each.nonce), reverse=True):
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
        """Fetch and read what is new, so much in one look."""
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
            if request.ref is not None:  # on another branch it is a copy, which anyone may have pushed
                is_own = request.ref == request.manifest.result_ref
                is_open = is_own and not has_result(self.cache, request.commit, request.nonce)
        except (ManifestError, BrokenObject) as error:
            reason = Reason.BAD_COMMIT if request.data is None else Reason.BAD_MANIFEST
            request.refusal = Refusal(reason, error.message, error.remedy)
        except (BusError, MachineError) as error:  # the copy here may be at fault; if not, others go on
            self.store.back_off(request.nonce, error.message)
            raise
        except Exception as error:  # whatever one request provokes, the others must be read
            request.refusal = Refusal(Reason.BAD_COMMIT, describe(error))
        if request.ref is not None and (request.refusal is not None or not is_open):
            # The branch ends in a result, or in a commit of the user's.
            self._closed.add(request.ref)
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
