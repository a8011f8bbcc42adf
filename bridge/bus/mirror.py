"""A runner's bare mirror of the bus: what is pending, and little else.

One shallow fetch of the bridge's own refs is one look at the queue; its cost follows what is pending, not
what ever was. Request branches are looked at less often (`scan`). A mirror holds nothing that cannot be
fetched again, so a broken one is thrown away and rebuilt.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bridge.bus import room, scan
from bridge.bus.command import FETCH_LIMIT_BYTES
from bridge.bus.git import Git
from bridge.bus.handles import Held, state_of
from bridge.bus.intake import Intake
from bridge.bus.requests import has_result
from bridge.bus.workloads import Workloads
from bridge.errors import BusError, MachineError, RemoteUnreachable
from bridge.protocol import refs

_WATCHED = "refs/watched/"
_TIDY_EVERY = 500
_PLAIN_LINE = re.compile(
    rb"\[(core|extensions)\]"
    rb"|\t(bare|filemode|ignorecase|objectformat|precomposeunicode|repositoryformatversion|symlinks)"
    rb" = [a-z0-9]+",
    re.IGNORECASE,
)
_CLAIMS = (refs.BRANCH_CLAIMS, refs.CLAIMS)
_CANCELS = (refs.BRANCH_CANCELS, refs.CANCELS)
_RESULTS = (refs.BRANCH_RESULTS, refs.RESULTS)
_CARDS = (refs.BRANCH_RUNNERS, refs.RUNNERS)
_OWN = (refs.INBOX, *_CLAIMS, *_CANCELS, *_RESULTS)
_OWN_SPECS = tuple(f"+{prefix}*:{prefix}*" for prefix in _OWN)
_CARD_SPECS = tuple(f"+{prefix}*:{prefix}*" for prefix in _CARDS)


@dataclass(frozen=True)
class Pending:
    """A request without a result.

    Attributes:
        nonce: From the ref it was found under; whether the manifest agrees is not yet known.
        commit: The request commit.
        ref: The branch it was found on; None: found in the inbox.
    """

    nonce: str
    commit: str
    ref: str | None


@dataclass(frozen=True)
class Standing:
    """What the remote holds of one request at this moment: its branch's tip, a wish to stop it.

    `cancels` has the cancel requests of every request, by nonce.
    """

    branch: str | None
    cancel: str | None
    cancels: Mapping[str, Held]


class Mirror:
    """The local copy of one remote's queue.

    Args:
        directory: The bare repository; made when missing, replaced when broken.
        remote: Address of the bus.
        timeout_s: Deadline of one fetch.
        limit_bytes: A fetch that brings more than this is ended.
        scan_interval_s: Seconds between scans of the request branches; 0: every look scans.
        with_cards: Whether a look brings the runners' cards, too.
        say: Takes one line for the owner.
        clock: Monotonic seconds.
        now: The time of day (aware): branches older than any request may live are not looked at.
    """

    def __init__(
        self,
        directory: Path,
        remote: str,
        *,
        timeout_s: float = 300.0,
        limit_bytes: int = FETCH_LIMIT_BYTES,
        scan_interval_s: float = scan.INTERVAL_S,
        with_cards: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.git = Git(directory, timeout_s=timeout_s)
        self.remote = remote
        self._limit_bytes = limit_bytes
        self._with_cards = with_cards
        self._say = say
        self._scan = scan.Scan(
            self.git, remote, fetch=self._fetch, interval_s=scan_interval_s, say=say, clock=clock, now=now
        )
        self._workloads = Workloads(self.git)
        self._brought = 0
        # Room that fetches took since the objects were last counted; None: they never were.
        self._taken_bytes: int | None = None
        self._tidied_bytes = 0
        self._over_limit = False
        self._refs: dict[str, str] = {}
        self._busy = threading.RLock()

    def refresh(self) -> list[Pending]:
        """Look at the remote and return what is pending, oldest first.

        Raises:
            RemoteUnreachable: The remote did not answer.
            BusError: The remote sends more than the mirror takes.
        """
        self._over_limit = False
        with self._busy:
            try:
                return self._look()
            except BusError:
                if self._over_limit:
                    self._tidy()
                    raise
                # Whose fault was it? A remote that lists its refs is well, so the mirror is not.
                self.renew()
                return self._look()

    def ready(self) -> None:
        """Have a local copy, be it an empty one: before `standing` where nothing was looked at before.

        Raises:
            RemoteUnreachable: One must be made, and the remote did not answer.
        """
        if not (self.git.directory / "HEAD").exists() or not self._is_plain():
            self.renew()

    def renew(self) -> None:
        """Throw the local copy away and begin an empty one; the next look fills it.

        Raises:
            RemoteUnreachable: The remote did not answer, so nothing is thrown away.
        """
        parent = self.git.directory.parent
        parent.mkdir(parents=True, exist_ok=True)
        found = Git(parent, timeout_s=60.0).ls_remote(self.remote)
        with self._busy:
            self._make(sha256=any(len(commit) == 64 for commit in found.values()))

    def remake(self) -> None:
        """`renew` and `refresh` in one, so that no other thread meets an empty copy through this object.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        with self._busy:
            self.renew()
            self.refresh()

    def mend(self, works: Callable[[], object]) -> bool:
        """`remake`, unless what failed works now, as another thread was faster; whether it was made again.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        with self._busy:
            try:
                works()
            except RemoteUnreachable:
                raise
            except (BusError, MachineError, OSError):
                self.remake()
                return True
        return False

    def claims(self) -> dict[str, Held]:
        """Claims by nonce, as of the last `refresh`; the bridge's own ref wins over a claim branch."""
        return _held(self._refs, _CLAIMS)

    def cancels(self) -> dict[str, Held]:
        """Wishes to stop a request by nonce, as of the last `refresh`."""
        return _held(self._refs, _CANCELS)

    def cards(self) -> dict[str, str]:
        """Refs of runners' cards and the commits they hold, as of the last look that brought them."""
        return {ref: commit for ref, commit in self._refs.items() if ref.startswith(_CARDS)}

    def scan_next(self) -> None:
        """Have the next look scan the branches, whenever the last scan was."""
        self._scan.hasten()

    def standing(self, nonce: str, branch: str) -> Standing:
        """Ask the remote about one request alone; objects of what it holds are here afterwards.

        May be called beside another thread's work. Locks that a killed git left behind are removed: a mirror
        has one runner, and no other of its commands writes meanwhile.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        # The star makes an absent ref an empty answer instead of an error.
        specs = [f"+{branch}*:{_WATCHED}branch/{nonce}*"]
        specs += [f"+{prefix}*:{_WATCHED}{prefix}*" for prefix in _CANCELS]
        with self._busy:
            try:
                self._fetch(specs)
            except BusError:
                if not self._remove_locks():
                    raise
                self._fetch(specs)
            found = self.git.refs(_WATCHED)
        cancels = _held({ref.removeprefix(_WATCHED): commit for ref, commit in found.items()}, _CANCELS)
        cancel = cancels.get(nonce)
        return Standing(
            found.get(f"{_WATCHED}branch/{nonce}"), None if cancel is None else cancel.commit, cancels
        )

    def waiting(self, nonce: str) -> Pending | None:
        """Ask the remote for one request that waits, and fetch it; None: it is claimed, answered or gone.

        May be called beside another thread's work.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        state = state_of(self.git.ls_remote(self.remote), nonce)
        if state.claim is not None or state.result is not None:
            return None
        ref = refs.inbox_ref(nonce) if state.inbox else state.branch.ref if state.branch else None
        if ref is None:
            return None
        with self._busy:
            self._fetch([f"+{ref}*:{_WATCHED}waiting/{nonce}*"])
            commit = self.git.oid(f"{_WATCHED}waiting/{nonce}")
        if commit is None or (not state.inbox and has_result(self.git, commit, nonce)):
            return None
        return Pending(nonce, commit, None if state.inbox else ref)

    def _look(self) -> list[Pending]:
        self.ready()
        before = {ref: commit for ref, commit in self._refs.items() if ref.startswith(_OWN)}
        self._keep()
        if self._taken_bytes is None:
            room.remove_litter(self.git.directory / "objects")  # of a process that was killed in a fetch
        self._fetch([*_OWN_SPECS, *(_CARD_SPECS if self._with_cards() else ())])
        self._scan.look()
        self._refs = self.git.refs("refs/")
        self._brought += before != {r: commit for r, commit in self._refs.items() if r.startswith(_OWN)}
        self._tidy()
        return self._pending()

    def _pending(self) -> list[Pending]:
        answered = _held(self._refs, _RESULTS)
        found: dict[str, Pending] = {}
        for ref, commit in self._refs.items():
            nonce = refs.nonce_of(ref, refs.INBOX)
            if nonce and nonce not in answered:
                found[nonce] = Pending(nonce, commit, None)
        for nonce, held in self._scan.found(self._refs).items():
            if nonce not in answered and nonce not in found:
                found[nonce] = Pending(nonce, held.commit, held.ref)
        return [found[nonce] for nonce in sorted(found)]

    def _keep(self) -> None:
        """Keep workloads of the inbox before the next fetch prunes it, and let go of what a job asked for."""
        lines = [f"delete {ref}" for ref in self._refs if ref.startswith(_WATCHED)]
        self._update([*lines, *self._workloads.changes(self._refs)])

    def _update(self, lines: Sequence[str]) -> None:
        if lines:
            self.git.run("update-ref", "--stdin", input="".join(f"{line}\n" for line in lines).encode())

    def _tidy(self) -> None:
        """Drop what no ref holds any more, when much of it may be here; then the kept workloads, too."""
        objects = self.git.directory / "objects"
        is_much = False
        if self._taken_bytes is None or self._taken_bytes > room.TIDY_BYTES:
            self._taken_bytes = 0  # other programs take room, too: only now it is counted
            is_much = room.size_bytes(objects) > max(room.TIDY_BYTES, 2 * self._tidied_bytes)
        if is_much:
            self._update(self._workloads.removal(self.git.refs("refs/")))
        elif self._brought < _TIDY_EVERY:
            return
        self._brought = self._taken_bytes = 0
        self.git.run("gc", "--quiet", "--prune=now")
        self._tidied_bytes = room.size_bytes(objects)
        self._refs = self.git.refs("refs/")

    def _fetch(self, specs: Sequence[str]) -> None:
        intake = Intake(self.git.directory, self.remote, self._limit_bytes)
        try:
            self.git.fetch(self.remote, specs, depth=2, prune=True, guard=intake.guard)
        except BusError:
            room.remove_litter(self.git.directory / "objects")
            raise
        finally:
            self._over_limit = intake.is_too_much
            if self._taken_bytes is not None:
                self._taken_bytes += max(0, intake.taken_bytes)

    def _remove_locks(self) -> bool:
        """Remove lock files of git commands that are no more; whether there were any."""
        found = [*self.git.directory.glob("*.lock"), *(self.git.directory / "refs").rglob("*.lock")]
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    def _make(self, *, sha256: bool) -> None:
        directory = self.git.directory
        if directory.exists():
            self._say("the mirror is damaged: it is made again")
        self.git.close()
        shutil.rmtree(directory, ignore_errors=True)
        Git(directory.parent).run(
            *("init", "--quiet", "--bare", "--template="),
            *(f"--object-format={'sha256' if sha256 else 'sha1'}", str(directory)),
        )
        self.git.forget_store()
        self.git.close()  # a reader that another thread began in the old folder knows nothing of the new one
        self._scan.forget()
        self._taken_bytes = self._tidied_bytes = 0
        self._refs = {}

    def _is_plain(self) -> bool:
        """Whether the configuration says only what `git init` writes: git would obey whatever else."""
        try:
            lines = (self.git.directory / "config").read_bytes().splitlines()
        except FileNotFoundError:
            return False
        return all(_PLAIN_LINE.fullmatch(line) for line in lines)


def _held(found: Mapping[str, str], prefixes: Sequence[str]) -> dict[str, Held]:
    """What refs of these prefixes hold, by nonce; the last prefix wins."""
    return {
        nonce: Held(ref, commit)
        for prefix in prefixes
        for ref, commit in found.items()
        if (nonce := refs.nonce_of(ref, prefix))
    }
