// Advice costs the gateway a few seconds of prediction, so it is asked for, not sent.

import { call } from "./admin.js";
import { byId, fill, h, rateSlider } from "./dom.js";
import { percent } from "./format.js";
import { TARGETS } from "./words.js";

/** `use`: what puts a setting, or a number of servers, into a form; nothing is in force by that. Returns what follows the page's state: advice from before a change is grey, and not to be used. */
export function setUpAdvice(use) {
  const button = h("button", { type: "button", class: "quiet", id: "ask-advice" }, "Ask for advice");
  const said = h("div", { role: "status" });
  const rate = rateSlider("advice-rate");
  const slo = h("input", { id: "advice-slo", type: "text", placeholder: "p99_queueing_delay=2s", spellcheck: false, autocomplete: "off" });
  byId("advice").append(h("div", { class: "asked" }, rate, h("label", {}, "SLO, if there is one", slo)), said, button);
  let given = null; // of which epoch, and whether the page has caught up; until it is from before a change
  button.addEventListener("click", async () => {
    button.disabled = true;
    said.classList.remove("outdated");
    given = null;
    fill(said, h("p", { class: "note" }, "Computing; this takes a few seconds."));
    try {
      const { epoch } = use.state.gateway?.in_force ?? {};
      const times = rate.control.value;
      const asked = new URLSearchParams(times === "1" ? {} : { rate_factor: times });
      if (slo.value.trim()) asked.set("slo", slo.value.trim());
      const query = asked.toString();
      const found = await call("GET", `admin/advice${query && `?${query}`}`);
      given = found.advice.length ? { epoch, calm: !changed(use.state) } : null; // it rests on an assessment of its own, newer than the page's
      const none = h("p", { class: "note" }, `No advice: ${found.reason ?? "no requests to go by yet"}.`);
      fill(said, ...(found.advice.length ? [...rates(found.rate), h("ul", { class: "advice" }, ...found.advice.map((each) => item(each, use)))] : [none]));
    } catch (error) {
      fill(said, h("p", { class: "note alarm" }, `No advice: ${error.message}.`));
    }
    button.disabled = false;
    button.textContent = "Ask again";
  });
  return (state) => {
    if (!given) return;
    const outdated = changed(state);
    given.calm ||= !outdated;
    if (state.gateway?.in_force?.epoch === given.epoch && !(outdated && given.calm)) return;
    given = null;
    said.classList.add("outdated");
    for (const each of said.querySelectorAll("button")) each.remove();
    said.prepend(h("p", { class: "note alarm" }, "From before the last change: ask again."));
  };
}

const changed = ({ look, what_if_state: about }) => Boolean(look?.outdated || about?.outdated);

/** A capital first, but not in a policy's name. */
const sentence = (text) => (/^[a-z]+[ ,]/.test(text) && !/^(single|dynamic) /.test(text) ? text[0].toUpperCase() + text.slice(1) : text);

/** The rate that it is for, and what the setting in force can serve. */
const rates = (rate) => (rate?.says ?? []).map((words, index) => h("p", { class: "note" }, index ? `${sentence(words)}.` : `For ${words}.`));

const LESS = { queueing_delay: "less delay", sojourn_time: "less sojourn time", time_to_first_token: "less time to first token" };

/** What the advice would bring in the next minutes: traffic and machine move, so it may not show. */
function ahead({ change, next_gain_low: low, next_gain_high: high }) {
  if (!change || low === null || low === undefined) return "";
  const range = `${percent(low)} to ${percent(high)}`;
  return low <= 0 ? ` It cannot be seen here: over the next five minutes the gain may be ${range}.` : ` Over the next five minutes: ${range}.`;
}

function item(advice, use) {
  const { target, gain, says, current, best, compared, change } = advice;
  const sure = current.stable && gain.value !== null && gain.low !== null && gain.low >= 0.005;
  const share = gain.value < 0.995 ? percent(gain.value) : "over 99\u202f%";
  return h("li", {}, h("p", { class: "what" }, h("span", {}, TARGETS[target] ?? target), sure ? h("span", { class: "predicted" }, `${share} ${LESS[compared] ?? "better"}`) : null), h("p", {}, `${sentence(says)}.${ahead(advice)}`), change ? button(target, best, use) : null);
}

/** Where the page has a form for what is advised. */
function button(target, best, use) {
  const servers = target === "servers";
  if (!best?.stable || (servers && use.state.gateway?.resizable !== "replicas")) return null;
  return h("button", { type: "button", class: "quiet", "aria-label": `Use the advised ${(TARGETS[target] ?? target).toLowerCase()}`, onclick: () => (servers ? use.servers(best.servers) : use.setting(best)) }, "Use");
}
