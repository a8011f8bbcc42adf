"""`make forge`: run the workflow files on a real Gitea, and say what came of each scenario.

PROGRAMS is the folder that scripts/install_forge.sh built. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.forge.scenarios import SCENARIOS, Site
from tests.forge.server import ROOT, Forge

PAGE = ROOT / "docs" / "forge.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.forge")
    parser.add_argument("programs", type=Path)
    parser.add_argument(
        "--only", action="append", choices=[*SCENARIOS], help="this scenario alone; repeatable"
    )
    parser.add_argument("--skip", action="append", choices=[*SCENARIOS], default=[], help="not this one")
    parser.add_argument("--keep", action="store_true", help="leave the folder with all logs")
    parser.add_argument("--store", action="store_true", help=f"write the table in {PAGE.relative_to(ROOT)}")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server and the runners are stopped
    folder = Path(tempfile.mkdtemp(prefix="kakeya-forge-"))
    site = Site(Forge(given.programs.resolve(), folder))
    versions = dict(line.split() for line in (given.programs / "version").read_text().splitlines())
    rows, start_s = [], time.monotonic()
    try:
        print(f"forge: Gitea {versions['gitea']}, executor {versions['act']}, in {folder}", flush=True)
        site.prepare()
        print(f"forge: {site.forge.url} is up after {time.monotonic() - start_s:.0f} s", flush=True)
        for name in [name for name in given.only or SCENARIOS if name not in given.skip]:
            rows.append(run(site, name))
    except Exception:
        traceback.print_exc()
        rows.append({"scenario": "setup", "passed": False, "outcome": "", "seconds": 0.0})
    finally:
        site.forge.close()
        passed = len(rows) > 0 and all(row["passed"] for row in rows)
        if given.keep or not passed:
            print(f"forge: logs are in {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    document = {
        "passed": passed,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions,
        "seconds": round(time.monotonic() - start_s, 1),
        "scenarios": rows,
    }
    if given.store and passed:
        store(document)
    print(json.dumps(document))
    return 0 if passed else 1


def run(site: Site, name: str) -> dict[str, Any]:
    """Run one scenario; what it came to."""
    start_s, passed = time.monotonic(), True
    try:
        came = SCENARIOS[name](site)
    except Exception as error:
        traceback.print_exc()
        passed, came = False, f"{type(error).__name__}: {str(error)[:300]}"
    seconds = round(time.monotonic() - start_s, 1)
    print(f"{'ok  ' if passed else 'FAIL'} {seconds:6.1f} s  {name}: {came}", flush=True)
    return {"scenario": name, "passed": passed, "outcome": came, "seconds": seconds}


def store(document: dict[str, Any]) -> None:
    """Put the table of this run in its place on the page."""
    git = subprocess.run(["git", "--version"], check=True, capture_output=True, text=True).stdout.split()[2]
    versions = document["versions"]
    lines = [
        f"Run on {document['date']}: Gitea {versions['gitea']}, its executor {versions['act']}, git {git},"
        f" Python {platform.python_version()}, {platform.system()} {platform.machine()}.",
        "",
        "| scenario | what happens | what comes of it | seconds |",
        "| --- | --- | --- | --- |",
    ]
    for row in document["scenarios"]:
        what = (SCENARIOS[row["scenario"]].__doc__ or "").split("\n")[0]
        lines.append(f"| {row['scenario']} | {what} | {row['outcome']} | {row['seconds']:.0f} |")
    before, begin, rest = PAGE.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    PAGE.write_text(f"{before}{begin}" + "\n".join(lines) + f"\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
