// The table of all cells: sorted by any column, narrowed by words, a few rows at a time.

const COLUMNS = [
  ["what", "what", (row) => row.key, (row) => placeOf(group(), row)],
  ["σ (estimate)", "value", (row) => row.value, (row) => `${written(row.value)}${row.converged ? "" : " †"}`],
  ["relative", "relative", (row) => row.relative, (row) => written(row.relative, "near", 3)],
  ["n", "length", (row) => row.length, (row) => row.length],
  ["window", "window", (row) => row.window, (row) => row.window],
  ["lower end", "lower", (row) => row.lower, (row) => written(row.lower, "down", 5)],
  ["upper end", "upper", (row) => row.upper, (row) => written(row.upper, "up", 5)],
  ["three-path", "proved", (row) => row.proved, (row) => written(row.proved, "up")],
  ["three-path / σ", "ratio", (row) => (row.proved === null ? null : row.proved / row.value), (row) => (row.proved === null ? "–" : written(row.proved / row.value, "up", 3))],
  ["exponent", "growth", (row) => group().growth[row.key]?.[0] ?? null, (row) => exponent(group(), row)],
  ["value share", "share", (row) => row.value_share, (row) => (row.value_share === null ? "–" : percent(row.value_share))],
  ["sink share", "sink", (row) => (row.sink === null ? null : row.sink / row.length), (row) => (row.sink === null ? "–" : percent(row.sink / row.length))],
  ["sink", "sink_token", (row) => row.sink_token, (row) => (row.what === "head" ? tokenName(group(), row) : "–")],
  ["entropy", "entropy", (row) => row.entropy, (row) => written(row.entropy, "near", 3)],
  ["radius", "radius", (row) => row.radius, (row) => written(row.radius)],
];

const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);

// Rows in the order asked for; what has no value comes last either way.
function sorted(rows, of, down) {
  return [...rows].sort((p, q) => {
    const [a, b] = [of(p), of(q)];
    if (a === null || b === null) return (a === null) - (b === null);
    return down ? compare(b, a) : compare(a, b);
  });
}

// What the table shows: sorted once for a column and a search, however often the page is drawn.
function ordered(found) {
  const asked = `${state.sort}/${state.down}/${state.only}`;
  if (found.order?.asked === asked) return found.order.rows;
  const words = state.only.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = !words.length ? found.rows : found.rows.filter((row) => words.every((word) => `${placeOf(group(), row)} n=${row.length} window=${row.window} ${row.what}`.toLowerCase().includes(word)));
  const [, , of] = COLUMNS.find(([, key]) => key === state.sort);
  found.order = { asked, rows: sorted(rows, of, state.down) };
  return found.order.rows;
}

function drawTable() {
  const rows = ordered(group());
  const held = group().methods.find(([name]) => name === "cells on this page");
  title("cells-title", "All cells");
  find("cells-lead").textContent = `${rows.length} of ${group().rows.length} cells of ${group().label}. Choose a column to sort by it, a row to see its story.${rows.some((row) => !row.converged) ? " † did not reach the accuracy asked for." : ""}${held ? ` This page holds ${held[1]}.` : ""}`;
  if (!find("only")) {
    find("cells-controls").append(el("label", {}, "Only ", el("input", { type: "search", id: "only", placeholder: "layer 2, n=128 …", oninput: (event) => { state.only = event.target.value.replace(/,/g, " "); state.shown = 20; drawTable(); } })));
  } else if (state.only === "") find("only").value = "";
  const focused = document.activeElement?.closest("th")?.dataset.sort;
  const head = el("tr", {}, ...COLUMNS.map(([name, key]) => {
    const here = key === state.sort;
    return el("th", { scope: "col", "data-sort": key, "aria-sort": here ? (state.down ? "descending" : "ascending") : null },
      el("button", { type: "button", text: `${name}${here ? (state.down ? " ↓" : " ↑") : ""}`, onclick: () => { state.down = here ? !state.down : key !== "what"; state.sort = key; drawTable(); } }));
  }));
  const own = chosen();
  const body = rows.slice(0, state.shown).map((row) => el("tr", { tabindex: 0, "aria-selected": String(row === own), "data-key": row.key,
    onclick: () => fromTable(row), onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); fromTable(row); } } },
  ...COLUMNS.map(([, , , said]) => el("td", { text: said(row) }))));
  find("table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...body));
  if (focused) find("table").querySelector(`th[data-sort="${focused}"] button`).focus();
  find("more").hidden = rows.length <= state.shown;
}

function fromTable(row) {
  choose(row.key, row.length, row.window);
  find("heads").scrollIntoView();
}

// The rows as a table that spreadsheets read; no text in it is taken for a formula.
function rowsAsCsv(found) {
  const names = ["what", "layer", "head", "length", "window", "value", "lower", "upper", "relative", "confidence", "converged", "proved", "value_path", "score_path", "value_share", "sink", "sink_token", "entropy", "radius"];
  const plain = (x) => (x === null || x === undefined ? "" : typeof x === "string" ? `"${(/^[=+\-@\t\r]/.test(x) ? `'${x}` : x).replace(/"/g, '""')}"` : String(x));
  const lines = found.rows.map((row) => [plain(found.model), ...names.map((name) => plain(row[name]))].join(","));
  return [["model", ...names].join(","), ...lines].join("\r\n");
}

function save(content, type, name) {
  const link = el("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const fileName = (words) => words.replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 80);

// A picture by itself: the colours of the theme written into it.
function savePicture(picture, name) {
  const twin = picture.cloneNode(true), kept = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "opacity", "font-size", "font-weight", "text-anchor"];
  const [own, other] = [[picture, ...picture.querySelectorAll("*")], [twin, ...twin.querySelectorAll("*")]];
  own.forEach((node, i) => { const style = getComputedStyle(node); for (const name of kept) other[i].setAttribute(name, style.getPropertyValue(name)); });
  twin.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  twin.setAttribute("font-family", "sans-serif");
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["width", "100%"], ["height", "100%"], ["fill", getComputedStyle(document.body).backgroundColor]]) ground.setAttribute(name, value);
  twin.prepend(ground);
  save(new XMLSerializer().serializeToString(twin), "image/svg+xml", `${fileName(name)}.svg`);
}

find("rows").addEventListener("click", () => save(rowsAsCsv(group()), "text/csv", `${fileName(group().model)}.csv`));
for (const id of ["growth-chart", "distances-chart", "layers-chart"]) {
  const button = el("button", { type: "button", class: "plain save", text: "Save picture", onclick: () => { const picture = find(id).querySelector("svg"); if (picture) savePicture(picture, picture.getAttribute("aria-label")); } });
  find(id).before(button);
}
for (const figure of document.querySelectorAll(".answer")) {
  const picture = figure.querySelector("svg");
  figure.querySelector("figcaption").prepend(el("button", { type: "button", class: "plain save", text: "Save picture", onclick: () => savePicture(picture, picture.getAttribute("aria-label")) }));
}

find("more").addEventListener("click", () => { state.shown += 200; drawTable(); });
