"""The disk of a runner is full for a while."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.faults import jobs
from tests.e2e.faults.machines import Machine
from tests.e2e.faults.plan import RequestKind
from tests.e2e.faults.scene import Scene
from tests.fixtures.repo import wait_for

pytestmark = pytest.mark.e2e

SIZE = "24m"


class Disk:
    """A small disk of one runner's own, in a mount namespace that ends with the runner."""

    def __init__(self, scene: Scene) -> None:
        assert shutil.which("unshare"), "unshare is not installed, and this test needs it: util-linux has it"
        self._point = scene.repo.root / "disk"
        self._point.mkdir()
        flags = ["--mount"] if os.getuid() == 0 else ["--mount", "--user", "--map-root-user"]
        probe = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True)
        assert probe.returncode == 0, f"this test needs a mount namespace, and got none: {probe.stderr}"
        script = f'mount -t tmpfs -o size={SIZE} small "$0" && exec "$@"'
        prefix = ("unshare", *flags, "sh", "-c", script, str(self._point))
        self.machine: Machine = scene.machine(
            lease_s=6.0, prefix=prefix, states=[self._point / "state"], env={"TMPDIR": str(self._point)}
        )

    def fill(self) -> None:
        """Write until nothing more fits."""
        handle = os.open(self._ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for size in (1 << 20, 1 << 12, 1):
            while _fits(handle, size):
                pass
        os.close(handle)

    def free(self) -> None:
        """Free the space again."""
        self._ballast.unlink()

    @property
    def _ballast(self) -> Path:
        return self.machine.inside(self._point / "ballast")


def _fits(handle: int, size: int) -> bool:
    try:
        return os.write(handle, b"\0" * size) > 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False


def complains(machine: Machine) -> bool:
    return re.search(r"no space left|disk is full|not enough room", machine.text(), re.IGNORECASE) is not None


@pytest.mark.unsandboxed  # a job may make no namespace
def test_idle_runner_reports_a_full_disk_and_resumes_with_space(scene: Scene):
    disk = Disk(scene)
    disk.machine.start()
    scene.answered(scene.ask())
    disk.fill()
    asked = [scene.ask() for _ in range(3)]
    with scene.explained():
        wait_for(lambda: complains(disk.machine), 20, "a word about the full disk")
        assert disk.machine.up, "the runner died of it"
    disk.free()
    for nonce in asked:
        scene.answered(nonce, 90)
    results = scene.close()
    assert {results[nonce].result.verdict.status for nonce in asked} == {"passed"}


@pytest.mark.unsandboxed  # a job may make no namespace
def test_disk_that_fills_during_a_job_ends_it_and_keeps_the_result(scene: Scene):
    disk = Disk(scene)
    disk.machine.start()
    nonce = scene.ask(20.0, RequestKind.CROWDED)
    scene.started(nonce)
    disk.fill()
    with scene.explained():
        wait_for(lambda: scene.is_answered(nonce) or complains(disk.machine), 40, "an answer or a word")
        assert disk.machine.up, "the runner died of it"
    disk.free()
    scene.answered(nonce, 90)
    later = scene.ask()
    scene.answered(later, 90)
    results = scene.close()
    assert not jobs.read_ledger(scene.repo).ended[nonce]
    assert results[later].result.verdict.status == "passed"


def test_files_that_a_full_disk_left_empty_do_not_stop_the_next_start(scene: Scene):
    runner = scene.machine(lease_s=4.0)
    runner.start()
    nonce = scene.ask(1.0)
    scene.started(nonce)
    runner.kill()
    [folder] = runner.states[0].glob("runner/mac1")
    for path in [folder / "id", *folder.glob("store-*.sqlite*")]:
        if path.is_file():
            path.write_bytes(b"")
    runner.start()
    scene.answered(nonce, 60)
    scene.close()
