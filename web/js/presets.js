// QuantWM KV Cache: a preset fills the other inputs in, and the expected size is shown beside the bits.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { comparison } from "./memory_view.js";
import { defaultBackend } from "./settings.js";
import { text } from "./texts.js";

const KIND = "QuantWMKVCache";
const CUSTOM = "custom";
const MODEL_WIDGETS = new Set(["model_name", "unet_name"]);
// Longest chain of LoRAs and other patches that is followed up to a loader.
const MOST_STEPS = 32;
const SETTLE_MS = 120;
// Pixels of the line with the expected ratio; the height is also in memory_view.css.
const LINE = 24;
const MARGIN = 3;

const find = (node, name) => node.widgets.find((widget) => widget.name === name);

function presetsOf(node) {
  return node.constructor.nodeData.input.optional.preset[1].presets;
}

function fillIn(node, name) {
  for (const [input, value] of Object.entries(presetsOf(node)[name] ?? {})) find(node, input).value = value;
}

function differs(node, name) {
  return Object.entries(presetsOf(node)[name] ?? {}).some(([input, value]) => find(node, input).value !== value);
}

function becomeCustom(node) {
  find(node, "preset").value = CUSTOM;
}

/** Call `after` whenever a hand changes the widget, in either renderer. */
function whenChanged(widget, after) {
  const callback = widget.callback;
  widget.callback = function () {
    const result = callback?.apply(this, arguments);
    after();
    return result;
  };
}

function targetsOf(node) {
  // A node that has just been taken off its graph has none.
  const links = node.graph ? (node.outputs ?? []).flatMap((output) => output.links ?? []) : [];
  return links.map((id) => node.graph.getNodeById(node.graph.links.get(id)?.target_id)).filter(Boolean);
}

/** File name of the model that these settings will be applied to, if the graph tells. */
function modelOf(settings) {
  let node = targetsOf(settings).flatMap((target) => [target, ...targetsOf(target)])
    .find((target) => target.inputs.some((input) => input.name === "model"));
  for (let step = 0; node && step < MOST_STEPS; step++) {
    const file = node.widgets?.find((widget) => MODEL_WIDGETS.has(widget.name));
    if (file) return file.value;
    node = node.getInputNode(node.inputs.findIndex((input) => input.name === "model"));
  }
  return null;
}

async function expected(node) {
  const widgets = Object.fromEntries(node.widgets.map((widget) => [widget.name, widget.value]));
  const body = JSON.stringify({ widgets, model: modelOf(node) });
  const answer = await api.fetchApi("/quantwm/expected", { method: "POST", body });
  if (!answer.ok) return "";
  const { ratio, world } = await answer.json();
  return `\u2248 ${comparison(ratio).join(" ")} (${text(`world_${world}`)})`;
}

function showExpected(node) {
  const element = document.createElement("div");
  element.className = "quantwm-expected";
  const widget = node.addDOMWidget("expected", "quantwm_expected", element, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => LINE + 2 * MARGIN,
    getMaxHeight: () => LINE + 2 * MARGIN,
  });
  widget.serialize = false;
  let waiting;
  return () => {
    clearTimeout(waiting);
    waiting = setTimeout(async () => {
      element.textContent = await expected(node);
      element.title = `${text("expected")}: ${element.textContent}`;
    }, SETTLE_MS);
  };
}

app.registerExtension({
  name: "quantwm.presets",

  nodeCreated(node) {
    if (node.comfyClass !== KIND) return;
    find(node, "backend").value = defaultBackend();
    const governed = new Set(Object.values(presetsOf(node)).flatMap(Object.keys));
    const update = showExpected(node);
    for (const widget of node.widgets) {
      if (widget.name === "preset") whenChanged(widget, () => fillIn(node, widget.value));
      else if (governed.has(widget.name)) whenChanged(widget, () => becomeCustom(node));
      whenChanged(widget, update);
    }
    const onConnectionsChange = node.onConnectionsChange;
    node.onConnectionsChange = function (side, slot, connected) {
      onConnectionsChange?.apply(this, arguments);
      // A linked input is decided elsewhere, so no preset can promise its value.
      if (side === LiteGraph.INPUT && connected && governed.has(this.inputs[slot]?.name)) becomeCustom(this);
      update();
    };
    const onConfigure = node.onConfigure;
    node.onConfigure = function () {
      onConfigure?.apply(this, arguments);
      update();
    };
    update();
  },

  loadedGraphNode(node) {
    if (node.comfyClass !== KIND) return;
    // Saved numbers win over what a preset means in this version: a workflow shows and runs what was saved.
    if (differs(node, find(node, "preset").value)) becomeCustom(node);
  },
});
