// What each server has in service, a bar a request: tokens so far, the limit where it fits.

import { byId, h, say } from "./dom.js";
import { whole } from "./format.js";

const NUMBERED = 12; // rows that have room for numbers
const MOST_FREE = 48; // free slots that are drawn
const FADE = 0.97; // of the scale, by the second: it falls slowly

export class Batch {
  constructor() {
    this.scale = 1;
    this.drawn = null; // how many rows each server has
  }

  update({ now, gateway, servers: known }) {
    const servers = now?.servers ?? [];
    const slots = gateway?.in_force?.effective_max_batch_size ?? 0;
    this.rescale(servers.flatMap((server) => server.members));
    say(byId("batch-note"), note(servers, slots, gateway));
    const away = (id) => (known ?? []).some((each) => each.id === id && each.state !== "serving");
    const rows = servers.map(({ members }, id) => Math.max(members.length, away(id) ? 0 : Math.min(slots, MOST_FREE)));
    if (this.drawn !== String(rows)) {
      this.drawn = String(rows);
      byId("batch").replaceChildren(...rows.map((count, index) => place(count, rows.length > 1 ? index : null)));
    }
    servers.forEach((server, index) => this.paint(byId("batch").children[index], server));
  }

  /** The longest so far, or the largest limit where that is not far off. */
  rescale(members) {
    const longest = Math.max(1, ...members.map((member) => member[0]));
    const limit = Math.max(1, ...members.map((member) => member[1]));
    const faded = Math.max(longest, this.scale * FADE);
    this.scale = limit <= 4 * faded ? limit : faded;
  }

  paint(host, { size, members }) {
    const list = host.querySelector("ol");
    list.setAttribute("aria-label", `${size} in service, tokens so far`);
    [...list.children].forEach((row, index) => paintRow(row, members[index] ?? null, this.scale));
    say(host.querySelector(".more"), size > members.length ? `and ${whole(size - members.length)} more` : "");
    say(host.querySelector(".most"), `${whole(Math.round(this.scale))} token${Math.round(this.scale) === 1 ? "" : "s"}`);
  }
}

function place(count, number) {
  const dense = count > NUMBERED;
  const row = () => h("li", {}, h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: "fill" })), h("span", { class: "of" }, h("b"), h("span")));
  const scale = h("p", { class: dense ? "scale" : "scale beside-numbers", "aria-hidden": "true" }, h("span", {}, "0"), h("span", { class: "most" }));
  const list = h("ol", { class: dense ? "bars dense" : "bars" }, ...Array.from({ length: count }, row));
  if (!count) return h("div", { class: "server" }, number === null ? null : h("h3", {}, `Server ${number}`), h("ol", { class: "bars" }), h("p", { class: "note more" }), h("p", { class: "note" }, "Takes no work now."), h("span", { class: "most", hidden: true }));
  return h("div", { class: "server" }, number === null ? null : h("h3", {}, `Server ${number}`), list, h("p", { class: "note more" }), scale);
}

function paintRow(row, member, scale) {
  const [tokens, limit, done] = member ?? [0, 0, 0];
  row.className = member === null ? "free" : done ? "done" : "";
  row.querySelector(".fill").style.width = `${Math.min(100, (100 * tokens) / scale)}%`;
  say(row.querySelector("b"), member === null ? "" : whole(tokens));
  say(row.querySelector(".of span"), member === null ? "free" : done ? " done" : ` of ${whole(limit)}`);
}

function note(servers, slots, gateway) {
  if (!gateway?.in_force) return "Output tokens of each request in service.";
  const size = servers.reduce((sum, server) => sum + server.size, 0);
  const kind = gateway.in_force.padded ? "padded batch, all leave together" : "each leaves when it is done";
  return `${whole(size)} of ${whole(slots * gateway.serving)} slots in use; the bars show output tokens so far; ${kind}.`;
}
