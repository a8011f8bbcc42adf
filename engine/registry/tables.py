"""A TOML file and its tables, read strictly: each key once, of the type that is asked for, and no other key.

A message names the file, the table and the key. What the keys mean is in `engine.registry.entries`.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigurationError

LARGEST_FILE = 2**20  # bytes; people write these files
LARGEST = 2**31
T = TypeVar("T")


class Table:
    """One table. Ask for every key it may have, then `finish`."""

    def __init__(self, file: str, values: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
        """Read from ``values``.

        Args:
            file: the file, for messages.
            values: what the table holds.
            path: keys that lead to it; none: it is the outermost.
        """
        self._file, self._path = file, path
        self._left = dict(values)

    def refusal(self, what: str) -> ConfigurationError:
        """An error of this table."""
        where = f" [{'.'.join(self._path)}]" if self._path else ""
        return ConfigurationError(f"{self._file}{where}: {what}")

    def take(self, name: str) -> Any:
        """The value of a key as it is, None where it is not there."""
        return self._left.pop(name, None)

    def text(self, name: str, pattern: str = ".+") -> str | None:
        """A text that matches a pattern from end to end, None where the key is not there."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.refusal(f"{name} must be a text, not {_shown(value)}")
        if not re.fullmatch(pattern, value):
            raise self.refusal(f"{name} must match {pattern}, not {_shown(value)}")
        return value

    def needed_text(self, name: str, pattern: str = ".+") -> str:
        """Likewise, and an error where the key is not there."""
        return self.needed(name, self.text(name, pattern))

    def whole(self, name: str, least: int = 1) -> int | None:
        """A whole number from ``least``, below 2^31; None where the key is not there."""
        value = self.take(name)
        if value is not None and not _is_whole(value, least):
            raise self.refusal(f"{name} must be a whole number of at least {least}, not {_shown(value)}")
        return value  # type: ignore[no-any-return]  # it has been looked at

    def needed_whole(self, name: str, least: int = 1) -> int:
        """Likewise, and an error where the key is not there."""
        return self.needed(name, self.whole(name, least))

    def switch(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(f"{name} must be true or false, not {_shown(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts, none of them twice; None where the key is not there."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(f"{name} must be a list of texts, not {_shown(value)}")
        if twice := sorted({item for item in value if value.count(item) > 1}):
            raise self.refusal(f"{name} holds {_shown(twice[0])} twice")
        return tuple(value)

    def wholes(self, name: str, least: int = 1) -> tuple[int, ...] | None:
        """A list of whole numbers, at least one; None where the key is not there."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(_is_whole(item, least) for item in value):
            raise self.refusal(
                f"{name} must be a list of whole numbers of at least {least}, not {_shown(value)}"
            )
        return tuple(value)

    def table(self, name: str) -> "Table | None":
        """A table within this one; None where the key is not there."""
        value = self.take(name)
        return None if value is None else self.within(name, value)

    def within(self, name: str, value: Any) -> "Table":
        """The table that the value of a key is.

        Raises:
            ConfigurationError: it is none.
        """
        if not isinstance(value, dict):
            raise self.refusal(f"{name} must be a table, not {_shown(value)}")
        return Table(self._file, value, (*self._path, name))

    def names(self) -> list[str]:
        """The keys that are left, in the order of the file."""
        return list(self._left)

    def plain(self) -> dict[str, Any]:
        """All that is left, by name: texts, numbers and switches."""
        for name, value in self._left.items():
            if not isinstance(value, str | bool | int | float):
                raise self.refusal(f"{name} must be a text, a number, true or false, not {_shown(value)}")
            if not name.isidentifier():
                raise self.refusal(f"{_shown(name)} is no name of an argument")
        values, self._left = self._left, {}
        return values

    def needed(self, name: str, value: T | None) -> T:
        """The value of a key that must be there.

        Raises:
            ConfigurationError: it is None.
        """
        if value is None:
            raise self.refusal(f"{name} is missing")
        return value

    def finish(self) -> None:
        """Refuse what nobody asked for.

        Raises:
            ConfigurationError: naming the keys.
        """
        if self._left:
            names = ", ".join(_shown(name) for name in sorted(self._left))
            raise self.refusal(f"unknown {'key' if len(self._left) == 1 else 'keys'} {names}")


def read_table(path: Path) -> Table:
    """The outermost table of a TOML file.

    Raises:
        ConfigurationError: the file cannot be read, or is no TOML.
    """
    try:
        if not path.is_file():
            raise ConfigurationError(f"{path} is not a file; give a registry of models in TOML")
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE:
        raise ConfigurationError(f"{path} has more than {LARGEST_FILE} bytes; it is no registry of models")
    try:
        return Table(str(path), tomllib.loads(content.decode()))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError among them
        raise ConfigurationError(f"{path} is not TOML: {error}") from None


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < LARGEST


def _shown(value: Any) -> str:
    """A value for a message: one line of bounded length."""
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
