"""Setup, check and uninstall: the parts of a Mac, looked at one by one, brought there, or taken back."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bridge.errors import MachineError
from bridge.mac.action import Action, Run, Say, Write
from bridge.mac.options import Options
from bridge.mac.step import Look, State, Step
from bridge.mac.steps import last_taken, rest_taken, services_taken, steps

SELF_TEST = (
    "the engine decodes and measures with the shipped pair, the gate takes its report, the policy is right"
)
_FOLDER = "kakeya-mac-test"
_LOOKED_AT = "kakeya_engine generate, eval throughput; kakeya_mac gate, runner policy check"


@dataclass(frozen=True)
class Outcome:
    """What became of one part.

    Attributes:
        name: Of the part.
        look: How it stands in the end.
        done: What was done for it.
        would: What would be, of a dry run.
    """

    name: str
    look: Look
    done: tuple[str, ...] = ()
    would: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether the Mac can serve with it."""
        return self.look.state in (State.DONE, State.ADVICE)

    def as_json(self) -> dict[str, Any]:
        """For a JSON line."""
        return {"name": self.name, **asdict(self.look), "done": list(self.done), "would": list(self.would)}


def check(options: Options, say: Say) -> list[Outcome]:
    """Look at every part; change nothing."""
    found = []
    for step in steps(options):
        outcome = Outcome(step.name, step.look())
        found.append(outcome)
        _tell(outcome, say)
    return found


def plan(options: Options, say: Say) -> list[Outcome]:
    """Say how this machine stands, and what setup would do for each part that is not there."""
    found = [_would(step, say) for step in steps(options)]
    test = tuple(action.said for action in self_test(options, Path(tempfile.gettempdir()) / _FOLDER))
    look = Look(State.ADVICE, _LOOKED_AT, "done at the end of every setup")
    found.append(Outcome("self-test", look, would=test))
    _tell(found[-1], say)
    for line in test:
        say(f"      would: {line}")
    return found


def plan_back(options: Options, say: Say) -> list[Outcome]:
    """Say everything that uninstall would do."""
    found = [_would(step, say) for step in (*services_taken(options), *rest_taken(options))]
    return [*found, _would(last_taken(options), say)]


def _would(step: Step, say: Say) -> Outcome:
    look = step.look()
    actions = () if look.state is State.DONE else step.actions()
    outcome = Outcome(step.name, look, would=tuple(action.said for action in actions))
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
    """Take everything back, services first, the memory of what was asked last; what is the owner's stays."""
    found = _taken(services_taken(options), say)
    if not all(outcome.is_ready for outcome in found):
        say("nothing else is removed while a service is there")
        return found
    for step in (*rest_taken(options), last_taken(options)):
        found += _taken((step,), say)
        if not found[-1].is_ready:
            say("the rest stays until that is settled: it is what uninstall runs with")
            break
    return found


def _taken(parts: Sequence[Step], say: Say) -> list[Outcome]:
    found = []
    for step in parts:
        found.append(_brought(step, say))
        _tell(found[-1], say)
    return found


def self_test(options: Options, folder: Path) -> tuple[Run, ...]:
    """Programs that show that the machine works; what they write goes to a folder of their own.

    Args:
        options: What setup is to make.
        folder: A temporary one.
    """
    engine, program = str(options.environment / "bin" / "kakeya_engine"), str(options.program)
    report = str(folder / "report.json")
    few = ("--prompts", "code", "--limit", "1", "--max-tokens", "16", "--claim", "none", "--report", report)
    own = {"KAKEYA_STATE": str(folder)}
    return (
        Run((engine, "generate", "--max-tokens", "8", "class BaseProject:"), env=own),
        Run((engine, "eval", "throughput", *few), env=own),
        Run((program, "gate", report), env=own),
        Run((program, "runner", "policy", "check"), env=options.folders),
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
        after = Look(State.MISSING, after.looked_at, f"still so: {after.finding}", "tell us: this is a bug")
    return Outcome(step.name, after, done)


def _all_done(actions: Sequence[Action], say: Say) -> tuple[str, ...]:
    done = []
    for action in actions:
        say(f"      $ {action.said}")
        action.do(say)
        done.append(action.said)
    return tuple(done)


def _tested(options: Options, say: Say) -> Outcome:
    look = Look(State.DONE, _LOOKED_AT, SELF_TEST)
    try:
        with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}-") as folder:
            _all_done(self_test(options, Path(folder)), say)
    except MachineError as error:
        look = Look(State.MISSING, look.looked_at, error.message, "mend that, and run it again")
    outcome = Outcome("self-test", look)
    _tell(outcome, say)
    return outcome


def _tell(outcome: Outcome, say: Say) -> None:
    look = outcome.look
    say(f"{look.state:<8} {outcome.name}: {look.finding}  [{look.looked_at}]")
    if look.fix:
        say(f"      fix: {look.fix}")
