"""Documents that can rot are generated, and what they point at exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import click

from bridge.cli import cli as bridge_cli
from engine.cli import group as engine_cli

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


_FENCE = re.compile(r"^( *)```([\w-]*)\n(.*?)^\1```$", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)[^)]*\)")


def texts(page: Path) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site both give a page's headings; of a root page, GitHub's alone."""
    found: tuple[dict[str, int], ...] = ({}, {})
    names: tuple[set[str], ...] = (set(), set())
    for heading in re.findall(r"^#+ +(.+?) *#*$", texts(page), flags=re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        github = re.sub(r"[^\w\s-]", "", plain).replace(" ", "-")
        site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip())
        for seen, known, name, mark in zip(found, names, (github, site), "-_", strict=True):
            seen[name] = seen.get(name, -1) + 1
            known.add(f"{name}{mark}{seen[name]}" if seen[name] else name)
    return names[0] & names[1] if page.is_relative_to(ROOT / "docs") else names[0]


def test_links_and_anchors_lead_somewhere():
    missing = []
    for page in PAGES:
        for path, anchor in _LINK.findall(texts(page)):
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                missing.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert not missing


def command_lines(page: Path) -> list[str]:
    """The lines of a page's shell blocks, each continued one with what it goes on with."""
    blocks = [
        text
        for _, kind, text in _FENCE.findall(page.read_text(encoding="utf-8"))
        if kind in ("", "sh", "bash")
    ]
    return [line.strip() for text in blocks for line in text.replace("\\\n", " ").splitlines()]


def commands(line: str) -> list[list[str]]:
    """The commands of a shell line, without pipes, redirections and comments."""
    lexer = shlex.shlex(re.sub(r" [<>]+ *[^ ]+", "", line), posix=True, punctuation_chars="|;&")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|;&"):
            found.append([])
        else:
            found[-1].append(word)
    return found


def objection(words: list[str], *, whole: bool) -> str | None:
    """Why click does not take a command line; words in capitals stand for others.

    One in a sentence (`whole` false) may leave out what it is not about.
    """
    command: click.Command = engine_cli if words[0] == "kakeya_engine" else bridge_cli
    context, rest = click.Context(command, **command.context_settings), words[1:]
    while True:
        try:
            given, rest, _ = command.make_parser(context).parse_args(list(rest))
        except click.UsageError as error:
            named_alone = isinstance(error, click.BadOptionUsage) and not whole  # an option without its value
            return None if named_alone else error.format_message()
        for parameter in command.params:
            value = given.get(parameter.name or "")
            if whole and parameter.required and value in (None, ()):
                return f"{parameter.name} is missing"
            if isinstance(parameter.type, click.Choice):
                named = value if isinstance(value, (list, tuple)) else [value]
                literal = {each for each in named if isinstance(each, str) and each.islower()}
                if wrong := literal - {*map(str, parameter.type.choices)}:
                    return f"{parameter.name} is {wrong}"
        if not isinstance(command, click.Group):
            return f"too many arguments: {rest}" if rest and not context.allow_extra_args else None
        if not rest:
            alone = command.invoke_without_command or given.get("help") or given.get("version")
            return None if alone or not whole else "a command is missing"
        child = command.get_command(context, rest[0])
        if child is None:
            return None if rest[0].isupper() else f"there is no command {rest[0]}"
        context = click.Context(child, parent=context, **child.context_settings)
        command, rest = child, rest[1:]


def test_command_lines_of_the_pages_are_accepted():
    programs = ("kakeya_mac", "kakeya-mac", "kakeya_engine")
    refused, count = [], 0
    for page in PAGES:
        inline = re.findall(rf"`((?:{'|'.join(programs)}) [^`]+)`", texts(page))
        lines = [(line, True) for line in command_lines(page) if line.startswith(programs)]
        for line, whole in [*lines, *((re.sub(r"[][\s]+|\|\w+", " ", text), False) for text in inline)]:
            for words in commands(line):
                if words and words[0] in programs:
                    count += 1
                    if why := objection(words, whole=whole):
                        refused.append(f"{page.relative_to(ROOT)}: {line}: {why}")
    assert count > 300
    assert not refused


def test_make_targets_and_scripts_of_the_pages_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for line in command_lines(page) if line.startswith("make ")]
        named = [*re.findall(r"`(make [^`]+)`", text), *(line.partition("#")[0] for line in lines)]
        words = {word for line in named for word in shlex.split(line)[1:] if re.fullmatch(r"[a-z-]+", word)}
        missing += [f"{page.name}: make {word}" for word in words - targets]
        missing += [
            f"{page.name}: {path}"
            for path in re.findall(r"(?<![\w/.-])(scripts/[\w-]+\.(?:sh|py))", text)
            if not (ROOT / path).exists()
        ]
    assert not missing


def sources() -> list[str]:
    """Each source file, with the parts of long texts joined."""
    folders = ("bridge", "engine", "evidence_format", "scripts")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".sh")
    ]
    texts = [path.read_text(encoding="utf-8") for path in [*files, ROOT / "Makefile"]]
    return [re.sub(r"([\"'])\n +f?[\"']", "", text) for text in texts]


def test_quoted_error_messages_are_in_the_source():
    """A message that was renamed is quoted no more; all parts of one must be in one file."""
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `(.+?)` \| ", page, flags=re.M)
    assert len(messages) > 40
    parts = {message: [part.strip() for part in message.split("…")] for message in messages}
    known = sources()
    assert not [
        message
        for message in messages
        if not any(all(part in text for part in parts[message]) for text in known)
    ]


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
