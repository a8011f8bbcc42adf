"""Documents that can rot are generated, and what they point at exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_generated_pages_are_current():
    done = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_site_leads_to_every_page():
    """`make site` would refuse a page that is nowhere in its navigation."""
    listed = set(re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/0")} == listed - {"decisions/0*.md"}


def test_relative_links_lead_somewhere():
    missing = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        missing += [
            f"{page}: {link}"
            for link in links
            if not link.startswith(("http:", "https:")) and not (page.parent / link).exists()
        ]
    assert not missing


README = (ROOT / "README.md").read_text(encoding="utf-8")
# A path in plain text: a folder with its slash, or a file of a kind that the repository holds.
_PATH = re.compile(r"(?<![\w./-])(?:[\w.-]+/)*(?:[\w.-]+/|[\w-]+\.(?:py|toml|json|md|sh|ya?ml|txt))(?![\w/])")


def tree_lines() -> list[tuple[str, list[str], list[str]]]:
    """Of README's tree, each line's section, the names it is about, and the paths in its text."""
    block = README.partition("## The source tree\n\n```\n")[2].partition("\n```")[0]
    section, about, lines = "", [""], []
    for line in block.splitlines():
        words = line.split()
        names = []
        while words and _PATH.fullmatch(words[0]):
            names.append(words.pop(0))
        if not line.startswith(" "):
            section, names = names[0], []
            about = [""]
        elif names and len(line) - len(line.lstrip()) < 10:
            about = [name for name in names if name.endswith("/")] or [""]
        else:  # the text of the line above goes on
            words, names = [*names, *words], []
        lines.append((section, names, [*about, *_PATH.findall(" ".join(words))]))
    return lines


def test_every_path_in_the_tree_of_the_readme_exists():
    lines = tree_lines()
    assert len(lines) > 30
    missing = []
    for section, names, (*rest,) in lines:
        folders = [ROOT / section / folder for folder in ("", *(word for word in rest if word.endswith("/")))]
        missing += [section] if not (ROOT / section).is_dir() else []
        for name in [*names, *rest]:
            if name and not any((folder / name).exists() for folder in [*folders, ROOT]):
                missing.append(f"{section}: {name}")
    assert not missing


def test_every_path_of_the_repository_that_the_readme_names_exists():
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()} - {".venv"}
    named = re.findall(r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]*)", README)
    found = [path for path in named if path.partition("/")[0] in tops]
    assert len(found) > 10
    assert not [path for path in found if not (ROOT / path.rstrip(".")).exists()]


def test_the_readme_says_what_a_client_needs_and_what_no_mac_has_run():
    plain = " ".join(README.split())
    assert "nothing but git" not in plain
    assert "the client git and Python 3.11 or later" in plain
    section = README.partition("## What has never run on a Mac\n")[2].partition("\n## ")[0]
    for word in ("Metal", "setup_mac.sh", "sandbox-exec", "launchd", "make demo"):
        assert word in section
