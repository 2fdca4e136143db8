// OpenAI's npm client, unchanged: what it is told, as one line of JSON.
// Arguments: the folder of its packages, the base URL, the key, the model.
import { createRequire } from "node:module";

const [packages, baseURL, apiKey, model] = process.argv.slice(2);
const OpenAI = createRequire(`${packages}/`)("openai").OpenAI;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 300_000 });

const messages = [{ role: "user", content: "What does river mean?" }];
const asked = { model, messages, seed: 7, max_tokens: 40 };
const whole = await client.chat.completions.create(asked);

let text = "";
let finish = null;
let usage = null;
const chunks = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of chunks) {
  for (const choice of chunk.choices) {
    text += choice.delta.content ?? "";
    finish = choice.finish_reason ?? finish;
  }
  usage = chunk.usage ?? usage;
}

const response = await client.responses.create({
  model,
  input: "What does river mean?",
  temperature: 0,
  max_output_tokens: 200,
});
const stream = client.responses.stream({
  model,
  input: "What does river mean?",
  temperature: 0,
  max_output_tokens: 200,
});
const kinds = [];
for await (const event of stream) kinds.push(event.type);
const streamed = await stream.finalResponse();

const models = [];
for await (const listed of client.models.list()) models.push(listed.id);

let refusal = null;
try {
  await client.chat.completions.create({ ...asked, model: "nobody" });
} catch (error) {
  refusal = { name: error.constructor.name, status: error.status, code: error.code };
}

console.log(
  JSON.stringify({
    models,
    whole: {
      text: whole.choices[0].message.content ?? "",
      finish: whole.choices[0].finish_reason,
      tokens: whole.usage.completion_tokens,
    },
    streamed: { text, finish, tokens: usage.completion_tokens },
    response: { text: response.output_text, status: response.status },
    response_streamed: {
      text: streamed.output_text,
      status: streamed.status,
      last: kinds.at(-1),
    },
    refusal,
  }),
);
