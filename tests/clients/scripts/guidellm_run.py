"""guidellm: one short run over streamed text completions, and one over chat completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from features import *

version("guidellm")
HOME = Path(os.environ["HOME"])
(HOME / "prompts.txt").write_text("class BaseProject:\n" * 4)


def measured(kind: str) -> str:
    out = HOME / f"{kind}.json"
    target = {"target": ROOT, "model": "demo", "backend-type": "openai_http", "rate-type": "synchronous"}
    target |= {"data": HOME / "prompts.txt", "processor": GIVEN["tokenizer"], "max-requests": 2}
    target |= {"output-path": out}
    argv = [Path(sys.executable).with_name("guidellm"), "benchmark", "run"]
    argv += [f"--{name}={value}" for name, value in target.items()]
    argv += ["--data-args", json.dumps({"prompt_column": "text"}), "--disable-progress"]
    settings = {
        "GUIDELLM__PREFERRED_ROUTE": kind,
        "GUIDELLM__OPENAI__API_KEY": KEY,
        "GUIDELLM__OPENAI__MAX_OUTPUT_TOKENS": "16",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run(
        argv, env=os.environ | settings, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode or not out.exists():
        raise AssertionError(done.stdout[-1500:] + done.stderr[-1500:])
    (run,) = json.loads(out.read_text())["benchmarks"]
    totals = run["request_totals"]
    check_same((totals["successful"], totals["errored"]), (2, 0))
    return json.dumps(totals)


@feature("completions", "stream")
def completions():
    return measured("text_completions")


@feature("chat", "stream")
def chat():
    return measured("chat_completions")
