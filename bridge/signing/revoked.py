"""Keys that count no longer: a plain list of public keys, or a key revocation list of ``ssh-keygen -k``.

A plain list is read here, strictly: ``ssh-keygen`` itself skips a line it does not understand, and a key
meant to be revoked would go on counting. A revocation list is binary and is asked through ``ssh-keygen -Q``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bridge.errors import KeyListError, SignatureError
from bridge.signing import keygen, owned
from bridge.signing.keys import PublicKey, parse_key
from bridge.signing.listed import is_entry

_KRL = b"SSHKRL\n\0"
# Nobody's key, to ask about where it only matters that there is an answer: 32 bytes of zero.
_NOBODYS = PublicKey("ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43)


def is_revoked(path: Path, key: PublicKey) -> bool:
    """Whether a key counts no longer; False where there is no file.

    Raises:
        KeyListError: Others could have written the file, or it is not understood.
        MachineError: It is a binary list and there is no ``ssh-keygen``.
    """
    data = owned.read(path)
    if data is None:
        return False
    if data.startswith(_KRL):
        return _asked(path, data, key)
    return any(key.text == known.text for known in _plain(path, data))


def check_revoked(path: Path) -> None:
    """Whether the list can be relied on.

    Raises:
        KeyListError: Others could have written the file, or it is not understood.
        MachineError: It is a binary list and there is no ``ssh-keygen``.
    """
    is_revoked(path, _NOBODYS)


def revoke(path: Path, keys: tuple[PublicKey, ...]) -> None:
    """Add keys to the list, in the form it has; those that are in it already are left out.

    Raises:
        KeyListError: The list as it stands is not understood.
        MachineError: It cannot be written.
    """
    with owned.changing(path):
        fresh = [key for key in keys if not is_revoked(path, key)]
        data = owned.read(path) or b""
        if not fresh:
            return
        lines = b"".join(f"{key.line} {key.comment}".strip().encode() + b"\n" for key in fresh)
        if data.startswith(_KRL):
            owned.write(path, _updated(path, data, lines))
        else:
            owned.write(path, data + (b"\n" if data and not data.endswith(b"\n") else b"") + lines)


def _plain(path: Path, data: bytes) -> list[PublicKey]:
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise KeyListError(f"{path} is neither text nor a key revocation list ({error.reason})") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not is_entry(line):
            continue
        try:
            keys.append(parse_key(line))
        except SignatureError as error:
            raise KeyListError(f"{path}:{number}: {error.message}", error.remedy) from None
    return keys


def _asked(path: Path, data: bytes, key: PublicKey) -> bool:
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
        krl, asked = Path(folder) / "krl", Path(folder) / "asked.pub"
        krl.write_bytes(data)
        asked.write_text(key.line + "\n")
        done = keygen.run("-Q", "-f", str(krl), str(asked))
    if done.ok:
        return False
    if done.exit_code == 1 and b": REVOKED" in done.stdout:
        return True
    raise KeyListError(f"{path} is no key revocation list: {keygen.said(done)}")


def _updated(path: Path, data: bytes, lines: bytes) -> bytes:
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
        krl, fresh = Path(folder) / "krl", Path(folder) / "fresh.pub"
        krl.write_bytes(data)
        fresh.write_bytes(lines)
        done = keygen.run("-k", "-u", "-f", str(krl), str(fresh))
        if not done.ok:
            raise KeyListError(f"cannot add to {path}: {keygen.said(done)}")
        return krl.read_bytes()
