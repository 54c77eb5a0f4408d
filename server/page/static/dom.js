// Elements without markup in strings: what comes from the gateway is always text.

export const byId = (id) => document.getElementById(id);

/** An element; `properties` are set as properties, `class` and `aria-*` as attributes; strings become text. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class" || name.includes("-") || name === "role" || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** An element of a picture. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Touches the element only where its text differs: a reader's selection stays, and nothing is announced twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Text in which no option such as `--prediction-interval` is broken at a hyphen. */
export const prose = (text) => text.split(/((?<![\w-])--[a-z][a-z-]*[a-z])/).map((part, index) => (index % 2 ? h("span", { class: "flag" }, part) : part));

/** Makes `element` hold `children`, unless they would look the same: focus and selection stay. */
export function fill(element, ...children) {
  const next = h("div", {}, ...children);
  if (element.innerHTML !== next.innerHTML) element.replaceChildren(...next.childNodes);
}

/** A slider of how many times as many requests as now there are; `rests` is told where it is let go. */
export function rateSlider(id, rests = () => {}) {
  const input = h("input", { id, type: "range", min: "0.25", max: "3", step: "0.05", value: "1" });
  const said = h("output", { htmlFor: id });
  const label = () => say(said, input.value === "1" ? "as many as now" : `${input.value} times as many as now`);
  input.addEventListener("input", label);
  input.addEventListener("change", () => rests(input.value));
  label();
  return h("label", {}, "Requests", input, said);
}
