// Vercel's AI SDK with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { tried } from "./ai_sdk.mjs";
import * as f from "./features.mjs";

f.version("@ai-sdk/openai-compatible");
const settings = { name: "kakeya", baseURL: f.URL, apiKey: f.KEY, supportsStructuredOutputs: true };
const provider = createOpenAICompatible(settings);
await tried("chat", (name) => provider(name));
