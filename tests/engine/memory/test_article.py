"""The published table, to the printed digit."""

from __future__ import annotations

from typing import Any

import pytest

from engine import article


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = article.article_document()["rows"]
    return found


def test_the_table_has_the_five_printed_rows():
    texts = "batch", "context", "net_bytes_per_token_text", "ratio_text"
    assert [tuple(row[name] for name in texts) for row in rows()] == [
        (8, 8192, "18,582.0", "6.17×"),
        (8, 32768, "4,645.5", "24.69×"),
        (8, 131072, "1,161.4", "98.75×"),
        (64, 131072, "166.6", "688.36×"),
        (64, 1048576, "20.8", "5506.92×"),
    ]


def test_its_constants_are_those_of_the_verifier_and_the_proposer():
    document = article.article_document()
    constants = document["constants"]
    assert constants == {
        "layers": 28,
        "kv_heads": 8,
        "head_dim": 128,
        "bytes_per_value": 2,
        "kv_bytes_per_position": 114_688,
        "sink": 4,
        "window": 24,
        "slots": 28,
        "proposer_weights": 596_049_920,
        "proposer_bytes": 1_192_099_840,
    }
    for number in ("114,688", "28", "1,192,099,840"):
        assert number in document["formula"]


@pytest.mark.parametrize("context", [1, 27, 28])
def test_a_sequence_within_the_window_is_held_whole(context):
    assert article.article_bytes(4, context) == 114_688 + 1_192_099_840 / (4 * context)


def test_three_mebibytes_are_twenty_eight_slots():
    """An old figure set 12.10 MiB against 3.06 MiB: that is 3.95 times, and 28 slots, not 4 + 64."""
    mebibytes = 28 * 114_688 / 2**20
    assert f"{mebibytes:.2f}" == "3.06"
    assert f"{12.10 / mebibytes:.2f}" == "3.95"
    assert f"{(4 + 64) * 114_688 / 2**20:.2f}" == "7.44"


def test_the_document_says_that_nothing_was_measured():
    document = article.article_document()
    assert (document["kind"], document["table"], document["measured"]) == ("analytic", "article", False)
    assert document["left_out"]
    assert rows()[0]["net_bytes_per_token"] == pytest.approx(18582.0)
    assert rows()[0]["ratio"] == pytest.approx(114_688 / 18_582)
