// What the page says about one group and one cell of it.

const keyOf = (row) => [row.what, row.layer ?? "", row.head ?? ""].join("/");

// The packed columns of a group as rows, with what the page asks of them.
function unpack(group) {
  const columns = Object.entries(group.columns);
  const count = columns.map(([, c]) => c).find(Array.isArray)?.length ?? 1;
  const proved = group.bounds["howsmooth.three_path"];
  const rows = Array.from({ length: count }, (_, i) => {
    const row = { at: i };
    for (const [name, c] of columns) row[name] = Array.isArray(c) ? c[i] : c.all;
    row.proved = proved?.[i] ?? null;
    row.key = keyOf(row);
    return row;
  });
  const kinds = Object.keys(group.kinds);
  const byCell = gathered(rows, (row) => row.key), byLength = gathered(rows, (row) => row.length);
  return {
    ...group, rows, kinds, words: group.kinds, main: kinds[0], byCell,
    lengths: [...byLength.keys()].sort((a, b) => a - b),
    windows: new Map([...byLength].map(([n, found]) => [n, new Set(found.map((row) => row.window)).size])),
    ranked: new Map(),
    coarse: group.precision !== "" && !/^(float|bfloat)\d+$/.test(group.precision),
  };
}

// Rows by something that they share.
function gathered(rows, of) {
  const found = new Map();
  for (const row of rows) {
    const key = of(row);
    if (found.has(key)) found.get(key).push(row);
    else found.set(key, [row]);
  }
  return found;
}

// All upper bounds of a row by name; most rows are never asked.
const boundsOf = (group, row) =>
  Object.fromEntries(Object.entries(group.bounds).filter(([, values]) => values[row.at] !== null).map(([name, values]) => [name, values[row.at]]));

// Of every cell at a length its roughest window, the roughest cell first. Asked at every click, found once.
function roughest(group, what, length) {
  const asked = `${what}/${length}`;
  if (group.ranked.has(asked)) return group.ranked.get(asked);
  const best = new Map();
  for (const row of group.rows) {
    if (row.what !== what || row.length !== length) continue;
    if (!best.has(row.key) || best.get(row.key).value < row.value) best.set(row.key, row);
  }
  const found = [...best.values()].sort((a, b) => b.value - a.value);
  group.ranked.set(asked, found);
  return found;
}

function placeOf(group, row) {
  if (row.what === "head") return `Layer ${row.layer}, head ${row.head}`;
  const word = group.words[row.what];
  if (row.what === "layer") return `Layer ${row.layer}`;
  const name = word[0].toUpperCase() + word.slice(1);
  return row.layer === null ? name : `${name}${row.what === "prefix" ? " to" : ","} layer ${row.layer}`;
}

const exponent = (group, row) => {
  const fit = group.growth[row.key];
  return fit ? `${decimals(fit[0])}${fit[1] === null ? "" : ` ± ${atMost(fit[1])}`}` : "–";
};

function tokenName(group, row) {
  const tokens = group.tokens[`${row.length}/${row.window}`];
  if (row.sink_token === null || row.sink_token === undefined) return "–";
  return tokens ? `“${tokens[row.sink_token].trim()}” (${row.sink_token})` : `position ${row.sink_token}`;
}

const wholly = (share) => (Math.abs(share) < 0.005 ? "0 %" : percent(share));

function splitBar(row) {
  const bar = el("div", { class: "split", role: "img", "aria-label": `value path ${percent(row.value_share)}, score path ${percent(1 - row.value_share)}` });
  const part = el("i");
  part.style.width = `${100 * Math.min(1, Math.max(0, row.value_share))}%`;
  bar.append(part);
  return bar;
}

const badge = (group) => (group.precision ? el("span", { class: `badge${group.coarse ? " coarse" : ""}`, text: group.precision }) : null);

// An upper end with its probability, where it has one.
const upperEnd = (row) =>
  row.upper === null || !row.confidence ? null
    : `≤ ${written(row.upper, "up", 5)}${row.confidence === 1 ? "" : ` with probability ${100 * row.confidence} %`}`;

// The story of one cell: how rough, how sure, how it compares, and why.
function story(group, row) {
  const peers = roughest(group, row.what, row.length);
  const rank = peers.findIndex((peer) => peer.key === row.key) + 1;
  const ends = [row.lower === null ? null : `≥ ${written(row.lower, "down", 5)}`, upperEnd(row)].filter(Boolean);
  const facts = [
    ["rank", peers.length > 1 ? `${ordinal(rank)} of ${peers.length}` : null],
    ["against the median", peers.length > 1 ? `${written(row.value / median(peers.map((p) => p.value)), "near", 3)} times` : null],
    ["growth exponent", group.growth[row.key] ? exponent(group, row) : null],
    ["value path alone", row.value_path === null ? null : written(row.value_path)],
    ["score path alone", row.score_path === null ? null : written(row.score_path)],
    ["three-path bound", row.proved === null ? null : `≤ ${written(row.proved, "up")} (${written(row.proved / row.value, "up", 3)} σ)`],
    ["sink", row.what === "head" && row.sink !== null ? tokenName(group, row) : null],
    ["attention on it", row.what === "head" && row.sink !== null ? percent(row.sink / row.length) : null],
    ["entropy", row.entropy === null ? null : `${written(row.entropy, "near", 3)} nats`],
    ["largest token norm", row.radius === null ? null : written(row.radius)],
  ].filter(([, value]) => value !== null);
  const shown = [
    el("h3", { text: placeOf(group, row) }),
    el("p", { class: "quiet" }, `${group.model}, n = ${row.length}${windowsOf(group, row) > 1 ? `, window ${row.window}` : ""} `, badge(group)),
    el("p", { class: "big", text: `σ ≈ ${written(row.value)}` }),
    el("p", { class: "quiet", text: ends.length ? [...ends, group.rounding[row.what]].join(", ") : "" }),
    row.relative === null || row.relative === undefined ? null : el("p", {}, el("strong", { text: `relative ${written(row.relative, "near", 3)}` }), `: if its input changes by 1 %, its output can change by ${written(row.relative, "near", 3)} %.`),
  ].filter(Boolean);
  if (!row.converged) shown.push(el("p", { class: "quiet", text: "Did not reach the requested accuracy: only the ends are sure." }));
  if (row.value_share !== null) {
    const against = row.value_share > 1.005 || row.value_share < -0.005;
    shown.push(
      el("p", {}, splitBar(row)),
      el("div", { class: "split-names" }, el("span", { text: `value path ${wholly(row.value_share)}` }), el("span", { text: `score path ${wholly(1 - row.value_share)}` })),
    );
    shown.push(el("p", { class: "quiet", text: `How σ splits in its worst direction: what passes through the values while the attention weights stay, and what passes through the weights.${against ? " The two paths work against each other." : ""}` }));
  }
  shown.push(el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })])));
  if (row.value_path !== null) {
    shown.push(el("p", { class: "quiet", text: "A path alone is the norm of that part of the Jacobian, in its own worst direction. The two can cancel, so neither is a share of σ." }));
  }
  return shown;
}

const windowsOf = (group, row) => group.windows.get(row.length);

// The middle relative number of some cells in words, or nothing.
function relatively(cells) {
  const known = cells.map((row) => row.relative).filter((x) => x !== null && x !== undefined);
  return known.length ? `; relative ${written(median(known), "near", 3)}` : "";
}

// Four numbers that sum up the group at its main length.
function facts(group) {
  const { length } = group;
  const cells = roughest(group, group.main, length), word = group.words[group.main];
  const exponents = cells.map((row) => group.growth[row.key]?.[0]).filter((p) => p !== undefined);
  const ratios = cells.filter((row) => row.proved !== null && row.value > 0).map((row) => row.proved / row.value);
  return [
    [`roughest ${word}`, `σ ≈ ${written(cells[0].value, "near", 3)}`, `${placeOf(group, cells[0])}${relatively([cells[0]])}`],
    [`median ${word}`, `σ ≈ ${written(median(cells.map((row) => row.value)), "near", 3)}`, `of ${cells.length}, at n = ${length}${relatively(cells)}`],
    exponents.length ? ["growth exponent", decimals(median(exponents)), `median; from ${decimals(least(exponents))} to ${decimals(most(exponents))}`] : null,
    ratios.length ? ["three-path bound", `${written(median(ratios), "up", 3)} σ`, `median; at most ${written(most(ratios), "up", 3)} σ`] : null,
  ].filter(Boolean);
}

// The shares of tokens, or null where the page has none.
function shares(group, row) {
  const packed = group.energies[[row.layer, row.head, row.length, row.window].join("/")];
  if (!packed) return null;
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  return Array.from({ length: bytes.length / 2 }, (_, i) => (bytes[2 * i] + 256 * bytes[2 * i + 1]) / 65535);
}
