// A workflow may hold a choice that this version of the pack does not offer. ComfyUI would keep it and refuse to
// run; here the node's default takes its place and a message says so.

import { app } from "../../../scripts/app.js";

const PREFIX = "QuantWM";
// Files on disk: ComfyUI itself names those that are missing, and another model is no replacement.
const FILE_INPUTS = new Set(["model_name"]);

function inputSpec(node, name) {
  const { required, optional } = node.constructor.nodeData?.input ?? {};
  return (required?.[name] ?? optional?.[name])?.[1];
}

app.registerExtension({
  name: "quantwm.unknown_choices",
  loadedGraphNode(node) {
    if (!node.comfyClass?.startsWith(PREFIX)) return;
    for (const widget of node.widgets ?? []) {
      const spec = inputSpec(node, widget.name);
      if (!spec?.options || FILE_INPUTS.has(widget.name) || spec.options.includes(widget.value)) continue;
      const unknown = widget.value;
      widget.value = spec.default ?? spec.options[0];
      app.extensionManager.toast.add({
        severity: "warn",
        summary: node.title,
        detail: `${widget.name} was "${unknown}", which this version does not have. It is now "${widget.value}".`,
      });
    }
  },
});
