"""A policy's bounds make a preset's narrower, and an attempt to widen one is an error at its line."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import presets
from bridge.errors import ParameterError, PolicyError
from bridge.presets import Parameter, Preset
from bridge.runner import policy

JOB = Preset(
    name="job",
    summary="A job.",
    argv=("/bin/true",),
    timeout_s=600,
    engine="installed",
    workspace="paths",
    digest="0" * 64,
    aliases=("work",),
    params={
        "count": Parameter("count", "integer", "", default=8, minimum=1, maximum=64),
        "rate": Parameter("rate", "number", "", default=0.5, minimum=0.0, maximum=1.0),
        "mode": Parameter("mode", "string", "", default="fast", enum=("fast", "slow", "odd")),
        "size": Parameter("size", "integer", "", default=1, enum=(1, 2, 4, 8)),
        "word": Parameter("word", "string", "", default="abc", pattern="[a-z]+", max_length=10),
        "file": Parameter(
            "file", "string", "", default="data/a.json", format="repo-path", prefix="data/", suffix=".json"
        ),
        "flag": Parameter("flag", "boolean", "", default=False),
        "must": Parameter("must", "string", "", pattern=".*"),
    },
)


def narrowed(text: str) -> Preset:
    loaded = policy.read(Path("/etc/policy.toml"), text.encode())
    return policy.narrowed(loaded, {"job": JOB})["job"]


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
        ("enum = [false]", "flag", [False], [True]),
        ("default = 3", "count", [1, 3, 64], [0, 65]),
    ],
    ids=str,
)
def test_a_bound_leaves_what_is_within_it(
    bounds: str, param: str, kept: list[object], lost: list[object]
) -> None:
    job = narrowed(f"[presets.job.params.{param}]\n{bounds}")
    for value in kept:
        assert presets.check_value("job", job.params[param], value) == value
        presets.check_value("job", JOB.params[param], value)
    for value in lost:
        with pytest.raises(ParameterError):
            presets.check_value("job", job.params[param], value)
    assert job.digest == JOB.digest


@pytest.mark.parametrize(
    ("bounds", "param", "message"),
    [
        ("maximum = 65", "count", "maximum is 65, which is wider than the preset's 64"),
        ("minimum = 0", "count", "minimum is 0, which is wider than the preset's 1"),
        ("maximum = 1.5", "count", "must be a finite number of the parameter's type, got 1.5"),
        ("maximum = true", "count", "must be a finite number"),
        ("maximum = nan", "rate", "nan is no number that is read here"),
        ("maximum = inf", "rate", "inf is no number that is read here"),
        ('maximum = "8"', "count", "must be a finite number"),
        ("minimum = 40\nmaximum = 20", "count", "leaves nothing between minimum 40 and maximum 20"),
        ("maximum = 4", "count", "leaves the preset's default 8 outside"),
        ("maximum = 4\ndefault = 5", "count", "default is 5, which is outside the bounds given here"),
        ("default = 100", "count", "default is wider than the preset: .* above the maximum 64"),
        ("enum = [65]", "count", "enum is wider than the preset: .* above the maximum 64"),
        ("enum = []", "count", "must be a list of values"),
        ("enum = 8", "count", "must be a list of values"),
        ('enum = ["other"]', "mode", "'other' is not one of fast, slow, odd"),
        ("minimum = 9", "size", "leaves none of the values that the preset lists"),
        ("maximum = 3", "mode", "bounds no string, and mode is one"),
        ("maxLength = 11", "word", "maxLength is 11, which is wider than the preset's 10"),
        ("maxLength = 0", "word", "must be 1 to 4096 characters"),
        ("maxLength = 3", "count", "bounds no integer, and count is one"),
        ('pattern = "("', "word", "is a broken regular expression"),
        ('pattern = "(?i)a.*"', "word", "may name no groups and set no flags"),
        ("pattern = '(a)\\1'", "word", "may name no groups"),
        ('pattern = "b.*"', "word", "leaves the preset's default 'abc' outside"),
        ('prefix = "other/"', "file", "must be a folder under data/, got 'other/'"),
        ('prefix = "data/mine"', "file", "must be a folder under data/"),
        ('suffix = ".txt"', "file", "must be like .json and end in the preset's '.json'"),
        ('prefix = "a/"', "word", "bounds a repo-path, and word is none"),
        ("maximum = 3", "nothing", "is no parameter of job"),
    ],
    ids=str,
)
def test_a_bound_that_widens_or_makes_no_sense_is_an_error_at_its_line(
    bounds: str, param: str, message: str
) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        narrowed(f"# mine\n[presets.job.params.{param}]\n{bounds}")
    assert caught.value.message.startswith("policy /etc/policy.toml:")


def test_a_default_may_be_given_where_the_preset_has_none() -> None:
    assert narrowed('[presets.job.params.must]\ndefault = "x"').params["must"].default == "x"


def test_a_time_can_be_shorter_and_not_longer() -> None:
    assert narrowed("[presets.job]\ntimeout_s = 60").timeout_s == 60
    with pytest.raises(PolicyError, match="timeout_s is 601, but the preset takes 600 s at most"):
        narrowed("[presets.job]\ntimeout_s = 601")


def test_a_rule_for_no_preset_of_this_machine_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"policy.toml:1: presets.jib is not a preset"):
        narrowed("[presets.jib]\ntimeout_s = 60")
    with pytest.raises(PolicyError) as caught:
        narrowed("[presets.work]\ntimeout_s = 60")
    assert caught.value.remedy == "write [presets.job]"


def test_every_bundled_preset_may_be_narrowed_to_its_own_bounds() -> None:
    """What a preset says of itself is never wider than itself."""
    for preset in presets.load_all().values():
        for parameter in preset.params.values():
            same = {
                "minimum": parameter.minimum,
                "maximum": parameter.maximum,
                "enum": list(parameter.enum) or None,
                "prefix": parameter.prefix or None,
                "suffix": parameter.suffix or None,
                "default": parameter.default,
            }
            bounds = {word: value for word, value in same.items() if value is not None}
            rule = policy.PresetRule(params={parameter.name: bounds})
            loaded = policy.Policy(Path("policy.toml"), presets={preset.name: rule})
            found = policy.narrowed(loaded, {preset.name: preset})[preset.name]
            assert replace(found, params=preset.params) == preset
            assert found.params[parameter.name] == parameter


SMALL = st.one_of(st.integers(-3, 70), st.floats(-1, 2), st.sampled_from(["a", "abc", "fast", "data/a.json"]))
BOUNDS = st.dictionaries(
    st.sampled_from(["minimum", "maximum", "enum", "maxLength", "pattern", "prefix", "suffix", "default"]),
    st.one_of(
        SMALL, st.booleans(), st.lists(SMALL, max_size=3), st.sampled_from(["[a-c]+", "data/x/", ".json"])
    ),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(JOB.params)), BOUNDS, st.lists(st.one_of(SMALL, st.booleans()), max_size=8))
def test_whatever_bounds_are_given_nothing_is_taken_that_the_preset_refuses(
    name: str, bounds: dict[str, object], values: list[object]
) -> None:
    """And the default, if there is one, is always taken."""
    loaded = policy.Policy(Path("p"), presets={"job": policy.PresetRule(params={name: bounds})})
    try:
        parameter = policy.narrowed(loaded, {"job": JOB})["job"].params[name]
    except PolicyError:
        return
    for value in [*values, parameter.default]:
        if value is None:
            continue
        try:
            presets.check_value("job", parameter, value)
        except ParameterError:
            assert value is not parameter.default
            continue
        presets.check_value("job", JOB.params[name], value)
