#!/bin/sh
# Set this Mac up as a runner of kakeya-mac, from this checkout. See --help; --dry-run works on any machine.
# Safe in macOS's own shell (bash 3.2). It only looks for a Python that is new enough: the rest is in bridge/mac.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)

# Isolated (-I): neither PYTHON* variables nor modules in the current folder have a say.
find_python() {
  for python; do
    if command -v "$python" >/dev/null 2>&1 &&
      "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then return; fi
  done
  echo "error: ${KAKEYA_PYTHON:+KAKEYA_PYTHON=}$1 is no Python 3.11 or later, and no other was found" >&2
  echo "  brew install python@3.12, or https://www.python.org/downloads/macos/; or name one in KAKEYA_PYTHON" >&2
  exit 1
}
if [ -n "${KAKEYA_PYTHON:-}" ]; then
  find_python "$KAKEYA_PYTHON"
else
  find_python python3.13 python3.12 python3.11 python3 /opt/homebrew/bin/python3 /usr/local/bin/python3
fi
exec "$python" -I -c '
import sys
sys.path.insert(0, sys.argv.pop(1))
from bridge.mac.setup import main
sys.exit(main(sys.argv[1:]))
' "$root" "$@"
