// What each server has in service, a bar a request: tokens so far, the limit where it fits.

import { byId, fill, h, say } from "./dom.js";
import { whole } from "./format.js";

const NUMBERED = 12; // rows that have room for numbers
const MOST_FREE = 48; // free slots that are drawn
const FADE = 0.97; // of the scale, by the second: it falls slowly

export class Batch {
  constructor() {
    this.scale = 1;
  }

  update({ now, gateway }) {
    const servers = now?.servers ?? [];
    const slots = gateway?.in_force?.effective_max_batch_size ?? 0;
    const members = servers.flatMap((server) => server.members);
    const limit = Math.max(1, ...members.map((member) => member[1]));
    const longest = Math.max(1, ...members.map((member) => member[0]));
    this.scale = Math.max(longest, this.scale * FADE, limit <= 4 * Math.max(longest, this.scale) ? limit : 1);
    say(byId("batch-note"), note(servers, slots, gateway));
    const drawn = servers.map((server, index) => this.server(server, slots, servers.length > 1 ? index + 1 : null));
    fill(byId("batch"), ...drawn);
    for (const bar of byId("batch").querySelectorAll(".fill")) bar.style.width = `${(100 * bar.dataset.tokens) / this.scale}%`;
  }

  server({ size, members }, slots, number) {
    const free = Math.max(0, Math.min(slots, MOST_FREE) - members.length);
    const rows = members.length + free;
    const dense = rows > NUMBERED;
    const bars = [...members.map(bar), ...Array.from({ length: free }, () => h("li", { class: "free", "aria-hidden": "true" }, h("span", { class: "track" }), h("span", { class: "of" }, "free")))];
    const more = size > members.length ? h("p", { class: "note" }, `and ${whole(size - members.length)} more`) : null;
    const scale = h("p", { class: dense ? "scale" : "scale beside-numbers", "aria-hidden": "true" }, h("span", {}, "0"), h("span", {}, `${whole(Math.round(this.scale))} tokens`));
    const list = h("ol", { class: dense ? "bars dense" : "bars", "aria-label": `Server ${number ?? 1}: ${size} in service` }, ...bars);
    return h("div", { class: "server" }, number ? h("h3", {}, `Server ${number}`) : null, list, more, rows ? scale : null);
  }
}

function bar([tokens, limit, done]) {
  const said = done ? "done, waits for the batch" : `of ${whole(limit)}`;
  const fillBar = h("span", { class: "fill", "data-tokens": String(tokens) });
  return h("li", { class: done ? "done" : null, "aria-label": `${tokens} tokens, ${said}` },
    h("span", { class: "track" }, fillBar), h("span", { class: "of" }, h("b", {}, whole(tokens)), done ? " done" : ` of ${whole(limit)}`));
}

function note(servers, slots, gateway) {
  const size = servers.reduce((sum, server) => sum + server.size, 0);
  const kind = gateway?.in_force?.padded ? "padded batch: all leave together" : "each leaves when it is done";
  if (!gateway?.in_force) return "Output tokens of each request in service.";
  return `${whole(size)} of ${whole(slots * Math.max(1, servers.length))} places taken, output tokens so far; ${kind}.`;
}
