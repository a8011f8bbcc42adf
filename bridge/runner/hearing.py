"""What a runner hears of the bus while it has a job running: whether the job shall stop, or one that waits.

Each time it also says that it is busy. Without its copy of the queue it would be deaf, and no heartbeat would
go out, so a broken one is made again beside the job.
"""

from __future__ import annotations

from collections.abc import Callable

from bridge.bus.mirror import Mirror
from bridge.errors import BusError, MachineError, RemoteUnreachable, described
from bridge.protocol.runner_info import Work
from bridge.runner.check import Checked
from bridge.runner.later import Later
from bridge.runner.waiting_cancels import WaitingCancels
from bridge.runner.wishes import Wishes

_MIRROR = "mirror"


class Hearing:
    """The hearing of one job, for its heartbeat.

    Args:
        mirror: The runner's copy of the queue.
        wishes: Who wants requests stopped.
        checked: The request, and what was found of it.
        waiting: Answers cancelled requests that wait.
        busy: Is told what the runner does.
        say: Takes one line for the owner.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        mirror: Mirror,
        wishes: Wishes,
        checked: Checked,
        waiting: WaitingCancels,
        *,
        busy: Callable[[Work], None],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._mirror = mirror
        self._wishes = wishes
        self._checked = checked
        self._waiting = waiting
        self._nonce = checked.pending.nonce
        self._busy = busy
        self._say = say
        self._clock = clock
        self._began = clock()
        self._later = Later(clock)

    def look(self) -> str | None:
        """Ask the remote: a sentence that says who wants the job stopped, or None.

        Raises:
            BusError: The remote did not answer, or the copy of the queue was broken; the next look may do.
            MachineError, OSError: As above.
        """
        try:
            wish = self._ask()
        except RemoteUnreachable:
            raise  # the next look may find it again
        except (BusError, MachineError, OSError) as error:
            if isinstance(error, BusError) or not self._mirror.git.directory.exists():
                self._mend(error)
            raise
        except Exception as error:  # a bug of ours must not end the heartbeat
            self._say(f"{self._nonce}: whether it is to stop is not known: {described(error)}")
            return None
        self._waiting.notice(self._wishes.of_others(self._nonce))
        preset = self._checked.preset.name if self._checked.preset is not None else ""
        self._busy(Work(nonce=self._nonce, preset=preset, elapsed_s=self._clock() - self._began))
        return wish

    def _ask(self) -> str | None:
        return self._wishes.ask(self._checked)

    def _mend(self, error: Exception) -> None:
        """Make the mirror again, ever more seldom."""
        if not self._later.is_due(_MIRROR):
            return
        self._later.put_off(_MIRROR)
        if self._mirror.mend(self._ask):
            self._say(f"{self._nonce}: the copy of the queue was made again: {described(error)}")
