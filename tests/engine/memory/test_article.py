"""The published table, to the printed digit."""

from __future__ import annotations

import pytest

from engine.memory import article


def test_the_table_has_the_five_printed_rows():
    assert [(row.batch, row.context, row.net_text, row.ratio_text) for row in article.table()] == [
        (8, 8192, "18,582.0", "6.17×"),
        (8, 32768, "4,645.5", "24.69×"),
        (8, 131072, "1,161.4", "98.75×"),
        (64, 131072, "166.6", "688.36×"),
        (64, 1048576, "20.8", "5506.92×"),
    ]


def test_its_constants_are_those_of_the_verifier_and_the_proposer():
    assert (article.KV_BYTES, article.SLOTS, article.PROPOSER_BYTES) == (114_688, 28, 1_192_099_840)
    for number in ("114,688", "28", "1,192,099,840"):
        assert number in article.FORMULA


@pytest.mark.parametrize("context", [1, 27, 28])
def test_a_sequence_within_the_window_is_held_whole(context):
    shared = article.PROPOSER_BYTES / (4 * context)
    assert article.net_bytes(4, context) == article.KV_BYTES + shared


def test_three_mebibytes_are_twenty_eight_slots():
    """An old figure set 12.10 MiB against 3.06 MiB: that is 3.95 times, and 28 slots, not 4 + 64."""
    mebibytes = article.SLOTS * article.KV_BYTES / 2**20
    assert f"{mebibytes:.2f}" == "3.06"
    assert f"{12.10 / mebibytes:.2f}" == "3.95"
    assert f"{(4 + 64) * article.KV_BYTES / 2**20:.2f}" == "7.44"


def test_the_document_says_that_nothing_was_measured():
    document = article.table_document()
    assert (document["kind"], document["table"], document["measured"]) == ("analytic", "article", False)
    assert document["left_out"]
    row = document["rows"][0]
    assert row["net_bytes_per_token"] == pytest.approx(18582.0)
    assert row["ratio"] == pytest.approx(114_688 / 18_582)
