"""The engine's thread: everything that touches arrays happens here, a turn at a time.

    ask for a model ──► leases, first come first served ──► loaded ──► the request is prepared elsewhere
    submit its work ──► waiting ──► active, at most so many ──► turns, one after the other ──► ended

Every active request gets a turn (a chunk of its prompt, or a round) before any gets its next one, so a short
question is answered while a long one is on its way. A model is loaded when somebody asks for it; where there
is no room, after the requests that use another one have ended, and nobody who asks later overtakes. A request
that is cancelled, or fails, leaves everybody else's alone.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread
from time import perf_counter

import mlx.core as mx

from engine.errors import EngineError, GenerationError
from engine.registry.entries import ModelEntry
from engine.server.schema import ShuttingDownError
from engine.server.sequence import (
    DecodeFailed,
    DecodeFinished,
    DecodeRequest,
    DecodingSequence,
    EventCallback,
    ExternalSequence,
    draft_length_for,
)
from engine.server.sessions import LoadedModel, SessionCache, close_quietly

logger = logging.getLogger(__name__)
IDLE_S = 1.0  # the thread wakes so often without work, to close what nobody uses
TELL_S = 0.2  # figures are so old at most while there is work


ModelFinder = Callable[[ModelEntry], Callable[[], LoadedModel]]


@dataclass(frozen=True)
class SchedulerLimits:
    """How much is done and kept at once.

    Attributes:
        parallel: requests that take turns.
        models: models in memory.
        sessions: idle sessions, kept for the next turn of a conversation.
        session_bytes: of all idle sessions; None for no bound.
        session_s: seconds after which an idle session is closed.
        chunk: prompt positions a turn.
    """

    parallel: int = 4
    models: int = 1
    sessions: int = 8
    session_bytes: int | None = None
    session_s: float = 600.0
    chunk: int = 512


@dataclass(frozen=True)
class SchedulerStats:
    """What the thread is doing, as of its last turn.

    Attributes:
        active: requests that take turns.
        waiting: requests that wait for theirs.
        models: names of loaded models.
        sessions: idle sessions.
        active_bytes: keys and values of active requests.
        idle_bytes: … of idle sessions.
        memory_bytes: arrays that are in use, models included.
    """

    active: int = 0
    waiting: int = 0
    models: tuple[str, ...] = ()
    sessions: int = 0
    active_bytes: int = 0
    idle_bytes: int = 0
    memory_bytes: int = 0


@dataclass(eq=False)
class ModelLease:
    """Somebody's wish to use a model, and then the right to."""

    entry: ModelEntry
    granted: "Future[LoadedModel]" = field(default_factory=Future)


@dataclass(eq=False)
class DecodeJob:
    """A request in the thread's hands, and with it its lease."""

    work: DecodeRequest
    lease: ModelLease
    deliver: EventCallback
    submitted: float = field(default_factory=perf_counter)
    cancelled: Flag = field(default_factory=Flag)


class Scheduler:
    """The thread, and the only way to it."""

    def __init__(
        self, find: ModelFinder, limits: SchedulerLimits, on_death: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare; `start` starts it.

        Args:
            find: from an entry of the registry to what loads it; raises EngineError where it cannot be had,
                and takes no time.
            limits: how much is done and kept at once.
            on_death: called where the thread ends by a bug of ours.
        """
        self._find, self._limits, self.on_death = find, limits, on_death
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._leases: deque[ModelLease] = deque()  # wishes
        self._held: dict[str, int] = {}  # leases granted, by model
        self._models: dict[str, LoadedModel] = {}  # the least recently asked for first
        self._waiting: deque[DecodeJob] = deque()
        self._active: dict[DecodeJob, DecodingSequence | ExternalSequence] = {}
        self._sessions = SessionCache(limits.sessions, limits.session_bytes, limits.session_s)
        self._stopping = False
        self._died: BaseException | None = None
        self._gate, self._over = Lock(), False  # nothing is asked any more
        self._told = 0.0
        self.figures = SchedulerStats()
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is active, close what is open, and end the thread. Stopping twice does nothing."""
        self._calls.put(self._stop)
        self._thread.join()

    def abandon(self) -> None:
        """End every request, with ShuttingDownError; the thread goes on."""
        self._ask(self._abandon)

    @property
    def healthy(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive() and self._died is None

    def lease(self, entry: ModelEntry) -> ModelLease:
        """Ask for a model; `release` is due in any case.

        Raises:
            GenerationError: the thread has ended; so do `submit`'s.
        """
        wish = ModelLease(entry)
        wish.granted.set_running_or_notify_cancel()  # from now on it is answered, wanted or not
        self._ask(partial(self._leases.append, wish))
        return wish

    def release(self, lease: ModelLease) -> None:
        """The model is not needed any more, or not wanted any more."""
        self._calls.put(partial(self._release, lease))

    def submit(self, lease: ModelLease, work: DecodeRequest, deliver: EventCallback) -> DecodeJob:
        """Have something decoded.

        Args:
            lease: granted; released by the thread when the request has ended, and by nobody else.
            work: what to do.
            deliver: called in the engine's thread with each event; the last is Ended or Failed, unless it is
                cancelled.
        """
        job = DecodeJob(work, lease, deliver)
        self._ask(partial(self._waiting.append, job))
        return job

    def _ask(self, call: Callable[[], None]) -> None:
        """Have something done by the thread.

        Raises:
            GenerationError: it does nothing any more.
        """
        with self._gate:
            if self._over:
                raise GenerationError("the engine's thread has ended")
            self._calls.put(call)

    def _release(self, lease: ModelLease) -> None:
        if lease in self._leases:
            self._leases.remove(lease)
        elif lease.granted.exception() is None:
            self._held[lease.entry.name] -= 1

    def _run(self) -> None:
        try:
            while self._listen():
                self._grant()
                self._admit()
                self._turns()
                self._sessions.expire(perf_counter())
                self._tell()
        except BaseException as error:
            self._died = error
            logger.exception("the engine's thread died")
            self.on_death()
        finally:
            with self._gate:
                self._over = True
            self._listen()  # to what was asked before that
            self._fail_all(self._last_words())
            self._close()

    def _listen(self) -> bool:
        """Take in what others have asked for; wait for it where there is nothing else to do.

        Returns:
            Whether the thread is to go on.
        """
        try:
            if not self._active and not self._over:
                self._calls.get(timeout=IDLE_S)()
            while True:
                self._calls.get_nowait()()
        except Empty:
            return not self._stopping

    def _grant(self) -> None:
        """Give models to those who asked first."""
        while self._leases:
            wish = self._leases[0]
            model = self._models.get(wish.entry.name) or self._load(wish)
            if model is None and not wish.granted.done():
                return  # until what is in use is not any more
            self._leases.popleft()
            if model is not None:
                self._models[wish.entry.name] = self._models.pop(wish.entry.name)
                self._held[wish.entry.name] = self._held.get(wish.entry.name, 0) + 1
                wish.granted.set_result(model)

    def _load(self, wish: ModelLease) -> LoadedModel | None:
        """Load the model somebody asked for; None where there is no room yet, or it cannot be loaded."""
        name = wish.entry.name
        try:
            load = self._find(wish.entry)  # what cannot be had costs nobody anything
            if len(self._models) >= self._limits.models:
                unused = [each for each in self._models if not self._held.get(each)]
                if not unused:
                    return None
                self._unload(unused[0])
            started = perf_counter()
            logger.info("loading %s", name)
            self._models[name] = model = load()
        except Exception as error:
            wish.granted.set_exception(error)
            return None
        logger.info("loaded %s in %.1f s", name, perf_counter() - started)
        return model

    def _unload(self, name: str) -> None:
        logger.info("unloading %s", name)
        self._sessions.close(name)
        del self._models[name]
        mx.clear_cache()

    def _admit(self) -> None:
        """Let waiting requests in, as long as there is room."""
        while self._waiting and len(self._active) < self._limits.parallel:
            job = self._waiting.popleft()
            if job.cancelled.is_set():
                self._release(job.lease)
                continue
            try:
                self._active[job] = self._begin(job)
            except Exception as error:
                self._fail(job, error)

    def _begin(self, job: DecodeJob) -> DecodingSequence | ExternalSequence:
        work, model = job.work, job.lease.granted.result()
        model.check(work)
        if model.guest is not None:
            return ExternalSequence(work, model.target, model.guest, job.submitted)
        kept = self._sessions.take(model.key(work), work.prompt, partial(model.open_session, work))
        return DecodingSequence(
            work,
            model.target,
            kept,
            draft_length=draft_length_for(work, kept, partial(model.new_draft_length, work, repeatable=True)),
            chunk=self._limits.chunk,
            submitted=job.submitted,
            why_off=model.why_off(work),
        )

    def _turns(self) -> None:
        """Everybody's turn; by itself, so that no name of the last one's outlives it while nobody follows."""
        for job, sequence in list(self._active.items()):
            self._turn(job, sequence)

    def _turn(self, job: DecodeJob, sequence: DecodingSequence | ExternalSequence) -> None:
        try:
            event = None if job.cancelled.is_set() else sequence.turn()
            if event is None or isinstance(event, DecodeFinished):
                sequence.close()
        except Exception as error:
            del self._active[job]
            self._fail(job, error)
            if sequence.kept is not None:
                close_quietly(sequence.kept)
            return
        if event is None or isinstance(event, DecodeFinished):
            del self._active[job]
            self._release(job.lease)
            if sequence.kept is not None:
                self._sessions.give_back(sequence.kept, perf_counter())
        if event is not None:
            job.deliver(event)

    def _fail(self, job: DecodeJob, error: Exception) -> None:
        if not isinstance(error, EngineError):
            logger.error("a request failed", exc_info=error)
        self._release(job.lease)
        job.deliver(DecodeFailed(error))

    def _tell(self) -> None:
        """Bring the figures up to date, now and then while there is work."""
        now = perf_counter()
        if self._active and now - self._told < TELL_S:
            return
        self._told = now
        self.figures = SchedulerStats(
            active=len(self._active),
            waiting=len(self._waiting) + len(self._leases),
            models=tuple(self._models),
            sessions=len(self._sessions),
            active_bytes=sum(sequence.nbytes for sequence in self._active.values()),
            idle_bytes=self._sessions.nbytes,
            memory_bytes=int(mx.get_active_memory()),
        )

    def _stop(self) -> None:
        self._stopping = True

    def _last_words(self) -> EngineError:
        if self._died is None:
            return ShuttingDownError("the server is shutting down")
        return GenerationError("the engine's thread died; the server's log says why")

    def _abandon(self) -> None:
        """End what goes on, and what waits."""
        self._fail_all(self._last_words())
        for job in self._active:
            job.cancelled.set()

    def _fail_all(self, error: EngineError) -> None:
        for job in self._active:
            job.deliver(DecodeFailed(error))
        for job in self._waiting:
            self._fail(job, error)
        for wish in self._leases:
            wish.granted.set_exception(error)
        self._waiting.clear()
        self._leases.clear()

    def _close(self) -> None:
        """Arrays end where they were made."""
        for sequence in self._active.values():
            if sequence.kept is not None:
                close_quietly(sequence.kept)
        self._active.clear()
        self._sessions.close()
        self._models.clear()
        mx.clear_cache()
        self._tell()
        mx.clear_streams()  # of this thread; mlx aborts the process at its end where one that loaded is left
