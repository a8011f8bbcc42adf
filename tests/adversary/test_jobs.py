"""Whatever a job does, its request is answered, nothing of it remains, and the next one is served."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bridge.protocol.result import Status
from tests.adversary.attacked import AttackedRunner, attacked_runner
from tests.adversary.jobs import JOBS, HostileJob
from tests.fixtures.repo import RepoFixture, wait_for

_LIMITS = """
[limits]
memory = "512 MiB"
disk = "64 MiB"
files = 1000
processes = 64
output = "256 KiB"
"""
_EVIDENCE = '[evidence]\nkind = "probe"\n'
# Those that are fast and show the most.
FEW = ("a-daemon", "a-flood", "a-report-that-is-a-link", "a-file-outside", "a-log-that-drives-a-terminal")


def install(attacked: AttackedRunner, jobs: Mapping[str, HostileJob]) -> None:
    """Write the presets, and what the jobs must not reach."""
    runner = attacked.runner
    runner.policy(_LIMITS)
    for name, job in jobs.items():
        script = attacked.repo.root / f"{name}.py"
        head = "import os, signal, sys, time\narg, out = sys.argv[1:3]\n"
        script.write_text(head + job.program + "\n")
        argv = [
            "${python}",
            "-I",
            str(script),
            str(attacked.builder.canary),
            "${out:report}",
            str(attacked.listener.port),
        ]
        runner.preset(name, argv, timeout=job.timeout_s, tail=_EVIDENCE if job.evidence else "")


def withstands(job: HostileJob, enforced: Mapping[str, object]) -> bool:
    """Whether this machine says that it enforces what the job is up against."""
    # Escaped processes are hunted down on a Mac, and those that got away are reported.
    return not job.needs or enforced[f"isolation_{job.needs}"] not in ("not enforced", "hunted")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the waits below end first, also on a machine that does much else
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, id="few"),
        pytest.param(
            tuple(name for name in JOBS if name not in FEW), id="the-others", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_hostile_job_ends_and_nothing_of_it_remains(repo: RepoFixture, names: tuple[str, ...]):
    key = repo.root / "home" / ".ssh" / "id_ed25519"
    key.parent.mkdir(parents=True)
    key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    with attacked_runner(
        repo, lambda attacked: install(attacked, {name: JOBS[name] for name in names})
    ) as attacked:
        with repo.runner("--idle", "0.2", trusted=False):
            first = attacked.runner.ask()
            attacked.wait([first.nonce], 200)
            enforced = attacked.result(first.nonce, first.result_ref).runner.machine
            asked = {name: attacked.runner.ask(name) for name in names if withstands(JOBS[name], enforced)}
            attacked.wait([one.nonce for one in asked.values()], 200 + 4 * len(names))
            good = attacked.runner.ask()
            attacked.wait([good.nonce], 200)
            wait_for(
                lambda: (
                    not any(attacked.runner.running(f"{name}.py {attacked.builder.canary}") for name in names)
                ),
                30,
                "the end of all jobs",
            )
        for name, one in asked.items():
            job, result = JOBS[name], attacked.result(one.nonce, one.result_ref)
            log = attacked.file(one.nonce, one.result_ref, "log.txt")
            assert result.verdict.reason in job.expected, (name, result.verdict, log)
            assert job.log in log, (name, log)
            assert not job.silent or job.silent not in log, (name, log)
            assert {file.path for file in result.files} <= {"log.txt", "report.json", "report.md"}, name
        assert attacked.result(good.nonce, good.result_ref).verdict.status is Status.PASSED
        assert not list((attacked.runner.state / "runner").glob("*/jobs/*"))
