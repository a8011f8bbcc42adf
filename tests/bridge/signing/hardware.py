"""A security key made of software: signs as a token does behind ``ssh-keygen``, with Ed25519 by RFC 8032.

It replaces hardware that a test machine has not; what it makes is judged by the real ``ssh-keygen``.
"""

from __future__ import annotations

import hashlib
import struct
from base64 import b64encode

KIND = b"sk-ssh-ed25519@openssh.com"
APPLICATION = b"ssh:"
TOUCHED = 1

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_Point = tuple[int, int]
_BASE_Y = 4 * pow(5, -1, _P) % _P
_BASE: _Point = (15112221349535400772501151409588531511454012693041857206046113283949847762202, _BASE_Y)


def public_line(seed: bytes) -> str:
    """The public key line of the token whose secret is 32 bytes."""
    return f"{KIND.decode()} {b64encode(_blob(seed)).decode()}"


def sign(seed: bytes, namespace: str, data: bytes, *, flags: int = TOUCHED) -> bytes:
    """A detached SSH signature by that token.

    Args:
        seed: Its secret.
        namespace: What is signed.
        data: The bytes.
        flags: What the token says of its user; without `TOUCHED` it was not touched.
    """
    parts = (namespace.encode(), b"", b"sha512")
    message = b"SSHSIG" + b"".join(map(_string, (*parts, hashlib.sha512(data).digest())))
    counted = struct.pack(">BI", flags, 7)
    signed = hashlib.sha256(APPLICATION).digest() + counted + hashlib.sha256(message).digest()
    signature = _string(KIND) + _string(_ed25519(seed, signed)) + counted
    whole = b"SSHSIG" + struct.pack(">I", 1) + b"".join(map(_string, (_blob(seed), *parts, signature)))
    text = b64encode(whole)
    lines = [text[at : at + 70] for at in range(0, len(text), 70)]
    return b"\n".join((b"-----BEGIN SSH SIGNATURE-----", *lines, b"-----END SSH SIGNATURE-----\n"))


def _blob(seed: bytes) -> bytes:
    secret, _ = _expanded(seed)
    return b"".join(map(_string, (KIND, _packed(_times(secret, _BASE)), APPLICATION)))


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _ed25519(seed: bytes, message: bytes) -> bytes:
    secret, prefix = _expanded(seed)
    public = _packed(_times(secret, _BASE))
    r = int.from_bytes(hashlib.sha512(prefix + message).digest(), "little") % _L
    commitment = _packed(_times(r, _BASE))
    k = int.from_bytes(hashlib.sha512(commitment + public + message).digest(), "little") % _L
    return commitment + ((r + k * secret) % _L).to_bytes(32, "little")


def _expanded(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    secret = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | (1 << 254)
    return secret, digest[32:]


def _sum(one: _Point, two: _Point) -> _Point:
    (x1, y1), (x2, y2) = one, two
    product = _D * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, _P) % _P
    return x, (y1 * y2 + x1 * x2) * pow(1 - product, -1, _P) % _P


def _times(number: int, point: _Point) -> _Point:
    total: _Point = (0, 1)
    while number:
        if number & 1:
            total = _sum(total, point)
        point = _sum(point, point)
        number >>= 1
    return total


def _packed(point: _Point) -> bytes:
    x, y = point
    return (y | (x & 1) << 255).to_bytes(32, "little")
