// One sentence that says whether theory and observation agree, and the numbers behind it.

import { byId, fill, h, prose, say } from "./dom.js";
import { NONE, ago, digits, duration, interval, percent, signed, span, whole } from "./format.js";
import { QUANTITY, cause, parsePolicy, policyWords } from "./words.js";

export function updateVerdict(state, actions) {
  const found = sentence(state);
  fill(byId("says"), ...found.says);
  fill(byId("why"), ...prose(found.why ?? ""));
  act(found.action ?? null, actions, state.gateway?.keyed);
  const prediction = state.look?.prediction;
  const pair = byId("pair");
  pair.hidden = !(prediction && state.gateway.state !== "lost");
  pair.classList.toggle("outdated", Boolean(state.look?.outdated));
  if (prediction) fill(pair, ...numbers(prediction, state));
  const aloud = found.aloud ?? text(found.says);
  say(byId("aloud"), aloud); // without numbers: it is read only when its meaning changes
  say(byId("bar-verdict"), found.short ?? aloud);
  byId("bar-verdict").classList.toggle("alarm", Boolean(found.alarm));
  document.title = found.title ? `${found.title} · Kendall` : "Kendall";
}

// All others are conditions of the forecast.
const OF_THE_MODEL = new Set(["stable_queue", "independent_lengths", "equal_servers", "no_stalls", "constant_speed", "law_shape", "enough_memory"]);

const text = (parts) => parts.map((part) => part.textContent ?? part).join("");

function sentence(state) {
  const { gateway, look, link, refused, live, now, columns } = state;
  if (refused) return { says: ["This page needs a key"], short: "Key needed", why: `${refused}.`, action: "key" };
  if (!gateway) return { says: ["Connecting to the gateway"], short: "Connecting", why: link === "lost" ? "It does not answer. The page tries again every few seconds." : "" };
  if (link === "lost") return { says: ["The gateway does not answer"], short: "No answer", alarm: true, why: `The numbers below are from ${live ?? "before"}. The page reconnects by itself.`, title: "Reconnecting" };
  if (gateway.state === "lost") return { says: ["The engine is lost"], short: "Engine lost", alarm: true, why: `${ended(gateway.reason)}No request can be answered. The gateway’s log says why; restart the gateway.`, title: "Engine lost" };
  if (gateway.state === "starting") return { says: ["The engine is starting"], short: "Engine starting", why: "The gateway accepts requests as soon as the engine is ready. This page then fills by itself." };
  if (gateway.state === "restarting" && gateway.engine === "http") return noServer(state.servers ?? []);
  if (gateway.state === "restarting") return { says: ["The engine is restarting"], short: "Engine restarting", alarm: true, why: "The engine failed and is being restarted. Waiting requests keep their places; interrupted answers continue where that is possible.", title: "Restarting" };
  if (gateway.state === "stuck") return { says: ["The engine makes no progress"], short: "No progress", alarm: true, why: `${ended(gateway.reason ?? "Requests are in service and no tokens arrive")}See the log, and KendallQueueStuck in the operating guide.`, title: "Stuck" };
  if (gateway.state === "calibrating") return { says: ["Measuring the engine’s latency law"], short: "Calibrating", why: "Requests in service finish first; the measurement then takes less than a minute. Arriving requests wait in the queue." };
  const coming = (now?.row[columns.indexOf("arrival_rate")] ?? 0) > 0;
  const found = look?.prediction ? compared(look.prediction, state) : unknown(state, coming);
  return gateway.state === "draining" ? { ...found, short: "Draining", why: "The gateway is draining: it answers the requests that it has and accepts no new ones." } : found;
}

/** Servers that run by themselves: nothing restarts them from here. */
function noServer(servers) {
  const many = servers.length > 1;
  const probed = many ? "They are probed until one answers; nothing restarts them from here." : "It is probed until it answers; nothing restarts it from here.";
  const calls = "Requests that wait keep their places. Calls whose answer had begun have failed; all others are sent again.";
  return { says: [many ? "None of the servers behind answers" : "The server behind does not answer"], short: "No server answers", alarm: true, why: `${probed} ${calls}`, title: "No server" };
}

const ended = (reason) => (reason ? `${reason.replace(/\.$/, "")}. ` : "");

function unknown({ gateway, look, switches }, coming) {
  if (!gateway.looks) return { says: ["The live prediction is switched off"], short: "Prediction off", why: "Start the gateway with --prediction-interval above 0 to compare theory with observation." };
  if (!gateway.law) return { says: ["No prediction yet: the engine’s latency law is not known"], short: "No latency law", why: "Kendall predicts from the time that a batch takes. Measure it now, in less than a minute, or start the gateway with --calibrate or --latency.", action: "calibrate" };
  const counted = /^(\d+) requests?(?: of this epoch)? ha(?:s|ve) ended [^;]*; (\d+)/.exec(look?.reason ?? "");
  const collecting = "The comparison starts once enough requests have been answered under this setting.";
  if (counted && (coming || counted[1] !== "0")) return { says: [`Collecting requests: ${counted[1]} of ${counted[2]}`], aloud: "Collecting requests", short: `Collecting requests: ${counted[1]} of ${counted[2]}`, why: collecting };
  if (!counted && look?.reason && !/too few|^no prediction yet/.test(look.reason)) return { says: ["No prediction for this setting"], short: "No prediction", why: `${look.reason}.` };
  if (coming) return { says: ["Collecting requests"], why: collecting };
  return { says: [switches?.some((each) => !each.first) ? "No requests in this epoch yet" : "No requests yet"], why: "Send some requests to compare the observed delay with the predicted one:", action: "load" };
}

function compared(prediction, { gateway, look, unit, now, columns }) {
  if (look.outdated) return changed(prediction, look, now.row, columns);
  const { comparison } = prediction;
  const { predicted } = comparison;
  const what = QUANTITY[prediction.compared];
  const admitted = comparison.assumptions.all_admitted;
  if (predicted.value === null && admitted?.holds === false) { // the queue is bounded by what is refused
    return { says: ["The gateway refuses a part of the calls"], why: `${sentences([admitted.says])} “What if” counts the admitted ones only.`, short: "Refusing calls", alarm: true, title: "Refusing calls" };
  }
  const { check } = comparison;
  const beside = check && check.verdict !== "too_few" ? ` The model of the requests that came: ${duration(check.modelled, unit)}, observed ${duration(check.observed, unit)}.` : "";
  if (prediction.stable === false) {
    const { name } = parsePolicy(prediction.policy);
    const grows = prediction.load !== null && prediction.load < 1 ? sentences([comparison.assumptions.stable_queue.says]) : `${excess(prediction.load)}, and the queue grows until the rate falls.`;
    const why = look.stopped ? "No requests come now; the queue is of those that came." : `${grows} “What if” lists the load of other settings.`;
    return { says: [`No steady state: requests arrive faster than ${name} can serve them`], short: "Overloaded", alarm: true, why: [`${why}${beside}`, look.stopped ? "" : ahead(prediction.next, unit)].filter(Boolean).join(" "), title: "Unstable" };
  }
  if (predicted.value === null && prediction.load >= 1) return { says: ["Too early to say whether the queue has a steady state"], short: "Too early to judge", why: `${sentences([comparison.assumptions.stable_queue.says])}` };
  const of = `Mean ${what} under ${policyWords(prediction.policy)}${look.stopped ? ", of the requests that came; none come now" : ""}`;
  const pair = check ? [": ", h("span", { class: "observed" }, duration(check.observed, unit)), " observed, ", h("span", { class: "predicted" }, duration(check.modelled, unit)), " modelled"] : [];
  if (check?.verdict === "disagree") {
    const says = "The model disagrees with the requests that came";
    return { says: [says, ...pair], why: `${sentences(check.causes)} ${of}: ${checked(check)}.`, aloud: `${says}: ${check.causes[0]}`, short: "Disagree", alarm: true, title: "Disagree" };
  }
  const forecast = forecasted(prediction, unit);
  if (check?.verdict === "agree") {
    const says = "The model agrees with the requests that came";
    return { says: [says, ...pair], why: `${of}: ${checked(check)}. ${forecast}`, aloud: says, short: "Agree", title: "Agree" };
  }
  const early = check ? `${of}: ${checked(check)}: too wide to tell.` : `${of}: the requests that came cannot be set beside the model${comparison.n < FEWEST ? " before more of them have ended" : " under this order of service"}.`;
  return { says: ["Too early to judge", ...pair], why: `${early} ${forecast}`, aloud: "Too early to judge", short: "Too early to judge", title: gateway.model };
}

const FEWEST = 20; // requests of a check

/** The next minutes and the steady state, if traffic goes on like this, and which condition of the latter fails. */
function forecasted(prediction, unit) {
  return [ahead(prediction.next, unit), steadyState(prediction, unit)].filter(Boolean).join(" ");
}

function ahead(next, unit) {
  if (!next) return "";
  return `The next ${span(next.seconds)}, if traffic goes on as in the last ${span(next.history)}: ${duration(next.mean, unit)} (nine in ten: ${interval(next.low, next.high, unit)}).`;
}

function steadyState({ comparison }, unit) {
  const { value, low, high } = comparison.predicted;
  const failing = Object.keys(comparison.assumptions).filter((name) => !OF_THE_MODEL.has(name) && comparison.assumptions[name].holds === false);
  const steady = value === null ? "" : `, ${duration(value, unit)} (${interval(low, high, unit)}) in the long run,`;
  if (failing.length) return `The forecast${steady} does not hold: ${cause(failing, comparison.assumptions)}. ${sentences(failing.map((name) => comparison.assumptions[name].says))}`;
  return value === null ? "There is no forecast of the long run yet." : `In the long run: ${duration(value, unit)} (${interval(low, high, unit)}).`;
}

/** More or fewer requests came since the last assessment than before it: the load is in proportion, the rest has to wait. */
function changed(prediction, look, row, columns) {
  const [load, rate] = ["load", "arrival_rate"].map((name) => row[columns.indexOf(name)]);
  const { name } = parsePolicy(prediction.policy);
  const why = `${digits(rate)} requests per second came over the last ${span(look.rate_seconds)}: a load of ${percent(load)}. The delays below are from ${ago(look.at, row[0])}, before the change; the next assessment is under way.`;
  if (load >= 1) return { says: [`The arrival rate has changed: requests arrive faster than ${name} can serve them`], short: "Overloaded", alarm: true, why, title: "Unstable" };
  return { says: ["The arrival rate has changed"], short: "Assessing the change", why };
}

const excess = (load) => (load > 1 ? `The arrival rate is ${percent(load - 1, load < 1.995 ? 1 : 0)} above the largest stable rate` : "The arrival rate is not below the largest stable rate");

const sentences = (parts) => parts.map((part) => `${part[0].toUpperCase()}${part.slice(1).replace(/\.$/, "")}.`).join(" ");

/** How far these requests are from the model of the same ones. */
function checked(check) {
  if (check.ratio_low === null) return `${whole(check.requests)} requests in too few batches`;
  const apart = Math.abs(check.ratio - 1);
  const side = check.ratio < 1 ? "below" : "above";
  return `${whole(check.requests)} requests, ${percent(apart, 1)} ${side} the model of the same ones (95 %: ${signed(check.ratio_low - 1)} to ${signed(check.ratio_high - 1)})`;
}

function numbers(prediction, { unit, look, now }) {
  const { observed, predicted, n, check } = prediction.comparison;
  const { next } = prediction;
  const range = (each) => (each.value === null ? "" : interval(each.low, each.high, unit));
  return [
    item(["observed", "Observed mean"], duration(observed.value, unit), range(observed)),
    ...(check ? [item(["predicted", "Model, same requests"], duration(check.modelled, unit), `observed ${signed(check.ratio - 1)}`, check.ratio_low === null ? "" : `95 %: ${signed(check.ratio_low - 1)} to ${signed(check.ratio_high - 1)}`)] : []),
    ...(next ? [item(["", `Next ${span(next.seconds)}`], duration(next.mean, unit), interval(next.low, next.high, unit), "nine in ten")] : []),
    item(["", "In the long run"], duration(predicted.value, unit), range(predicted), prediction.method ?? ""),
    item(["", "Sample"], whole(n), `requests in ${span(prediction.window?.seconds ?? 0)}`, look.at === null ? "" : `until ${ago(look.at, now?.row[0] ?? look.at)}`),
  ];
}

function item([kind, label], value, under, more = "") {
  const swatch = kind ? h("i", { class: kind === "predicted" ? "swatch accent" : "swatch", "aria-hidden": "true" }) : null;
  return h("div", {}, h("dt", {}, swatch, label), h("dd", { class: kind === "predicted" ? "predicted" : null }, value || NONE, h("small", {}, [under, more].filter(Boolean).join(" · "))));
}

function act(kind, actions, keyed) {
  const place = byId("action");
  if (place.dataset.kind === String(kind)) return;
  place.dataset.kind = String(kind);
  place.hidden = kind === null;
  const button = (words, action) => h("button", { type: "button", class: "main", onclick: action }, words);
  if (kind === "calibrate") place.replaceChildren(button("Measure the law", actions.calibrate));
  else if (kind === "key") place.replaceChildren(button("Enter the key", actions.key));
  else if (kind === "load") place.replaceChildren(h("code", { tabIndex: 0 }, ...command(keyed)));
  else place.replaceChildren();
}

/** Broken between options only, never inside one. */
function command(keyed) {
  const parts = ["kendall load", `--base-url ${location.origin}`, "--request-rate 5", "--num-prompts 500"];
  if (keyed) parts.push("--api-key KEY");
  return parts.flatMap((part, index) => [index ? " " : "", h("span", { class: "flag" }, part)]);
}
