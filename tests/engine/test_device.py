"""Which BLAS is in use, decided before mlx is imported: checked in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import device

ROOT = Path(__file__).resolve().parents[2]
RATE = """
import json, time
from engine.device import load_fast_blas
chosen = load_fast_blas()
import mlx.core as mx
a = mx.random.normal((512, 512)); mx.eval(a @ a)
best = 9e9
for _ in range(5):
    t = time.perf_counter(); mx.eval(a @ a); best = min(best, time.perf_counter() - t)
print(json.dumps(chosen._asdict() | {"rate": 2 * 512**3 / best / 1e9}))
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS multiplies with Accelerate or Metal")


def child(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != device.SWITCH}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False
    )


def report(**environment: str) -> dict:
    done = child(RATE, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@linux
def test_what_is_called_fast_multiplies_several_times_as_fast_as_the_reference():
    found, reference = report(), report(KAKEYA_BLAS="reference")
    assert (reference["name"], reference["fast"]) == ("reference", False)
    if found["fast"]:
        assert found["rate"] > 3 * reference["rate"]
        assert any(mark in found["name"] for mark in device.FAST_MARKS)
    else:  # nothing installed: the report says how to mend it
        assert device.INSTALL_HINT in found["how"]


@linux
def test_a_processor_newer_than_openblas_is_not_taken_for_an_old_one():
    script = (
        "import ctypes, os; from engine import device; blas = device.load_fast_blas();"
        "core = getattr(ctypes.CDLL(None), 'openblas_get_corename', lambda: b'');"
        "core.restype = ctypes.c_char_p; print(core().decode(), os.environ.get(device.CORE))"
    )
    core, named = child(script).stdout.split()
    able = any(needed <= device._cpu_flags() for needed in device.CORES.values())
    assert not (able and core == device.UNKNOWN_CORE.decode())
    assert named in {"None", core}
    if able:  # somebody's own choice stands
        chosen = device.UNKNOWN_CORE.decode()
        assert child(script, **{device.CORE: chosen}).stdout.split() == [chosen, chosen]


@linux
def test_a_library_that_cannot_take_effect_any_more_is_not_claimed():
    script = (
        "import mlx.core, sys\n"
        "from engine.device import load_fast_blas\n"
        "chosen = load_fast_blas()\n"
        "print(chosen.fast, chosen.how)"
    )
    assert child(script).stdout.strip() == "False mlx was imported before a fast BLAS could be loaded"


def test_importing_the_package_imports_no_mlx():
    script = (
        "import engine, sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')))"
    )
    assert child(script).stdout.strip() == "[]"


def test_an_unknown_switch_is_one_clear_error():
    done = child("from engine.cli import main; main(['probe'])", KAKEYA_BLAS="fastest")
    assert done.returncode == 2
    assert "KAKEYA_BLAS='fastest' is not one of auto, reference" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_cpus_counted_are_those_this_process_may_use():
    assert 1 <= device.available_cpus() <= (os.cpu_count() or 1)


@pytest.mark.slow
@linux
def test_without_a_compiler_kernels_stay_unfused_and_the_model_still_runs(tmp_path: Path):
    script = (
        "from engine.device import prepare\n"
        "runtime = prepare()\n"
        "import mlx.core as mx\n"
        "from tests.engine import tiny\n"
        "model = tiny.build()\n"  # gelu and the residual are fused functions in mlx-lm
        "print(runtime.compiles, len(tiny.plain_tokens(model, [5, 6, 7], 4)))"
    )
    done = child(script, PATH=str(tmp_path), TMPDIR=str(tmp_path))
    assert done.stdout.strip() == "False 4", done.stderr


@linux
def test_a_narrow_model_uses_one_thread_unless_the_environment_says_otherwise():
    script = (
        "from engine import device; device.load_fast_blas(); import mlx.core; before = device.threads();"
        "device.fit_threads(512); wide = device.threads(); device.fit_threads(128);"
        "print(before, wide, device.threads())"
    )
    before, wide, narrow = child(script).stdout.split()
    assert (wide, narrow) == (before, "None" if before == "None" else "1")
    before, wide, narrow = child(script, OPENBLAS_NUM_THREADS="2").stdout.split()
    assert before == wide == narrow


@linux
def test_what_a_limit_on_the_address_space_leaves_is_free():
    limit = "import resource as r, psutil; from engine.device import RESERVED, free_memory; import mlx.core; "
    limit += "most = psutil.Process().memory_info().vms + RESERVED + 2**26; "
    limit += "r.setrlimit(r.RLIMIT_AS, (most, -1))"
    done = child(f"{limit}; print(free_memory())")
    assert 0 < int(done.stdout) <= 2**26, done.stderr
