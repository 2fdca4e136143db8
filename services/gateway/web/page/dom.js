// Elements made of text, never of markup: whatever a model writes stays text.

export const byId = (id) => document.getElementById(id);

/** An element with properties, then children: elements or strings. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A button that does something. */
export function button(text, onclick, properties = {}) {
  return element("button", { type: "button", textContent: text, onclick, ...properties });
}

const whole = new Intl.NumberFormat("en");

/** A count, with separators. */
export const count = (number) => whole.format(number);

/** So many tokens, in words. */
export const tokens = (number) => (number === 1 ? "1 token" : `${count(number)} tokens`);

/** A duration, in the unit that suits it. */
export function duration(ms) {
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}
