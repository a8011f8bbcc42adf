"""The files that say whose keys count: lists of allowed signers, and lists of revoked keys.

A list of allowed signers has the format of ``ssh-keygen -Y verify``, one name and one key a line:

    alice@example.org namespaces="kakeya-mac-request,kakeya-mac-cancel" ssh-ed25519 AAAA… laptop
    ci valid-before="20270101" ssh-ed25519 AAAA…

Not supported are patterns in place of names, and ``cert-authority``. Revoked keys are a plain list of public
keys or a revocation list of ``ssh-keygen -k``. ``ssh-keygen`` skips lines that it does not understand; here
such a line is an error, because a key that was meant to be revoked would go on counting. A file counts only
while no other user can write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from bridge.errors import KeyListError, MachineError, SignatureError
from bridge.proc import write_atomic
from bridge.protocol.sanitize import quoted, unsafe_character
from bridge.settings import read_owned_file
from bridge.signing import ssh
from bridge.signing.ssh import PublicKey, parse_key, read_key

# The name of all unsigned requests together; no key may be listed under it.
UNSIGNED = "unsigned"
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}"

_MAX_BYTES = 1 << 20
_KRL = b"SSHKRL\n\0"
_NAME_HELP = "a name is up to 128 letters, digits and . _ @ + - , and begins with a letter or digit"
_OPTION = re.compile(r'(?P<name>[A-Za-z-]+)(?:="(?P<value>[^"\\]*)")?(?P<end>,|[ \t]+|$)')
_MOMENT = re.compile(r"(\d{8})(\d{4})?(\d{2})?(Z)?")
_Parsed = TypeVar("_Parsed")
_NAMESPACES = re.compile(r"[A-Za-z0-9.*?@_-]+(,[A-Za-z0-9.*?@_-]+)*")


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

    name: str  # whose key it is
    key: PublicKey  # the key
    namespaces: tuple[str, ...] | None = None  # names or patterns with ``*`` and ``?``; None: any
    valid_after: datetime | None = None  # it does not count before (aware); None: no such bound
    valid_before: datetime | None = None  # it does not count after this second (aware); None: no such bound
    line: int = 0  # its number in the file, from 1; 0: it is in none yet

    def state(self, namespace: str, now: datetime) -> KeyState:
        """Whether the key counts in a namespace at a moment (aware), apart from revocation."""
        if self.namespaces is not None and not any(fnmatchcase(namespace, each) for each in self.namespaces):
            return KeyState.OTHER_USE
        if self.valid_after is not None and now < self.valid_after:
            return KeyState.NOT_YET
        if self.valid_before is not None and now.replace(microsecond=0) > self.valid_before:
            return KeyState.EXPIRED
        return KeyState.COUNTS

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

    @property
    def words(self) -> str:
        """The state for people; empty where the key simply counts."""
        line = self.listed
        match self.state:
            case KeyState.REVOKED:
                return "revoked"
            case KeyState.OTHER_USE:
                return f"for {','.join(line.namespaces or ())} only"
            case KeyState.NOT_YET:
                return f"from {line.valid_after:%Y-%m-%d %H:%M %Z} on"
            case KeyState.EXPIRED:
                return f"expired {line.valid_before:%Y-%m-%d %H:%M %Z}"
            case KeyState.COUNTS:
                return "" if line.valid_before is None else f"until {line.valid_before:%Y-%m-%d %H:%M %Z}"


@dataclass(frozen=True)
class KeyList:
    """A list of allowed signers with its list of revoked keys, to show and to change.

    To replace a key, add the new one under the same name and revoke the old one: while both are
    listed, signatures of either count.
    """

    allowed: Path  # which key belongs to which name
    revoked: Path  # keys that no longer count, whatever the other file says
    # What a key that is added may sign; the first one says whether a listed key counts
    namespaces: tuple[str, ...]

    def all(self, now: datetime) -> list[ListedKey]:
        """Every line of the list, in its order."""
        return [ListedKey(line, self._state(line, now)) for line in read_keys(self.allowed)]

    def add(self, name: str, key: PublicKey, *, valid_before: datetime | None, now: datetime) -> bool:
        """Let a key speak for a name, up to a second (aware); False when it could already. Idempotent."""
        if valid_before is not None and valid_before <= now:
            raise SignatureError(f"{valid_before:%Y-%m-%d %H:%M %Z} is over", "give a later time")
        if re.fullmatch(NAME_PATTERN, name) is None or name == UNSIGNED:
            raise SignatureError(f"{quoted(name)} cannot be a signer's name", _NAME_HELP)
        if is_revoked(self.revoked, key):
            raise SignatureError(
                f"the key {key.fingerprint} was revoked and would not count",
                f"make a new one; or take its line out of {self.revoked} if that was a mistake",
            )
        entry = AllowedSigner(name, key, self.namespaces, None, valid_before)
        with _locked(self.allowed):
            for known in read_keys(self.allowed):
                if known.key.text != key.text:
                    continue
                if known.name != name:
                    raise SignatureError(
                        f"{self.allowed}:{known.line}: this key belongs to {known.name}",
                        "one key has one name",
                    )
                if replace(known, line=0, key=key) == entry:
                    return False
            _append(self.allowed, entry.text().encode())
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
        keys = {line.key.text: line.key for line in self._find(name, key)}.values()
        left = [each for each in keys if not is_revoked(self.revoked, each)]
        if not left:
            raise SignatureError(f"the key of {name} was revoked before")
        if key is None and len(left) > 1 and not every:
            raise SignatureError(
                f"{name} has {len(left)} keys that count: {_prints(left)}",
                "say which with --key SHA256:…, or --all",
            )
        revoke(self.revoked, left)
        return left

    def _find(self, name: str, key: str | None) -> list[AllowedSigner]:
        lines = read_keys(self.allowed)
        own = [line for line in lines if line.name == name]
        if not own:
            names = ", ".join(dict.fromkeys(line.name for line in lines)) or "none"
            raise SignatureError(f"{self.allowed} has no key of {quoted(name)}", f"names in it: {names}")
        if key is None:
            return own
        wanted = key if key.startswith("SHA256:") else read_key(key).fingerprint
        found = [line for line in own if line.key.fingerprint == wanted]
        if not found:
            keys = _prints(line.key for line in own)
            raise SignatureError(f"{quoted(wanted)} is no key of {name}", f"keys of {name}: {keys}")
        return found

    def _state(self, line: AllowedSigner, now: datetime) -> KeyState:
        if is_revoked(self.revoked, line.key):
            return KeyState.REVOKED
        return line.state(self.namespaces[0], now)


def read_keys(path: Path) -> tuple[AllowedSigner, ...]:
    """Every line of a list of allowed signers, in its order; none where there is no file."""
    found = _parsed(path, _read(path), parse_line)
    return tuple(replace(signer, line=number) for number, signer in found)


def parse_line(line: str) -> AllowedSigner:
    """Read one line of a list of allowed signers; a `SignatureError` says what is not understood."""
    if (character := unsafe_character(line.replace("\t", " ").rstrip("\r"))) is not None:
        raise SignatureError(f"the character U+{ord(character):04X} is not allowed in a list of keys")
    name, _, rest = line.strip().partition(" ")
    if re.fullmatch(NAME_PATTERN, name) is None or name == UNSIGNED:
        raise SignatureError(
            f"{quoted(name)} is no name: patterns and lists of names are not supported", _NAME_HELP
        )
    options, rest = _options(rest.strip())
    if "cert-authority" in options:
        raise SignatureError("cert-authority is not supported", "list each person's own key instead")
    namespaces = options.pop("namespaces", None)
    if namespaces is not None and not _NAMESPACES.fullmatch(namespaces):
        raise SignatureError(f"namespaces={quoted(namespaces, 80)} is no list of namespaces")
    bounds = {option: _moment(option, value) for option, value in options.items()}
    spaces = None if namespaces is None else tuple(namespaces.split(","))
    return AllowedSigner(name, parse_key(rest), spaces, bounds.get("valid-after"), bounds.get("valid-before"))


def allowed_line(public: Path, principal: str, namespace: str) -> str:
    """The line that lets the public key in a file speak as `principal` in one namespace."""
    return AllowedSigner(principal, read_key(str(public)), (namespace,)).text()


def is_revoked(path: Path, key: PublicKey) -> bool:
    """Whether a list of revoked keys holds a key; False where there is no file."""
    data = read_revoked(path)
    if not data.startswith(_KRL):
        return key.line in data.decode().splitlines()
    with ssh.temporary_files(krl=data, keys=f"{key.line}\n".encode()) as folder:
        done = ssh.run("-Q", "-f", str(folder / "krl"), str(folder / "keys"))
    if not done.ok and not (done.exit_code == 1 and b": REVOKED" in done.stdout):
        raise KeyListError(f"{path} is no key revocation list: {ssh.output_of(done)}")
    return not done.ok


def read_revoked(path: Path) -> bytes:
    """A list of revoked keys as ``ssh-keygen`` takes it, a plain one without comments; empty: no file."""
    data = _read(path)
    if data.startswith(_KRL):
        return data
    return "".join(f"{key.line}\n" for _, key in _parsed(path, data, parse_key)).encode()


def check_revoked(path: Path) -> None:
    """Whether a list of revoked keys can be used; the errors are those of `is_revoked`."""
    # An arbitrary key: only whether there is an answer matters.
    is_revoked(path, PublicKey("ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43))


def revoke(path: Path, keys: Iterable[PublicKey]) -> None:
    """Add keys to a list of revoked keys, in the form it has. Idempotent."""
    with _locked(path):
        fresh = [key for key in keys if not is_revoked(path, key)]
        if not fresh:
            return
        lines = b"".join(f"{key.line} {key.comment}".strip().encode() + b"\n" for key in fresh)
        data = _read(path)
        if not data.startswith(_KRL):
            _append(path, lines)
            return
        with ssh.temporary_files(krl=data, keys=lines) as folder:
            done = ssh.run("-k", "-u", "-f", str(folder / "krl"), str(folder / "keys"))
            if not done.ok:
                raise KeyListError(f"cannot add to {path}: {ssh.output_of(done)}")
            write_atomic(path, (folder / "krl").read_bytes())


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


def _append(path: Path, lines: bytes) -> None:
    before = _read(path)
    gap = b"\n" if before and not before.endswith(b"\n") else b""
    write_atomic(path, before + gap + lines)


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
            raise SignatureError(f"the option {name} is given twice")
        if match["value"] is None and name != "cert-authority":
            raise SignatureError(f"the option {name} has no value", f'it is written {name}="…"')
        found[name] = match["value"]
        rest = rest[match.end() :]
        if match["end"] != ",":
            return found, rest
    raise SignatureError(f"{quoted(rest, 60)} is neither an option nor a public key")


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


def _prints(keys: Iterable[PublicKey]) -> str:
    return ", ".join(dict.fromkeys(key.fingerprint for key in keys))
