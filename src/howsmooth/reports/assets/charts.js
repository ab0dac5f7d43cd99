// Charts: logarithmic axes, lines against n and against layers, and the distances to the bounds.

const ticks = (low, high) => {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const step of [1, 2, 5]) {
      const value = step * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  const whole = found.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
  return found.length > 9 && whole.length > 1 ? thinned(whole, 7) : found;
};
const thinned = (values, most) => values.filter((_, at) => at % Math.ceil(values.length / most) === 0);

// A frame with its scales; `log` says which axes are logarithmic.
function frame({ x, y, width, height, right = 20, xLabel, yLabel, xTicks, label, xLog = true }) {
  const left = 64, top = 16, bottom = 48;
  const at = (range, from, to, log) => {
    const f = log ? Math.log : Number;
    const span = f(range[1]) - f(range[0]) || 1;
    return (value) => from + ((f(value) - f(range[0])) / span) * (to - from);
  };
  const px = at(x, left, width - right, xLog), py = at(y, height - bottom, top, true);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of ticks(...y)) {
    chart.append(
      svg("line", { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) }),
      svg("text", { x: left - 10, y: py(value) + 4, "text-anchor": "end", text: plainly(value) }),
    );
  }
  for (const value of xTicks) {
    chart.append(svg("text", { x: px(value), y: height - bottom + 22, "text-anchor": "middle", text: value }));
  }
  chart.append(
    svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", text: xLabel }),
    svg("text", { x: 0, y: 4, text: yLabel }),
  );
  return { chart, px, py, left, right: width - right, top, bottom: height - bottom };
}

const path = (points, px, py) => points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");

// Heights moved apart so that labels do not touch.
function apart(labels, gap, low, high) {
  labels.sort((a, b) => a.y - b.y);
  labels.forEach((label, i) => { label.y = Math.max(label.y, low, i ? labels[i - 1].y + gap : low); });
  for (let i = labels.length - 1, ceiling = high; i >= 0; i -= 1) {
    labels[i].y = Math.min(labels[i].y, ceiling);
    ceiling = labels[i].y - gap;
  }
  return labels;
}

const chartWidth = () => (innerWidth < 620 ? 400 : 1000);

// Lines against n: every other cell faint, the bounds grey, the chosen cell in colour with its fit.
function growthChart({ lengths, others, chosen, points, fit, bounds, label }) {
  const narrow = chartWidth() < 500;
  const own = points.map((p) => p[1]);
  const every = [...own, ...others.flatMap((line) => line.map((p) => p[1]))];
  const floor = least(every), ceiling = most(every);
  const drawn = bounds.filter(({ line }) => line.every((p) => p[1] < ceiling * 1e4));
  const high = most([ceiling, ...drawn.flatMap(({ line }) => line.map((p) => p[1]))]);
  const f = frame({
    x: [lengths[0] / 1.12, lengths[lengths.length - 1] * 1.12], y: [floor / 1.2, high * 1.3], xTicks: narrow ? thinned(lengths, 6) : lengths,
    width: chartWidth(), height: narrow ? 340 : 460, right: narrow ? 16 : 230, xLabel: "number of tokens n (logarithmic)", yLabel: "σ (logarithmic)", label,
  });
  const crowd = others.map((line) => svg("path", { class: "faint", d: path(line, f.px, f.py) }));
  f.chart.append(svg("g", { class: crowd.length > 100 ? "many" : null }, ...crowd));
  const ends = [];
  for (const { name, line, proved } of drawn) {
    f.chart.append(svg("path", { class: `bound${proved ? " proved" : ""}`, d: path(line, f.px, f.py) }));
    ends.push({ y: f.py(line[line.length - 1][1]), text: `≤ ${scan.bounds[name]?.words ?? name}`, kind: proved ? "ink" : "" });
  }
  if (fit) {
    const [n0, n1] = [lengths[0], lengths[lengths.length - 1]];
    f.chart.append(svg("path", { class: "fit", d: path([n0, n1].map((n) => [n, fit[2] * n ** fit[0]]), f.px, f.py) }));
  }
  f.chart.append(svg("path", { class: "chosen", d: path(chosen, f.px, f.py) }));
  for (const [n, value] of points) {
    const dot = svg("circle", { class: "dot", cx: f.px(n), cy: f.py(value), r: 5 });
    f.chart.append(tipOn(dot, () => `n = ${n}\nσ = ${written(value)}`));
  }
  ends.push({ y: f.py(chosen[chosen.length - 1][1]), text: "σ measured", kind: "accent" });
  for (const { y, text, kind } of apart(narrow ? ends.slice(0, -1) : ends, 19, f.top, f.bottom)) {
    const at = narrow ? { x: f.right - 4, y: y - 8, "text-anchor": "end" } : { x: f.right + 12, y: y + 4 };
    f.chart.append(svg("text", { ...at, class: kind, text }));
  }
  return { chart: f.chart, left: bounds.filter((bound) => !drawn.includes(bound)) };
}

const FARTHEST = 1e6;

// For every bound its ratio to σ: the range over all cells, their median, and the chosen cell. What lies far beyond is
// an arrow: it would press all others together.
function distanceChart({ rows, label }) {
  const narrow = chartWidth() < 500, width = chartWidth(), step = narrow ? 58 : 44;
  const left = narrow ? 8 : 300, right = width - (narrow ? 16 : 120), height = rows.length * step + 46;
  const near = rows.filter((row) => row.middle < FARTHEST);
  const top = Math.min(FARTHEST, most([...near.map((row) => row.largest), 10])), decades = Math.log10(top);
  const px = (ratio) => left + (Math.log10(Math.min(Math.max(ratio, 1), top)) / decades) * (right - left);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of thinned(Array.from({ length: Math.floor(decades) + 1 }, (_, i) => 10 ** i), narrow ? 5 : 8)) {
    chart.append(
      svg("line", { class: "grid", x1: px(value), x2: px(value), y1: 4, y2: height - 34 }),
      svg("text", { x: px(value), y: height - 14, "text-anchor": "middle", text: value === 1 ? "σ" : `${plainly(value)} σ` }),
    );
  }
  rows.forEach((row, i) => {
    const y = i * step + (narrow ? 40 : 22);
    const name = svg("text", { x: narrow ? left : 0, y: narrow ? y - 14 : y - 2, class: "named", text: row.words ?? row.name });
    chart.append(row.address ? svg("a", { href: row.address, rel: "noreferrer" }, name) : name);
    if (!narrow) chart.append(svg("text", { x: 0, y: y + 15, text: `${row.name}, ${row.where}`, "font-size": 12 }));
    if (row.middle < FARTHEST) {
      chart.append(svg("line", { class: "bound", x1: px(row.smallest), x2: px(row.largest), y1: y, y2: y, "stroke-width": 3 }));
      if (row.own !== null) chart.append(svg("circle", { class: "dot", cx: px(row.own), cy: y, r: 6.5 }));
      chart.append(svg("circle", { class: "middle", cx: px(row.middle), cy: y, r: 3.5 }));
    } else chart.append(svg("text", { x: right, y: y + 4, "text-anchor": "end", text: "beyond →" }));
    const said = row.own === null ? `median ${written(row.middle, "up", 3)} σ` : `${written(row.own, "up", 3)} σ`;
    chart.append(svg("text", { x: narrow ? width - 8 : width, y: narrow ? y - 14 : y + 4, "text-anchor": "end", class: "ink", text: said }));
    const hit = svg("rect", { class: "hit", x: 0, y: y - step / 2, width, height: step });
    if (!row.address) chart.append(tipOn(hit, () => `${row.name} (${row.where})\n${row.reference}\nbound / σ: ${written(row.smallest)} to ${written(row.largest)}, median ${written(row.middle)}`));
  });
  return chart;
}

// One line per kind against the layer.
function layersChart({ lines, layers, label }) {
  const values = lines.flatMap(({ line }) => line.map((p) => p[1]));
  const narrow = chartWidth() < 500;
  const f = frame({
    x: [layers[0], Math.max(layers[layers.length - 1], layers[0] + 1)], y: [least(values) / 1.2, most(values) * (narrow ? 1.3 ** (1 + lines.length) : 1.2)], xLog: false,
    width: chartWidth(), height: narrow ? 320 : 380, right: narrow ? 16 : 230, xTicks: thinned(layers, narrow ? 8 : 16), xLabel: "layer", yLabel: "σ (logarithmic)", label,
  });
  const dashes = ["", "7 4", "2 4", "10 3 2 3", "4 2", "1 3"];
  const ends = lines.map(({ name, line }, i) => {
    const main = i === 0;
    f.chart.append(svg("path", { class: main ? "chosen" : "bound proved", "stroke-dasharray": dashes[i % 6], d: path(line, f.px, f.py) }));
    for (const [layer, value] of line) {
      const dot = svg("circle", { class: main ? "dot" : "middle", cx: f.px(layer), cy: f.py(value), r: main ? 5 : 3.5 });
      f.chart.append(tipOn(dot, () => `${name}, layer ${layer}\nσ = ${written(value)}`));
    }
    return { y: f.py(line[line.length - 1][1]), text: name, kind: main ? "accent" : "ink" };
  });
  (narrow ? ends : apart(ends, 19, f.top, f.bottom)).forEach(({ y, text, kind }, i) => {
    if (!narrow) return f.chart.append(svg("text", { x: f.right + 12, y: y + 4, class: kind, text }));
    const at = f.top + 6 + 17 * i;
    return f.chart.append(
      svg("line", { class: i ? "bound proved" : "chosen", "stroke-dasharray": dashes[i % 6], x1: f.right - 34, x2: f.right, y1: at, y2: at }),
      svg("text", { x: f.right - 42, y: at + 4, "text-anchor": "end", class: kind, text }),
    );
  });
  return f.chart;
}
