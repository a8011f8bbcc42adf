"""The owner's TOML files: bounded before they are parsed, and every statement found at its line."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.toml import TomlError, parse, statements

TEXT = '''# mine
allow_repo_code = false  # for now
allow_presets = [
    "probe",  # ]
    'gate]',
]

[presets.probe]
note = """
not = [ a statement
""""
[presets."a.b".params.x]
d.e = "\\"#"
q = { minimum = 1 }
'''


def test_a_statement_is_found_at_its_first_line() -> None:
    parse(TEXT.encode(), 10_000)
    assert [(each.number, each.path) for each in statements(TEXT)] == [
        (2, ("allow_repo_code",)),
        (3, ("allow_presets",)),
        (8, ("presets", "probe")),
        (9, ("presets", "probe", "note")),
        (12, ("presets", "a.b", "params", "x")),
        (13, ("presets", "a.b", "params", "x", "d", "e")),
        (14, ("presets", "a.b", "params", "x", "q", "minimum")),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a = " + b"[" * 60_000, "line 1 is nested too deep"),
        (b"\n" + b"a." * 30_000 + b"a = 1", "line 2 is nested too deep"),
        (b"a = " + b"9" * 5000, "not TOML"),
        (b"a = 0x" + b"f" * 60_000, "a whole number has more than 64 bits"),
        (b"a = [{ b = -9223372036854775809 }]", "a whole number has more than 64 bits"),
        (b"a = '\n", "not TOML"),
        (b'"""' + b'\\"' * 30_000, "not TOML"),
        (b"\xff = 1", r"not UTF-8 \(byte 0\)"),
        (b"#" * 70_000, "more than 65536 bytes"),
    ],
    ids=["brackets", "dots", "digits", "hexadecimal", "bits", "a text", "escapes", "bytes", "size"],
)
def test_what_is_too_much_or_no_toml_is_said_at_once(data: bytes, message: str) -> None:
    with pytest.raises(TomlError, match=message):
        parse(data, 65_536)


@settings(max_examples=200, deadline=1000)
@given(
    st.lists(st.sampled_from([*list("ab.=[]{}\"'#\\\n ,1"), '"""', "'''", "a = 1\n", "[a]\n"]), max_size=40)
)
def test_any_text_is_parsed_as_the_standard_parser_does_or_refused(parts: list[str]) -> None:
    text = "".join(parts)
    try:
        expected = tomllib.loads(text)
    except ValueError:
        with pytest.raises(TomlError):
            parse(text.encode(), 65_536)
        return
    assert parse(text.encode(), 65_536) == expected
    for statement in statements(text):
        assert statement.text.partition("\n")[0] in text.split("\n")[statement.number - 1]
