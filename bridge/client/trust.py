"""The runner keys that count on this client: an allowed-signers file, one line a key.

A key is pinned for results only, so a runner's key cannot sign requests in its name.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bridge.bus.untrusted import clean_line, quoted
from bridge.errors import MachineError, SignatureError
from bridge.signing import RESULT_NAMESPACE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(
    r"(?P<key>(?:ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521)|sk-[a-z0-9-]+@openssh\.com)"
    r" [A-Za-z0-9+/]{32,}={0,3})(?: [^\r\n]*)?"
)
_LINE = re.compile(r"(?P<name>\S+) (?:\S+=\S+ )?(?P<key>\S+ \S+)")


@dataclass(frozen=True)
class TrustedKey:
    """One pinned key: the runner's name and the key as ``type base64``."""

    name: str
    key: str


def trusted(path: Path) -> list[TrustedKey]:
    """The pinned keys in file order; none where there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    matches = [_LINE.fullmatch(line) for line in lines if line.strip() and not line.startswith("#")]
    return [TrustedKey(match["name"], match["key"]) for match in matches if match is not None]


def add(path: Path, name: str, key: str) -> bool:
    """Pin a key; False when it already was.

    Args:
        path: The allowed-signers file; made when missing.
        name: The runner's name.
        key: A public key line, or the path of a ``.pub`` file.

    Raises:
        SignatureError: The name or the key is not one.
        MachineError: The file cannot be written.
    """
    if _NAME.fullmatch(name) is None:
        raise SignatureError(f"{name!r} is not a runner's name", "letters, digits, dot, hyphen, underscore")
    match = _KEY.fullmatch(_key_text(key).strip())
    if match is None:
        raise SignatureError(
            f"{key[:60]!r} is not a public key", "give the line that the runner printed: ssh-ed25519 AAAA…"
        )
    if TrustedKey(name, match["key"]) in trusted(path):
        return False
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text and not text.endswith("\n"):
        text += "\n"
    _write(path, f'{text}{name} namespaces="{RESULT_NAMESPACE}" {match["key"]}\n')
    return True


def remove(path: Path, name: str) -> int:
    """Unpin every key of a runner; returns how many there were.

    Raises:
        SignatureError: There is none.
        MachineError: The file cannot be written.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in lines if (match := _LINE.match(line)) is None or match["name"] != name]
    if len(kept) == len(lines):
        names = ", ".join(dict.fromkeys(entry.name for entry in trusted(path))) or "none"
        raise SignatureError(f"{path} holds no key of {quoted(name)}", f"runners in it: {clean_line(names)}")
    _write(path, "".join(kept))
    return len(lines) - len(kept)


def _key_text(key: str) -> str:
    if key.startswith(("ssh-", "ecdsa-", "sk-")):
        return key
    try:
        return Path(key).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        return key


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}-", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from None
