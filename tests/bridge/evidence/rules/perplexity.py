"""Scored chunks that contradict themselves or their policy, and comparisons that prove nothing."""

from __future__ import annotations

from tests.bridge.evidence.breakers import Breaker, Rules, chain, change, resettle
from tests.bridge.evidence.reports import Document


def every(field: str, to: object) -> Breaker:
    def apply(document: Document) -> None:
        for chunk in document["perplexity"]["chunks"]:
            chunk[field] = to
        resettle(document)

    return apply


def in_chunk(field: str, to: object) -> Breaker:
    return chain(change("perplexity", "chunks", 2, field, to=to), resettle)


def of_native_caches(document: Document) -> None:
    document["perplexity"]["kv"] = document["configuration"]["kv"] = "native"
    every("kv", None)(document)


def few(document: Document) -> None:
    del document["perplexity"]["chunks"][7:]
    resettle(document)


def no_change(document: Document) -> None:
    for chunk in document["perplexity"]["chunks"]:
        chunk["policy_nll"] = chunk["native_nll"]
    resettle(document)


def packed(document: Document) -> None:
    document["perplexity"]["quantize"] = document["configuration"]["quantize"] = "4"


def two_of(document: Document) -> None:
    chunks = document["perplexity"]["chunks"]
    chunks[1]["tokens_sha256"] = chunks[0]["tokens_sha256"]


def unclaimed(document: Document) -> None:
    document["claims"] = []


RULES = Rules(
    alone={
        "PERPLEXITY_INCONSISTENT": ("perplexity", in_chunk("tokens", 500)),
        "PERPLEXITY_VACUOUS": ("perplexity", chain(of_native_caches)),
    },
    variants=[
        ("PERPLEXITY_INCONSISTENT", "perplexity", two_of),
        ("PERPLEXITY_INCONSISTENT", "perplexity", in_chunk("kv", None)),
        ("PERPLEXITY_INCONSISTENT", "perplexity", in_chunk("policy_bytes", 1)),
        ("PERPLEXITY_INCONSISTENT", "perplexity", change("perplexity", "kv", to="rotated:8,64@all")),
        ("PERPLEXITY_INCONSISTENT", "perplexity", change("perplexity", "kv", to="magic")),
        ("PERPLEXITY_INCONSISTENT", "perplexity", change("perplexity", "piece", to=64)),
        ("PERPLEXITY_INCONSISTENT", "perplexity", change("configuration", "quantize", to="4")),
        ("PERPLEXITY_INCONSISTENT", "perplexity", change("perplexity", "chunks", 2, "kv", "bytes", to=9_000)),
        ("PERPLEXITY_VACUOUS", "perplexity", few),
        ("PERPLEXITY_VACUOUS", "perplexity", no_change),
        ("PERPLEXITY_VACUOUS", "perplexity", every("native_nll", 7.5)),
        ("PERPLEXITY_VACUOUS", "perplexity", change("perplexity", "piece", to=512)),
        ("SUMMARY_MISMATCH", "perplexity", lambda document: document["perplexity"]["chunks"].pop()),
        ("SUMMARY_MISMATCH", "perplexity", change("summary", "perplexity", "nll_increase", to=0.0)),
        ("SUMMARY_MISMATCH", "perplexity", change("summary", "perplexity", "nll_interval", to=[0.0, 0.01])),
        ("CLAIM_NOT_MET", "perplexity", change("claims", 0, "at_most", to=0.02)),
        ("CLAIM_NOT_MET", "perplexity", change("claims", 0, "at_most", to=200.0)),
        ("KIND_MISMATCH", "perplexity", lambda document: document.pop("perplexity")),
        ("KIND_MISMATCH", "perplexity", change("kind", to="probe")),
        ("ENVIRONMENT_INCOMPLETE", "perplexity", lambda document: document["environment"].update(models={})),
    ],
    honest=[
        ("perplexity", unclaimed),
        ("perplexity", chain(few, unclaimed)),
        ("perplexity", chain(of_native_caches, packed)),
    ],
)
