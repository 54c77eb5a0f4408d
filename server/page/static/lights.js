// Assumptions and self-checks: a shape, a word and a sentence each. Colour only repeats what they say.

import { byId, fill, h, say, svg } from "./dom.js";
import { digits, percent, whole } from "./format.js";
import { ASSUMPTIONS, CHECKS, titleOf } from "./words.js";

const WORDS = { holds: "holds", fails: "fails", unknown: "cannot tell" };

export function updateLights(state) {
  const { look, checks, gateway } = state;
  updateLengths(state.length_predictor);
  const found = look?.prediction?.comparison.assumptions ?? {};
  const names = [...new Set([...Object.keys(ASSUMPTIONS), ...Object.keys(found)])];
  const known = names.map((name) => ({ title: titleOf(name), ...found[name] })).filter(isJudged);
  const rows = known.filter(({ holds }) => holds !== true).map(({ title, holds, says }) => light(title, holds, says));
  const holding = known.filter(({ holds }) => holds === true);
  if (holding.length) rows.push(fold(holding, rows.length));
  fill(byId("assumptions"), ...(rows.length ? rows : [light("Assumptions", null, "no prediction yet")]));
  byId("assumptions").classList.toggle("outdated", Boolean(look?.outdated));
  say(byId("assumptions-age"), look?.outdated ? "From before the arrival rate changed." : "");
  const laws = (checks ?? []).map((check) => light(CHECKS[check.name] ?? check.name, check.holds, `${digits(check.by_counters)} from counters, ${digits(check.by_records)} from records`));
  const empty = gateway?.looks === false ? "Off: the live prediction is switched off." : "Evaluated every few seconds once the engine is ready.";
  fill(byId("checks"), ...(laws.length ? laws : [h("li", {}, h("span"), h("span", { class: "detail" }, empty))]));
}

/** How good the gateway's own predictions of output lengths are. */
function updateLengths(quality) {
  byId("lengths").hidden = !quality;
  if (!quality) return;
  const { predictor, version, answers, rank_correlation: ranks, interval_coverage: covered, bias_ratio: bias, over_fraction: over, under_fraction: under } = quality;
  const model = predictor === "learned" ? `, version ${whole(version)}` : "";
  say(byId("lengths-note"), `By ${predictor}${model}; judged on the last ${whole(answers)} answers that no limit cut.`);
  const within = covered === null ? [] : [light("90 % interval", covered >= 0.86 && covered <= 0.94, `${percent(covered)} of the lengths within it, expected 86 % to 94 %`)];
  const rows = ranks === null ? [light("Rank correlation", null, "too few answers, or all alike")] : [light("Rank correlation", ranks > 0, `${digits(ranks)} of predicted and actual lengths; 0 is chance`), ...within];
  if (bias !== null) rows.push(light("Size", bias >= 0.8 && bias <= 1.25, `${digits(bias)} times the length in the geometric mean; ${percent(over)} above twice of it, ${percent(under)} below half`));
  fill(byId("lengths-quality"), ...rows);
}

/** Not those of other policies and other calls. */
const isJudged = ({ holds, applies }) => holds !== undefined && applies !== false;

/** What holds is one line, which shows each of them. */
function fold(holding, others) {
  const all = `All ${holding.length} that apply hold`;
  const rest = holding.length === 1 ? "The other one holds" : `The other ${holding.length} hold`;
  const list = h("ul", { class: "lights" }, ...holding.map(({ title, holds, says }) => light(title, holds, says)));
  const { open = false } = byId("assumptions").querySelector("details") ?? {};
  return h("li", { class: "holds fold" }, shape("holds"), h("details", { open }, h("summary", { class: "what" }, others ? rest : all), list));
}

function light(title, holds, says) {
  const state = holds === true ? "holds" : holds === false ? "fails" : "unknown";
  return h("li", { class: state }, shape(state), h("span", { class: "what" }, title), h("span", { class: "state" }, WORDS[state]), h("span", { class: "detail" }, says));
}

function shape(state) {
  const picture = svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true", focusable: "false" });
  if (state === "holds") picture.append(svg("circle", { class: "disc", cx: 8, cy: 8, r: 7.5 }), svg("path", { class: "tick", d: "M4.8 8.3l2.2 2.2 4.3-4.6" }));
  else if (state === "fails") picture.append(svg("path", { class: "triangle", d: "M8 .8l7.6 14H.4z" }), svg("path", { class: "stroke", d: "M8 6v4.2M8 12.4v.1" }));
  else picture.append(svg("circle", { class: "ring", cx: 8, cy: 8, r: 6.8 }));
  return picture;
}
