// The main chart: what was observed beside what theory predicts, each with its interval. Continuous compares sojourns.

import { TimeChart } from "./charts.js";
import { byId, say } from "./dom.js";
import { duration, span, tickDuration } from "./format.js";

const TITLES = { queueing_delay: "Queueing delay", sojourn_time: "Sojourn time" };
const SHORT = { queueing_delay: "delay", sojourn_time: "sojourn" };

export class Delays {
  constructor() {
    this.compared = null;
    this.charts = {};
  }

  update(state) {
    const compared = state.look?.prediction?.compared ?? this.compared ?? "queueing_delay";
    if (compared !== this.compared) this.show(compared);
    say(byId("delays-title"), TITLES[compared]);
    const window = state.gateway?.prediction_window;
    say(byId("delays-note"), window ? `Mean over the last ${span(window)} at most, with its 95\u202f% interval.` : "Mean over the window, with its 95\u202f% interval.");
    this.charts[compared].update(state, "Nothing to compare in this time yet");
  }

  show(compared) {
    this.compared = compared;
    const host = byId("delays");
    for (const child of [...host.children]) child.hidden = child.dataset.compared !== compared;
    if (this.charts[compared]) return;
    const name = SHORT[compared];
    const place = document.createElement("div");
    place.dataset.compared = compared;
    host.append(place);
    this.charts[compared] = new TimeChart(place, { name: TITLES[compared], series: [side("observed", name), side("predicted", name)], format: duration, tick: tickDuration, labelled: true });
  }
}

const side = (which, name) => ({
  ...{ column: `${which}_${name}`, low: `${which}_${name}_low`, high: `${which}_${name}_high` },
  ...{ side: which, label: which === "observed" ? "Observed" : "Predicted" },
});
