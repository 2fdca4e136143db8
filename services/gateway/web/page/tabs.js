// The panel: its tabs, and on narrow windows whether it is open.

import { byId } from "./dom.js";

const TABS = ["settings", "timeline", "fleet"];

/** Bring a tab to the front. */
export function selectTab(name) {
  for (const each of TABS) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
}

/** Show the panel where there is no room for it beside the chat. */
export function openPanel(isOpen) {
  document.body.classList.toggle("panel-open", isOpen);
  byId("panel-button").setAttribute("aria-expanded", String(isOpen));
  byId("panel-button").textContent = isOpen ? "Chat" : "Details";
}

export function startTabs() {
  for (const name of TABS) byId(`tab-${name}`).addEventListener("click", () => selectTab(name));
  byId("tab-settings").parentElement.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const place = TABS.findIndex((name) => !byId(name).hidden);
    const next = TABS[(place + step + TABS.length) % TABS.length];
    selectTab(next);
    byId(`tab-${next}`).focus();
  });
  byId("panel-button").addEventListener("click", () =>
    openPanel(!document.body.classList.contains("panel-open")),
  );
}
