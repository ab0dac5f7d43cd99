// The table of all cells: sorted by any column, narrowed by words, a few rows at a time.

const COLUMNS = [
  ["what", "what", (row) => row.key, (row) => placeOf(group(), row)],
  ["n", "length", (row) => row.length, (row) => row.length],
  ["window", "window", (row) => row.window, (row) => row.window],
  ["σ (estimate)", "value", (row) => row.value, (row) => `${written(row.value)}${row.converged ? "" : " †"}`],
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

find("more").addEventListener("click", () => { state.shown += 200; drawTable(); });
