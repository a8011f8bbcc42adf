"""The argv template: whole elements only, machine values from the resolver, no value becomes an option."""

import pytest

from bridge import presets
from bridge.errors import ParameterError
from bridge.presets import Parameter, Preset

TEXT = Parameter(type="string", description="any", pattern=".*")
SWITCH = Parameter(type="boolean", description="a switch")


def changed(argv: tuple[str, ...], params: dict[str, Parameter]) -> Preset:
    return presets.get("gate").model_copy(update={"argv": argv, "params": params})


def resolver(kind: str, name: str) -> list[str]:
    return ["one", "two"] if kind in ("engine", "request") else [f"<{kind} {name}>"]


def test_every_placeholder_is_replaced_by_whole_elements() -> None:
    preset = presets.get("throughput")
    argv = presets.argv(preset, presets.validate(preset, {"limit": 3}), resolver)
    assert argv == [
        "one",
        "two",
        "eval",
        "throughput",
        "--model=<model gemma-4-26b-a4b>",
        "--drafter=<model gemma-4-26b-a4b-dflash>",
        "--prompts=code",
        "--limit=3",
        "--max-tokens=96",
        "--block=auto",
        "--thinking=default",
        "--report=<out report>",
        "one",
        "two",
    ]


def test_a_dry_run_shows_machine_values_as_written() -> None:
    preset = presets.get("probe")
    assert presets.argv(preset, {}, presets.show) == [
        "${engine}",
        "probe",
        "--report=${out:report}",
        "${request}",
    ]


def test_a_value_with_spaces_and_quotes_stays_one_element() -> None:
    preset = changed(("echo", "--text={text}"), {"text": TEXT})
    text = "a b; $(touch x) '\" --flag"
    assert presets.argv(preset, {"text": text}, resolver) == ["echo", f"--text={text}"]


def test_a_bare_value_is_never_read_as_an_option() -> None:
    preset = changed(("echo", "{text}"), {"text": TEXT})
    with pytest.raises(ParameterError, match="read as an option"):
        presets.argv(preset, {"text": "--upload-pack=x"}, resolver)


def test_a_value_that_looks_like_a_placeholder_is_not_expanded() -> None:
    preset = changed(("echo", "--text={text}"), {"text": TEXT})
    assert presets.argv(preset, {"text": "${env:HOME}"}, resolver) == ["echo", "--text=${env:HOME}"]


def test_booleans_are_written_in_lower_case() -> None:
    preset = changed(("echo", "--on={on}"), {"on": SWITCH})
    assert presets.argv(preset, {"on": True}, resolver) == ["echo", "--on=true"]


@pytest.mark.parametrize(("on", "expected"), [(True, ["echo", "--chat", "x"]), (False, ["echo", "x"])])
def test_a_switch_is_its_flag_or_nothing(on: bool, expected: list[str]) -> None:
    preset = changed(("echo", "{on?--chat}", "x"), {"on": SWITCH})
    assert presets.argv(preset, {"on": on}, resolver) == expected
