// The pack's entries in ComfyUI's settings. Their texts are in locales/<language>/settings.json.

import { app } from "../../../scripts/app.js";

const PANEL = "QuantWM.LivePanel";
const BACKEND = "QuantWM.DefaultBackend";
const onPanelChange = new Set();

export const panelIsOn = () => app.extensionManager.setting.get(PANEL) ?? true;
export const defaultBackend = () => app.extensionManager.setting.get(BACKEND) ?? "auto";

/** Call `listener` with true or false when the panel is switched. */
export function whenPanelChanges(listener) {
  onPanelChange.add(listener);
}

app.registerExtension({
  name: "quantwm.settings",
  settings: [
    {
      id: PANEL,
      category: ["QuantWM", "Panel", "LivePanel"],
      name: "Live memory panel on Cache Memory Stats",
      tooltip: "Shows the cache growing while a video is sampled. Off: a text and a chart after the run.",
      type: "boolean",
      defaultValue: true,
      onChange: (on) => onPanelChange.forEach((listener) => listener(on)),
    },
    {
      id: BACKEND,
      category: ["QuantWM", "Nodes", "DefaultBackend"],
      name: "Backend of new QuantWM KV Cache nodes",
      tooltip: "Nodes that are there already, and saved workflows, keep theirs.",
      type: "combo",
      defaultValue: "auto",
      options: ["auto", "triton", "torch"],
    },
  ],
});
