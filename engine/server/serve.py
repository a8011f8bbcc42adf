"""A server from its options to its end: checks, the scheduler, uvicorn, and a graceful shutdown."""

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn

from engine.errors import ConfigurationError, GenerationError, InputError, ModelNotHere
from engine.external_engines.loops import check_engine
from engine.registry import ModelEntry, Places, Registry, check_located, fetch, locate
from engine.server.app import AccessRules, BoundedProtocol, bare_app, digest, new_app
from engine.server.metrics import Metrics
from engine.server.scheduler import ModelFinder, Scheduler, SchedulerLimits
from engine.server.service import RequestLimits, Service
from engine.server.sessions import LoadedModel

SHORTEST_KEY = 16
ABANDON_S = 5.0  # for telling requests that they were abandoned
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class ServerSettings:
    """What the command line can set about a server; see its help."""

    host: str = "127.0.0.1"
    port: int = 8080
    keys: tuple[str, ...] = ()
    metrics_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    largest_body: int = 2**20
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    grace_s: float = 30.0
    download: bool = False
    log_content: bool = False

    def check(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"--port must lie in 0 to 65535, not {self.port}")
        if self.metrics_keys and not self.keys:
            text = "--metrics-key-file needs API keys: without one the metrics are open to this machine"
            raise ConfigurationError(text)
        if (shortest := min(map(len, self.keys + self.metrics_keys), default=SHORTEST_KEY)) < SHORTEST_KEY:
            text = f"an API key of {shortest} characters can be guessed; give at least {SHORTEST_KEY}"
            raise ConfigurationError(text)
        if not self.keys and not self.local:
            text = f"--host {self.host} lets other machines in, and there is no API key"
            raise ConfigurationError(f"{text}: set KAKEYA_API_KEY or give --api-key-file")
        if "*" in self.allowed_origins and not self.keys:
            raise ConfigurationError("--allow-origin '*' lets any web page ask; that needs an API key")
        limits, requests = self.limits, self.request_limits
        least: dict[str, tuple[float | None, float]] = {
            "--max-body in bytes": (self.largest_body, 1),
            "--max-tokens": (requests.max_tokens, 1),
            "--default-tokens": (requests.default_tokens, 1),
            "--parallel": (limits.parallel, 1),
            "--queue": (requests.queue, 0),
            "--models": (limits.models, 1),
            "--cache-sessions": (limits.sessions, 0),
            "--cache-mib in bytes": (limits.session_bytes, 0),
            "--cache-seconds": (limits.session_s, 0),
            "--cache-dir-mib in bytes": (limits.disk_bytes, 1),
            "--cache-write-mib-per-hour in bytes": (limits.hourly_bytes, 0),
            "--prefill-chunk": (limits.chunk, 1),
            "--grace": (self.grace_s, 0),
        }
        for name, (value, bound) in least.items():
            if value is not None and not value >= bound:  # true of nan, too
                raise ConfigurationError(f"{name} must be at least {bound}, not {value}")
        if not math.isfinite(self.grace_s):
            raise ConfigurationError(f"--grace must be a number of seconds, not {self.grace_s}")

    @property
    def local(self) -> bool:
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def rules(self) -> AccessRules:
        names = (self.host, *map(str.lower, self.allowed_hosts))
        return AccessRules(
            keys=tuple(map(digest, self.keys)),
            metrics_keys=tuple(map(digest, self.metrics_keys)),
            hosts=names if self.local else (),
            origins=self.allowed_origins,
            largest_body=self.largest_body,
        )


def check_registry(registry: Registry, places: Places) -> Iterator[str]:
    """Check each model that is here without loading it; yield a line for each, then raise the first fault."""
    fault: InputError | None = None
    for entry in registry.entries:
        try:
            located = locate(entry, places)
            check_located(located)
            if entry.engine is not None:
                check_engine(entry.engine, *located.external)
            engine = f", engine {entry.engine}" if entry.engine else ""
            yield f"{entry.name}: {located.target}, drafter {located.drafter or 'none'}{engine}"
        except InputError as error:
            yield f"{entry.name}: {error}"
            if fault is None and not isinstance(error, ModelNotHere):
                fault = type(error)(f"the model {entry.name} cannot be used: {error}")
    if fault is not None:
        raise fault


def model_finder(places: Places, *, download: bool) -> ModelFinder:
    """Make what finds the models of a registry; `download` fetches missing ones when they are loaded."""

    def find(entry: ModelEntry) -> Callable[[], LoadedModel]:
        located = None if download else locate(entry, places)

        def load() -> LoadedModel:
            found = located or fetch(entry, places)
            check_located(found)
            return LoadedModel.load(found)

        return load

    return find


class HttpServer(uvicorn.Server):
    """uvicorn with a graceful shutdown that also ends requests, and without a signal to itself at the end."""

    def __init__(self, config: uvicorn.Config, service: Service, grace_s: float) -> None:
        super().__init__(config)
        self.service, self._grace_s = service, grace_s
        self._loop: asyncio.AbstractEventLoop | None = None  # once it serves
        self._signals = 0
        self.on_start: Callable[[], None] = lambda: None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM begin the shutdown, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal's handler
        """Begin the shutdown; a second signal fails the requests that still run, a third drops them."""
        self._signals += 1
        if self._signals == 2 and self._loop is not None:
            self._loop.call_soon_threadsafe(self._abandon)
        self.should_exit, self.force_exit = True, self._signals > 2

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Admit nothing new, let requests finish, and fail those that take longer than the grace."""
        self.service.closing = True
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._abandon)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _abandon(self) -> None:
        if self.service.scheduler.healthy:
            self.service.scheduler.abandon()


def serve(registry: Registry, settings: ServerSettings, ready: Callable[[str, int], None]) -> None:
    """Serve until a signal stops it; `ready` gets address and port when requests are accepted."""
    settings.check()
    find = model_finder(Places.of_machine(), download=settings.download)
    with closing(_listening(settings)) as listening, running_server(registry, settings, find) as server:
        host, port = listening.getsockname()[:2]
        server.on_start = partial(ready, str(host), int(port))  # signals are handled by then
        server.run(sockets=[listening])
        if not server.service.scheduler.healthy:
            raise GenerationError("the engine's thread died; the log says why")


@contextmanager
def running_server(registry: Registry, settings: ServerSettings, find: ModelFinder) -> Iterator[HttpServer]:
    """Make a server that has its default model in memory; the caller runs it, and picks the socket."""
    scheduler = Scheduler(find, settings.limits)
    service = Service(registry, scheduler, settings.request_limits)
    metrics = Metrics(lambda: scheduler.stats, lambda: service.admitted)
    scheduler.start()
    try:
        preload(scheduler, registry)
        config = uvicorn.Config(
            new_app(service, metrics, settings.rules, log_content=settings.log_content),
            http=BoundedProtocol,
            lifespan="on",
            log_level=logging.WARNING,
            access_log=False,
            use_colors=False,  # else escape codes in logs of CI: uvicorn does not know the variable CI
            server_header=False,
            timeout_graceful_shutdown=int(settings.grace_s + ABANDON_S) + 1,
        )
        server = HttpServer(config, service, settings.grace_s)
        scheduler.on_death = partial(setattr, server, "should_exit", True)
        yield server
    finally:
        scheduler.stop()


def openapi_document() -> dict[str, Any]:
    """Make the published OpenAPI document, without a server."""
    unused: Any = None  # no route is called
    return bare_app(unused, unused, log_content=False).openapi()


def preload(scheduler: Scheduler, registry: Registry) -> None:
    """Load the default model, so that the first request does not wait for it; raise EngineError."""
    lease = scheduler.lease(registry.entry(registry.default))
    try:
        lease.granted.result()
    finally:
        scheduler.release(lease)


def _listening(settings: ServerSettings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        # asyncio turns Nagle's algorithm off where the protocol is named; chunks would wait for it otherwise
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.host, settings.port))
        listening.listen(512)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise ConfigurationError(f"cannot listen on {where}: {error.strerror}") from None
    return listening
