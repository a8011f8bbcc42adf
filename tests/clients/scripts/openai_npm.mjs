// OpenAI's client for Node: chat completions and Responses.
import OpenAI from "openai";
import * as f from "./features.mjs";

f.version("openai");
const client = new OpenAI({ baseURL: f.URL, apiKey: f.KEY, maxRetries: 0, timeout: 60_000 });
const user = (content) => ({ role: "user", content });
const json_schema = { name: "pick", schema: f.SCHEMA, strict: true };
const chat = (model, fields) =>
  client.chat.completions.create({ model, messages: [user(f.LIST)], max_tokens: 60, ...fields });

await f.feature("chat", "text", async () => f.checkListed((await chat("demo")).choices[0].message.content));

await f.feature("chat", "stream", async () => {
  const chunks = await f.collect(await chat("demo", { stream: true }));
  return f.checkListed(f.checkParts(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "")).join(""));
});

await f.feature("chat", "tools", async () => {
  const messages = [user(f.ASKED)];
  const { message } = (await chat("heart", { messages, tools: [f.WEATHER] })).choices[0];
  const [call] = message.tool_calls;
  f.checkSame(JSON.parse(call.function.arguments), f.OSLO);
  messages.push(message, { role: "tool", tool_call_id: call.id, content: f.TOLD });
  return f.checkSame((await chat("heart", { messages, tools: [f.WEATHER] })).choices[0].message.content, f.ANSWER);
});

await f.feature("chat", "streamed calls", async () => {
  const asked = { model: "heart", messages: [user(f.ASKED)], tools: [f.WEATHER] };
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  return f.checkSame(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), f.OSLO);
});

await f.feature("chat", "schema", async () => {
  const reply = await chat("demo", { response_format: { type: "json_schema", json_schema } });
  return f.checkSchema(reply.choices[0].message.content);
});

await f.feature("chat", "reasoning", async () => {
  const { message } = (await chat("heart", { messages: [user(f.RIDDLE)] })).choices[0];
  return f.checkSame([message.reasoning.trim(), message.content.trim()], [f.THOUGHT, f.WORD]);
});

await f.feature("chat", "n", async () => {
  const reply = await chat("demo", { n: 3, temperature: 1, seed: 4, max_tokens: 12 });
  return f.checkSame(reply.choices.map((choice) => choice.index), [0, 1, 2]);
});

await f.feature("chat", "logprobs", async () => {
  const [choice] = (await chat("demo", { logprobs: true, top_logprobs: 2, max_tokens: 8 })).choices;
  return f.checkSame(choice.logprobs.content.map((each) => each.token).join(""), choice.message.content);
});

const respond = (model, fields) =>
  client.responses.create({ model, input: f.LIST, max_output_tokens: 60, ...fields });
const tools = [{ type: "function", ...f.WEATHER.function }];

await f.feature("responses", "text", async () => f.checkListed((await respond("demo")).output_text));

await f.feature("responses", "stream", async () => {
  const events = await f.collect(await respond("demo", { stream: true }));
  const parts = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
  return f.checkListed(f.checkParts(parts).join(""));
});

await f.feature("responses", "tools", async () => {
  const first = await respond("heart", { input: f.ASKED, tools });
  const [call] = first.output;
  f.checkSame(JSON.parse(call.arguments), f.OSLO);
  const input = [user(f.ASKED), call, { type: "function_call_output", call_id: call.call_id, output: f.TOLD }];
  return f.checkSame((await respond("heart", { input, tools })).output_text, f.ANSWER);
});

await f.feature("responses", "streamed calls", async () => {
  const final = await client.responses.stream({ model: "heart", input: f.ASKED, tools }).finalResponse();
  return f.checkSame(JSON.parse(final.output[0].arguments), f.OSLO);
});

await f.feature("responses", "schema", async () => {
  const text = { format: { type: "json_schema", ...json_schema } };
  return f.checkSchema((await respond("demo", { text })).output_text);
});

await f.feature("responses", "reasoning", async () => {
  const [thought, said] = (await respond("heart", { input: f.RIDDLE })).output;
  return f.checkSame([thought.content[0].text.trim(), said.content[0].text.trim()], [f.THOUGHT, f.WORD]);
});
