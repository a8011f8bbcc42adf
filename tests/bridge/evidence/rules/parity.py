"""Comparisons with a reference that fail, compare nothing, or compare an implementation with itself."""

from __future__ import annotations

from tests.bridge.evidence.breakers import Breaker, Rules, chain, change, resettle
from tests.bridge.evidence.reports import Document, settle

WIDE = 2e-4


def in_round(field: str, to: object, number: int = 3) -> Breaker:
    return chain(change("parity", "rounds", number, field, to=to), resettle)


def every(field: str, to: object) -> Breaker:
    def apply(document: Document) -> None:
        for turn in document["parity"]["rounds"]:
            turn[field] = to

    return chain(apply, resettle)


def tolerating(tolerance: float, dtype: str = "float32") -> Breaker:
    def apply(document: Document) -> None:
        document["parity"] |= {"tolerance": tolerance, "dtype": dtype}
        document["claims"][0]["at_most"] = tolerance

    return apply


def nothing_compared(document: Document) -> None:
    document["claims"] = []
    document["parity"]["rounds"] = []
    resettle(document)


def no_difference(document: Document) -> None:
    every("hidden_max_abs", 0.0)(document)
    every("logits_max_abs", 0)(document)


def named_alike(document: Document) -> None:
    document["parity"]["reference"]["implementation"] = "Kakeya Engine 0.1.0 (mlx 0.32.4) "


def half_precision(document: Document) -> None:
    tolerating(0.25, "float16")(document)
    in_round("argmax_agreement", 0.925)(document)
    in_round("rows", 40)(document)
    in_round("logits_max_abs", 0.2)(document)


def of_the_target(document: Document) -> None:
    """A comparison of the whole model has logits alone."""
    document["configuration"]["command"] = "parity --target"
    every("hidden_max_abs", None)(document)


def with_a_pair(document: Document) -> None:
    """The rounds of one case are of a whole pair, which has tokens and no hidden states."""
    for turn in document["parity"]["rounds"][2:]:
        turn |= {"hidden_max_abs": None, "tokens_equal": True}
    resettle(document)


def of_pairs(document: Document) -> None:
    """Every case is a whole pair."""
    every("tokens_equal", to=True)(document)
    every("hidden_max_abs", None)(document)


def one_round(document: Document) -> None:
    del document["parity"]["rounds"][1:]
    settle(document)


def called(name: str) -> Breaker:
    return change("parity", "reference", "implementation", to=name)


RULES = Rules(
    alone={
        "PARITY_TOLERANCE": ("parity", in_round("path_equal", to=False)),
        "PARITY_SELF": ("parity", named_alike),
        "PARITY_TOO_FEW": ("parity", chain(one_round, in_round("rows", 15, 0))),
    },
    variants=[
        ("PARITY_SELF", "parity", chain(one_round, every("hidden_max_abs", 0), every("logits_max_abs", 0))),
        ("PARITY_TOLERANCE", "parity", in_round("logits_max_abs", WIDE)),
        ("PARITY_TOLERANCE", "parity", in_round("hidden_max_abs", WIDE)),
        ("PARITY_TOLERANCE", "parity", in_round("logits_max_abs", None)),
        ("PARITY_TOLERANCE", "parity", in_round("hidden_max_abs", None)),
        ("PARITY_TOLERANCE", "parity", every("hidden_max_abs", None)),
        (
            "PARITY_TOLERANCE",
            "parity",
            chain(every("hidden_max_abs", None), change("configuration", "command", to="parity --golden")),
        ),
        ("PARITY_TOLERANCE", "parity", chain(of_the_target, in_round("hidden_max_abs", 1e-6, 0))),
        ("PARITY_TOLERANCE", "parity", chain(of_pairs, in_round("tokens_equal", to=False))),
        ("PARITY_TOLERANCE", "parity", chain(of_pairs, in_round("logits_max_abs", None))),
        ("PARITY_TOLERANCE", "parity", chain(with_a_pair, in_round("hidden_max_abs", None, 0))),
        ("PARITY_TOLERANCE", "parity", in_round("argmax_agreement", 0.875)),
        ("PARITY_TOLERANCE", "parity", tolerating(2e-3)),
        ("PARITY_TOLERANCE", "parity", tolerating(0.6, "float16")),
        ("PARITY_TOLERANCE", "parity", tolerating(1e-4, "int8")),
        ("PARITY_TOLERANCE", "parity", change("claims", 0, "at_most", to=0.1)),
        ("PARITY_TOLERANCE", "parity", chain(half_precision, in_round("argmax_agreement", 0.8))),
        *[("PARITY_SELF", "parity", called(name)) for name in ("unknown", " N/A ", "???", "None")],
        ("PARITY_SELF", "parity", nothing_compared),
        ("PARITY_SELF", "parity", no_difference),
        ("PARITY_SELF", "parity", change("parity", "reference", "sha256", to="ef" * 32)),
        ("ROW_INCONSISTENT", "parity", in_round("argmax_agreement", 0.9999)),
        ("ROW_INCONSISTENT", "parity", in_round("round", 3)),
        ("ROW_INCONSISTENT", "parity", in_round("case", "dflash")),
        ("SUMMARY_MISMATCH", "parity", lambda document: document["parity"]["rounds"].pop()),
        ("SUMMARY_MISMATCH", "parity", lambda document: document["summary"].pop("parity")),
        ("SUMMARY_MISMATCH", "parity", change("summary", "parity", "rows", to=31)),
        ("KIND_MISMATCH", "parity", lambda document: document.pop("parity")),
        ("KIND_MISMATCH", "parity", change("kind", to="probe")),
        ("KIND_MISMATCH", "parity", change("order", to=[["plain", "code-001"]])),
    ],
    honest=[
        ("parity", chain(of_the_target, every("logits_max_abs", 0))),
        ("parity", of_the_target),
        ("parity", of_pairs),
        ("parity", with_a_pair),
        ("parity", half_precision),
        ("parity", chain(in_round("hidden_max_abs", 0.0), in_round("logits_max_abs", 0))),
        ("parity", tolerating(9e-4)),
        ("parity", chain(one_round, in_round("rows", 16, 0))),
    ],
)
