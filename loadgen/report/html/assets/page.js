"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const asked = new URLSearchParams(location.search).get("theme");
  if (asked === "light" || asked === "dark") document.documentElement.dataset.theme = asked;
  const paper = matchMedia("print"), night = matchMedia("(prefers-color-scheme: dark)");
  const PAPER_WIDTH = 695;  // A4 between its margins, CSS pixels

  // "$name" is the page's colour --name.
  const coloured = (value, style) => {
    if (typeof value === "string") return value === "$none" ? "rgba(0,0,0,0)" : value[0] === "$" ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    if (Array.isArray(value)) return value.map((one) => coloured(one, style));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, coloured(one, style)]));
    return value;
  };

  const draw = (width) => {
    const style = getComputedStyle(document.documentElement);
    for (const figure of figures) {
      const place = document.getElementById("figure-" + figure.name);
      const { data, layout } = coloured({ data: figure.data, layout: figure.layout }, style);
      if (width) { layout.width = width; layout.height = Math.round(0.74 * layout.height) + 26; layout.margin.t += 26; place.style.minWidth = "0"; } else { layout.autosize = true; place.style.minWidth = figure.minWidth + "px"; }
      Plotly.react(place, data, layout, { responsive: !width, displayModeBar: false });
    }
    document.documentElement.dataset.drawn = String(figures.length);
  };

  const onPaper = (printing) => {
    const before = document.documentElement.dataset.theme;
    if (printing) { document.documentElement.dataset.screen = before || ""; document.documentElement.dataset.theme = "light"; draw(PAPER_WIDTH); }
    else { const theme = document.documentElement.dataset.screen; if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme; draw(); }
  };

  const number = (cell) => { const given = cell.dataset.value; return given === undefined || given === "" ? NaN : Number(given); };
  const sortBy = (table, column, header) => {
    const up = header.getAttribute("aria-sort") !== "ascending";
    const rows = [...table.tBodies[0].rows];
    const sign = up ? 1 : -1;
    rows.sort((one, other) => {
      const a = one.cells[column], b = other.cells[column];
      const x = number(a), y = number(b);
      if (isNaN(x) && isNaN(y)) return sign * a.textContent.localeCompare(b.textContent);
      return isNaN(x) ? 1 : isNaN(y) ? -1 : sign * (x - y);
    });
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      header.tabIndex = 0;
      header.addEventListener("click", () => sortBy(table, column, header));
      header.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sortBy(table, column, header); } });
    });
  }

  for (const button of document.querySelectorAll("button.save")) {
    const name = button.dataset.figure;
    button.addEventListener("click", () => Plotly.downloadImage(document.getElementById("figure-" + name), { format: "svg", filename: "kendall-" + name }));
  }

  if (location.hash === "#paper" || paper.matches) onPaper(true); else draw();
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
  night.addEventListener("change", () => draw());
})();
