// Draws the state that nodes/live.py describes. Knows nothing of nodes, events or the graph.

import { text } from "./texts.js";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
// In the order in which they are stacked and listed, as on the chart of the IMAGE output.
const PARTS = ["codes", "ids", "centroids", "scales", "zeros", "psac_c", "psac_u"];
const SVG = "http://www.w3.org/2000/svg";

const style = document.createElement("link");
style.rel = "stylesheet";
style.href = new URL("./memory_view.css", import.meta.url).href;
document.head.append(style);

/** Three significant digits in binary units, as everywhere in the pack. */
export function formatBytes(count) {
  let unit = 0;
  while (count >= 999.5 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${Number(count.toPrecision(3))} ${UNITS[unit]}`;
}

/** How the cache compares with BF16: [number, words]. */
export function comparison(ratio) {
  if (ratio >= 1.05) return [`${ratio.toFixed(1)}×`, text("smaller")];
  return ratio > 0.95 ? ["1×", text("equal")] : [`${(1 / ratio).toFixed(1)}×`, text("larger")];
}

function el(kind, className, content = []) {
  const element = document.createElement(kind);
  element.className = className;
  element.append(...[content].flat());
  return element;
}

function svg(kind, attributes) {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** A bar of [class, share of the full width] pieces between a label and a value. */
function bar(label, pieces, value) {
  const track = el("div", "quantwm-track");
  for (const [className, share] of pieces) {
    const piece = el("div", `quantwm-piece ${className}`);
    piece.style.width = `${100 * share}%`;
    track.append(piece);
  }
  return el("div", "quantwm-bar", [el("span", "quantwm-muted", label), track, el("span", "", value)]);
}

function growthChart({ block, bf16, kept }) {
  const last = block.at(-1);
  const top = Math.max(...bf16, ...kept);
  const chart = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
  chart.setAttribute("aria-label", `${text("growth")}: ${formatBytes(kept.at(-1))}, BF16 ${formatBytes(bf16.at(-1))}`);
  for (const [name, values] of [["bf16", bf16], ["kept", kept]]) {
    const points = ["0,100", ...values.map((value, i) => `${(100 * block[i]) / last},${100 - (100 * value) / top}`)];
    chart.append(svg("polygon", { points: `${points.join(" ")} 100,100`, class: `quantwm-area quantwm-${name}` }));
    chart.append(svg("polyline", { points: points.join(" "), class: `quantwm-line quantwm-${name}` }));
  }
  const scale = el("div", "quantwm-scale quantwm-muted", [el("span", "", formatBytes(top)), el("span", "", "0")]);
  const axis = el("div", "quantwm-axis quantwm-muted", [
    el("span", "", "0"), el("span", "", text("blocks")), el("span", "", String(last)),
  ]);
  return el("div", "quantwm-growth", [scale, chart, axis]);
}

function fact(name, ...content) {
  return [el("dt", "quantwm-muted", name), el("dd", "", content)];
}

function share(seconds, total) {
  return total ? `${seconds.toFixed(2)} s, ${Math.round((100 * seconds) / total)} %` : `${seconds.toFixed(2)} s`;
}

export class MemoryView {
  constructor() {
    this.state = {};
    this.element = el("div", "quantwm-panel");
    this.show(this.state);
  }

  /** The run is over without a result: keep what there is, but stop calling it live. */
  stop() {
    if (this.state.running) this.show({ ...this.state, running: false, stopped: true });
  }

  show(state) {
    this.state = state;
    const body = state.bytes_bf16 ? this.#filled(state) : [el("p", "quantwm-muted", text("empty"))];
    this.element.replaceChildren(...body);
  }

  #filled(state) {
    const kept = state.bytes_packed + state.bytes_unpacked;
    const [number, words] = comparison(state.bytes_bf16 / Math.max(kept, 1));
    const widest = Math.max(state.bytes_bf16, kept);
    const parts = [...PARTS, "unpacked"]
      .map((name) => [name, name === "unpacked" ? state.bytes_unpacked : state.bytes_by_part[name]])
      .filter(([, bytes]) => bytes > 0);
    // The host's own cache (method off) knows no blocks.
    const blocks = state.blocks ? `, ${state.blocks} ${text("blocks")}` : "";
    const status = state.running ? "sampling" : state.stopped ? "stopped" : "finished";
    return [
      el("div", "quantwm-head", [
        el("strong", "quantwm-ratio", number),
        el("span", "", words),
        el("span", `quantwm-status quantwm-${status}`, text(status) + blocks),
      ]),
      bar("BF16", [["quantwm-bf16", state.bytes_bf16 / widest]], formatBytes(state.bytes_bf16)),
      bar(
        state.method,
        parts.map(([name, bytes]) => [`quantwm-${name}`, bytes / widest]),
        formatBytes(kept),
      ),
      el("ul", "quantwm-parts", parts.map(([name, bytes]) =>
        el("li", "", [el("i", `quantwm-piece quantwm-${name}`), `${text(name)} ${formatBytes(bytes)}`]))),
      ...(state.growth.block.length ? [growthChart(state.growth)] : []),
      el("dl", "quantwm-facts", this.#facts(state)),
    ];
  }

  #facts(state) {
    const { used, total, cpu } = state.memory;
    const why = el("span", "quantwm-why quantwm-muted", state.backend_reason);
    why.title = state.backend_reason;
    return [
      ...fact(text("encode"), share(state.encode_seconds, state.seconds)),
      ...fact(text("decode"), share(state.decode_seconds, state.seconds)),
      ...fact(text("backend"), state.backend, " ", why),
      ...fact(text(cpu ? "memory" : "vram"), `${formatBytes(used)} / ${formatBytes(total)}`),
    ];
  }
}
