"""Mutations of honest documents for the fuzzer: bytes, words and values, drawn by hypothesis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

# Words that readers of such documents stumble over.
WORDS = [
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-0",
        b"0x1",
        b"1" + b"0" * 400,
        b"true",
        b"null",
        b"nan",
    ),
    *(
        b"inf",
        b"-nan",
        b"1979-05-27",
        b"[[",
        b"]]",
        b"{",
        b"}",
        b"\\u0000",
        b"\\ud800",
        b"\\u202e",
        b"\x1b[2J",
    ),
    *(b"\0", b"\n", b"\r\n", b"\xff", b"\xef\xbb\xbf", b'"', b"'", b'"""', b"#", b"=", b",", b":", b"."),
    *(b"${env:HOME}", b"{word}", b"--upload-pack=x", b"../", b"/etc/passwd", b"$(id)", b"schema_version"),
    *(b"allow_repo_code = true\n", b"LD_PRELOAD", b"argv", b'"engine": "workload"', "\u200b\u0435".encode()),
]

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1 << 31, 1 << 53, 1 << 63, 10**400])
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["\x1b[2J", "\u202e", "\0", "\ud800", "../x", "--x", "x" * 5000, "1"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def spliced(draw: st.DrawFn, honest: bytes) -> bytes:
    """The document with up to six pieces cut out, doubled, replaced or put in."""
    data = honest
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 24)))
        piece = draw(st.sampled_from(WORDS) | st.binary(max_size=6) | st.just(data[at:end] * 2))
        data = data[:at] + piece + data[end:]
    return data


@st.composite
def revalued(draw: st.DrawFn, honest: bytes) -> bytes:
    """A JSON document with one to three of its values replaced, anywhere in it, or keys added."""
    document = json.loads(honest)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = document
        while True:
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if isinstance(place, dict) and draw(st.integers(0, 5)) == 0:
                key = draw(st.text(max_size=8))
            place[key] = draw(_VALUES)
            break
    return json.dumps(document).encode()


@st.composite
def reordered(draw: st.DrawFn, honest: bytes) -> bytes:
    """A TOML document with lines dropped, doubled, moved, or with another value."""
    lines = honest.split(b"\n")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        what = draw(st.sampled_from(["drop", "double", "move", "value"]))
        if what == "drop" and len(lines) > 1:
            del lines[at]
        elif what == "double":
            lines.insert(at, lines[at])
        elif what == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        elif b"=" in lines[at]:
            key = lines[at].split(b"=")[0]
            value = draw(
                st.sampled_from(WORDS) | st.integers().map(lambda n: b"%d" % n) | st.binary(max_size=8)
            )
            lines[at] = key + b"= " + value
    return b"\n".join(lines)


def hostile(honest: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, and mutants of an honest document."""
    closer = revalued(honest) if honest.lstrip().startswith(b"{") else reordered(honest)
    return st.one_of(st.binary(max_size=200), spliced(honest), closer, closer)
