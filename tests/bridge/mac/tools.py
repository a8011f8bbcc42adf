"""A Mac's own programs, as far as setup asks them: small ones on PATH that behave as recorded and keep state.

Each writes how it was called into ``calls``. What lies in ``/Library`` on a Mac lies below ``root`` here.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.houses import BIN

TOKEN = "AABBCCDDEEFFGGHHIIJJKKLLMMNN"
LOG = 'echo "$(basename "$0") $*" >> "$FAKE/calls"\n'
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
    "sudo": 'exec "$@"',
    "install": """shift 6
mkdir -p "$FAKE/root/Library/LaunchDaemons"
cp "$1" "$FAKE/root$2"
""",
    "cmp": 'exec /usr/bin/cmp -s "$2" "$FAKE/root$3"',
    "rm": 'exec /bin/rm -f "$FAKE/root$2"',
    "launchctl": """label=${2#system/}
case "$1" in
  print) [ -e "$FAKE/launchd/$label" ] || { echo "Could not find service" >&2; exit 113; };;
  bootout) [ -e "$FAKE/launchd/$label" ] || exit 3; /bin/rm "$FAKE/launchd/$label";;
  bootstrap)
    [ -e "$FAKE/launchd-refuses" ] && { echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; }
    [ -e "$FAKE/root$3" ] || exit 2
    mkdir -p "$FAKE/launchd"; : > "$FAKE/launchd/$(basename "$3" .plist)";;
esac""",
    "pmset": """if [ "$1" = -g ]; then cat "$FAKE/power"; exit; fi
[ "$1" = -c ] && printf ' sleep         %s\\n autorestart   %s\\n' "$3" "$5" > "$FAKE/power" """,
    "tailscale": """if [ "$1" = up ]; then : > "$FAKE/tailnet"; exit; fi
if [ -e "$FAKE/tailnet" ]; then
  echo '{"BackendState": "Running", "Self": {"DNSName": "studio.ts.net.", "sshHostKeys": ["ssh-ed25519 A"]}}'
else echo '{"BackendState": "NeedsLogin", "Self": {}}'; fi""",
    "gh": '[ -e "$FAKE/gh" ] || exit 1; [ "$1" = auth ] || cat "$FAKE/gh"',
    "curl": """for word; do [ "$previous" = -o ] && target=$word; previous=$word; done
cp "$FAKE/archive" "$target"
""",
}
CONFIG = """#!/bin/sh
[ "$1" = remove ] && { /bin/rm "$(dirname "$0")/.runner"; exit; }
[ "$ACTIONS_RUNNER_INPUT_TOKEN" = "$(cat "$FAKE/token")" ] || { echo "Http response code: 404"; exit 1; }
cd "$(dirname "$0")"
printf '\\357\\273\\277{"gitHubUrl": "%s", "agentName": "%s"}' "$3" "$5" > .runner
echo "$PATH" > .path
"""
# The interpreter that setup makes environments with: the environment's programs are small, too.
PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
  for folder; do :; done
  /bin/rm -rf "$folder"
  mkdir -p "$folder/bin"
  cp "$FAKE/env-python" "$folder/bin/python"
  for program in uv kakeya_engine; do printf '#!/bin/sh\\nexit 0\\n' > "$folder/bin/$program"; done
  printf '#!/bin/sh\\nexec %s "$@"\\n' "$REAL_KAKEYA" > "$folder/bin/kakeya_mac"
  chmod 755 "$folder"/bin/*
  exit 0
fi
exec REAL_PYTHON "$@"
"""
ENV_PYTHON = """#!/bin/sh
folder=$(dirname "$(dirname "$0")")
case "$*" in
  *i.write*) echo '{}' > "$folder/interpreter.json";;
  *objection*) [ -e "$folder/interpreter.json" ] || exit 1; [ -e "$folder/changed" ] && exit 1; exit 0;;
esac
"""


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
        self._program(self.fake / "env-python", ENV_PYTHON)
        for name, text in {
            "machine": "arm64\n",
            "macos": "15.5\n",
            "memory": "137438953472\n",
            "token": TOKEN,
            "power": "System-wide power settings:\n sleep                1\n autorestart          0\n",
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
