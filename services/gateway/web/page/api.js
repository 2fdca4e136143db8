// The gateway's HTTP API, as the page uses it. Addresses are relative: a proxy may add a prefix.

/** A failure in words for a person. */
export class ApiError extends Error {}

async function failure(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = response.statusText;
  }
  const after = response.headers.get("retry-after");
  const advice = after ? ` Try again in ${after} s.` : "";
  return new ApiError(`${message || "The request failed"} (status ${response.status}).${advice}`);
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway cannot be reached.");
  }
}

/** A JSON document. Throws ApiError. */
export async function read(path) {
  const response = await reach(path, { cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** A chat's answer: its request id at once, its chunks as they arrive. Throws ApiError. */
export async function streamChat(body, signal) {
  const response = await reach("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  return { requestId: response.headers.get("x-request-id"), chunks: chunksOf(response.body) };
}

async function* chunksOf(body) {
  try {
    for await (const data of eventsOf(body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection to the gateway was lost.");
  }
  throw new ApiError("The answer was cut off: its end never came.");
}

/** The data of server-sent events; comments are keep-alives and carry none. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // after an abort the stream has failed already
  }
}
