"""Reports rendered for people, and the figures of the closing JSON lines."""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.evaluation.system_load import Load

Document = dict[str, Any]
SPEED_CLAIMS = ("speedup", "no_slowdown")
KV_NOTES = """\
bits: stored a value where the policy applies; KV bytes: most that was resident;
key err, val err: relative squared error of what the next query sees, evicted
positions lost; accept: tokens emitted per verify, the target's own included;
speed: decoding relative to native, not claimed; *: control; =: holds what
native caches hold, so on this model the policy changes nothing"""
SHOWN = 20  # findings of a verification
BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}


def figures(document: Document) -> Document:
    """What the JSON line of an evaluation says: claims, arms, comparisons."""
    return {
        "kind": document["kind"],
        "claims": document["claims"],
        "speed_not_claimed": document["configuration"].get("speed_not_claimed"),
        "blas": document["environment"]["blas"],
        "device": document["environment"]["device"],
        "arms": document["summary"]["arms"],
        "comparisons": document["summary"]["comparisons"],
        "divergences": len(document["divergences"]),
    }


def throughput_table(document: Document) -> None:
    """Arms side by side, and the comparison."""
    table = Table(title="throughput", title_justify="left")
    for column in ("arm", "tok/s decode", "tok/s end to end", "acceptance length", "resident KV bytes"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, arm in document["summary"]["arms"].items():
        table.add_row(
            name,
            _number(arm["decode_tokens_per_s"], 1),
            _number(arm["end_to_end_tokens_per_s"], 1),
            _number(arm["acceptance_length"], 2),
            f"{arm['max_resident_bytes']:,}",
        )
    console = Console()
    console.print(table)
    claimed = {claim.get("arm") for claim in document["claims"] if claim["name"] in SPEED_CLAIMS}
    for row in document["summary"]["comparisons"]:
        decode = f"decode {_number(row['decode_ratio'], 2)}x"
        others = (
            f"median {_number(row['median_decode_ratio'], 2)}x, "
            f"end to end {_number(row['end_to_end_ratio'], 2)}x"
        )
        ratios = f"{decode}; not claimed: {others}"
        if row["arm"] not in claimed:
            ratios = f"not claimed: {decode}, {others}"
        console.print(
            f"{row['arm']} / {row['baseline']}: identical {row['identical_samples']}/"
            f"{row['compared_samples']}; {ratios}",
            soft_wrap=True,
        )
    if reason := document["configuration"].get("speed_not_claimed"):
        console.print(f"no speed is claimed: {reason}", markup=False, soft_wrap=True)
    elif claimed and (reason := Load(**document["environment"]["load"]).busy):
        console.print(f"the gate will reject the speed claim: {reason}", markup=False, soft_wrap=True)
    for name, arm in document["summary"]["arms"].items():
        if times := arm.get("block_s"):
            first = ", ".join(f"{1e3 * seconds:.1f}" for seconds in times["first"])
            console.print(
                f"{name}: block time: first {first} ms, max {1e3 * times['max']:.1f} ms, "
                f"mean {1e3 * times['mean']:.1f} ms"
            )
    console.print("acceptance length: tokens emitted per verify, the target's own included")


def recall_table(document: Document) -> None:
    """Recall of each arm."""
    table = Table(title="recall", title_justify="left")
    for column in ("arm", "role", "recall", "samples"):
        table.add_column(column, justify="right" if column in ("recall", "samples") else "left")
    roles = {arm["name"]: arm["role"] for arm in document["arms"]}
    for name, arm in document["summary"]["arms"].items():
        table.add_row(name, roles[name], _number(arm["recall"], 3), str(arm["samples"]))
    console = Console()
    console.print(table)
    for row in document["summary"]["comparisons"]:
        console.print(
            f"{row['arm']} / {row['baseline']}: decode {_number(row['decode_ratio'], 2)}x, not claimed; "
            f"identical {row['identical_samples']}/{row['compared_samples']}"
        )


def depth_table(depths: dict[str, dict[str, float]]) -> None:
    """Recall of each arm at every depth of the needle, 0 at the start of the haystack."""
    table = Table(title="recall by depth", title_justify="left")
    table.add_column("arm")
    names = list(dict.fromkeys(depth for found in depths.values() for depth in found))
    for name in names:
        table.add_column(name, justify="right")
    for arm, found in depths.items():
        table.add_row(arm, *(_number(found.get(name), 2) for name in names))
    Console().print(table)


def kv_figures(document: Document) -> list[Document]:
    """A line of the shoot-out for every arm of our loop that ran the prompts with their needles.

    Speed is relative to the native arm, over all prompts. Plain numbers have the bits of their dtype.
    """
    summary, speed = document["summary"]["arms"], "decode_tokens_per_s"
    [native] = [arm["name"] for arm in document["arms"] if arm["role"] == "baseline"]
    rows = []
    for arm in document["arms"]:
        found = summary[arm["name"]]
        if arm["role"] == "oracle" or arm["control"] == "no_needle":
            continue
        kept = arm["name"] == native
        rows.append(
            {
                "policy": arm["system"]["kv"],
                "control": arm["control"],
                "stored_bits_per_value": BITS.get(document["configuration"]["dtype"])
                if kept
                else found["stored_bits_per_value"],
                "max_resident_bytes": found["max_resident_bytes"],
                "key_distortion": 0.0 if kept else found["key_distortion"],
                "value_distortion": 0.0 if kept else found["value_distortion"],
                "recall": found["recall"],
                "acceptance_length": found["acceptance_length"],
                "decode_relative_to_native": _quotient(found[speed], summary[native][speed]),
                "runaway_samples": found["runaway_samples"],
                "same_as_native": not kept
                and arm["system"]["restoration"] is None
                and found["key_distortion"] == found["value_distortion"] == 0
                and found["max_resident_bytes"] == summary[native]["max_resident_bytes"],
            }
        )
    return rows


def kv_table(document: Document) -> None:
    """The shoot-out: a line for every policy."""
    table = Table(title="KV policies", title_justify="left", box=None, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("policy", no_wrap=True)
    for column in ("bits", "KV bytes", "key err", "val err", "recall", "accept", "speed"):
        table.add_column(column, justify="right")
    for row in kv_figures(document):
        table.add_row(
            row["policy"] + (" *" if row["control"] else " =" if row["same_as_native"] else ""),
            _number(row["stored_bits_per_value"], 2),
            f"{row['max_resident_bytes']:,}",
            _small(row["key_distortion"]),
            _small(row["value_distortion"]),
            _number(row["recall"], 3),
            _number(row["acceptance_length"], 2),
            _number(row["decode_relative_to_native"], 2),
        )
    console = Console()
    console.print(table)
    roles = {arm["name"]: arm["role"] for arm in document["arms"]}
    for name, arm in document["summary"]["arms"].items():
        if roles[name] == "oracle" or name == "no_needle":
            console.print(f"{name}: recall {_number(arm['recall'], 3)}")
    console.print(KV_NOTES)


def quality_table(document: Document, sets: dict[str, tuple[int, int]]) -> None:
    """Equal outputs by set of prompts, and what differs."""
    table = Table(title="output against plain decoding", title_justify="left")
    for column in ("prompts", "identical", "of"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    for name, (equal, count) in sets.items():
        table.add_row(name, str(equal), str(count))
    console = Console()
    console.print(table)
    rounding = document["rounding"]
    error = rounding["max_abs_logit_error"] if rounding else None
    for found in document["divergences"]:
        console.print(
            f"{found['prompt_id']} differs from position {found['position']} on; "
            f"the two best plain logits lie {found['plain_gap']:.3g} apart there"
        )
    console.print(f"block and single-token logits differ by at most {_small(error)}")
    for name, arm in document["summary"]["arms"].items():
        console.print(f"{name}: {arm['runaway_samples']} of {arm['samples']} outputs run away in repetition")


def checks_table(checks: dict[str, str | None]) -> None:
    """What each check of a server found."""
    table = Table(title="the server", title_justify="left")
    table.add_column("check")
    table.add_column("found", overflow="fold")
    for name, fault in checks.items():
        table.add_row(name, escape(fault or "passed"))
    Console().print(table)


def parity_table(document: Document) -> None:
    """A line for every round."""
    table = Table(title=f"parity, tolerance {document['tolerance']:g}", title_justify="left")
    table.add_column("case", overflow="fold")
    for column in ("round", "hidden", "logits", "argmax", "path", "passed"):
        table.add_column(column, justify="left" if column in ("path", "passed") else "right")
    for row in document["cases"]:
        compared = [value for value in (row["path_equal"], row.get("tokens_equal")) if value is not None]
        path = ("equal" if all(compared) else "DIFFERS") if compared else "-"
        table.add_row(
            row["case"],
            str(row["round"]),
            *(_difference(row, name) for name in ("hidden_max_abs", "logits_max_abs")),
            f"{row['argmax_agreement']:.4f}",
            path,
            "yes" if row["passed"] else "NO",
        )
    console = Console()
    console.print(table)
    console.print(
        "hidden, logits: largest absolute difference; argmax: share of rows (of a pair: drafts) that agree; "
        "path: through the candidates, and the tokens of a pair"
    )


def _difference(row: Document, name: str) -> str:
    if name not in row:
        return "-"
    return "not finite" if row[name] is None else f"{row[name]:.2e}"


def probe_figures(document: Document) -> Document:
    """The JSON line of a probe."""
    return {"kind": "probe", **document["configuration"], "environment": document["environment"]}


def probe_table(document: Document, hint: str | None) -> None:
    """The machine, one fact a line."""
    environment, facts = document["environment"], document["configuration"]
    table = Table(title="probe", title_justify="left", show_header=False)
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
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if hint:
        console.print(hint)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _quotient(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def verification_table(document: Document) -> None:
    """Rows the models were run for, then what was found."""
    table = Table(title="verification", title_justify="left")
    for column in ("row", "tokens", "largest gap", "allowed", "rounds", "differing", "accepted"):
        table.add_column(
            column, justify="left" if column == "row" else "right", overflow="fold", no_wrap=column != "row"
        )
    rows = document["rows"]
    for row in rows:
        if row["drawn"]:
            table.add_row(escape(f"{row['arm']}/{row['prompt_id']}"), *_verified(row))
    console = Console()
    console.print(table)
    draw, report = document["draw"], document["report"]
    lines = [
        f"report {report['sha256']}" + (f" of request {report['nonce']}" if report["nonce"] else ""),
        f"drawn {sum(row['drawn'] for row in rows)} of {draw['rows']} rows with --seed {draw['seed']}; "
        f"{len(rows)} replayed"
        + (f", {draw['rows']} checked against their prompts and texts" if rows else "; no model was run"),
    ]
    unplayed = Counter(row["rounds"]["reason"] for row in rows if row["rounds"]["reason"])
    lines += [f"rounds of {count} rows not replayed: {reason}" for reason, count in unplayed.items()]
    lines += document["notes"]
    lines += [f"{each['where']}: {each['check']}: {each['message']}" for each in document["findings"][:SHOWN]]
    if (more := len(document["findings"]) - SHOWN) > 0:
        lines.append(f"… and {more} more findings")
    for line in [*lines, document["verdict"]]:
        console.print(escape(line), soft_wrap=True, highlight=False)


def _verified(row: Document) -> list[str]:
    """The cells of a replayed row."""
    tokens, rounds = row["tokens"], row["rounds"]
    cells = [str(tokens["checked"]), f"{tokens['largest_gap']:.2g}", f"{tokens['allowed']:.2g}"]
    if rounds["reason"]:
        return [*cells, "-", "-", "-"]
    accepted = f"{rounds['accepted']} of {rounds['claimed_accepted']}"
    return [*cells, str(rounds["replayed"]), str(rounds["differing"]), accepted]
