"""Reports of machines that cannot be told or timed, and claims that their rows do not reach."""

from __future__ import annotations

from tests.bridge.evidence.breakers import (
    Breaker,
    Rules,
    both,
    chain,
    change,
    claim,
    claims,
    drop_baseline,
    env,
    only,
    put,
    rows,
)
from tests.bridge.evidence.reports import Document, settle


def no_slowdown(document: Document) -> None:
    claims(document, "identical_output")
    document["claims"].append({"name": "no_slowdown", "at_least": 0.9})
    for fast, plain in zip(rows(document, "speculative"), rows(document, "plain"), strict=True):
        put(document, fast, plain["tokens"], round(plain["decode_s"] * 1.05, 7))
    settle(document)


def environment_incomplete(document: Document) -> None:
    del document["environment"]["models"]["drafter"]


def thermal_or_power(document: Document) -> None:
    document["environment"]["power_source"] = "battery"


def claim_not_met(document: Document) -> None:
    document["claims"][1]["at_least"] = 2.5


def linux_without_checkout(document: Document) -> None:
    document["environment"] |= {"system": "Linux", "machine": "x86_64", "chip": "AMD EPYC"}
    document["environment"] |= {"metal": False, "device": "cpu", "blas": "reference"}
    document["environment"] |= {
        "power_source": "not_applicable",
        "thermal_state": "unknown",
        "swapping": None,
    }
    document["environment"]["git"] |= {"sha": None, "dirty": None}  # source_sha256 names what ran


def slower_but_only_identical(document: Document) -> None:
    """Sequential, few, short and slow: nothing about speed is claimed."""
    claims(document, "identical_output")
    document["configuration"]["limit"] = 3
    for arm in document["arms"]:
        del arm["samples"][3:]
    for row in both(document):
        put(document, row, row["tokens"][:9], 0.9)
    settle(document)
    document["order"].sort()
    document["environment"]["power_source"] = "battery"


def plain_alone(document: Document) -> None:
    document["claims"] = []
    document["rounding"] = None
    del document["arms"][1]
    del document["environment"]["models"]["drafter"]
    for row in rows(document, "plain"):
        put(document, row, [9] * 64, 0.2)  # honest about a model that loops: nothing is claimed
    settle(document)


def baseline_that_drafts(document: Document) -> None:
    document["arms"][0]["system"] |= {"loop": "kakeya.decode", "drafter": "prompt-lookup", "block": "auto"}
    for row in rows(document, "plain"):
        row["path"] = "speculative:prompt-lookup"
        put(document, row | {"rounds": []}, row["tokens"], row["decode_s"])
        row["rounds"] = rows(document, "speculative")[0]["rounds"]
    settle(document)


def one_mismatch(document: Document) -> None:
    """A tie that identical_output excuses and exact_match counts."""
    document["claims"][1]["at_least"] = 0.9
    row = rows(document, "speculative")[0]
    plain = row["tokens"][40]
    row["tokens"] = [*row["tokens"][:40], plain + 1, *row["tokens"][41:]]
    row["text"] += "!"
    document["divergences"] = [
        {
            "arm": "speculative",
            "prompt_id": row["prompt_id"],
            "position": 40,
            "plain_token": plain,
            "speculative_token": plain + 1,
            "plain_gap": 1e-5,
        }
    ]
    settle(document)


def without_one(name: str, *kept: str) -> Breaker:
    """The last prompt removed from one arm (and its no_needle control), with these claims kept."""

    def apply(document: Document) -> None:
        claims(document, *kept)
        for arm in document["arms"]:
            if arm["name"] == name or (arm["role"] == "control" and name != "oracle"):
                arm["samples"].pop()
        settle(document)

    return apply


def lossy_baseline(document: Document) -> None:
    """An original of our own loop with narrow caches, and the same caches under test."""
    for arm in document["arms"]:
        arm["system"]["kv"] = "sink-window:4,64@all"
        for row in arm["samples"]:
            row["cache"]["classes"] = {"SlidingRing": 9}
    document["arms"][0]["system"]["loop"] = "kakeya.decode"
    for row in rows(document, "plain"):
        row["path"] = "plain:kakeya.decode"


def large_model(parameters: int, quantization: str | None = None) -> Breaker:
    """A target of so many parameters on a machine of 24 GiB."""
    return lambda document: document["environment"]["models"]["target"].update(
        parameters=parameters, quantization=quantization
    )


def coded_baseline(document: Document) -> None:
    document["arms"][0]["system"]["kv"] = "affine:2,64@all"
    for row in rows(document, "plain"):
        row["cache"]["classes"] = {"CodedKV": 9}
        row["kv"] = {"layers": list(range(9)), "values": 100_000, "bytes": 31_250}
        row["kv"] |= {"key_distortion": None, "value_distortion": None}
    settle(document)


RULES = Rules(
    alone={
        "ENVIRONMENT_INCOMPLETE": ("throughput", environment_incomplete),
        "ENVIRONMENT_IMPOSSIBLE": ("throughput", env("chip", to="AMD EPYC")),
        "THERMAL_OR_POWER": ("throughput", thermal_or_power),
        "CLAIM_NOT_MET": ("throughput", claim_not_met),
    },
    variants=[
        ("ENVIRONMENT_INCOMPLETE", "probe", env("chip", to="unknown")),
        ("ENVIRONMENT_INCOMPLETE", "probe", env("versions", "mlx", to=" ")),
        ("ENVIRONMENT_INCOMPLETE", "probe", env("git", "sha", to=None)),
        ("ENVIRONMENT_INCOMPLETE", "probe", env("git", "source_sha256", to="0" * 64)),
        ("ENVIRONMENT_INCOMPLETE", "probe", env("models", "target", "parameters", to=0)),
        ("ENVIRONMENT_INCOMPLETE", "probe", env("system", to="Linux")),
        ("ENVIRONMENT_INCOMPLETE", "quality", env("models", "target", "vocab_size", to=None)),
        ("ENVIRONMENT_INCOMPLETE", "quality", env("models", "target", "cache_layers", to=[])),
        ("ENVIRONMENT_INCOMPLETE", "quality", env("models", "drafter", "largest_block", to=None)),
        ("ENVIRONMENT_IMPOSSIBLE", "quality", env("models", "target", "quantization", to="0-bit")),
        ("ENVIRONMENT_INCOMPLETE", "probe", env("thermal_state", to="not_applicable")),
        ("THERMAL_OR_POWER", "throughput", env("thermal_state", to="serious")),
        ("THERMAL_OR_POWER", "throughput", env("swapping", to=True)),
        ("CLAIM_NOT_MET", "throughput", claim(name="no_slowdown", at_least=0.1)),
        ("CLAIM_NOT_MET", "throughput", claim(name="speedup", at_least=0.9)),
        ("CLAIM_NOT_MET", "throughput", claim(name="speedup")),
        ("CLAIM_NOT_MET", "throughput", change("configuration", "speed_not_claimed", to="a busy machine")),
        ("CLAIM_NOT_MET", "throughput", change("configuration", "claim", to="none")),
        ("CLAIM_NOT_MET", "throughput", change("configuration", "claim", to="identity")),
        ("CLAIM_NOT_MET", "throughput", change("configuration", "min_speedup", to=1.0)),
        ("CLAIM_NOT_MET", "throughput", claim(name="speedup", at_least=1.2, at_most=3)),
        ("CLAIM_NOT_MET", "throughput", claim(name="identical_output", at_least=1)),
        ("CLAIM_NOT_MET", "throughput", claim(name="resident_bytes", at_most=1000)),
        ("CLAIM_NOT_MET", "throughput", claim(name="acceptance_length", arm="missing", at_least=2)),
        ("CLAIM_NOT_MET", "throughput", claim(name="identical_output", baseline="speculative")),
        ("CLAIM_NOT_MET", "throughput", change("rounding", to=None)),
        ("CLAIM_NOT_MET", "throughput", chain(only("identical_output"), drop_baseline)),
        ("CLAIM_NOT_MET", "recall", claim(name="speedup", at_least=1.0)),
        ("CLAIM_NOT_MET", "recall", claim(name="recall", at_least=1.5)),
        ("CLAIM_NOT_MET", "recall", claim(name="recall_parity", baseline="no_needle")),
        ("CLAIM_NOT_MET", "probe", change("claims", 0, "arm", to="plain")),
        ("CLAIM_NOT_MET", "quality", claim(name="exact_match")),
        ("CLAIM_NOT_MET", "quality", claim(name="exact_match", at_least=0)),
        ("CLAIM_NOT_MET", "quality", claim(name="exact_match", at_least=0.49)),
        ("ENVIRONMENT_IMPOSSIBLE", "probe", env("machine", to="x86_64")),
        ("ENVIRONMENT_IMPOSSIBLE", "probe", chain(linux_without_checkout, env("system", to="Darwin"))),
        ("ENVIRONMENT_IMPOSSIBLE", "probe", env("system", to="Linux")),
        ("ENVIRONMENT_IMPOSSIBLE", "probe", env("metal", to=False)),
        ("ENVIRONMENT_IMPOSSIBLE", "probe", chain(linux_without_checkout, env("chip", to="Apple M4"))),
        ("ENVIRONMENT_IMPOSSIBLE", "probe", large_model(6_500_000_000)),
        ("ENVIRONMENT_IMPOSSIBLE", "probe", large_model(26_000_000_000, "affine 8-bit group 64")),
        ("CLAIM_NOT_MET", "quality", claim(name="parity", at_most=1e-4)),
        ("CLAIM_NOT_MET", "quality", baseline_that_drafts),
        ("CLAIM_NOT_MET", "quality", one_mismatch),
        ("CLAIM_NOT_MET", "quality", without_one("speculative", "identical_output")),
        ("CLAIM_NOT_MET", "quality", without_one("plain", "identical_output")),
        ("CLAIM_NOT_MET", "quality", without_one("speculative", "exact_match")),
        ("CLAIM_NOT_MET", "throughput", without_one("speculative", "acceptance_length")),
        ("CLAIM_NOT_MET", "recall", without_one("speculative", "recall")),
        ("CLAIM_NOT_MET", "recall", without_one("oracle", "recall")),
        ("CLAIM_NOT_MET", "kv", without_one("affine:4,64@all", "recall")),
        ("CLAIM_NOT_MET", "quality", chain(only("identical_output"), lossy_baseline)),
        ("CLAIM_NOT_MET", "quality", chain(only("exact_match"), coded_baseline)),
        ("CLAIM_NOT_MET", "parity", change("claims", 0, "at_most", to=1e-6)),
        ("CLAIM_NOT_MET", "parity", change("claims", 0, "at_least", to=1e-6)),
        ("CLAIM_NOT_MET", "parity", change("claims", 0, to={"name": "parity"})),
        ("CLAIM_NOT_MET", "parity", change("claims", 0, "arm", to="plain")),
        (
            "ENVIRONMENT_INCOMPLETE",
            "restoration",
            lambda document: document["environment"]["models"].pop("projector"),
        ),
        ("ENVIRONMENT_INCOMPLETE", "restoration", env("models", "projector", "weights_sha256", to="12" * 32)),
    ],
    honest=[
        ("throughput", linux_without_checkout),
        ("recall", linux_without_checkout),
        ("throughput", slower_but_only_identical),
        ("throughput", plain_alone),
        ("throughput", no_slowdown),
        ("probe", large_model(6_000_000_000)),
        ("probe", large_model(26_000_000_000, "affine 4-bit group 64, affine 8-bit group 64")),
    ],
)
