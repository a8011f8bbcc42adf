"""``ssh-keygen``: keys made, bytes signed, signatures verified; and public keys as text."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import MachineError, SignatureError
from bridge.proc import ProgramResult, helper_environment, run_program, write_atomic
from bridge.protocol.sanitize import quoted

MAX_SIGNATURE_BYTES = 16 * 1024
MAX_LINE = 8192
MIN_RSA_BITS = 2048
# DSA is left out: ssh-keygen no longer verifies it everywhere. `sk-` keys live in hardware.
KINDS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)

_PROGRAM = "ssh-keygen"
_TIMEOUT_S = 20.0
_GOOD = re.compile(r'Good "(?P<namespace>[^"]+)" signature .*with (?P<kind>\S+) key (?P<print>SHA256:\S{43})')
_HEADER = b"-----BEGIN SSH SIGNATURE-----"
_WRITTEN = "a public key is written: ssh-ed25519 AAAA…"


@dataclass(frozen=True)
class PublicKey:
    """One public key: its kind, its base64 text, and its owner's comment."""

    kind: str
    text: str
    comment: str = ""

    @property
    def line(self) -> str:
        """The key without its comment: ``kind base64``."""
        return f"{self.kind} {self.text}"

    @property
    def fingerprint(self) -> str:
        """``SHA256:…``, as ``ssh-keygen -l`` shows it."""
        digest = hashlib.sha256(base64.b64decode(self.text)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    @property
    def in_hardware(self) -> bool:
        """Whether the private half is in a device that waits for a touch."""
        return self.kind.startswith("sk-")


def parse_key(line: str) -> PublicKey:
    """Read ``kind base64 [comment]``; a `SignatureError` says what is wrong with it."""
    kind, text, comment, *_ = (*line.strip().split(None, 2), "", "", "")
    if text and kind not in KINDS:
        raise SignatureError(f"{quoted(kind)} is not a supported kind of key", f"kinds: {', '.join(KINDS)}")
    try:
        blob = base64.b64decode(text, validate=True)
        fields = _fields(blob)
    except ValueError:
        fields = []
    if len(line) > MAX_LINE or "\n" in line.strip() or len(fields) < 2 or fields[0] != kind.encode():
        raise SignatureError(f"{quoted(line, 60)} is not a public key", _WRITTEN)
    if kind == "ssh-rsa" and (bits := int.from_bytes(fields[-1]).bit_length()) < MIN_RSA_BITS:
        raise SignatureError(
            f"an RSA key of {bits} bits is too short", f"at least {MIN_RSA_BITS}, or ed25519"
        )
    # Base64 has spare bits at its end: the same key in another spelling must be revoked with it.
    return PublicKey(kind, base64.b64encode(blob).decode(), comment.strip())


def read_key(given: str) -> PublicKey:
    """A public key as people give it: the line itself, or the path of a file that holds it."""
    if given.startswith(("ssh-", "ecdsa-", "sk-")):
        return parse_key(given)
    try:
        text = Path(given).expanduser().read_bytes()[: MAX_LINE + 1].decode("utf-8", "replace")
    except (OSError, ValueError):
        raise SignatureError(f"{quoted(given, 60)} is neither a public key nor a file", _WRITTEN) from None
    if "PRIVATE KEY" in text:
        raise SignatureError(f"{given} is a private key, which stays with its owner", f"give {given}.pub")
    return parse_key(text)


def fingerprint(key: str) -> str:
    """The fingerprint (``SHA256:…``) of a public key line, as ``ssh-keygen -l`` shows it."""
    return parse_key(key).fingerprint


def public_key(path: Path) -> Path:
    """Where the public half of a private key lies."""
    return path.with_name(path.name + ".pub")


def public_half(key: Path | str) -> PublicKey:
    """The public half of a key as `sign` takes it, if that needs no passphrase."""
    if isinstance(key, str):
        return parse_key(key)
    if not key.is_file():
        raise SignatureError(f"the signing key {key} does not exist", "correct the path, or unset it")
    for file in (key, public_key(key)):
        with contextlib.suppress(SignatureError):
            return read_key(str(file))
    done = run("-y", "-P", "", "-f", str(key))
    if not done.ok:
        raise SignatureError(f"{key} holds no key that can be used without a prompt: {output_of(done)}")
    return parse_key(done.stdout.decode("utf-8", "replace"))


def available() -> bool:
    """Whether this machine can sign and verify."""
    return shutil.which(_PROGRAM) is not None


def ensure_key(path: Path, comment: str) -> Path:
    """The private key at this path, made on first use (ed25519, no passphrase, readable by its owner only).

    Two processes may ask at once, and the first key stays. A public half that is missing is made again.
    """
    if path.is_file():
        if not public_key(path).is_file():
            write_atomic(public_key(path), f"{public_half(path).line} {comment}\n".encode(), mode=0o644)
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".key-") as folder:
        fresh = Path(folder) / "key"
        done = run("-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(fresh))
        if not done.ok:
            raise MachineError(f"cannot make the key {path}: {output_of(done)}")
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
            public_key(fresh).replace(public_key(path))
    return path


def sign(key: Path | str, namespace: str, data: bytes) -> bytes:
    """Sign bytes. Never asks for a passphrase.

    The key is the file of a private key, or of a public key whose private half the SSH agent holds; or such a
    public key itself, ``ssh-ed25519 AAAA…``.
    """
    shown = key if isinstance(key, Path) else parse_key(key).line
    with temporary_files(key=f"{shown}\n".encode()) as folder:
        file = key if isinstance(key, Path) else folder / "key"
        # An empty passphrase is given, so that there is nothing to ask for.
        done = run("-Y", "sign", "-q", "-P", "", "-n", namespace, "-f", str(file), input_bytes=data)
    if not done.ok or not done.stdout.startswith(_HEADER):
        raise SignatureError(
            f"cannot sign with {shown}: {output_of(done)}",
            "the key must be usable without a prompt: without a passphrase, or loaded into the SSH agent",
        )
    return done.stdout


def signing_key(signature: bytes) -> PublicKey:
    """The public key that a signature says it was made with; nothing is verified."""
    header, *lines, _ = (*signature.strip().split(b"\n"), b"")
    blob = b""
    with contextlib.suppress(ValueError):
        # "SSHSIG" and a version, then the key, as the first field of several.
        blob = next(iter(_fields(base64.b64decode(b"".join(lines[:-1]))[10:])), b"")
    if len(signature) > MAX_SIGNATURE_BYTES or header != _HEADER or not blob:
        raise SignatureError(
            f"the signature does not verify: {len(signature)} bytes that are no SSH signature"
        )
    # A certificate's other fields are no strings, so only the first is read: its kind.
    kind = blob[4 : 4 + int.from_bytes(blob[:4])]
    return PublicKey(kind.decode("ascii", "replace"), base64.b64encode(blob).decode())


def signer_fingerprint(data: bytes, signature: bytes, namespace: str) -> str:
    """The fingerprint (``SHA256:…``) of the key that made a signature, known or not."""
    signing_key(signature)
    with temporary_files(signature=signature) as folder:
        argv = ("-Y", "check-novalidate", "-n", namespace, "-s", str(folder / "signature"))
        done = run(*argv, input_bytes=data)
    match = _GOOD.match(done.stdout.decode("utf-8", "replace"))
    if not done.ok or match is None or match["namespace"] != namespace:
        raise SignatureError(f"the signature does not verify: {output_of(done)}")
    if match["kind"].endswith("-CERT"):
        raise SignatureError(
            f"the signature was made with a certificate of the key {match['print']}",
            "sign with the plain key",
        )
    return match["print"]


@contextlib.contextmanager
def temporary_files(**contents: bytes) -> Iterator[Path]:
    """A temporary folder with files in it, for ``ssh-keygen`` to read."""
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as name:
        for file, data in contents.items():
            (Path(name) / file).write_bytes(data)
        yield Path(name)


def run(*args: str, input_bytes: bytes = b"") -> ProgramResult:
    """Run ``ssh-keygen`` in UTC, without a terminal, a display or another way to ask."""
    quiet = helper_environment({"SSH_ASKPASS_REQUIRE": "never", "TZ": "UTC0"})
    return run_program([_PROGRAM, *args], input=input_bytes, timeout_s=_TIMEOUT_S, env=quiet)


def output_of(done: ProgramResult) -> str:
    """What ``ssh-keygen`` said, on one line."""
    if done.timed_out:
        return "ssh-keygen did not answer in time"
    words = (done.stderr or done.stdout).decode("utf-8", "replace").split("\n")
    return "; ".join(word.strip() for word in words if word.strip())[:300] or f"exit code {done.exit_code}"


def _fields(blob: bytes) -> list[bytes]:
    """The length-prefixed fields of a key (RFC 4253, section 6.6), which must fill it exactly."""
    fields, at = [], 0
    while at < len(blob):
        length = int.from_bytes(blob[at : at + 4])
        at += 4 + length
        if at > len(blob):
            raise ValueError("a field reaches beyond the key")
        fields.append(blob[at - length : at])
    return fields
