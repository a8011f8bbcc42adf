"""Arms over prompts, interleaved: every prompt goes through all arms before the next one begins.

Every other turn takes the arms the other way round, so that none of them always comes first. A turn is one
prompt, or a batch of them. What is finished may be kept in a journal; what an earlier process kept is not run
again. Only runs; what the rows mean is for others.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigurationError
from engine.evaluation.arms import Outcome
from engine.evaluation.journal import Entry, Journal
from engine.evaluation.prompts import Prompt
from engine.evaluation.report import Arm, sample
from engine.evaluation.templates import answer_of

Progress = Callable[[int, int, str, str], None]  # done, total, phase, detail
Run = Callable[[Sequence[list[int]]], Sequence[Outcome]]  # token ids of prompts -> an outcome each
Row = Callable[[Prompt, Sequence[int], Outcome], dict[str, Any]]
RESTARTS = 3


def scored_rows(tokenizer: Any) -> Row:
    """Rows whose answer is the text without its reasoning."""

    def row(prompt: Prompt, tokens: Sequence[int], outcome: Outcome) -> dict[str, Any]:
        return sample(prompt, tokens, outcome, answer_text=answer_of(tokenizer, tokens, outcome.text))

    return row


@dataclass(frozen=True)
class Lane:
    """One arm, its prompts, and how to run them.

    Attributes:
        arm: gets the rows.
        prompts: as many as every other lane has, with the same ids in the same order.
        encoded: their token ids.
        run: from the token ids of some prompts to as many outcomes.
        row: makes the row of a report from an outcome.
        phase: what progress calls it.
        together: the prompts of a batch are given to ``run`` at once; otherwise one at a time.
    """

    arm: Arm
    prompts: Sequence[Prompt]
    encoded: Sequence[list[int]]
    run: Run
    row: Row
    phase: str
    together: bool = False


@dataclass
class Course:
    """How it went.

    Attributes:
        order: arm and prompt id of every row, in the order run.
        restarts: measurements of the whole that were given up, and why.
        resumed: rows that an earlier process had finished.
    """

    order: list[tuple[str, str]] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    resumed: int = 0


@dataclass(frozen=True)
class _Job:
    lane: Lane
    part: slice

    @property
    def ids(self) -> list[str]:
        return [prompt.id for prompt in self.lane.prompts[self.part]]

    def entry(self) -> Entry:
        prompts, encoded = self.lane.prompts[self.part], self.lane.encoded[self.part]
        outcomes = self.lane.run(encoded)
        rows = [self.lane.row(*each) for each in zip(prompts, encoded, outcomes, strict=True)]
        return Entry(self.lane.arm.name, rows, sum(outcome.drafter_forwards for outcome in outcomes))


def run_interleaved(
    lanes: Sequence[Lane],
    *,
    progress: Progress,
    batch: int = 1,
    journal: Journal | None = None,
    watch: Callable[[], str | None] | None = None,
) -> Course:
    """Fill the arms of all lanes.

    Args:
        lanes: at least one.
        progress: told before each run.
        batch: prompts a turn.
        journal: takes every finished row, and gives those of an earlier process.
        watch: asked after every turn; a reason to give up all rows and begin anew, at most `RESTARTS` times.

    Raises:
        ConfigurationError: the journal's rows are not a beginning of this course.
    """
    course = Course(restarts=list(journal.restarts) if journal else [])
    steps = _Steps(lanes, batch, progress, journal, course, deque(journal.taken if journal else ()))
    while (reason := steps.run(watch if len(course.restarts) < RESTARTS else None)) is not None:
        steps.give_up(reason)
    return course


@dataclass(frozen=True)
class _Steps:
    """All runs of a course, and what an earlier process kept of them."""

    lanes: Sequence[Lane]
    batch: int
    progress: Progress
    journal: Journal | None
    course: Course
    kept: deque[Entry]

    @property
    def total(self) -> int:
        return sum(len(lane.prompts) for lane in self.lanes)

    def run(self, watch: Callable[[], str | None] | None) -> str | None:
        """All turns, or the reason to give up after one of them."""
        for turn in _turns(self.lanes, self.batch):
            for job in turn:
                entry = self._entry(job)
                job.lane.arm.take(entry.rows, entry.drafter_forwards)
                self.course.order.extend((job.lane.arm.name, identifier) for identifier in job.ids)
            if watch and not self.kept and (reason := watch()):
                return reason
        return None

    def give_up(self, reason: str) -> None:
        """Forget all rows, and say so."""
        given_up = {"after_samples": len(self.course.order), "reason": reason}
        if self.journal:
            self.journal.restart(given_up)
        self.course.restarts.append(given_up)
        self.course.order.clear()
        self.course.resumed = 0
        for lane in self.lanes:
            lane.arm.clear()
        self.progress(0, self.total, "measuring again", f"({reason})")

    def _entry(self, job: _Job) -> Entry:
        """The rows of a job: those that were kept, or new ones."""
        if self.kept:
            entry = _taken_over(self.kept.popleft(), job.lane.arm, job.ids)
            self.course.resumed += len(entry.rows)
            return entry
        self.progress(len(self.course.order), self.total, job.lane.phase, job.ids[0])
        entry = job.entry()
        if self.journal:
            self.journal.add(entry)
        return entry


def _turns(lanes: Sequence[Lane], batch: int) -> Iterator[list[_Job]]:
    """The jobs of every turn, in the order to run them."""
    count = len(lanes[0].prompts)
    for turn, start in enumerate(range(0, count, batch)):
        end = min(start + batch, count)
        jobs = []
        for lane in lanes if turn % 2 == 0 else reversed(lanes):
            size = batch if lane.together else 1
            jobs += [_Job(lane, slice(at, min(at + size, end))) for at in range(start, end, size)]
        yield jobs


def _taken_over(entry: Entry, arm: Arm, ids: Sequence[str]) -> Entry:
    """A journal's entry, whose rows must be those that come next."""
    if entry.arm != arm.name or [row["prompt_id"] for row in entry.rows] != list(ids):
        raise ConfigurationError(
            f"the journal has rows of {entry.arm} where {arm.name} comes next; give --no-resume to begin anew"
        )
    return entry
