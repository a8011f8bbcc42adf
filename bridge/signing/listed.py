"""A list of whose key is whose: the allowed-signers format of ``ssh-keygen``, read strictly.

    alice@example.org namespaces="kakeya-mac-request,kakeya-mac-cancel" ssh-ed25519 AAAA… laptop
    ci valid-before="20270101" ssh-ed25519 AAAA…

One name a line, one key a line; a name may have several lines. Left out on purpose: patterns instead of
names, and ``cert-authority``. A line that is not understood is an error, never skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.errors import KeyListError, SignatureError
from bridge.protocol.sanitize import quoted, unsafe_character
from bridge.signing import owned
from bridge.signing.keys import PublicKey, parse_key

# What all unsigned requests together are called; nobody may be listed by it.
UNSIGNED = "unsigned"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
NAME_WORDS = "a name is up to 128 letters, digits and . _ @ + - , and begins with a letter or digit"

_OPTION = re.compile(r'(?P<name>[A-Za-z-]+)(?:="(?P<value>[^"\\]*)")?(?P<end>,|[ \t]+|$)')
_MOMENT = re.compile(r"(\d{8})(\d{4})?(\d{2})?(Z)?")
_PATTERN = re.compile(r"[A-Za-z0-9.*?@_-]+")


@dataclass(frozen=True)
class Listed:
    """One line of a list: this key speaks for this name, in these namespaces, in this time.

    Attributes:
        name: Whose key it is.
        key: The key.
        namespaces: Names or patterns with ``*`` and ``?``; None: any.
        valid_after: It does not count before (aware); None: no such bound.
        valid_before: It does not count from then on (aware); None: no such bound.
        line: Where it stands in its file, from 1; 0: nowhere yet.
    """

    name: str
    key: PublicKey
    namespaces: tuple[str, ...] | None = None
    valid_after: datetime | None = None
    valid_before: datetime | None = None
    line: int = 0

    def speaks_in(self, namespace: str) -> bool:
        """Whether the key counts in a namespace at all."""
        return self.namespaces is None or any(fnmatchcase(namespace, each) for each in self.namespaces)

    def has_begun(self, now: datetime) -> bool:
        """Whether its time has begun."""
        return self.valid_after is None or self.valid_after <= now

    def is_over(self, now: datetime) -> bool:
        """Whether its time is over."""
        return self.valid_before is not None and now >= self.valid_before

    @property
    def text(self) -> str:
        """The line as it is written, with its newline."""
        options = []
        if self.namespaces is not None:
            options.append(f'namespaces="{",".join(self.namespaces)}"')
        if self.valid_after is not None:
            options.append(f'valid-after="{_written(self.valid_after)}"')
        if self.valid_before is not None:
            options.append(f'valid-before="{_written(self.valid_before)}"')
        return " ".join(filter(None, (self.name, ",".join(options), self.key.line, self.key.comment))) + "\n"


def read_keys(path: Path) -> tuple[Listed, ...]:
    """Every line of a list, in its order; none where there is no file.

    Raises:
        KeyListError: Others could have written the file, or a line is not understood; it is named.
    """
    data = owned.read(path)
    if data is None:
        return ()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KeyListError(f"{path} is not UTF-8 text ({error.reason})") from None
    return tuple(
        replace(_parse(path, number, line), line=number)
        for number, line in enumerate(text.split("\n"), 1)
        if is_entry(line)
    )


def is_entry(line: str) -> bool:
    """Whether a line of a list is more than white space or a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def add(path: Path, entry: Listed) -> bool:
    """Append a line; False when that key speaks for that name in the same way already.

    Raises:
        SignatureError: The name is none, or the key speaks for somebody else.
        KeyListError: The list as it stands cannot be believed.
        MachineError: It cannot be written.
    """
    if NAME.fullmatch(entry.name) is None or entry.name == UNSIGNED:
        raise SignatureError(f"{quoted(entry.name)} cannot be a signer's name", NAME_WORDS)
    entry = replace(entry, line=0)
    with owned.changing(path):
        for known in read_keys(path):
            if known.key.text != entry.key.text:
                continue
            if known.name != entry.name:
                raise SignatureError(
                    f"{path}:{known.line}: this key speaks for {known.name} already", "one key has one name"
                )
            if replace(known, line=0, key=entry.key) == entry:
                return False
        before = owned.read(path) or b""
        gap = b"\n" if before and not before.endswith(b"\n") else b""
        owned.write(path, before + gap + entry.text.encode())
    return True


def drop(path: Path, entries: tuple[Listed, ...]) -> None:
    """Take lines out of a list; its other lines and comments stay as they are.

    Args:
        path: The list.
        entries: As `read_keys` gave them.

    Raises:
        KeyListError: The list changed since, or cannot be believed.
        MachineError: It cannot be written.
    """
    with owned.changing(path):
        if not set(entries) <= set(read_keys(path)):
            raise KeyListError(f"{path} was changed meanwhile", "try again")
        gone = {entry.line for entry in entries}
        lines = (owned.read(path) or b"").split(b"\n")
        kept = [line for number, line in enumerate(lines, 1) if number not in gone]
        owned.write(path, b"\n".join(kept))


def _parse(path: Path, number: int, line: str) -> Listed:
    try:
        return parse_line(line)
    except SignatureError as error:
        raise KeyListError(f"{path}:{number}: {error.message}", error.remedy) from None


def parse_line(line: str) -> Listed:
    """Read one line of a list.

    Raises:
        SignatureError: What of it is not understood.
    """
    if (character := unsafe_character(line.replace("\t", " ").rstrip("\r"))) is not None:
        raise SignatureError(f"the character U+{ord(character):04X} does not belong into a list of keys")
    name, _, rest = line.strip().partition(" ")
    if NAME.fullmatch(name) is None or name == UNSIGNED:
        raise SignatureError(
            f"{quoted(name)} is no name: patterns and lists of names are not supported", NAME_WORDS
        )
    options, rest = _options(rest.strip())
    if "cert-authority" in options:
        raise SignatureError("cert-authority is not supported", "list each person's own key instead")
    namespaces = options.pop("namespaces", None)
    bounds = {key: _moment(key, value) for key, value in options.items()}
    key, after, before = parse_key(rest), bounds.get("valid-after"), bounds.get("valid-before")
    return Listed(name, key, _namespaces(namespaces), after, before)


def _options(rest: str) -> tuple[dict[str, str | None], str]:
    """The options in front of the key, and the key."""
    found: dict[str, str | None] = {}
    if rest.startswith(("ssh-", "ecdsa-", "sk-")):
        return found, rest
    while (match := _OPTION.match(rest)) is not None:
        name = match["name"].lower()
        if name not in ("namespaces", "valid-after", "valid-before", "cert-authority"):
            raise SignatureError(
                f"unknown option {quoted(name, 40)}", "known: namespaces, valid-after, valid-before"
            )
        if name in found:
            raise SignatureError(f"the option {name} stands there twice")
        if match["value"] is None and name != "cert-authority":
            raise SignatureError(f"the option {name} has no value", f'it is written {name}="…"')
        found[name] = match["value"]
        rest = rest[match.end() :]
        if match["end"] != ",":
            return found, rest
    raise SignatureError(f"{quoted(rest, 60)} is neither an option nor a public key")


def _namespaces(value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(value.split(","))
    if any(_PATTERN.fullmatch(name) is None for name in names):
        raise SignatureError(f"namespaces={quoted(value, 80)} is no list of namespaces")
    return names


def _moment(option: str, value: str | None) -> datetime:
    """``YYYYMMDD[HHMM[SS]]``, in local time; in UTC with a ``Z`` behind it."""
    match = _MOMENT.fullmatch(value or "")
    if match is None:
        raise SignatureError(
            f"{option}={quoted(value, 40)} is no time", "it is written YYYYMMDD[HHMM[SS]][Z]; Z: in UTC"
        )
    day, minute, second, utc = match.groups()
    try:
        parsed = datetime.strptime(day + (minute or "0000") + (second or "00"), "%Y%m%d%H%M%S")
    except ValueError:
        raise SignatureError(f"{option}={quoted(value, 40)} is no time of the calendar") from None
    return parsed.replace(tzinfo=UTC) if utc else parsed.astimezone()


def _written(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y%m%d%H%M%SZ")
