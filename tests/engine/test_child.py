"""A program of the system is asked; what goes wrong with it is an absent answer."""

from engine.child import printed_by


def test_what_it_prints_comes_back() -> None:
    assert printed_by(("/bin/echo", "so")) == "so\n"


def test_a_program_that_fails_or_is_not_there_says_nothing() -> None:
    assert printed_by(("/bin/sh", "-c", "echo so; exit 3")) is None
    assert printed_by(("/nowhere/at-all",)) is None


def test_bytes_that_are_no_utf_8_are_marked() -> None:
    assert printed_by(("printf", "a\\377b")) == "a\N{REPLACEMENT CHARACTER}b"


def test_it_gets_what_is_added_for_it() -> None:
    assert printed_by(("/bin/sh", "-c", 'echo "$MORE"'), added={"MORE": "so"}) == "so\n"


def test_it_gets_the_input_it_is_given() -> None:
    assert printed_by(("cat",), given="so\nµ") == "so\nµ"
    assert printed_by(("/bin/echo", "unread"), given="x" * 1_000_000) == "unread\n"


def test_it_gets_no_input_and_none_of_our_environment() -> None:
    assert printed_by(("cat",)) == ""
    names = {line.partition("=")[0] for line in (printed_by(("env",)) or "").splitlines()}
    assert (
        {"PATH", "LC_ALL"} <= names <= {"PATH", "LC_ALL", "__CF_USER_TEXT_ENCODING", "_"}
    )  # the system adds some
