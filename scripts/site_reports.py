"""Make a page of each report in benchmarks/results, as `make site` does: ``site_reports.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main(folder: Path) -> None:
    from bridge.evidence.gate import judge_file
    from bridge.render.report import ReportSubject, html

    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        subject = ReportSubject(str(path.relative_to(ROOT)), {path.name: judge_file(path)})
        (folder / f"{path.stem}.html").write_text(html([subject]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
