"""What the model of tests/data/by_heart has learnt by heart: a tool call, an answer to its result, a thought.

The shipped pair knows neither tools nor reasoning; `scripts/make_by_heart.py` trained this one.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "data" / "by_heart"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED = "What is the weather in Oslo?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOLD = [
    {"role": "user", "content": ASKED},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Oslo"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
ANSWER = "It rains in Oslo."
RIDDLE = "Name a word."
THOUGHT, WORD = "A short one.", "river"
REASONED = f"<think>\n{THOUGHT}\n</think>\n\n{WORD}"
