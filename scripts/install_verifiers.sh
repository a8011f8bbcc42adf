#!/usr/bin/env bash
# Build cosign into the folder FOLDER: what `make attestations` verifies attestations with. Needs Go; everything comes
# from the Go module proxy. slsa-framework/verifier is not here: its module could not be fetched from there.
# Exit code 3: there is no Go.
# usage: install_verifiers.sh FOLDER
set -euo pipefail
folder=${1:?usage: install_verifiers.sh FOLDER}
cd "$(dirname "$0")/.."
cosign=v3.1.3
cosign_digest=h1:001JQRI/PJ/5T+g/kJ1KTvKFbb322+fomc+pHDZ/6sg=
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ -x "$folder/cosign" ] && grep -qxF "cosign $cosign" "$folder/version" 2>/dev/null; then
  exit 0
fi
go=$(scripts/find_go.sh 1.26)
echo "verifiers: fetching cosign $cosign"
# The digest of the module is here, those of everything that it needs are in its own go.sum.
found=$("$go" mod download -json "github.com/sigstore/cosign/v3@$cosign")
field() { printf '%s\n' "$found" | sed -n "s|^\t\"$1\": \"\(.*\)\",*\$|\1|p"; }
if [ "$(field Sum)" != "$cosign_digest" ]; then
  echo "cosign $cosign has the digest $(field Sum), not $cosign_digest" >&2
  exit 1
fi
source=$folder/source
rm -rf "$source"
cp -R "$(field Dir)" "$source"
chmod -R u+w "$source"
echo "verifiers: building cosign $cosign, some five minutes of two cores"
(cd "$source" && CGO_ENABLED=0 GOFLAGS=-mod=readonly nice "$go" build -trimpath -ldflags "-s -w" -o "$folder/cosign" ./cmd/cosign)
rm -rf "$source"
printf 'cosign %s\n' "$cosign" >"$folder/version"
