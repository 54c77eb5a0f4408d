// Three small charts: what waits, what comes, how much of the engine that takes.

import { TimeChart } from "./charts.js";
import { byId } from "./dom.js";
import { digits, percent, plain, whole } from "./format.js";

export class Small {
  constructor() {
    const waiting = { column: "queue_length", label: "Waiting", side: "observed", step: true };
    const rate = { column: "arrival_rate", label: "Arrivals", side: "observed" };
    const busy = [
      { column: "utilisation", label: "Busy", side: "observed" },
      { column: "predicted_utilisation", label: "Predicted", side: "predicted" },
      { column: "load", label: "Load", side: "predicted", dash: [4, 3] },
    ];
    this.charts = [
      new TimeChart(byId("queue"), { name: "Queue length", series: [waiting], format: (value) => whole(Math.round(10 * value) / 10), most: 4 }),
      new TimeChart(byId("rate"), { name: "Arrival rate", series: [rate], format: (value) => `${digits(value)}/s`, tick: (value) => `${plain(value)}/s` }),
      new TimeChart(byId("busy"), { name: "Load and utilisation", series: busy, format: (value) => percent(value), most: 1 }),
    ];
  }

  update(state) {
    for (const chart of this.charts) chart.update(state, "Nothing in this time yet");
  }
}
