"use strict";
const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));

// The view stands behind the section in the address, as in #time?find=mlp&from=0.2&to=0.3&sort=4.2.up
const view = new URLSearchParams();
const anchor = () => decodeURIComponent(location.hash.slice(1).split("?")[0]);
const remember = (changes, at = anchor()) => {
  Object.entries(changes).forEach(([name, value]) => (value === "" ? view.delete(name) : view.set(name, value)));
  history.replaceState(null, "", "#" + at + (view.size ? "?" + view : ""));
};

const unfold = (open) => all("details").forEach((folded) => { folded.open = open; });
document.getElementById("unfold").addEventListener("click", () => unfold(true));
document.getElementById("fold").addEventListener("click", () => unfold(false));
let before = [];
window.addEventListener("beforeprint", () => { before = all("details:not([open])"); unfold(true); });
window.addEventListener("afterprint", () => before.forEach((folded) => { folded.open = false; }));

// A row of equal layers is called h.{0..11}/mlp; the names of each of them lead to it, too.
const holds = (numbers, one) => numbers.split(",").some((part) => {
  const [first, last = first] = part.split("..").map(Number);
  return first <= one && one <= last;
});
const spelled = (name, numbers) => {
  const braces = name.match(/\{([\d.,]*)\}/);
  if (!braces) return [name];
  const start = name.slice(0, braces.index);
  const choices = [braces[0], ...numbers.filter((one) => holds(braces[1], Number(one)))];
  return spelled(name.slice(braces.index + braces[0].length), numbers).flatMap((rest) => choices.map((choice) => start + choice + rest));
};
const matcher = (wanted) => {
  const numbers = Array.from(new Set(wanted.match(/\d+/g) || [])).slice(0, 4);
  return (name) => spelled(name.toLowerCase(), numbers).some((said) => said.includes(wanted));
};
let wanted = "";
const find = (said) => {
  wanted = said.trim().toLowerCase();
  const matches = matcher(wanted);
  all("input.find").forEach((input) => { if (input.value !== said) input.value = said; });
  const rows = all(".tree tr[data-name]");
  rows.forEach((row) => { row.hidden = wanted !== "" && !matches(row.dataset.name); });
  all(".tree details").reverse().forEach((folded) => {
    folded.hidden = wanted !== "" && !folded.querySelector("tr[data-name]:not([hidden])");
    if (wanted !== "" && !folded.hidden) folded.open = true;
  });
  const boxes = all("#model svg a");
  boxes.forEach((box) => {
    const named = wanted !== "" && box.dataset.names.split("\n").some(matches);
    box.classList.toggle("named", named);
    box.classList.toggle("other", wanted !== "" && !named);
  });
  const say = (section, count, what) => all(`#${section} .counted`).forEach((counted) => { counted.textContent = wanted === "" ? "" : count + what; });
  say("operators", rows.filter((row) => !row.hidden).length, " rows");
  say("model", boxes.filter((box) => box.classList.contains("named")).length, " boxes");
};
all("input.find").forEach((input) => {
  input.addEventListener("input", () => {
    find(input.value);
    remember({ find: wanted }, input.closest("section").id);
  });
  input.addEventListener("keydown", (event) => {
    const first = event.key === "Enter" && input.closest("section").querySelector("a.named");
    if (first) first.focus();
  });
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
const tables = all("table");
const sort = (table, column, direction) => {
  const header = all("th", table)[column];
  if (!header) return;
  all("th", table).forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", direction === "up" ? "ascending" : "descending");
  const body = table.tBodies[0];
  const sign = direction === "up" ? 1 : -1;
  body.append(...all("tr", body).sort((a, b) => sign * order(value(a.cells[column]), value(b.cells[column]))));
};
tables.forEach((table, place) => all("thead th", table).forEach((header, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "sort";
  button.textContent = header.textContent;
  button.addEventListener("click", () => {
    const direction = header.getAttribute("aria-sort") === "ascending" ? "down" : "up";
    sort(table, column, direction);
    const others = (view.get("sort") || "").split(",").filter((one) => one && !one.startsWith(place + "."));
    remember({ sort: [...others, [place, column, direction].join(".")].join(",") }, table.closest("section").id);
  });
  header.replaceChildren(button);
}));

const seconds = (time) => {
  const [unit, scale] = [["s", 1], ["ms", 1e-3], ["us", 1e-6]].find(([, least]) => time >= least) || ["ns", 1e-9];
  return Number((time / scale).toPrecision(4)) + " " + unit;
};
const UNITS = 1e7;
const LETTER = 6.5;
const NARROWEST = 1e-6;
const zoomed = (played) => {
  const svg = played.closest("svg");
  const [left, room] = played.dataset.room.split(" ").map(Number);
  const whole = Number(played.dataset.seconds);
  const kinds = played.dataset.kinds.split(" ");
  let read;
  const lanes = () => {
    const names = played.dataset.names.split("\n");
    read = read || all(".lane", played).map((lane) => {
      let at = 0;
      return { lane, spans: lane.dataset.spans.split(";").filter(Boolean).map((written) => {
        const [gap, length, kind, name] = written.split(",").map(Number);
        const start = (at + gap) / UNITS;
        at += gap + length;
        return { start, end: at / UNITS, kind, name: names[name] };
      }) };
    });
    return read;
  };
  let [from, to] = [0, 1];
  const shape = (tag, attributes, said) => {
    const made = document.createElementNS(svg.namespaceURI, tag);
    Object.entries(attributes).forEach(([name, held]) => made.setAttribute(name, held));
    if (said !== undefined) made.textContent = said;
    return made;
  };
  const at = (time) => left + Math.min(Math.max((time - from) / (to - from), 0), 1) * room;
  const drawn = (span, top, matches) => {
    const x = at(span.start);
    const width = Math.max(at(span.end) - x, 0.3);
    const box = shape("rect", { x, y: top + 2, width, height: 20, fill: kinds[span.kind] });
    if (width > 3) box.setAttribute("stroke", "#fff");
    box.append(shape("title", {}, `${span.name}: ${seconds((span.end - span.start) * whole)} from ${seconds(span.start * whole)}`));
    if (wanted !== "" && matches(span.name)) box.setAttribute("class", "named");
    const letters = Math.floor(width / LETTER) - 1;
    if (letters < 4) return [box];
    const said = span.name.length > letters ? "…" + span.name.slice(1 - letters) : span.name;
    return [box, shape("text", { x: x + width / 2, y: top + 16, "text-anchor": "middle", class: "over" }, said)];
  };
  const draw = () => {
    const matches = matcher(wanted);
    const visible = 0.5 * (to - from) / room;
    lanes().forEach(({ lane, spans }) => {
      const shown = [];
      spans.filter((span) => span.end >= from && span.start <= to).forEach((span) => {
        const last = shown.at(-1);
        // Neighbours of one kind that are too short to see are drawn as one.
        if (last && last.kind === span.kind && span.end - last.start < visible) last.end = span.end;
        else shown.push({ ...span });
      });
      lane.replaceChildren(...shown.flatMap((span) => drawn(span, Number(lane.dataset.top), matches)));
    });
    all(".ticks text", played).forEach((tick, place, ticks) => {
      tick.textContent = seconds((from + (to - from) * place / (ticks.length - 1)) * whole);
    });
    state.textContent = `${seconds(from * whole)} to ${seconds(to * whole)} of ${seconds(whole)}`;
  };
  const show = (start, end) => {
    const width = Math.min(Math.max(end - start, NARROWEST), 1);
    from = Math.min(Math.max(start, 0), 1 - width);
    to = from + width;
    draw();
  };
  const go = (start, end) => {
    show(start, end);
    remember(to - from < 1 ? { from: from.toPrecision(7), to: to.toPrecision(7) } : { from: "", to: "" }, svg.closest("section").id);
  };
  const around = (middle, factor) => go(middle - (to - from) * factor / 2, middle + (to - from) * factor / 2);
  const match = () => {
    const matches = matcher(wanted);
    const spans = lanes().flatMap(({ spans }) => spans).filter((span) => matches(span.name)).sort((a, b) => a.start - b.start);
    const middle = to - from < 1 ? (from + to) / 2 : -1;
    const next = spans.find((span) => (span.start + span.end) / 2 > middle + NARROWEST / 10) || spans[0];
    if (!next) { state.textContent = "no span is called so (with stages, spans are whole passes)"; return; }
    const reach = 2.5 * Math.max(next.end - next.start, NARROWEST / 5);
    go((next.start + next.end) / 2 - reach, (next.start + next.end) / 2 + reach);
  };
  const tools = document.createElement("p");
  const state = document.createElement("span");
  const input = document.createElement("input");
  tools.className = "tools";
  state.setAttribute("role", "status");
  [["Zoom in", () => around((from + to) / 2, 0.25)], ["Zoom out", () => around((from + to) / 2, 4)],
    ["Earlier", () => go(from - (to - from) / 2, to - (to - from) / 2)], ["Later", () => go(from + (to - from) / 2, to + (to - from) / 2)],
    ["Whole step", () => go(0, 1)]].forEach(([said, act]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = said;
    button.addEventListener("click", act);
    tools.append(button, " ");
  });
  const label = document.createElement("label");
  input.type = "search";
  input.className = "find";
  input.autocomplete = "off";
  input.addEventListener("input", () => { find(input.value); remember({ find: wanted }, "time"); });
  input.addEventListener("keydown", (event) => { if (event.key === "Enter" && wanted !== "") match(); });
  label.append("Find (Enter: next) ", input);
  tools.append(label, " ", state);
  svg.closest(".wide").before(tools);
  all(".lane", played).forEach((lane) => lane.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const across = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    around(from + (across - left) / room * (to - from), 0.25);
  }));
  return show;
};
const played = document.querySelector("g.played");
const show = played && played.dataset.names ? zoomed(played) : () => {};

const reveal = () => {
  const asked = new URLSearchParams(location.hash.split("?")[1] || "");
  if (asked.size) {
    Array.from(view.keys()).forEach((name) => view.delete(name));
    asked.forEach((held, name) => view.set(name, held));
    if (asked.get("find")) find(asked.get("find"));
    if (asked.get("to")) show(Number(asked.get("from")), Number(asked.get("to")));
    (asked.get("sort") || "").split(",").filter(Boolean).forEach((one) => {
      const [place, column, direction] = one.split(".");
      if (tables[place]) sort(tables[place], Number(column), direction);
    });
  } else remember({});
  all(".at").forEach((row) => row.classList.remove("at"));
  const at = anchor() && document.getElementById(anchor());
  if (!at) return;
  at.classList.add("at");
  for (let outer = at; outer; outer = outer.parentElement) if (outer.tagName === "DETAILS") outer.open = true;
  at.scrollIntoView({ block: at.tagName === "TR" ? "center" : "start" });
};
window.addEventListener("hashchange", reveal);
if (location.hash) reveal();
