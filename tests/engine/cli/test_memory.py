"""``kakeya_engine memory``: two tables that say they are analytic, one JSON line, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import memory as command
from engine.cli import progress, run
from engine.config import Options, open_engine
from engine.draft_length import FixedDraftLength
from engine.evaluation.arms import speculate
from engine.memory import POLICIES
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET
from tests.engine.batches import prompt_of

TARGET = ("memory", "--model", str(SHIPPED_TARGET))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = call(capsys, *arguments, "--json")
    assert code == 0
    assert all(line.startswith("progress ") for line in err.splitlines())  # on a busy machine
    assert len(out.splitlines()) == 1
    return json.loads(out)


def test_the_article_is_one_json_line_or_a_table_labelled_analytic(capsys):
    line = document(capsys, "memory", "--table", "article")
    assert (line["kind"], line["table"], line["measured"]) == ("analytic", "article", False)
    code, out, _ = call(capsys, "memory", "--table", "article")
    assert code == 0
    assert "ANALYTIC" in out
    for row in line["rows"]:
        assert row["net_bytes_per_token_text"] in out
        assert row["ratio_text"] in out
    assert json.loads(out.splitlines()[-1]) == line


def test_a_prediction_is_what_generate_would_report(capsys):
    for policy in ("native", "affine"):
        line = document(capsys, *TARGET, "--context", "300", "--kv", policy)
        engine = open_engine(Options(drafter="none", kv=policy))
        outcome = speculate(engine, prompt_of(300), 2, FixedDraftLength(1))
        [row] = line["rows"]
        assert (row["kv"], row["cache_bytes"]) == (engine.policy.spec, outcome.resident_bytes)
        assert row["total_bytes"] == row["cache_bytes"] + line["weights_bytes"]
        assert sum(each["bytes"] for each in row["layers"]) == row["cache_bytes"]
        assert (line["kind"], line["measured"]) == ("analytic", False)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("context", "block"), [(1023, 0), (1022, 1), (1018, 5)], ids=["1023", "1022", "1018"]
)
def test_near_the_last_position_rounds_are_as_short_as_a_runs(capsys, context: int, block: int):
    line = document(
        capsys, *TARGET, "--context", f"300,{context}", "--drafter", str(SHIPPED_DRAFTER), "--block", "8"
    )
    assert (line["block"], [row["block"] for row in line["rows"]]) == (8, [8, block])
    engine = open_engine(Options(drafter=str(SHIPPED_DRAFTER), block="8"))
    held = speculate(engine, prompt_of(context), 64, FixedDraftLength(8)).resident_bytes
    assert line["rows"][1]["cache_bytes"] == held
    assert engine.drafter is not None
    if block < 2:  # otherwise the run goes on longer
        assert line["rows"][1]["drafter_state_bytes"] == engine.drafter.drafter.nbytes


def test_a_shorter_round_is_told(capsys):
    code, out, _ = call(capsys, *TARGET, "--context", "300,1022,1023", "--block", "4")
    assert code == 0
    assert "a prompt of 1,022 leaves a round of 1\n" in out
    assert "a prompt of 1,023 leaves no round\n" in out
    assert "a prompt of 300" not in out


@pytest.mark.slow
def test_all_policies_stand_side_by_side_against_native(capsys):
    line = document(capsys, *TARGET, "--context", "300,1000", "--kv", "all", "--batch", "2")
    assert [row["context"] for row in line["rows"]] == [300] * len(POLICIES) + [1000] * len(POLICIES)
    native = {row["context"]: row["cache_bytes"] for row in line["rows"] if row["kv"] == "native"}
    for row in line["rows"]:
        assert row["ratio_to_native"] == pytest.approx(native[row["context"]] / row["cache_bytes"])
        assert row["bytes_per_sequence"] * 2 == row["cache_bytes"]
        assert row["bytes_per_token"] == pytest.approx(row["cache_bytes"] / (2 * row["context"]))
    code, out, _ = call(capsys, *TARGET, "--context", "300", "--kv", "all", "--batch", "2")
    assert code == 0
    assert "ANALYTIC" in out
    assert "1.00×" in out


def test_policies_a_model_cannot_have_are_named_among_all_and_refused_alone(capsys, tmp_path: Path):
    config = json.loads((SHIPPED_TARGET / "config.json").read_text())
    config |= {"head_dim": 24, "model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    odd = ("memory", "--model", str(tmp_path), "--context", "64")
    line = document(capsys, *odd, "--kv", "all")
    assert "affine:4,64@all" in line["refused"]
    assert "head dimension of 24" in line["refused"]["affine:4,64@all"]
    assert "native" in {row["kv"] for row in line["rows"]}
    code, out, err = call(capsys, *odd, "--kv", "affine")
    assert (code, out) == (2, "")
    assert "head dimension of 24" in err


def test_a_drafter_adds_its_weights_and_state(capsys):
    base = document(capsys, *TARGET, "--context", "300")
    line = document(capsys, *TARGET, "--context", "300", "--drafter", f"prompt-lookup+{SHIPPED_DRAFTER}")
    drafter = line["drafter"]
    assert drafter["weights_bytes"] > 0
    [row] = line["rows"]
    assert row["drafter_state_bytes"] > 0
    assert row["total_bytes"] == sum(
        (line["weights_bytes"], drafter["weights_bytes"], row["drafter_state_bytes"], row["cache_bytes"])
    )
    assert (base["drafter"], base["headroom"]) == (None, 1)
    assert line["headroom"] >= line["block"] > 1  # rings keep room for a whole block
    assert row["cache_bytes"] > base["rows"][0]["cache_bytes"]
    twice = document(
        capsys, *TARGET, "--context", "300", "--drafter", str(SHIPPED_DRAFTER), "--batch", "2", "--block", "4"
    )
    assert (twice["block"], twice["headroom"]) == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory"], "give --table article, or --context N"),
        (["memory", "--json"], "give --table article"),
        (["memory", "--table", "article", "--model", "."], "takes no switch but --json; leave out --model"),
        (["memory", "--table", "article", "--context", "8"], "leave out --context"),
        (
            [
                "memory",
                "--kv",
                "affine",
                "--table",
                "article",
                "--batch",
                "1",
                "--json",
                "--dtype",
                "float32",
            ],
            "leave out --kv, --batch, --dtype",
        ),
        (
            ["memory", "--table", "article", "--block", "8", "--prefill-chunk", "9", "--quantize", "4"],
            "leave out --block, --prefill-chunk, --quantize",
        ),
        (["memory", "--table", "article", "--drafter", "none"], "leave out --drafter"),
        (["memory", "--table", "thesis"], "thesis"),
        ([*TARGET], "or --context N"),
        (["memory", "--model", "/nowhere", "--context", "8"], "/nowhere is not a folder"),
        ([*TARGET, "--context", "0"], "not 0"),
        ([*TARGET, "--context", "-5"], "'-5' is not a number"),
        ([*TARGET, "--context", "8,,9"], "'8,,9' is not a number"),
        (
            [*TARGET, "--context", "1025"],
            "1025 leaves no token to generate: this model was made for 1024 pos",
        ),
        ([*TARGET, "--context", "1024"], "1024 leaves no token to generate"),
        ([*TARGET, "--context", "8,1024"], "give at most 1023"),
        ([*TARGET, "--context", "8,99999999999"], "not 99999999999"),
        ([*TARGET, "--context", "8", "--batch", "0"], "--batch must lie in 1 to 4096, not 0"),
        ([*TARGET, "--context", "8", "--batch", "-3"], "not -3"),
        ([*TARGET, "--context", "8", "--batch", "5000"], "not 5000"),
        ([*TARGET, "--context", "8", "--prefill-chunk", "0"], "--prefill-chunk must be at least 1, not 0"),
        ([*TARGET, "--context", "8", "--block", "0"], "not '0'"),
        ([*TARGET, "--context", "8", "--block", "²"], "not '²'"),
        ([*TARGET, "--context", "8", "--block", "99999"], "not '99999'"),
        ([*TARGET, "--context", "8", "--kv", "zip"], "'zip' is none of native"),
        ([*TARGET, "--context", "8", "--kv", "affine@77"], "layer 77 is no attention layer"),
        ([*TARGET, "--context", "8", "--dtype", "int8"], "'int8' is not one of"),
        ([*TARGET, "--context", "8", "--quantize", "7"], "bits 7"),
        ([*TARGET, "--context", "8", "--drafter", "oracle"], "'oracle' is neither a model here"),
        ([*TARGET, "--context", "8", "--drafter", "prompt-lookup", "--block", "1"], "leave --drafter out"),
        ([*TARGET, "--context", "8", "--drafter", "prompt-lookup", "--block", "17"], "17 is more than 16"),
    ],
)
def test_bad_input_is_refused_with_the_value_and_code_2(capsys, arguments, says):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_help_explains_itself_with_examples(capsys):
    code, out, _ = call(capsys, "memory", "--help")
    assert code == 0
    assert "Examples:" in out
    assert "--table article" in out


def test_a_long_prediction_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    code, out, err = call(capsys, *TARGET, "--context", "64", "--kv", "native", "--kv", "affine", "--json")
    assert code == 0
    assert len(out.splitlines()) == 1
    lines = err.splitlines()
    assert lines
    assert all(line.startswith("progress ") for line in lines)
    assert lines[-1].startswith("progress 2/2")


def test_sizes_are_readable():
    assert [command.size(count) for count in (0, 1023, 1024, 3_211_264, 2**40)] == [
        "0 B", "1023 B", "1.00 KiB", "3.06 MiB", "1.00 TiB",
    ]  # fmt: skip
