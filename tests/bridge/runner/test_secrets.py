"""What a machine must not publish is cut from logs, command lines and registrations, wherever it is kept."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path

import pytest

from bridge.bus.results import Believed
from bridge.protocol.manifest import Against
from bridge.runner.child import JobCommand, JobExit, Supervisor
from tests.fixtures.runner import RunnerFixture

FILES = {
    ".netrc": "machine example.org\n  login me\n  password netrc-word-1\n",
    ".git-credentials": "https://me:credential%2Dword-2@example.org\n",
    ".config/gh/hosts.yml": "github.com:\n    oauth_token: gho_hosts-word-3\n    git_protocol: https\n",
    ".aws/credentials": "[default]\naws_secret_access_key = aws/secret+word4\nregion = eu-central-1\n",
    ".docker/config.json": '{"auths": {"hub": {"auth": "ZG9ja2VyOndvcmQtNQ=="}}, "credsStore": "desktop"}',
    ".npmrc": "//registry.example.org/:_authToken=npm_word-6\nalways-auth=true\n",
    ".pypirc": "[pypi]\nusername = __token__\npassword = pypi-AgEword-7\n",
    ".cache/huggingface/token": "hf_token-word-8\n",
}
WORDS = (
    "netrc-word-1",
    "credential-word-2",
    "gho_hosts-word-3",
    "aws/secret+word4",
    "ZG9ja2VyOndvcmQtNQ==",
    "npm_word-6",
    "pypi-AgEword-7",
    "hf_token-word-8",
    "remote%20word-9",
    "remote word-9",
    "configured-word-10",
    "variable-word-11",
)
INNOCENT = ("example.org", "eu-central-1", "git_protocol", "__token__", "id_of_the_signing_key")


@pytest.fixture
def home(runner: RunnerFixture) -> Path:
    """A home with credentials of many programs, and settings with an address that holds one."""
    home = runner.repo.root / "ann"
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    settings = (
        'remote = "https://me:configured-word-10@example.org/r"\nsigning_key = "id_of_the_signing_key"\n'
    )
    (runner.config / "config.toml").write_text(settings)
    return home


def test_secrets_are_found_wherever_the_machine_keeps_them(runner: RunnerFixture, home: Path) -> None:
    config = dataclasses.replace(
        runner.config_of(),
        home=home,
        remote="https://me:remote%20word-9@example.org/r.git",
        environment={"MY_TOKEN": "variable-word-11", "EDITOR": "example.org"},
    )
    secrets = config.secrets()
    for word in WORDS:
        assert word not in secrets.cut_text(f"x {word} y"), word
        assert secrets.found_in(base64.b64encode(f"me:{word}".encode())), word
    for word in INNOCENT:
        assert secrets.cut_text(word) == word


def test_the_runners_own_key_is_never_published(runner: RunnerFixture) -> None:
    config = runner.config_of()
    if config.key is None:
        pytest.skip("no ssh-keygen on this machine, so there is no key")
    key = config.key.read_bytes()
    shown = config.secrets().cut(key)
    assert all(
        line not in shown for line in key.splitlines() if len(line) >= 16 and not line.startswith(b"-")
    )


@pytest.mark.parametrize("odd", ["a folder", "unreadable", "bytes of no encoding", "huge"])
def test_a_credential_file_that_is_none_is_no_obstacle(runner: RunnerFixture, home: Path, odd: str) -> None:
    path = home / ".netrc"
    path.unlink()
    if odd == "a folder":
        path.mkdir()
    else:
        path.write_bytes(
            {"unreadable": b"x", "bytes of no encoding": b"password \xff\xfe\x00wordword"}.get(
                odd, b"password " * 100_000
            )
        )
        path.chmod(0 if odd == "unreadable" else 0o600)
    secrets = dataclasses.replace(runner.config_of(), home=home).secrets()
    assert secrets.cut_text("npm_word-6").startswith("[redacted:~/.npmrc")


def test_variables_of_the_policy_are_cut_from_logs_not_evidence(
    runner: RunnerFixture,
) -> None:
    runner.policy('environment = ["DATA", "MISSING"]\n')
    ours = {"DATA": "/volumes/data", "MY_TOKEN": "variable-word-11", "OTHER": "not lent at all"}
    secrets = dataclasses.replace(runner.config_of(), environment=ours).secrets()
    assert secrets.cut_text("/volumes/data not lent at all") == "[redacted:DATA] not lent at all"
    assert secrets.found_in(b"/volumes/data variable-word-11") == ("MY_TOKEN",)


SECRET = "correct horse battery"


def tell(runner: RunnerFixture, program: str, *values: str) -> Believed:
    """What is published of a job that prints a secret of the machine."""
    script = runner.repo.root / "teller.py"
    script.write_text(f"import sys, time\nword = 'yrettab esroh tcerroc'[::-1]\n{program}\n")
    runner.preset("teller", ["${python}", "-I", str(script), *values])
    asked = runner.ask("teller")
    assert runner.serve_once() == 1
    return runner.answer(asked.nonce)


def test_a_secret_in_two_writes_and_in_a_command_line_is_in_no_result(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", SECRET)
    monkeypatch.setenv("GREETING", f"hello {SECRET}")
    program = "print(word[:9], end='', flush=True); time.sleep(0.3); print(word[9:])"
    answer = tell(runner, program, "${env:GREETING}")
    assert answer.files["log.txt"] == b"[redacted:MY_SECRET_TOKEN]\n"
    assert answer.result.commands[0].argv[-1] == "hello [redacted:MY_SECRET_TOKEN]"
    assert b"battery" not in answer.result.to_bytes()


@pytest.mark.slow
def test_a_secret_that_the_cap_of_the_log_cuts_in_two_is_in_no_log(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", SECRET)
    answer = tell(runner, "sys.stdout.write('x' * ((8 << 20) - 10) + word + 'x' * 100000)")
    assert answer.result.verdict.reason == "output_limit"
    assert answer.files["log.txt"].endswith(b"xxx[redacted:MY_SECRET_TOKEN]")


@pytest.mark.exhaustive  # the rule itself: test_paired_run.py
def test_a_secret_in_the_report_of_a_run_out_of_time_is_not_ignored(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", SECRET)
    seconds = 0.01

    def run(_: Supervisor, job: JobCommand, *_args: object, **_kwargs: object) -> JobExit:
        """Both warm-ups and one block end well, the run after them leaks and does not end."""
        nonlocal seconds
        seconds += 0.01
        timed_out = seconds > 0.075
        if timed_out:
            (Path(job.folder) / "out" / "report.json").write_text(SECRET)
        return JobExit(None if timed_out else 0, seconds, timed_out, False, False, 0)

    monkeypatch.setattr(Supervisor, "run", run)
    runner.preset("pair", ["${python}", "{word}", "${out:report}"])
    other = Against(workload_sha=runner.repo.head(), params={"word": "other"})
    asked = runner.ask("pair", against=other)
    assert runner.serve_once() == 1
    verdict = runner.answer(asked.nonce).result.verdict
    assert (verdict.status, verdict.reason) == ("rejected", "evidence")
    assert [each.code for each in verdict.violations] == ["SECRET_IN_EVIDENCE"]
