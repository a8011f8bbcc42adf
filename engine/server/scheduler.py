"""The engine's thread: everything that touches arrays happens here, a turn at a time.

A request leases a model, is prepared on another thread, submitted, and decoded in turns (a chunk of its
prompt, or a round), round robin. Leases are granted in order: where too many models are loaded, all wait.
"""

import gc
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread
from time import perf_counter
from typing import Any

import mlx.core as mx

from engine.errors import EngineError, GenerationError
from engine.external_engines.engine import DraftCounts
from engine.registry import ModelEntry
from engine.server.disk_cache import DiskCache, DiskLimits, DiskStats
from engine.server.prompt_cache import CacheKey, PromptCache
from engine.server.schema import CacheTier, ShuttingDownError
from engine.server.sequence import (
    DecodeFailed,
    DecodeFinished,
    DecodeRequest,
    Event,
    decode_externally,
    decode_in_session,
)
from engine.server.sessions import LoadedModel, OpenSession

logger = logging.getLogger(__name__)
IDLE_S = 1.0  # how often the idle thread wakes to let go of what expired
STATS_S = 0.2  # how old the statistics may be while there is work

# turns an entry of the registry into what loads it; raises at once where files are missing
ModelFinder = Callable[[ModelEntry], Callable[[], LoadedModel]]


@dataclass(frozen=True)
class SchedulerLimits:
    """How much is done and kept at once."""

    parallel: int = 4  # requests that take turns
    models: int = 1  # in memory
    sessions: int = 32  # snapshots in the prompt cache, see there
    session_bytes: int | None = None  # … of all together; None: a part of the free memory
    session_s: float = 600.0  # … of each after its last use
    prompt_cache: bool = True  # False: none, neither in memory nor on disk
    cache_dir: Path | None = None  # where snapshots outlive the process; None: nowhere
    disk_bytes: int = DiskLimits.most_bytes
    hourly_bytes: int = DiskLimits.hourly_bytes  # written to it in any hour
    chunk: int = 512  # prompt positions a turn


@dataclass(frozen=True)
class SchedulerStats:
    """What the thread is doing, as of its last turn."""

    active: int = 0  # requests that take turns
    models: tuple[str, ...] = ()
    cached: int = 0  # snapshots in the prompt cache
    active_bytes: int = 0  # keys and values of active requests
    cached_bytes: int = 0  # … of the snapshots, those that requests and others hold too included
    cache_hits: Mapping[CacheTier, int] = field(default_factory=dict)  # requests that began from a snapshot
    disk: DiskStats = field(default_factory=DiskStats)
    memory_bytes: int = 0  # arrays in use, models included


@dataclass(eq=False)
class ModelLease:
    """The right to use a model, once `granted` has a result."""

    entry: ModelEntry
    granted: "Future[LoadedModel]" = field(default_factory=Future)


@dataclass(eq=False)
class DecodeJob:
    """A submitted request; it owns its lease."""

    request: DecodeRequest
    lease: ModelLease
    deliver: Callable[[Event], None]
    submitted: float = field(default_factory=perf_counter)
    cancelled: Flag = field(default_factory=Flag)


@dataclass
class ActiveSequence:
    """The events of a request that takes turns, and what holds its keys and values."""

    events: Generator[Event]
    opened: OpenSession | None = None  # None with an external engine
    caches: list[Any] = field(default_factory=list)  # those given to an external engine
    counts: DraftCounts = field(default_factory=DraftCounts)  # of one, with its drafter's caches

    @property
    def nbytes(self) -> int:
        if self.opened is not None:
            return self.opened.nbytes
        return sum(int(cache.nbytes) for cache in (*self.caches, *self.counts.caches))


def _prompt_cache(limits: SchedulerLimits) -> PromptCache:
    """Open the folder, too; ConfigurationError where it cannot be used."""
    if not limits.prompt_cache:
        return PromptCache(0, 0, 0)
    disk = None
    if limits.cache_dir is not None:
        disk = DiskCache(DiskLimits(limits.cache_dir, limits.disk_bytes, limits.hourly_bytes))
    return PromptCache(limits.sessions, limits.session_bytes, limits.session_s, disk)


class Scheduler:
    """The thread, and the only way to it."""

    def __init__(self, find: ModelFinder, limits: SchedulerLimits) -> None:
        self._find, self._limits = find, limits
        self.on_death: Callable[[], None] = lambda: None  # called when a bug of ours ends the thread
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._leases: deque[ModelLease] = deque()  # not granted yet
        self._leased: dict[str, int] = {}  # leases granted, by model
        self._models: dict[str, LoadedModel] = {}  # the least recently requested first
        self._waiting: deque[DecodeJob] = deque()
        self._active: dict[DecodeJob, ActiveSequence] = {}
        self._cache = _prompt_cache(limits)
        self._stopping = False
        self._died: BaseException | None = None
        self._gate, self._closed = Lock(), False  # closed: no more calls are accepted
        self._updated = 0.0
        self.stats = SchedulerStats()
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    # --- for other threads -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._calls.put(partial(setattr, self, "_stopping", True))
        self._thread.join()

    def abandon(self) -> None:
        """End every request with ShuttingDownError; the thread goes on."""
        self._call(self._fail_all)

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self._died is None

    def lease(self, entry: ModelEntry) -> ModelLease:
        """Ask for a model; call `submit` or `release`; raise GenerationError after the thread's end."""
        lease = ModelLease(entry)
        lease.granted.set_running_or_notify_cancel()  # a caller that gives up cannot cancel it
        self._call(partial(self._leases.append, lease))
        return lease

    def release(self, lease: ModelLease) -> None:
        self._calls.put(partial(self._release, lease))

    def submit(
        self, lease: ModelLease, request: DecodeRequest, deliver: Callable[[Event], None]
    ) -> DecodeJob:
        """Queue a request; the thread releases its granted lease when it has ended, and delivers its events.

        Unless the job is cancelled, the last is DecodeFinished or DecodeFailed.
        """
        job = DecodeJob(request, lease, deliver)
        self._call(partial(self._waiting.append, job))
        return job

    def _call(self, call: Callable[[], None]) -> None:
        with self._gate:
            if self._closed:
                raise GenerationError("the engine's thread has ended")
            self._calls.put(call)

    # --- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._process_calls():
                self._grant()
                self._admit()
                self._take_turns()
                self._cache.expire()
                self._update_stats()
        except BaseException as error:
            self._died = error
            logger.exception("the engine's thread died")
            self.on_death()
        finally:
            with self._gate:
                self._closed = True
            self._process_calls()  # those queued before that
            self._fail_all()
            self._close()

    def _process_calls(self) -> bool:
        """Run queued calls, waiting for one if there is no other work; whether the thread is to go on."""
        try:
            if not self._active and not self._closed:
                self._calls.get(timeout=IDLE_S)()
            while True:
                self._calls.get_nowait()()
        except Empty:
            return not self._stopping

    def _release(self, lease: ModelLease) -> None:
        if lease in self._leases:
            self._leases.remove(lease)
        elif lease.granted.exception() is None:
            self._leased[lease.entry.name] -= 1

    def _grant(self) -> None:
        """Grant leases in order, until one has to wait for a model that is in use."""
        while self._leases:
            lease = self._leases[0]
            name = lease.entry.name
            try:
                model = self._models.get(name) or self._load(lease.entry)
            except Exception as error:
                self._leases.popleft().granted.set_exception(error)
                continue
            if model is None:
                return
            self._leases.popleft()
            self._models[name] = self._models.pop(name, model)
            self._leased[name] = self._leased.get(name, 0) + 1
            lease.granted.set_result(model)

    def _load(self, entry: ModelEntry) -> LoadedModel | None:
        """Load a model; None where the limit is reached."""
        load = self._find(entry)  # before another model is unloaded for it
        if len(self._models) >= self._limits.models:
            unused = [each for each in self._models if not self._leased.get(each)]
            if not unused:
                return None
            logger.info("unloading %s", unused[0])
            self._cache.close(unused[0])
            del self._models[unused[0]]
            gc.collect()  # compiled graphs and engines refer to themselves
            mx.clear_cache()
        started = perf_counter()
        logger.info("loading %s", entry.name)
        model = load()
        logger.info("loaded %s in %.1f s", entry.name, perf_counter() - started)
        return model

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._limits.parallel:
            job = self._waiting.popleft()
            if job.cancelled.is_set():
                self._release(job.lease)
                continue
            try:
                self._active[job] = self._begin(job)
            except Exception as error:
                self._fail(job, error)

    def _begin(self, job: DecodeJob) -> ActiveSequence:
        request, model = job.request, job.lease.granted.result()
        obstacle, external = model.check(request), model.external
        if external is not None and obstacle is None:
            caches, counts, drafter = list[Any](), DraftCounts(), model.external_drafter
            events = decode_externally(
                request, model.target, external, caches, counts, drafter=drafter, submitted=job.submitted
            )
            return ActiveSequence(events, caches=caches, counts=counts)
        why_off = model.why_off(request)
        if obstacle is not None:
            logger.warning("%s: %s; decoding plainly", model.entry.name, obstacle)
            why_off = f"plain decoding: {obstacle}"
        opened = model.open_session(request)
        events = decode_in_session(
            request,
            model.target,
            opened.session,
            self._cache,
            opened.key,
            draft_length=opened.draft_length,
            chunk=self._limits.chunk,
            submitted=job.submitted,
            why_off=why_off,
            fallback_from=None if external is None else external.name,
        )
        return ActiveSequence(events, opened)

    def _take_turns(self) -> None:
        """In a function of its own, so that no local name keeps the last request's arrays alive."""
        for job, sequence in list(self._active.items()):
            self._take_turn(job, sequence)

    def _take_turn(self, job: DecodeJob, sequence: ActiveSequence) -> None:
        try:
            event = None if job.cancelled.is_set() else next(sequence.events)
            ended = event is None or isinstance(event, DecodeFinished)
            if ended:
                sequence.events.close()
                if sequence.opened is not None:
                    self._cache.add(sequence.opened.key, sequence.opened.session.snapshot())
        except Exception as error:
            del self._active[job]
            self._fail(job, error)
            if sequence.opened is not None:
                sequence.opened.close()
            return
        if ended:
            del self._active[job]
            self._release(job.lease)
            if sequence.opened is not None:
                job.lease.granted.result().close_session(job.request, sequence.opened)
        if event is not None:
            job.deliver(event)
        if ended and sequence.opened is not None:  # after the client has its answer
            self._save(sequence.opened.key, job.request.prompt)

    def _save(self, key: CacheKey, prompt: list[int]) -> None:
        try:
            self._cache.save(key, prompt)
        except Exception:
            logger.exception("a prompt is kept in memory alone")

    def _fail(self, job: DecodeJob, error: Exception) -> None:
        if not isinstance(error, EngineError):
            logger.error("a request failed", exc_info=error)
        self._release(job.lease)
        job.deliver(DecodeFailed(error))

    def _fail_all(self) -> None:
        error: EngineError = ShuttingDownError("the server is shutting down")
        if self._died is not None:
            error = GenerationError("the engine's thread died; the server's log says why")
        for job in self._active:
            job.deliver(DecodeFailed(error))
            job.cancelled.set()
        for job in self._waiting:
            self._fail(job, error)
        for lease in self._leases:
            lease.granted.set_exception(error)
        self._waiting.clear()
        self._leases.clear()

    def _update_stats(self) -> None:
        if self._active and perf_counter() - self._updated < STATS_S:
            return
        self._updated = perf_counter()
        self.stats = SchedulerStats(
            active=len(self._active),
            models=tuple(self._models),
            cached=len(self._cache),
            active_bytes=sum(sequence.nbytes for sequence in self._active.values()),
            cached_bytes=self._cache.nbytes,
            cache_hits=dict(self._cache.hits),
            disk=self._cache.disk_stats,
            memory_bytes=int(mx.get_active_memory()),
        )

    def _close(self) -> None:
        """Free arrays in the thread that made them."""
        for sequence in self._active.values():
            if sequence.opened is not None:
                sequence.opened.close()
        self._active.clear()
        self._cache.close()
        self._cache.close_disk()
        self._models.clear()
        mx.clear_cache()
        self._update_stats()
        mx.clear_streams()  # mlx aborts the process at its end where a stream of this thread is left
