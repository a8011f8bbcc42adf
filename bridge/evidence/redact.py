"""Secrets kept out of what is published: which values are secret, cutting them from logs, finding them.

A secret is the value of an environment variable whose name says so. Logs are redacted before their digests
are taken; evidence in which a secret is found is refused by the caller, because a redacted report would no
longer be the one the engine wrote. Not covered: secrets that are in no variable, values shorter than eight
characters, and encodings other than the plain, JSON, URL and base64 forms of a whole value.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from urllib.parse import quote, quote_plus

SHORTEST = 8  # characters; a shorter value turns up in innocent text
SHORTEST_LINE = 16  # of a value of several lines, such as a private key, each longer line is a secret too

# TOKENIZERS_PARALLELISM and KEYBOARD are no secrets.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|(?:^|_|API|ACCESS|PRIVATE)KEYS?(?:_|$)|(?:^|_)PAT(?:_|$)",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether a variable's name says that its value is secret."""
    return _SECRET_NAME.search(name) is not None


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names say that they are secret, as far as their values are long enough to tell."""
    return {
        name: value
        for name, value in environment.items()
        if len(value.strip()) >= SHORTEST and is_secret_name(name)
    }


def redact(data: bytes, secrets: Mapping[str, str]) -> bytes:
    """`data` with every form of every secret replaced by ``[redacted:NAME]``.

    Args:
        data: Bytes of a log.
        secrets: Values by name, as `secrets_of` gives them; those under eight characters are ignored.
    """
    forms = {form: name for name, value in secrets.items() for form in _forms(value)}
    if not forms:
        return data
    # Longest first, so that a secret inside another does not leave the rest of it standing.
    pattern = b"|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    return re.sub(
        pattern, lambda match: b"[redacted:" + forms[match[0]].encode("utf-8", "replace") + b"]", data
    )


def find_secrets(data: bytes, secrets: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the secrets of which a form stands in `data`, sorted."""
    return tuple(sorted(n for n, value in secrets.items() if any(form in data for form in _forms(value))))


def _forms(value: str) -> set[bytes]:
    """The ways a secret may be written: as it is, in JSON, in a URL, in base64, and line by line."""
    stripped = value.strip()
    if len(stripped) < SHORTEST:
        return set()
    raw = stripped.encode("utf-8", "surrogateescape")  # environment values may hold any bytes
    forms = {raw, base64.b64encode(raw).rstrip(b"="), base64.urlsafe_b64encode(raw).rstrip(b"=")}
    forms |= {
        json.dumps(stripped, ensure_ascii=flag)[1:-1].encode("utf-8", "surrogateescape")
        for flag in (True, False)
    }
    forms |= {quote(raw, safe="").encode(), quote(raw).encode(), quote_plus(raw).encode()}
    lines = stripped.splitlines()
    if len(lines) > 1:
        forms |= {
            line.strip().encode("utf-8", "surrogateescape")
            for line in lines
            if len(line.strip()) >= SHORTEST_LINE and not line.startswith("-----")
        }
    return forms
