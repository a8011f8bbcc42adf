"""The page in headless Chromium: axe finds nothing, the keyboard reaches everything, nothing is loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from bridge.evidence.gate import judge, judge_file
from bridge.protocol.result import Status, Violation
from bridge.render.report import ReportSubject, html
from tests.bridge.evidence import reports, test_paired
from tests.bridge.evidence.reports import dump
from tests.bridge.render.test_evidence import HOSTILE, judged
from tests.bridge.render.test_report import full_request

# In `make exhaustive` alone: CI has no time left to install a browser.
pytestmark = [pytest.mark.exhaustive, pytest.mark.unsandboxed]
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "no chromium: apt-get install chromium, or set CHROMIUM to its path"
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real reports, a rejected request with hostile texts, and a comparison."""
    judgements = {path.stem: judge_file(path) for path in RESULTS.glob("*.json")}
    broken = tuple(Violation(code="SCHEMA", message=HOSTILE * 9) for _ in range(3))
    request = judged(Status.REJECTED, HOSTILE, broken)
    evidence = {"paired.json": judge(dump(test_paired.record())), "report.json": judge(dump(reports.kv()))}
    subjects = {name: [ReportSubject(f"{name}.json", {name: each})] for name, each in judgements.items()}
    subjects["request"] = [ReportSubject(reports.NONCE, evidence, replace(request, judgements=evidence))]
    full = full_request()
    subjects["full"] = [ReportSubject(reports.NONCE, full.judgements, full)]
    subjects["comparison"] = [subjects["throughput-code"][0], subjects["request"][0]]
    folder = tmp_path_factory.mktemp("pages")
    for name, given in subjects.items():
        (folder / f"{name}.html").write_text(html(given, ["FASTER  a against b"] * (len(given) > 1)))
    return {name: folder / f"{name}.html" for name in subjects}


def opened(browser: Browser, path: Path, *, width: int, scheme: str = "light") -> tuple[Page, list[str]]:
    """The page, every fold of it open, and what it asked for or complained of besides its own file."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    others: list[str] = []
    page.on("request", lambda request: request.url != path.as_uri() and others.append(request.url))
    page.on("console", lambda message: others.append(message.text))
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    return page, others


@pytest.mark.parametrize(
    ("width", "scheme", "media"),
    [(1200, "light", "screen"), (1200, "dark", "screen"), (360, "light", "screen"), (800, "dark", "print")],
)
@pytest.mark.parametrize("name", ["kv", "comparison", "full"])
def test_axe_finds_no_violation(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str, media: str
) -> None:
    page, others = opened(browser, pages[name], width=width, scheme=scheme)
    page.emulate_media(media=media)  # type: ignore[arg-type]
    if media == "screen":
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert not others
    page.close()


def test_the_keyboard_reaches_everything(browser: Browser, pages: dict[str, Path]) -> None:
    page, _ = opened(browser, pages["kv"], width=360)
    wanted = page.evaluate("document.querySelectorAll('a, summary, [tabindex=\"0\"]').length")
    seen = set()
    for _ in range(wanted):
        page.keyboard.press("Tab")
        focused = "[...document.querySelectorAll('*')].indexOf(document.activeElement)"
        seen.add(page.evaluate(focused))
        style = "getComputedStyle(document.activeElement)"
        assert page.evaluate(f"{style}.outlineStyle") == "solid"
    assert len(seen) == wanted
    fold = page.locator("details").first
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    assert fold.get_attribute("open") is None
    page.close()


def test_print_shows_what_is_folded(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["throughput-code"].as_uri())
    assert page.locator("details td").first.is_hidden()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("details td").first.is_visible()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    page.close()
