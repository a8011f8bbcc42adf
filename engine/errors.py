"""The engine's error tree. Libraries raise these; the command line turns them into one line and a code.

`InputError` and its subclasses exit with 2, `MachineError` with 6, any other `EngineError` with 1; whatever
else escapes is our own bug, 70.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_REASON = 300  # characters of another library's message
# Rust libraries end with this one, which is no `Exception` and cannot be imported.
PANIC = "PanicException"


class EngineError(Exception):
    """The work could not be completed; base of everything the engine raises on purpose."""


class InputError(EngineError):
    """What the caller gave cannot be used; the message says what and the remedy."""


class ConfigurationError(InputError):
    """A switch, an environment variable or a combination of options is not valid."""


class ModelError(InputError):
    """A model folder is missing, corrupt or not supported."""


class DrafterMismatchError(ModelError):
    """The drafter was made for another target."""


class UnknownModel(InputError):
    """A registry has no model of that id, or no KV channel of that name."""


class ModelNotHere(UnknownModel, ModelError):
    """A model's files are in none of the places where they are looked for."""


class PromptError(InputError):
    """A prompt, or a file of prompts, cannot be used."""


class MachineError(EngineError):
    """This machine lacks something for now: the network, disk space, memory."""


class GenerationError(EngineError):
    """Decoding could not go on."""


@contextmanager
def wrap_errors(wrapped: Callable[[str], EngineError]) -> Iterator[None]:
    """Turn what other libraries raise in a block into ``wrapped(reason)``, except interrupts."""
    try:
        yield
    except EngineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON]} …"
        raise wrapped(reason) from error
