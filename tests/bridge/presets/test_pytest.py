"""The presets that run pytest, on repositories of many shapes: their command, run in such a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge import presets
from bridge.errors import ParameterError

WHOLE = (
    "import pytest\n\n\n@pytest.mark.{}\ndef test_whole():\n    pass\n\n\n"
    "def test_of_another_kind():\n    assert False\n"
)
E2E, INTEGRATION = WHOLE.format("e2e"), WHOLE.format("integration")
STRICT = "[pytest]\naddopts = --strict-markers --strict-config -m 'not {0}'\nmarkers = {0}: whole programs\n"
# Files of a repository by its shape. Its one marked test passes, and no other.
SHAPES: dict[str, dict[str, str]] = {
    "only e2e": {"tests/test_a.py": E2E},
    "only integration": {"tests/test_a.py": INTEGRATION},
    "strict markers, only e2e": {"tests/test_a.py": E2E, "pytest.ini": STRICT.format("e2e")},
    "strict markers, only integration": {
        "tests/test_a.py": INTEGRATION,
        "pytest.ini": STRICT.format("integration"),
    },
    "strict by its own option": {
        "tests/test_a.py": INTEGRATION,
        "pyproject.toml": '[tool.pytest.ini_options]\nstrict_markers = true\nmarkers = ["integration: x"]\n',
    },
    "marks that are registered nowhere": {"tests/test_a.py": INTEGRATION, "tests/test_b.py": "X = 1\n"},
    "a mark on a module": {
        "tests/test_a.py": "import pytest\npytestmark = pytest.mark.e2e\ndef test_a(): pass\n"
    },
    "exhaustive ones": {
        "tests/test_a.py": E2E,
        "tests/test_b.py": (
            "import pytest\npytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]\n"
            "def test_b(): assert False\n"
        ),
    },
    "what a job cannot have": {
        "tests/test_a.py": INTEGRATION,
        "tests/test_b.py": (
            "import pytest\npytestmark = [pytest.mark.integration, pytest.mark.unsandboxed]\n"
            "def test_b(): assert False\n"
        ),
    },
    "src layout": {"src/package/__init__.py": "", "tests/test_a.py": f"import package\n{E2E}"},
    "a python path of its own": {
        "lib/package/__init__.py": "",
        "pytest.ini": "[pytest]\npythonpath = lib\n",
        "tests/test_a.py": f"import package\n{E2E}",
    },
    "tests next to the code": {
        "package/__init__.py": "",
        "package/tests/__init__.py": "",
        "package/tests/test_a.py": f"import package.tests\n{INTEGRATION}",
    },
    "tests in another folder": {
        "checks/test_a.py": INTEGRATION.replace("test_whole()", "test_whole(given)"),
        "checks/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef given():\n    return 1\n",
        "pytest.ini": "[pytest]\ntestpaths = checks\n",
        "vendor/test_b.py": "raise SystemExit('not a test of this repository')\n",
    },
    "helpers in a package of tests": {
        "tests/__init__.py": "",
        "tests/helpers.py": "",
        "tests/e2e/__init__.py": "",
        "tests/e2e/test_a.py": f"from tests import helpers\n{E2E}",
    },
    "files of one name": {
        "tests/a/test_a.py": E2E,
        "tests/b/test_a.py": INTEGRATION,
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
    },
    "what was written before": {
        "tests/test_a.py": E2E,
        "pytest.ini": "[pytest]\naddopts = --strict-config --failed-first\ncache_dir = .cache\n",
    },
    "every warning an error": {
        "tests/test_a.py": E2E,
        "pytest.ini": "[pytest]\nfilterwarnings = error\nmarkers = e2e: whole programs\n",
    },
    "several workers": {
        "src/package/__init__.py": "",
        "tests/test_a.py": f"import package\n{E2E}",
        "pytest.ini": "[pytest]\naddopts = -n 2\n",
    },
}


def ran(folder: Path, preset: str, **params: str) -> subprocess.CompletedProcess[str]:
    """What the preset's job does in a workspace with these files."""
    chosen = presets.get(preset)
    argv = presets.argv(chosen, presets.validate(chosen, params), lambda *_: [sys.executable])
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=100)


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_marked_tests_of_any_repository_run(tmp_path: Path, shape: str) -> None:
    done = ran(written(tmp_path, SHAPES[shape]), "integration-tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("2 passed" if shape == "files of one name" else "1 passed") in done.stdout


@pytest.mark.slow
def test_a_repository_without_the_marks_is_not_passed(tmp_path: Path) -> None:
    done = ran(written(tmp_path, {"tests/test_a.py": "def test_a(): pass\n"}), "integration-tests")
    assert done.returncode == 5, "no tests ran"


@pytest.mark.slow
def test_other_marks_and_one_path_may_be_asked_for(tmp_path: Path) -> None:
    files = {"tests/test_a.py": E2E, "tests/deep/test_b.py": INTEGRATION}
    folder = written(tmp_path, files)
    assert "1 passed" in ran(folder, "integration-tests", marks="integration").stdout
    assert "2 passed" in ran(folder, "integration-tests", marks="e2e or integration").stdout
    assert "1 passed" in ran(folder, "integration-tests", path="tests/deep").stdout
    assert "2 failed, 2 passed" in ran(folder, "tests").stdout
    assert "1 failed, 1 passed" in ran(folder, "tests", path="tests/deep/test_b.py").stdout


@pytest.mark.parametrize("marks", ["-p evil", "--co", "e2e\nx", "e2e; id", "", "x" * 201])
def test_marks_are_an_expression_and_nothing_else(marks: str) -> None:
    with pytest.raises(ParameterError, match="parameter marks"):
        presets.validate(presets.get("integration-tests"), {"marks": marks})
