// What the scripts of npm clients share: the server, the prompts, and the lines they print; see features.py.
import { readFileSync } from "node:fs";

export const GIVEN = JSON.parse(process.env.KAKEYA_CLIENTS);
export const { url: URL, key: KEY, list: LIST, weather: WEATHER, schema: SCHEMA } = GIVEN;
export const { asked: ASKED, told: TOLD, answer: ANSWER, riddle: RIDDLE, thought: THOUGHT, word: WORD } = GIVEN;
export const OSLO = { city: "Oslo" };

const tell = (line) => console.log(JSON.stringify(line));

/** Tell which version of the client this is. */
export function version(name) {
  tell({ version: JSON.parse(readFileSync(`${GIVEN.npm}/${name}/package.json`, "utf8")).version });
}

/** Run the function, and tell whether it failed; what it returns is told as the detail. */
export async function feature(protocol, name, run) {
  const began = performance.now();
  let [ok, detail] = [true, ""];
  try {
    detail = await run();
  } catch (error) {
    console.error(error);
    [ok, detail] = [false, `${error.name}: ${error.message}`];
  }
  const seconds = Math.round(performance.now() - began) / 1000;
  detail = (typeof detail === "string" ? detail : JSON.stringify(detail)).slice(0, 300);
  tell({ protocol, feature: name, ok, detail, seconds });
}

/** Tell of a feature that the client has not. */
export function absent(protocol, name, why) {
  tell({ protocol, feature: name, ok: null, detail: why });
}

export function checkListed(text) {
  if (!text.startsWith(GIVEN.listed)) throw new Error(`the answer does not begin with ${GIVEN.listed}: ${text}`);
  return text;
}

export function checkSame(found, expected) {
  const [one, other] = [JSON.stringify(found), JSON.stringify(expected)];
  if (one !== other) throw new Error(`${one} instead of ${other}`);
  return found;
}

export function checkParts(parts) {
  if (parts.filter(Boolean).length < 2) throw new Error(`it came in one piece: ${JSON.stringify(parts)}`);
  return parts;
}

export function checkSchema(value) {
  const read = typeof value === "string" ? JSON.parse(value) : value;
  checkSame(Object.keys(read).sort(), ["color", "count"]);
  const { color, count } = SCHEMA.properties;
  const holds = color.enum.includes(read.color) && read.count >= count.minimum && read.count <= count.maximum;
  if (!holds) throw new Error(`the schema forbids ${JSON.stringify(read)}`);
  return read;
}

export async function collect(iterable) {
  const found = [];
  for await (const each of iterable) found.push(each);
  return found;
}
