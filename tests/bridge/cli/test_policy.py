"""`kakeya_mac runner policy`: a safe file to begin with, every fault found, the key that refuses named."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.cli.policy import policy
from bridge.presets import load_all
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.runner.policy import DEFAULT_FILE, Policy, load
from tests.bridge.cli.calls import call
from tests.fixtures.repo import Done, allowed_line

DEFAULT = DEFAULT_FILE.read_text()
MINE = """name = "mine"
summary = "Mine."
argv = ["/bin/true"]
timeout_s = 9
engine = "installed"
workspace = "none"
"""


@dataclass
class PolicyOwner:
    """The owner of a Mac at a terminal."""

    config: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def file(self) -> Path:
        return self.config / "policy.toml"

    def write(self, text: str, mode: int = 0o600) -> None:
        self.config.mkdir(exist_ok=True)
        self.file.write_text(text)
        self.file.chmod(mode)

    def type(self, *words: str) -> Done:
        return call(policy, self.capsys, *words)

    def request(self, preset: str = "gate", **changes: object) -> Path:
        """A manifest in a file."""
        now = datetime.now(UTC).replace(microsecond=0)
        nonce = refs.new_nonce(now, os.urandom(6))
        values: dict[str, object] = {
            "nonce": nonce,
            "preset": preset,
            "params": {"file": "reports/a.json"} if preset == "gate" else {},
            "workload_sha": "a" * 40,
            "result_ref": refs.request_ref(preset, nonce, None),
            "created_at": now,
            "expires_at": now + timedelta(hours=1),
            "audience": "example.org/a/b",
        }
        path = self.config.parent / "request.json"
        path.write_bytes(Manifest.model_validate({**values, **changes}).to_bytes())
        return path


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> PolicyOwner:
    monkeypatch.setenv("KAKEYA_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))
    return PolicyOwner(tmp_path / "config", capsys)


def test_first_policy_is_the_default_and_private_to_its_owner(owner: PolicyOwner) -> None:
    done = owner.type("init")
    assert (done.code, done.out) == (0, f"written: {owner.file}\n")
    assert owner.file.stat().st_mode & 0o777 == 0o600
    assert owner.config.stat().st_mode & 0o777 == 0o700
    assert load(owner.file) == Policy()
    assert list(owner.config.iterdir()) == [owner.file]
    assert owner.type("check").code == 0


def test_the_first_policy_names_every_key_and_its_examples_are_right(owner: PolicyOwner) -> None:
    assert owner.type("init", "--print").out == DEFAULT
    assert not owner.config.exists()
    examples = "".join(
        line.removeprefix("# ") + "\n" if " = " in line or line.startswith(("[", "# [")) else "\n"
        for line in DEFAULT.splitlines()
    )
    owner.write(examples)
    assert owner.type("check").code == 0, owner.type("check").out
    of_earlier_versions = {"actions"}
    assert load(owner.file).model_fields_set == set(Policy.model_fields) - of_earlier_versions


def test_the_owners_page_names_every_key_and_its_example_is_right(owner: PolicyOwner) -> None:
    page = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    block = next(block for block in page.split("```\n") if block.startswith("[presets.throughput]"))
    owner.write(block)
    done = owner.type("check", "--json")
    assert done.code == 0, done.out
    throughput = load(owner.file).narrowed(load_all())["throughput"]
    assert (throughput.timeout_s, throughput.params["max_tokens"].maximum) == (900, 64)
    for key in Policy.model_fields:
        assert f"| `{key}` |" in page or f"| `[{key}]` |" in page or f"[{key}." in page, key


def test_a_policy_that_is_there_is_replaced_only_by_force(owner: PolicyOwner) -> None:
    owner.write("allow_repo_code = true\n")
    done = owner.type("init")
    assert done.code == 2
    assert f"there is a policy already: {owner.file}" in done.err
    assert owner.file.read_text() == "allow_repo_code = true\n"
    assert owner.type("init", "--force").code == 0
    assert owner.file.read_text() == DEFAULT


def test_missing_policy_file_means_the_default_and_is_reported(owner: PolicyOwner) -> None:
    done = owner.type("check")
    assert done.code == 0
    assert f"policy: the default ({owner.file} does not exist)" in done.out
    assert "; not allowed: engine-tests, " in done.out


@pytest.mark.parametrize(
    ("name", "text", "mode", "message"),
    [
        ("policy.toml", "\nallow = 1", 0o600, "policy.toml: unknown key allow"),
        ("policy.toml", "", 0o644, "policy.toml can be read by others (mode 0644)"),
        (
            "policy.toml",
            "[presets.gate.params.file]\nprefix = '/'",
            0o600,
            "policy.toml: presets.gate.params.file.prefix",
        ),
        ("presets/mine.toml", "name = 'mine'", 0o600, "mine.toml"),
        ("presets/mine.toml", MINE, 0o666, "mine.toml can be written by others"),
        ("allowed_signers", "ann ssh-ed25519\n", 0o600, "allowed_signers:1:"),
        ("allowed_signers", "", 0o666, "allowed_signers can be written by others"),
        ("known_runners", "rubbish\n", 0o600, "known_runners:1:"),
    ],
    ids=str,
)
def test_a_fault_anywhere_in_the_folder_is_found(
    owner: PolicyOwner, name: str, text: str, mode: int, message: str
) -> None:
    owner.write("# the defaults\n")
    (owner.config / "presets").mkdir()
    (owner.config / name).write_text(text)
    (owner.config / name).chmod(mode)
    done = owner.type("check", "--json")
    assert done.code == 2
    faults = [each["message"] for each in done.json["findings"] if each["fault"]]
    assert len(faults) == 1, faults
    assert message in faults[0]
    assert not done.json["ok"]
    assert "fault: " in owner.type("check").out


def test_what_the_owner_may_have_meant_otherwise_is_a_note(owner: PolicyOwner) -> None:
    owner.write(
        'allow_presets = ["gate", "gaet"]\nrequire_signature = true\nallow_requesters = ["ann", "b*"]\n'
        '[presets.gate]\nnetwork = true\n[models]\n"nothing-dflash" = "/no/such/folder"\n'
        'any = "/no/such/model"\n'
    )
    done = owner.type("check", "--json")
    assert done.code == 0
    assert [each["message"].removeprefix("policy.toml: ") for each in done.json["findings"]] == [
        "allow_presets: gaet is not a preset of this machine",
        "presets.gate.network: gate does not ask for the network and gets none",
        "models.nothing-dflash: there is no folder /no/such/folder",
        "models.nothing-dflash: no preset needs a model of the name nothing-dflash",
        "models.any: there is no folder /no/such/model",
        "require_signature: allowed_signers lists no key, so every request is refused",
        "allow_requesters: no key in allowed_signers belongs to ann",
    ]


@pytest.mark.parametrize(
    ("text", "preset", "changes", "setting"),
    [
        ('allow_presets = ["probe"]', "gate", {}, 'policy.toml: allow_presets = ["probe"]'),
        ("# the defaults\n", "tests", {"params": {"path": "tests/a.py"}}, "default: allow_repo_code = false"),
        (
            "allow_repo_code = false",
            "tests",
            {"params": {"path": "tests/a.py"}},
            "policy.toml: allow_repo_code = false",
        ),
        ('allow_refs = ["x/*"]', "gate", {}, 'policy.toml: allow_refs = ["x/*"]'),
        ('allow_requesters = ["ann"]', "gate", {}, 'policy.toml: allow_requesters = ["ann"]'),
        ("require_signature = true", "gate", {}, "policy.toml: require_signature = true"),
        ("[quotas]\nunsigned = 0", "gate", {}, "policy.toml: quotas.unsigned = 0"),
        (
            '[presets.gate]\nrequesters = ["ann"]',
            "gate",
            {},
            'policy.toml: presets.gate.requesters = ["ann"]',
        ),
        (
            "[presets.gate.params.file]\nmaxLength = 5",
            "gate",
            {},
            'policy.toml: presets.gate.params.file = {"maxLength": 5}',
        ),
    ],
    ids=str,
)
def test_the_key_that_refuses_is_named(
    owner: PolicyOwner, text: str, preset: str, changes: dict[str, object], setting: str
) -> None:
    owner.write(text)
    path = str(owner.request(preset, **changes))
    done = owner.type("explain", path, "--json")
    assert done.code == 2
    assert not done.json["allowed"]
    assert done.json["line"] == setting
    assert f"\n  {setting}\n" in owner.type("explain", path).out
    assert not (owner.config.parent / "state").exists()


def test_what_no_key_refuses_has_its_reason_all_the_same(owner: PolicyOwner) -> None:
    old = datetime(2026, 1, 1, tzinfo=UTC)
    nonce = f"20260101t000000z{'0' * 12}"
    expired: dict[str, object] = {
        "nonce": nonce,
        "result_ref": refs.request_ref("gate", nonce, None),
        "created_at": old,
        "expires_at": old + timedelta(hours=1),
    }
    cases: tuple[tuple[dict[str, object], str], ...] = (
        ({"preset": "nonesuch"}, "unknown_preset"),
        ({"params": {"file": "../x"}}, "bad_parameter"),
        (expired, "expired"),
    )
    for changes, reason in cases:
        path = owner.request(**changes)  # type: ignore[arg-type]
        done = owner.type("explain", str(path), "--json")
        assert (done.code, done.json["reason"], done.json["line"]) == (2, reason, None), done.out
    path.write_text("{")
    assert owner.type("explain", str(path), "--json").json["reason"] == "bad_manifest"
    done = owner.type("explain", str(owner.request()), "--remote", "https://example.org/else", "--json")
    assert done.json["reason"] == "wrong_audience"


def test_what_is_allowed_is_shown_with_what_the_job_would_get(
    owner: PolicyOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWNERS_CHOICE", "1")
    owner.write(
        'environment = ["OWNERS_CHOICE", "NOT_SET"]\nmax_timeout_s = 50\n[limits]\nmemory = "1 GiB"\n'
    )
    done = owner.type("explain", str(owner.request()), "--requester", "ann", "--json")
    assert done.code == 0
    job = done.json["job"]
    assert (job["requester"], job["timeout_s"], job["network"]) == ("ann", 50, False)
    assert job["environment"] == ["OWNERS_CHOICE"]
    assert job["limits"]["memory_bytes"] == 1 << 30
    assert "reports/a.json" in job["argv"]
    assert '"memory_bytes": 1073741824' in owner.type("explain", str(owner.request())).out


@pytest.mark.skipif(not signing.available(), reason="needs ssh-keygen")
def test_a_signature_says_who_asks(owner: PolicyOwner, tmp_path: Path) -> None:
    owner.write("require_signature = true\n")
    key = signing.ensure_key(tmp_path / "ann", "ann")
    line = allowed_line(signing.public_key(key), "ann", signing.REQUEST_NAMESPACE)
    (owner.config / "allowed_signers").write_text(line)
    path = owner.request()
    signature = tmp_path / "request.json.sig"
    signature.write_bytes(signing.sign(key, signing.REQUEST_NAMESPACE, path.read_bytes()))
    done = owner.type("explain", str(path), "--signature", str(signature), "--json")
    assert done.json["job"]["requester"] == "ann", done.out
    other = owner.type("explain", str(owner.request()), "--signature", str(signature), "--json")
    assert other.json["reason"] == "bad_signature"
    both = owner.type("explain", str(path), "--signature", str(signature), "--requester", "ann")
    assert both.code == 2
