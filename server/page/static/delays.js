// The main chart: the observed delay and the predicted one, their mean with its interval or a quantile. Continuous compares sojourns.

import { TimeChart } from "./charts.js";
import { byId, h, say } from "./dom.js";
import { duration, span, tickDuration } from "./format.js";

const TITLES = { queueing_delay: "Queueing delay", sojourn_time: "Sojourn time" };
const SHORT = { queueing_delay: "delay", sojourn_time: "sojourn" };
const STATS = { mean: "Mean, with its 95\u202f% interval,", p95: "95th percentile", p99: "99th percentile" };

export class Delays {
  constructor() {
    this.compared = "queueing_delay";
    this.charts = {};
  }

  update(state) {
    this.compared = state.look?.prediction?.compared ?? this.compared;
    const { stat } = state.view;
    const window = state.gateway?.prediction_window;
    say(byId("delays-title"), TITLES[this.compared]);
    say(byId("delays-note"), `${STATS[stat]} of the requests of ${window ? `the last ${span(window)} at most` : "the window"}.`);
    this.chart(this.compared, stat).update(state, "No comparison in this time");
  }

  /** Shows that one and no other. */
  chart(compared, stat) {
    const name = `${compared} ${stat}`;
    this.charts[name] ??= this.made(compared, stat);
    for (const [other, { place }] of Object.entries(this.charts)) place.hidden = other !== name;
    return this.charts[name].chart;
  }

  made(compared, stat) {
    const place = h("div");
    byId("delays").append(place);
    const title = stat === "mean" ? TITLES[compared] : `${TITLES[compared]}, ${stat}`;
    const series = [side("observed", SHORT[compared], stat), side("predicted", SHORT[compared], stat)];
    return { place, chart: new TimeChart(place, { name: title, series, format: duration, tick: tickDuration, labelled: true }) };
  }
}

function side(which, name, stat) {
  const column = `${which}_${name}`;
  const columns = stat === "mean" ? { column, low: `${column}_low`, high: `${column}_high` } : { column: `${column}_${stat}` };
  return { ...columns, side: which, label: which === "observed" ? "Observed" : "Predicted" };
}
