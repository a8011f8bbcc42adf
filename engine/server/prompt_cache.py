"""The prompt cache: snapshots of sessions, for later requests and for others that run at the same time.

A request leaves two: where its prompt's conversation ends, and where its answer ended. One begins from the
snapshot that holds most of its prompt. Where layers can go back to any length, a snapshot serves every prompt
that shares a beginning with it; sliding windows and recurrent states cannot, and theirs serves prompts that
begin with all of it. There a third is left where a prompt parts from one that was kept: what both share, such
as a system prompt, is not computed a third time. For the engine's thread alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from engine.device import free_memory
from engine.server.disk_cache import SHORTEST, DiskCache, DiskStats
from engine.server.schema import CacheTier
from engine.session import SessionSnapshot, common_length

SHARED = 64  # tokens in common that are worth waiting for, or a snapshot where prompts part
PART = 4  # by default the cache holds one so-manieth of the memory that is free at its first entry


@dataclass(frozen=True)
class CacheKey:
    """What requests must have in common to begin from the same snapshots."""

    model: str  # its name in the registry; entries leave memory with it
    digest: str  # of all that changes the numbers, and of the API key's digest: see `LoadedModel.key`


@dataclass
class CacheEntry:
    """A snapshot in memory."""

    key: CacheKey
    snapshot: SessionSnapshot
    used: float  # when it was last found or added, by the cache's clock

    def covers(self, tokens: tuple[int, ...]) -> bool:
        """Whether a session that begins from it can go back to exactly these tokens."""
        held = self.snapshot.tokens
        return held[: len(tokens)] == tokens and self.snapshot.rewindable(len(held) - len(tokens))


class Found(NamedTuple):
    """A snapshot that saves a part of a prompt, and where it was."""

    snapshot: SessionSnapshot
    tier: CacheTier


@dataclass(eq=False)
class Prefill:
    """A prompt that is being computed."""

    key: CacheKey
    prompt: Sequence[int]
    stops: set[int]  # lengths at which it leaves snapshots
    done: int  # tokens computed

    def next_stop(self, end: int) -> int:
        return min((stop for stop in self.stops if self.done < stop < end), default=end)


class PromptCache:
    """Snapshots by key and tokens; those that were used least recently leave first."""

    def __init__(
        self,
        most: int,
        most_bytes: int | None,
        seconds: float,
        disk: DiskCache | None = None,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Hold ``most`` entries, 0 for no cache, of ``most_bytes`` together, each for so long after its last
        use. Bytes None: a `PART` of the memory that is free when the first one comes.
        """
        self._disk = disk
        self.hits: Counter[CacheTier] = Counter()  # requests that began from a snapshot
        self._most, self._most_bytes, self._seconds, self._clock = most, most_bytes, seconds, clock
        self._entries: list[CacheEntry] = []  # the least recently used first
        self._prefills: list[Prefill] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots; those that two of them hold are counted twice."""
        return sum(entry.snapshot.nbytes for entry in self._entries)

    def find(
        self, key: CacheKey, prompt: Sequence[int], empty: Callable[[], SessionSnapshot]
    ) -> Found | None:
        """Return the snapshot that saves the most of computing a prompt; None where none saves anything.

        A file is read into an ``empty`` snapshot where it saves more than those in memory.
        """
        best, saved = self._best(key, prompt)
        if self._disk is not None:
            file, count = self._disk.best(key.digest, prompt)
            if file is not None and count - saved >= SHORTEST:
                read = self._disk.read(file, empty())
                if read is not None and read.common(prompt) > saved:
                    self.add(key, read)
                    return self._hit(read, "disk")
        if best is None or not saved:
            return None
        self._touch(best)
        return self._hit(best.snapshot, "memory")

    def save(self, key: CacheKey, prompt: Sequence[int]) -> None:
        """Have a request that has ended outlive this process: write what it would begin from another time."""
        best, saved = self._best(key, prompt)
        if self._disk is not None and best is not None and saved:
            self._disk.save(key.digest, best.snapshot)

    def add(self, key: CacheKey, snapshot: SessionSnapshot) -> None:
        """Keep a snapshot, and none that it makes superfluous."""
        if not snapshot.tokens or not self._most:
            return
        for entry in self._of(key):
            if entry.covers(snapshot.tokens):
                self._touch(entry)
                return
        new = CacheEntry(key, snapshot, self._clock())
        for entry in self._of(key):
            if new.covers(entry.snapshot.tokens):
                self._entries.remove(entry)
        self._entries.append(new)
        if self._most_bytes is None:
            self._most_bytes = free_memory() // PART
        while len(self._entries) > self._most or self.nbytes > self._most_bytes:
            self._entries.pop(0)

    def coming(self, key: CacheKey, prompt: Sequence[int]) -> bool:
        """Whether a prefill under way is about to leave a snapshot that saves more of a prompt than any here.

        It is asked to leave one where the two part. A request that waits is no prefill: none waits for it.
        """
        held = self._best(key, prompt)[1]
        for prefill in self._prefills if self._most else ():
            if prefill.key != key:
                continue
            common = common_length(prefill.prompt[: max(prefill.stops, default=0)], prompt[:-1])
            worth = 1 if prefill.prompt == prompt else SHARED  # choices of one request have one prompt
            if common - held >= worth and prefill.done < common:
                prefill.stops.add(common)
                return True
        return False

    @contextmanager
    def prefill(self, key: CacheKey, prompt: Sequence[int], stable: int, done: int) -> Iterator[Prefill]:
        """Tell others of a prompt that is being computed, of which ``done`` tokens are there; ``stable`` of
        them probably begin the conversation's next prompt too.
        """
        others = [entry.snapshot.tokens for entry in self._of(key)]
        others += [tuple(each.prompt) for each in self._prefills if each.key == key]
        parting = max((common_length(each, prompt[:-1]) for each in others), default=0)
        wanted = (stable, parting if parting - done >= SHARED else 0) if self._most else ()
        stops = {stop for stop in wanted if stop > done}
        prefill = Prefill(key, prompt, stops, done)
        self._prefills.append(prefill)
        try:
            yield prefill
        finally:
            self._prefills.remove(prefill)

    def expire(self) -> None:
        since = self._clock() - self._seconds
        self._entries = [entry for entry in self._entries if entry.used > since]

    def close(self, model: str | None = None) -> None:
        """Let go of a model's snapshots, or of all."""
        self._entries = [entry for entry in self._entries if model not in {None, entry.key.model}]

    @property
    def disk_stats(self) -> DiskStats:
        return self._disk.stats if self._disk is not None else DiskStats()

    def close_disk(self) -> None:
        """Write what waits to be written."""
        if self._disk is not None:
            self._disk.close()

    def _hit(self, snapshot: SessionSnapshot, tier: CacheTier) -> Found:
        self.hits[tier] += 1
        return Found(snapshot, tier)

    def _best(self, key: CacheKey, prompt: Sequence[int]) -> tuple[CacheEntry | None, int]:
        """The entry that saves most of a prompt, and how many tokens."""
        own = [(entry.snapshot.common(prompt), entry) for entry in self._of(key)]
        count, best = max(own, key=lambda pair: pair[0], default=(0, None))
        return best, count

    def _of(self, key: CacheKey) -> list[CacheEntry]:
        return [entry for entry in self._entries if entry.key == key]

    def _touch(self, entry: CacheEntry) -> None:
        entry.used = self._clock()
        self._entries.remove(entry)
        self._entries.append(entry)
