"""``kv codec``: stored round trips of the published codec are met, and what falls short is shown."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.codecs.lattice import LatticeCompat
from engine.cli import run

DATA = Path(__file__).parents[2] / "data" / "lattice"
FIELDS = {
    *("name", "lattice", "q", "dim", "vectors", "blocks_identical", "relative_mse", "reference_relative_mse"),
    *("mse_ratio", "max_abs_difference", "passed", "vectors_left_out"),
}
Arrays = dict[str, Any]


def codec(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    code = run(["kv", "codec", "--golden", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def entries_of(out: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(out.splitlines()[-1])["entries"]}


def stored(*names: str) -> Arrays:
    """Some arrays of the first file."""
    with np.load(DATA / "seed_1.npz") as file:
        return {name: file[name] for name in names}


def saved(folder: Path, arrays: Arrays, **more: Any) -> Path:
    np.savez(folder / "golden.npz", **arrays, **more)
    return folder / "golden.npz"


@pytest.fixture
def small() -> Arrays:
    return stored("x_64", "d4_q38_64", "e8_q4_64")


def test_stored_references_have_their_digests():
    listed = json.loads((DATA / "DIGESTS.json").read_text())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in DATA.glob("*.npz")}
    assert found == listed


@pytest.mark.parametrize("name", ["lattice_codec", "seed_1", "seed_2"])
def test_every_stored_entry_is_met(name: str, capsys):
    code, out, err = codec(capsys, DATA / f"{name}.npz", "--json")
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    document = json.loads(out)
    assert document["passed"] is True
    assert set(document["worst"]) == {"blocks_identical", "mse_ratio", "max_abs_difference"}
    with np.load(DATA / f"{name}.npz") as file:
        names = [entry for entry in file.files if not entry.startswith("x_")]
        rows = {entry: file[entry].shape for entry in names}
    assert [entry["name"] for entry in document["entries"]] == names
    for entry in document["entries"]:
        assert set(entry) == FIELDS
        assert entry["name"] == f"{entry['lattice']}_q{entry['q']}_{entry['dim']}"
        assert (entry["vectors"], entry["dim"]) == rows[entry["name"]]
        assert entry["passed"] is True
        assert entry["blocks_identical"] >= 0.999
        assert abs(entry["mse_ratio"] - 1) < 1e-4
        assert entry["reference_relative_mse"] > 0


def rows_of(out: str) -> list[list[str]]:
    """The cells of the table's entries; a share and its sign are one cell."""
    lines = [line.replace(" %", "%").split() for line in out.splitlines()]
    return [cells for cells in lines if cells and re.fullmatch(r"(d4|e8)_q\d+_\d+", cells[0])]


def test_table_has_a_row_per_entry_and_the_json_line(
    small: Arrays, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "140")
    code, out, err = codec(capsys, saved(tmp_path, small))
    assert (code, err) == (0, "")
    assert [[row[0], row[1], row[2], row[-1]] for row in rows_of(out)] == [
        ["d4_q38_64", "32", "100.000%", "yes"],
        ["e8_q4_64", "32", "100.000%", "yes"],
    ]
    assert "left out of the MSE: rows that the reference loses, at most 2 of an entry" in out
    assert json.loads(out.splitlines()[-1])["passed"] is True


def test_an_entry_that_falls_short_is_exit_1_and_shown(
    small: Arrays, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "140")
    small["e8_q4_64"][20] *= 1.01
    code, out, err = codec(capsys, saved(tmp_path, small))
    assert code == 1
    assert "1 of 2 entries differ" in err
    assert [row[-1] for row in rows_of(out)] == ["yes", "NO"]
    document = json.loads(out.splitlines()[-1])
    assert (document["passed"], [entry["passed"] for entry in document["entries"]]) == (False, [True, False])
    assert document["worst"]["blocks_identical"] == document["entries"][1]["blocks_identical"] == 1 - 1 / 32


def one_step(arrays: Arrays) -> None:
    """One coordinate of one block of a row is another lattice point's; then its row's MSE is off too."""
    signs = np.ones((1, 1))
    while len(signs) < 64:
        signs = np.block([[signs, signs], [signs, -signs]])
    turned = arrays["d4_q38_64"][20].astype(np.float64) @ (signs / 8)
    turned[9] += np.abs(turned).max() / 38
    arrays["d4_q38_64"][20] = turned @ (signs / 8)


def swap_rows(arrays: Arrays) -> None:
    arrays["d4_q38_64"][[20, 21]] = arrays["d4_q38_64"][[21, 20]]


def to_rows(arrays: Arrays) -> None:
    """A reference without any error."""
    arrays["d4_q38_64"] = arrays["x_64"]


def half(arrays: Arrays) -> None:
    arrays["d4_q38_64"] = arrays["d4_q38_64"] / 2


@pytest.mark.parametrize(
    ("change", "identical"),
    [(one_step, 1 - 1 / 512), (swap_rows, 1 - 2 / 32), (to_rows, None), (half, None)],
)
def test_other_points_are_counted(
    change: Callable[[Arrays], None], identical: float | None, small: Arrays, capsys, tmp_path: Path
):
    change(small)
    code, out, _ = codec(capsys, saved(tmp_path, small), "--json")
    assert code == 1
    entries = entries_of(out)
    assert entries["e8_q4_64"]["passed"] is True
    wrong = entries["d4_q38_64"]
    assert wrong["passed"] is False
    assert wrong["blocks_identical"] == identical if identical else wrong["blocks_identical"] < 0.5
    if change is to_rows:
        assert (wrong["mse_ratio"], wrong["reference_relative_mse"]) == (None, 0.0)


def test_last_bits_do_not_count(small: Arrays, capsys, tmp_path: Path):
    for name in ("d4_q38_64", "e8_q4_64"):
        small[name] = np.nextafter(small[name], np.inf, dtype=np.float32)
    code, out, _ = codec(capsys, saved(tmp_path, small), "--json")
    assert code == 0
    assert all(entry["blocks_identical"] == 1 for entry in entries_of(out).values())


def test_rows_of_zeros_alone_pass(capsys, tmp_path: Path):
    zeros = np.zeros((3, 32), np.float32)
    code, out, _ = codec(capsys, saved(tmp_path, {"x_32": zeros, "e8_q38_32": zeros}), "--json")
    assert code == 0
    entry = entries_of(out)["e8_q38_32"]
    assert (entry["relative_mse"], entry["mse_ratio"], entry["blocks_identical"]) == (0.0, 1.0, 1.0)


def test_rows_that_the_reference_loses_hide_no_error(capsys, tmp_path: Path):
    """Beside eight rows that it makes zeros, an error of the others still fails."""
    arrays = {name: value[16:] for name, value in stored("x_64", "e8_q38_64").items()}
    tiny = np.full((8, 64), 1e-33, np.float32)
    arrays = {"x_64": [*arrays["x_64"], *tiny], "e8_q38_64": [*arrays["e8_q38_64"], *(0 * tiny)]}
    code, out, _ = codec(capsys, saved(tmp_path, arrays), "--json")
    entry = entries_of(out)["e8_q38_64"]
    assert (code, entry["vectors_left_out"], entry["blocks_identical"]) == (0, 8, 1.0)
    arrays["e8_q38_64"] = np.array(arrays["e8_q38_64"]) * np.float32(1.0015)
    code, out, _ = codec(capsys, saved(tmp_path, arrays), "--json")
    entry = entries_of(out)["e8_q38_64"]
    assert (code, entry["vectors_left_out"], entry["blocks_identical"]) == (1, 8, 1.0)
    assert entry["mse_ratio"] < 0.999


def test_where_every_row_is_far_off_all_count(capsys, tmp_path: Path):
    far = LatticeCompat("d4", 1, 128)
    rows = np.array(mx.random.normal((50, 128), key=mx.random.key(0)))
    arrays = {"x_128": rows, "d4_q1_128": np.array(far.decode(far.encode(mx.array(rows)), mx.float32))}
    code, out, _ = codec(capsys, saved(tmp_path, arrays), "--json")
    entry = entries_of(out)["d4_q1_128"]
    assert (code, entry["vectors_left_out"]) == (0, 0)
    assert entry["relative_mse"] > 0.5


@pytest.mark.parametrize("kind", [np.float64, np.float16])
def test_other_floats_are_read(kind: Any, capsys, tmp_path: Path):
    """Rows that float16 holds, so that the reference is of the same rows."""
    arrays = stored("x_64", "e8_q4_64")
    arrays = {name: value[16:] for name, value in arrays.items()}
    if kind is np.float64:
        arrays = {name: value.astype(kind) for name, value in arrays.items()}
    else:
        arrays["e8_q4_64"] = arrays["e8_q4_64"].astype(kind)
    assert codec(capsys, saved(tmp_path, arrays), "--json")[0] == 0


def drop(name: str) -> Callable[[Arrays], Any]:
    return lambda arrays: arrays.pop(name)


def put(name: str, value: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: value})


def spoil(name: str, value: float) -> Callable[[Arrays], None]:
    return lambda arrays: arrays[name].__setitem__((2, 3), value)


ROWS = np.ones((4, 64), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("x_64"), "lacks x_64, the rows of d4_q38_64"),
        (
            lambda arrays: [arrays.pop(name) for name in ("d4_q38_64", "e8_q4_64")],
            "nothing is stored for x_64",
        ),
        (lambda arrays: arrays.clear(), "holds no entry"),
        (put("e7_q38_64", ROWS), "e7_q38_64 is neither"),
        (put("e8_q38_064", ROWS), "e8_q38_064 is neither"),
        (put("extra", ROWS), "extra is neither"),
        (put("x_128", np.ones((4, 128))), "nothing is stored for x_128"),
        (put("e8_q0_64", ROWS), "e8_q0_64 is neither"),
        (put("e8_q38_64", ROWS[:0]), r"e8_q38_64 is \(0, 64\), should be"),
        (put("e8_q38_64", ROWS), r"e8_q38_64 is \(4, 64\), x_64 is \(32, 64\)"),
        (put("e8_q38_64", ROWS[0]), r"e8_q38_64 is \(64,\), should be \(rows, 64\)"),
        (put("x_64", ROWS[:, :32]), r"x_64 is \(4, 32\), should be \(rows, 64\)"),
        (put("x_64", ROWS.astype(int)), "x_64 is of type int64"),
        (put("x_64", ROWS.astype(complex)), "x_64 is of type complex128"),
        (put("x_64", ROWS.astype(str)), "x_64 is of type <U32"),
        (put("x_64", np.full((4, 64), 1e300)), "x_64 holds NaN or infinity"),
        (spoil("x_64", np.nan), "x_64 holds NaN or infinity"),
        (spoil("x_64", -np.inf), "x_64 holds NaN or infinity"),
        (spoil("e8_q4_64", np.nan), "e8_q4_64 holds NaN or infinity"),
        (
            lambda a: a.update({"x_72": ROWS[:, :36].repeat(2, 1), "e8_q4_72": ROWS[:, :36].repeat(2, 1)}),
            "of 72",
        ),
        (
            lambda a: a.update({"x_12": ROWS[:, :12], "e8_q4_12": ROWS[:, :12]}),
            "e8_q4_12: a head dimension of 12",
        ),
        (lambda a: a.update({"e8_q5000_64": a["e8_q4_64"]}), "must lie in 1 to 1023, not 5000"),
        (put("x_64", np.array([None, {}], dtype=object)), "is corrupt"),
    ],
)
def test_arrays_that_cannot_be_used_are_exit_2(
    change: Callable[[Arrays], Any], message: str, small: Arrays, capsys, tmp_path: Path
):
    change(small)
    code, out, err = codec(capsys, saved(tmp_path, small), "--json")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"kakeya_engine: {tmp_path}")
    assert re.search(message, err)


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(64) + data[middle + 64 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is corrupt"),
        (lambda data: b"no zip", "is corrupt"),
        (lambda data: data[:-100], "is corrupt"),
        (flip, "is corrupt"),
    ],
)
def test_files_that_are_no_npz_are_exit_2(
    change: Callable[[bytes], bytes], message: str, small: Arrays, capsys, tmp_path: Path
):
    file = saved(tmp_path, small)
    file.write_bytes(change(file.read_bytes()))
    code, out, err = codec(capsys, file, "--json")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


def test_pickles_are_never_loaded(capsys, tmp_path: Path):
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    file = tmp_path / "golden.npz"
    np.savez(file, x_64=np.array([Trap()], dtype=object))
    assert codec(capsys, file)[0] == 2
    file.write_bytes(pickle.dumps(Trap()))
    assert codec(capsys, file)[0] == 2
    assert not (tmp_path / "sprung").exists()


def test_a_single_array_and_a_foreign_zip_are_exit_2(capsys, tmp_path: Path):
    np.save(tmp_path / "one.npy", ROWS)
    assert codec(capsys, tmp_path / "one.npy")[0] == 2
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("x_64", "no array")
    code, _, err = codec(capsys, tmp_path / "other.zip")
    assert code == 2
    assert "x_64" in err


def test_a_huge_file_is_refused_before_it_is_read(
    small: Arrays, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engine.evaluation.codec.LARGEST_FILE", 2000)
    np.savez_compressed(tmp_path / "golden.npz", x_64=np.zeros((1000, 64), np.float32))
    code, _, err = codec(capsys, tmp_path / "golden.npz")
    assert code == 2
    assert "256,128 bytes of arrays; at most 2,000 are compared" in err


def test_a_small_file_that_says_it_is_huge_is_exit_2(capsys, tmp_path: Path):
    header = BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 64)}
    )
    with zipfile.ZipFile(tmp_path / "golden.npz", "w") as packed:
        packed.writestr("x_64.npy", header.getvalue() + bytes(1000))
    code, _, err = codec(capsys, tmp_path / "golden.npz")
    assert code == 2
    assert "is corrupt" in err


@pytest.mark.parametrize(("name", "message"), [("nowhere.npz", "is missing"), (".", "is no file")])
def test_paths_without_a_file_are_exit_2(name: str, message: str, capsys, tmp_path: Path):
    code, _, err = codec(capsys, tmp_path / name)
    assert code == 2
    assert message in err


def test_help_shows_how(capsys):
    assert run(["kv", "codec", "--help"]) == 0
    assert "kakeya_engine kv codec --golden" in capsys.readouterr().out
    assert run(["kv", "--help"]) == 0
    assert "codec" in capsys.readouterr().out
