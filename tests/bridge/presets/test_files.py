"""Preset files: the bundled ones are sound, and a broken one is refused with its fault named."""

from pathlib import Path

import pytest

from bridge import presets
from bridge.errors import ParameterError, PresetError

MINIMAL = {
    "name": '"mine"',
    "summary": '"A job."',
    "argv": '["/bin/echo", "{word}"]',
    "timeout_s": "5",
    "engine": '"installed"',
    "workspace": '"none"',
}
WORD = '\n[params.word]\ntype = "string"\nenum = ["a", "b"]\ndefault = "a"\ndescription = "a word"\n'
HANDLE = '\n[params.word]\ntype = "string"\nformat = "request"\ndescription = "a request"\n'


def write(folder: Path, tail: str = WORD, stem: str = "mine", **changes: str) -> Path:
    lines = {**MINIMAL, **changes}
    text = "".join(f"{key} = {value}\n" for key, value in lines.items() if value) + tail
    path = folder / f"{stem}.toml"
    path.write_text(text)
    return path


OURS = {
    "acceptance",
    "perplexity",
    "baseline",
    "drafter-parity",
    "drafter-parity-fp32",
    "engine-tests",
    "gate",
    "integration-tests",
    "kv",
    "natural-stops",
    "probe",
    "proposer",
    "quality",
    "recall",
    "restored",
    "restored-speculative",
    "scorecard",
    "server-smoke",
    "single-graph",
    "tests",
    "throughput",
    "throughput-bounded",
    "verify",
}
EARLIER = {
    "mlx-env-probe": "probe",
    "mlx-backend-tests": "engine-tests",
    "integration-tests": "integration-tests",
    "pytest-path": "tests",
    "k3-native-baseline": "baseline",
    "k3-step1-incremental": "restored",
    "k3-step2-fused": "restored-speculative",
    "k3-step2-fused-allmlx": "restored-speculative",
    "k3-fused-allmlx-natural": "natural-stops",
    "k3-fused-allmlx-code": "throughput",
    "k3-fused-allmlx-code-trim": "throughput-bounded",
    "k3-fused-singlefused-probe": "single-graph",
    "k3-drafter-parity": "drafter-parity",
    "k3-drafter-parity-fp32": "drafter-parity-fp32",
    "k3-kv-quant-eval": "kv",
    "k3-evidence-gate": "gate",
    "k3-beta-scorecard": "scorecard",
}
STAND_INS = {
    "gemma-4-26b-a4b": "demo-target",
    "gemma-4-26b-a4b-dflash": "demo-drafter",
    "gemma-4-26b-a4b-projector": "demo-projector",
    "qwen3-1-7b": "demo-target",
    "qwen3-0-6b-mdlm": "demo-proposer",
}
DRAFTERS = {"gemma-4-26b-a4b-dflash", "qwen3-0-6b-mdlm"}


def test_the_bundled_presets_load_and_are_described() -> None:
    bundled = presets.load_all()
    assert set(bundled) == OURS
    assert list(bundled) == sorted(bundled)
    for preset in bundled.values():
        assert preset.summary
        assert preset.description
        assert len(preset.digest) == 64
        assert all(parameter.description for parameter in preset.params.values())
        assert preset.evidence_kind is None or presets.evidence_name(preset) == "report.json"


def test_only_the_presets_of_pytest_run_repository_code() -> None:
    running = {preset.name for preset in presets.load_all().values() if preset.runs_repo_code}
    assert running == {"tests", "engine-tests", "integration-tests"}


@pytest.mark.parametrize(("alias", "name"), EARLIER.items())
def test_names_of_the_earlier_system_resolve(alias: str, name: str) -> None:
    assert presets.get(alias).name == name


def test_every_alias_is_a_name_of_the_earlier_system() -> None:
    aliases = {alias for preset in presets.load_all().values() for alias in preset.aliases}
    assert aliases == set(EARLIER) - OURS


def test_each_model_is_named_as_on_a_mac_and_has_a_shipped_stand_in() -> None:
    for preset in presets.load_all().values():
        for name, need in preset.models.items():
            assert STAND_INS[name] == need.stand_in


def test_every_preset_that_measures_with_the_engine_promises_evidence() -> None:
    for preset in presets.load_all().values():
        replays = any(parameter.format == "request" for parameter in preset.params.values())
        measures = preset.argv[0] == "${engine}" and not replays
        assert (preset.evidence is not None) == measures, preset.name


@pytest.mark.parametrize(
    "handle", ["20260301t120000z0123456789ab", "20260301t12", "mac-bridge/probe-20260301t12"]
)
def test_request_parameter_takes_a_handle(handle: str) -> None:
    assert presets.validate(presets.get("verify"), {"request": handle})["request"] == handle


@pytest.mark.parametrize(
    "handle", ["", "abc", "--record=x", "../../etc/passwd", "a b c d", "20260301\n", "x" * 201]
)
def test_request_parameter_takes_nothing_else(handle: str) -> None:
    with pytest.raises(ParameterError):
        presets.validate(presets.get("verify"), {"request": handle})


@pytest.mark.parametrize(
    ("argv", "tail"),
    [
        ('["/bin/echo", "{word}"]', HANDLE),
        ('["/bin/echo", "${replay:word}"]', WORD),
        ('["/bin/echo", "--report=${replay:word}"]', WORD),
    ],
)
def test_replay_and_request_parameter_go_together(tmp_path: Path, argv: str, tail: str) -> None:
    with pytest.raises(PresetError, match="replay"):
        presets.read(write(tmp_path, tail, argv=argv))


def test_preset_with_a_drafter_promises_one_unless_block_is_one() -> None:
    for preset in presets.load_all().values():
        drafts = any(name in DRAFTERS for name in preset.models)
        promised = preset.evidence is not None and preset.evidence.drafter is not None
        assert preset.evidence is None or promised == (drafts and "--block=1" not in preset.argv)


def test_a_promise_is_read_whole(tmp_path: Path) -> None:
    argv = '["${engine}", "{word}", "--report=${out:report}"]'
    evidence = (
        '[evidence]\nkind = "recall"\nclaims = ["recall_parity"]\n'
        'drafter = "any"\nbaseline = true\nrestoration = "learned"\nkv = ["restored"]\n'
        "configuration = { single_graph = true }\n"
    )
    preset = presets.read(write(tmp_path, WORD + evidence, argv=argv))
    promised = presets.Promise(
        "recall",
        claims=("recall_parity",),
        drafter="any",
        baseline=True,
        restoration="learned",
        kv=("restored",),
        configuration={"single_graph": True},
    )
    assert preset.evidence == promised


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PresetError, match="'thruput'") as caught:
        presets.get("thruput")
    assert "throughput" in (caught.value.remedy or "")


def test_an_owner_may_add_presets_but_not_take_a_name(tmp_path: Path) -> None:
    write(tmp_path)
    assert presets.get("mine", tmp_path).argv == ("/bin/echo", "{word}")
    write(tmp_path, stem="probe", name='"probe"')
    with pytest.raises(PresetError, match="both answer to 'probe'"):
        presets.load_all(tmp_path)


def test_alias_may_not_be_used_twice(tmp_path: Path) -> None:
    write(tmp_path, aliases='["pytest-path"]')
    with pytest.raises(PresetError, match="both answer to 'pytest-path'"):
        presets.load_all(tmp_path)


@pytest.mark.parametrize(
    ("changes", "tail", "message"),
    [
        ({"surprise": "1"}, WORD, "surprise"),
        ({"renamed": '{ old = "nothing" }'}, WORD, "old = 'nothing' must lead from an old name"),
        ({"renamed": '{ word = "" }'}, WORD, "word = '' must lead from an old name"),
        ({"timeout_s": "0"}, WORD, "timeout_s"),
        ({"timeout_s": "true"}, WORD, "timeout_s"),
        ({"timeout_s": ""}, WORD, "timeout_s"),
        ({"engine": '"remote"'}, WORD, "engine"),
        ({"name": '"Mine Own"'}, WORD, "name"),
        ({"name": '"other"'}, WORD, "named 'mine' but says"),
        ({"argv": '["sh", "-c", "echo {word}"]'}, WORD, "whole element"),
        ({"argv": '["/bin/echo", "x{word}"]'}, WORD, "whole element"),
        ({"argv": '["/bin/echo", "{word?--chat}"]'}, WORD, "a switch is a boolean parameter"),
        ({"argv": '["/bin/echo", "{other?--chat}", "{word}"]'}, WORD, "'other', which is not declared"),
        ({"argv": '["/bin/echo", "{word?rm}", "{word}"]'}, WORD, "whole element"),
        ({"argv": '["/bin/echo", "{other}"]'}, WORD, "'other', which is not declared"),
        ({"argv": '["/bin/echo"]'}, WORD, "'word' is declared but argv never uses it"),
        ({"argv": '["${shell}", "{word}"]'}, WORD, "not a placeholder"),
        ({"argv": '["${python:x}", "{word}"]'}, WORD, "not a placeholder"),
        ({"argv": '["${python}", "${model}", "{word}"]'}, WORD, "not a placeholder"),
        ({"argv": '["/bin/echo", "--r=${request}", "{word}"]'}, WORD, "several words"),
        ({"argv": '["/bin/echo", "${env:API_TOKEN}", "{word}"]'}, WORD, "no secret"),
        ({"argv": '["/bin/echo", "${model:big}", "{word}"]'}, WORD, "model 'big', which is not declared"),
        ({"engine": '"workload"'}, WORD, 'needs workspace = "full"'),
        ({}, WORD + '[evidence]\nkind = "probe"\n', "no \\${out:NAME}"),
        ({}, WORD + '[evidence]\nkind = "poem"\n', "evidence.kind"),
        ({}, WORD + '[evidence]\nkind = "recall"\ndrafter = false\n', "evidence.drafter"),
        ({}, WORD + '[evidence]\nkind = "recall"\nkv = ["native"]\n', "evidence.kv"),
        ({}, WORD + '[models.big]\nmac = "a model"\nstand_in = "tiny"\n', "models.big.stand_in"),
        ({}, WORD + '[models.big]\nstand_in = "demo-target"\n', "models.big.mac is missing"),
        ({}, WORD + '[models.big]\nmac = "a model"\nhere = "another"\n', "unknown key models.big.here"),
        (
            {},
            WORD.replace('default = "a"', 'default = "c"'),
            "params.word: the default is not allowed: .c. is not one of",
        ),
        ({}, WORD.replace('enum = ["a", "b"]\n', ""), "params.word"),
        ({}, WORD.replace('enum = ["a", "b"]', 'pattern = "("'), "params.word.pattern: the pattern"),
        ({}, WORD.replace('enum = ["a", "b"]', 'format = "repo-path"'), "needs workspace"),
        (
            {},
            WORD.replace('"string"', '"integer"').replace('enum = ["a", "b"]', "minimum = 1"),
            "params.word",
        ),
        ({}, "[params.word\n", "not TOML"),
        ({"argv": '["/bin/echo", "{word}", "a\\u0000b"]'}, WORD, "argv.2"),
    ],
)
def test_a_broken_file_is_refused_with_its_fault(
    tmp_path: Path, changes: dict[str, str], tail: str, message: str
) -> None:
    with pytest.raises(PresetError, match=message):
        presets.read(write(tmp_path, tail, **changes))


def test_a_huge_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text("# " + "x" * 70_000)
    with pytest.raises(PresetError, match="at most 65536"):
        presets.read(path)
    with pytest.raises(PresetError, match="cannot read"):
        presets.read(tmp_path / "none.toml")


def test_no_preset_fixes_the_seed_of_generated_prompts() -> None:
    for preset in presets.load_all().values():
        assert not [word for word in preset.argv if word.startswith("--seed") and "{" not in word]
        seed = preset.params.get("seed")
        assert seed is None or seed.default == "nonce"
    assert "--prompts=generated" in presets.get("recall").argv
