"""Answer requests that wait and are cancelled while another job runs, in a thread beside it.

The heartbeat's look at the remote lists every cancel request. Each is tried once during a job; one that fails
or does not count is left to the request's turn. The thread ends with the job, before its result is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from bridge.bus.handles import Held
from bridge.errors import described


class WaitingCancels:
    """Cancel requests of other requests than the running one.

    Args:
        answer: Answers the request of a nonce as cancelled, if it waits and its cancel request counts.
        say: Takes one line for the owner.
    """

    def __init__(self, answer: Callable[[str], None], *, say: Callable[[str], None]) -> None:
        self._answer = answer
        self._say = say
        self._tried: set[Held] = set()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def notice(self, cancels: Mapping[str, Held]) -> None:
        """Begin to answer those that are new; called by the heartbeat.

        Args:
            cancels: By nonce, without that of the running request.
        """
        new = {nonce: held for nonce, held in cancels.items() if held not in self._tried}
        if not new or (self._thread is not None and self._thread.is_alive()):
            return
        self._tried |= set(new.values())
        self._thread = threading.Thread(target=self._work, args=(new,), name="waiting cancels", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the answer that is being given, and begin no other; the heartbeat has ended."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        self._tried.clear()
        self._ending.clear()

    def _work(self, new: Mapping[str, Held]) -> None:
        for nonce in sorted(new):
            if self._ending.is_set():
                return
            try:
                self._answer(nonce)
            except Exception as error:  # it has its turn when the job has ended
                self._say(
                    f"{nonce}: not cancelled while another job runs, retrying after it: {described(error)}"
                )
