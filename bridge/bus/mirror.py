"""A runner's bare mirror of the bus: what is pending, and little else.

One shallow fetch of the bridge's own refs is one look at the queue; its cost follows what is pending, not
what ever was. Branches are scanned less often, for clients whose server takes branches only. A mirror holds
nothing that cannot be fetched again, so a broken one is thrown away and rebuilt.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bridge.bus import refs
from bridge.bus.git import Git
from bridge.bus.handles import Held
from bridge.bus.requests import bound_manifest, read_request
from bridge.bus.untrusted import without_credentials
from bridge.errors import BusError, ManifestError
from bridge.result import RESULT_NAME, RESULT_ROOT

SCAN_INTERVAL_S = 60.0
FETCH_LIMIT_BYTES = 4 * 1024**3

_SCANNED = "refs/scanned/"
_BRANCH = "refs/branch/"
_KEPT = "refs/kept/"
_KEPT_COUNT = 8
_TIDY_EVERY = 500
_PLAIN_LINE = re.compile(
    rb"\[(core|extensions)\]"
    rb"|\t(bare|filemode|ignorecase|objectformat|precomposeunicode|repositoryformatversion|symlinks)"
    rb" = [a-z0-9]+",
    re.IGNORECASE,
)
_OWN_SPECS = tuple(f"+{prefix}*:{prefix}*" for prefix in (refs.INBOX, refs.CLAIMS, refs.RESULTS))
_SCAN_SPECS = tuple(
    f"+{pattern}:{_SCANNED}{pattern.removeprefix('refs/heads/')}"
    for pattern in (*refs.BRANCH_PATTERNS, f"{refs.BRANCH_CLAIMS}*", f"{refs.BRANCH_RESULTS}*")
)


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


class Mirror:
    """The local copy of one remote's queue.

    Args:
        directory: The bare repository; made when missing, replaced when broken.
        remote: Address of the bus.
        timeout_s: Deadline of one fetch.
        limit_bytes: A fetch that brings more than this is ended.
        scan_interval_s: Seconds between scans of the request branches.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        directory: Path,
        remote: str,
        *,
        timeout_s: float = 300.0,
        limit_bytes: int = FETCH_LIMIT_BYTES,
        scan_interval_s: float = SCAN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.git = Git(directory, timeout_s=timeout_s)
        self.remote = remote
        self._limit_bytes = limit_bytes
        self._scan_interval_s = scan_interval_s
        self._clock = clock
        self._scanned_at: float | None = None
        self._looks = 0
        self._over_limit = False
        # (nonce, request commit, branch tip) -> whether that is an open request; none of these ever changes.
        self._open: dict[tuple[str, str, str], bool] = {}

    def refresh(self) -> list[Pending]:
        """Look at the remote and return what is pending, oldest first.

        Raises:
            RemoteUnreachable: The remote did not answer.
            BusError: The remote sends more than the mirror takes.
        """
        self._over_limit = False
        try:
            return self._look()
        except BusError:
            if self._over_limit:
                raise
            # Whose fault was it? A remote that lists its refs is well, so the mirror is not.
            self._rebuild(self._probe())
            return self._look()

    def claims(self) -> dict[str, Held]:
        """Claims by nonce, as of the last `refresh`; the bridge's own ref wins over a claim branch."""
        claims = {}
        for local, prefix in (
            (f"{_SCANNED}mac-bridge-claims/", refs.BRANCH_CLAIMS),
            (refs.CLAIMS, refs.CLAIMS),
        ):
            for ref, commit in self.git.refs(local).items():
                if nonce := refs.nonce_of(ref, local):
                    claims[nonce] = Held(prefix + nonce, commit)
        return claims

    def _look(self) -> list[Pending]:
        if not (self.git.directory / "HEAD").exists() or not self._is_plain():
            self._rebuild(self._probe())
        self._fetch(_OWN_SPECS)
        now = self._clock()
        if self._scanned_at is None or now - self._scanned_at >= self._scan_interval_s:
            self._fetch(_SCAN_SPECS)
            self._scanned_at = now
        self._looks += 1
        pending = self._pending()
        self._keep(pending)
        if self._looks % _TIDY_EVERY == 0:
            self.git.run("gc", "--quiet", "--prune=now")
        return pending

    def _pending(self) -> list[Pending]:
        answered = self._answered_elsewhere()
        found: dict[str, Pending] = {}
        for ref, commit in self.git.refs(refs.INBOX).items():
            nonce = refs.nonce_of(ref, refs.INBOX)
            if nonce and nonce not in answered and self._is_open(nonce, commit):
                found[nonce] = Pending(nonce, commit, None)
        for local, commit in self.git.refs(_SCANNED).items():
            ref = "refs/heads/" + local.removeprefix(_SCANNED)
            named = refs.parse_request_ref(ref)
            if named is None or named.nonce in answered or named.nonce in found:
                continue
            if self._is_request_branch(named.nonce, commit):
                found[named.nonce] = Pending(named.nonce, commit, ref)
        return [found[nonce] for nonce in sorted(found)]

    def _answered_elsewhere(self) -> set[str]:
        """Nonces with a result that is not on their branch."""
        answered = set()
        for prefix in (refs.RESULTS, f"{_SCANNED}mac-bridge-results/"):
            answered |= {nonce for ref in self.git.refs(prefix) if (nonce := refs.nonce_of(ref, prefix))}
        return answered

    def _is_open(self, nonce: str, commit: str) -> bool:
        """Whether an inbox entry has no result on its branch (somebody may have put an answered one back)."""
        key = (nonce, commit, "")
        if key not in self._open:
            try:
                branch = bound_manifest(read_request(self.git, commit), nonce).result_ref
            except (ManifestError, BusError):
                return True  # refused, with its reason, by whoever checks it
            # The star makes an absent branch an empty answer instead of an error.
            self._fetch([f"+{branch}*:{_BRANCH}{nonce}*"])
            tip = self.git.refs(f"{_BRANCH}{nonce}").get(f"{_BRANCH}{nonce}")
            self._open[key] = tip is None or not self._holds_result(nonce, tip)
        return self._open[key]

    def _is_request_branch(self, nonce: str, tip: str) -> bool:
        """Whether a scanned branch ends in an open request (and not in a result or somebody's own commit)."""
        key = (nonce, tip, tip)
        if key not in self._open:
            try:
                bound_manifest(read_request(self.git, tip), nonce)
                self._open[key] = not self._holds_result(nonce, tip)
            except (ManifestError, BusError):
                self._open[key] = False
        return self._open[key]

    def _holds_result(self, nonce: str, tip: str) -> bool:
        return self.git.kind_and_size(f"{tip}:{RESULT_ROOT}/{nonce}/{RESULT_NAME}")[0] == "blob"

    def _keep(self, pending: list[Pending]) -> None:
        """Hold on to what is pending, and to the last few requests: the next one may share their workload."""
        kept = self.git.refs(_KEPT)
        wanted = {_KEPT + request.nonce: request.commit for request in pending}
        finished = sorted(ref for ref in kept if ref not in wanted)
        lines = [f"update {ref} {commit}\n" for ref, commit in wanted.items() if kept.get(ref) != commit]
        lines += [f"delete {ref}\n" for ref in finished[:-_KEPT_COUNT]]
        if lines:
            self.git.run("update-ref", "--stdin", input="".join(lines).encode())

    def _fetch(self, specs: tuple[str, ...] | list[str]) -> None:
        self.git.fetch(self.remote, specs, depth=2, prune=True, guard=self._too_much)

    def _too_much(self) -> str | None:
        size = 0
        for file in (self.git.directory / "objects" / "pack").glob("tmp_*"):
            with contextlib.suppress(FileNotFoundError):
                size += file.stat().st_size
        if size > self._limit_bytes:
            self._over_limit = True
            return f"{without_credentials(self.remote)} sends more than {self._limit_bytes} bytes"
        return None

    def _probe(self) -> dict[str, str]:
        parent = self.git.directory.parent
        parent.mkdir(parents=True, exist_ok=True)
        return Git(parent, timeout_s=60.0).ls_remote(self.remote)

    def _rebuild(self, found: dict[str, str]) -> None:
        directory = self.git.directory
        shutil.rmtree(directory, ignore_errors=True)
        sha256 = any(len(commit) == 64 for commit in found.values())
        Git(directory.parent).run(
            *("init", "--quiet", "--bare", "--template="),
            *(f"--object-format={'sha256' if sha256 else 'sha1'}", str(directory)),
        )
        self._scanned_at = None
        self._open.clear()

    def _is_plain(self) -> bool:
        """Whether the configuration says only what `git init` writes: git would obey whatever else."""
        try:
            lines = (self.git.directory / "config").read_bytes().splitlines()
        except FileNotFoundError:
            return False
        return all(_PLAIN_LINE.fullmatch(line) for line in lines)
