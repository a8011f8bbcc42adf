"""Reports rendered for people, and the figures of the closing JSON lines."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from engine.cli.terminal import console
from evidence_format.claims import SPEED_CLAIMS
from evidence_format.model import quotient

Document = dict[str, Any]
KV = {
    "bits": "stored_bits_per_value:.2f",
    "KV bytes": "max_resident_bytes:,",
    "key err": "key_distortion:.2g",
    "val err": "value_distortion:.2g",
    "recall": "recall:.3f",
    "accept": "acceptance_length:.2f",
    "speed": "decode_relative_to_native:.2f",
}
COMPACT: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 0, 0, 1)}
KV_NOTES = """\
bits: stored a value where the policy applies; KV bytes: most that was resident;
key err, val err: relative squared error of what the next query sees, evicted
positions lost; accept: tokens emitted per verify, the target's own included;
speed: decoding relative to native, not claimed; *: control; =: holds what
native caches hold, so on this model the policy changes nothing"""
KV_FIGURES = (*(column.partition(":")[0] for column in list(KV.values())[:-1]), "runaway_samples")
SHOWN = 20  # findings of a verification
BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}


def print_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], **style: Any) -> None:
    """Print a table; a column named ``<…`` is aligned left, and one named ``|…`` is not folded either."""
    table = Table(title=title, title_justify="left", **style)
    for name in columns:
        justify: Any = "left" if name[:1] in ("<", "|") else "right"
        table.add_column(name.lstrip("<|"), justify=justify, overflow="fold", no_wrap=name.startswith("|"))
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_line(text: str) -> None:
    console().print(text, markup=False, highlight=False, soft_wrap=True)


def _cell(value: Any, form: str = "", missing: str = "-") -> str:
    return missing if value is None else format(value, form)


def _cells(row: Document, *columns: str) -> list[str]:
    """Values of a row as texts; a column is written ``name:format``."""
    return [_cell(row[name], form) for name, _, form in (column.partition(":") for column in columns)]


def figures(document: Document) -> Document:
    """What the JSON line of an evaluation says: claims, arms, comparisons."""
    return {
        **{name: document[name] for name in ("kind", "claims")},
        "speed_not_claimed": document["configuration"].get("speed_not_claimed"),
        **{name: document["environment"][name] for name in ("blas", "device")},
        **document["summary"],
        "divergences": len(document["divergences"]),
    }


def throughput_table(document: Document) -> None:
    arms = document["summary"]["arms"]
    columns = ("<arm", "tok/s decode", "tok/s end to end", "acceptance length", "resident KV bytes")
    rates = ("decode_tokens_per_s:.1f", "end_to_end_tokens_per_s:.1f")
    names = (*rates, "acceptance_length:.2f", "max_resident_bytes:,")
    print_table("throughput", columns, ([name, *_cells(arm, *names)] for name, arm in arms.items()))
    claimed = {claim.get("arm") for claim in document["claims"] if claim["name"] in SPEED_CLAIMS}
    for row in document["summary"]["comparisons"]:
        ratios = _cells(row, "decode_ratio:.2f", "median_decode_ratio:.2f", "end_to_end_ratio:.2f")
        decode, others = f"decode {ratios[0]}x", f"median {ratios[1]}x, end to end {ratios[2]}x"
        is_claimed = row["arm"] in claimed
        speeds = f"{decode}; not claimed: {others}" if is_claimed else f"not claimed: {decode}, {others}"
        print_line(f"{_compared(row)}; {speeds}")
    if reason := document["configuration"].get("speed_not_claimed"):
        print_line(f"no speed is claimed: {reason}")
    for arm in document["arms"]:
        if arm["system"]["drafter"] and not arms[arm["name"]]["verify_rounds"]:
            print_line(f"{arm['name']}: drafting never promised to pay, so every step was plain")
    for name, arm in arms.items():
        if times := arm.get("block_s"):
            first = ", ".join(f"{1e3 * seconds:.1f}" for seconds in times["first"])
            longest, mean = 1e3 * times["max"], 1e3 * times["mean"]
            print_line(f"{name}: block time: first {first} ms, max {longest:.1f} ms, mean {mean:.1f} ms")
    print_line("acceptance length: tokens emitted per verify, the target's own included")


def _compared(row: Document) -> str:
    counts = f"identical {row['identical_samples']}/{row['compared_samples']}"
    return f"{row['arm']} / {row['baseline']}: {counts}"


def recall_table(document: Document) -> None:
    arms = document["summary"]["arms"]
    columns = ("name", "role", "recall:.3f", "samples")
    rows = (_cells(arm | arms[arm["name"]], *columns) for arm in document["arms"])
    print_table("recall", ("<arm", "<role", "recall", "samples"), rows)
    for row in document["summary"]["comparisons"]:
        print_line(f"{_compared(row)}; not claimed: decode {_cell(row['decode_ratio'], '.2f')}x")
    depth_table(document)


def depth_figures(document: Document) -> Document:
    """Recall of each arm at every depth of the needle, 0 at the start of the haystack."""
    from engine.evaluation.recall import recall_by_depth

    return {arm["name"]: recall_by_depth(arm["samples"]) for arm in document["arms"]}


def depth_table(document: Document) -> None:
    depths = depth_figures(document)
    names = list(dict.fromkeys(depth for found in depths.values() for depth in found))
    rows = ([arm, *(_cell(found.get(name), ".2f") for name in names)] for arm, found in depths.items())
    print_table("recall by depth", ("<arm", *names), rows)


def kv_figures(document: Document) -> list[Document]:
    """A line of the shoot-out for every arm of our loop that ran the prompts with their needles.

    Speed is relative to the native arm, over all prompts. Plain numbers have the bits of their dtype.
    """
    summary, speed = document["summary"]["arms"], "decode_tokens_per_s"
    [native] = [arm["name"] for arm in document["arms"] if arm["role"] == "baseline"]
    bits = BITS.get(document["configuration"]["dtype"])
    exact = {"stored_bits_per_value": bits, "key_distortion": 0.0, "value_distortion": 0.0}
    rows = []
    for arm in document["arms"]:
        if arm["role"] == "oracle" or arm["control"] == "no_needle":
            continue
        found = summary[arm["name"]] | (exact if arm["name"] == native else {})
        rows.append(
            {
                "policy": arm["system"]["kv"],
                "control": arm["control"],
                **{name: found[name] for name in KV_FIGURES},
                "decode_relative_to_native": quotient(found[speed], summary[native][speed]),
                "same_as_native": arm["name"] != native
                and arm["system"]["restoration"] is None
                and found["key_distortion"] == found["value_distortion"] == 0
                and found["max_resident_bytes"] == summary[native]["max_resident_bytes"],
            }
        )
    return rows


def kv_table(document: Document) -> None:
    has_needles = "oracle" in document["summary"]["arms"]
    if has_needles:
        depth_table(document)
    print_table("KV policies", ("<policy", *KV), _kv_rows(document), **COMPACT)
    for name in ("oracle", "no_needle") if has_needles else ():
        print_line(f"{name}: recall {_cell(document['summary']['arms'][name]['recall'], '.3f')}")
    print_line(KV_NOTES)


def _kv_rows(document: Document) -> list[list[str]]:
    return [
        [
            row["policy"] + (" *" if row["control"] else " =" if row["same_as_native"] else ""),
            *_cells(row, *KV.values()),
        ]
        for row in kv_figures(document)
    ]


def acceptance_table(documents: dict[str, Document]) -> None:
    """The lines of kv reports without needles, by the names of their drafters."""
    rows = [[name, *row] for name, document in documents.items() for row in _kv_rows(document)]
    print_table("acceptance by drafter and KV policy", ("<drafter", "<policy", *KV), rows, **COMPACT)
    print_line(KV_NOTES)


def quality_table(document: Document) -> None:
    from engine.evaluation.quality import matches_by_set

    rows = ([name, str(equal), str(count)] for name, (equal, count) in matches_by_set(document).items())
    print_table("output against plain decoding", ("<prompts", "identical", "of"), rows)
    for found in document["divergences"]:
        print_line(
            f"{found['prompt_id']} differs from position {found['position']} on; "
            f"the two best plain logits lie {found['plain_gap']:.3g} apart there"
        )
    error = _cell(document["rounding"] and document["rounding"]["max_abs_logit_error"], ".2g")
    print_line(f"block and single-token logits differ by at most {error}")
    for name, arm in document["summary"]["arms"].items():
        print_line(f"{name}: {arm['runaway_samples']} of {arm['samples']} outputs run away in repetition")


def perplexity_table(document: Document) -> None:
    found, of = document["summary"]["perplexity"], document["perplexity"]
    packed = f", weights packed {of['quantize']}" if of["quantize"] else ""
    columns = ("nll:.4f", "perplexity:.3f", "bytes:,")
    rows = []
    for side, name in (("native", "native"), ("policy", f"{of['kv']}{packed}")):
        names = (f"{side}_{column}" for column in columns)
        rows.append([name, *_cells(found, *names)])
    print_table("perplexity", ("<caches", "nll", "perplexity", "KV bytes"), rows)
    low, high = found["nll_interval"] or (None, None)
    interval = (
        f" (95 %: {low:+.4f} to {high:+.4f})" if low is not None else " (too few chunks for an interval)"
    )
    bits = _cell(found["stored_bits_per_value"], ".3f")
    print_line(f"increase: {found['nll_increase']:+.4f} nats a token{interval}; {bits} bits a coded value")
    print_line(f"{found['chunks']} chunks, {found['tokens']} tokens, read {of['piece']} at a time")


def tasks_table(document: Document) -> None:
    arms = document["summary"]["arms"]
    rows = ([name, *_cells(arm, "samples", "pass_at_1:.3f", "compiled:.3f")] for name, arm in arms.items())
    print_table("tasks", ("<arm", "tasks", "pass@1", "compiled"), rows)
    if any(arm["pass_at_1"] is None for arm in arms.values()):
        print_line("no test was run: the programs were compiled only; add --execute to run them in a sandbox")
    quality_table(document)


def checks_of(document: Document) -> dict[str, str | None]:
    return dict.fromkeys(document["configuration"]["checks"].split())


def checks_table(checks: dict[str, str | None]) -> None:
    rows = ([name, escape(fault or "passed")] for name, fault in checks.items())
    print_table("the server", ("<check", "<found"), rows)


def server_table(document: Document) -> None:
    checks_table(checks_of(document))
    quality_table(document)


def parity_table(document: Document) -> None:
    rows = []
    for row in document["cases"]:
        names = ("hidden_max_abs", "logits_max_abs")
        differences = [_cell(row[name], ".2e", "not finite") if name in row else "-" for name in names]
        compared = [value for value in (row["path_equal"], row.get("tokens_equal")) if value is not None]
        path = ("equal" if all(compared) else "DIFFERS") if compared else "-"
        [agreement] = _cells(row, "argmax_agreement:.4f")
        rows.append([*_cells(row, "case", "round"), *differences, agreement, path, _passed(row)])
    columns = ("<case", "round", "hidden", "logits", "argmax", "<path", "<passed")
    print_table(f"parity, tolerance {document['tolerance']:g}", columns, rows)
    print_line(
        "hidden, logits: largest absolute difference; argmax: share of rows (of a pair: drafts) that agree; "
        "path: through the candidates, and the tokens of a pair"
    )


def _passed(row: Document) -> str:
    return "yes" if row["passed"] else "NO"


def codec_table(document: Document) -> None:
    rows = (
        [
            *_cells(entry, "name", "vectors:,", "blocks_identical:.3%"),
            *_cells(entry, "relative_mse:.4e", "reference_relative_mse:.4e"),
            _cell(entry["mse_ratio"], ".6f", "not finite"),
            *_cells(entry, "max_abs_difference:.2e"),
            _passed(entry),
        ]
        for entry in document["entries"]
    )
    columns = ("<entry", "vectors", "identical", "MSE", "reference", "ratio", "worst", "<passed")
    print_table("lattice code against stored round trips", columns, rows, **COMPACT)
    print_line(
        "identical: blocks with the same lattice point; MSE: relative, mean over the rows; worst: difference"
    )
    if most := max(entry["vectors_left_out"] for entry in document["entries"]):
        print_line(f"left out of the MSE: rows that the reference loses, at most {most:,} of an entry")


def probe_table(document: Document, hint: str | None) -> None:
    environment, facts = document["environment"], document["configuration"]
    rows = {
        "machine": f"{environment['chip']} ({environment['machine']}, {environment['cpu_count']} CPUs)",
        "system": f"{environment['system']} {environment['os_release']}",
        "memory": f"{environment['memory_bytes'] / 2**30:.1f} GiB",
        "device": environment["device"],
        "BLAS": f"{environment['blas']} ({facts['blas_how']})",
        "512x512x512 product": f"{facts['product_gflop_per_s']} GFLOP/s",
        "fused kernels": "yes" if facts["fused_kernels"] else "no (no C++ compiler)",
        "ring rollback": "exact" if facts["ring_rollback_exact"] else "WRONG",
        "versions": ", ".join(f"{name} {value}" for name, value in environment["versions"].items()),
    }
    print_table("probe", ("<", "<"), rows.items(), show_header=False)
    if hint:
        print_line(hint)


def projector_table(held_out: dict[str, dict[str, float]], title: str) -> None:
    """Print a projector's held-out figures, a column for each stage of the training."""
    stages = list(held_out.values())
    rows = ([name.replace("_", " "), *(f"{stage[name]:.4f}" for stage in stages)] for name in stages[0])
    print_table(title, ("<", *held_out), rows)


def verification_table(document: Document) -> None:
    rows, draw, report = document["rows"], document["draw"], document["report"]
    columns = ("<row", "tokens", "largest gap", "allowed", "rounds", "differing", "accepted")
    print_table("verification", columns, (_verified(row) for row in rows if row["drawn"]))
    bound = f" of request {report['nonce']}" if report["nonce"] else ""
    checked = f", {draw['rows']} checked against their prompts and texts" if rows else "; no model was run"
    drawn = f"drawn {sum(row['drawn'] for row in rows)} of {draw['rows']} rows with --seed {draw['seed']}"
    print_line(f"report {report['sha256']}{bound}")
    print_line(f"{drawn}; {len(rows)} replayed{checked}")
    for reason, count in Counter(row["rounds"]["reason"] for row in rows).items():
        if reason:
            print_line(f"rounds of {count} rows not replayed: {reason}")
    findings = [f"{each['where']}: {each['check']}: {each['message']}" for each in document["findings"]]
    for line in (*document["notes"], *findings[:SHOWN]):
        print_line(line)
    if len(findings) > SHOWN:
        print_line(f"… and {len(findings) - SHOWN} more findings")
    print_line(document["verdict"])


def _verified(row: Document) -> list[str]:
    rounds, name = row["rounds"], escape(f"{row['arm']}/{row['prompt_id']}")
    accepted = f"{rounds['accepted']} of {rounds['claimed_accepted']}"
    played = ["-"] * 3 if rounds["reason"] else [*_cells(rounds, "replayed", "differing"), accepted]
    return [name, *_cells(row["tokens"], "checked", "largest_gap:.2g", "allowed:.2g"), *played]
