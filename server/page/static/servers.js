// Each server of the queue, and how many or which there are. Addresses come with the operator's key.

import { call } from "./admin.js";
import { byId, fill, h, prose } from "./dom.js";
import { NONE, digits, percent, whole } from "./format.js";

const STATES = { serving: "serves", starting: "not there yet", restarting: "is being restarted", busy: "busy", lost: "given up", draining: "ends what it has" };
const BEHIND = { ...STATES, busy: "busy: it refuses calls for now", lost: "does not answer" };
const URLS = /\s+/;

export class Servers {
  constructor() {
    this.known = new Map(); // by id: URL and what was wrong last, once the operator asked
    this.edited = false;
    byId("server-setting").addEventListener("submit", (event) => {
      event.preventDefault();
      this.apply();
    });
    byId("server-setting").addEventListener("input", () => (this.edited = true));
    byId("show-urls").addEventListener("click", () => this.attempt(() => this.learn()));
  }

  update({ servers, gateway }) {
    this.rows = servers ?? [];
    this.kind = gateway?.resizable ?? null;
    byId("servers").hidden = !this.rows.length && !this.kind;
    byId("server-setting").hidden = !this.kind;
    byId("replicas-field").hidden = this.kind !== "replicas";
    byId("urls-field").hidden = this.kind !== "urls";
    byId("show-urls").hidden = this.kind !== "urls";
    byId("apply-servers").hidden = this.kind === "urls" && !this.known.size;
    if (this.kind === "replicas" && !this.edited) byId("replicas").value = this.rows.filter(({ state }) => state !== "draining").length || "";
    this.draw();
  }

  draw() {
    const head = ["Server", "State", "In service", "Busy", "Speed"].map((text, index) => h("th", { scope: "col", class: index > 1 ? "n" : null }, text));
    fill(byId("server-rows"), h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...this.rows.map((each) => this.row(each)))));
  }

  row({ id, state, in_service: size, utilisation, speed }) {
    const { url, fault } = this.known.get(id) ?? {};
    const well = state === "serving";
    return h("tr", {},
      h("th", { scope: "row" }, `Server ${id}`, url ? h("small", {}, ` ${url}`) : null),
      h("td", { class: well ? null : "alarm" }, (this.kind === "urls" ? BEHIND : STATES)[state] ?? state, !well && fault ? h("small", {}, ` ${fault}`) : null),
      h("td", { class: "n" }, whole(size)), h("td", { class: "n" }, percent(utilisation)), h("td", { class: "n" }, speed === null ? NONE : digits(speed)));
  }

  /** Addresses, and what was wrong last. */
  async learn() {
    this.take(await call("GET", "admin/servers"));
    byId("urls").focus();
  }

  take({ servers }) {
    this.known = new Map(servers.map(({ id, url, last_fault: fault }) => [id, { url, fault }]));
    byId("urls").value = servers.filter(({ state }) => state !== "draining").map(({ url }) => url).join("\n");
    byId("apply-servers").hidden = false;
    this.edited = false;
    this.draw();
  }

  async apply() {
    const urls = byId("urls").value.split(URLS).filter(Boolean);
    const wanted = this.kind === "urls" ? { urls } : { replicas: Number(byId("replicas").value) };
    await this.attempt(async () => {
      const found = await call("PUT", "admin/servers", wanted);
      if (this.kind === "urls") this.take(found);
      this.edited = false;
      this.report(`${found.replicas} server${found.replicas === 1 ? " is" : "s are"} to serve: a new one gets work once it answers, a removed one ends what it has.`);
    });
  }

  /** A number of servers, for the operator to look at and put in force. */
  use(count) {
    byId("replicas").value = count;
    this.edited = true;
    byId("servers").scrollIntoView({ block: "start" });
    byId("apply-servers").focus({ preventScroll: true });
    this.report(`${count} servers: not in force yet.`);
  }

  async attempt(work) {
    this.report("");
    try {
      await work();
    } catch (error) {
      this.report(`Not changed: ${error.message}`, true);
    }
  }

  report(text, bad = false) {
    byId("servers-outcome").classList.toggle("bad", bad);
    fill(byId("servers-outcome"), ...prose(text));
  }
}
