"""What may run here is decided by this machine's files; everything else is refused, with its reason."""

from datetime import UTC, datetime, timedelta

import pytest

from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from tests.fixtures.runner import RunnerFixture


@pytest.mark.sampled(24, 1)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"preset": "nonesuch"}, Reason.UNKNOWN_PRESET),
        ({"params": {"word": 3}}, Reason.BAD_PARAMETER),
        ({"params": {"word": "--upload-pack=x"}}, Reason.BAD_PARAMETER),
        ({"params": {"words": "x"}}, Reason.BAD_PARAMETER),
        ({"preset": "tests", "params": {"path": "tests/../../x"}}, Reason.BAD_PARAMETER),
        ({"preset": "tests"}, Reason.POLICY),
        ({"audience": "example.org/else/where"}, Reason.WRONG_AUDIENCE),
        (
            {
                "created_at": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2),
                "expires_at": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1),
            },
            Reason.EXPIRED,
        ),
        ({"preset": "gate", "params": {"file": "reports/none.json"}}, Reason.BAD_WORKLOAD),
    ],
)
def test_what_may_not_run_is_refused_with_its_reason(
    runner: RunnerFixture, changes: dict[str, object], reason: Reason
) -> None:
    asked = runner.ask(**changes)  # type: ignore[arg-type]
    assert runner.serve_once() == 1
    answer = runner.answer(asked.nonce)
    assert answer.result.verdict.status is Status.REFUSED
    assert answer.result.verdict.reason is reason
    assert answer.result.verdict.message
    assert answer.result.commands == ()
    assert refs.INBOX + asked.nonce not in runner.repo.remote_refs()


@pytest.mark.slow
def test_preset_that_this_machine_cannot_run_is_refused(runner: RunnerFixture) -> None:
    runner.preset("huge", ["/bin/true"], tail="[requires]\nmemory_gb = 1e9\n")
    runner.preset("lacking", ["/bin/true"], tail='[requires]\nmodules = ["no_such_module"]\n')
    runner.preset(
        "modelled",
        ["/bin/true", "${model:gone}"],
        tail='[models.gone]\nmac = "something"\n',
    )
    expected = {
        "huge": ("refused", "machine_unfit"),
        "lacking": ("refused", "machine_unfit"),
        "modelled": ("refused", "model_missing"),
    }
    for preset, answer in expected.items():
        asked = runner.ask(preset)
        runner.serve_once()
        assert runner.verdict(asked.nonce) == answer


def test_request_from_the_future_is_refused(runner: RunnerFixture) -> None:
    asked = runner.ask()
    earlier = datetime.now(UTC) - timedelta(days=1, minutes=1)
    runner.daemon(now=lambda: earlier).serve(once=True, idle_timeout_s=20)
    assert runner.verdict(asked.nonce) == ("refused", "bad_manifest")


def test_broken_signature_is_refused_even_where_none_is_needed(runner: RunnerFixture) -> None:
    asked = runner.ask(signature=b"-----BEGIN SSH SIGNATURE-----\nrubbish\n")
    runner.serve_once()
    assert runner.verdict(asked.nonce) == ("refused", "bad_signature")


@pytest.mark.slow
def test_repository_code_runs_where_the_owner_allows_it(runner: RunnerFixture) -> None:
    runner.policy("allow_repo_code = true")
    files = {
        "tests/test_it.py": "from product import answer\n\n\ndef test_it():\n    assert answer == 42\n",
        "product.py": "answer = 42\n",
        "sitecustomize.py": f"open({str(runner.repo.root / 'canary')!r}, 'w')\n",
    }
    runner.commit(files)
    passed = runner.ask("tests", params={"path": "tests/test_it.py"})
    runner.serve_once()
    assert runner.verdict(passed.nonce) == ("passed", "ok")
    assert "1 passed" in runner.log(passed.nonce)
    missing = runner.ask("tests", params={"path": "tests/test_other.py"})
    runner.serve_once()
    assert runner.verdict(missing.nonce) == ("refused", "bad_parameter")
    assert not (runner.repo.root / "canary").exists()


def test_presets_of_the_commit_change_nothing(runner: RunnerFixture) -> None:
    runner.commit({"bridge/presets/echo.toml": 'name = "echo"\nargv = ["/bin/sh", "-c", "touch canary"]\n'})
    asked = runner.ask()
    runner.serve_once()
    assert runner.log(asked.nonce) == "hello from test\n"
