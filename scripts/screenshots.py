"""Make the screenshots of the documentation: ``python scripts/screenshots.py`` writes docs/images/*.png.

Needs Chromium, found by the variable CHROMIUM or on the PATH (Debian: apt-get install chromium).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
IMAGES = ROOT / "docs/images"
# name -> report of benchmarks/results, section to begin at, width and height in CSS pixels, colour scheme
SHOTS = {
    "report": ("throughput-code", None, 1200, 1000, "light"),
    "report-charts": ("throughput-code", "Speed", 1200, 1250, "light"),
    "report-dark": ("throughput-code", "Speed", 1200, 1250, "dark"),
    "report-recall": ("kv", "Recall by depth", 1200, 900, "light"),
    "report-phone": ("throughput-code", None, 360, 780, "light"),
    "report-phone-charts": ("throughput-code", "Speed", 360, 780, "dark"),
}


def main() -> None:
    from bridge.evidence.gate import judge_file
    from bridge.render.report import ReportSubject, html

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium found; set CHROMIUM to its path")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (report, section, width, height, scheme) in SHOTS.items():
            path = Path("benchmarks/results") / f"{report}.json"
            page_file = Path(folder) / f"{report}.html"
            page_file.write_text(html([ReportSubject(str(path), {path.name: judge_file(ROOT / path)})]))
            view = {"width": width, "height": height}
            page = browser.new_page(viewport=view, color_scheme=scheme)
            page.goto(page_file.as_uri())
            if section is not None:
                page.get_by_role("heading", name=section).first.evaluate("e => e.scrollIntoView()")
            page.screenshot(path=IMAGES / f"{name}.png")
            page.close()
            print(f"docs/images/{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
