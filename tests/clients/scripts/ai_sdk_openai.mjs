// Vercel's AI SDK with OpenAI's provider, whose default is the Responses protocol.
import { createOpenAI } from "@ai-sdk/openai";
import { tried } from "./ai_sdk.mjs";
import * as f from "./features.mjs";

f.version("@ai-sdk/openai");
const provider = createOpenAI({ baseURL: f.URL, apiKey: f.KEY });
// It leaves reasoning out of models whose names it does not know, unless it is told.
const openai = { reasoningSummary: "auto", forceReasoning: true };
await tried("responses", (name) => provider(name), { providerOptions: { openai } });
await tried("chat", (name) => provider.chat(name), null);
