"""Reports whose caches are not those of their policy, or were never measured."""

from __future__ import annotations

from tests.bridge.evidence.breakers import Breaker, Rules, chain, change, claims, resettle, rows
from tests.bridge.evidence.reports import Document, filler, rounds_for, settle


def memory_analytic_as_measured(document: Document) -> None:
    claims(document, "speedup")
    for row in rows(document, "plain"):
        row["cache"]["measured"] = False


def memory_claim_mismatch(document: Document) -> None:
    for row in rows(document, "plain"):
        row["cache"]["classes"] = {"QuantizedKVCache": 9}


CODED, BOUNDED = "affine:4,64@all", "sink-window:4,64@all"


def declared(name: str, policy: str) -> Breaker:
    """Another policy than the caches of an arm are of; no claim depends on the name."""

    def apply(document: Document) -> None:
        document["claims"] = []
        arm = next(one for one in document["arms"] if one["name"] == name)
        arm["system"]["kv"] = policy

    return apply


def caches(name: str, **classes: int) -> Breaker:
    def apply(document: Document) -> None:
        for row in rows(document, name):
            row["cache"]["classes"] = dict(classes)

    return apply


def used(name: str, **fields: object) -> Breaker:
    """Other fields of every kv block of an arm; with none, no kv block."""

    def apply(document: Document) -> None:
        for row in rows(document, name):
            row["kv"] = row["kv"] | fields
            if not fields:
                del row["kv"]

    return chain(apply, resettle)


def lattice(policy: str, stored: int) -> Breaker:
    """Nine layers; the inner five hold so many bytes for 100,000 values."""
    layers = used(CODED, layers=[2, 3, 4, 5, 6], bytes=stored)
    return chain(declared(CODED, policy), caches(CODED, CodedKV=5, SlidingRing=4), larger, layers)


def larger(document: Document) -> None:
    for row in rows(document, CODED):
        row["cache"]["resident_bytes"] = 900_000


def tiny(document: Document) -> None:
    """Codes of fewer values than the prompt has, in fewer bytes."""
    for row in rows(document, CODED):
        row["cache"]["resident_bytes"] = 50_000
        row["kv"] |= {"values": 16, "bytes": 9}
    resettle(document)


def bounded(policy: str, **classes: int) -> Breaker:
    return chain(declared(BOUNDED, policy), caches(BOUNDED, **classes))


def kept(positions: int | None, arm: str = BOUNDED) -> Breaker:
    """What an arm's layers with a window kept; None: they do not say."""

    def apply(document: Document) -> None:
        for row in rows(document, arm):
            row["kept_positions"] = positions
            if positions is None:
                del row["kept_positions"]

    return apply


def ended(name: str, tokens: int, resident_bytes: int) -> Breaker:
    """An arm whose texts have so many tokens, and whose caches hold so much; nothing is claimed."""

    def apply(document: Document) -> None:
        document["claims"] = []
        document["configuration"]["max_tokens"] = 4096
        for i, row in enumerate(rows(document, name)):
            row["tokens"], row["text"] = filler(700 + i, tokens), f"{tokens} tokens"
            row["cache"]["resident_bytes"] = resident_bytes
            if row["rounds"]:
                row["rounds"] = rounds_for(tokens - 1, row["decode_s"])
        for row in rows(document, "no_needle"):
            row["finish_reason"] = "stop"
        settle(document)

    return apply


def batched(document: Document) -> None:
    caches(CODED, CodedKV=9)(document)
    caches("native", RaggedKV=9)(document)
    caches(BOUNDED, RaggedKV=9)(document)


def holding(kind_arm: str, resident_bytes: int) -> Breaker:
    """Other resident bytes in every row of an arm, claimed of it where it is under test."""

    def apply(document: Document) -> None:
        document["claims"] = [{"name": "resident_bytes", "arm": kind_arm, "at_most": resident_bytes}]
        for row in rows(document, kind_arm):
            row["cache"]["resident_bytes"] = resident_bytes
        resettle(document)

    return apply


def distorted_at_fewer(document: Document) -> None:
    rows(document, BOUNDED)[0]["kv"] |= {"key_distortion": None, "value_distortion": None}
    resettle(document)


def rows_cut(document: Document) -> None:
    """Distortions of one policy alone, at some of its prompts."""
    for row in rows(document, BOUNDED) + rows(document, CODED)[3:]:
        row["kv"] |= {"key_distortion": None, "value_distortion": None}
    resettle(document)


def undistorted(document: Document) -> None:
    for row in rows(document, BOUNDED) + rows(document, CODED):
        row["kv"] |= {"key_distortion": None, "value_distortion": None}
    resettle(document)


RULES = Rules(
    alone={
        "MEMORY_ANALYTIC_AS_MEASURED": ("throughput", memory_analytic_as_measured),
        "MEMORY_CLAIM_MISMATCH": ("throughput", memory_claim_mismatch),
    },
    variants=[
        (
            "MEMORY_ANALYTIC_AS_MEASURED",
            "throughput",
            change("arms", 1, "samples", 0, "cache", "measured", to=False),
        ),
        (
            "MEMORY_CLAIM_MISMATCH",
            "throughput",
            chain(change("arms", 0, "samples", 0, "cache", "resident_bytes", to=0), resettle),
        ),
        ("MEMORY_CLAIM_MISMATCH", "recall", change("arms", 0, "system", "kv", to="lattice:e8,38")),
        ("MEMORY_CLAIM_MISMATCH", "throughput", holding("speculative", 1)),
        (
            "MEMORY_CLAIM_MISMATCH",
            "throughput",
            chain(holding("plain", 90_000), holding("speculative", 90_000)),
        ),
        ("MEMORY_CLAIM_MISMATCH", "restoration", holding("speculative", 1)),
        ("MEMORY_CLAIM_MISMATCH", "throughput", caches("speculative", KVCache=1)),
        *[
            ("MEMORY_CLAIM_MISMATCH", "kv", breaker)
            for breaker in (
                declared(CODED, "affine:4"),
                declared(CODED, "affine:7,64@all"),
                declared(CODED, "native@all"),
                declared(CODED, "lattice:e9,38"),
                declared(CODED, "AFFINE"),
                declared(CODED, "affine:8,64@all"),
                declared(CODED, "affine:3,64@all"),
                declared(CODED, "affine:4,64@0-7"),
                declared(CODED, "affine:4,64@0-9"),
                declared(BOUNDED, "restored:exact"),
                bounded("full-kv", KVCache=3, SlidingRing=6),
                bounded("full-kv", KVCache=9),
                bounded("full-kv", KVCache=3, WindowedKV=3, SlidingRing=3),
                chain(bounded("full-kv", KVCache=3, WindowedKV=6), holding(BOUNDED, 160_000)),
                caches("native", KVCache=3, WindowedKV=6),
                caches(CODED, KVCache=9),
                caches(CODED, CodedKV=8),
                caches(CODED, CodedKV=9, KVCache=3),
                caches(CODED, CodedKV=9, SlidingRing=3),
                caches(BOUNDED, KVCache=9),
                caches(BOUNDED, KVCache=3, SlidingRing=6),
                caches("native", CodedKV=9),
                caches("oracle", RestoredKV=9),
                chain(used(BOUNDED), holding(BOUNDED, 1)),
                caches(CODED, CodedKV=9, ArraysCache=3),
                distorted_at_fewer,
                undistorted,
                used(CODED, key_distortion=0),
                used(CODED, key_distortion=4e-4),
                chain(used(CODED), holding(CODED, 30_000)),
                used(CODED, value_distortion=0.0),
                used(CODED),
                used(CODED, bytes=50_000),
                used(CODED, bytes=70_001, values=112_000),
                used(CODED, layers=[0, 1, 2]),
                tiny,
                chain(ended("native", 1500, 4_000_000), ended(CODED, 1500, 300_000)),
                chain(ended("native", 60, 900_000), ended(BOUNDED, 60, 30_000)),
                used(BOUNDED, bytes=7_000),
                used(BOUNDED, bytes=29_000),
                lambda document: rows(document, "native")[0].update(kv=rows(document, CODED)[0]["kv"]),
                kept(None),
                kept(69),
                chain(bounded("sink-window:0,32@full", SlidingRing=9), kept(None)),
                chain(bounded("sink-window:0,32@full", SlidingRing=9), kept(512, "native"), kept(1024)),
                chain(bounded("sliding-bounded", KVCache=3, SlidingRing=6), kept(1024)),
                lattice("lattice-packed:e8,5", 60_000),
                lattice("lattice-packed:e8,5", 120_000),
                lattice("lattice:e8,38", 70_000),
                lattice("auto:5", 80_000),
                lattice("rotated:8/4,64@inner:2", 90_000),
                chain(lattice("rotated:8/4,64@inner:2", 81_250), used(CODED, value_distortion=2e-4)),
            )
        ],
    ],
    honest=[
        ("kv", declared(CODED, "affine@0-8")),
        ("kv", chain(declared(CODED, "rotated:4,128"), used(CODED, bytes=53_125))),
        ("kv", lattice("lattice-packed:e8,5", 65_625)),
        ("kv", chain(lattice("lattice-packed:d4,2@inner:40", 27_000), used(CODED, key_distortion=0.02))),
        ("kv", lattice("lattice:e8,38", 103_125)),
        ("kv", chain(lattice("auto:5", 68_750), used(CODED, key_distortion=1e-5))),
        ("kv", chain(lattice("rotated:8/4,64@inner:2", 81_250), used(CODED, key_distortion=1e-5))),
        ("kv", lattice("lattice:d4,127@2-6", 103_125)),
        ("kv", rows_cut),
        ("kv", used(BOUNDED, key_distortion=0.0)),
        ("kv", chain(used(BOUNDED), holding(BOUNDED, 110_000))),
        ("kv", used(CODED, key_distortion=6e-4)),
        ("throughput", holding("speculative", 290_000)),
        ("kv", chain(bounded("sliding-bounded", KVCache=3, SlidingRing=6), kept(1023, "native"))),
        ("kv", bounded("sink-window:0,32@full", SlidingRing=9)),
        (
            "kv",
            chain(bounded("full-kv", KVCache=3, WindowedKV=6), used(BOUNDED), holding(BOUNDED, 2_000_000)),
        ),
        ("kv", chain(bounded("sink-window", SlidingRing=9), used(BOUNDED))),
        ("kv", batched),
        ("kv", kept(12)),
        ("kv", chain(bounded("sink-window:0,32@full", SlidingRing=9), kept(1024))),
        ("kv", chain(bounded("sink-window:0,32@full", SlidingRing=9), kept(1024, "native"), kept(1024))),
        # buffers grow by steps: what ends sooner may hold much less
        ("kv", chain(ended("native", 240, 800_000), ended(CODED, 100, 60_000))),
        ("kv", chain(ended("native", 2000, 3_600_000), ended(BOUNDED, 20, 200_000))),
    ],
)
