"""The turns of one conversation: a system turn perhaps, then what was said, and files of them.

Frozen; every change is a new transcript, so that a turn that fails leaves the one before it as it was. A file
holds a message on each line, as JSON, with the fields a client of the server would send.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from engine.errors import ConfigurationError, PromptError
from engine.server.schema import Message

LARGEST_FILE = 100_000_000  # characters
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class Transcript:
    """A conversation so far.

    Attributes:
        system: the system turn's text; None: there is none.
        turns: of user and assistant, the oldest first.
    """

    system: str | None = None
    turns: tuple[Message, ...] = ()

    @property
    def messages(self) -> list[Message]:
        """All of it, as a request has it."""
        head = [] if self.system is None else [message("system", self.system)]
        return [*head, *self.turns]

    def asked(self, text: str) -> "Transcript":
        """With a user's turn behind it.

        Raises:
            PromptError: the text holds half a character.
        """
        return Transcript(self.system, (*self.turns, message("user", text)))

    def answered(self, content: str, reasoning: str) -> "Transcript":
        """With an assistant's turn behind it."""
        return Transcript(self.system, (*self.turns, message("assistant", content, reasoning or None)))

    def with_system(self, text: str | None) -> "Transcript":
        """With this system turn, or none.

        Raises:
            PromptError: the text holds half a character.
        """
        if text is not None:
            message("system", text)
        return Transcript(text, self.turns)

    def undone(self) -> "Transcript":
        """Without the last user's turn and what followed it.

        Raises:
            ConfigurationError: there is no user's turn.
        """
        return Transcript(self.system, self.turns[: self._last_asked()])

    def unanswered(self) -> "Transcript":
        """Without what followed the last user's turn.

        Raises:
            ConfigurationError: there is no user's turn.
        """
        return Transcript(self.system, self.turns[: self._last_asked() + 1])

    def _last_asked(self) -> int:
        asked = [index for index, turn in enumerate(self.turns) if turn.role == "user"]
        if not asked:
            raise ConfigurationError("nothing has been said yet")
        return asked[-1]

    def save(self, file: Path) -> None:
        """Write the messages to a new file.

        Raises:
            ConfigurationError: there is such a file already, or it cannot be written.
        """
        lines = [each.model_dump_json(exclude_none=True) + "\n" for each in self.messages]
        try:
            with file.open("x", encoding="utf-8") as stream:
                stream.writelines(lines)
        except FileExistsError:
            raise ConfigurationError(f"{file} exists already; give another name") from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{file} cannot be written: {error}") from None

    @classmethod
    def load(cls, file: Path) -> "Transcript":
        """Read a file that `save` wrote, or one like it.

        Raises:
            PromptError: it cannot be read, or a line is no message; file and line are named.
        """
        try:
            with file.open(encoding="utf-8") as stream:
                text = stream.read(LARGEST_FILE + 1)
        except (OSError, ValueError) as error:
            raise PromptError(f"{file} cannot be read: {error}") from None
        if len(text) > LARGEST_FILE:
            raise PromptError(f"{file} holds more than {LARGEST_FILE} characters")
        found = [
            _read(line, f"{file}, line {number}")
            for number, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
        if not found:
            raise PromptError(f"{file} holds no message")
        return cls._of(found, file)

    @classmethod
    def _of(cls, found: Sequence[Message], file: Path) -> "Transcript":
        head, rest = None, found
        if found[0].role in SYSTEM_ROLES:
            if not isinstance(found[0].content, str):
                raise PromptError(f"{file}: the system turn is no text")
            head, rest = found[0].content, found[1:]
        if any(each.role in SYSTEM_ROLES for each in rest):
            raise PromptError(f"{file}: a system turn must come first, and there can be one only")
        return cls(head, tuple(rest))


def message(role: str, content: str, reasoning: str | None = None) -> Message:
    """A turn of plain text.

    Raises:
        PromptError: the text holds half a character, which no encoding can hold.
    """
    try:
        return Message.model_validate({"role": role, "content": content, "reasoning": reasoning})
    except ValidationError as error:
        raise PromptError(f"the text cannot be sent: {_reason(error)}") from None


def _read(line: str, where: str) -> Message:
    try:
        return Message.model_validate_json(line)
    except ValidationError as error:
        raise PromptError(f"{where}: {_reason(error)}") from None


def _reason(error: ValidationError) -> str:
    """What the first thing wrong is, with its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}" if field else first["msg"]
