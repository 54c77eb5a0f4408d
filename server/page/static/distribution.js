// The last window's delays as a histogram, those of the model of the same requests (or of the forecast) as a line over it, and their quantiles as a table.

import { FONT, colour } from "./charts.js";
import { byId, fill, h, say } from "./dom.js";
import { NONE, duration, interval, percent, tickDuration, whole } from "./format.js";
import { QUANTITY } from "./words.js";

/* global uPlot */
const STATS = [["mean", "Mean"], ["p50", "p50"], ["p90", "p90"], ["p95", "p95"], ["p99", "p99"]];
const MODEL = "Model, same requests";
const CLIP = 2.5; // a first class so many times higher than the others is cut, and says how high it is

export class Distribution {
  constructor() {
    const host = byId("distribution");
    const key = (kind, text) => h("span", { class: kind }, h("i", { class: kind === "predicted" ? "swatch accent" : "swatch", "aria-hidden": "true" }), text);
    this.place = h("div", { class: "plot", role: "img" });
    this.nothing = h("p", { class: "nothing" });
    this.line = h("b", {}, "");
    const line = key("predicted", "");
    line.append(this.line);
    host.append(h("div", { class: "legend" }, key("observed", "Observed"), line), this.place, this.nothing);
    this.found = null;
    this.unit = "ms";
    this.plot = new uPlot(this.options(), [[], [], []], this.place);
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.place);
    addEventListener("themechange", () => this.plot.redraw(false, true));
  }

  size() {
    return { width: Math.max(200, this.place.clientWidth), height: this.place.clientHeight };
  }

  options() {
    const line = (name) => ({ stroke: () => colour(name), width: 1 });
    const axis = { stroke: () => colour("--faint"), font: FONT, gap: 5 };
    const right = () => (this.found ? this.found.width * this.found.observed.length : 1);
    return {
      ...this.size(),
      padding: [18, 26, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: () => [0, right()] }, y: { range: () => [0, this.top()] } },
      axes: [
        { ...axis, size: 26, space: 70, grid: { show: false }, ticks: { ...line("--rule"), size: 4 }, border: { show: true, ...line("--rule") }, values: (_, at) => at.map((each) => (this.found ? tickDuration(each, this.unit) : "")) },
        { ...axis, size: 46, space: 40, grid: line("--rule"), ticks: { show: false }, values: (_, at) => at.map((each) => !this.found ? "" : percent(each, this.top() < 0.04 ? 1 : 0)) },
      ],
      series: [
        {},
        { fill: () => colour("--ink-fill"), stroke: null, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [1, Infinity], align: 1, gap: 1.5 }) },
        { stroke: () => colour("--accent"), width: 2, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) },
      ],
      hooks: { draw: [(plot) => this.drawClipped(plot)] },
    };
  }

  /** Of the highest class; of the second highest where the first towers over it. */
  top() {
    if (!this.found) return 0.2;
    const { observed, predicted } = this.found;
    const first = Math.max(observed[0], predicted[0]);
    const others = Math.max(0.001, ...observed.slice(1), ...predicted.slice(1));
    this.clipped = first > CLIP * others;
    return (this.clipped ? 1.5 * others : Math.max(first, others)) * 1.08;
  }

  drawClipped(plot) {
    if (!this.found || !this.clipped) return;
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.font = `${12 * scale}px Inter, system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.fillStyle = colour("--ink");
    const observed = percent(this.found.observed[0]);
    ctx.fillText(observed, bbox.left, bbox.top - 6 * scale);
    const after = bbox.left + ctx.measureText(`${observed}  `).width;
    ctx.fillStyle = colour("--accent");
    ctx.fillText(percent(this.found.predicted[0]), after, bbox.top - 6 * scale);
    ctx.restore();
  }

  update({ distribution, look, unit }) {
    const prediction = look?.prediction ?? null;
    if (distribution !== this.found || unit !== this.unit) this.draw(distribution, unit);
    this.describe(prediction);
    fill(byId("quantiles"), ...(prediction ? [quantiles(prediction, this.found?.modelled ?? null, unit)] : []));
  }

  draw(found, unit) {
    Object.assign(this, { found, unit });
    const edges = found ? [...found.observed, 0].map((_, index) => index * found.width) : [];
    this.plot.setData(found ? [edges, [...found.observed, null], [...found.predicted, found.predicted.at(-1)]] : [[], [], []]);
    this.place.dataset.drawn = String(Boolean(found));
  }

  describe(prediction) {
    const what = QUANTITY[prediction?.compared ?? "queueing_delay"];
    const { found } = this;
    say(byId("distribution-title"), `Distribution of the ${what}`);
    say(byId("distribution-note"), found ? `Share of requests by ${what}. ${whole(found.n)} observed; ${percent(found.beyond[0], 1)} are longer than the chart shows.` : `Share of requests by ${what}.`);
    say(this.line, found && !found.modelled ? "Forecast" : MODEL);
    say(this.nothing, found ? "" : prediction ? "No distribution yet" : "No prediction yet");
    const label = found ? `Histogram of the observed ${what} with that of ${found.modelled ? "the model of the same requests" : "the forecast"}. Quantiles are in the table below.` : "Empty histogram";
    this.place.setAttribute("aria-label", label);
  }
}

function quantiles(prediction, modelled, unit) {
  const theory = prediction[prediction.compared] ?? {};
  const { observed, check } = prediction.comparison;
  const model = modelled && { ...modelled, mean: check?.modelled ?? modelled.mean }; // that of the headline, also where this drawing is of the assessment before
  const rows = STATS.map(([name, label]) => {
    const seen = name === "mean" ? observed : observed[name];
    const low = seen?.low ?? null;
    return h("tr", {}, h("th", { scope: "row" }, label), h("td", { class: "n" }, duration(seen?.value, unit)),
      h("td", { class: "n" }, h("small", {}, low === null ? NONE : interval(low, seen.high, unit))), ...(model ? [h("td", { class: "n predicted" }, duration(model[name], unit))] : []), h("td", { class: "n predicted" }, duration(theory[name], unit)));
  });
  const head = ["Statistic", "Observed", "95\u202f% interval", ...(modelled ? [MODEL] : []), "Forecast"].map((text, index) => h("th", { scope: "col", class: index ? "n" : null }, text));
  return h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
}
