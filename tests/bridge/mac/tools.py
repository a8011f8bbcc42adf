"""A Mac's own programs, as far as setup asks them: small ones on PATH that behave as recorded and keep state.

Each writes how it was called into ``calls``. What lies in ``/Library`` on a Mac lies below ``root`` here.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fixtures.repo import BIN, Done

TOKEN = "AABBCCDDEEFFGGHHIIJJKKLLMMNN"
LOG = 'echo "${0##*/} $*" >> "$FAKE/calls"\n'
PROGRAMS = {
    "uname": 'case "$1" in -s) echo Darwin;; -m) cat "$FAKE/machine";; *) exec /usr/bin/uname "$@";; esac',
    "sw_vers": 'cat "$FAKE/macos"',
    "sysctl": """case "$2" in
  machdep.cpu.brand_string) echo "Apple M4 Max";;
  hw.memsize) cat "$FAKE/memory";;
  sysctl.proc_translated) cat "$FAKE/translated" 2>/dev/null || exit 1;;
  *) exit 1;;
esac""",
    "xcode-select": '[ -e "$FAKE/no-tools" ] && exit 2; echo /Library/Developer/CommandLineTools',
    "git-lfs": """case "$1" in
  version) [ -e "$FAKE/no-lfs" ] && exit 1; echo "git-lfs/3.6.1 (GitHub; darwin arm64; go 1.23.3)";;
  install) git config --global filter.lfs.process "git-lfs filter-process --skip";;
esac""",
    "brew": '[ -e "$FAKE/brew" ] || exit 1; [ "$1" = install ] && /bin/rm "$FAKE/no-lfs"; exit 0',
    "sudo": """[ -e "$FAKE/no-sudo" ] && { echo "me is not in the sudoers file." >&2; exit 1; }
case "$*" in -v | "-n -v") ;; *) exec "$@";; esac""",
    "cat": 'case "$1" in /Library/*) exec /bin/cat "$FAKE/root$1";; *) exec /bin/cat "$@";; esac',
    "sleep": "exit 0",
    "pgrep": """[ -s "$FAKE/busy" ] || exit 1
tail -n +2 "$FAKE/busy" > "$FAKE/busy-"; mv "$FAKE/busy-" "$FAKE/busy" """,
    "install": """shift 6
mkdir -p "$FAKE/root/Library/LaunchDaemons"
cp "$1" "$FAKE/root$2"
""",
    "rm": 'case "$2" in /Library/*) exec /bin/rm -f "$FAKE/root$2";; *) exec /bin/rm "$@";; esac',
    "launchctl": """label=${2#system/}
known="$FAKE/launchd/$label" leaving="$FAKE/leaving/$label"
case "$1" in
  print)
    state=running code="(never exited)"
    if [ -e "$known" ]; then
      [ -e "$FAKE/stops" ] && state="spawn scheduled" code="78: EX_CONFIG"
    elif [ -s "$leaving" ]; then
      tail -n +2 "$leaving" > "$leaving-"; mv "$leaving-" "$leaving"
    else
      echo "Could not find service \\"$label\\" in domain for system" >&2; exit 113
    fi
    printf 'system/%s = {\\n\\tactive count = 1\\n' "$label"
    printf '\\tpath = /Library/LaunchDaemons/%s.plist\\n' "$label"
    sed -n '/<key>StandardOutPath</{n;s/.*<string>\\(.*\\)<.string>.*/\\tstdout path = \\1/p;}' \\
      "$FAKE/root/Library/LaunchDaemons/$label.plist"
    printf '\\ttype = LaunchDaemon\\n\\tstate = %s\\n\\n\\tdomain = system\\n\\truns = 1\\n' "$state"
    printf '\\tlast exit code = %s\\n\\n' "$code"
    printf '\\tresource coalition = {\\n\\t\\tstate = active\\n\\t}\\n}\\n';;
  bootout)
    [ -e "$known" ] || { echo "Boot-out failed: 3: No such process" >&2; exit 3; }
    mkdir -p "$FAKE/leaving"; printf 'a\\nb\\n' > "$leaving"; /bin/rm "$known";;
  bootstrap)
    known="$FAKE/launchd/$(basename "$3" .plist)" leaving="$FAKE/leaving/$(basename "$3" .plist)"
    if [ -e "$FAKE/launchd-refuses" ] || [ -e "$FAKE/refuses-once" ] || [ -e "$known" ] ||
      [ -s "$leaving" ]; then
      /bin/rm -f "$FAKE/refuses-once"; echo "Bootstrap failed: 5: Input/output error" >&2; exit 5
    fi
    [ -e "$FAKE/root$3" ] || exit 2
    mkdir -p "$FAKE/launchd"; : > "$known";;
esac""",
    "id": 'if [ "$1" = -u ]; then cat "$FAKE/user"; else exec /usr/bin/id "$@"; fi',
    "pmset": """if [ "$1" = -g ]; then cat "$FAKE/power"; exit; fi
[ "$1" = -c ] || exit 1
printf 'Battery Power:\\n sleep 1\\nAC Power:\\n sleep %s\\n autorestart %s\\n' "$3" "$5" > "$FAKE/power"
""",
    "ssh": """for word; do :; done
[ -e "$FAKE/any-key" ] || { echo "git@github.com: Permission denied (publickey)." >&2; exit 255; }
[ -e "$FAKE/repository" ] || git init -q --bare "$FAKE/repository"
set -- $word
exec git "${1#git-}" "$FAKE/repository" """,
    "tailscale": """if [ "$1" = up ]; then : > "$FAKE/tailnet"; exit; fi
if [ -e "$FAKE/tailnet" ]; then
  echo '{"BackendState": "Running", "Self": {"DNSName": "studio.ts.net.", "sshHostKeys": ["ssh-ed25519 A"]}}'
else echo '{"BackendState": "NeedsLogin", "Self": {}}'; fi""",
    "curl": """for word; do [ "$previous" = -o ] && target=$word; previous=$word; done
cp "$FAKE/archive" "$target"
""",
}
CONFIG = """#!/bin/sh
[ "$ACTIONS_RUNNER_INPUT_TOKEN" = "$(cat "$FAKE/token")" ] || { echo "Http response code: 404"; exit 1; }
cd "$(dirname "$0")"
[ "$1" = remove ] && { /bin/rm .runner; exit; }
printf '\\357\\273\\277{"gitHubUrl": "%s", "agentName": "%s"}' "$3" "$5" > .runner
echo "$PATH" > .path
"""
# The interpreter that setup runs in and makes environments with: the environment's programs are small, too.
# What setup waits for happens at once here, so its pauses are a twentieth as long.
PYTHON = """#!/bin/sh
if [ "$1 $2 $3" = "-I -m venv" ]; then
  for folder; do :; done
  /bin/rm -rf "$folder"
  mkdir -p "$folder/bin"
  cp "$FAKE/env-python" "$folder/bin/python"
  cp "$FAKE/env-engine" "$folder/bin/kakeya_engine"
  cp "$FAKE/env-uv" "$folder/bin/uv"
  cp "$FAKE/env-kakeya" "$folder/bin/kakeya_mac"
  chmod 755 "$folder"/bin/*
  exit 0
fi
case "$1 $2 $3" in *bridge.mac.setup*)
  code="import time; time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds / 20)
$3"
  shift 3
  exec REAL_PYTHON -I -c "$code" "$@";;
esac
exec REAL_PYTHON "$@"
"""
ENV_PYTHON = """#!/bin/sh
folder=$(dirname "$(dirname "$0")")
[ "$1" = -I ] || exit 1
case "$*" in
  *i.write*) echo '{}' > "$folder/interpreter.json";;
  *objection*) [ -e "$folder/interpreter.json" ] || exit 1; [ -e "$folder/changed" ] && exit 1; exit 0;;
esac
"""
UV = """#!/bin/sh
[ ! -e "$FAKE/no-packages" ] || { echo "no network" >&2; exit 1; }
"""
KAKEYA = """#!/bin/sh
[ "$1" != gate ] || exec grep -q passes "$2"
exec "$REAL_KAKEYA" "$@"
"""
# It keeps a report among the state of the account that runs it, as the real one does.
ENGINE = """#!/bin/sh
state=${KAKEYA_STATE:-$HOME/.local/state/kakeya-mac}
mkdir -p "$state/reports"; date > "$state/reports/$$"
[ "$1" = eval ] || exit 0
for word; do [ "$previous" = --report ] && report=$word; previous=$word; done
if [ -e "$FAKE/bad-report" ]; then echo rejected; else echo passes; fi > "$report"
"""
URL = "https://github.com/team/workload"
SCRIPT = Path(__file__).parents[3] / "scripts" / "setup_mac.sh"
REMOTE = "git@github.com:team/workload.git"
FULL = ("--service", "both", "--remote", REMOTE, "--sudo", "--tailnet", "--json")
# Calls that look and change nothing.
LOOKS = re.compile(
    r"uname -|sw_vers |sysctl |xcode-select |git-lfs version|brew --version|launchctl print"
    r"|pmset -g custom$|tailscale status|id -u|cat |ssh -|pgrep "
)


@dataclass
class Mac:
    """A fake Mac below a folder."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    sha256: str = ""

    def __post_init__(self) -> None:
        for name in ("tools", "home", "fake"):
            (self.folder / name).mkdir(parents=True)
        for name, body in PROGRAMS.items():
            self._program(self.folder / "tools" / name, f"#!/bin/sh\n{LOG}{body}\n")
        self._program(
            self.folder / "tools" / "python-of-setup", PYTHON.replace("REAL_PYTHON", sys.executable)
        )
        inside = {"python": ENV_PYTHON, "engine": ENGINE, "uv": UV, "kakeya": KAKEYA}
        for name, body in inside.items():
            self._program(self.fake / f"env-{name}", body)
        for name, text in {
            "machine": "arm64\n",
            "macos": "15.5\n",
            "memory": "137438953472\n",
            "token": TOKEN,
            "user": "501\n",
            "any-key": "",
            "power": "Battery Power:\n sleep 1\nAC Power:\n sleep         1\n autorestart   0\n",
        }.items():
            (self.fake / name).write_text(text)
        (self.fake / "archive").write_bytes(archive())
        self.sha256 = hashlib.sha256(archive()).hexdigest()
        self.env = {
            "HOME": str(self.home),
            "PATH": f"{self.folder / 'tools'}:{os.environ['PATH']}",
            "FAKE": str(self.fake),
            "REAL_KAKEYA": str(BIN / "kakeya_mac"),
            "KAKEYA_PYTHON": str(self.folder / "tools" / "python-of-setup"),
            "KAKEYA_RUNNER_TOKEN": TOKEN,
            "GIT_CONFIG_NOSYSTEM": "1",
        }

    @property
    def fake(self) -> Path:
        """State of the programs."""
        return self.folder / "fake"

    @property
    def home(self) -> Path:
        """Of the account."""
        return self.folder / "home"

    @property
    def prefix(self) -> Path:
        """Where setup puts everything."""
        return self.home / "kakeya-mac"

    def run(self, *words: str, cwd: Path | None = None, **env: str) -> Done:
        """The script, with these words."""
        done = subprocess.run(
            ["sh", str(SCRIPT), *words],
            env={**os.environ, **self.env, **env},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert TOKEN not in done.stdout + done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def setup(self, *args: str, cwd: Path | None = None, url: str = URL, **env: str) -> Done:
        """The script, for a repository, with an archive that this Mac's curl brings."""
        flags = ("--url", url, "--runner-sha256", self.sha256, "--runner-version", "2.400.0")
        return self.run(*args, *flags, "--name", "studio", cwd=cwd, **env)

    def step(self, done: Done, name: str) -> dict[str, Any]:
        """What a run says of one part."""
        found: dict[str, Any] = next(step for step in done.json["steps"] if step["name"] == name)
        return found

    def changes(self) -> list[str]:
        """Calls that do more than look, in order; then they are forgotten."""
        return [call for call in self.calls() if not LOOKS.match(call)]

    def calls(self) -> list[str]:
        """How the programs were called, in order; then they are forgotten."""
        log = self.fake / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def tree(self) -> dict[str, tuple[int, bytes]]:
        """Every file of the account and of the system, with its time of change."""
        found = {}
        for folder in (self.home, self.fake):
            for path in folder.rglob("*"):
                if path.is_file() and path.name != "calls":
                    found[str(path)] = (path.stat().st_mtime_ns, path.read_bytes())
        return found

    def _program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)


def archive() -> bytes:
    """GitHub's runner, as far as it matters."""
    sink = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=sink, mode="w", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, text in {"config.sh": CONFIG, "run.sh": "#!/bin/sh\nexec sleep 60\n"}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))
    return sink.getvalue()
