"""lm-eval's command line on two tasks of a few lines: generation, and log-likelihoods of choices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from features import *

version("lm-eval")
HOME = Path(os.environ["HOME"])
TASKS = HOME / "tasks"
TASKS.mkdir()
QUESTIONS = [{"question": "import os\nimport", "choices": [" argparse", " zebra"], "answer": 0}]
(TASKS / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(TASKS / "questions.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
GENERATED = {
    "task": "generated",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
CHOSEN = {
    "task": "chosen",
    "output_type": "multiple_choice",
    "doc_to_target": "answer",
    "doc_to_choice": "choices",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
for task in (GENERATED, CHOSEN):
    (TASKS / f"{task['task']}.yaml").write_text(json.dumps(COMMON | task))  # JSON is YAML


def evaluated(*tasks: str) -> dict[str, Any]:
    """Run the tasks; return their samples."""
    out = HOME / "out"
    given = {"model": "demo", "base_url": f"{URL}/completions", "tokenizer": GIVEN["tokenizer"]}
    given |= {"num_concurrent": "2", "max_length": "1000"}
    arguments = ",".join(f"{name}={value}" for name, value in given.items())
    argv = [Path(sys.executable).with_name("lm-eval"), "run", "--model", "local-completions"]
    argv += ["--model_args", arguments]
    argv += ["--tasks", *tasks, "--include_path", TASKS, "--output_path", out, "--log_samples"]
    environment = os.environ | {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])
    found = {}
    for name in tasks:
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        found[name] = json.loads(file.read_text().splitlines()[0])
    return found


samples: dict[str, Any] = {}


@feature("completions", "text")
def generation():
    samples.update(evaluated("generated", "chosen"))
    return check_same(samples["generated"]["resps"][0][0].strip(), "argparse")


@feature("completions", "logprobs")
def loglikelihood():
    return check_same(samples["chosen"]["acc"], 1.0)
