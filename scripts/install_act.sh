#!/usr/bin/env bash
# Build act, which executes workflow files, into .act/: what the end-to-end test of the workflow runs them with.
# Exit code 3: there is no Go.
set -euo pipefail
cd "$(dirname "$0")/.."
version=v0.2.89
target=$PWD/.act
if [ -x "$target/act" ] && [ "$(cat "$target/version" 2>/dev/null)" = "$version" ]; then
  exit 0
fi
mkdir -p "$target"
go=$(scripts/find_go.sh 1.24)
# Its digest is checked against the checksum database of Go modules, by go itself.
GOBIN=$target GOFLAGS=-mod=mod CGO_ENABLED=0 "$go" install -trimpath -ldflags='-s -w' "github.com/nektos/act@$version"
echo "$version" >"$target/version"
