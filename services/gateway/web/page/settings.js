// The settings form: what it holds goes into the next request.

import { byId } from "./dom.js";

const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  },
];

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The tools in the form, and what is wrong with them. */
function readTools() {
  const text = byId("tools").value.trim();
  if (!text) return { tools: [], problem: "" };
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    return { tools: [], problem: `Not JSON: ${error.message}` };
  }
  if (!Array.isArray(tools)) return { tools: [], problem: "Not an array: begin with [" };
  const isTool = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
  const wrong = tools.findIndex((tool) => !isTool(tool));
  if (wrong < 0) return { tools, problem: "" };
  return {
    tools: [],
    problem: `Entry ${wrong + 1} is no {"type": "function", "function": {"name": …}}`,
  };
}

function showTools() {
  const { tools, problem } = readTools();
  const state = byId("tools-state");
  const names = tools.map((tool) => tool.function.name).join(", ");
  state.textContent = problem || (names && `Offered: ${names}`);
  state.classList.toggle("error", Boolean(problem));
  byId("tools").setAttribute("aria-invalid", String(Boolean(problem)));
}

/** What is wrong with the form, in words; empty when it can be sent. */
export function problemOfSettings() {
  const wrong = NUMBERS.find((name) => !byId(name).checkValidity());
  if (wrong) return `Settings, ${wrong}: ${byId(wrong).validationMessage}`;
  const { problem } = readTools();
  return problem && `Settings, tools: ${problem}`;
}

/** A request's body for these messages. Fields left empty are not sent. */
export function requestBody(messages) {
  const system = byId("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  const body = { model: byId("model").value, messages: [...first, ...messages] };
  for (const name of NUMBERS) {
    if (byId(name).value) body[name] = Number(byId(name).value);
  }
  if (!byId("thinking").checked) body.chat_template_kwargs = { enable_thinking: false };
  const { tools } = readTools();
  if (tools.length) body.tools = tools;
  return body;
}

/** Offer the example's tool. */
export function offerExample() {
  byId("tools").value = JSON.stringify(EXAMPLE, null, 2);
  showTools();
}

export function startSettings() {
  byId("tools").addEventListener("input", showTools);
  byId("tools-example").addEventListener("click", offerExample);
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  showTools();
}
