// One turn of the conversation on the screen.

import { button, count, duration, element } from "./dom.js";
import { usageInWords } from "./answer.js";

/** What the person wrote. */
export function userBubble(text) {
  return element("article", { className: "turn user", ariaLabel: "You" }, text);
}

/** A tool's result, as the person gave it. */
export function resultBubble(name, text) {
  return element(
    "article",
    { className: "turn result", ariaLabel: `Result of ${name}` },
    element("h3", {}, `Result of ${name}`),
    element("pre", {}, text),
  );
}

/** A failure, with a way to go on. */
export function errorBubble(message, retry) {
  return element(
    "article",
    { className: "turn failure", role: "alert" },
    element("p", {}, message),
    button("Try again", retry),
  );
}

/** An answer that grows. */
export class AnswerBubble {
  constructor(model) {
    this.thought = element("div", { className: "thought-text" });
    this.thoughtTitle = element("summary", {}, "Thinking…");
    this.reasoning = element(
      "details",
      { className: "thought", open: true, hidden: true },
      this.thoughtTitle,
      this.thought,
    );
    this.text = element("div", { className: "text" });
    this.calls = element("div", { className: "calls" });
    this.foot = element(
      "footer",
      { className: "foot" },
      element("span", { className: "waiting" }, "Waiting for the first token…"),
    );
    this.root = element(
      "article",
      { className: "turn assistant growing", ariaLabel: model, ariaBusy: "true" },
      this.reasoning,
      this.text,
      this.calls,
      this.foot,
    );
  }

  /** Show what the answer has become. Only what is new is added, however long it is. */
  show(answer) {
    grow(this.thought, answer.reasoning);
    grow(this.text, answer.text);
    this.reasoning.hidden = !answer.reasoning;
    if (answer.text || answer.calls.length) this.#closeThought();
    if (!answer.isEmpty) this.foot.replaceChildren();
    this.calls.replaceChildren(...answer.calls.map(callCard));
  }

  /** The answer will not grow any more. */
  finish(answer, timing, note) {
    this.#closeThought();
    this.root.classList.remove("growing");
    this.root.ariaBusy = "false";
    this.text.replaceChildren(...withCode(answer.text));
    this.foot.replaceChildren(...footParts(answer, timing, note));
  }

  /** A button that shows where the answer's time went. */
  offerTimeline(show) {
    this.foot.append(button("Timeline", show, { className: "link" }));
  }

  /** Ask for the results of the answer's calls; `give` gets them all, in order. */
  askForResults(answer, give) {
    const fields = answer.calls.map((call) =>
      element("textarea", { rows: 2, className: "code", required: true, spellcheck: false }),
    );
    const labels = answer.calls.map((call, place) =>
      element("label", {}, `Result of ${call.name}`, fields[place]),
    );
    const form = element(
      "form",
      { className: "results" },
      ...labels,
      element(
        "button",
        { className: "primary" },
        answer.calls.length > 1 ? "Send results" : "Send result",
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      give(fields.map((field) => field.value));
    });
    this.root.append(form);
    this.form = form;
    fields[0].focus();
  }

  #closeThought() {
    if (this.thoughtTitle.textContent !== "Thought") {
      this.thoughtTitle.textContent = "Thought";
      this.reasoning.open = false;
    }
  }
}

function footParts(answer, timing, note) {
  const parts = answer.usage
    ? usageInWords(answer.usage).map(([word, number]) => figure(word, count(number)))
    : [];
  if (timing.firstMs !== null) parts.push(figure("first token", duration(timing.firstMs)));
  const words = { length: "cut at the token limit", stop: "", tool_calls: "" };
  const ending = note || (words[answer.finishReason] ?? answer.finishReason);
  if (ending) parts.unshift(element("strong", {}, ending));
  return parts;
}

function figure(word, value) {
  return element("span", { className: "figure" }, `${word} `, element("b", {}, value));
}

function grow(node, text) {
  if (!node.firstChild) node.append("");
  const shown = node.firstChild;
  if (text.length > shown.length) shown.appendData(text.slice(shown.length));
}

/** Text, with what stands between ``` lines set as code. */
function withCode(text) {
  const parts = text.split(/^```(.*)\n([\s\S]*?)(?:^```[ \t]*$\n?|$(?![\s\S]))/m);
  const nodes = [];
  for (let place = 0; place < parts.length; place += 3) {
    if (parts[place]) nodes.push(prose(parts[place].replace(/^\n|\n$/g, "")));
    if (place + 2 < parts.length) nodes.push(block(parts[place + 1], parts[place + 2]));
  }
  return nodes;
}

function block(language, text) {
  return element(
    "pre",
    { className: "block", tabIndex: 0, ariaLabel: `Code ${language}`.trim() },
    text,
  );
}

/** Text, with `code` and **bold** set as such. */
function prose(text) {
  const parts = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/);
  const nodes = parts.map((part, place) => {
    if (place % 2 === 0) return part;
    return part[0] === "`"
      ? element("code", {}, part.slice(1, -1))
      : element("strong", {}, part.slice(2, -2));
  });
  return element("div", { className: "prose" }, ...nodes);
}

function callCard(call) {
  return element(
    "section",
    { className: "call", ariaLabel: `Call of ${call.name}` },
    element("h3", {}, element("span", { className: "badge" }, "calls"), ` ${call.name}`),
    element("pre", {}, pretty(call.arguments)),
  );
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}
