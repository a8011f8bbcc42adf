#!/bin/sh
# Install kakeya-mac's client (no mlx) into a virtual environment, from this checkout and its lock file.
# usage: install_client.sh VENV
set -eu
venv=${1:?usage: install_client.sh VENV}
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
# The folder that this is called in may be anybody's: none of its files is a module (-I), a lock or a setting.
cd "$root"
test -x "$venv/bin/python" || python3 -I -m venv "$venv"
"$venv/bin/python" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$venv/bin/python" --version) is too old; kakeya-mac needs Python 3.11 or later" >&2
  exit 1
}
# Every package by version and digest, the build backend too: the job that installs this may write to the repository.
# Without build isolation uv fetches no backend of its own, whose dependencies the lock file does not name.
"$venv/bin/python" -I -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: \
  -r "$root/scripts/requirements-build.txt"
UV_PROJECT_ENVIRONMENT="$venv" "$venv/bin/uv" sync --quiet --locked --inexact --no-editable --no-build-isolation \
  --project "$root" --python "$venv/bin/python"
