"""Packages of other projects from the package index, by version and digest, for tests alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def download(requirements: str, place: Path, kept: Path, *options: str) -> None:
    """Download what lines of requirements with digests name; where that fails, the test does and says why.

    Args:
        requirements: as in a requirements file.
        place: a folder for the files.
        kept: where the caller keeps what it takes from them, for the message.
        options: more of them for ``pip download``.
    """
    wanted = place / "requirements.txt"
    wanted.write_text(requirements)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--require-hashes", "--dest", str(place), "--requirement", str(wanted), *options),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        names = ", ".join(line.partition(" ")[0] for line in requirements.splitlines())
        pytest.fail(
            f"{names} could not be fetched; run this test once with a package index within reach: "
            f"{kept.name}/ keeps what later runs need\n{done.stderr}",
            pytrace=False,
        )
