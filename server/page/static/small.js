// The small charts: what waits, what arrives and leaves, what is refused, how much of the engine it takes.

import { TimeChart } from "./charts.js";
import { byId } from "./dom.js";
import { digits, duration, percent, plain, tickDuration, whole } from "./format.js";
import { LOSSES } from "./words.js";

const rate = { format: (value) => `${digits(value)}/s`, tick: (value) => `${plain(value)}/s` };
const observed = (column, label, more = {}) => ({ column, label, side: "observed", ...more });
const NOTHING = "No data in this time";

export class Small {
  constructor() {
    const busy = [observed("utilisation", "Busy"), { column: "predicted_utilisation", label: "Predicted", side: "predicted" }, { column: "load", label: "Load", side: "predicted", dash: [4, 3] }];
    const served = [observed("sequence_rate", "Admitted"), observed("completed_rate", "Completed", { hue: 1 })];
    const first = [observed("first_token_mean", "Mean"), observed("first_token_p95", "p95", { hue: 1 }), observed("first_token_p99", "p99", { hue: 2 })];
    const lost = Object.entries(LOSSES).map(([column, label], index) => observed(column, label, { hue: 1 + (index % 7), dash: [undefined, [4, 3], [1, 3]][Math.floor(index / 7)] }));
    this.charts = [
      [new TimeChart(byId("queue"), { name: "Queue length", series: [observed("queue_length", "Waiting", { step: true }), { column: "predicted_queue_length", label: "Predicted mean", side: "predicted" }], format: (value) => whole(Math.round(10 * value) / 10), most: 4 })],
      [new TimeChart(byId("rate"), { name: "Requests per second", series: served, ...rate })],
      [new TimeChart(byId("tokens"), { name: "Tokens per second", series: [observed("token_rate", "Output tokens")], ...rate })],
      [new TimeChart(byId("first"), { name: "Time to first token", series: first, format: duration, tick: tickDuration }), "No answer in this time"],
      [new TimeChart(byId("lost"), { name: "Refused and failed", series: lost, sparse: true, ...rate }), "No request was refused or failed"],
      [new TimeChart(byId("busy"), { name: "Load and utilisation", series: busy, format: (value) => percent(value), most: 1 })],
    ];
  }

  update(state) {
    for (const [chart, empty = NOTHING] of this.charts) chart.update(state, empty);
  }
}
