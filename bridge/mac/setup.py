"""Setup, check and uninstall: the parts of a Mac, looked at one by one, brought there, or taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge.errors import MachineError
from bridge.mac.action import Action, Run, Write
from bridge.mac.options import Options
from bridge.mac.step import Look, State, Step
from bridge.mac.steps import steps

Say = Callable[[str], None]
SELF_TEST = ("the engine decodes with the shipped pair", "the runner's own checks")


@dataclass(frozen=True)
class Outcome:
    """What became of one part.

    Attributes:
        name: Of the part.
        look: How it stands in the end.
        done: What was done for it.
    """

    name: str
    look: Look
    done: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether the Mac can serve with it."""
        return self.look.state in (State.DONE, State.ADVICE)

    def as_json(self) -> dict[str, Any]:
        """For a JSON line."""
        return {"name": self.name, **asdict(self.look), "done": list(self.done)}


def check(options: Options, say: Say) -> list[Outcome]:
    """Look at every part; change nothing."""
    found = []
    for step in steps(options):
        outcome = Outcome(step.name, step.look())
        found.append(outcome)
        _tell(outcome, say)
    return found


def plan(options: Options, say: Say) -> list[Outcome]:
    """Say everything that setup would do on a Mac that has nothing yet, and how this machine stands."""
    found = []
    for step in steps(options):
        found.append(_would(step, step.actions(), say))
    say("self-test")
    for action in self_test(options):
        say(f"      would: {action.said}")
    return found


def plan_back(options: Options, say: Say) -> list[Outcome]:
    """Say everything that uninstall would do."""
    return [_would(step, step.undo(), say) for step in reversed(steps(options))]


def _would(step: Step, actions: Sequence[Action], say: Say) -> Outcome:
    outcome = Outcome(step.name, step.look(), tuple(action.said for action in actions))
    _tell(outcome, say)
    for action in actions:
        say(f"      would: {action.said}")
        for line in action.text.splitlines() if isinstance(action, Write) else ():
            say(f"             | {line}")
    return outcome


def set_up(options: Options, say: Say) -> list[Outcome]:
    """Bring every part there, and see that it works. What is done already is left alone."""
    found = []
    for step in steps(options):
        outcome = _brought(step, say)
        found.append(outcome)
        _tell(outcome, say)
        if step.stops and not outcome.is_ready:
            say("nothing after this makes sense before it is settled")
            return found
    if options.program.exists():
        found.append(_tested(options, say))
    return found


def take_back(options: Options, say: Say) -> list[Outcome]:
    """Undo every part, the last one first; models, policy and results stay."""
    found = []
    for step in reversed(steps(options)):
        undo = [action for action in step.undo() if options.sudo or not _is_administrators(action)]
        left = [action.said for action in step.undo() if not options.sudo and _is_administrators(action)]
        look = Look(State.DONE, step.name, "taken back" if undo else "left as it is")
        try:
            done = _all_done(undo, say)
        except MachineError as error:
            look, done = Look(State.MISSING, step.name, error.message, error.remedy or ""), ()
        if left:
            look = Look(State.MISSING, step.name, "needs an administrator", f"type: {'; '.join(left)}")
        found.append(Outcome(step.name, look, done))
        _tell(found[-1], say)
    return found


def self_test(options: Options) -> tuple[Run, ...]:
    """Programs that show that the machine works."""
    engine = options.environment / "bin" / "kakeya_engine"
    return (
        Run((str(engine), "probe", "--json")),
        Run((str(options.program), "runner", "policy", "check")),
    )


def _brought(step: Step, say: Say) -> Outcome:
    look = step.look()
    if look.state is not State.TODO:
        return Outcome(step.name, look)
    say(f"{step.name}: {look.finding}")
    try:
        done = _all_done(step.actions(), say)
    except MachineError as error:
        failed = Look(
            State.MISSING, look.looked_at, error.message, error.remedy or "mend that, and run it again"
        )
        return Outcome(step.name, failed)
    after = step.look()
    if after.state is State.TODO:
        after = Look(
            State.MISSING, after.looked_at, f"still not there: {after.finding}", "tell us: this is a bug"
        )
    return Outcome(step.name, after, done)


def _all_done(actions: Sequence[Action], say: Say) -> tuple[str, ...]:
    done = []
    for action in actions:
        say(f"      $ {action.said}")
        action.do()
        done.append(action.said)
    return tuple(done)


def _tested(options: Options, say: Say) -> Outcome:
    look = Look(State.DONE, "kakeya_engine probe, runner policy check", " and ".join(SELF_TEST))
    try:
        _all_done(self_test(options), say)
    except MachineError as error:
        look = Look(State.MISSING, look.looked_at, error.message, "mend that, and run it again")
    outcome = Outcome("self-test", look)
    _tell(outcome, say)
    return outcome


def _is_administrators(action: Action) -> bool:
    return isinstance(action, Run) and action.is_administrators


def _tell(outcome: Outcome, say: Say) -> None:
    look = outcome.look
    say(f"{look.state:<8} {outcome.name}: {look.finding}  [{look.looked_at}]")
    if look.fix:
        say(f"      fix: {look.fix}")
