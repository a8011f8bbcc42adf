"""``kakeya_engine probe``: the machine, in a table and one JSON line."""

import json
from pathlib import Path
from typing import Any

import click

from engine.cli.options import prepare, report_options, take_request
from engine.cli.reports import store


@click.command("probe")
@report_options
def command(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """Say what this machine is, which BLAS is in use, and whether the cache rolls back exactly.

    \b
    Examples:
      kakeya_engine probe
      kakeya_engine probe --json --report probe.json
    """  # noqa: D301 - click wants the character itself
    request, runtime = take_request(values), prepare()
    from engine.cli.tables import probe_table
    from engine.evaluation.probe import advice, probe_machine

    report = probe_machine(runtime, request)
    path, document, hint = store(report, report_path), report.document, advice(runtime)
    if not as_json:
        probe_table(document, hint)
    line = {"kind": "probe", **document["configuration"], "environment": document["environment"]}
    click.echo(json.dumps(line | {"advice": hint, "report": str(path)}))
