// One sentence that says whether theory and observation agree, and the numbers behind it.

import { byId, fill, h, say } from "./dom.js";
import { NONE, duration, interval, signed, span, unitOf, whole } from "./format.js";
import { QUANTITY, cause, parsePolicy, policyDetail } from "./words.js";

export function updateVerdict(state, deeds) {
  const said = sentence(state);
  fill(byId("says"), ...said.says);
  say(byId("why"), said.why ?? "");
  act(said.action ?? null, deeds);
  const prediction = state.look?.prediction;
  const pair = byId("pair");
  pair.hidden = !(prediction && state.gateway.state !== "lost");
  if (prediction) fill(pair, ...numbers(prediction));
  say(byId("aloud"), said.aloud ?? text(said.says)); // without numbers: it is read only when its meaning changes
  document.title = said.title ? `${said.title} · Kendall` : "Kendall";
}

const text = (parts) => parts.map((part) => part.textContent ?? part).join("");

function sentence({ gateway, look, link, refused, live, now, columns }) {
  if (refused) return { says: ["This page needs a key"], why: `${refused}.`, action: "key" };
  if (!gateway) return { says: ["Connecting to the gateway"], why: link === "lost" ? "It does not answer; the page tries again every few seconds." : "" };
  if (link === "lost") return { says: ["The gateway does not answer"], why: `What stands here is of ${live ?? "before"}. The page connects again by itself.`, title: "Reconnecting" };
  if (gateway.state === "lost") return { says: ["The engine is lost"], why: `${gateway.reason ?? ""}. No request can be answered; restart the gateway, its log says why.`, title: "Engine lost" };
  if (gateway.state === "starting") return { says: ["The engine is starting"], why: "Requests are taken as soon as it serves; this page fills by itself." };
  if (gateway.state === "restarting") return { says: ["The engine is restarting"], why: "It was lost and is brought up again. What waits keeps its place; answers that were under way go on where they can.", title: "Restarting" };
  if (gateway.state === "stuck") return { says: ["Nothing moves"], why: `${gateway.reason ?? "Requests are in service and nothing comes back"}. See the log, and KendallQueueStuck in the operating guide.`, title: "Stuck" };
  if (gateway.state === "calibrating") return { says: ["Measuring the engine’s law"], why: "It takes under a minute. Requests wait meanwhile and keep their place." };
  const coming = (now?.row[columns.indexOf("arrival_rate")] ?? 0) > 0;
  const found = look?.prediction ? compared(look.prediction, gateway) : unknown(gateway, look, coming);
  return gateway.state === "draining" ? { ...found, why: "The gateway drains: what has arrived is answered, nothing new is taken." } : found;
}

function unknown(gateway, look, coming) {
  if (!gateway.looks) return { says: ["The live prediction is switched off"], why: "Start with a --prediction-interval above 0 to see theory beside observation." };
  if (!gateway.law) return { says: ["No prediction yet: the engine’s law is not known"], why: "Kendall predicts from how long a batch takes. Measure it now, in under a minute, or start with --calibrate or --latency.", action: "calibrate" };
  const counted = /^(\d+) requests of this epoch have ended; (\d+)/.exec(look?.reason ?? "");
  if (counted && (coming || counted[1] !== "0")) return { says: [`Collecting requests: ${counted[1]} of ${counted[2]}`], aloud: "Collecting requests", why: "Theory is set beside observation once enough requests of this setting have been answered." };
  if (!counted && look?.reason && !/too few/.test(look.reason)) return { says: ["No prediction for this setting"], why: `${look.reason}.` };
  if (coming) return { says: ["Collecting requests"], why: "Theory is set beside observation once enough requests of this setting have been answered." };
  return { says: ["No requests yet"], why: "Send some and watch theory and observation meet:", action: "load" };
}

function compared(prediction, gateway) {
  const { comparison } = prediction;
  const { observed, predicted } = comparison;
  const what = QUANTITY[prediction.compared];
  if (prediction.stable === false) {
    const { name } = parsePolicy(prediction.policy);
    return { says: [`No steady state: more arrives than ${name} can serve`], why: `The load is ${signed(prediction.load - 1)} above what is stable; the queue grows until it falls. See “What if” for settings that can serve it.`, title: "Unstable" };
  }
  const unit = unitOf(Math.max(observed.value ?? 0, predicted.value ?? 0));
  const both = [h("span", { class: "observed" }, duration(observed.value, unit)), " against ", h("span", { class: "predicted" }, duration(predicted.value, unit))];
  const numbers = observed.value !== null && predicted.value !== null;
  const of = `The mean ${what} of ${policyName(prediction.policy)}, observed beside predicted`;
  if (comparison.verdict === "agree") return { says: numbers ? ["Observed and predicted agree: ", ...both] : ["Observed and predicted agree"], why: `${of}.`, aloud: "Observed and predicted agree", title: "Agree" };
  if (comparison.verdict === "disagree") {
    const why = cause(comparison.reasons, comparison.assumptions);
    const details = comparison.reasons.map((name) => comparison.assumptions[name]?.says).filter(Boolean);
    return { says: [`They disagree: ${why}`], why: details.length ? `${sentences(details)} ${of}.` : `${of}.`, aloud: `They disagree: ${why}`, title: "Disagree" };
  }
  return { says: numbers ? ["Too early to judge: ", ...both] : ["Too early to judge"], why: `${of}; the interval is still too wide to say more.`, aloud: "Too early to judge", title: gateway.model };
}

const policyName = (policy) => [parsePolicy(policy).name, policyDetail(policy)].filter(Boolean).join(" ");
const sentences = (parts) => parts.map((part) => `${part[0].toUpperCase()}${part.slice(1).replace(/\.$/, "")}.`).join(" ");

function numbers(prediction) {
  const { observed, predicted, error, n } = prediction.comparison;
  const unit = unitOf(Math.max(observed.value ?? 0, predicted.value ?? 0));
  const range = (each) => (each.value === null ? "" : interval(each.low, each.high, unit));
  return [
    item(["observed", "Observed mean"], duration(observed.value, unit), range(observed)),
    item(["predicted", "Predicted mean"], duration(predicted.value, unit), range(predicted), prediction.method ?? ""),
    item(["", "Difference"], signed(error), "of the prediction"),
    item(["", "Judged by"], whole(n), `requests in ${span(prediction.window?.seconds ?? 0)}`),
  ];
}

function item([kind, label], value, under, more = "") {
  const swatch = kind ? h("i", { class: kind === "predicted" ? "swatch accent" : "swatch", "aria-hidden": "true" }) : null;
  return h("div", {}, h("dt", {}, swatch, label), h("dd", { class: kind === "predicted" ? "predicted" : null }, value || NONE, h("small", {}, [under, more].filter(Boolean).join(" · "))));
}

function act(kind, deeds) {
  const place = byId("action");
  if (place.dataset.kind === String(kind)) return;
  place.dataset.kind = String(kind);
  place.hidden = kind === null;
  const button = (words, deed) => h("button", { type: "button", class: "main", onclick: deed }, words);
  if (kind === "calibrate") place.replaceChildren(button("Measure the law", deeds.calibrate));
  else if (kind === "key") place.replaceChildren(button("Give the key", deeds.key));
  else if (kind === "load") place.replaceChildren(h("code", { tabIndex: 0 }, `kendall load --base-url ${location.origin} --request-rate 5 --num-prompts 500`));
  else place.replaceChildren();
}
