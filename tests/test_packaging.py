"""What an install brings: a light client, exact pins where private parts are used, sizes that stay small."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
PACKAGES = {package["name"]: package for package in LOCK["package"]}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def closure(names: list[str]) -> set[str]:
    """Everything that installing `names` brings, whatever the platform."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            names += [entry["name"] for entry in PACKAGES[name].get("dependencies", [])]
    return found


def test_a_client_install_brings_no_array_library():
    brought = closure([entry["name"] for entry in PACKAGES["kakeya-mac"]["dependencies"]])
    assert not brought & {"mlx", "mlx-lm", "mlx-cpu", "mlx-metal", "numpy", "transformers", "torch"}
    assert {"click", "pydantic", "gitpython", "jsonschema", "requests", "rich"} <= brought


def test_mlx_and_mlx_lm_are_pinned_exactly():
    engine = PROJECT["optional-dependencies"]["engine"]
    assert all("==" in entry for entry in engine if entry.startswith("mlx"))


def test_the_lock_names_the_public_index_only():
    sources = {tuple(package["source"].items()) for package in LOCK["package"]}
    assert sources == {(("registry", "https://pypi.org/simple"),), (("editable", "."),)}


@pytest.mark.parametrize("name", ["kakeya_mac", "kakeya-mac", "kakeya_engine", "kakeya-engine"])
def test_every_command_exists(name: str):
    assert name in PROJECT["scripts"]


def test_a_wheel_holds_the_product_and_none_of_the_maintainers_tools():
    targets = PYPROJECT["tool"]["hatch"]["build"]["targets"]
    packages = ["bridge", "engine", "evidence_format"]
    assert targets["wheel"]["packages"] == packages
    assert targets["sdist"]["include"] == [*packages, "README.md", "LICENSE", "CHANGELOG.md"]


def test_the_shipped_pair_is_small_and_is_what_its_digests_say():
    folder = ROOT / "engine" / "models" / "demo"
    digests = json.loads((folder / "DIGESTS.json").read_text(encoding="utf-8"))
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file() and p.parent != folder}
    assert {name for name in digests if "/" in name} == set(files)
    for name, path in files.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digests[name], name
    assert sum(path.stat().st_size for path in files.values()) <= 12_000_000


def test_the_repository_stays_under_40_mb():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    sizes = [(ROOT / name).stat().st_size for name in listed if name and (ROOT / name).is_file()]
    assert sum(sizes) < 40_000_000


def required(extra: str | None) -> set[str]:
    """Names of the packages that the project asks for, itself, by an extra or by a group."""
    groups = {**PROJECT["optional-dependencies"], **PYPROJECT["dependency-groups"]}
    entries = PROJECT["dependencies"] if extra is None else groups[extra]
    return {re.match(r"[\w.-]+", entry)[0] for entry in entries}  # type: ignore[index]


def documented() -> list[dict[str, str]]:
    """Licences by package, one dictionary a table of the page, in its order."""
    parts = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").split("\n## ")[1:]
    tables = [dict(re.findall(r"^\| ([\w.-]+) \| (.+?) \| .{10,} \|$", part, re.M)) for part in parts]
    return [{name: table[name] for name in table if name != "package"} for table in tables if table]


def test_the_page_of_dependencies_names_each_and_no_other():
    named = [set(table) for table in documented()]
    assert named == [required(extra) for extra in (None, "engine", "attest", "mcp", "build", "dev")]


def test_licences_are_those_of_the_installed_packages():
    for table in documented():
        for name, licence in table.items():
            metadata = importlib.metadata.metadata(name)
            keys = ("License-Expression", "License", "Classifier")
            said = " ".join(str(metadata.get_all(key)) for key in keys)
            said += importlib.metadata.distribution(name).read_text("licenses/LICENSE") or ""
            first = licence.partition(" ")[0]
            words = {"Apache-2.0": ("Apache-2.0", "Apache Software License", "Apache")}.get(first, (first,))
            assert any(word in said for word in words), f"{name}: {said[:300]}"
