"""pydantic-ai's agents: over chat completions, Responses and Anthropic's Messages."""

from __future__ import annotations

from typing import Any, Literal

from anthropic import AsyncAnthropic
from features import *
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

version("pydantic-ai-slim")
openai_provider = OpenAIProvider(base_url=URL, api_key=KEY)
anthropic_provider = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=ROOT, api_key=KEY))


class Pick(BaseModel):
    """A color and a count."""

    color: Literal["red", "blue"]
    count: int = Field(ge=1, le=9)


def tried(protocol: str, model: Any) -> None:
    """Try every feature over one protocol; `model` makes the model of a name."""
    most: Any = {"max_tokens": 60}
    summary: Any = {"openai_reasoning_summary": "auto"} if protocol == "responses" else {}

    @feature(protocol, "text")
    def text():
        return check_listed(Agent(model("demo")).run_sync(LIST, model_settings=most).output)

    @feature(protocol, "stream")
    def stream():
        streamed = Agent(model("demo")).run_stream_sync(LIST, model_settings=most)
        parts = list(streamed.stream_text(delta=True, debounce_by=None))
        return check_listed("".join(check_parts(parts)))

    @feature(protocol, "tools")
    def tools():
        asked = list[str]()

        def weather(city: str) -> str:
            asked.append(city)
            return TOLD

        function = WEATHER["function"]
        tool = Tool.from_schema(weather, function["name"], function["description"], function["parameters"])
        result = Agent(model("heart"), tools=[tool]).run_sync(ASKED, model_settings=most)
        check_same(asked, ["Oslo"])
        return check_same(result.output, ANSWER)

    @feature(protocol, "streamed calls")
    def streamed_calls():
        function = WEATHER["function"]
        tool = Tool.from_schema(
            lambda city: TOLD, function["name"], function["description"], function["parameters"]
        )
        streamed = Agent(model("heart"), tools=[tool]).run_stream_sync(ASKED, model_settings=most)
        return check_same("".join(streamed.stream_text(delta=True)), ANSWER)

    @feature(protocol, "schema")
    def schema():
        kind = ToolOutput(Pick) if protocol == "messages" else NativeOutput(Pick)  # it knows Claude's names
        agent = Agent(model("demo"), output_type=kind)
        return check_schema(agent.run_sync(LIST, model_settings={"max_tokens": 200}).output.model_dump())

    @feature(protocol, "reasoning")
    def reasoning():
        result = Agent(model("heart")).run_sync(RIDDLE, model_settings=most | summary)
        parts = result.all_messages()[-1].parts
        thought = "".join(part.content for part in parts if isinstance(part, ThinkingPart))
        return check_same((thought.strip(), result.output.strip()), (THOUGHT, WORD))


tried("chat", lambda name: OpenAIChatModel(name, provider=openai_provider))
tried("responses", lambda name: OpenAIResponsesModel(name, provider=openai_provider))
tried("messages", lambda name: AnthropicModel(name, provider=anthropic_provider))
