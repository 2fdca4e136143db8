// The fleet: its workers, what they do, and how full their pools are.

import { ApiError, read } from "./api.js";
import { byId, count, element } from "./dom.js";

const EVERY_MS = 2000;

/** Keep the header and the fleet's panel true while somebody can see the page. */
export function startFleet() {
  let timer = 0;
  const look = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    await refresh();
    clearTimeout(timer); // the page may have been hidden and shown again meanwhile
    timer = setTimeout(look, EVERY_MS);
  };
  document.addEventListener("visibilitychange", look);
  look();
}

async function refresh() {
  try {
    const { workers } = await read("farspan/fleet");
    showHealth(workers);
    update(
      byId("fleet-body"),
      workers.length
        ? workers.map(card)
        : [element("p", { className: "note" }, "No worker has been heard of.")],
    );
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    setHealth("bad", "Gateway away");
    update(byId("fleet-body"), [element("p", { className: "error" }, error.message)]);
  }
}

function showHealth(workers) {
  const ready = (role) =>
    workers.filter((worker) => worker.role === role && worker.state === "ready").length;
  const [prefill, decode] = [ready("prefill"), ready("decode")];
  const isServing = prefill > 0 && decode > 0;
  setHealth(
    isServing ? "good" : "bad",
    isServing ? `${prefill} prefill, ${decode} decode` : "No workers for requests",
  );
}

function setHealth(kind, text) {
  byId("health").dataset.kind = kind;
  if (byId("health-text").textContent !== text) byId("health-text").textContent = text;
}

/** New children where they differ from the old ones: a reader's selection stays. */
function update(parent, children) {
  children.forEach((child, place) => {
    const old = parent.childNodes[place];
    if (!old) parent.append(child);
    else if (!old.isEqualNode(child)) old.replaceWith(child);
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

function card(worker) {
  const rate = worker.tokens_per_s
    ? `${count(Math.round(worker.tokens_per_s))} tokens/s`
    : "not known yet";
  const pairs = [
    ["Running", count(worker.running)],
    ["Waiting", count(worker.waiting)],
    ["Speed", rate],
    ["Tokens waiting", count(worker.waiting_tokens)],
  ];
  const state =
    worker.state === "silent" ? `silent for ${Math.round(worker.heard_s_ago)} s` : worker.state;
  return element(
    "article",
    { className: "worker", ariaLabel: `Worker ${worker.id}` },
    element(
      "h3",
      {},
      element("span", { className: "worker-id" }, worker.id),
      element("span", { className: `badge ${worker.role}` }, worker.role),
      element("span", { className: `state ${worker.state}` }, state),
    ),
    element(
      "dl",
      { className: "facts" },
      ...pairs.map(([name, value]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, value)),
      ),
    ),
    ...worker.pools.map(pool),
  );
}

function pool({ name, free, total }) {
  const used = total - free;
  const percent = (used / total) * 100;
  const fill = element("span", { className: percent > 90 ? "fill full" : "fill" });
  fill.style.width = `${percent}%`;
  const meter = element(
    "div",
    {
      className: "meter",
      role: "meter",
      ariaLabel: `${name} used`,
      ariaValueMin: "0",
      ariaValueMax: String(total),
      ariaValueNow: String(used),
    },
    fill,
  );
  return element(
    "div",
    { className: "pool" },
    element("span", {}, name),
    element("span", { className: "value" }, `${count(used)} of ${count(total)} used`),
    meter,
  );
}
