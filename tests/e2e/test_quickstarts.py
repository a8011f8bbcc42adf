"""The four quickstarts, docs/start: each command of each page, in its order, as a newcomer types it.

One remote and one runner serve all pages. The runner is the one that the owner's page starts. The first
`kakeya_mac` of a page, or after another program, is what the page has put on the PATH; the others run in the
test's process, because a start of Python takes most of a second.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters

from tests.fixtures.repo import BIN, Done, RepoFixture, isolated_env, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.unsandboxed]  # packages are installed

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("agent", "developer", "ci", "owner")
REMOTE = "git@example.org:you/workload.git"
KEY = "ssh-ed25519 AAAA…"
SERVE = f"kakeya_mac runner serve --remote {REMOTE} --name studio"
SETUP = f"scripts/setup_mac.sh --service serve --remote {REMOTE} --name studio --sudo"
# Lines that cannot run here, and why.
NOT_RUN = {
    "make setup": "makes the environment in which this test runs",
    SETUP: "changes the Mac; its --dry-run is on the page, too",
    "kakeya_mac runner check": "fails on a machine that is no Mac; tests/bridge/mac runs it",
    "gh variable set KAKEYA_TRANSPORT --body embedded": "needs GitHub",
    f"gh variable set KAKEYA_TRUSTED_RUNNERS --body 'studio {KEY}'": "needs GitHub",
}
# Lines that take long: the client is installed once, the engine runs once. test_presets.py measures a
# throughput and runs tests of a commit, tests/bridge/cli/test_paired.py a pair.
INSTALL = "kakeya-mac/scripts/install_client.sh ~/.kakeya-mac"
THROUGHPUT = "kakeya_mac run --preset throughput"
PAIRED = "kakeya_mac run --preset tests -p path=tests/bench --against origin/main"
CHECKED = "kakeya_mac run --preset tests --require-runner --wait"
SHORTER = {
    INSTALL: f"test -x ~/.kakeya-mac/bin/kakeya_mac || {INSTALL}",
    f"{THROUGHPUT} -p prompts=code -p limit=5 --wait": "kakeya_mac run --preset probe --wait",
    f"{THROUGHPUT} -p model=demo -p limit=5 --wait": f"{THROUGHPUT} -p model=demo -p limit=5 --dry-run",
    f"{PAIRED} --wait": f"{PAIRED} --dry-run",
    "kakeya_mac run --preset probe --json": "kakeya_mac run --preset hello --json",
    "kakeya_mac run --preset probe --wait": "kakeya_mac run --preset hello --wait",
    CHECKED: "kakeya_mac run --preset hello --require-runner --wait",
}
HELLO = """
name = "hello"
summary = "A test program."
argv = ["${python}", "-I", "-c", "print('hello')"]
timeout_s = 60
engine = "installed"
workspace = "none"
"""
HANDLE = re.compile(r"\b\d{8}t\d{6}z[0-9a-f]{12}\b")


def commands(page: str) -> list[str]:
    """The lines of the page's code blocks."""
    text = (ROOT / "docs" / "start" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)
    assert text.count("```") == 2 * len(blocks), "a block of another kind would not be run"
    return [line for block in blocks for line in block.splitlines()]


@dataclass
class Terminal:
    """A shell: each command begins in the folder and with the PATH that the one before left.

    Attributes:
        words: What parts of the pages' commands are here.
        found: Whether the last command was the client, found on the PATH.
    """

    env: dict[str, str]
    words: dict[str, str]
    found: bool = False
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.env["HOME"])

    def here(self, line: str) -> str:
        """The line as it is typed here."""
        line = SHORTER.get(line, line)
        for word, instead in self.words.items():
            line = line.replace(word, instead)
        return line

    def type(self, line: str) -> Done:
        if self.found and line.startswith("kakeya_mac "):
            arguments = shlex.split(self.here(line))[1:]
            return RepoFixture(self.folder, self.env).kakeya(*arguments, cwd=self.folder)
        self.found = line.startswith("kakeya_mac ")
        left = Path(self.env["HOME"]) / "left"
        script = f'{self.here(line)}\ncode=$?\nprintf "%s\\n" "$PWD" "$PATH" >"{left}"\nexit $code'
        done = subprocess.run(
            ["sh", "-c", script],
            cwd=self.folder,
            env={**self.env, "PWD": str(self.folder)},  # so that a linked folder keeps its name
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
        folder, self.env["PATH"] = left.read_text().splitlines()
        self.folder = Path(folder)
        return Done(done.returncode, done.stdout, done.stderr)

    def follow(self, lines: list[str]) -> dict[str, Done]:
        """Type the lines that can run here; each has to succeed."""
        typed = {}
        for line in lines:
            if line in NOT_RUN:
                continue
            done = self.type(line)
            while done.code == 4 and line.startswith("kakeya_mac wait"):  # as the page says: the same again
                done = self.type(line)
            assert done.code == 0, f"{self.here(line)}\n{done.out}\n{done.err}"
            if line.startswith("kakeya_mac run ") and (handles := HANDLE.findall(done.out)):
                self.words["HANDLE"] = handles[-1]
            typed[line] = done
        return typed


@dataclass
class Site:
    """A remote, and a Mac that serves it."""

    root: Path
    words: dict[str, str]
    mac: Terminal
    serving: subprocess.Popen[bytes]

    def terminal(self) -> Terminal:
        """Of a user with a clone, who may have followed another page before."""
        return Terminal(environment(self.root / "you"), dict(self.words))


def environment(root: Path) -> dict[str, str]:
    """Of an account of its own, with nothing but a name for git."""
    root.mkdir(exist_ok=True)
    env = {name: value for name, value in isolated_env(root).items() if not name.startswith("KAKEYA_")}
    (root / "home" / ".gitconfig").write_text("[user]\n\tname = Someone\n\temail = someone@example.org\n")
    return env


def make_remote(root: Path) -> Path:
    """A remote, and a clone of it that is one commit ahead."""
    remote, env = root / "workload.git", environment(root / "you")
    clone = Path(env["HOME"]) / "my-repository"
    (test := clone / "tests" / "bench" / "test_sum.py").parent.mkdir(parents=True)
    test.write_text("def test_sum() -> None:\n    assert sum([1, 1]) == 2\n")
    script = f"""
        git init --quiet --bare --initial-branch=main {remote}
        git init --quiet --initial-branch=main && git remote add origin {remote}
        git add --all && git commit --quiet -m workload && git push --quiet --set-upstream origin main
        git commit --quiet --allow-empty -m change
    """
    subprocess.run(["sh", "-ec", script], cwd=clone, env=env, check=True)
    return remote


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site").resolve()
    words = {
        "git clone … ": f"ln -sfn {ROOT} ",  # the checkout that is tested
        "$PWD/.venv/bin": str(BIN),
        "OWNER/kakeya-mac@COMMIT": "team/kakeya-mac@" + "ab" * 20,
        REMOTE: str(make_remote(root)),
    }
    mac = Terminal(environment(root / "mac"), words)
    lines = commands("owner")
    mac.follow(lines[: lines.index(SERVE)])
    config = Path(mac.env["XDG_CONFIG_HOME"]) / "kakeya-mac"
    (config / "presets").mkdir()
    (config / "presets" / "hello.toml").write_text(HELLO)
    log = root / "serve.log"
    with log.open("ab") as output:
        command = ["sh", "-c", f"exec {mac.here(SERVE)}"]
        serving = subprocess.Popen(command, cwd=mac.folder, env=mac.env, stdout=output, stderr=output)
    try:
        wait_for(lambda: "serving" in log.read_text(), what="the runner's start")
        registration = Path(words[REMOTE]) / "refs" / "mac-bridge" / "runners" / "studio"
        wait_for(registration.exists, what="a registration")
        [words[KEY]] = re.findall(r"runners trust studio --key '([^']+)'", log.read_text())
        yield Site(root, words, mac, serving)
    finally:
        serving.terminate()
        serving.wait(30)


def test_what_is_left_out_or_shortened_is_on_a_page():
    written = {line for page in PAGES for line in commands(page)}
    assert not {*NOT_RUN, *SHORTER, SERVE} - written


async def tools(terminal: Terminal) -> set[str]:
    command = StdioServerParameters(
        command="kakeya_mac", args=["mcp"], env=terminal.env, cwd=str(terminal.folder)
    )
    async with Client(command) as client:
        return {tool.name for tool in (await client.list_tools()).tools}


def test_the_page_for_an_agent(site: Site):
    terminal = site.terminal()
    typed = terminal.follow(commands("agent"))
    result = typed["kakeya_mac result HANDLE --json"].json
    assert (result["status"], result["handle"]) == ("passed", terminal.words["HANDLE"])
    assert (terminal.folder / ".agents" / "skills" / "kakeya-mac" / "SKILL.md").exists()
    client = shutil.which("kakeya_mac", path=terminal.env["PATH"])
    assert client == str(Path(terminal.env["HOME"]) / ".kakeya-mac" / "bin" / "kakeya_mac")
    assert "mac_submit" in asyncio.run(tools(terminal))


def test_the_page_for_a_developer(site: Site):
    terminal = site.terminal()
    typed = terminal.follow(commands("developer"))
    assert '"demo"' in typed["kakeya_mac presets throughput --remote"].out  # the models of the owner's page
    assert "accepted" in typed["kakeya_mac gate out/report.json"].out
    assert (terminal.folder / "report.html").stat().st_size > 1000


def test_the_page_for_ci(site: Site):
    terminal = site.terminal()
    terminal.follow([line for line in commands("developer") if "kakeya-mac" in line])  # its installation
    typed = terminal.follow(commands("ci"))
    assert "PASSED" in typed[CHECKED].out
    assert (terminal.folder / ".github" / "workflows" / "kakeya-mac.yaml").exists()


def test_the_page_for_a_macs_owner(site: Site):
    """What comes after its runner has started; the last of these tests, because the page stops it."""
    lines = commands("owner")
    other = Terminal(dict(site.mac.env), site.words)
    typed = other.follow(lines[lines.index(SERVE) + 1 :])
    assert "signed by studio" in typed["kakeya_mac run --preset probe --wait"].out
    assert "studio" in typed["kakeya_mac runner status"].out
    assert site.serving.wait(20) == 0
