// The operator's hands: policy, caps, token limit, patience, autopilot. What is in force fills the form until somebody edits it.

import { call } from "./admin.js";
import { byId, fill, h, say } from "./dom.js";
import { percent } from "./format.js";
import { parsePolicy, policyText, tokenLimit } from "./words.js";

const SIZES = { fixed: "batch_size", capped: "max_batch_size", elastic: "max_batch_size", continuous: "max_batch_size" };
const NAMES = ["single", "dynamic", "fixed", "capped", "elastic", "continuous"];

export class Controls {
  constructor() {
    this.edited = false;
    this.current = null;
    byId("policy-name").append(...NAMES.map((name) => h("option", { value: name }, name)));
    byId("setting").addEventListener("input", () => this.edit());
    byId("setting").addEventListener("submit", (event) => {
      event.preventDefault();
      this.apply();
    });
    byId("reset").addEventListener("click", () => this.show(this.current));
    for (const choice of document.getElementsByName("autopilot")) choice.addEventListener("change", () => this.steer(choice.value));
  }

  update(state) {
    this.state = state;
    const { gateway, autopilot } = state;
    const policy = gateway?.in_force ?? null;
    for (const control of document.querySelectorAll("#setting input, #setting select, #apply, #autopilot input")) control.disabled = !policy || this.busy;
    if (policy && JSON.stringify(policy) !== JSON.stringify(this.current)) {
      this.current = policy;
      if (!this.edited) this.show(policy);
    }
    if (autopilot) this.showAutopilot(autopilot);
  }

  /** Into the form; nothing is in force by that. */
  show(policy) {
    if (!policy) return;
    const { name, keys } = parsePolicy(policy.policy);
    byId("policy-name").value = name;
    byId("size").value = keys[SIZES[name]] ?? "";
    byId("max-wait").value = keys.max_wait ?? "";
    byId("limit").value = policy.max_output_tokens ?? "";
    if ("patience" in policy) byId("patience").value = policy.patience ?? "";
    this.edited = policy !== this.current;
    this.fields();
  }

  /** A row of the what-if table, for the operator to look at and put in force. */
  use(setting) {
    this.show({ policy: setting.policy, max_output_tokens: setting.max_output_tokens });
    byId("controls").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth", block: "center" });
    byId("apply").focus({ preventScroll: true });
    this.report(`${setting.policy}, ${tokenLimit(setting.max_output_tokens)}: not in force yet.`);
  }

  edit() {
    this.edited = true;
    this.fields();
  }

  fields() {
    const name = byId("policy-name").value;
    byId("size-field").hidden = !(name in SIZES);
    byId("size").required = name === "fixed" || name === "capped";
    byId("size").placeholder = byId("size").required ? "" : "no limit";
    byId("wait-field").hidden = name !== "fixed";
    byId("reset").hidden = !this.edited;
  }

  /** What the form says, as the gateway takes it; keys that have no field, such as an order, stay. */
  wanted() {
    const name = byId("policy-name").value;
    const before = parsePolicy(this.current.policy);
    const keys = before.name === name ? { ...before.keys } : before.keys.order ? { order: before.keys.order } : {};
    const put = (key, value) => (value === "" ? delete keys[key] : (keys[key] = value));
    if (name in SIZES) put(SIZES[name], byId("size").value);
    if (name === "fixed") put("max_wait", byId("max-wait").value);
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    return { policy: policyText({ name, keys }), max_output_tokens: number("limit"), patience: number("patience") };
  }

  async apply() {
    await this.attempt(async () => {
      const found = await call("PUT", "admin/policy", this.wanted());
      this.edited = false;
      this.state.gateway.in_force = this.current = found; // the next event, up to a second later, says the same
      this.show(found);
      this.report(`In force: ${found.policy}, ${tokenLimit(found.max_output_tokens)}. Epoch ${found.epoch} has begun.`);
    });
  }

  async steer(mode) {
    await this.attempt(async () => {
      this.state.autopilot = await call("PUT", "admin/autopilot", { mode });
      this.report(`Autopilot: ${mode}.`);
    });
  }

  async calibrate() {
    await this.attempt(async () => {
      await call("POST", "admin/calibrate", {});
      this.report("The engine’s law is measured.");
    });
  }

  async attempt(work) {
    this.busy = true;
    this.report("");
    try {
      await work();
    } catch (error) {
      this.report(`Not changed: ${error.message}`, true);
      this.mode = null; // the radio falls back to what is in force
    }
    this.busy = false;
    if (this.state) this.update(this.state);
  }

  report(text, bad = false) {
    byId("outcome").classList.toggle("bad", bad);
    say(byId("outcome"), text);
  }

  showAutopilot({ mode, bounds, decisions }) {
    if (mode !== this.mode && !this.busy) {
      this.mode = mode;
      for (const choice of document.getElementsByName("autopilot")) choice.checked = choice.value === mode;
    }
    say(byId("bounds"), `May choose ${bounds.policies.join(", ")}; may clip ${percent(bounds.max_clipped_fraction)} of the answers at most.`);
    fill(byId("decisions"), ...[...decisions].reverse().slice(0, 4).map((each) => h("li", {}, h("b", {}, each.kind), each.says.slice(each.kind.length))));
  }
}
