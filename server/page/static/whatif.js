// Every other setting at the same rate, lengths and speed; the setting in force comes first.

import { call } from "./admin.js";
import { byId, fill, h, rateSlider, say, svg } from "./dom.js";
import { NONE, ago, clock, duration, interval, percent, span } from "./format.js";
import { QUANTITY, ROUTINGS, parsePolicy, policyDetail, policyText, tokenLimit } from "./words.js";

const GROUPS = [["policy", "Other policies"], ["limit", "Other token limits"], ["size", "Other batch sizes"]];
const COLUMNS = [["Setting"], ["Load", "n"], ["Delay", "n"], ["Sojourn", "n"], ["95\u202f% of sojourn", "plot-cell optional"], ["First token", "n wide"], ["p99 delay", "n wide"], ["Clipped", "n wide"], ["Gain", "n wide"], ["Use", "use"]];

let asked = null; // at another rate: `times` as many requests, and what was found in which epoch

/** `state` as the page has it; what is found at another rate is drawn by `draw`. */
export function setUpWhatIf(state, draw) {
  byId("whatif-rate-of").append(rateSlider("whatif-rate", async (times) => {
    const mine = times === "1" ? null : { times, epoch: state.gateway?.in_force?.epoch };
    asked = mine;
    draw();
    if (!mine) return;
    try {
      const found = await call("GET", `admin/prediction?rate_factor=${times}`);
      Object.assign(mine, { rows: found.what_if, force: found.what_if_in_force, why: found.reason, at: Date.now() / 1000 });
    } catch (error) {
      mine.why = error.message;
    }
    draw();
  }));
}

export function updateWhatIf(state, use) {
  const { what_if_state: about, gateway, look, unit, now: shown } = state;
  const { what_if: rows, what_if_in_force: mine } = asked ? { what_if: asked.rows, what_if_in_force: asked.force } : state;
  const host = byId("whatif");
  const away = gateway?.state === "restarting" || gateway?.state === "lost"; // nothing serves
  const outdated = away || (asked ? asked.epoch !== gateway?.in_force?.epoch : Boolean(about?.outdated));
  say(byId("whatif-age"), asked ? otherRate(outdated) : rows?.length && about ? age(about, away, shown?.row[0]) : "");
  byId("whatif-age").classList.toggle("alarm", outdated || Boolean(asked?.why));
  const key = JSON.stringify([rows, mine, outdated, asked?.times, look?.prediction?.queueing_delay, gateway?.in_force, unit]);
  if (host.dataset.key === key) return;
  host.dataset.key = key;
  if (asked && !rows?.length) return host.replaceChildren();
  if (!rows?.length) {
    fill(host, h("p", { class: "note" }, gateway?.law === false ? "The forecasts need the engine’s latency law." : `No forecasts yet: once there is a prediction, they are computed every ${span(gateway?.what_if_interval ?? 60)}.`));
    return;
  }
  const now = mine ?? inForce(gateway.in_force, look?.prediction);
  const scale = scaleOf([...(now ? [now] : []), ...rows]);
  const cells = (each, current) => row(each, { scale, current, use: outdated ? null : use, unit });
  const bodies = [];
  if (now) bodies.push(h("tbody", {}, cells(now, true)));
  for (const [kind, title] of GROUPS) {
    const group = rows.filter((each) => kindOf(each, gateway.in_force) === kind && !(mine && sameEffect(each, mine)));
    if (!group.length) continue;
    group.sort(byMean(group));
    bodies.push(h("tbody", {}, h("tr", { class: "group" }, h("th", { colSpan: COLUMNS.length, scope: "colgroup" }, title)), ...group.map((each) => cells(each, false))));
  }
  const head = h("tr", {}, ...COLUMNS.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)));
  const table = h("table", { class: outdated ? "whatif outdated" : "whatif" }, h("thead", {}, head), ...bodies);
  host.replaceChildren(h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "What if: predicted delay and sojourn time of every setting" }, table));
}

/** Which rate the table is for, and from when. */
function otherRate(outdated) {
  if (asked.why) return `No forecast: ${asked.why}.`;
  if (!asked.rows) return "Computing; this takes some seconds.";
  const from = `For ${asked.times} times as many requests as at ${clock(asked.at)}, in the long run`;
  return outdated ? `${from}: before the last change; move the slider to ask again.` : `${from}.`;
}

/** From when the numbers are, and how many are to come. */
function age({ at, left, outdated }, away, now) {
  const from = at ? `As of ${clock(at)}, ${ago(at, now ?? at)}` : "Of the time before the gateway was started";
  if (away) return `${from}: nothing serves now.`;
  if (outdated) return `${from}: before the arrival rate or the engine’s speed changed. The load is that of the present rate; all else is being computed anew.`;
  return left ? `${from}; ${left} of them ${left === 1 ? "is" : "are"} being computed.` : `${from}.`;
}

/** With several servers: what the setting in force would be with a queue at each of them. */
export function updateBalancer({ load_balancer: found, what_if_state: about, unit }) {
  const place = byId("balancer");
  place.classList.toggle("outdated", Boolean(about?.outdated));
  const mean = (each) => each[found.compared]?.mean ?? null;
  const known = found ? found.routings.filter((each) => mean(each) !== null) : [];
  place.hidden = !known.length || mean(found.central) === null;
  if (place.hidden) return;
  const predicted = (each) => h("span", { class: "predicted" }, duration(mean(each), unit));
  const routed = known.flatMap((each, index) => [index ? ", " : "", `${ROUTINGS[each.routing] ?? each.routing} `, predicted(each)]);
  fill(place, `Mean ${QUANTITY[found.compared]} behind a load balancer, with a queue at each of ${found.servers} servers: `, ...routed, "; here, in one queue, ", predicted(found.central), ".");
}

/** The same cells in every row, so that the columns line up however many of them the window has room for. */
function row(each, { scale, current, use, unit }) {
  const delay = each.stable ? each.queueing_delay : null;
  const number = (value, kind) => h("td", { class: kind }, duration(value, unit));
  const button = current || !use || each.pending ? null : h("button", { type: "button", class: "quiet", "aria-label": `Use ${each.policy}, ${tokenLimit(each.max_output_tokens)}`, onclick: () => use(each) }, "Use");
  return h("tr", { class: current ? "in-force" : delay || each.pending ? null : "unstable" },
    h("th", { scope: "row" }, setting(each, current), remark(each, delay)), h("td", { class: "n" }, percent(each.load)), number(delay?.mean, "n"), number(delay && each.sojourn_time?.mean, "n mean-cell"),
    h("td", { class: "plot-cell optional" }, ...(delay ? [dots(each, scale), h("span", { class: "hidden" }, interval(each.sojourn_interval?.low, each.sojourn_interval?.high, unit))] : [])),
    number(delay && each.time_to_first_token?.mean, "n wide"), number(delay?.p99, "n wide"),
    h("td", { class: "n wide" }, each.clipped_fraction === null ? NONE : percent(each.clipped_fraction, 1)), h("td", { class: "n wide" }, ...(current ? [NONE] : gain(each))), h("td", { class: "use" }, button));
}

/** What it takes off the mean of the requests that came, by the model, and between what it may be over the next minutes. */
function gain({ gain: share, next_gain_low: low, next_gain_high: high }) {
  if (share === null || share === undefined) return [NONE];
  if (low === null || low === undefined) return [taken(share)];
  const ends = [...new Set([taken(low, ""), taken(high, "")])].join(" to ");
  return [taken(share), h("small", { class: "remark close" }, `${ends}\u202f%`)];
}

/** A share that is taken off; what is added may be many times as much. */
function taken(share, unit = "\u202f%") {
  const size = Math.round(100 * Math.abs(share));
  return `${share < 0 && size ? "−" : ""}${size > 999 ? "999+" : size}${unit}`;
}

function setting(each, current) {
  const detail = [policyDetail(each.policy), tokenLimit(each.max_output_tokens), current ? "in force" : ""].filter(Boolean).join(" · ");
  return h("span", { class: "setting" }, parsePolicy(each.policy).name, " ", h("small", {}, detail));
}

function remark(each, delay) {
  const note = each.pending ? "being computed" : each.notes.join("; ");
  const text = delay || each.pending ? note : each.stable === false && each.load >= 1 ? "unstable: no steady state" : note || "no answer";
  return text ? h("small", { class: "remark" }, text) : null;
}

/** The mean sojourn time with its interval on one logarithmic scale for all rows. */
function dots(each, { low, high }) {
  const at = (value) => `${(100 * Math.min(1, Math.max(0, Math.log(Math.max(value, low) / low) / Math.log(high / low)))).toFixed(1)}%`;
  const picture = svg("svg", { "aria-hidden": "true", focusable: "false" }, svg("line", { class: "axis", x1: "0", x2: "100%", y1: 9, y2: 9 }));
  const { low: from = null, high: to = null } = each.sojourn_interval ?? {};
  const mean = each.sojourn_time?.mean ?? null;
  if (from !== null && to !== null) picture.append(svg("line", { x1: at(from), x2: at(to), y1: 9, y2: 9 }));
  if (mean !== null) picture.append(svg("circle", { cx: at(mean), cy: 9, r: 4 }));
  return picture;
}

function scaleOf(rows) {
  const means = rows.map((each) => each.sojourn_time?.mean).filter((mean) => mean > 0);
  return { low: Math.min(...means, 1) / 1.5, high: 1.5 * Math.max(...means, 1e-4) };
}

function kindOf(each, now) {
  if (each.max_output_tokens !== now.max_output_tokens) return "limit";
  return parsePolicy(each.policy).name === parsePolicy(now.policy).name ? "size" : "policy";
}

/** Another text for what is in force: a limit that clips no answer, or a batch size that the engine cannot hold. */
function sameEffect(each, mine) {
  const limit = each.max_output_tokens === mine.max_output_tokens || (each.clipped_fraction === 0 && mine.clipped_fraction === 0);
  return limit && (each.policy === mine.policy || effective(each) === effective(mine));
}

/** The policy with the batch size that the engine holds. */
function effective({ policy, effective_max_batch_size: size }) {
  const { name, keys } = parsePolicy(policy);
  const { max_batch_size: own, ...others } = keys;
  return policyText({ name, keys: { ...others, holds: size ?? own } });
}

/** By what compares all of a group: sojourn times across families, as their services differ. */
function byMean(group) {
  const quantity = group.every((each) => each.compared === "queueing_delay") ? "queueing_delay" : "sojourn_time";
  const mean = (each) => (each.stable ? each[quantity]?.mean : null) ?? Infinity;
  return (a, b) => (mean(a) < mean(b) ? -1 : mean(a) > mean(b) ? 1 : (a.load ?? 0) - (b.load ?? 0));
}

function inForce(policy, prediction) {
  if (!prediction?.queueing_delay?.mean) return null;
  const sojourn = prediction.compared === "sojourn_time" ? prediction.interval : null;
  return { ...prediction, policy: policy.policy, max_output_tokens: policy.max_output_tokens, sojourn_interval: sojourn, notes: [], clipped_fraction: null };
}
