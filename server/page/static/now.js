// The line of numbers under the verdict.

import { byId, fill, h, say } from "./dom.js";
import { NONE, digits, percent, since, span, whole } from "./format.js";
import { limits, parsePolicy, policyDetail } from "./words.js";

export function updateNow(state) {
  const { now, gateway, look, columns } = state;
  const row = now?.row ?? [];
  const value = (name) => row[columns.indexOf(name)] ?? null;
  const policy = gateway?.in_force;
  const prediction = look?.prediction;
  const load = value("load");
  const predicted = value("predicted_utilisation");
  const tiles = [
    tile("Policy", policy ? parsePolicy(policy.policy).name : NONE, "", policy ? [policyDetail(policy.policy), ...limits(policy)].filter(Boolean).join(" · ") : ""),
    tile("Load", percent(load), "", look?.outdated ? (load < 1 ? "at the present rate" : "above the largest stable rate") : look?.stopped ? "of the requests that came" : loadWords(load, prediction), load !== null && load >= 0.9),
    tile("Utilisation", percent(value("utilisation")), "", predicted === null ? "of the time busy, over one minute" : h("span", { class: "predicted" }, `${percent(predicted)} predicted`)),
    tile("Queue length", whole(value("queue_length")), "", "requests waiting"),
    tile("Arrival rate", digits(value("arrival_rate")), "/s", arrivalWords(value("arrival_rate"), value("sequence_rate"), look)),
    tile("In service", whole(value("in_service")), "", policy ? `of ${whole(policy.effective_max_batch_size * gateway.serving)} at most` : ""),
  ];
  fill(byId("now"), ...tiles);
  say(byId("about"), about(gateway, state.hello, row[0]));
}

/** Model, engine, uptime, restarts and versions. */
function about(gateway, hello, at) {
  if (!gateway?.engine) return "";
  const { restarts, servers, versions } = gateway;
  const parts = [
    `Model ${gateway.model}`, `${gateway.engine} engine${versions?.[gateway.engine] ? ` ${versions[gateway.engine]}` : ""}`, servers > 1 ? (gateway.serving < servers ? `${gateway.serving} of ${servers} servers` : `${servers} servers`) : "",
    at ? `up ${since(at - hello.born)}` : "", gateway.resizable === "urls" ? (restarts ? `${whole(restarts)} time${restarts === 1 ? "" : "s"} without a server` : "") : `${whole(restarts)} engine restart${restarts === 1 ? "" : "s"}`, `Kendall ${hello.version}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

function tile(label, value, unit, under, alarm = false) {
  return h("div", {}, h("dt", {}, label), h("dd", {}, h("span", { class: alarm ? "alarm" : null }, value), unit ? h("i", {}, unit) : null, h("p", {}, under)));
}

/** A call that asks for several sequences is one arrival. */
function arrivalWords(calls, sequences, look) {
  const over = look?.prediction && !look.stopped ? `over ${span(look.rate_seconds)}` : "over one minute";
  return calls > 0 && sequences / calls >= 1.005 ? `calls ${over}, ${digits(sequences / calls)} sequences each` : over;
}

function loadWords(load, prediction) {
  if (load === null) return "of the largest stable rate";
  if (load >= 1) return prediction?.stable === false ? "above the largest stable rate" : "about the largest stable rate";
  if (load >= 0.9) return "close to the stability limit";
  const { low, high } = prediction?.load_interval ?? {};
  return typeof low === "number" && typeof high === "number" ? `${percent(Math.max(0, low))} to ${percent(high)}` : "of the largest stable rate";
}
