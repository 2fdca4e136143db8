// Anthropic's npm client, unchanged: what it is told, as one line of JSON.
// Arguments: the folder of its packages, the root URL, the key, the model.
import { createRequire } from "node:module";

const [packages, baseURL, apiKey, model] = process.argv.slice(2);
const Anthropic = createRequire(`${packages}/`)("@anthropic-ai/sdk").Anthropic;
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0, timeout: 300_000 });

const asked = {
  model,
  messages: [{ role: "user", content: "What does river mean?" }],
  max_tokens: 200,
  temperature: 0,
};
const told = (message) => ({
  blocks: message.content.map((block) => [block.type, block.text ?? block.thinking]),
  reason: message.stop_reason,
  tokens: message.usage.output_tokens,
});
const whole = await client.messages.create(asked);
const streamed = await client.messages.stream(asked).finalMessage();
const counted = await client.messages.countTokens({ model, messages: asked.messages });

let refusal = null;
try {
  await client.messages.create({ ...asked, model: "nobody" });
} catch (error) {
  refusal = { name: error.constructor.name, status: error.status, type: error.error?.error?.type };
}

console.log(
  JSON.stringify({
    whole: told(whole),
    streamed: told(streamed),
    counted: counted.input_tokens,
    billed:
      whole.usage.input_tokens +
      (whole.usage.cache_read_input_tokens ?? 0) +
      (whole.usage.cache_creation_input_tokens ?? 0),
    refusal,
  }),
);
