"""The engine's thread: everything that touches arrays happens here, a turn at a time.

A request leases a model, is prepared on another thread, and submitted. A turn computes chunks of prompts,
then one round of every batch: requests join one with their first token and leave it with their last. Leases
are granted in order: where too many models are loaded, all wait.
"""

import gc
import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread
from time import perf_counter
from typing import Any

import mlx.core as mx

from engine.batch_decode import ContinuousBatch
from engine.cache.batch import layout_of
from engine.decode import SequenceDecoder, Step
from engine.errors import EngineError, GenerationError
from engine.external_engines.engine import DraftCounts
from engine.registry import ModelEntry
from engine.server.disk_cache import DiskCache, DiskLimits, DiskStats
from engine.server.prompt_cache import PromptCache
from engine.server.schema import CacheTier, ShuttingDownError
from engine.server.sequence import (
    DecodeFailed,
    DecodeFinished,
    DecodeRequest,
    Event,
    RequestDecoder,
    decode_externally,
)
from engine.server.sessions import LoadedModel

logger = logging.getLogger(__name__)
IDLE_S = 1.0  # how often the idle thread wakes to let go of what expired
CHUNK_DIVISOR = 4  # of the chunk, while several prompts wait
STATS_S = 0.2  # how old the statistics may be while there is work

# turns an entry of the registry into what loads it; raises at once where files are missing
ModelFinder = Callable[[ModelEntry], Callable[[], LoadedModel]]


@dataclass(frozen=True)
class SchedulerLimits:
    """How much is done and kept at once."""

    parallel: int | None = None  # requests that are decoded at once; None: for as many as there is memory
    models: int = 1  # in memory
    sessions: int = 32  # snapshots in the prompt cache, see there
    session_bytes: int | None = None  # … of all together; None: a part of the free memory
    session_s: float = 600.0  # … of each after its last use
    prompt_cache: bool = True  # False: none, neither in memory nor on disk
    cache_dir: Path | None = None  # where snapshots outlive the process; None: nowhere
    disk_bytes: int = DiskLimits.most_bytes
    hourly_bytes: int = DiskLimits.hourly_bytes  # written to it in any hour
    chunk: int = 512  # prompt positions a turn, of all requests together


@dataclass(frozen=True)
class SchedulerStats:
    """What the thread is doing, as of its last turn."""

    active: int = 0  # requests that are decoded
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
    choice_of: object = field(default_factory=object)  # the client's request, the same for all its choices
    submitted: float = field(default_factory=perf_counter)
    cancelled: Flag = field(default_factory=Flag)


@dataclass(eq=False)
class ActiveRequest:
    """A request that is decoded."""

    job: DecodeJob
    events: Generator[Event]  # of an external engine all of them, of ours those up to the first token
    decoder: RequestDecoder | None = None  # None with an external engine
    batch: ContinuousBatch | None = None  # once its first token is known
    caches: list[Any] = field(default_factory=list)  # those given to an external engine
    counts: DraftCounts = field(default_factory=DraftCounts)  # of one, with its drafter's caches

    @property
    def computes_prompt(self) -> bool:
        """Whether our engine has started with its prompt, and has no token yet."""
        return self.decoder is not None and self.decoder.prefilling and self.decoder.sequence is None

    @property
    def nbytes(self) -> int:
        if self.decoder is not None:
            return self.decoder.nbytes
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
        self._active: list[ActiveRequest] = []
        self._batches: dict[tuple[str, Any], ContinuousBatch] = {}  # by model and layout of the caches
        self._turns = 0
        self._cache = _prompt_cache(limits)
        self._stopping = False
        self._died: BaseException | None = None
        self._gate, self._closed = Lock(), False  # closed: no more calls are accepted
        self._updated = 0.0
        self.stats = SchedulerStats()
        self.parallel = limits.parallel or 1  # requests decoded at once, as far as is known
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
        self,
        lease: ModelLease,
        request: DecodeRequest,
        deliver: Callable[[Event], None],
        choice_of: object | None = None,
    ) -> DecodeJob:
        """Queue a request; the thread releases its granted lease when it has ended, and delivers its events.

        Unless the job is cancelled, the last is DecodeFinished or DecodeFailed. Of requests that wait, those
        go first that have the fewest choices decoded already.
        """
        job = DecodeJob(request, lease, deliver, choice_of or object())
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
            self.parallel = self._limits.parallel or max(each.parallel for each in self._models.values())
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
        while self._waiting:
            decoded = Counter(each.job.choice_of for each in self._active)
            job = min(self._waiting, key=lambda job: decoded[job.choice_of])  # of several the first
            most = self._limits.parallel or job.lease.granted.result().parallel
            if len(self._active) >= most:
                return
            self._waiting.remove(job)
            if job.cancelled.is_set():
                self._release(job.lease)
                continue
            try:
                self._active.append(self._begin(job))
            except Exception as error:
                self._fail(job, error)

    def _begin(self, job: DecodeJob) -> ActiveRequest:
        request, model = job.request, job.lease.granted.result()
        obstacle, external = model.check(request), model.external
        if external is not None and obstacle is None:
            caches, counts, drafter = list[Any](), DraftCounts(), model.external_drafter
            events = decode_externally(
                request, model.target, external, caches, counts, drafter=drafter, submitted=job.submitted
            )
            return ActiveRequest(job, events, caches=caches, counts=counts)
        decoder = model.open(
            request, self._cache, chunk=self._limits.chunk, submitted=job.submitted, obstacle=obstacle
        )
        return ActiveRequest(job, decoder.prefill(self._prompts), decoder)

    @cached_property
    def _prompts(self) -> mx.Stream:
        """Where prompts are computed; made in the thread that uses it."""
        return mx.new_stream(mx.default_device())

    def _take_turns(self) -> None:
        """In a function of its own, so that no local name keeps the last request's arrays alive."""
        for active in [each for each in self._active if each.job.cancelled.is_set()]:
            if self._end(active) and active.decoder is not None:
                self._save(active.decoder)
        for active in [each for each in self._active if each.decoder is None]:
            self._next_event(active)
        timed = not self._prefill()
        for key, batch in list(self._batches.items()):
            self._round(batch, timed=timed)
            if not batch.rows:
                batch.close()
                self._batches.pop(key, None)  # a batch that failed is out already

    def _prefill(self) -> int:
        """Compute a chunk of prompts: by turns those with the least left first, and the oldest first.

        Returns the positions computed.
        """
        self._turns += 1
        waiting = [each for each in self._active if each.decoder is not None and each.batch is None]
        if self._turns % 2:
            waiting.sort(key=_positions_left)
        for active in waiting:
            if active.decoder is not None and not active.decoder.prefilling:
                self._next_event(active)  # computes nothing; others learn what they share with it
        # so that a prompt that arrives now does not wait for long chunks of others
        size = self._limits.chunk if len(waiting) == 1 else max(self._limits.chunk // CHUNK_DIVISOR, 1)
        computed = 0
        for active in waiting:
            if active.decoder is None:
                continue
            active.decoder.chunk = size
            if active.computes_prompt and (computed < size or not _positions_left(active)):
                before = _positions_left(active)
                self._next_event(active)
                computed += before - _positions_left(active)
        return computed

    def _next_event(self, active: ActiveRequest) -> None:
        """Take the next event of a request that is in no batch."""
        try:
            event = next(active.events)
        except Exception as error:
            self._end(active, error)
            return
        active.job.deliver(event)
        decoder = active.decoder
        if isinstance(event, DecodeFinished):
            self._end(active)
        elif decoder is not None and decoder.sequence is not None and isinstance(event, Step):
            if event.finish is None:
                self._join(active, decoder.sequence)
            else:
                self._finish(active, decoder)

    def _join(self, active: ActiveRequest, sequence: SequenceDecoder) -> None:
        model = active.job.lease.granted.result()
        # sequences whose layers cannot be batched have a round each
        layout = layout_of(model.target.target.model, sequence.session.caches) or id(sequence)
        key = active.job.lease.entry.name, layout
        if key not in self._batches:
            self._batches[key] = ContinuousBatch(model.target.target, model.batch_draft_length)
        active.batch = self._batches[key]
        active.batch.add(sequence)

    def _round(self, batch: ContinuousBatch, *, timed: bool) -> None:
        members = {
            each.decoder.sequence: each for each in self._active if each.decoder and each.batch is batch
        }
        try:
            steps = batch.step(timed=timed) if members else []
        except Exception as error:  # of all of them
            batch.close()
            for active in members.values():
                active.batch = None
                self._end(active, error)
            self._batches = {key: each for key, each in self._batches.items() if each is not batch}
            return
        for sequence, step in steps:
            active = members[sequence]
            decoder = active.decoder
            if decoder is None:
                continue
            if isinstance(step, Exception):
                self._end(active, step)
                continue
            if step.finish is not None:
                batch.remove(sequence)  # its caches are in its session now, and can be counted
                active.batch = None
            active.job.deliver(decoder.record(step, len(steps)))
            if step.finish is not None:
                self._finish(active, decoder)

    def _finish(self, active: ActiveRequest, decoder: RequestDecoder) -> None:
        event = decoder.finished()
        if self._end(active):
            active.job.deliver(event)
            self._save(decoder)  # now that the client has its answer

    def _save(self, decoder: RequestDecoder) -> None:
        try:
            decoder.save()
        except Exception:
            logger.exception("a prompt is kept in memory alone")

    def _end(self, active: ActiveRequest, error: Exception | None = None) -> bool:
        """Let a request go that is complete, cancelled, or has failed; whether it has not failed."""
        self._active.remove(active)
        active.events.close()
        decoder, model = active.decoder, active.job.lease.granted.result()
        if decoder is not None:
            try:
                if active.batch is not None and decoder.sequence is not None:
                    active.batch.remove(decoder.sequence)
                if error is None:
                    decoder.keep()
            except Exception as own:
                if error is not None:  # the one that the client is told
                    logger.exception("a request that failed cannot leave its batch")
                error = error or own
            model.close(decoder)
        if error is None:
            self._release(active.job.lease)
        else:
            self._fail(active.job, error)
        return error is None

    def _fail(self, job: DecodeJob, error: Exception) -> None:
        if not isinstance(error, EngineError):
            logger.error("a request failed", exc_info=error)
        self._release(job.lease)
        job.deliver(DecodeFailed(error))

    def _fail_all(self) -> None:
        error: EngineError = ShuttingDownError("the server is shutting down")
        if self._died is not None:
            error = GenerationError("the engine's thread died; the server's log says why")
        for active in self._active:
            active.job.deliver(DecodeFailed(error))
            active.job.cancelled.set()
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
            active_bytes=sum(active.nbytes for active in self._active)
            + sum(batch.nbytes for batch in self._batches.values()),
            cached_bytes=self._cache.nbytes,
            cache_hits=dict(self._cache.hits),
            disk=self._cache.disk_stats,
            memory_bytes=int(mx.get_active_memory()),
        )

    def _close(self) -> None:
        """Free arrays in the thread that made them."""
        for batch in self._batches.values():
            batch.close()
        for active in self._active:
            if active.decoder is not None:
                active.job.lease.granted.result().close(active.decoder)
        self._batches.clear()
        self._active.clear()
        self._cache.close()
        self._cache.close_disk()
        self._models.clear()
        mx.clear_cache()
        self._update_stats()
        mx.clear_streams()  # mlx aborts the process at its end where a stream of this thread is left


def _positions_left(active: ActiveRequest) -> int:
    """Positions of the prompt that our engine has to compute."""
    return active.decoder.left if active.decoder is not None else 0
