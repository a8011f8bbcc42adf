"""The real server in this process, in a thread of its own, for as long as a block lasts; asked over HTTP.

It listens for this machine alone and has a key that nobody else knows. What it answers is for others to
judge.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from time import monotonic, sleep

from engine.evaluation.http import Client, ServerFault, listening
from engine.registry import Registry
from engine.server.scheduler import ModelFinder
from engine.server.serve import ServerSettings, running_server

GRACE_S = 10.0  # for what is still decoded when the end is asked for
ENDED_S = 3 * GRACE_S
LOOK_S = 0.02


@contextmanager
def served(
    registry: Registry,
    serving: ServerSettings,
    find: ModelFinder,
    *,
    transport: str | None = None,
) -> Iterator[Client]:
    """Run a server, and end it as a signal would.

    Args:
        registry: the models it offers; the default one is loaded before the block begins.
        serving: its switches; where it listens, its keys and its grace are set here.
        find: finds models, in the engine's thread.
        transport: see `engine.evaluation.http.listening`.

    Yields:
        A client with the key.

    Raises:
        EngineError: it cannot listen, or the model cannot be loaded.
        ServerFault: it did not come up, or did not end.
    """
    key = secrets.token_urlsafe(24)
    serving = replace(serving, keys=(key,), grace_s=GRACE_S)
    serving.check()
    with (
        listening(transport) as (place, address),
        running_server(registry, serving, find) as server,
    ):
        failed: list[BaseException] = []

        def run() -> None:
            try:
                server.run(sockets=[place])
            except BaseException as error:
                failed.append(error)

        thread = Thread(target=run, name="http", daemon=True)
        thread.start()
        try:
            _wait(lambda: server.started or not thread.is_alive())
            if not server.started:
                raise ServerFault(f"the server did not come up: {failed or f'not in {ENDED_S:.0f} s'}")
            yield Client(address, key)
        finally:
            server.should_exit = True
            thread.join(ENDED_S)
    if thread.is_alive() or failed:
        raise ServerFault(f"the server did not end in an orderly way: {failed or f'not in {ENDED_S:.0f} s'}")


def _wait(there: Callable[[], bool]) -> None:
    """Wait until something is there, or for long enough."""
    until = monotonic() + ENDED_S
    while not there() and monotonic() < until:
        sleep(LOOK_S)
