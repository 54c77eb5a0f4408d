// Every other setting at the same rate, lengths and speed; what is in force stands on top.

import { byId, fill, h, svg } from "./dom.js";
import { NONE, duration, interval, percent, unitOf } from "./format.js";
import { parsePolicy, policyDetail, tokenLimit } from "./words.js";

const GROUPS = [["policy", "Other policies"], ["limit", "Other token limits"], ["size", "Other batch sizes"]];

export function updateWhatIf(state, use) {
  const { what_if: rows, gateway, look } = state;
  const host = byId("whatif");
  const key = JSON.stringify([rows, look?.prediction?.queueing_delay, gateway?.in_force]);
  if (host.dataset.key === key) return;
  host.dataset.key = key;
  if (!rows?.length) {
    fill(host, h("p", { class: "note" }, gateway?.law === false ? "Needs the engine’s law." : "No what-ifs yet: they come a minute after the first prediction, and every minute from then on."));
    return;
  }
  const now = nowInForce(gateway.in_force, look?.prediction);
  const scale = scaleOf([...(now ? [now] : []), ...rows]);
  const cells = (each, current) => row(each, scale, current, use);
  const bodies = [];
  if (now) bodies.push(h("tbody", {}, cells(now, true)));
  for (const [kind, title] of GROUPS) {
    const mine = rows.filter((each) => kindOf(each, gateway.in_force) === kind).sort(byMean);
    if (!mine.length) continue;
    bodies.push(h("tbody", {}, h("tr", { class: "group" }, h("th", { colSpan: 9, scope: "colgroup" }, title)), ...mine.map((each) => cells(each, false))));
  }
  const table = h("table", { class: "whatif" }, h("thead", {}, head()), ...bodies);
  host.replaceChildren(h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "What if: predicted delay of every setting" }, table));
}

function head() {
  const names = [["Setting"], ["Load", "n"], ["Mean", "n"], ["95\u202f% interval", "plot-cell optional"], ["p50", "n optional"], ["p90", "n optional"], ["p99", "n optional"], ["Clipped", "n optional"], ["", ""]];
  return h("tr", {}, ...names.map(([text, kind]) => h("th", { scope: "col", class: kind }, text || h("span", { class: "hidden" }, "Use"))));
}

function row(each, scale, current, use) {
  const delay = each.queueing_delay;
  const { name } = parsePolicy(each.policy);
  const setting = h("th", { scope: "row" }, name, " ", h("small", {}, [policyDetail(each.policy), tokenLimit(each.max_output_tokens)].filter(Boolean).join(" · ")), current ? h("small", {}, " · in force") : null);
  const button = current ? null : h("button", { type: "button", class: "quiet", "aria-label": `Use ${each.policy}, ${tokenLimit(each.max_output_tokens)}`, onclick: () => use(each) }, "Use");
  const last = h("td", { class: "n" }, button);
  const load = h("td", { class: "n" }, percent(each.load));
  const note = each.notes.join("; ");
  if (!each.stable || !delay) {
    const why = each.load !== null && each.load >= 1 ? "unstable: no steady state" : note || "no answer";
    return h("tr", { class: "unstable" }, setting, load, h("td", { class: "says", colSpan: 6 }, why), last);
  }
  const unit = unitOf(delay.mean ?? 0);
  const number = (value, kind = "n") => h("td", { class: kind }, duration(value, value === null || value === undefined ? unit : unitOf(value)));
  const interval_ = h("td", { class: "plot-cell optional" }, dots(each, scale), h("span", { class: "hidden" }, interval(each.interval.low, each.interval.high, unit)), note ? h("small", {}, note) : null);
  return h("tr", { class: current ? "in-force" : null }, setting, load, number(delay.mean, "n mean-cell"), interval_, number(delay.p50, "n optional"), number(delay.p90, "n optional"), number(delay.p99, "n optional"), h("td", { class: "n optional" }, each.clipped_fraction === null ? NONE : percent(each.clipped_fraction, 1)), last);
}

/** The mean with its interval on one logarithmic scale for all rows. */
function dots(each, { low, high }) {
  const at = (value) => `${(100 * Math.min(1, Math.max(0, Math.log(Math.max(value, low) / low) / Math.log(high / low)))).toFixed(1)}%`;
  const picture = svg("svg", { role: "img", "aria-label": "mean with its interval", focusable: "false" }, svg("line", { class: "axis", x1: "0", x2: "100%", y1: 9, y2: 9 }));
  if (each.interval.low !== null && each.interval.high !== null) picture.append(svg("line", { x1: at(each.interval.low), x2: at(each.interval.high), y1: 9, y2: 9 }));
  if (each.queueing_delay.mean !== null) picture.append(svg("circle", { cx: at(each.queueing_delay.mean), cy: 9, r: 4 }));
  return picture;
}

function scaleOf(rows) {
  const means = rows.map((each) => each.queueing_delay?.mean).filter((mean) => mean > 0);
  return { low: Math.min(...means, 1) / 3, high: 3 * Math.max(...means, 1e-4) };
}

function kindOf(each, now) {
  if (each.max_output_tokens !== now.max_output_tokens) return "limit";
  return parsePolicy(each.policy).name === parsePolicy(now.policy).name ? "size" : "policy";
}

const byMean = (a, b) => (a.queueing_delay?.mean ?? Infinity) - (b.queueing_delay?.mean ?? Infinity) || (a.load ?? 0) - (b.load ?? 0);

function nowInForce(policy, prediction) {
  if (!prediction?.queueing_delay?.mean) return null;
  const interval_ = prediction.compared === "queueing_delay" ? prediction.interval : { low: null, high: null };
  return { ...prediction, policy: policy.policy, max_output_tokens: policy.max_output_tokens, interval: interval_, notes: [], clipped_fraction: null };
}
