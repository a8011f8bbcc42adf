"""The argv template: whole elements only, machine values from the resolver, no value becomes an option."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from bridge import presets
from bridge.errors import ParameterError
from bridge.presets import Parameter


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
    preset = replace(
        presets.get("gate"),
        argv=("echo", "--text={text}"),
        params=MappingProxyType({"text": Parameter("text", "string", "any", pattern=".*")}),
    )
    text = "a b; $(touch x) '\" --flag"
    assert presets.argv(preset, {"text": text}, resolver) == ["echo", f"--text={text}"]


def test_a_bare_value_is_never_read_as_an_option() -> None:
    preset = replace(
        presets.get("gate"),
        argv=("echo", "{text}"),
        params=MappingProxyType({"text": Parameter("text", "string", "any", pattern=".*")}),
    )
    with pytest.raises(ParameterError, match="read as an option"):
        presets.argv(preset, {"text": "--upload-pack=x"}, resolver)


def test_a_value_that_looks_like_a_placeholder_is_not_expanded() -> None:
    preset = replace(
        presets.get("gate"),
        argv=("echo", "--text={text}"),
        params=MappingProxyType({"text": Parameter("text", "string", "any", pattern=".*")}),
    )
    assert presets.argv(preset, {"text": "${env:HOME}"}, resolver) == ["echo", "--text=${env:HOME}"]


def test_booleans_are_written_in_lower_case() -> None:
    preset = replace(
        presets.get("gate"),
        argv=("echo", "--on={on}"),
        params=MappingProxyType({"on": Parameter("on", "boolean", "a switch")}),
    )
    assert presets.argv(preset, {"on": True}, resolver) == ["echo", "--on=true"]


@pytest.mark.parametrize(("on", "expected"), [(True, ["echo", "--chat", "x"]), (False, ["echo", "x"])])
def test_a_switch_is_its_flag_or_nothing(on: bool, expected: list[str]) -> None:
    preset = replace(
        presets.get("gate"),
        argv=("echo", "{on?--chat}", "x"),
        params=MappingProxyType({"on": Parameter("on", "boolean", "a switch")}),
    )
    assert presets.argv(preset, {"on": on}, resolver) == expected
