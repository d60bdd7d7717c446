"use strict";
const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
const unfold = (open) => all("details").forEach((found) => { found.open = open; });
document.getElementById("unfold").addEventListener("click", () => unfold(true));
document.getElementById("fold").addEventListener("click", () => unfold(false));
let before = [];
window.addEventListener("beforeprint", () => { before = all("details:not([open])"); unfold(true); });
window.addEventListener("afterprint", () => before.forEach((found) => { found.open = false; }));
const counted = document.getElementById("counted");
document.getElementById("filter").addEventListener("input", (event) => {
  const wanted = event.target.value.trim().toLowerCase();
  let shown = 0;
  all(".tree tr[data-name]").forEach((row) => {
    row.hidden = wanted !== "" && !row.dataset.name.toLowerCase().includes(wanted);
    shown += row.hidden ? 0 : 1;
  });
  all(".tree details").reverse().forEach((found) => {
    found.hidden = wanted !== "" && !found.querySelector("tr[data-name]:not([hidden])");
    if (wanted !== "" && !found.hidden) found.open = true;
  });
  counted.textContent = wanted === "" ? "" : shown + " rows";
});
all("button[data-zoom]").forEach((button) => button.addEventListener("click", () => {
  const factor = Number(button.dataset.zoom);
  all(".wide svg").forEach((drawn) => {
    const [, , w, h] = drawn.getAttribute("viewBox").split(" ").map(Number);
    const width = factor ? drawn.getBoundingClientRect().width * factor : w;
    drawn.setAttribute("width", width);
    drawn.setAttribute("height", width * h / w);
  });
}));
const scales = { us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, "%": 0.01, KiB: 1024, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
const value = (cell) => {
  const [, number, unit] = cell.textContent.trim().match(/^([-+]?[\d.,]+(?:e[-+]?\d+)?)\s*(\S*)/) || [];
  return number === undefined ? cell.textContent : Number(number.replaceAll(",", "")) * (scales[unit] || 1);
};
const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
const sorted = (header, column) => {
  const table = header.closest("table");
  const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  all("th", table).forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const body = table.tBodies[0];
  body.append(...all("tr", body).sort((a, b) => sign * order(value(a.cells[column]), value(b.cells[column]))));
};
all("thead tr").forEach((row) => all("th", row).forEach((header, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "sort";
  button.textContent = header.textContent;
  button.addEventListener("click", () => sorted(header, column));
  header.replaceChildren(button);
}));
const reveal = () => {
  const found = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!found) return;
  for (let at = found; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  found.scrollIntoView({ block: "center" });
};
window.addEventListener("hashchange", reveal);
reveal();
