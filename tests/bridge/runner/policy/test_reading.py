"""The machine's policy: a safe default, a strict file, and refusals that say what would allow."""

from pathlib import Path

import pytest

from bridge import presets
from bridge.errors import PolicyError
from bridge.runner import policy
from bridge.runner.policy import JobLimits


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "policy.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def with_network(preset: presets.Preset) -> presets.Preset:
    return preset.model_copy(update={"network": True})


def test_without_a_file_installed_presets_run_but_no_repository_code(tmp_path: Path) -> None:
    default = policy.load(tmp_path / "policy.toml")
    for preset in presets.load_all().values():
        if preset.runs_repo_code:
            with pytest.raises(PolicyError, match="runs code of the requested commit") as caught:
                default.check(preset)
            assert "allow_repo_code in policy.toml" in (caught.value.remedy or "")
        else:
            default.check(preset)
    assert not default.require_signature


def test_a_file_says_what_is_allowed(tmp_path: Path) -> None:
    text = (
        'allow_presets = ["probe", "tests"]\nallow_repo_code = true\nrequire_signature = true\n'
        'max_timeout_s = 60\n[models]\ndemo-target = "/models/big"\n'
    )
    loaded = policy.load(write(tmp_path, text))
    loaded.check(presets.get("probe"))
    loaded.check(presets.get("tests"))
    with pytest.raises(PolicyError, match="the preset throughput is not allowed"):
        loaded.check(presets.get("throughput"))
    assert loaded.require_signature
    assert loaded.models == {"demo-target": Path("/models/big")}


def test_an_empty_list_allows_nothing(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        policy.load(write(tmp_path, "allow_presets = []")).check(presets.get("probe"))


def test_a_job_gets_the_least_of_all_time_limits(tmp_path: Path) -> None:
    loaded = policy.load(write(tmp_path, "max_timeout_s = 100"))
    probe, throughput = presets.get("probe"), presets.get("throughput")
    assert loaded.timeout_s(throughput, None) == 100
    assert loaded.timeout_s(throughput, 50) == 50
    assert loaded.timeout_s(throughput, 86_400) == 100
    assert policy.Policy().timeout_s(probe, 86_400) == probe.timeout_s


def test_requester_quota_is_its_own_or_everybodys(tmp_path: Path) -> None:
    default = policy.load(tmp_path / "none.toml")
    assert default.max_queued("ann") == default.max_queued(None) == 1000
    assert default.max_running_per_requester == 0
    text = (
        "max_queued_per_requester = 10\nmax_running_per_requester = 2\n"
        '[quotas]\n"ci@example.org" = 5000\nunsigned = 0\n'
    )
    loaded = policy.load(write(tmp_path, text))
    assert loaded.max_running_per_requester == 2
    assert [loaded.max_queued(who) for who in ("ann", "ci@example.org", None)] == [10, 5000, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_queued_per_requester = 0", "max_queued_per_requester: .* greater than or equal to 1, got 0"),
        ("max_queued_per_requester = true", "should be a valid integer, got True"),
        ("max_running_per_requester = -1", "greater than or equal to 0, got -1"),
        ("max_running_per_requester = 1.0", "valid integer"),
        ("quotas = 5", "quotas: should be"),
        ('[quotas]\nann = "5"', "quotas.ann: should be a valid integer, got '5'"),
        ("[quotas]\nann = 100001", "quotas.ann: .* less than or equal to 100000"),
        ('[quotas]\n"" = 5', "quotas.*should match pattern"),
        ('[quotas]\n"a\\nb" = 5', "quotas.*should match pattern"),
        ('[quotas]\n"*@example.org" = 5', "quotas.*should match pattern"),
        ("allow_everything = true", "unknown key allow_everything"),
        ("allow_repo_code = 1", "allow_repo_code: should be a valid boolean, got 1"),
        ('allow_repo_code = "true"', "valid boolean"),
        ("require_signature = 0", "valid boolean"),
        ("max_timeout_s = true", "valid integer"),
        ("max_timeout_s = 0", "greater than or equal to 1"),
        ("max_timeout_s = 1.5", "valid integer"),
        ('allow_presets = "probe"', "allow_presets: should be a valid array"),
        ("allow_presets = [1]", "allow_presets.0: should be a valid string, got 1"),
        ("[models]\na = 1", "models.a: should be a valid string, got 1"),
        ('[models]\na = "models/a"', "must be an absolute path"),
        ("allow_repo_code = ", "not TOML"),
        ("a = " + "[" * 60_000, "not TOML"),
        ("max_timeout_s = " + "9" * 5000, "not TOML"),
        ("\xff", "unknown key|not TOML"),
        (
            'allow_requesters = ["a\\u202eb"]',
            "allow_requesters.0: must be text on one line without control characters",
        ),
        ('allow_refs = ["refs/tags/*"]', "'refs/tags/\\*' is no branch"),
        ('hours = ["mon-fri 22-6"]', "'mon-fri 22-6': write days, times or both"),
        ('hours = "mon"', "hours: should be a valid array"),
        (
            'hours = ["mon"]\noutside_hours = "later"',
            "outside_hours: should be 'wait' or 'refuse', got 'later'",
        ),
        ('outside_hours = "wait"', "outside_hours says nothing without hours"),
        ('environment = ["HF_TOKEN"]', "'HF_TOKEN' names a secret"),
        ('environment = ["OPENSSL_CONF"]', "'OPENSSL_CONF' changes what programs load"),
        ('environment = ["KRB5CCNAME"]', "'KRB5CCNAME' .*leads to keys"),
        ('environment = ["A-B"]', "environment.0: string should match pattern .* got 'A-B'"),
        ("[limits]\nmemory = 1", "limits.memory: .* greater than or equal to 67108864, got 1"),
        ('[limits]\nmemory = "-8 GiB"', "limits.memory: could not parse value and unit"),
        ("[limits]\nfiles = 1.5", "limits.files: should be a valid integer"),
        ("[limits]\ncpu = 1", "unknown key limits.cpu"),
        ("[presets]\nprobe = true", "presets.probe: should be"),
        ("[presets.probe]\nargv = []", "unknown key presets.probe.argv"),
        ("[presets.probe]\nnetwork = 1", "presets.probe.network: should be a valid boolean"),
        ("[presets.probe.params]\nx = 1", "presets.probe.params.x: should be"),
        ("[presets.probe.params.x]\ntype = 'string'", "unknown key presets.probe.params.x.type"),
        ('[actions]\nexecute = "daemon"', "asks for the walled mode, which no longer exists"),
        ('[actions]\nexecute = "there"', "actions: 'there' asks for the walled mode"),
        ('[models]\na = "~nosuchuser/a"', "names a user who is not known here"),
        ("#" + "x" * 70_000, "at most 65536 are read"),
    ],
)
def test_a_wrong_file_is_an_error_and_never_a_default(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy.load(write(tmp_path, text))


def test_an_error_names_file_key_and_value(tmp_path: Path) -> None:
    path = write(tmp_path, "[presets.probe]\ntimeout_s = 0\n")
    said = f"policy {path}: presets.probe.timeout_s: should be greater than or equal to 1, got 0"
    with pytest.raises(PolicyError) as caught:
        policy.load(path)
    assert caught.value.message == said


def test_a_key_has_the_name_that_the_documentation_gives(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"unknown key limits\.memory_bytes"):
        policy.load(write(tmp_path, "[limits]\nmemory_bytes = 100000000\n"))


def test_limits_are_read_in_the_units_that_people_write(tmp_path: Path) -> None:
    text = (
        '[limits]\nmemory = "8 GiB"\ndisk = "1.5GB"\noutput = 4096\nfile_size = "100 MiB"\n'
        "files = 5000\nprocesses = 64\nopen_files = 256\n"
    )
    assert policy.load(write(tmp_path, text)).limits == JobLimits(
        memory_bytes=8 << 30,
        disk_bytes=1_500_000_000,
        output_bytes=4096,
        file_bytes=100 << 20,
        files=5000,
        processes=64,
        open_files=256,
    )


def test_the_default_opens_no_network_and_passes_no_variable(tmp_path: Path) -> None:
    default = policy.load(tmp_path / "policy.toml")
    assert not any(default.opens_network(with_network(each)) for each in presets.load_all().values())
    assert default.environment == ()


def test_the_network_needs_the_preset_and_the_policy(tmp_path: Path) -> None:
    loaded = policy.load(write(tmp_path, "[presets.probe]\nnetwork = true\n"))
    probe, gate = presets.get("probe"), presets.get("gate")
    assert not loaded.opens_network(probe)
    assert loaded.opens_network(with_network(probe))
    assert not loaded.opens_network(with_network(gate))
