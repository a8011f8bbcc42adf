"""The architecture: which package may import which, and which file holds the only door to a side effect."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bridge", "engine", "evidence_format", "tools")
HEAVY = ("mlx", "mlx_lm", "numpy", "transformers", "torch")

# module prefix -> the only files that may import it
DOORS = {
    "subprocess": {"bridge/proc.py", "engine/child.py"},  # neither half imports the other
    "git": {"bridge/git/repo.py"},
    "requests": {"bridge/github/api.py"},
    "urllib3": {"bridge/github/api.py"},
    "urllib.request": set[str](),
    "http.client": {
        "engine/evaluation/server_client.py"
    },  # to a server of this process's own, on this machine alone
    "socket": {
        "engine/evaluation/server_client.py",  # a server of this process's own, on this machine alone
        "engine/server/serve.py",  # listens
    },
    "numpy": {
        "engine/cache/batch.py",  # positions, worked out on the host
        "engine/evaluation/codec.py",
        "engine/evaluation/parity.py",
        "tools/demo_models/corpora/batches.py",
        "tools/demo_models/drafter.py",
        "tools/demo_models/evaluate.py",
        "tools/demo_models/proposer.py",
        "tools/demo_models/selfplay.py",
    },
}

# what reads an array's buffer, waiting for the device unseen by the tests that count waits -> who may use it
BUFFERS = {
    "memoryview": {"engine/device.py"},
    "np.array": {
        "engine/evaluation/codec.py",
        "engine/evaluation/parity.py",
    },
    "np.asarray": {
        "engine/evaluation/parity.py",
    },
    "np.asanyarray": set[str](),
    "np.ascontiguousarray": set[str](),
    "np.copy": set[str](),
    "np.from_dlpack": set[str](),
    "np.frombuffer": set[str](),
}


@cache
def sources(package: str) -> list[tuple[str, ast.Module]]:
    paths = sorted((ROOT / package).rglob("*.py"))
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


@cache
def imports(package: str) -> list[tuple[str, str]]:
    """Every file of a package with each name that it imports."""
    return [(file, name) for file, tree in sources(package) for name in imported(tree)]


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("bridge", (*HEAVY, "engine", "tools")),
        ("engine", ("bridge", "git", "pydantic_settings", "tools")),
        ("evidence_format", (*HEAVY, "bridge", "engine", "tools")),
        ("tools", ("bridge", "git")),
    ],
)
def test_halves_are_independent_and_only_engine_imports_arrays(package: str, forbidden: tuple[str, ...]):
    found = [
        f"{file}: {name}"
        for file, name in imports(package)
        if any(under(name, prefix) for prefix in forbidden)
    ]
    assert not found


def test_product_code_does_not_depend_on_evaluation():
    measuring = ("engine/evaluation/", "engine/verification/", "engine/cli/")
    found = [
        f"{file}: {name}"
        for file, name in imports("engine")
        if under(name, "engine.evaluation") and not file.startswith(measuring)
    ]
    assert not found


def test_the_format_imports_the_standard_library_and_pydantic_alone():
    allowed = {*sys.stdlib_module_names, "pydantic", "pydantic_core", "evidence_format"}
    assert {name.partition(".")[0] for _, name in imports("evidence_format")} <= allowed


@pytest.mark.parametrize("package", ["bridge", "engine"])
def test_a_public_class_has_a_name_of_its_own(package: str):
    """A name in a message or a trace leads to one definition; both halves use the report's types."""
    places: dict[str, list[str]] = {}
    for file, tree in [*sources(package), *sources("evidence_format")]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("door", DOORS)
def test_a_side_effect_has_one_door(door: str):
    allowed = DOORS[door]
    found = [
        f"{file}: {name}"
        for package in PACKAGES
        for file, name in imports(package)
        if under(name, door) and file not in allowed
    ]
    assert not found


def test_numpy_goes_by_one_name():
    """By another, `BUFFERS` would not find it."""
    names = {"numpy": "np", "numpy.typing": "npt"}
    found = []
    for file, tree in sources("engine"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [
                    f"{file}:{node.lineno} {alias.name} as {alias.asname}"
                    for alias in node.names
                    if under(alias.name, "numpy") and names.get(alias.name) != alias.asname
                ]
            elif isinstance(node, ast.ImportFrom) and under(node.module or "", "numpy"):
                found.append(f"{file}:{node.lineno} from {node.module}")
    assert not found


def test_only_these_read_an_arrays_buffer():
    found: dict[str, set[str]] = {reader: set() for reader in BUFFERS}
    for file, tree in sources("engine"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                name = ast.unparse(node).removeprefix("builtins.")
                if name in found:
                    found[name].add(file)
    assert found == BUFFERS


def test_only_the_edges_print_or_exit():
    edges = (
        "bridge/cli/",
        "bridge/mac/setup.py",
        "engine/cli/",
        "engine/grammar_trial.py",
        "tools/demo_models/__main__.py",
    )
    forked = ("bridge/runner/supervisor.py",)  # a fork's child ends with os._exit
    found = []
    for package in PACKAGES:
        for file, tree in sources(package):
            if file.startswith(edges):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    if name == "os._exit" and file in forked:
                        continue
                    if name in {"print", "sys.exit", "exit", "quit", "os._exit", "sys.stdout.write"}:
                        found.append(f"{file}:{node.lineno} {name}")
    assert not found


def test_no_import_cycles_between_modules():
    graph: dict[str, set[str]] = {}
    modules = {}
    for package in PACKAGES:
        for file, tree in sources(package):
            name = file[:-3].replace("/", ".").removesuffix(".__init__")
            modules[name] = tree
    for name, tree in modules.items():
        top_level = ast.Module(
            body=[n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], type_ignores=[]
        )
        graph[name] = {m for m in imported(top_level) if m in modules and m != name}
    state: dict[str, int] = {}

    def visit(node: str, trail: tuple[str, ...]) -> None:
        assert state.get(node) != 1, f"import cycle: {' -> '.join((*trail, node))}"
        if state.get(node) == 2:
            return
        state[node] = 1
        for other in sorted(graph[node]):
            # `from a import b` names both a and a.b; a package's own __init__ is not a cycle with its parts
            if not node.startswith(other + "."):
                visit(other, (*trail, node))
        state[node] = 2

    for node in sorted(graph):
        visit(node, ())


def test_importing_the_bridge_loads_no_array_library_and_no_engine():
    names = [
        file[:-3].replace("/", ".").removesuffix(".__init__")
        for file, _ in sources("bridge")
        if not file.endswith("__main__.py")
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print([m for m in {(*HEAVY, 'engine')!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_every_module_says_what_it_is():
    missing = [
        file
        for package in PACKAGES
        for file, tree in sources(package)
        if tree.body and not ast.get_docstring(tree)
    ]
    assert not missing


def test_each_exception_from_the_security_rules_says_why():
    """`noqa: S603 - why`: without the reason no reader can tell whether it still holds."""
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in (*PACKAGES, "scripts", "benchmarks")
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"#\s*(noqa:[A-Z0-9, ]*\bS\d+|nosec)", line)
        and not re.search(r"#\s*(noqa|nosec)[^-]*- [\w`]", line)
    ]
    assert not bare
