// The panel on Cache Memory Stats: the cache growing while a video is sampled, and the finished picture afterwards.
// The server sends states only to pages that have said that they show them: nothing is sent where the panel is off.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { MemoryView } from "./memory_view.js";
import { panelIsOn, whenPanelChanges } from "./settings.js";

const KIND = "QuantWMCacheStats";
const EVENT = "quantwm.memory";
const OUTPUT = "quantwm_memory";
const MIN_HEIGHT = 330;
const MIN_WIDTH = 340;

const panels = new WeakMap();

/** Node of an execution id: "12", or "5:12" for node 12 inside of subgraph node 5. */
function nodeOf(executionId) {
  let graph = app.rootGraph ?? app.graph;
  let node = null;
  for (const id of String(executionId).split(":")) {
    node = graph?.getNodeById(id);
    graph = node?.subgraph;
  }
  return node;
}

function everyPanelNode(graph = app.rootGraph ?? app.graph) {
  const inside = graph.nodes.flatMap((node) => (node.subgraph ? everyPanelNode(node.subgraph) : []));
  return [...graph.nodes.filter((node) => node.comfyClass === KIND), ...inside];
}

function addPanel(node) {
  const view = new MemoryView();
  const widget = node.addDOMWidget("memory_panel", "quantwm_memory", view.element, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => MIN_HEIGHT,
  });
  // Both are read: this one when the workflow is saved, the option above when a prompt is made of it.
  widget.serialize = false;
  panels.set(node, { view, widget });
  // The panel takes the place of the chart's picture, which ComfyUI would draw below it, in either renderer.
  node.hideOutputImages = true;
  node.onDrawBackground = () => {};
  node.setSize([Math.max(node.size[0], MIN_WIDTH), Math.max(node.size[1], node.computeSize()[1])]);
}

function removePanel(node) {
  const { widget } = panels.get(node);
  panels.delete(node);
  widget.onRemove?.();
  node.removeWidget(widget);
  node.hideOutputImages = false;
  delete node.onDrawBackground;
}

let announced = null;

/** Tell the server whether this page shows the panel, once for each connection and after each change. */
function announce() {
  const body = JSON.stringify({ client_id: api.clientId, on: panelIsOn() });
  if (!api.clientId || body === announced) return;
  announced = body;
  api.fetchApi("/quantwm/watch", { method: "POST", body });
}

whenPanelChanges((on) => {
  announce();
  // Settings are read before there is a graph.
  if (!app.canvas?.graph) return;
  for (const node of everyPanelNode()) {
    if (on && !panels.has(node)) addPanel(node);
    else if (!on && panels.has(node)) removePanel(node);
    node.setDirtyCanvas(true, true);
  }
});

app.registerExtension({
  name: "quantwm.memory_panel",

  setup() {
    api.addEventListener(EVENT, ({ detail }) => {
      for (const id of detail.nodes) panels.get(nodeOf(id))?.view.show(detail);
    });
    api.addEventListener("status", announce);
    // A server that was started again knows nobody.
    api.addEventListener("reconnected", () => {
      announced = null;
      announce();
    });
    announce();
    for (const end of ["execution_interrupted", "execution_error"]) {
      api.addEventListener(end, () => everyPanelNode().forEach((node) => panels.get(node)?.view.stop()));
    }
  },

  // A workflow that comes back into its tab has its outputs, but new nodes.
  onNodeOutputsUpdated(outputs) {
    if (!app.canvas?.graph) return;
    for (const node of everyPanelNode()) {
      const id = node.graph === node.graph.rootGraph ? String(node.id) : `${node.graph.id}:${node.id}`;
      const state = outputs[id]?.[OUTPUT]?.[0];
      if (state) panels.get(node)?.view.show(state);
    }
  },

  nodeCreated(node) {
    if (node.comfyClass !== KIND) return;
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      const state = output?.[OUTPUT]?.[0];
      if (state) panels.get(this)?.view.show(state);
    };
    if (panelIsOn()) addPanel(node);
  },
});
