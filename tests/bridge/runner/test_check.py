"""What may run here is decided by this machine's files; everything else is refused, with its reason."""

from datetime import UTC, datetime, timedelta

import pytest

from bridge.git.repo import GitRepo, RefUpdate
from bridge.protocol import refs
from bridge.protocol.manifest import REQUEST_PATH
from bridge.protocol.result import Reason, Status
from tests.bridge.runner.bench import Bench


@pytest.mark.sampled(6, 1)
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
    bench: Bench, changes: dict[str, object], reason: Reason
) -> None:
    asked = bench.ask(**changes)  # type: ignore[arg-type]
    assert bench.serve_once() == 1
    answer = bench.answer(asked.nonce)
    assert answer.result.verdict.status is Status.REFUSED
    assert answer.result.verdict.reason is reason
    assert answer.result.verdict.message
    assert answer.result.commands == ()
    assert refs.inbox_ref(asked.nonce) not in bench.house.remote_refs()


@pytest.mark.slow
def test_preset_that_this_machine_cannot_run_is_refused(bench: Bench) -> None:
    bench.preset("huge", ["/bin/true"], tail="[requires]\nmemory_gb = 1e9\n")
    bench.preset("lacking", ["/bin/true"], tail='[requires]\nmodules = ["no_such_module"]\n')
    bench.preset(
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
        asked = bench.ask(preset)
        bench.serve_once()
        assert bench.verdict(asked.nonce) == answer


def test_expiry_is_judged_by_the_clock_of_the_runner(bench: Bench) -> None:
    asked = bench.ask()
    later = datetime.now(UTC) + timedelta(hours=2)
    bench.runner(now=lambda: later).serve(once=True, idle_timeout_s=20)
    assert bench.verdict(asked.nonce) == ("refused", "expired")


def test_request_from_the_future_is_refused(bench: Bench) -> None:
    asked = bench.ask()
    earlier = datetime.now(UTC) - timedelta(days=1, minutes=1)
    bench.runner(now=lambda: earlier).serve(once=True, idle_timeout_s=20)
    assert bench.verdict(asked.nonce) == ("refused", "bad_manifest")


def hostile_commits(bench: Bench) -> dict[str, tuple[str, Reason]]:
    """Request commits of the wrong shape, in the remote: (commit, expected reason) by what is wrong."""
    manifest = bench.manifest()
    good, parent = manifest.to_bytes(), manifest.workload_sha

    def commit(files: dict[str, bytes], *parents: str) -> str:
        git = GitRepo(bench.house.remote)
        with git.scratch() as scratch:
            made = scratch.commit_files(parent, dict(files), "hostile\n", merged=parents)
            scratch.push(str(bench.house.remote), [RefUpdate(f"refs/heads/held-{made}", made, "")])
        return made

    def request(data: bytes, *parents: str, **more: bytes) -> str:
        return commit({REQUEST_PATH: data, **{f"{name}.py": text for name, text in more.items()}}, *parents)

    return {
        "another file changed": (request(good, sitecustomize=b"import os\n"), Reason.BAD_COMMIT),
        "two parents": (request(good, commit({"x": b"x"})), Reason.BAD_COMMIT),
        "no manifest": (commit({}), Reason.BAD_COMMIT),
        "not JSON": (request(b"{"), Reason.BAD_MANIFEST),
        "a duplicate key": (request(good.replace(b"{", b'{"nonce": "x", ', 1)), Reason.BAD_MANIFEST),
        "an unknown key": (request(good.replace(b"{", b'{"argv": ["sh"], ', 1)), Reason.BAD_MANIFEST),
        "another nonce": (request(bench.manifest().to_bytes()), Reason.BAD_MANIFEST),
        "a huge manifest": (request(b" " * 100_000 + good), Reason.BAD_COMMIT),
    }


@pytest.mark.slow
def test_hostile_commits_are_refused_and_the_runner_serves_on(bench: Bench) -> None:
    runner = bench.runner()
    for what, (commit, reason) in hostile_commits(bench).items():
        manifest = bench.manifest()
        for ref in (manifest.result_ref, refs.inbox_ref(manifest.nonce)):
            bench.point(ref, commit)
        assert runner.serve(once=True, idle_timeout_s=20) == 1, what
        assert bench.has_said(manifest.nonce, f"refused/{reason} "), (what, bench.said[-2:])
        places = (refs.result_ref(manifest.nonce), manifest.result_ref)
        assert any(bench.tip(ref) not in (None, commit) for ref in places), what
    asked = bench.ask()
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")


def test_broken_signature_is_refused_even_where_none_is_needed(bench: Bench) -> None:
    asked = bench.ask(signature=b"-----BEGIN SSH SIGNATURE-----\nrubbish\n")
    bench.serve_once()
    assert bench.verdict(asked.nonce) == ("refused", "bad_signature")


@pytest.mark.slow
def test_repository_code_runs_where_the_owner_allows_it(bench: Bench) -> None:
    bench.policy("allow_repo_code = true")
    files = {
        "tests/test_it.py": "from product import answer\n\n\ndef test_it():\n    assert answer == 42\n",
        "product.py": "answer = 42\n",
        "sitecustomize.py": f"open({str(bench.house.root / 'canary')!r}, 'w')\n",
    }
    bench.commit(files)
    passed = bench.ask("tests", params={"path": "tests/test_it.py"})
    bench.serve_once()
    assert bench.verdict(passed.nonce) == ("passed", "ok")
    assert "1 passed" in bench.log(passed.nonce)
    missing = bench.ask("tests", params={"path": "tests/test_other.py"})
    bench.serve_once()
    assert bench.verdict(missing.nonce) == ("refused", "bad_parameter")
    assert not (bench.house.root / "canary").exists()


def test_presets_of_the_commit_change_nothing(bench: Bench) -> None:
    bench.commit({"bridge/presets/echo.toml": 'name = "echo"\nargv = ["/bin/sh", "-c", "touch canary"]\n'})
    asked = bench.ask()
    bench.serve_once()
    assert bench.log(asked.nonce) == "hello from test\n"
