"""Requests that are on their branches alone, for clients whose server takes branches only.

Their names are listed now and then, and only tips never seen before are fetched. What turns out to be an open
request keeps a ref here; any other tip is remembered by this process, so that it is judged once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from bridge.bus.git import Git
from bridge.bus.handles import Held
from bridge.bus.requests import bound_manifest, has_result, read_request
from bridge.errors import BusError, ManifestError, described
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW

INTERVAL_S = 60.0

_SCANNED = "refs/scanned/"
# Branches never seen before that one scan fetches; the newest first, the others later.
_COUNT = 64
# A pause between two scans is so many times as long as a scan, if that is longer than the interval.
_SHARE = 300


class Scan:
    """What a mirror knows of the request branches.

    Args:
        git: The mirror's repository.
        remote: Address of the bus.
        fetch: Brings refs into it.
        interval_s: Seconds between two scans; 0: every look scans.
        say: Takes one line for the owner.
        clock: Monotonic seconds.
        now: The time of day (aware): branches older than any request may live are not looked at.
    """

    def __init__(
        self,
        git: Git,
        remote: str,
        *,
        fetch: Callable[[Sequence[str]], None],
        interval_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._git = git
        self._remote = remote
        self._fetch = fetch
        self._interval_s = interval_s
        self._say = say
        self._clock = clock
        self._now = now
        self._pause_s = interval_s
        self._ended_at: float | None = None
        # Request branch -> the tip that a scan found to be no open request.
        self._closed: dict[str, str] = {}
        # Request branch -> the tip that a scan of this process found to be an open request.
        self._opened: dict[str, str] = {}

    def hasten(self) -> None:
        """Let the next look scan, whenever the last scan was."""
        self._ended_at = None

    def forget(self) -> None:
        """The repository was made again: nothing of an earlier scan is in it."""
        self._ended_at = None
        self._closed.clear()
        self._opened.clear()

    def look(self) -> None:
        """Scan, if it is time.

        Raises:
            RemoteUnreachable: The remote did not answer.
            BusError: It sends too much.
        """
        began = self._clock()
        if self._ended_at is not None and began - self._ended_at < self._pause_s:
            return
        self._scan()
        self._ended_at = self._clock()
        # Where there are very many branches, a listing takes long: it stays a small share of the time.
        if self._interval_s:
            self._pause_s = max(self._interval_s, _SHARE * (self._ended_at - began))

    def found(self, held: Mapping[str, str]) -> dict[str, Held]:
        """Open requests by nonce, each with the branch it was found on.

        Args:
            held: The mirror's refs.
        """
        found: dict[str, Held] = {}
        for local, commit in held.items():
            if local.startswith(_SCANNED):
                ref = _branch(local)
                named = refs.parse_request_ref(ref)
                # What a scan that was cut short left here was judged by nobody.
                if named is not None and self._opened.get(ref) == commit:
                    found.setdefault(named.nonce, Held(ref, commit))
        return found

    def _scan(self) -> None:
        """List the request branches, fetch those never seen before, and keep refs of the open ones."""
        listed = self._git.ls_remote(self._remote, *refs.BRANCH_PATTERNS)
        inbox = {refs.nonce_of(ref, refs.INBOX) for ref in self._git.refs(refs.INBOX)}
        oldest = refs.nonce_time(self._now() - MAX_LIFETIME - MAX_NONCE_SKEW)
        names = {ref: named for ref in listed if (named := refs.parse_request_ref(ref)) is not None}
        self._closed = {ref: tip for ref, tip in self._closed.items() if listed.get(ref) == tip}
        known = self._kept()
        unknown = sorted(
            (named.nonce, ref)
            for ref, named in names.items()
            if named.nonce > oldest
            and named.nonce not in inbox
            and ref not in self._closed
            and known.get(ref) != listed[ref]
        )
        chosen = [ref for _, ref in unknown[-_COUNT:]]
        if chosen:
            self._fetch([f"+{ref}*:{_local(ref)}*" for ref in chosen])
        closing = []
        for ref, tip in self._kept().items():
            if ref not in names or names[ref].nonce in inbox or known.get(ref, tip) != listed.get(ref, tip):
                closing.append(ref)
            elif self._opened.get(ref) == tip:
                continue
            elif self._is_open(names[ref].nonce, tip):
                self._opened[ref] = tip
            else:
                self._closed[ref] = tip
                closing.append(ref)
        self._opened = {ref: tip for ref, tip in self._opened.items() if listed.get(ref) == tip}
        if closing:
            lines = "".join(f"delete {_local(ref)}\n" for ref in closing)
            self._git.run("update-ref", "--stdin", input=lines.encode())

    def _kept(self) -> dict[str, str]:
        """Request branches of which there is a ref here, with their tips."""
        return {_branch(local): tip for local, tip in self._git.refs(_SCANNED).items()}

    def _is_open(self, nonce: str, tip: str) -> bool:
        """Whether a branch ends in an open request, and not in a result or somebody's own commit."""
        try:
            bound_manifest(read_request(self._git, tip), nonce)
            return not has_result(self._git, tip, nonce)
        except (ManifestError, BusError):
            return False
        except Exception as error:  # whatever one branch provokes, the others must be seen
            self._say(f"{nonce}: its branch is not looked at: {described(error)}")
            return False


def _local(ref: str) -> str:
    return _SCANNED + ref.removeprefix("refs/heads/")


def _branch(local: str) -> str:
    return "refs/heads/" + local.removeprefix(_SCANNED)
