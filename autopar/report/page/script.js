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
const reveal = () => {
  const found = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!found) return;
  for (let at = found; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  found.scrollIntoView({ block: "center" });
};
window.addEventListener("hashchange", reveal);
reveal();
