// The main charts: the requests that came beside the model of the same ones; next to it mean, p95 and p99 of the window beside the forecast. Continuous compares sojourns.

import { TimeChart } from "./charts.js";
import { byId, h, say } from "./dom.js";
import { duration, span, tickDuration } from "./format.js";
import { Pairs } from "./pairs.js";

const TITLES = { queueing_delay: "Queueing delay", sojourn_time: "Sojourn time" };
const SHORT = { queueing_delay: "delay", sojourn_time: "sojourn" };
const ENDED = { queueing_delay: "dispatched", sojourn_time: "completed" };
const STATS = { mean: "Mean with its 95\u202f% interval", p95: "95th percentile", p99: "99th percentile" };
const BAND = { column: "modelled", low: "low", high: "high", side: "predicted", label: "Model, same requests" };

export class Delays {
  constructor() {
    this.compared = "queueing_delay";
    this.groups = {}; // the charts of each quantity
    this.pairs = new Pairs();
  }

  update(state) {
    this.compared = state.look?.prediction?.compared ?? this.compared;
    this.pairs.merge(state.pairs);
    const window = state.gateway?.prediction_window;
    say(byId("delays-title"), TITLES[this.compared]);
    say(byId("delays-note"), `By the second in which the requests were ${ENDED[this.compared]}; mean, p95 and p99 are those of ${window ? `the last ${span(window)} at most` : "the window"}, beside the forecast of a steady state.`);
    const { same, window: others } = this.shown(this.compared);
    const { end, data: [instants] } = state.history.series([], state.view);
    const history = { series: (names) => ({ end, data: [instants, ...this.pairs.columns(names, instants)] }) };
    same.update({ ...state, history }, state.look?.prediction && !state.look.prediction.comparison.check ? "These requests cannot be set beside the model" : "No requests in this time");
    for (const chart of others) chart.update(state, "No comparison in this time");
  }

  /** The charts of that quantity; those of the other one are hidden. */
  shown(compared) {
    this.groups[compared] ??= group(compared);
    for (const [other, { place }] of Object.entries(this.groups)) place.hidden = other !== compared;
    return this.groups[compared];
  }
}

function group(compared) {
  const place = h("div", { class: "stats" });
  byId("delays").append(place);
  const series = [{ column: "observed", side: "observed", label: "Observed" }, BAND];
  const same = made(place, "main", "The requests that came", { name: `${TITLES[compared]} of the same requests`, series, labelled: true, latest: true });
  return { place, same, window: Object.keys(STATS).map((stat) => beside(place, compared, stat)) };
}

function beside(place, compared, stat) {
  const series = [side("observed", SHORT[compared], stat), side("predicted", SHORT[compared], stat)];
  return made(place, "beside", STATS[stat], { name: `${TITLES[compared]}, ${stat}`, series });
}

function made(place, kind, title, options) {
  const host = h("div", { class: kind === "main" ? "chart" : "chart low" });
  place.append(h("div", { class: kind }, h("h3", {}, title), host));
  return new TimeChart(host, { ...options, format: duration, tick: tickDuration });
}

function side(which, name, stat) {
  const column = `${which}_${name}`;
  const columns = stat === "mean" ? { column, low: `${column}_low`, high: `${column}_high` } : { column: `${column}_${stat}` };
  return { ...columns, side: which, label: which === "observed" ? "Observed" : "Predicted" };
}
