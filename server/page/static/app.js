// The page: events from the gateway into one state, the state onto the page, once for each second's events.

import { askForKey, headers, watchKey } from "./admin.js";
import { setUpAdvice } from "./advice.js";
import { Batch } from "./batch.js";
import { Controls } from "./controls.js";
import { Delays } from "./delays.js";
import { Distribution } from "./distribution.js";
import { byId, say } from "./dom.js";
import { clock, unitOfComparison } from "./format.js";
import { History } from "./history.js";
import { updateLights } from "./lights.js";
import { updateNow } from "./now.js";
import { Servers } from "./servers.js";
import { Small } from "./small.js";
import { follow } from "./stream.js";
import { updateVerdict } from "./verdict.js";
import { View } from "./view.js";
import { setUpWhatIf, updateBalancer, updateWhatIf } from "./whatif.js";
import { changes, limits, policyWords } from "./words.js";

const LINKS = { connecting: "Connecting", live: "Live", lost: "Reconnecting" };
const state = { link: "connecting", refused: null, history: new History(), columns: [], marks: [], unit: "ms", restarts: [], past: [] };

await document.fonts.load("12px Inter").catch(() => null);
const charts = [new Delays(), new Distribution(), new Small(), new Batch()];
const controls = new Controls();
const servers = new Servers();
const ageAdvice = setUpAdvice({ setting: (each) => controls.use(each), servers: (count) => servers.use(count), state });
setUpWhatIf(state, draw);
watchKey();
state.view = new View(() => draw());
addEventListener("visibilitychange", draw);

let due = null;
function draw() {
  if (due !== null || document.hidden) return;
  due = setTimeout(() => {
    due = null;
    document.body.dataset.link = state.link;
    say(byId("link"), LINKS[state.link]);
    say(byId("bar-policy"), inForce(state.gateway?.in_force));
    say(byId("as-of"), state.live ? `As of ${state.live}` : "");
    if (state.look?.prediction) state.unit = unitOfComparison(state.look.prediction.comparison);
    updateVerdict(state, { calibrate: () => controls.calibrate(), key: () => state.unlock?.() });
    updateNow(state);
    state.marks = marks();
    for (const chart of charts) chart.update(state);
    updateWhatIf(state, (setting) => controls.use(setting));
    updateBalancer(state);
    updateLights(state);
    controls.update(state);
    servers.update(state);
    ageAdvice(state);
    document.body.dataset.ready = "true";
  }, 0);
}

const inForce = (policy) => (policy ? `${policyWords(policy.policy)} · ${limits(policy).join(" · ")}` : "");

/** Switches of the gateway's life and of those before it that this page saw, and its restarts. */
function marks() {
  const switches = [...state.past, ...(state.switches ?? [])];
  const said = switches.map((each, place) => ({ first: each.first, at: each.at, label: each.restarted ? (state.gateway?.resizable === "urls" ? "servers answer again" : "engine restarted") : changes(each, switches[place - 1]) }));
  return [...said.filter((each) => !each.first), ...state.restarts.map((at) => ({ at, label: "gateway restarted" }))].sort((a, b) => a.at - b.at);
}

function greeted(hello) {
  if (state.hello && hello.page !== state.hello.page) location.reload(); // another version of Kendall
  if (state.hello && hello.born !== state.hello.born) {
    state.restarts.push(hello.born);
    state.past.push(...(state.switches ?? []));
    Object.assign(state, { switches: [], look: null, what_if: [], what_if_in_force: null, what_if_state: null, load_balancer: null, servers: [], checks: [], length_predictor: null, autopilot: null, distribution: null, pairs: null });
  }
  state.hello = hello;
  state.columns = hello.columns;
  state.history.columns = hello.columns;
}

async function refill() {
  try {
    const answer = await fetch("live/history", { headers: headers(), cache: "no-store" });
    if (answer.ok) state.history.merge(await answer.json());
  } catch {
    // the stream says that the gateway is away
  }
  draw();
}

follow("live/events", headers, {
  open() {
    Object.assign(state, { link: "live", refused: null });
    controls.reconnected();
    refill();
  },
  lost() {
    state.link = "lost";
    draw();
  },
  async refused(_, why) {
    Object.assign(state, { link: "lost", refused: why });
    draw();
    if (!(await askForKey(why))) await new Promise((resolve) => (state.unlock = resolve)); // the verdict has a button
  },
  event(name, value) {
    if (name === "hello") greeted(value);
    else state[name] = value;
    if (name === "now") {
      state.live = clock(value.row[0]);
      if (state.gateway?.in_force) state.history.add(value.row);
    }
    draw();
  },
});
draw();
