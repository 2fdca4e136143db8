// The page's beginning.

import { ApiError, read } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element } from "./dom.js";
import { startFleet } from "./fleet.js";
import { startSettings } from "./settings.js";
import { openPanel, selectTab, startTabs } from "./tabs.js";
import { showTimeline } from "./timeline.js";

async function loadModels() {
  try {
    const { data } = await read("v1/models");
    byId("model").replaceChildren(
      ...data.map((model) => element("option", { value: model.id }, model.id)),
    );
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    byId("model").replaceChildren(element("option", { value: "" }, "no model"));
    byId("notice").textContent = error.message;
  }
}

startSettings();
startTabs();
startFleet();
loadModels();
new Chat((requestId, isAsked) => {
  if (isAsked) {
    selectTab("timeline");
    openPanel(true);
  }
  showTimeline(requestId);
});
byId("prompt").focus();
