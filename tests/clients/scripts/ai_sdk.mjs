// What the two providers of Vercel's AI SDK share: each feature, over the protocol that the provider speaks.
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import * as f from "./features.mjs";

export async function tried(protocol, model, reasoning) {
  const common = { maxOutputTokens: 60, maxRetries: 0 };
  const { name, description, parameters } = f.WEATHER.function;
  const weather = (asked) =>
    tool({
      description,
      inputSchema: jsonSchema(parameters),
      execute: async (input) => (asked.push(input), f.TOLD),
    });
  const called = (asked) => ({
    ...common,
    model: model("heart"),
    prompt: f.ASKED,
    tools: { [name]: weather(asked) },
    stopWhen: stepCountIs(2),
  });

  await f.feature(protocol, "text", async () =>
    f.checkListed((await generateText({ ...common, model: model("demo"), prompt: f.LIST })).text),
  );

  await f.feature(protocol, "stream", async () => {
    const { textStream } = streamText({ ...common, model: model("demo"), prompt: f.LIST });
    return f.checkListed(f.checkParts(await f.collect(textStream)).join(""));
  });

  await f.feature(protocol, "tools", async () => {
    const asked = [];
    const { text } = await generateText(called(asked));
    f.checkSame(asked, [f.OSLO]);
    return f.checkSame(text, f.ANSWER);
  });

  await f.feature(protocol, "streamed calls", async () => {
    const asked = [];
    const parts = await f.collect(streamText(called(asked)).fullStream);
    f.checkSame(asked, [f.OSLO]);
    const deltas = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta);
    f.checkSame(JSON.parse(deltas.join("")), f.OSLO);
    return f.checkSame(parts.filter((part) => part.type === "text-delta").map((part) => part.text).join(""), f.ANSWER);
  });

  await f.feature(protocol, "schema", async () => {
    const output = Output.object({ schema: jsonSchema(f.SCHEMA), name: "pick" });
    return f.checkSchema((await generateText({ ...common, model: model("demo"), prompt: f.LIST, output })).output);
  });

  if (reasoning === null) {
    f.absent(protocol, "reasoning", "it reads OpenAI's own fields alone");
    return;
  }
  await f.feature(protocol, "reasoning", async () => {
    const asked = { ...common, model: model("heart"), prompt: f.RIDDLE, ...reasoning };
    const { reasoningText, text } = await generateText(asked);
    return f.checkSame([reasoningText?.trim(), text.trim()], [f.THOUGHT, f.WORD]);
  });
}
