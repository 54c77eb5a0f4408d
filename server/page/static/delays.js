// The main charts: the observed delay beside the predicted one: the mean with its interval, p95 and p99. Continuous compares sojourns.

import { TimeChart } from "./charts.js";
import { byId, h, say } from "./dom.js";
import { duration, span, tickDuration } from "./format.js";

const TITLES = { queueing_delay: "Queueing delay", sojourn_time: "Sojourn time" };
const SHORT = { queueing_delay: "delay", sojourn_time: "sojourn" };
const STATS = { mean: "Mean with its 95\u202f% interval", p95: "95th percentile", p99: "99th percentile" };

export class Delays {
  constructor() {
    this.compared = "queueing_delay";
    this.groups = {}; // the charts of each quantity
  }

  update(state) {
    this.compared = state.look?.prediction?.compared ?? this.compared;
    const window = state.gateway?.prediction_window;
    say(byId("delays-title"), TITLES[this.compared]);
    say(byId("delays-note"), `Mean, p95 and p99 of the requests of ${window ? `the last ${span(window)} at most` : "the window"}.`);
    for (const chart of this.shown(this.compared)) chart.update(state, "No comparison in this time");
  }

  /** The charts of that quantity; those of the other one are hidden. */
  shown(compared) {
    this.groups[compared] ??= group(compared);
    for (const [other, { place }] of Object.entries(this.groups)) place.hidden = other !== compared;
    return this.groups[compared].charts;
  }
}

function group(compared) {
  const place = h("div", { class: "stats" });
  byId("delays").append(place);
  return { place, charts: Object.keys(STATS).map((stat) => made(place, compared, stat)) };
}

function made(place, compared, stat) {
  const main = stat === "mean";
  const host = h("div", { class: main ? "chart" : "chart low" });
  place.append(h("div", { class: main ? "main" : "beside" }, h("h3", {}, STATS[stat]), host));
  const name = main ? TITLES[compared] : `${TITLES[compared]}, ${stat}`;
  const series = [side("observed", SHORT[compared], stat), side("predicted", SHORT[compared], stat)];
  return new TimeChart(host, { name, series, format: duration, tick: tickDuration, labelled: main });
}

function side(which, name, stat) {
  const column = `${which}_${name}`;
  const columns = stat === "mean" ? { column, low: `${column}_low`, high: `${column}_high` } : { column: `${column}_${stat}` };
  return { ...columns, side: which, label: which === "observed" ? "Observed" : "Predicted" };
}
