"""Make the screenshots of the documentation, docs/images/*.png, from the site that `make site` has built.

Needs Chromium, found by the variable CHROMIUM or on the PATH (Debian: apt-get install chromium).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
SITE = ROOT / "build/site"
CODE, KV = "reports/throughput-code.html", "reports/kv.html"
# name -> page of the site, section to begin at, width and height in CSS pixels, colour scheme
SHOTS = {
    "report": (CODE, None, 1200, 1000, "light"),
    "report-charts": (CODE, "Speed", 1200, 1250, "light"),
    "report-dark": (CODE, "Speed", 1200, 1250, "dark"),
    "report-recall": (KV, "Recall by depth", 1200, 900, "light"),
    "report-phone": (CODE, None, 360, 780, "light"),
    "report-phone-charts": (CODE, "Speed", 360, 780, "dark"),
    "site": ("index.html", None, 1280, 900, "light"),  # narrower ones hide the navigation
    "site-dark": ("errors.html#git-and-the-network", None, 1280, 900, "dark"),
    "site-phone": ("index.html", None, 360, 780, "light"),
    "site-phone-dark": ("errors.html#git-and-the-network", None, 360, 780, "dark"),
}


def main() -> None:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium found; set CHROMIUM to its path")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (path, section, width, height, scheme) in SHOTS.items():
            view = {"width": width, "height": height}
            page = browser.new_page(viewport=view, color_scheme=scheme)
            # As a server would give them: opened from a folder, pages have no search.
            page.route(
                "http://localhost/**",
                lambda route: route.fulfill(path=SITE / urlsplit(route.request.url).path[1:]),
            )
            page.goto(f"http://localhost/{path}")
            if section is not None:
                page.get_by_role("heading", name=section).first.evaluate("e => e.scrollIntoView()")
            page.screenshot(path=IMAGES / f"{name}.png", animations="disabled")
            page.close()
            print(f"docs/images/{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
