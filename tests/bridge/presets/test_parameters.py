"""Parameter values: strict types, bounds, and paths that cannot leave the workload or become options."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import presets
from bridge.errors import ParameterError
from bridge.presets import Parameter

THROUGHPUT = presets.get("throughput")
TESTS = presets.get("tests")


def test_defaults_are_filled_in_and_given_values_kept() -> None:
    values = presets.validate(THROUGHPUT, {"limit": 3})
    assert values == {
        "prompts": "code",
        "limit": 3,
        "max_tokens": 96,
        "block": "auto",
        "chat": False,
        "thinking": "default",
        "model": "gemma-4-26b-a4b",
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"limit": True}, "must be a whole number, got True"),
        ({"limit": 3.0}, "must be a whole number"),
        ({"limit": "3"}, "must be a whole number"),
        ({"limit": None}, "must be a whole number"),
        ({"limit": [3]}, "must be a whole number"),
        ({"limit": 0}, "0 is less than the minimum of 1"),
        ({"limit": 201}, "201 is greater than the maximum of 200"),
        ({"limit": 10**40}, "greater than the maximum"),
        ({"prompts": "poetry"}, "'poetry' is not one of .'code'"),
        ({"prompts": 1}, "must be a text"),
        ({"block": "auto\n"}, "is not one of"),
        ({"limits": 3}, "unknown parameter 'limits'"),
        ({"\u202elimit": 3}, r"unknown parameter '\\u202elimit'"),
    ],
)
def test_a_wrong_value_is_refused_by_name_value_and_bound(params: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        presets.validate(THROUGHPUT, params)


def test_an_unknown_parameter_names_those_that_are_known() -> None:
    with pytest.raises(ParameterError) as caught:
        presets.validate(THROUGHPUT, {"max_token": 3})
    assert "max_tokens" in (caught.value.remedy or "")


def test_a_parameter_without_default_must_be_given() -> None:
    with pytest.raises(ParameterError, match="file must be given"):
        presets.validate(presets.get("gate"), {})


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "tests/../../etc/passwd",
        "tests/..",
        "tests/./x",
        "tests//x",
        "../tests/x",
        ".",
        "-k",
        "--rootdir=/",
        "tests/-k",
        "tests/.git/config",
        ".git/hooks",
        "tests/a\\b",
        "tests/a\0b",
        "tests/a\nb",
        "tests/\u202egnp.py",
        "tests/$(id)",
        "tests/a;b",
        "tests/~root",
        "tests/" + "a" * 600,
        "tests/test_x.py::TestCase",
    ],
)
def test_a_path_that_could_point_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(ParameterError):
        presets.validate(TESTS, {"path": path})


@pytest.mark.parametrize("path", ["", "tests", "tests/engine", "src/x.py", "tests/engineering/x.py"])
def test_a_path_outside_the_folder_of_its_preset_is_refused(path: str) -> None:
    with pytest.raises(ParameterError):
        presets.validate(presets.get("engine-tests"), {"path": path})


def test_the_whole_workload_is_no_path_and_no_word_of_the_command() -> None:
    assert presets.validate(TESTS, {}) == {"path": ""}
    assert presets.argv(TESTS, {"path": ""}, presets.show)[-1] == "--"
    assert presets.argv(TESTS, {"path": "tests/unit"}, presets.show)[-2:] == ["--", "tests/unit"]


@pytest.mark.parametrize(
    "path", ["tests/", "src/x.py", "tests/unit", "tests/unit/test_a-b.c_1.py", "tests/a b/c+d.py"]
)
def test_an_ordinary_path_is_kept_as_it_is(path: str) -> None:
    assert presets.validate(TESTS, {"path": path}) == {"path": path}


def test_a_path_must_have_the_suffix_of_its_preset() -> None:
    parameter = presets.get("gate").params["file"].model_copy(update={"suffix": ".json"})
    assert presets.check_value("gate", "file", parameter, "reports/a.json") == "reports/a.json"
    with pytest.raises(ParameterError, match=r"does not end in \.json"):
        presets.check_value("gate", "file", parameter, "reports/a.txt")


def test_words_of_a_command_line_get_the_presets_types() -> None:
    assert presets.parse_cli(THROUGHPUT, ["limit=3", "prompts=all"]) == {"limit": 3, "prompts": "all"}
    assert presets.parse_cli(TYPES, ["flag=true", "ratio=0.5"]) == {"flag": True, "ratio": 0.5}
    assert presets.parse_cli(TYPES, ["flag=false", "ratio=1"]) == {"flag": False, "ratio": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["limit"], "written key=value"),
        (["limit="], "must be a whole number"),
        (["limit=3.5"], "must be a whole number"),
        (["limit=1e2"], "must be a whole number"),
        (["limit= 3"], "must be a whole number"),
        (["limit=٣"], "must be a whole number"),
        (["limit=3", "limit=4"], "given twice"),
        (["limt=3"], "unknown parameter"),
        (["limit=" + "9" * 5000], "must be a whole number"),
    ],
)
def test_a_wrong_word_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        presets.validate(THROUGHPUT, presets.parse_cli(THROUGHPUT, words))


@given(st.text())
def test_any_accepted_path_stays_inside_and_is_no_option(text: str) -> None:
    try:
        value = str(presets.validate(TESTS, {"path": "tests/" + text})["path"])
    except ParameterError:
        return
    parts = value.removesuffix("/").split("/")
    assert parts[0] == "tests"
    assert all(part and part not in (".", "..") and part[0] not in "-." for part in parts)


@given(st.one_of(st.floats(), st.integers(), st.booleans(), st.text(), st.none()))
def test_any_accepted_number_is_a_number_within_bounds(value: object) -> None:
    try:
        accepted = presets.validate(TYPES, {"ratio": value, "flag": False})["ratio"]
    except ParameterError:
        return
    assert not isinstance(accepted, (bool, str))
    assert math.isfinite(accepted)
    assert 0 <= accepted <= 1


TYPES = THROUGHPUT.model_copy(
    update={
        "params": {
            "flag": Parameter(type="boolean", description="a switch"),
            "ratio": Parameter(type="number", description="a share", minimum=0, maximum=1),
        }
    }
)


# Parameters of the earlier system's jobs, with values that both take, and what the request carries for them.
RENAMED = {
    "k3-native-baseline": {"limit": 5, "max_tokens": 64},
    "k3-step1-incremental": {"limit": 5, "max_tokens": 64},
    "k3-step2-fused": {"limit": 5, "max_tokens": 64, "block": "4"},
    "k3-step2-fused-allmlx": {"limit": 5, "max_tokens": 64, "block": "4"},
    "k3-fused-allmlx-natural": {"limit": 5, "max_tokens": 64, "block": "4"},
    "k3-fused-allmlx-code": {"limit": 5, "max_tokens": 64, "block": "4"},
    "k3-fused-allmlx-code-trim": {"limit": 5, "max_tokens": 64, "block": "4"},
    "k3-fused-singlefused-probe": {"limit": 5, "max_tokens": 64, "block": "4"},
    "k3-kv-quant-eval": {"per_depth": 5, "answer_tokens": 64},
    "k3-beta-scorecard": {"per_depth": 5, "answer_tokens": 64},
    "k3-drafter-parity": {},
    "k3-drafter-parity-fp32": {},
}


@pytest.mark.parametrize(("asked", "carried"), RENAMED.items())
def test_parameters_of_the_earlier_system_work_under_its_names(
    asked: str, carried: dict[str, object]
) -> None:
    preset = presets.get(asked)
    words = ["n_samples=5", "max_new_tokens=64", "block_size=4"]
    if "max_new_tokens" not in preset.renamed:  # the job had none
        words.remove("max_new_tokens=64")
    if "block_size" not in preset.renamed:
        words.remove("block_size=4")
    assert presets.parse_cli(preset, words, asked) == carried
    left_out = [name for name in ("n_samples", "block_size") if preset.renamed.get(name) == ""]
    assert presets.left_out(preset, words, asked) == left_out
    presets.validate(preset, carried)


def test_the_context_of_the_earlier_scorecard_is_known() -> None:
    preset = presets.get("k3-beta-scorecard")
    assert presets.parse_cli(preset, ["ctx=5000"], "k3-beta-scorecard") == {"context": 5000}


def test_new_parameter_names_work_under_old_preset_names() -> None:
    assert presets.parse_cli(THROUGHPUT, ["limit=5"], "k3-fused-allmlx-code") == {"limit": 5}


@pytest.mark.parametrize("asked", ["throughput", None])
def test_old_parameter_of_a_new_preset_is_an_error_with_its_new_name(asked: str | None) -> None:
    with pytest.raises(ParameterError, match="'n_samples': it is called limit here") as caught:
        presets.parse_cli(THROUGHPUT, ["n_samples=5"], asked)
    assert caught.value.remedy == "write: -p limit=VALUE"
    with pytest.raises(ParameterError, match="it is called limit here"):
        presets.validate(THROUGHPUT, {"n_samples": 5})


def test_an_old_and_a_new_name_of_one_parameter_are_one_too_many() -> None:
    with pytest.raises(ParameterError, match="limit is given twice"):
        presets.parse_cli(THROUGHPUT, ["n_samples=5", "limit=5"], "k3-fused-allmlx-code")
