"""llm, configured with OpenAI-compatible models: its command line, and tools through its library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from features import *

folder = Path(os.environ["HOME"]) / "llm"
folder.mkdir()
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    "".join(
        f"- model_id: {name}\n  model_name: {name}\n  api_base: {URL}\n  api_key_name: kakeya\n"
        "  supports_tools: true\n  supports_schema: true\n"
        for name in ("demo", "heart")
    )
)
(folder / "keys.json").write_text(json.dumps({"kakeya": KEY}))
import llm  # noqa: E402 - reads the variable

version("llm")


@feature("chat", "text")
def text():
    argv = [
        Path(sys.executable).with_name("llm"),
        "prompt",
        "--no-log",
        "-m",
        "demo",
        "-o",
        "max_tokens",
        "60",
    ]
    done = subprocess.run([*argv, LIST], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return check_listed(done.stdout or done.stderr)


@feature("chat", "stream")
def stream():
    parts = list(llm.get_model("demo").prompt(LIST, max_tokens=60))
    return check_listed("".join(check_parts(parts)))


@feature("chat", "schema")
def schema():
    return check_schema(llm.get_model("demo").prompt(LIST, schema=SCHEMA, stream=False).text())


FUNCTION = WEATHER["function"]
TOOL = llm.Tool(FUNCTION["name"], FUNCTION["description"], FUNCTION["parameters"], lambda city: TOLD)


@feature("chat", "tools")
def tools():
    chain = llm.get_model("heart").chain(ASKED, tools=[TOOL], stream=False)
    return check_same(chain.text(), ANSWER)


@feature("chat", "streamed calls")
def streamed_calls():
    return check_same("".join(llm.get_model("heart").chain(ASKED, tools=[TOOL])), ANSWER)
