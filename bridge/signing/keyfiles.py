"""The files that say whose keys count: lists of allowed signers, each with ``revoked_keys`` next to it.

Lines are those of ``ssh-keygen -Y verify`` with one name and one plain key each. ``ssh-keygen`` skips what it
does not understand; here that is an error, because a key that was meant to be revoked would go on counting.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from bridge.errors import KeyListError, MachineError, SignatureError
from bridge.proc import write_atomic
from bridge.protocol.sanitize import quoted, unsafe_character
from bridge.settings import read_owned_file
from bridge.signing.ssh import PublicKey, parse_key, read_key

# The name of all unsigned requests together; no key may be listed under it.
UNSIGNED = "unsigned"
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}"

_MAX_BYTES = 1 << 20
_REVOKED = "revoked_keys"
_OPTION = r'([A-Za-z-]+)="([^"\\]*)"'
_LINE = re.compile(
    rf"(?P<name>\S+)\s+(?:(?P<options>{_OPTION}(?:,{_OPTION})*)\s+)?(?P<key>(?:ssh|ecdsa|sk)-.*)"
)
_FORM = 'a line is NAME KEY, or NAME namespaces="…",valid-after="…",valid-before="…" KEY'
_SHOWN_TIME = "%Y-%m-%d %H:%M:%S %Z"
_TIME_FORMATS = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
_Parsed = TypeVar("_Parsed")


class KeyState(StrEnum):
    """Whether a listed key counts now. A closed set."""

    COUNTS = "counts"
    REVOKED = "revoked"
    NOT_YET = "not-yet"
    EXPIRED = "expired"
    OTHER_USE = "other-use"


@dataclass(frozen=True)
class AllowedSigner:
    """One line of a list: this key speaks for this name, in these namespaces, in this time."""

    name: str
    key: PublicKey
    namespaces: tuple[str, ...] | None = None  # names or patterns with ``*`` and ``?``; None: any
    valid_after: datetime | None = None  # aware; None: no such bound
    valid_before: datetime | None = None  # aware; it counts up to this second
    line: int = 0  # its number in the file, from 1; 0: it is in none yet

    def judge(self, namespace: str, now: datetime, *, revoked: bool) -> ListedKey:
        """Whether the key counts in a namespace at a moment (aware)."""
        after, before, spaces = self.valid_after, self.valid_before, self.namespaces
        if revoked:
            return ListedKey(self, KeyState.REVOKED, "was revoked")
        if spaces is not None and not any(fnmatchcase(namespace, each) for each in spaces):
            return ListedKey(self, KeyState.OTHER_USE, f"counts for {','.join(spaces)} only")
        if after is not None and now < after:
            return ListedKey(self, KeyState.NOT_YET, f"counts only from {after:{_SHOWN_TIME}} on")
        if before is not None and now.replace(microsecond=0) > before:
            return ListedKey(self, KeyState.EXPIRED, f"expired at {before:{_SHOWN_TIME}}")
        return ListedKey(self, KeyState.COUNTS, f"counts until {before:{_SHOWN_TIME}}" if before else "")

    def text(self, zone: str = "Z") -> str:
        """The line with its newline, times in UTC; older versions of ``ssh-keygen`` know no zone ``Z``."""
        options = [] if self.namespaces is None else [f'namespaces="{",".join(self.namespaces)}"']
        for name, moment in (("valid-after", self.valid_after), ("valid-before", self.valid_before)):
            if moment is not None:
                options.append(f'{name}="{format_moment(moment)}{zone}"')
        return " ".join(filter(None, (self.name, ",".join(options), self.key.line, self.key.comment))) + "\n"


@dataclass(frozen=True)
class ListedKey:
    """One line of a list and whether it counts now."""

    listed: AllowedSigner
    state: KeyState
    words: str  # the state as a clause about the key; empty where it simply counts


@dataclass(frozen=True)
class KeyList:
    """A list of allowed signers with its list of revoked keys, to show and to change.

    To replace a key, add the new one under the same name and revoke the old one: while both are
    listed, signatures of either count.
    """

    allowed: Path  # which key belongs to which name; need not exist
    # What a key that is added may sign; the first one says whether a listed key counts
    namespaces: tuple[str, ...]

    @property
    def revoked(self) -> Path:
        """Keys that no longer count, whatever the other file says; need not exist."""
        return self.allowed.with_name(_REVOKED)

    def all(self, now: datetime) -> list[ListedKey]:
        """Every line of the list, in its order, and whether it counts at a moment (aware)."""
        gone = read_revoked(self.allowed)
        return [
            line.judge(self.namespaces[0], now, revoked=line.key.text in gone)
            for line in read_keys(self.allowed)
        ]

    def add(self, name: str, key: PublicKey, *, valid_before: datetime | None, now: datetime) -> bool:
        """Let a key speak for a name, up to a second (aware); False when it could already. Idempotent."""
        if valid_before is not None and valid_before <= now:
            raise SignatureError(f"{valid_before:%Y-%m-%d %H:%M %Z} is over", "give a later time")
        entry = AllowedSigner(_checked_name(name), key, self.namespaces, None, valid_before)
        if key.text in read_revoked(self.allowed):
            raise SignatureError(
                f"the key {key.fingerprint} was revoked and would not count",
                f"make a new one; or take its line out of {self.revoked} if that was a mistake",
            )
        with _locked(self.allowed):
            known = [line for line in read_keys(self.allowed) if line.key.text == key.text]
            for line in known:
                if line.name != name:
                    raise SignatureError(
                        f"{self.allowed}:{line.line}: this key belongs to {line.name}", "one key has one name"
                    )
            if entry in [replace(line, line=0, key=key) for line in known]:
                return False
            _append(self.allowed, entry.text())
        return True

    def remove(self, name: str, key: str | None = None) -> list[AllowedSigner]:
        """Remove a key (a fingerprint, a key or a file), or all, of a name; other lines and comments stay."""
        with _locked(self.allowed):
            found = self._find(name, key)
            gone = {entry.line for entry in found}
            lines = _read(self.allowed).split(b"\n")
            write_atomic(self.allowed, b"\n".join(line for at, line in enumerate(lines, 1) if at not in gone))
        return found

    def revoke(self, name: str, key: str | None = None, *, every: bool = False) -> list[PublicKey]:
        """Stop a key (a fingerprint, a key or a file; None: the only one) of a name from counting.

        Its line stays in the list, so that what it signed is refused with the reason.
        """
        keys, gone = {line.key.text: line.key for line in self._find(name, key)}, read_revoked(self.allowed)
        left = [each for text, each in keys.items() if text not in gone]
        if not left:
            raise SignatureError(f"the key of {name} was revoked before")
        if key is None and len(left) > 1 and not every:
            shown = ", ".join(each.fingerprint for each in left)
            raise SignatureError(
                f"{name} has {len(left)} keys that count: {shown}",
                "say which with --key SHA256:…, or --all",
            )
        with _locked(self.revoked):
            _append(self.revoked, "".join(f"{each.line} {each.comment}".strip() + "\n" for each in left))
        return left

    def _find(self, name: str, key: str | None) -> list[AllowedSigner]:
        lines = read_keys(self.allowed)
        wanted = key if key is None or key.startswith("SHA256:") else read_key(key).fingerprint
        found = [line for line in lines if line.name == name and wanted in (None, line.key.fingerprint)]
        if not found:
            known = ", ".join(f"{line.name} {line.key.fingerprint}" for line in lines) or "none"
            which = "no key" if wanted is None else f"no key {quoted(wanted)}"
            raise SignatureError(f"{self.allowed} has {which} of {quoted(name)}", f"keys in it: {known}")
        return found


def read_keys(path: Path) -> tuple[AllowedSigner, ...]:
    """Every line of a list of allowed signers, in its order; none where there is no file."""
    found = _parsed(path, _read(path), parse_line)
    return tuple(replace(signer, line=number) for number, signer in found)


def parse_line(line: str) -> AllowedSigner:
    """Read one line of a list of allowed signers; a `SignatureError` says what is not understood."""
    if (character := unsafe_character(line.replace("\t", " ").rstrip("\r"))) is not None:
        raise SignatureError(f"the character U+{ord(character):04X} is not allowed in a list of keys")
    match = _LINE.fullmatch(line.strip())
    if match is None:
        raise SignatureError(f"{quoted(line.strip(), 60)} is not understood", _FORM)
    found: dict[str, Any] = {}
    for name, value in re.findall(_OPTION, match["options"] or ""):
        option = name.lower()
        if option in found or option not in _OPTIONS:
            raise SignatureError(f"the option {quoted(option, 40)} is unknown or given twice", _FORM)
        found[option] = _OPTIONS[option](value)
    spaces, after, before = (found.get(option) for option in _OPTIONS)
    return AllowedSigner(_checked_name(match["name"]), parse_key(match["key"]), spaces, after, before)


def read_revoked(allowed: Path) -> dict[str, PublicKey]:
    """The revoked keys next to a list, by their base64 text; none where there is no file."""
    path = allowed.with_name(_REVOKED)
    return {key.text: key for _, key in _parsed(path, _read(path), parse_key)}


def stamps(*paths: Path) -> tuple[tuple[object, ...], ...]:
    """Stamps of files, which change when the files do."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            seen = path.stat()
            found.append((path.name, seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size))
    return tuple(found)


def format_moment(moment: datetime) -> str:
    """A moment in UTC as ``ssh-keygen`` writes it, without a zone."""
    return moment.astimezone(UTC).strftime("%Y%m%d%H%M%S")


def _read(path: Path) -> bytes:
    return read_owned_file(path, KeyListError, limit=_MAX_BYTES) or b""


def _parsed(path: Path, data: bytes, parse: Callable[[str], _Parsed]) -> Iterator[tuple[int, _Parsed]]:
    """What the lines of a list say, with their numbers, without blank ones and comments."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KeyListError(f"{path} is not UTF-8 text ({error.reason})") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield number, parse(line)
            except SignatureError as error:
                raise KeyListError(f"{path}:{number}: {error.message}", error.remedy) from None


def _append(path: Path, lines: str) -> None:
    before = _read(path)
    gap = b"\n" if before and not before.endswith(b"\n") else b""
    write_atomic(path, before + gap + lines.encode())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the folder of a list while it is read, changed and written: no concurrent change is lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from None


def _checked_name(name: str) -> str:
    if re.fullmatch(NAME_PATTERN, name) is None or name == UNSIGNED:
        raise SignatureError(
            f"{quoted(name)} cannot be a signer's name",
            "a name is up to 128 letters, digits and . _ @ + - , and begins with a letter or digit",
        )
    return name


def _namespaces(value: str) -> tuple[str, ...]:
    if not re.fullmatch(r"[A-Za-z0-9.*?@_-]+(,[A-Za-z0-9.*?@_-]+)*", value):
        raise SignatureError(f"{quoted(value, 80)} is no list of namespaces", _FORM)
    return tuple(value.split(","))


def _moment(value: str) -> datetime:
    """``YYYYMMDD[HHMM[SS]]``, in local time; in UTC with a ``Z`` behind it."""
    text = value.removesuffix("Z")
    try:
        # Without a format for its length nothing but an empty text is a time.
        moment = datetime.strptime(text or "-", _TIME_FORMATS.get(len(text), ""))
        return moment.replace(tzinfo=UTC) if value.endswith("Z") else moment.astimezone()
    except (ValueError, OverflowError):
        raise SignatureError(f"{quoted(value, 40)} is no time YYYYMMDD[HHMM[SS]][Z] (Z: in UTC)") from None


_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "namespaces": _namespaces,
    "valid-after": _moment,
    "valid-before": _moment,
}
