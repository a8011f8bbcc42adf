#!/bin/sh
# Set this Mac up as a runner of kakeya-mac, from this checkout. See --help; --dry-run works on any machine.
# Safe in macOS's own shell (bash 3.2). It only looks for a Python that is new enough: the rest is in bridge/mac.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)

# Isolated (-I): neither PYTHON* variables nor modules in the current folder have a say.
fits() {
  command -v "$1" >/dev/null 2>&1 &&
    "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}
start() {
  python=$1
  shift
  exec "$python" -I -c '
import sys
sys.path.insert(0, sys.argv.pop(1))
from bridge.mac.setup import main
sys.exit(main(sys.argv[1:]))
' "$root" "$@"
}

if [ -n "${KAKEYA_PYTHON:-}" ]; then
  if fits "$KAKEYA_PYTHON"; then start "$KAKEYA_PYTHON" "$@"; fi
  echo "error: KAKEYA_PYTHON=$KAKEYA_PYTHON is no Python 3.11 or later" >&2
  echo "  name another one, or unset it to have one looked for" >&2
  exit 1
fi
for python in python3.13 python3.12 python3.11 python3 /opt/homebrew/bin/python3 /usr/local/bin/python3; do
  if fits "$python"; then start "$python" "$@"; fi
done
echo "error: no Python 3.11 or later was found" >&2
echo "  brew install python@3.12, or https://www.python.org/downloads/macos/; or name one in KAKEYA_PYTHON" >&2
exit 1
