#!/bin/sh
# Set this Mac up as a runner of kakeya-mac, from this checkout. See --help; --dry-run works on any machine.
# Safe in macOS's own shell (bash 3.2). It only looks for a Python that is new enough: the rest is in bridge/mac.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)

# Isolated (-I): neither PYTHON* variables nor modules in the current folder have a say.
is_new_enough() { "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
python=${KAKEYA_PYTHON:-}
if [ -z "$python" ]; then
  for python in python3.13 python3.12 python3.11 python3 /opt/homebrew/bin/python3 /usr/local/bin/python3; do
    if is_new_enough "$python"; then break; fi
  done
fi
if ! is_new_enough "$python"; then
  echo "error: ${KAKEYA_PYTHON:+KAKEYA_PYTHON=}$python is no Python 3.11 or later, and no other was found" >&2
  echo "  brew install python@3.12, or https://www.python.org/downloads/macos/; or name one in KAKEYA_PYTHON" >&2
  exit 1
fi
exec "$python" -I -c 'import sys
sys.path.insert(0, sys.argv.pop(1))
from bridge.mac.setup import main
sys.exit(main(sys.argv[1:]))' "$root" "$@"
