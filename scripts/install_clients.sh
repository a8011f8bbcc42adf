#!/usr/bin/env bash
# Install the clients that `make clients` runs against the server into the folder FOLDER, at the versions pinned under
# tests/clients: two environments of Python packages (950 MB) and one of npm packages (700 MB, most of it Codex and
# Claude Code). Does nothing where they are there already. openai and anthropic come with .venv, which `make setup` makes.
# Exit code 3: the Python clients are there, but without node or npm the others are not.
# usage: install_clients.sh FOLDER
set -euo pipefail
folder=${1:?usage: install_clients.sh FOLDER}
cd "$(dirname "$0")/.."
uv=$PWD/.venv/bin/uv
python=$PWD/.venv/bin/python
pins=$PWD/tests/clients
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
# What is installed is named by the digest of what pins it and by the Python that it is for.
is_installed() { [ "$(cat "$folder/$1/installed" 2>/dev/null)" = "$2" ]; }
for name in frameworks measuring; do
  pinned="$("$python" -V) $(git hash-object "$pins/requirements/$name.txt")"
  if is_installed "$name" "$pinned"; then continue; fi
  echo "clients: installing the Python packages of $name"
  rm -rf "${folder:?}/$name"
  "$uv" venv --quiet --no-config --python "$python" "$folder/$name"
  # Three small packages that lm-eval needs are published as sources alone.
  "$uv" pip install --quiet --no-config --python "$folder/$name/bin/python" --no-deps --only-binary :all: \
    --no-binary rouge-score --no-binary sqlitedict --no-binary word2number -r "$pins/requirements/$name.txt"
  echo "$pinned" >"$folder/$name/installed"
done
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
  echo "no npm clients: there is no node, or no npm" >&2
  exit 3
fi
pinned="node $(node --version | cut -d. -f1) $(git hash-object "$pins/npm/package-lock.json")"
if ! is_installed npm "$pinned"; then
  echo "clients: installing the npm packages"
  rm -rf "${folder:?}/npm"
  mkdir "$folder/npm"
  cp "$pins/npm/package.json" "$pins/npm/package-lock.json" "$folder/npm"
  # No script of a package runs: Claude Code's would only copy the program to another place.
  (cd "$folder/npm" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error)
  echo "$pinned" >"$folder/npm/installed"
fi
