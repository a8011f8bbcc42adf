"""A runner's bare mirror of the bus: what is pending, and little else.

One shallow fetch of the bridge's own refs is one look at the queue; its cost follows what is pending, not
what ever was. Request branches are scanned less often, for clients whose server takes branches only: their
names are listed, and only those never seen before are fetched. A mirror holds nothing that cannot be fetched
again, so a broken one is thrown away and rebuilt.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bridge.bus import refs
from bridge.bus.git import Git
from bridge.bus.handles import Held
from bridge.bus.requests import bound_manifest, read_request
from bridge.bus.untrusted import without_credentials
from bridge.errors import BusError, MachineError, ManifestError, RemoteUnreachable, described
from bridge.manifest import MAX_LIFETIME, MAX_NONCE_SKEW
from bridge.result import RESULT_NAME, RESULT_ROOT

SCAN_INTERVAL_S = 60.0
FETCH_LIMIT_BYTES = 4 * 1024**3

_SCANNED = "refs/scanned/"
_WATCHED = "refs/watched/"
_KEPT = "refs/kept/"
# Workloads of which objects are kept, because the next request may share them.
_KEPT_COUNT = 8
# Branches never seen before that one scan fetches; the newest first, the others later.
_SCAN_COUNT = 64
# A pause between two scans is so many times as long as a scan, if that is longer than the interval.
_SCAN_SHARE = 300
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
    """What the remote holds of one request at this moment: its branch's tip, a wish to stop it."""

    branch: str | None
    cancel: str | None


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
        scan_interval_s: float = SCAN_INTERVAL_S,
        with_cards: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.git = Git(directory, timeout_s=timeout_s)
        self.remote = remote
        self._limit_bytes = limit_bytes
        self._scan_interval_s = scan_interval_s
        self._with_cards = with_cards
        self._say = say
        self._clock = clock
        self._now = now
        self._scanned_at: float | None = None
        self._scan_pause_s = scan_interval_s
        self._brought = 0
        self._over_limit = False
        self._free_bytes = 0
        self._refs: dict[str, str] = {}
        # Request commit -> its workload, of what is in the inbox or kept.
        self._workloads: dict[str, str | None] = {}
        # Kept refs are numbered as they come, so that nobody's nonce decides which one goes.
        self._kept_number = int(time.time())
        self._busy = threading.RLock()
        # Request branch -> the tip that a scan found to be no open request.
        self._closed: dict[str, str] = {}
        # Request branch -> the tip that a scan of this process found to be an open request.
        self._opened: dict[str, str] = {}

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
                    raise
                # Whose fault was it? A remote that lists its refs is well, so the mirror is not.
                self.renew()
                return self._look()

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
        return self._held(_CLAIMS)

    def cancels(self) -> dict[str, Held]:
        """Wishes to stop a request by nonce, as of the last `refresh`."""
        return self._held(_CANCELS)

    def cards(self) -> dict[str, str]:
        """Refs of runners' cards and the commits they hold, as of the last look that brought them."""
        return {ref: commit for ref, commit in self._refs.items() if ref.startswith(_CARDS)}

    def scan_next(self) -> None:
        """Have the next look scan the branches, whenever the last scan was."""
        self._scanned_at = None

    def standing(self, nonce: str, branch: str) -> Standing:
        """Ask the remote about one request alone; objects of what it holds are here afterwards.

        May be called beside another thread's work. Locks that a killed git left behind are removed: a mirror
        has one runner, and no other of its commands writes meanwhile.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        places = {
            "branch": branch,
            "own": refs.CANCELS + nonce,
            "plain": refs.BRANCH_CANCELS + nonce,
        }
        # The star makes an absent ref an empty answer instead of an error.
        specs = [f"+{ref}*:{_WATCHED}{place}/{nonce}*" for place, ref in places.items()]
        with self._busy:
            try:
                self._fetch(specs)
            except BusError:
                if not self._remove_locks():
                    raise
                self._fetch(specs)
            held = {place: self.git.oid(f"{_WATCHED}{place}/{nonce}") for place in places}
        return Standing(held["branch"], held["own"] or held["plain"])

    def holds_result(self, nonce: str, tip: str) -> bool:
        """Whether a commit that is here carries a result of this request."""
        return self.git.kind_and_size(f"{tip}:{RESULT_ROOT}/{nonce}/{RESULT_NAME}")[0] == "blob"

    def _look(self) -> list[Pending]:
        if not (self.git.directory / "HEAD").exists() or not self._is_plain():
            self.renew()
        before = {ref: commit for ref, commit in self._refs.items() if ref.startswith(_OWN)}
        self._keep()
        self._fetch([*_OWN_SPECS, *(_CARD_SPECS if self._with_cards() else ())])
        now = self._clock()
        if self._scanned_at is None or now - self._scanned_at >= self._scan_pause_s:
            self._scan()
            self._scanned_at = self._clock()
            # Where there are very many branches, a listing takes long: it stays a small share of the time.
            if self._scan_interval_s:
                self._scan_pause_s = max(self._scan_interval_s, _SCAN_SHARE * (self._scanned_at - now))
        self._refs = self.git.refs("refs/")
        self._brought += before != {r: commit for r, commit in self._refs.items() if r.startswith(_OWN)}
        if self._brought >= _TIDY_EVERY:
            self._brought = 0
            self._keep()
            self.git.run("gc", "--quiet", "--prune=now")
        return self._pending()

    def _held(self, prefixes: Sequence[str]) -> dict[str, Held]:
        held = {}
        for prefix in prefixes:
            for ref, commit in self._refs.items():
                if nonce := refs.nonce_of(ref, prefix):
                    held[nonce] = Held(ref, commit)
        return held

    def _pending(self) -> list[Pending]:
        answered = self._held(_RESULTS)
        found: dict[str, Pending] = {}
        for ref, commit in self._refs.items():
            nonce = refs.nonce_of(ref, refs.INBOX)
            if nonce and nonce not in answered:
                found[nonce] = Pending(nonce, commit, None)
        for local, commit in self._refs.items():
            if local.startswith(_SCANNED):
                ref = "refs/heads/" + local.removeprefix(_SCANNED)
                named = refs.parse_request_ref(ref)
                # What a scan that was cut short left here was judged by nobody.
                if named is None or self._opened.get(ref) != commit:
                    continue
                if named.nonce not in answered and named.nonce not in found:
                    found[named.nonce] = Pending(named.nonce, commit, ref)
        return [found[nonce] for nonce in sorted(found)]

    def _scan(self) -> None:
        """List the request branches, fetch those never seen before, and keep refs of the open ones."""
        listed = self.git.ls_remote(self.remote, *refs.BRANCH_PATTERNS)
        inbox = {refs.nonce_of(ref, refs.INBOX) for ref in self.git.refs(refs.INBOX)}
        oldest = refs.nonce_time(self._now() - MAX_LIFETIME - MAX_NONCE_SKEW)
        names = {ref: named for ref in listed if (named := refs.parse_request_ref(ref)) is not None}
        self._closed = {ref: tip for ref, tip in self._closed.items() if listed.get(ref) == tip}
        known = {f"refs/heads/{local.removeprefix(_SCANNED)}": tip for local, tip in self._scanned().items()}
        unknown = sorted(
            (named.nonce, ref)
            for ref, named in names.items()
            if named.nonce > oldest
            and named.nonce not in inbox
            and ref not in self._closed
            and known.get(ref) != listed[ref]
        )
        chosen = [ref for _, ref in unknown[-_SCAN_COUNT:]]
        if chosen:
            self._fetch([f"+{ref}*:{_local(ref)}*" for ref in chosen])
        closing = []
        for local, tip in self._scanned().items():
            ref = "refs/heads/" + local.removeprefix(_SCANNED)
            if ref not in names or names[ref].nonce in inbox or known.get(ref, tip) != listed.get(ref, tip):
                closing.append(local)
            elif self._opened.get(ref) == tip:
                continue
            elif self._is_open(names[ref].nonce, tip):
                self._opened[ref] = tip
            else:
                self._closed[ref] = tip
                closing.append(local)
        self._opened = {ref: tip for ref, tip in self._opened.items() if listed.get(ref) == tip}
        self._update_refs([f"delete {local}" for local in closing])

    def _scanned(self) -> Mapping[str, str]:
        return self.git.refs(_SCANNED)

    def _is_open(self, nonce: str, tip: str) -> bool:
        """Whether a branch ends in an open request, and not in a result or somebody's own commit."""
        try:
            bound_manifest(read_request(self.git, tip), nonce)
            return not self.holds_result(nonce, tip)
        except (ManifestError, BusError):
            return False
        except Exception as error:  # whatever one branch provokes, the others must be seen
            self._say(f"{nonce}: its branch is not looked at: {described(error)}")
            return False

    def _keep(self) -> None:
        """Hold on to the last few workloads: what the next request shares with them need not travel again.

        Looks at the inbox as it was before the next fetch prunes it, and lets go of what a job asked for.
        """
        lines = [f"delete {ref}" for ref in self._refs if ref.startswith(_WATCHED)]
        kept = {ref: commit for ref, commit in self._refs.items() if ref.startswith(_KEPT)}
        inbox = {ref: commit for ref, commit in self._refs.items() if ref.startswith(refs.INBOX)}
        shas = {*kept.values(), *inbox.values()}
        self._workloads = {sha: self._workload(sha) for sha in shas}
        known = {self._workloads[commit] for commit in kept.values()}
        fresh: dict[str | None, str] = {}
        for ref, commit in inbox.items():
            workload = self._workloads[commit]
            if workload is not None and workload not in known and refs.nonce_of(ref, refs.INBOX):
                fresh[workload] = commit
        for commit in list(fresh.values())[-_KEPT_COUNT:]:
            self._kept_number += 1
            kept[f"{_KEPT}{self._kept_number:09d}"] = commit
            lines.append(f"update {_KEPT}{self._kept_number:09d} {commit}")
        lines += [f"delete {ref}" for ref in sorted(kept)[:-_KEPT_COUNT] if ref in self._refs]
        self._update_refs(lines)

    def _workload(self, commit: str) -> str | None:
        """The parent of a request commit; None where it has none, or is not to be read."""
        if commit in self._workloads:
            return self._workloads[commit]
        try:
            return next(iter(self.git.commit(commit).parents), None)
        except BusError:
            return None

    def _update_refs(self, lines: Sequence[str]) -> None:
        if lines:
            self.git.run("update-ref", "--stdin", input="".join(f"{line}\n" for line in lines).encode())

    def _fetch(self, specs: tuple[str, ...] | list[str]) -> None:
        self._free_bytes = shutil.disk_usage(self.git.directory).free
        self.git.fetch(self.remote, specs, depth=2, prune=True, guard=self._too_much)

    def _remove_locks(self) -> bool:
        """Remove lock files of git commands that are no more; whether there were any."""
        found = [*self.git.directory.glob("*.lock"), *(self.git.directory / "refs").rglob("*.lock")]
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    def _too_much(self) -> str | None:
        size = 0
        for file in (self.git.directory / "objects" / "pack").glob("tmp_*"):
            with contextlib.suppress(FileNotFoundError):
                size += file.stat().st_size
        # Few objects are unpacked as they come, each a file of its own.
        size = max(size, self._free_bytes - shutil.disk_usage(self.git.directory).free)
        if size > self._limit_bytes:
            self._over_limit = True
            return f"{without_credentials(self.remote)} sends more than {self._limit_bytes} bytes"
        return None

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
        self._scanned_at = None
        self._refs = {}
        self._closed.clear()
        self._opened.clear()

    def _is_plain(self) -> bool:
        """Whether the configuration says only what `git init` writes: git would obey whatever else."""
        try:
            lines = (self.git.directory / "config").read_bytes().splitlines()
        except FileNotFoundError:
            return False
        return all(_PLAIN_LINE.fullmatch(line) for line in lines)


def _local(ref: str) -> str:
    return _SCANNED + ref.removeprefix("refs/heads/")
