#!/bin/sh
# Set this Mac up as a runner of kakeya-mac, from this checkout. See --help; --dry-run works on any machine.
# Safe in macOS's own shell (bash 3.2). It only looks for a Python that is new enough: the rest is in bridge/mac.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
for python in ${KAKEYA_PYTHON:-} python3.13 python3.12 python3.11 python3 \
  /opt/homebrew/bin/python3 /usr/local/bin/python3; do
  if command -v "$python" >/dev/null 2>&1 &&
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    cd "$root"
    exec "$python" -m bridge.mac "$@"
  fi
done
echo "error: no Python 3.11 or later was found" >&2
echo "  brew install python@3.12, or https://www.python.org/downloads/macos/; or name one in KAKEYA_PYTHON" >&2
exit 1
