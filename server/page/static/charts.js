// Charts over time: one look for all of them. Ink is observed, the accent is predicted; a dashed line marks a switch.

import { h, say } from "./dom.js";
import { clock } from "./format.js";

/* global uPlot */
const together = uPlot.sync("kendall");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const charts = new Set();
const MINUTE = 60; // seconds
const FONT = "12px Inter, system-ui, sans-serif";

addEventListener("themechange", () => charts.forEach((chart) => chart.repaint()));

/** `series`: {column, label, side: "observed"|"predicted", dash?, hue?, low?, high?, step?}; `format(value, unit)` gives text with its unit. */
export class TimeChart {
  constructor(host, { name, series, format, tick = format, labelled = false, most = null, sparse = false, latest = false }) {
    this.name = name;
    this.sparse = sparse; // only what was ever above 0 in the time shown
    this.latest = latest; // the legend has the last known values, where those of this moment come later
    this.series = series;
    this.format = format;
    this.tick = tick;
    this.unit = "ms"; // of durations: both take (value, unit)
    this.labelled = labelled;
    this.most = most;
    this.marks = [];
    this.known = false;
    this.end = Date.now() / 1e3;
    this.start = this.end - 60;
    this.columns = series.flatMap((each) => [each.column, ...(each.low ? [each.low, each.high] : [])]);
    this.values = series.map(() => h("b", {}, "–"));
    this.when = h("time");
    this.keys = series.map((each, index) => key(each, this.values[index]));
    this.place = h("div", { class: "plot", role: "img", "aria-label": `${name}: no data yet` });
    this.nothing = h("p", { class: "nothing" });
    this.rows = h("div", { class: "scroll", tabIndex: 0, role: "region" });
    this.rows.setAttribute("aria-label", `${name} as a table`);
    const save = h("button", { type: "button", class: "quiet", onclick: () => this.save() }, "Download CSV");
    this.table = h("details", { class: "alternative" }, h("summary", {}, "As a table"), save, this.rows);
    this.table.addEventListener("toggle", () => this.tabulate());
    host.append(h("div", { class: "legend" }, ...this.keys, this.when), this.place, this.nothing, this.table);
    this.plot = new uPlot(this.options(), this.columns.length ? [[], ...this.columns.map(() => [])] : [[]], this.place);
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.place);
    charts.add(this);
  }

  size() {
    return { width: Math.max(200, this.place.clientWidth), height: this.place.clientHeight };
  }

  options() {
    return {
      ...this.size(),
      padding: [this.labelled ? 20 : 10, 26, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: together.key, setSeries: false }, y: false, drag: { x: true, y: false, setScale: false, dist: 6 }, bind: { dblclick: () => unzoom }, points: { size: 7 } },
      scales: { x: { range: () => [this.start, this.end] }, y: { range: (plot) => [0, this.top(plot)] } },
      axes: [this.axis({ space: apart, values: (_, at, __, ___, step) => at.map((each) => clock(each, step < MINUTE)), size: 26 }), this.yAxis()],
      series: [{}, ...this.series.flatMap((each) => lines(each))],
      bands: this.bands(),
      hooks: { draw: [(plot) => this.drawMarks(plot)], setCursor: [() => this.readOut()], setSelect: [(plot) => zoom(plot)] },
    };
  }

  axis(more) {
    const grid = { stroke: () => colour("--rule"), width: 1 };
    return { stroke: () => colour("--faint"), font: FONT, grid: { show: false }, ticks: { ...grid, size: 4 }, border: { show: true, ...grid }, gap: 5, ...more };
  }

  yAxis() {
    const grid = { show: true, stroke: () => colour("--rule"), width: 1 };
    const values = (_, at) => at.map((each) => (this.known ? this.tick(each, this.unit) : ""));
    return this.axis({ values, size: 62, space: 44, grid, ticks: { show: false }, border: { show: false } });
  }

  bands() {
    const found = [];
    let index = 1;
    for (const each of this.series) {
      if (each.low) found.push({ series: [index + 2, index + 1], fill: () => colour(each.side === "predicted" ? "--accent-wash" : "--ink-wash") });
      index += each.low ? 3 : 1;
    }
    return found;
  }

  /** Means decide; an interval may leave the picture. */
  top(plot) {
    let mean = 0;
    let end = 0;
    let index = 1;
    for (const each of this.series) {
      mean = Math.max(mean, ...plot.data[index].map((value) => value ?? 0));
      if (each.low) end = Math.max(end, ...plot.data[index + 2].map((value) => value ?? 0));
      index += each.low ? 3 : 1;
    }
    const top = Math.max(mean, Math.min(end, 1.9 * mean));
    const least = this.most ?? 0;
    return top > 0 || least ? Math.max(1.1 * top, least) : 1;
  }

  /** Draws anew; `empty` is said where there is nothing to draw. */
  update({ history, view, marks, unit }, empty = "") {
    const { end, data } = history.series(this.columns, view);
    const start = view.zoom?.start ?? Math.min(end - 60, Math.max(end - view.seconds, data[0][0] ?? end)); // a young history fills the width
    Object.assign(this, { end, start, marks, unit });
    const values = (each) => data[1 + this.columns.indexOf(each.column)];
    const known = (this.known = this.series.some((each) => values(each).some((value) => value !== null && value !== undefined)));
    const drawn = this.sparse ? this.series.filter((each) => values(each).some((value) => value > 0)) : this.series;
    if (this.sparse) this.series.forEach((each, index) => this.reveal(index, drawn.includes(each)));
    this.plot.setData(data);
    Object.assign(this.place.dataset, { start: Math.round(start), end: Math.round(end) });
    say(this.nothing, known && drawn.length ? "" : empty);
    this.place.dataset.drawn = String(known);
    this.readOut();
    if (this.table.open) this.tabulate();
  }

  reveal(index, shown) {
    this.keys[index].hidden = !shown;
    if (this.plot.series[index + 1].show !== shown) this.plot.setSeries(index + 1, { show: shown }, false);
  }

  repaint() {
    this.plot.redraw(false, true);
  }

  /** The legend shows what is under the cursor, else the newest. */
  readOut() {
    const data = this.plot?.data;
    if (!data || !data[0].length) return;
    const known = this.latest ? data[1].findLastIndex((value) => value !== null && value !== undefined) : -1;
    const at = this.plot.cursor.idx ?? (known < 0 ? data[0].length - 1 : known);
    let index = 1;
    this.series.forEach((each, number) => {
      const value = data[index][at];
      say(this.values[number], value === null || value === undefined ? "–" : this.format(value, this.unit));
      index += each.low ? 3 : 1;
    });
    say(this.when, this.plot.cursor.idx === null || this.plot.cursor.idx === undefined ? "" : clock(data[0][at]));
    const said = this.series.map((each, number) => `${each.label} ${this.values[number].textContent}`).filter((_, number) => !this.keys[number].hidden);
    this.place.setAttribute("aria-label", `${this.name} over time. Now: ${said.join(", ")}. The table below has the same numbers.`);
  }

  drawMarks(plot) {
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.font = `${12 * scale}px Inter, system-ui, sans-serif`;
    ctx.textAlign = "left"; // uPlot leaves its axes' own
    ctx.textBaseline = "alphabetic";
    ctx.strokeStyle = ctx.fillStyle = colour("--soft");
    ctx.lineWidth = scale;
    ctx.setLineDash([3 * scale, 3 * scale]);
    const placed = this.marks.map((mark) => ({ text: mark.label, x: Math.round(plot.valToPos(mark.at, "x", true)) }));
    const shown = placed.filter(({ x }) => x >= left && x <= left + width);
    for (const { x } of shown) {
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
    }
    if (this.labelled) label(ctx, shown, top - 7 * scale, left, left + width);
    ctx.restore();
    this.place.dataset.marks = String(this.marks.filter((mark) => mark.at >= this.start).length);
  }

  /** Everything that the chart shows, as the gateway sends it: Unix time, seconds, shares and rates without a unit. */
  csv() {
    const rows = [["time", "unix_time", ...this.columns]];
    this.plot.data[0].forEach((at, row) => rows.push([new Date(at * 1e3).toISOString(), at, ...this.columns.map((_, column) => this.plot.data[column + 1][row] ?? "")]));
    return rows.map((row) => `${row.join(",")}\n`).join("");
  }

  save() {
    const url = URL.createObjectURL(new Blob([this.csv()], { type: "text/csv" }));
    const name = this.name.toLowerCase().replace(/[^a-z0-9]+/g, "-");
    h("a", { href: url, download: `kendall-${name}-${Math.round(this.end)}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /** At most 40 rows, evenly spaced, the newest first. */
  tabulate() {
    if (!this.table.open) return;
    const [at] = this.plot.data;
    const every = Math.max(1, Math.ceil(at.length / 40));
    const rows = [];
    for (let row = at.length - 1; row >= 0; row -= every) {
      const cells = this.columns.map((_, column) => this.plot.data[column + 1][row]);
      rows.push(h("tr", {}, h("th", { scope: "row" }, clock(at[row])), ...cells.map((value) => h("td", { class: "n" }, value === null || value === undefined ? "–" : this.format(value, this.unit)))));
    }
    const names = this.series.flatMap((each) => [each.label, ...(each.low ? [`${each.label}, low`, `${each.label}, high`] : [])]);
    const head = h("tr", {}, h("th", { scope: "col" }, "Time"), ...names.map((name) => h("th", { scope: "col", class: "n" }, name)));
    this.rows.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
  }
}

/** Pixels between two instants of the axis: a narrow chart has whole minutes, whose texts are shorter. */
const apart = (_, __, start, end, width) => ((48 * (end - start)) / width > MINUTE / 2 ? 48 : 84);

/** A part that the pointer marked, on every chart. */
function zoom(plot) {
  const { left, width } = plot.select;
  if (!width) return;
  const detail = { start: plot.posToVal(left, "x"), end: plot.posToVal(left + width, "x") };
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  dispatchEvent(new CustomEvent("zoom", { detail }));
}

const unzoom = () => dispatchEvent(new CustomEvent("zoom", { detail: null }));

function key(series, value) {
  const predicted = series.side === "predicted";
  const swatch = h("i", { class: `swatch${predicted ? " accent" : ""}${series.dash ? (series.dash[0] > 1 ? " dashed" : " dotted") : ""}`, "aria-hidden": "true" });
  if (series.hue) swatch.classList.add(`hue-${series.hue}`);
  return h("span", { class: predicted ? "predicted" : "observed" }, swatch, series.label, value);
}

function lines(each) {
  const name = each.hue ? `--hue-${each.hue}` : each.side === "predicted" ? "--accent" : "--ink";
  const bound = { stroke: null, width: 0, points: { show: false } };
  const paths = each.step ? uPlot.paths.stepped({ align: 1 }) : undefined;
  const line = { stroke: () => colour(name), width: 2, dash: each.dash, points: { show: false }, paths, spanGaps: false };
  return each.low ? [line, bound, bound] : [line];
}

/** Each above its own line and above no other; one that has no room there is left out. */
function label(ctx, marks, y, left, right) {
  const gap = 3 * devicePixelRatio; // to another line
  let free = left;
  marks.forEach(({ text, x }, index) => {
    const width = ctx.measureText(text).width;
    const before = Math.max(free, x - width, index ? marks[index - 1].x + gap : left);
    const after = Math.min(right, x + width, index + 1 < marks.length ? marks[index + 1].x - gap : right) - width;
    if (before > after) return;
    const middle = x - width / 2; // where there is less room, it begins or ends at its line
    const start = middle < before ? Math.min(after, Math.max(before, x - gap)) : Math.max(before, Math.min(after, middle > after ? x - width + gap : middle));
    ctx.fillText(text, start, y);
    free = start + width + 14 * devicePixelRatio;
  });
}

export { colour, FONT };
