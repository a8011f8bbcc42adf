#!/bin/sh
# Install kakeya-mac's client (no mlx) into a virtual environment, from this checkout and its lock file.
# usage: install_client.sh VENV [mcp] [attest]    mcp: the MCP server for agents, too; attest: attestations
set -eu
venv=${1:?usage: install_client.sh VENV [mcp] [attest]}
case $venv in -*) echo 'usage: install_client.sh VENV [mcp] [attest]' >&2; exit 2 ;; esac
shift
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
for extra in "$@"; do
  shift
  set -- "$@" --extra "$extra"
done
# The folder that this is called in may be anybody's: none of its files is a module (-I), a lock or a setting.
cd "$root"
python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $(python3 --version) is too old; kakeya-mac needs Python 3.11 or later" >&2
  exit 1
}
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
pip_python=python3
if ! python3 -I -c 'import pip' 2>"$tools/pip.txt"; then # slower by the seconds that this takes
  python3 -I -m venv "$tools/venv"
  pip_python=$tools/venv/bin/python
fi
# pip and uv name their mirror by different variables.
index=${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-${PIP_INDEX_URL:-}}}
if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index" PIP_INDEX_URL="${PIP_INDEX_URL:-$index}"; fi

# Every package by version and digest: the job that installs this may write to the repository. pip brings uv alone, which
# is faster at the rest.
sed -n '/^uv==/,/[^\\]$/p' scripts/requirements-build.txt >"$tools/uv.txt"
PIP_ROOT_USER_ACTION=ignore "$pip_python" -I -m pip install --quiet --disable-pip-version-check --require-hashes \
  --only-binary :all: --no-deps --no-compile --target "$tools/uv" -r "$tools/uv.txt"
uv=$tools/uv/bin/uv
"$uv" venv --quiet --allow-existing --no-python-downloads --python "$(command -v python3)" "$venv"
"$uv" export --quiet --frozen --no-emit-project --no-default-groups "$@" >"$tools/client.txt"
"$uv" pip install --quiet --require-hashes --only-binary :all: --no-deps --python "$venv/bin/python" -r "$tools/client.txt"

# Our own packages are pure Python: they are copied, so nothing is needed to build them.
site=$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site/bridge" "$site/evidence_format"
cp -R bridge evidence_format "$site/"
printf '#!/bin/sh\nexec "%s" -I -m bridge "$@"\n' "$venv/bin/python" >"$venv/bin/kakeya_mac"
chmod 755 "$venv/bin/kakeya_mac"
