"""Reports rendered for people, and the figures of the closing JSON lines."""

from typing import Any

from rich.console import Console
from rich.table import Table

Document = dict[str, Any]


def figures(document: Document) -> Document:
    """What the JSON line of an evaluation says: claims, arms, comparisons."""
    return {
        "kind": document["kind"],
        "claims": document["claims"],
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
    for row in document["summary"]["comparisons"]:
        console.print(
            f"{row['arm']} / {row['baseline']}: decode {_number(row['decode_ratio'], 2)}x "
            f"(median {_number(row['median_decode_ratio'], 2)}x), "
            f"end to end {_number(row['end_to_end_ratio'], 2)}x, "
            f"identical {row['identical_samples']}/{row['compared_samples']}"
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
    Console().print(table)


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
