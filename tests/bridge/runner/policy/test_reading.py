"""The machine's policy: a safe default, a strict file, and refusals that say what would allow."""

from dataclasses import replace
from pathlib import Path

import pytest

from bridge import presets
from bridge.errors import PolicyError
from bridge.runner import policy
from bridge.runner.limits import Limits


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "policy.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_without_a_file_everything_installed_may_run_but_no_repository_code(tmp_path: Path) -> None:
    default = policy.load(tmp_path / "policy.toml")
    for preset in presets.load_all().values():
        if preset.runs_repo_code:
            with pytest.raises(PolicyError, match="runs code of the requested commit") as caught:
                default.check(preset)
            assert "allow_repo_code = true" in (caught.value.remedy or "")
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
    with pytest.raises(PolicyError, match="does not allow the preset throughput"):
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
    assert policy.Policy(tmp_path).timeout_s(probe, 86_400) == probe.timeout_s


def test_a_requester_may_queue_what_the_policy_says_of_it_or_of_everybody(tmp_path: Path) -> None:
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
        ("max_queued_per_requester = 0", "max_queued_per_requester must be 1 to 100000 requests, got 0"),
        ("max_queued_per_requester = true", "must be a number of requests"),
        ("max_running_per_requester = -1", "must be 0 to 100000 requests, got -1"),
        ("max_running_per_requester = 1.0", "must be a number of requests"),
        ("quotas = 5", "must be a table of numbers"),
        ('[quotas]\nann = "5"', "quotas.ann must be a number of requests"),
        ("[quotas]\nann = 100001", "quotas.ann must be 0 to 100000"),
        ('[quotas]\n"" = 5', "is not a requester's name"),
        ('[quotas]\n"a\\nb" = 5', "is not a requester's name"),
        ('[quotas]\n"*@example.org" = 5', "is not a requester's name"),
        ("allow_everything = true", "unknown key 'allow_everything'"),
        ("allow_repo_code = 1", "must be true or false"),
        ('allow_repo_code = "true"', "must be true or false"),
        ("require_signature = 0", "must be true or false"),
        ("max_timeout_s = true", "must be a number of seconds"),
        ("max_timeout_s = 0", "must be 1 to 86400"),
        ("max_timeout_s = 1.5", "must be a number of seconds"),
        ('allow_presets = "probe"', "must be a list"),
        ("allow_presets = [1]", "must be a list"),
        ("[models]\na = 1", "models.a must be a folder"),
        ('[models]\na = "models/a"', "must be an absolute path"),
        ("allow_repo_code = ", "not TOML"),
        ("a = " + "[" * 60_000, "line 1 is nested too deep"),
        ("a" + ".a" * 30_000 + " = 1", "line 1 is nested too deep"),
        ("max_timeout_s = " + "9" * 5000, "not TOML"),
        ("\xff", "unknown key|not TOML"),
        ('allow_presets = ["probe", "probe"]', "names 'probe' twice"),
        ('allow_requesters = ["a\\u202eb"]', "must be a list of requesters' names or patterns"),
        ('allow_refs = ["refs/tags/*"]', "names 'refs/tags/\\*': that is no branch"),
        ('hours = ["mon-fri 22-6"]', "names 'mon-fri 22-6': write days, times or both"),
        ('hours = "mon"', "hours must be a list of hours"),
        ('hours = ["mon"]\noutside_hours = "later"', 'must be "wait" or "refuse", got \'later\''),
        ('outside_hours = "wait"', ":1: outside_hours says nothing without hours"),
        ('environment = ["HF_TOKEN"]', "names 'HF_TOKEN': its name says that it is a secret"),
        ('environment = ["OPENSSL_CONF"]', "names 'OPENSSL_CONF': it changes what the TLS library loads"),
        ('environment = ["KRB5CCNAME"]', "names 'KRB5CCNAME': it leads to the user's keys"),
        ('environment = ["A-B"]', "that is no name of a variable"),
        ("[limits]\nmemory = 1", "limits.memory must be 67108864 to"),
        ('[limits]\nmemory = "8 Gb"', 'must be a number of bytes or a text like "8 GiB"'),
        ('[limits]\nmemory = "-8 GiB"', "limits.memory must be a number of bytes"),
        ("[limits]\nfiles = 1.5", "limits.files must be a number of files"),
        ("[limits]\ncpu = 1", "unknown key 'cpu' in .limits."),
        ("[presets]\nprobe = true", "presets.probe must be a table"),
        ("[presets.probe]\nargv = []", "unknown key 'argv' in .presets.probe."),
        ("[presets.probe]\nnetwork = 1", "presets.probe.network must be true or false"),
        ("[presets.probe.params]\nx = 1", "presets.probe.params.x must be a table of bounds"),
        ("[presets.probe.params.x]\ntype = 'string'", "unknown key 'type'"),
        ("[actions]\nexecute = true", 'actions.execute must be "here" or "daemon"'),
        ('[actions]\nexecute = "there"', 'must be "here" or "daemon", got \'there\''),
        ("[actions]\nlevel = 1", "unknown key 'level' in .actions."),
        ('[models]\na = "~nosuchuser/a"', "names a user who is not known here"),
        ("#" + "x" * 70_000, "at most 65536 are read"),
    ],
)
def test_a_wrong_file_is_an_error_and_never_a_default(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy.load(write(tmp_path, text))


def test_an_error_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, '# mine\nallow_presets = [\n  "probe",\n]\n\n[presets.probe]\ntimeout_s = 0\n')
    with pytest.raises(PolicyError, match=f"policy {path}:7: presets.probe.timeout_s must be 1 to 86400"):
        policy.load(path)


def test_limits_are_read_in_the_units_that_people_write(tmp_path: Path) -> None:
    text = (
        '[limits]\nmemory = "8 GiB"\ndisk = "1.5GB"\noutput = 4096\nfile_size = "100 MiB"\n'
        "files = 5000\nprocesses = 64\nopen_files = 256\n"
    )
    assert policy.load(write(tmp_path, text)).limits == Limits(
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
    assert not any(default.opens_network(replace(each, network=True)) for each in presets.load_all().values())
    assert default.environment == ()


def test_the_network_needs_the_preset_and_the_policy(tmp_path: Path) -> None:
    loaded = policy.load(write(tmp_path, "[presets.probe]\nnetwork = true\n"))
    probe, gate = presets.get("probe"), presets.get("gate")
    assert not loaded.opens_network(probe)
    assert loaded.opens_network(replace(probe, network=True))
    assert not loaded.opens_network(replace(gate, network=True))
