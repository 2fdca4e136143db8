// A request's timeline as a bar chart: a row for each kind of stage on each worker.

import { ApiError, read } from "./api.js";
import { byId, count, duration, element, tokens } from "./dom.js";

const NAMES = {
  "gateway.tokenise": "tokenised",
  "gateway.place": "placed",
  "gateway.submit": "submitted",
  "prefill.queue": "queued",
  "prefill.chunk": "prompt computed",
  "prefill.first_token": "first token",
  "handoff.offer": "handoff offered",
  "handoff.done": "handoff ended",
  "handoff.pull": "KV pulled",
  "decode.queue": "queued",
  "decode.generate": "generated",
};
const AGAIN_MS = 400;
const MAX_READS = 5;

let latest = 0; // of the requests shown; answers to earlier ones come too late

/** Show the timeline of a request. */
export async function showTimeline(requestId) {
  const mine = ++latest;
  const path = `farspan/requests/${encodeURIComponent(requestId)}/timeline`;
  try {
    for (let reads = 0; reads < MAX_READS; reads += 1) {
      const timeline = await read(path);
      if (mine !== latest) return;
      byId("timeline-body").replaceChildren(...chart(timeline));
      if (timeline.end_unix_us) return;
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (mine === latest)
      byId("timeline-body").replaceChildren(element("p", { className: "error" }, error.message));
  }
}

function chart(timeline) {
  const stages = [...own(timeline), ...timeline.stages];
  const begin = Math.min(timeline.begin_unix_us, ...stages.map((stage) => stage.begin_unix_us));
  const end = Math.max(...stages.map((stage) => stage.end_unix_us), begin + 1);
  const scale = { begin, length: end - begin, first: timeline.first_token_unix_us };
  return [
    facts(timeline),
    element(
      "div",
      { className: "chart" },
      axis(scale),
      ...groups(stages).map((group) => groupOf(group, scale)),
    ),
    element(
      "p",
      { className: "note" },
      "Clocks of different machines may differ by some milliseconds.",
    ),
  ];
}

/** What the gateway itself saw: the wait for the first token, then the stream. */
function own(timeline) {
  const { begin_unix_us: begin, first_token_unix_us: first, end_unix_us: end } = timeline;
  const stage = (name, from, to) => ({
    name,
    worker: "gateway",
    attempt: 1,
    begin_unix_us: from,
    end_unix_us: to,
    num_tokens: 0,
  });
  if (!first) return end ? [stage("no token came", begin, end)] : [];
  return [
    stage("until the first token", begin, first),
    ...(end ? [stage("streamed", first, end)] : []),
  ];
}

function facts(timeline) {
  const { begin_unix_us: begin, first_token_unix_us: first, end_unix_us: end, usage } = timeline;
  const pairs = [
    ["First token", first ? duration((first - begin) / 1000) : "none"],
    ["In all", end ? duration((end - begin) / 1000) : "running"],
    ["Prompt", `${tokens(usage.prompt_tokens)}, ${count(usage.cached_tokens)} cached`],
    ["Generated", tokens(usage.completion_tokens)],
    ["Attempts", count(timeline.attempts)],
  ];
  if (first && end > first && usage.completion_tokens > 1) {
    const rate = ((usage.completion_tokens - 1) * 1e6) / (end - first);
    pairs.splice(4, 0, [
      "Rate",
      `${rate < 100 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s`,
    ]);
  }
  const items = pairs.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)),
  );
  return element(
    "div",
    {},
    element("dl", { className: "facts" }, ...items),
    element("p", { className: "id" }, `Request ${timeline.id}`),
  );
}

/** Stages by worker and attempt, in the order in which they began; within, by name. */
function groups(stages) {
  const found = new Map();
  for (const stage of stages) {
    const key = JSON.stringify([stage.worker, stage.attempt]);
    const rows = found.get(key) ?? new Map();
    rows.set(stage.name, [...(rows.get(stage.name) ?? []), stage]);
    found.set(key, rows);
  }
  return [...found.values()].map((rows) => [...rows.values()]);
}

function groupOf(rows, scale) {
  const { worker, attempt } = rows[0][0];
  const title = attempt > 1 ? `${worker}, attempt ${attempt}` : worker;
  const items = rows.map((stages) => rowOf(stages, scale));
  return element("section", {}, element("h3", {}, title), element("ul", {}, ...items));
}

function rowOf(stages, scale) {
  const busyUs = stages.reduce((sum, stage) => sum + stage.end_unix_us - stage.begin_unix_us, 0);
  const numTokens = stages.reduce((sum, stage) => sum + stage.num_tokens, 0);
  const name = NAMES[stages[0].name] ?? stages[0].name;
  const parts = [
    duration(busyUs / 1000),
    numTokens && tokens(numTokens),
    stages.length > 1 && `${stages.length} parts`,
  ];
  const track = element(
    "span",
    { className: "track", ariaHidden: "true" },
    firstToken(scale),
    ...stages.map((stage) => barOf(stage, scale)),
  );
  return element(
    "li",
    {},
    element("span", { className: "name" }, name),
    element("span", { className: "value" }, parts.filter(Boolean).join(" · ")),
    track,
  );
}

function barOf(stage, { begin, length }) {
  const bar = element("span", { className: `bar ${kindOf(stage.name)}` });
  bar.style.left = `${((stage.begin_unix_us - begin) / length) * 100}%`;
  bar.style.width = `${((stage.end_unix_us - stage.begin_unix_us) / length) * 100}%`;
  const parts = [
    duration((stage.end_unix_us - stage.begin_unix_us) / 1000),
    stage.num_tokens && tokens(stage.num_tokens),
    `after ${duration((stage.begin_unix_us - begin) / 1000)}`,
  ];
  bar.title = `${stage.name}: ${parts.filter(Boolean).join(", ")}`;
  return bar;
}

function kindOf(name) {
  if (name.endsWith(".queue")) return "queue";
  return ["prefill", "handoff", "decode"].find((kind) => name.startsWith(`${kind}.`)) ?? "gateway";
}

function firstToken({ begin, length, first }) {
  if (!first) return null;
  const mark = element("span", { className: "mark", title: "first token" });
  mark.style.left = `${((first - begin) / length) * 100}%`;
  return mark;
}

function axis({ length }) {
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) =>
    element("span", {}, part ? duration((length * part) / 1000) : "0"),
  );
  return element("div", { className: "axis", ariaHidden: "true" }, ...ticks);
}
