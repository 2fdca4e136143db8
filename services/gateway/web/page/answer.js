// One answer as its chunks build it: plain data, no elements.

export class Answer {
  reasoning = "";
  text = "";
  calls = []; // {id, name, arguments}: arguments is JSON text
  usage = null;
  finishReason = "";

  /** Take in a chunk of a chat completion. */
  feed(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      if (choice.finish_reason) this.finishReason = choice.finish_reason;
      this.reasoning += choice.delta.reasoning_content ?? "";
      this.text += choice.delta.content ?? "";
      for (const piece of choice.delta.tool_calls ?? []) this.#feedCall(piece);
    }
  }

  get isEmpty() {
    return !this.reasoning && !this.text && !this.calls.length;
  }

  /** The answer as a later turn of the conversation tells it. */
  asMessage() {
    const message = { role: "assistant", content: this.text };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) message.tool_calls = this.calls.map(asToolCall);
    return message;
  }

  #feedCall(piece) {
    const call = (this.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    call.id = piece.id ?? call.id;
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
}

function asToolCall(call) {
  return {
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  };
}

/** What an answer cost, in words. */
export function usageInWords(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const reasoning = usage.completion_tokens_details?.reasoning_tokens;
  return [
    ["prompt", usage.prompt_tokens],
    ["cached", cached],
    ["generated", usage.completion_tokens],
    ...(reasoning === undefined ? [] : [["reasoning", reasoning]]),
  ];
}
