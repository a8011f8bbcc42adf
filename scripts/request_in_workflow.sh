#!/usr/bin/env bash
# What a workflow's step does to ask for a request and gate on it; action.yml gives it its inputs as variables.
# usage: request_in_workflow.sh KAKEYA_MAC
# (PRESET, PARAMS, REF, WAIT, TRANSPORT, REMOTE, TRUSTED_RUNNERS, PULL_REQUEST, SIGNING_KEY, THRESHOLD)
set -euo pipefail
kakeya_mac=${1:?usage: request_in_workflow.sh KAKEYA_MAC}
python=$(dirname "$kakeya_mac")/python
# A job may ask more than once: nothing of another request lies here.
own=$(mktemp -d "$RUNNER_TEMP/kakeya-mac-XXXXXXXX")
report=$own/report
answer=$own/answer.json
export KAKEYA_CONFIG=$own/config

arguments=(--preset "$PRESET" --ref "${REF:-HEAD}" --transport "$TRANSPORT" --wait "$WAIT" -o "$report" --json)
page=(--format markdown)
if [ -n "$REMOTE" ]; then arguments+=(--remote "$REMOTE") page+=(--remote "$REMOTE"); fi
while IFS= read -r line || [ -n "$line" ]; do
  if [ -n "$line" ]; then arguments+=(-p "$line"); fi
done <<<"$PARAMS"
while read -r name key; do
  if [ -n "$name" ]; then "$kakeya_mac" runners trust "$name" --key "$key"; fi
done <<<"${TRUSTED_RUNNERS//$'\r'/}"
# As action.yml says: without keys every result counts, for whoever may push here may change the workflow, too.
if [ -z "${TRUSTED_RUNNERS//[[:space:]]/}" ]; then arguments+=(--allow-unsigned) page+=(--allow-unsigned); fi
if [ -n "${PULL_REQUEST:-}" ]; then page+=(--comment "$PULL_REQUEST"); fi
# Left in no folder that outlives this step.
if [ -n "${SIGNING_KEY:-}" ]; then
  trap 'rm -f "$own/key" "$own/key.pub"' EXIT
  (umask 077 && printf '%s\n' "${SIGNING_KEY//$'\r'/}" >"$own/key" && ssh-keygen -y -P '' -f "$own/key" >"$own/key.pub")
  arguments+=(--signing-key "$own/key")
  unset SIGNING_KEY
fi
limits=()
while IFS= read -r line || [ -n "$line" ]; do
  if [ -n "$line" ]; then limits+=(--threshold "$line"); fi
done <<<"${THRESHOLD:-}"

code=0
"$kakeya_mac" run "${arguments[@]}" >"$answer" || code=$?

# The last line is the answer. None of it can add an output: each lies between lines that nobody could guess.
"$python" -I - "$answer" "$report" <<'PYTHON' >>"${GITHUB_OUTPUT:?}"
import json, pathlib, secrets, sys

lines = pathlib.Path(sys.argv[1]).read_text().splitlines()
answer = json.loads(lines[-1]) if lines else {}
status, reason = answer.get("status", "error"), answer.get("reason")
outputs = {
    "status": status,
    "verdict": f"{status}/{reason}" if reason else status,
    "nonce": answer.get("nonce") or "",
    "report": sys.argv[2] if pathlib.Path(sys.argv[2]).is_dir() else "",
}
for name, value in outputs.items():
    mark = f"kakeya_{secrets.token_hex(16)}"
    print(f"{name}<<{mark}\n{value}\n{mark}")
PYTHON

# The same for people: on the run's page, and in the comment. The verdict is there already, so a failure only warns.
if [ -d "$report" ]; then
  nonce=$("$python" -I -c 'import json, sys; print(json.loads(open(sys.argv[1]).readlines()[-1])["nonce"])' "$answer")
  "$kakeya_mac" report "$nonce" "${page[@]}" >>"${GITHUB_STEP_SUMMARY:-/dev/null}" \
    || echo "::warning::the report is not on this page or not in the pull request, see above"
fi
if [ "$code" -eq 0 ] && [ "${#limits[@]}" -gt 0 ]; then "$kakeya_mac" gate "$report" "${limits[@]}" || code=$?; fi
exit "$code"
