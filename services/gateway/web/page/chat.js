// The conversation: what was said, the answer that is being written, and how both go on.

import { Answer } from "./answer.js";
import { ApiError, streamChat } from "./api.js";
import { AnswerBubble, errorBubble, resultBubble, userBubble } from "./bubble.js";
import { button, byId } from "./dom.js";
import { offerExample, problemOfSettings, requestBody } from "./settings.js";

const SUGGESTIONS = ["What does river mean?", "What is 12 + 30?"];
const CALLING = "What is the weather in Paris?"; // with the example's tool

export class Chat {
  #messages = []; // as the next request sends them
  #running = null; // the answer's AbortController
  #results = null; // the form that asks for calls' results
  #showTimeline;

  /** `showTimeline` is told the id of each request that has ended. */
  constructor(showTimeline) {
    this.#showTimeline = showTimeline;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.say(byId("prompt").value);
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("prompt").addEventListener("keydown", (event) => this.#onKey(event));
    byId("prompt").addEventListener("input", fitPrompt);
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("suggestions").append(
      ...SUGGESTIONS.map((text) => button(text, () => this.say(text))),
      button(CALLING, () => {
        offerExample();
        this.say(CALLING);
      }),
    );
  }

  /** The person's next message. */
  say(text) {
    if (!text.trim() || this.#running) return;
    byId("notice").textContent = problemOfSettings();
    if (byId("notice").textContent) return;
    this.#forgetUnanswered();
    byId("prompt").value = "";
    fitPrompt();
    this.#messages.push({ role: "user", content: text });
    this.#append(userBubble(text));
    this.#answer();
  }

  /** Give the running answer up: the gateway hears of it and frees its workers. */
  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.#messages = [];
    this.#results = null;
    byId("log").replaceChildren(byId("welcome"));
    byId("welcome").hidden = false;
    byId("prompt").focus();
  }

  async #answer() {
    const running = (this.#running = new AbortController());
    const messages = this.#messages; // of this conversation: a new chat begins another list
    const answer = new Answer();
    const bubble = new AnswerBubble(byId("model").value);
    const timing = { begunMs: performance.now(), firstMs: null };
    this.#append(bubble.root);
    setRunning(true);
    let [note, failure, requestId] = ["", null, null];
    try {
      const { requestId: id, chunks } = await streamChat(requestBody(messages), running.signal);
      requestId = id;
      await this.#read(chunks, answer, bubble, timing);
    } catch (error) {
      if (error.name === "AbortError") note = "stopped";
      else if (error instanceof ApiError) failure = error.message;
      else throw error;
    } finally {
      this.#running = null;
      setRunning(false);
    }
    if (messages !== this.#messages) return;
    this.#conclude({ answer, bubble, timing, note, failure, requestId });
  }

  async #read(chunks, answer, bubble, timing) {
    const screen = new Screen(() => {
      const isAtEnd = isScrolledToEnd();
      bubble.show(answer);
      if (isAtEnd) scrollToEnd();
    });
    try {
      for await (const chunk of chunks) {
        answer.feed(chunk);
        if (timing.firstMs === null && !answer.isEmpty) {
          timing.firstMs = performance.now() - timing.begunMs;
        }
        screen.ask();
      }
    } finally {
      screen.now();
    }
  }

  #conclude({ answer, bubble, timing, note, failure, requestId }) {
    const isWhole = !note && !failure;
    if (!isWhole) answer.calls = []; // half a call cannot be answered
    bubble.finish(answer, timing, failure ? "failed" : note);
    if (!answer.isEmpty) this.#messages.push(answer.asMessage());
    if (requestId) {
      bubble.offerTimeline(() => this.#showTimeline(requestId, true));
      this.#showTimeline(requestId, false);
    }
    if (failure) {
      if (answer.isEmpty) bubble.root.remove();
      const error = errorBubble(failure, () => this.#tryAgain(error, bubble, answer));
      this.#append(error);
    } else if (isWhole && answer.calls.length) {
      this.#results = bubble;
      bubble.askForResults(answer, (results) => this.#giveResults(answer, results));
      scrollToEnd();
    }
    announce(failure ?? (note ? "Stopped" : "The answer is complete"));
  }

  #tryAgain(error, bubble, answer) {
    if (this.#running) return;
    error.remove();
    bubble.root.remove();
    if (!answer.isEmpty) this.#messages.pop();
    this.#answer();
  }

  #giveResults(answer, results) {
    if (this.#running) return;
    this.#results = null;
    answer.calls.forEach((call, place) => {
      this.#messages.push({ role: "tool", tool_call_id: call.id, content: results[place] });
      this.#append(resultBubble(call.name, results[place]));
    });
    this.#answer();
  }

  /** Calls that the person passes over have no results: the conversation goes on without them. */
  #forgetUnanswered() {
    if (!this.#results) return;
    this.#results.form.remove();
    this.#results = null;
    delete this.#messages.at(-1).tool_calls;
  }

  #append(node) {
    byId("welcome").hidden = true;
    byId("log").append(node);
    scrollToEnd();
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.say(byId("prompt").value);
  }
}

/** Shows at most once a frame, so that a fast answer does not hold the page up. */
class Screen {
  #frame = 0;

  constructor(show) {
    this.show = show;
  }

  ask() {
    this.#frame ||= requestAnimationFrame(() => this.now());
  }

  now() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.show();
  }
}

function setRunning(isRunning) {
  const hadFocus = document.activeElement === byId("stop");
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  if (hadFocus) byId("prompt").focus(); // a hidden button loses it to nobody
}

function announce(text) {
  byId("announcer").textContent = text;
}

function fitPrompt() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function isScrolledToEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function scrollToEnd() {
  const log = byId("log");
  log.scrollTop = log.scrollHeight;
}
