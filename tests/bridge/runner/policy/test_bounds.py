"""A policy's bounds make a preset's narrower, and an attempt to widen one is an error."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import presets
from bridge.errors import ParameterError, PolicyError
from bridge.presets import Parameter, Preset
from bridge.presets.values import ParameterBounds
from bridge.runner import policy


def parameter(kind: str, **bounds: object) -> Parameter:
    return Parameter.model_validate({"type": kind, "description": "x", **bounds})


PARAMS = {
    "count": parameter("integer", default=8, minimum=1, maximum=64),
    "rate": parameter("number", default=0.5, minimum=0.0, maximum=1.0),
    "mode": parameter("string", default="fast", enum=("fast", "slow", "odd")),
    "size": parameter("integer", default=1, enum=(1, 2, 4, 8)),
    "word": parameter("string", default="abc", pattern="[a-z]+", maxLength=10),
    "file": parameter("string", default="data/a.json", format="repo-path", prefix="data/", suffix=".json"),
    "flag": parameter("boolean", default=False),
    "must": parameter("string", pattern=".*"),
}
JOB = Preset(
    name="job",
    summary="A job.",
    argv=("/bin/true", *(f"--x={{{name}}}" for name in PARAMS)),
    timeout_s=600,
    engine="installed",
    workspace="paths",
    aliases=("work",),
    params=PARAMS,
)


def narrowed(text: str) -> Preset:
    return policy.parse(Path("/etc/policy.toml"), text.encode()).narrowed({"job": JOB})["job"]


@pytest.mark.parametrize(
    ("bounds", "param", "kept", "lost"),
    [
        ("maximum = 16", "count", [1, 8, 16], [17, 64]),
        ("minimum = 4\nmaximum = 16", "count", [4, 16], [3, 17]),
        ("enum = [2, 8]", "count", [2, 8], [1, 3]),
        ("maximum = 0.5", "rate", [0, 0.5], [0.6, 1]),
        ('enum = ["fast"]', "mode", ["fast"], ["slow", "odd"]),
        ("maximum = 3", "size", [1, 2], [4, 8]),
        ("maxLength = 3", "word", ["a", "abc"], ["abcd"]),
        ('pattern = "a.*"', "word", ["abc", "a"], ["bcd", "a1", "a b"]),
        ('enum = ["abc", "x"]', "word", ["abc", "x"], ["b"]),
        (
            'prefix = "data/mine/"\ndefault = "data/mine/a.json"',
            "file",
            ["data/mine/b.json"],
            ["data/b.json"],
        ),
        ('suffix = ".x.json"\ndefault = "data/a.x.json"', "file", ["data/b.x.json"], ["data/b.json"]),
        ("default = 3", "count", [1, 3, 64], [0, 65]),
    ],
    ids=str,
)
def test_a_bound_leaves_what_is_within_it(
    bounds: str, param: str, kept: list[object], lost: list[object]
) -> None:
    job = narrowed(f"[presets.job.params.{param}]\n{bounds}")
    for value in kept:
        assert presets.check_value("job", param, job.params[param], value) == value
        presets.check_value("job", param, JOB.params[param], value)
    for value in lost:
        with pytest.raises(ParameterError):
            presets.check_value("job", param, job.params[param], value)
    assert job.digest == JOB.digest


@pytest.mark.parametrize(
    ("bounds", "param", "message"),
    [
        ("maximum = 65", "count", "maximum = 65 is wider than the preset's 64"),
        ("minimum = 0", "count", "minimum = 0 is wider than the preset's 1"),
        ("maximum = true", "count", "maximum: must be a finite number"),
        ("maximum = nan", "rate", "maximum: must be a finite number"),
        ("maximum = inf", "rate", "maximum: must be a finite number"),
        ('maximum = "8"', "count", "maximum: must be a finite number"),
        ("minimum = 40\nmaximum = 20", "count", "nothing is left between minimum 40 and maximum 20"),
        ("maximum = 4", "count", "the default is not allowed: 8 is greater than the maximum of 4"),
        ("maximum = 4\ndefault = 5", "count", "the default is not allowed: 5 is greater than"),
        ("default = 100", "count", "default = 100 is wider than the preset's 8"),
        ("enum = [65]", "count", r"enum = \[65\] is wider than the preset's"),
        ("enum = []", "count", "enum: .*at least 1 item"),
        ("enum = 8", "count", "enum: should be a valid array"),
        ('enum = ["other"]', "mode", r"enum = \['other'\] is wider than the preset's"),
        ("minimum = 9", "size", "at least 1 item"),
        ("maximum = 3", "mode", "maximum bounds no string"),
        ("maxLength = 11", "word", "maxLength = 11 is wider than the preset's 10"),
        ("maxLength = 0", "word", "maxLength: should be greater than or equal to 1"),
        ("maxLength = 3", "count", "maxLength bounds no integer"),
        ('pattern = "("', "word", "the pattern '\\(' is broken"),
        ('pattern = "(?i)a.*"', "word", "may name no group and set no flag"),
        ("pattern = '(a)\\1'", "word", "may name no group"),
        ('pattern = "b.*"', "word", "the default is not allowed: 'abc' does not match"),
        ('prefix = "other/"', "file", "prefix = 'other/' is wider than the preset's data/"),
        ('prefix = "data/mine"', "file", "prefix: .*should match pattern"),
        ('suffix = ".txt"', "file", "suffix = '.txt' is wider than the preset's .json"),
        ('prefix = "a/"', "word", "prefix bounds no string"),
        ("maximum = 3", "nothing", "is no parameter of job"),
    ],
    ids=str,
)
def test_a_bound_that_widens_or_makes_no_sense_is_an_error(bounds: str, param: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        narrowed(f"[presets.job.params.{param}]\n{bounds}")
    assert f"presets.job.params.{param}" in caught.value.message


def test_a_default_may_be_given_where_the_preset_has_none() -> None:
    assert narrowed('[presets.job.params.must]\ndefault = "x"').params["must"].default == "x"


def test_a_time_can_be_shorter_and_not_longer() -> None:
    assert narrowed("[presets.job]\ntimeout_s = 60").timeout_s == 60
    with pytest.raises(PolicyError, match="timeout_s is 601, but the preset takes 600 s at most"):
        narrowed("[presets.job]\ntimeout_s = 601")


def test_a_rule_for_no_preset_of_this_machine_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"presets\.jib is not a preset"):
        narrowed("[presets.jib]\ntimeout_s = 60")
    with pytest.raises(PolicyError) as caught:
        narrowed("[presets.work]\ntimeout_s = 60")
    assert caught.value.remedy == "presets: job"


def test_every_bundled_preset_may_be_narrowed_to_its_own_bounds() -> None:
    for preset in presets.load_all().values():
        for own in preset.params.values():
            words = {word: getattr(own, word) for word in ("default", "enum", "minimum", "maximum", "prefix")}
            assert own.narrowed(ParameterBounds.model_validate(words)) == own


def test_pattern_for_a_number_is_an_error_also_with_a_list_of_values() -> None:
    number = next(each for each in JOB.params.values() if each.type == "integer")
    with pytest.raises(ValueError, match="pattern"):
        number.narrowed(ParameterBounds.model_validate({"enum": (number.default,), "pattern": "a"}))


SMALL = st.one_of(st.integers(-3, 70), st.floats(-1, 2), st.sampled_from(["a", "abc", "fast", "data/a.json"]))
BOUNDS = st.dictionaries(
    st.sampled_from(["minimum", "maximum", "enum", "maxLength", "pattern", "prefix", "suffix", "default"]),
    st.one_of(
        SMALL, st.booleans(), st.lists(SMALL, max_size=3), st.sampled_from(["[a-c]+", "data/x/", ".json"])
    ),
    max_size=3,
)


@pytest.mark.slow
@given(st.sampled_from(sorted(JOB.params)), BOUNDS, st.lists(st.one_of(SMALL, st.booleans()), max_size=8))
def test_bounds_never_allow_what_the_preset_refuses(
    name: str, bounds: dict[str, object], values: list[object]
) -> None:
    """And the default, if there is one, is always allowed."""
    try:
        narrow = JOB.params[name].narrowed(ParameterBounds.model_validate_json(json.dumps(bounds)))
    except ValueError:
        return
    for value in [*values, narrow.default]:
        if value is None:
            continue
        if narrow.fault(value) is not None:
            assert value is not narrow.default
            continue
        assert JOB.params[name].fault(value) is None
