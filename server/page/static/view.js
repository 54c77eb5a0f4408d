// What the charts over time show: the window, or a zoomed part of it. Kept in the address, so that a link shows the same.

import { byId } from "./dom.js";

const WINDOWS = [300, 900, 7200]; // seconds
const SHORTEST = 5; // seconds of a zoom
const LONGEST = WINDOWS.at(-1) + 2; // its ends are whole seconds

export class View {
  constructor(changed) {
    this.changed = changed;
    Object.assign(this, { seconds: WINDOWS[0], zoom: null });
    this.read();
    for (const choice of document.querySelectorAll("[name=range]")) choice.addEventListener("change", () => this.choose(Number(choice.value)));
    byId("unzoom").addEventListener("click", () => this.zoomTo(null));
    addEventListener("zoom", ({ detail }) => this.zoomTo(detail));
    addEventListener("hashchange", () => {
      this.read();
      this.changed();
    });
  }

  /** From the address; what it does not say, or says wrong, is as at the start. A place of the page, such as `#verdict`, changes nothing. */
  read() {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (location.hash && ![...asked.keys()].some((name) => ["window", "zoom"].includes(name))) {
      this.show();
      return;
    }
    const [start, end] = (asked.get("zoom") ?? "").split("-").map(Number);
    this.seconds = WINDOWS.find((each) => each === Number(asked.get("window"))) ?? WINDOWS[0];
    this.zoom = end - start >= SHORTEST && end - start <= LONGEST ? { start, end } : null;
    this.show();
  }

  choose(seconds) {
    Object.assign(this, { seconds, zoom: null });
    this.write();
  }

  /** `{start, end}` in Unix time; null shows the whole window again. */
  zoomTo(part) {
    if (part && part.end - part.start < SHORTEST) return;
    this.zoom = part && { start: Math.floor(part.start), end: Math.ceil(part.end) };
    this.write();
  }

  write() {
    const said = new URLSearchParams();
    if (this.seconds !== WINDOWS[0]) said.set("window", this.seconds);
    if (this.zoom) said.set("zoom", `${this.zoom.start}-${this.zoom.end}`);
    const hash = said.toString();
    window.history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    this.show();
    this.changed();
  }

  show() {
    for (const choice of document.getElementsByName("range")) choice.checked = Number(choice.value) === this.seconds;
    byId("unzoom").hidden = !this.zoom;
  }
}
