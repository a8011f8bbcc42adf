#!/usr/bin/env bash
# Build a Gitea server, and a runner for its workflow jobs, into the folder FOLDER: what `make forge` runs the
# workflow files on. Needs Go and a C compiler; everything comes from the Go module proxy.
# Exit code 3: there is no Go, or no compiler.
# usage: install_forge.sh FOLDER
set -euo pipefail
folder=${1:?usage: install_forge.sh FOLDER}
cd "$(dirname "$0")/.."
gitea=v1.26.0
gitea_digest=h1:fJP9dqLbzKrKWUVnCVTfVersZdVDuyJQLEDzCAOmKKA=
executor=$(sed -n 's|^replace .* => gitea.com/gitea/act ||p' tests/forge/runner/go.mod)
runner=$(cat tests/forge/runner/* | git hash-object --stdin)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
is_built() { grep -qxF "$1" "$folder/version" 2>/dev/null; }
if is_built "gitea $gitea" && is_built "runner $runner"; then
  exit 0
fi
go=$(scripts/find_go.sh 1.26)
command -v cc >/dev/null || {
  echo "no Gitea: there is no C compiler (cc), which its SQLite needs" >&2
  exit 3
}
if ! is_built "gitea $gitea"; then
  rm -f "$folder/version"
  echo "forge: fetching Gitea $gitea"
  # The digest of the module is here, those of everything that it needs are in its own go.sum.
  found=$("$go" mod download -json "code.gitea.io/gitea@$gitea")
  field() { printf '%s\n' "$found" | sed -n "s|^\t\"$1\": \"\(.*\)\",*\$|\1|p"; }
  if [ "$(field Sum)" != "$gitea_digest" ]; then
    echo "Gitea $gitea has the digest $(field Sum), not $gitea_digest" >&2
    exit 1
  fi
  source=$folder/source
  rm -rf "$source" "$folder/static"
  cp -R "$(field Dir)" "$source"
  chmod -R u+w "$source"
  echo "forge: building Gitea $gitea, some six minutes of one core"
  (cd "$source" && CGO_ENABLED=1 GOFLAGS=-mod=mod nice "$go" build -trimpath -tags "sqlite sqlite_unlock_notify" \
    -ldflags "-s -w -X main.Version=${gitea#v}" -o "$folder/gitea" .)
  mkdir "$folder/static"
  mv "$source/templates" "$source/options" "$source/public" "$folder/static"
  rm -rf "$source"
fi
echo "forge: building the runner"
(cd tests/forge/runner && CGO_ENABLED=0 GOFLAGS=-mod=readonly nice "$go" build -trimpath -ldflags "-s -w" -o "$folder/runner" .)
printf 'gitea %s\nact %s\nrunner %s\n' "$gitea" "$executor" "$runner" >"$folder/version"
