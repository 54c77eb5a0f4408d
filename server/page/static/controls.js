// The operator's controls: policy, caps, token limit, patience, autopilot. The setting in force fills the form until it is edited.

import { AWAY, call } from "./admin.js";
import { byId, fill, h, prose, say } from "./dom.js";
import { percent } from "./format.js";
import { parsePolicy, policyText, settingText } from "./words.js";

export class Controls {
  constructor() {
    this.edited = false;
    this.current = null;
    this.chosen = null; // the autopilot's mode that is not in force yet
    this.policies = []; // that the gateway knows, with their parameters
    byId("setting").addEventListener("input", () => this.edit());
    byId("setting").addEventListener("submit", (event) => {
      event.preventDefault();
      this.apply();
    });
    byId("reset").addEventListener("click", () => this.reset());
    for (const choice of document.getElementsByName("autopilot")) choice.addEventListener("change", () => this.choose(choice.value));
    byId("steer").addEventListener("click", () => this.steer());
    byId("to-controls").addEventListener("click", () => this.reveal(byId("policy-name")));
  }

  update(state) {
    this.state = state;
    const { gateway, autopilot } = state;
    const policy = gateway?.in_force ?? null;
    this.list(gateway?.policies ?? []);
    for (const control of document.querySelectorAll("#setting input, #setting select, #apply, #autopilot input, #to-controls")) control.disabled = !policy || this.busy;
    if (policy && JSON.stringify(policy) !== JSON.stringify(this.current)) {
      this.current = policy;
      if (!this.edited) this.show(policy);
      byId("size").max = state.gateway.max_num_seqs;
    }
    if (autopilot) this.showAutopilot(autopilot);
  }

  /** The policies to choose from; the choice stays. */
  list(policies) {
    if (JSON.stringify(policies) === JSON.stringify(this.policies)) return;
    this.policies = policies;
    const chosen = byId("policy-name").value;
    fill(byId("policy-name"), ...policies.map(({ name }) => h("option", { value: name }, name)));
    if (chosen) byId("policy-name").value = chosen;
  }

  parameters(name) {
    return this.policies.find((policy) => policy.name === name)?.parameters ?? [];
  }

  /** The parameter that is the batch size; none of a policy without one. */
  size(name) {
    return this.parameters(name).find((parameter) => parameter.size);
  }

  /** The orders of service that a policy can serve, as the gateway lists them. */
  orders(name) {
    return this.policies.find((policy) => policy.name === name)?.orders ?? [];
  }

  /** The order without which nothing is said: that of arrival. */
  usualOrder(name) {
    return this.parameters(name).find((parameter) => parameter.name === "order")?.default;
  }

  /** Keys of a text that say an order, of whichever policy: one that serves batches has the parameters of all. */
  orderKeys() {
    const orders = this.policies.flatMap((policy) => policy.orders ?? []);
    return ["order", ...orders.flatMap((order) => order.parameters.map((parameter) => parameter.name))];
  }

  /** Parameters that have no field of their own in the page. */
  others(name) {
    const ofOrders = this.orders(name).length ? this.orderKeys() : [];
    return this.parameters(name).filter((parameter) => !parameter.size && parameter.name !== "max_wait" && !ofOrders.includes(parameter.name));
  }

  /** Into the form; nothing is in force by that. */
  show(policy) {
    if (!policy) return;
    const { name, keys } = parsePolicy(policy.policy);
    byId("policy-name").value = name;
    byId("size").value = keys[this.size(name)?.name] ?? "";
    byId("max-wait").value = keys.max_wait ?? "";
    this.offer(name, keys);
    byId("limit").value = policy.max_output_tokens ?? "";
    if ("patience" in policy) byId("patience").value = policy.patience ?? "";
    this.edited = policy !== this.current;
    this.fields();
  }

  /** A row of the what-if table, for the operator to look at and put in force. */
  use(setting) {
    this.show({ policy: setting.policy, max_output_tokens: setting.max_output_tokens });
    this.reveal(byId("apply"));
    this.report(`${settingText(setting)}: not in force yet.`);
  }

  reset() {
    this.show(this.current);
    this.report("");
    byId("policy-name").focus(); // the button itself is hidden now
  }

  reveal(control) {
    byId("controls").scrollIntoView({ block: "start" }); // at once: a smooth scroll is dropped where the page grows meanwhile
    control.focus({ preventScroll: true });
  }

  edit() {
    this.edited = true;
    this.fields();
  }

  fields() {
    const name = byId("policy-name").value;
    const size = this.size(name);
    byId("size-field").hidden = !size;
    byId("size").required = Boolean(size?.required);
    byId("size").placeholder = size?.required ? "" : String(size?.default ?? "no limit");
    byId("wait-field").hidden = !this.parameters(name).some((parameter) => parameter.name === "max_wait");
    if (this.offered !== name) this.offer(name, { order: byId("order").value });
    else if (this.ordered !== byId("order").value) this.offerOrder(name, {});
    byId("reset").hidden = !this.edited;
  }

  /** The orders that the policy serves, and a field for each further parameter: the route, and those of policies from outside. */
  offer(name, keys) {
    this.offered = name;
    const orders = this.orders(name);
    byId("order-field").hidden = !orders.length;
    fill(byId("order"), ...orders.map((order) => h("option", { value: order.name }, order.name)));
    const served = orders.some((order) => order.name === keys.order);
    byId("order").value = served ? keys.order : (this.usualOrder(name) ?? "");
    this.offerOrder(name, served ? keys : {});
    byId("parameters").replaceChildren(...this.others(name).map((parameter) => this.labelled(parameter, keys)));
  }

  /** A field for each parameter of the order that is chosen. */
  offerOrder(name, keys) {
    this.ordered = byId("order").value;
    byId("order-parameters").replaceChildren(...this.orderParameters(name).map((parameter) => this.labelled(parameter, keys)));
  }

  orderParameters(name) {
    return this.orders(name).find((order) => order.name === byId("order").value)?.parameters ?? [];
  }

  labelled(parameter, keys) {
    return h("label", {}, `${parameter.name.replaceAll("_", " ")} `, this.field(parameter, keys[parameter.name]));
  }

  field({ name, kind, required, default: usual, choices = [] }, value = "") {
    const id = `parameter-${name}`;
    const known = kind === "boolean" ? ["true", "false"] : choices;
    if (known.length) {
      const options = [...(required ? [] : [""]), ...known].map((each) => h("option", { value: each }, each || `default (${usual})`));
      const select = h("select", { id }, ...options);
      select.value = value || (required ? known[0] : "");
      return select;
    }
    const number = kind === "text" ? { type: "text" } : { type: "number", step: kind === "integer" ? "1" : "any" };
    const input = h("input", { id, placeholder: required ? "" : String(usual ?? "none"), ...number });
    input.required = required;
    input.value = value;
    return input;
  }

  /** What the form says, as the gateway takes it. */
  wanted() {
    const name = byId("policy-name").value;
    const before = parsePolicy(this.current.policy);
    const keys = before.name === name ? { ...before.keys } : {};
    const put = (key, value) => (value === "" ? delete keys[key] : (keys[key] = value));
    const size = this.size(name);
    if (size) put(size.name, byId("size").value);
    if (this.parameters(name).some((parameter) => parameter.name === "max_wait")) put("max_wait", byId("max-wait").value);
    for (const parameter of this.others(name)) put(parameter.name, byId(`parameter-${parameter.name}`).value);
    if (this.orders(name).length) {
      for (const key of this.orderKeys()) delete keys[key];
      const order = byId("order").value;
      if (order !== this.usualOrder(name)) put("order", order);
      for (const parameter of this.orderParameters(name)) put(parameter.name, byId(`parameter-${parameter.name}`).value);
    }
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    return { policy: policyText({ name, keys }), max_output_tokens: number("limit"), patience: number("patience") };
  }

  async apply() {
    const fault = this.fault();
    for (const input of document.querySelectorAll("#setting input")) input.setAttribute("aria-invalid", String(fault?.input === input));
    if (fault) {
      fault.input.focus();
      this.report(`Not changed: ${fault.says}`, true);
      return;
    }
    await this.attempt(async () => {
      const before = this.current;
      const found = await call("PUT", "admin/policy", this.wanted());
      this.edited = false;
      this.state.gateway.in_force = this.current = found; // the next event, up to a second later, says the same
      this.show(found);
      this.report(JSON.stringify(found) === JSON.stringify(before) ? `Nothing to change: ${settingText(found)} is in force.` : `In force: ${settingText(found)}. Epoch ${found.epoch} has begun.`);
    });
  }

  /** The first field that the gateway would refuse, or that asks for more than the engine holds. */
  fault() {
    const most = this.state.gateway.max_num_seqs;
    const size = byId("size");
    for (const input of document.querySelectorAll("#setting input")) {
      if (input.closest("[hidden]")) continue;
      const name = input.closest("label").firstChild.textContent.trim().toLowerCase();
      const { badInput, valueMissing, stepMismatch, rangeUnderflow } = input.validity;
      if (badInput) return { input, says: `the ${name} is not a number` };
      const other = input.closest("#parameters, #order-parameters");
      if (valueMissing) return { input, says: `the ${name} is missing${other ? "" : `; expected 1 to ${most}`}` };
      const whole = other ? "a whole number" : "a whole number, 1 or more";
      const expected = input.step === "any" ? "a number of seconds above 0" : whole;
      const none = input.id === "patience" && input.value !== "" && Number(input.value) <= 0;
      if (stepMismatch || rangeUnderflow || none) return { input, says: `got a ${name} of ${input.value}; expected ${expected}` };
    }
    const asked = Number(size.value);
    const unchanged = this.wanted().policy === this.current.policy; // the gateway took it: it holds as many as the engine can
    if (!size.closest("[hidden]") && asked > most && !unchanged) return { input: size, says: `got a batch size of ${asked}; this engine holds at most ${most} requests at once (--max-num-seqs)` };
    return null;
  }

  /** A chosen mode waits for the button, as a chosen policy does. */
  choose(mode) {
    this.chosen = mode;
    this.showSteering();
  }

  async steer() {
    const mode = this.chosen;
    await this.attempt(async () => {
      this.state.autopilot = await call("PUT", "admin/autopilot", { mode });
      this.report(`Autopilot: ${mode}.`);
    });
    this.chosen = null;
    this.update(this.state);
  }

  async calibrate() {
    await this.attempt(async () => {
      await call("POST", "admin/calibrate", {});
      this.report("The engine’s latency law is measured.");
    });
  }

  async attempt(work) {
    const control = document.activeElement;
    this.busy = true;
    this.report("");
    try {
      await work();
    } catch (error) {
      this.report(`Not changed: ${error.message}`, true);
    }
    this.busy = false;
    if (this.state) this.update(this.state);
    const focused = document.activeElement;
    if (focused === document.body || focused.disabled || byId("key").contains(focused)) control.focus(); // it was disabled meanwhile, or the dialog had the focus
  }

  /** The gateway answers again: that it did not is no longer true. */
  reconnected() {
    if (byId("outcome").textContent === `Not changed: ${AWAY}`) this.report("");
  }

  report(text, bad = false) {
    byId("outcome").classList.toggle("bad", bad);
    fill(byId("outcome"), ...prose(text));
  }

  showAutopilot({ bounds, decisions }) {
    this.showSteering();
    say(byId("bounds"), `With “Act” the gateway changes the setting automatically: policy ${bounds.policies.join(" or ")}, and a token limit that clips at most ${percent(bounds.max_clipped_fraction)} of the answers.`);
    fill(byId("decisions"), ...[...decisions].reverse().slice(0, 4).map((each) => h("li", {}, h("b", {}, each.kind), each.says.slice(each.kind.length))));
  }

  showSteering() {
    const { mode } = this.state.autopilot;
    if (this.chosen === mode) this.chosen = null;
    for (const choice of document.getElementsByName("autopilot")) choice.checked = choice.value === (this.chosen ?? mode);
    byId("steer").hidden = !this.chosen;
    byId("steer").disabled = this.busy;
  }
}
