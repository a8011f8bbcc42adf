#!/bin/sh
# Install kakeya-mac's client (no mlx) into a virtual environment, from this checkout and its lock file.
# usage: install_client.sh VENV
set -eu
venv=${1:?usage: install_client.sh VENV}
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
test -x "$venv/bin/python" || python3 -m venv "$venv"
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$venv/bin/python" --version) is too old; kakeya-mac needs Python 3.11 or later" >&2
  exit 1
}
# Every package by version and digest: the job that installs this may write to the repository.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
  -r "$root/scripts/requirements-uv.txt"
UV_PROJECT_ENVIRONMENT="$venv" "$venv/bin/uv" sync --quiet --locked --inexact --no-editable \
  --project "$root" --python "$venv/bin/python"
