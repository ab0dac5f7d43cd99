// The page: what is chosen, and every section drawn from it.

const scan = JSON.parse(find("scan").textContent);
const all = scan.groups.map(unpack);
const state = { at: 0, length: 0, key: "", window: null, metric: "value", sort: "value", down: true, shown: 20, only: "" };
const group = () => all[state.at];

const METRICS = {
  value: { name: "σ", of: (row) => row.value, log: true, say: (x) => written(x, "near", 3) },
  relative: { name: "relative size", of: (row) => row.relative, log: true, say: (x) => written(x, "near", 3) },
  growth: { name: "growth exponent", of: (row) => group().growth[row.key]?.[0] ?? null, say: decimals },
  share: { name: "share of the value path", of: (row) => row.value_share, say: decimals },
  proved: { name: "three-path bound / σ", of: (row) => (row.proved === null ? null : row.proved / row.value), log: true, say: (x) => written(x, "up", 3) },
  sink: { name: "attention on the sink", of: (row) => (row.sink === null ? null : row.sink / row.length), say: decimals },
  entropy: { name: "entropy, nats", of: (row) => row.entropy, say: (x) => written(x, "near", 3) },
};

// The chosen cell at the chosen length: its roughest window, or the window chosen in the text.
function chosen() {
  const rows = group().byCell.get(state.key).filter((row) => row.length === state.length);
  const worst = rows.reduce((best, row) => (best && best.value >= row.value ? best : row), null);
  return rows.find((row) => row.window === state.window) ?? worst;
}

function choose(key, length = state.length, window = null) {
  Object.assign(state, { key, length, window });
  if (!chosen()) state.length = most(group().byCell.get(key).map((row) => row.length));
  draw();
}

function show(at) {
  const found = all[at];
  Object.assign(state, { at, length: found.length, key: roughest(found, found.main, found.length)[0].key, window: null, shown: 20, only: "" });
  if (!found.rows.some((row) => METRICS[state.metric].of(row) !== null)) state.metric = "value";
  draw(true);
}

function draw(anew = false) {
  find("tip").hidden = true;
  if (anew) {
    drawTabs();
    drawFacts();
    drawMethods();
  }
  remember();
  drawControls();
  drawMap();
  find("story").replaceChildren(...story(group(), chosen()));
  drawGrowth();
  drawText();
  drawRanking();
  drawDistances();
  drawLayers();
  drawTable();
}

// The address names what is chosen, so that a link leads to it: #layer-3-head-3, #model-2-attention-4.
function place() {
  const [what, layer, head] = state.key.split("/"), front = all.length > 1 && state.at ? `model-${state.at + 1}-` : "";
  if (what === "head") return `${front}layer-${layer}-head-${head}`;
  return front + (layer === "" ? what : `${what}-${layer}`);
}

function remember() {
  if (state.quiet) return;
  try { history.replaceState(null, "", `#${place()}`); } catch { /* a page inside another */ }
}

function fromAddress() {
  const [, model, rest] = /^(?:model-(\d+)-)?(.*)$/s.exec(location.hash.slice(1)); // no place has a letter that is escaped
  const at = model ? Number(model) - 1 : 0, head = /^layer-(\d+)-head-(\d+)$/.exec(rest), other = /^([a-z]+)(?:-(\d+))?$/.exec(rest);
  const key = head ? `head/${head[1]}/${head[2]}` : other ? `${other[1]}/${other[2] ?? ""}/` : "";
  if (!all[at]?.byCell.has(key)) return;
  state.quiet = false;
  if (at !== state.at) show(at);
  choose(key);
  find("heads").scrollIntoView();
}

const title = (id, words) => find(id).replaceChildren(words, badge(group()) ?? "");

function drawTabs() {
  document.querySelectorAll(".headline").forEach((node) => { node.hidden = Number(node.dataset.group) !== state.at; });
  if (all.length < 2) return;
  const tabs = all.map((found, at) =>
    el("button", { type: "button", role: "tab", "aria-selected": String(at === state.at), "aria-controls": "panel", onclick: () => show(at) },
      found.model, el("small", { text: [found.precision, all.some((other) => other.text !== found.text) ? found.text : ""].filter(Boolean).join(" · ") })));
  find("models").replaceChildren(...tabs);
  roving(tabs, 1, state.at);
}

function drawFacts() {
  find("facts").replaceChildren(...facts(group()).map(([name, value, note]) =>
    el("div", {}, el("dt", { text: name }), el("dd", { text: value }, el("small", { text: note })))));
}

function drawControls() {
  const lengths = group().lengths.map((n) =>
    el("button", { type: "button", "aria-pressed": String(n === state.length), text: n === group().lengths[0] ? `n = ${n}` : n, onclick: () => choose(state.key, n) }));
  find("lengths").replaceChildren(...lengths);
  const possible = Object.entries(METRICS).filter(([, metric]) => group().rows.some((row) => row.what === "head" && metric.of(row) !== null));
  find("metric").replaceChildren(...possible.map(([name, metric]) => el("option", { value: name, text: metric.name, selected: name === state.metric })));
  find("metric").parentElement.hidden = possible.length < 2;
}

function drawMap() {
  const cells = roughest(group(), "head", state.length);
  const grid = find("map"), heads = [...new Set(cells.map((row) => row.head))].sort((a, b) => a - b);
  grid.parentElement.hidden = group().main !== "head";
  title("heads-title", group().main === "head" ? "Every head" : "One by one");
  const layers = [...new Set(cells.map((row) => row.layer))].sort((a, b) => a - b);
  const at = new Map(cells.map((row) => [`${row.layer}/${row.head}`, row]));
  const metric = METRICS[state.metric], f = metric.log ? Math.log : Number;
  const values = cells.map(metric.of).filter((x) => x !== null && (!metric.log || x > 0));
  const [low, high] = [least(values), most(values)];
  grid.className = `map${heads.length > 24 ? " crowded" : layers.length > 14 ? " dense" : ""}`;
  grid.style.gridTemplateColumns = `auto repeat(${heads.length}, minmax(0, 1fr))`;
  const head = el("div", { role: "row" }, el("span", { class: "name left", role: "columnheader", text: "layer" }),
    ...heads.map((h) => el("span", { class: "name", role: "columnheader", "aria-label": `head ${h}`, text: heads.length > 24 && h % 4 ? "" : h })));
  const focus = grid.contains(document.activeElement);
  const rows = layers.map((layer) => el("div", { role: "row" }, el("span", { class: "name left", role: "rowheader", "aria-label": `layer ${layer}`, text: layer }),
    ...heads.map((h) => mapCell(at.get(`${layer}/${h}`), metric, (x) => (f(x) - f(low)) / (f(high) - f(low) || 1)))));
  grid.replaceChildren(head, ...rows);
  const buttons = [...grid.querySelectorAll("button")];
  const current = Math.max(0, buttons.findIndex((button) => button.getAttribute("aria-selected") === "true"));
  roving(buttons, heads.length, current);
  if (focus && buttons.length) buttons[current].focus();
  find("map-legend").replaceChildren(el("span", { text: `${metric.name}: ${values.length ? metric.say(low) : "–"}` }), el("span", { class: "ramp" }),
    el("span", { text: values.length ? metric.say(high) : "–" }), el("span", { text: `${metric.log ? "logarithmic; " : ""}columns are heads, n = ${state.length}` }));
}

function mapCell(row, metric, place) {
  if (!row) return el("span", { class: "gap", role: "gridcell", "aria-label": "not measured" });
  const value = metric.of(row), said = value === null ? "–" : metric.say(value);
  const cell = el("button", { type: "button", role: "gridcell", text: said, "data-key": row.key, "aria-selected": String(row.key === state.key),
    "aria-label": `layer ${row.layer}, head ${row.head}: ${metric.name} ${said}`, onclick: () => choose(row.key) });
  if (value !== null) Object.assign(cell.style, shade(place(value)));
  return tipOn(cell, () => `${placeOf(group(), row)} of ${group().label}\nσ ≈ ${written(row.value)}${row.converged ? "" : " (not converged)"}${state.metric === "value" ? "" : `\n${metric.name}: ${said}`}`);
}

// The largest value of every cell of a kind at every length. Asked at every click, found once.
function linesOf(found, what) {
  const asked = `lines of ${what}`;
  if (found.ranked.has(asked)) return found.ranked.get(asked);
  const best = new Map();
  for (const row of found.rows) {
    if (row.what !== what || row.value <= 0) continue;
    const line = best.get(row.key) ?? best.set(row.key, new Map()).get(row.key);
    line.set(row.length, Math.max(line.get(row.length) ?? 0, row.value));
  }
  const lines = new Map([...best].map(([key, line]) => [key, [...line].sort((a, b) => a[0] - b[0])]));
  found.ranked.set(asked, lines);
  return lines;
}

function drawGrowth() {
  const row = chosen(), found = group();
  const lines = linesOf(found, row.what);
  const own = lines.get(row.key) ?? [];
  find("growth").hidden = own.length < 2;
  if (own.length < 2) return;
  title("growth-title", "Growth with n");
  const mine = found.byCell.get(row.key), known = mine.map((other) => [other.length, boundsOf(found, other)]);
  const bounds = [...new Set(known.flatMap(([, own]) => Object.keys(own)))].map((name) => {
    const line = new Map();
    for (const [n, own] of known) if (name in own) line.set(n, Math.max(line.get(n) ?? 0, own[name]));
    return { name, proved: name === "howsmooth.three_path", line: [...line].sort((a, b) => a[0] - b[0]) };
  });
  const fit = found.growth[row.key], where = placeOf(found, row);
  const drawn = growthChart({
    lengths: own.map(([n]) => n), others: [...lines].filter(([key]) => key !== row.key).map(([, line]) => line), chosen: own,
    points: mine.map((other) => [other.length, other.value]), fit, bounds, label: `Growth of σ with the number of tokens, ${where} of ${found.label}`,
  });
  find("growth-lead").textContent =
    `${found.laws[row.key] ? `${where}. ${found.laws[row.key]} ` : `${where}: σ changes like n to the power ${exponent(found, row)}. ${!fit ? "" : fit[1] === null ? "Two lengths cannot tell whether that is the law. " : fit[1] < 1e-9 ? "" : `Between neighbouring lengths it strays from that by as much as ± says, root mean square, or by the standard error of its ${mine.length} points where that is more. `}`}` +
    `Dots are windows, the dotted line is the fit, the strong line the three-path bound${bounds.length > 1 ? ", thin ones other bounds" : ""}; faint lines are the other ${found.words[row.what]}s.` +
    (drawn.left.length ? ` Beyond the frame: ${drawn.left.map((bound) => `${bound.name} (${written(most(bound.line.map((p) => p[1])), "up", 2)})`).join(", ")}.` : "");
  find("growth-chart").replaceChildren(drawn.chart);
}

const LEAST = 1e-4;

function drawText() {
  const row = chosen(), found = group();
  const windows = found.byCell.get(row.key).filter((other) => other.length === row.length && shares(found, other));
  const shown = shares(found, row) ? row : windows[0];
  const tokens = shown && found.tokens[`${shown.length}/${shown.window}`];
  const left_out = !tokens && row.what === "head" && Object.keys(found.energies).length > 0;
  find("text").hidden = !tokens && !left_out;
  title("text-title", "Where in the text");
  if (!tokens) {
    for (const part of ["text-controls", "tokens", "text-legend", "token-said"]) find(part).replaceChildren();
    find("text-lead").textContent = "This page has room for the tokens of the roughest heads only; those of this head are in the store.";
    return;
  }
  const energy = shares(found, shown), top = most(energy);
  find("text-lead").textContent = `The stronger the colour, the larger the token's share of the change that moves the output of ${placeOf(found, row).toLowerCase()} most${windowsOf(found, row) > 1 ? `, in window ${shown.window}` : ""}. Its sink is underlined.`;
  const place = (share) => Math.log(Math.max(share, LEAST) / LEAST) / Math.log(Math.max(top, 2 * LEAST) / LEAST);
  find("text-controls").replaceChildren(...(windows.length > 1 ? [el("label", {}, "Window ", el("select", { onchange: (event) => choose(row.key, row.length, Number(event.target.value)) },
    ...windows.map((other) => el("option", { value: other.window, selected: other.window === shown.window, text: `${other.window} (σ ≈ ${written(other.value)})` }))))] : []));
  const spans = tokens.map((token, i) => {
    const said = `“${token.trim()}”, position ${i}: ${percent(energy[i])} of the worst change`;
    const span = el("span", { text: token.trimStart() || token, class: i === shown.sink_token ? "sink" : null, "aria-label": said });
    Object.assign(span.style, shade(place(energy[i]), "--raised"));
    span.addEventListener("focus", () => { find("token-said").textContent = said; });
    return tipOn(span, () => said);
  });
  find("tokens").replaceChildren(...spans.flatMap((span, i) => (tokens[i].startsWith(" ") ? [" ", span] : [span])));
  roving(spans, 1);
  const first = [...energy.keys()].sort((a, b) => energy[b] - energy[a]).slice(0, 3);
  find("text-legend").replaceChildren(el("span", { text: "share: 0.01 %" }), el("span", { class: "ramp raised" }), el("span", { text: percent(top) }), el("span", { text: "logarithmic" }));
  find("token-said").textContent = `Most: ${first.map((i) => `“${tokens[i].trim()}” ${percent(energy[i])}`).join(", ")}.`;
}

function drawRanking() {
  const cells = roughest(group(), group().main, state.length), word = group().words[group().main];
  title("roughest-title", `The roughest ${word}s`);
  const explained = cells.some((row) => row.value_share !== null);
  find("roughest-lead").textContent = `At n = ${state.length}.` + (explained ? " The bar splits σ in the worst direction: coloured what passes through the values while the weights stay, grey what passes through the weights." : "");
  find("top").replaceChildren(...cells.slice(0, 10).map((row, i) => el("li", {}, el("button", { type: "button", "data-key": row.key, onclick: () => choose(row.key) },
    el("span", { class: "place", text: i + 1 }), el("span", { text: placeOf(group(), row) }), el("span", { class: "number", text: written(row.value) }),
    row.value_share === null ? el("span") : splitBar(row),
    el("small", { text: row.sink === null || row.what !== "head" ? "" : `${percent(row.value_share)} value path; sink ${tokenName(group(), row)}, ${percent(row.sink / row.length)} of the attention` })))));
}

function drawDistances() {
  const row = chosen(), cells = roughest(group(), row.what, row.length).filter((cell) => cell.value > 0);
  const known = new Map(cells.map((cell) => [cell, boundsOf(group(), cell)])), own = boundsOf(group(), row);
  const names = [...new Set([...known.values()].flatMap((bounds) => Object.keys(bounds)))];
  find("distances").hidden = !names.length;
  if (!names.length) return;
  title("distances-title", "Distance to the bounds");
  const rows = names.map((name) => {
    const ratios = [...known].filter(([, bounds]) => name in bounds).map(([cell, bounds]) => bounds[name] / cell.value);
    const about = scan.bounds[name] ?? { where: "", reference: "", page: "" };
    return { name, ...about, address: scan.pages[about.page], smallest: least(ratios), largest: most(ratios), middle: median(ratios), own: name in own ? own[name] / row.value : null };
  }).sort((a, b) => a.middle - b.middle);
  find("distances-lead").textContent = `Bound divided by σ at n = ${row.length}, on a logarithmic axis: the line spans all ${cells.length} ${group().words[row.what]}s, the small dot is their median, the coloured one ${placeOf(group(), row).toLowerCase()}. A bound on a set holds for all inputs there, so it has reason to be larger.`;
  find("distances-chart").replaceChildren(distanceChart({ rows, label: `Ratio of each bound to σ: ${rows.map((r) => `${r.name} ${written(r.middle, "up", 3)}`).join(", ")}` }));
}

function drawLayers() {
  const kinds = group().kinds.filter((kind) => !["head", "model", "logits"].includes(kind));
  const lines = kinds.map((kind) => ({ name: group().words[kind], line: roughest(group(), kind, state.length).filter((row) => row.layer !== null && row.value > 0).map((row) => [row.layer, row.value]).sort((a, b) => a[0] - b[0]) })).filter(({ line }) => line.length);
  const layers = [...new Set(lines.flatMap(({ line }) => line.map((p) => p[0])))].sort((a, b) => a - b);
  const whole = roughest(group(), "model", state.length)[0];
  find("layers").hidden = !lines.length && !whole;
  if (find("layers").hidden) return;
  title("layers-title", "Blocks, layers, model");
  find("layers-lead").textContent = `At n = ${state.length}.` + (whole ? ` The whole model, from the embeddings to its last hidden state: σ ≈ ${written(whole.value)} (≥ ${written(whole.lower, "down", 5)}, ${group().rounding[whole.what]}).` : "");
  find("layers-chart").replaceChildren(...(lines.length ? [layersChart({ lines, layers, label: `σ of ${lines.map((line) => line.name).join(", ")} by layer, ${group().label}` })] : []));
}

function drawMethods() {
  title("methods-title", "Methods");
  find("settings").replaceChildren(...group().methods.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })]));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = theme === "dark" ? "Light" : "Dark";
  find("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
}

const darkness = matchMedia("(prefers-color-scheme: dark)");
setTheme(darkness.matches ? "dark" : "light");
darkness.addEventListener("change", () => { setTheme(darkness.matches ? "dark" : "light"); draw(); });
find("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); draw(); });
find("metric").addEventListener("change", (event) => { state.metric = event.target.value; draw(); });
let width = chartWidth();
addEventListener("resize", () => { if (width !== chartWidth()) { width = chartWidth(); draw(); } });
state.quiet = true;
show(0);
fromAddress();
state.quiet = false;
addEventListener("hashchange", fromAddress);
