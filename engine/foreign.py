"""Other people's code at work on other people's files: whatever it raises becomes one line of ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.errors import EngineError

LONGEST_REASON = 300  # characters of another library's message
# Rust libraries end with this one, which is no `Exception` and cannot be imported.
PANIC = "PanicException"


@contextmanager
def foreign(refusal: Callable[[str], EngineError]) -> Iterator[None]:
    """Run a block; what it raises becomes ``refusal(reason)``, our own errors and interrupts excepted."""
    try:
        yield
    except EngineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise refusal(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """What an error says, on one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        words = f"{words} is missing"
    return words if len(words) <= LONGEST_REASON else f"{words[:LONGEST_REASON]} …"
