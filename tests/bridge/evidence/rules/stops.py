"""Reports about texts that end by themselves, and their control, which goes on."""

from __future__ import annotations

import copy

from tests.bridge.evidence.breakers import Breaker, Rules, chain, change, only, put, resettle, rows
from tests.bridge.evidence.reports import Document, arm, filler, speculative_system

STOP = 1279  # no token of any text


def natural(document: Document) -> None:
    """Seven of eight texts end at a stop token; a control decodes all of them past it."""
    going_on = copy.deepcopy(rows(document, "speculative"))
    for name in ("plain", "speculative"):
        for row in rows(document, name)[1:]:
            put(document, row, [*row["tokens"], STOP], row["decode_s"])
            row["finish_reason"] = "stop"
    for number, row in enumerate(going_on):
        put(document, row, filler(number, 96), 0.3)
    document["arms"].append(arm("ignore_stops", "control", speculative_system(), going_on, "ignore_stops"))
    document["configuration"]["ignore_stops"] = True
    document["claims"] = [{"name": "natural_stops", "arm": "speculative", "at_least": 0.85}]
    resettle(document)


def control(*breakers: Breaker) -> Breaker:
    return chain(natural, *breakers, resettle)


def claimed(share: float) -> Breaker:
    return control(change("claims", 0, "at_least", to=share))


def cut_texts_called_stopped(document: Document) -> None:
    for name in ("plain", "speculative"):
        row = rows(document, name)[0]
        row["finish_reason"] = "stop"
        put(document, row, [*row["tokens"][:-1], rows(document, name)[3]["tokens"][5]], row["decode_s"])


def stopped_texts_called_cut(document: Document) -> None:
    for name in ("plain", "speculative"):
        rows(document, name)[4]["finish_reason"] = "length"


def stop_in_the_control(document: Document) -> None:
    rows(document, "ignore_stops")[2]["finish_reason"] = "stop"


def short_control(document: Document) -> None:
    put(document, rows(document, "ignore_stops")[2], filler(2, 40), 0.2)


def control_of_fewer(document: Document) -> None:
    del rows(document, "ignore_stops")[5]


def without_the_control(document: Document) -> None:
    del document["arms"][2]


RULES = Rules(
    alone={},
    variants=[
        ("CLAIM_NOT_MET", "throughput", claimed(0.9)),
        ("CLAIM_NOT_MET", "throughput", claimed(0.3)),
        ("CLAIM_NOT_MET", "throughput", control(cut_texts_called_stopped)),
        ("CLAIM_NOT_MET", "throughput", control(stopped_texts_called_cut)),
        ("CLAIM_NOT_MET", "throughput", chain(only(), natural, change("claims", 0, "baseline", to="plain"))),
        ("CONTROL_FAILED", "throughput", control(stop_in_the_control)),
        ("CONTROL_FAILED", "throughput", control(short_control)),
        ("CONTROL_MISSING", "throughput", control(control_of_fewer)),
        ("CONTROL_MISSING", "throughput", control(without_the_control)),
    ],
    honest=[
        ("throughput", natural),
        ("throughput", claimed(0.875)),
        ("throughput", control(without_the_control, change("configuration", "ignore_stops", to=False))),
    ],
)
