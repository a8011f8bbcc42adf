"""Reports that restored nothing, or whose controls are missing or fail."""

from __future__ import annotations

from tests.bridge.evidence.breakers import Breaker, Rules, chain, change, claim, put, resettle, rows
from tests.bridge.evidence.reports import Document, filler, settle


def noise_still_answers(document: Document) -> None:
    for row in rows(document, "noise"):
        row["text"] = row["needle"]["answer"]
    settle(document)


def exact_is_lost(document: Document) -> None:
    for row in rows(document, "exact"):
        row["tokens"], row["text"] = filler(88, 12), "lost"
    settle(document)


def restoration_claim(document: Document) -> None:
    document["liveness"]["restored_positions"] = 0


def control_missing(document: Document) -> None:
    document["arms"] = [arm for arm in document["arms"] if arm["name"] != "no_needle"]
    settle(document)


def control_failed(document: Document) -> None:
    for row in rows(document, "no_needle")[:3]:
        row["text"] = row["needle"]["answer"]
    settle(document)


def control_of_another_window(document: Document) -> None:
    document["arms"][4]["system"]["kv"] = "restored:noise:4,32@full"


def mislabelled_control(document: Document) -> None:
    """A noise control that restores exactly, and is deaf for another reason."""
    document["arms"][4]["system"] |= {"kv": "restored:exact:4,64@full", "restoration": "exact"}


def restored(name: str, positions: int | None, first: int = 0) -> Breaker:
    def apply(document: Document) -> None:
        row = rows(document, name)[first]
        row["restored_positions"] = positions
        if positions is None:
            del row["restored_positions"]

    return chain(apply, resettle)


def noise_answers_in_reasoning(document: Document) -> None:
    for row in rows(document, "noise"):
        row |= {"text": f"<think>{row['needle']['answer']}</think> nothing", "answer_text": "nothing"}
    settle(document)


def in_a_batch(document: Document) -> None:
    """Merged caches have another class, and count for all their sequences."""
    for row in rows(document, "speculative"):
        row["cache"]["classes"] = {"RaggedKV": 9}


def tested_exactly(document: Document) -> None:
    """What restores exactly needs no exact control next to it."""
    document["claims"] = [{"name": "recall_parity", "arm": "speculative"}]
    document["arms"][0]["system"] |= {"kv": "restored:exact:4,64@full", "restoration": "exact"}
    del document["arms"][3]
    settle(document)


def control_cut_short(document: Document) -> None:
    """A control that was stopped before it could answer."""
    for row in rows(document, "noise"):
        put(document, row, row["tokens"][:2], 0.01)
    settle(document)


def of_a_control(source: str) -> Breaker:
    """Restoration claimed of an arm that restores nothing of meaning, whatever it answers."""

    def apply(document: Document) -> None:
        arm = document["arms"][0]
        arm["system"] |= {"kv": f"restored:{source}:4,64@full", "restoration": source}

    return apply


def nobody_answers(document: Document) -> None:
    """A target that answers nothing: its controls cannot tell what restoring does."""
    document["claims"] = [{"name": "restoration", "arm": "speculative"}]
    for name in ("speculative", "oracle", "exact"):
        for i, row in enumerate(rows(document, name)):
            row["tokens"], row["text"] = filler(300 + i, 12), "nothing"
    settle(document)


def half_answered(answered: int) -> Breaker:
    def apply(document: Document) -> None:
        nobody_answers(document)
        for name in ("speculative", "oracle", "exact"):
            for i, row in enumerate(rows(document, name)[:answered]):
                row["tokens"], row["text"] = filler(i, 12), row["needle"]["answer"]
        settle(document)

    return apply


RULES = Rules(
    alone={
        "RESTORATION_CLAIM": ("restoration", restoration_claim),
        "CONTROL_MISSING": ("recall", control_missing),
        "CONTROL_FAILED": ("recall", control_failed),
    },
    variants=[
        ("CONTROL_FAILED", "restoration", control_cut_short),
        ("RESTORATION_CLAIM", "throughput", change("liveness", "restored_positions", to=5)),
        ("RESTORATION_CLAIM", "restoration", of_a_control("noise")),
        ("RESTORATION_CLAIM", "restoration", of_a_control("zeros")),
        ("RESTORATION_CLAIM", "recall", claim(name="restoration", arm="speculative")),
        ("CONTROL_MISSING", "recall", chain(lambda document: document["arms"].pop(1), resettle)),
        ("CONTROL_MISSING", "restoration", chain(lambda document: document["arms"].pop(4), resettle)),
        ("CONTROL_MISSING", "recall", chain(lambda document: document["arms"][2]["samples"].pop(), resettle)),
        ("CONTROL_FAILED", "restoration", noise_still_answers),
        ("CONTROL_FAILED", "restoration", exact_is_lost),
        ("CONTROL_FAILED", "restoration", nobody_answers),
        ("CONTROL_FAILED", "restoration", half_answered(4)),
        ("CONTROL_MISSING", "restoration", control_of_another_window),
        ("CONTROL_MISSING", "restoration", mislabelled_control),
        ("CONTROL_FAILED", "restoration", noise_answers_in_reasoning),
        ("RESTORATION_CLAIM", "restoration", restored("speculative", None)),
        ("RESTORATION_CLAIM", "restoration", restored("speculative", 0, 4)),
        ("RESTORATION_CLAIM", "restoration", restored("speculative", 397)),
        ("RESTORATION_CLAIM", "restoration", restored("speculative", 64)),
        ("RESTORATION_CLAIM", "restoration", restored("noise", None)),
        ("RESTORATION_CLAIM", "restoration", restored("oracle", 5)),
        ("RESTORATION_CLAIM", "restoration", change("liveness", "restored_positions", to=1)),
        ("RESTORATION_CLAIM", "restoration", change("arms", 0, "system", "restoration", to="zeros")),
        ("RESTORATION_CLAIM", "restoration", change("arms", 0, "system", "restoration", to=None)),
        ("RESTORATION_CLAIM", "recall", change("arms", 0, "system", "kv", to="restored:exact")),
    ],
    honest=[
        ("restoration", in_a_batch),
        ("restoration", half_answered(5)),
        ("restoration", tested_exactly),
        ("restoration", restored("speculative", 393)),
    ],
)
