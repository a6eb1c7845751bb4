// Overlaid curves by uPlot: a line for each run, or mean and deviation over seeds.

const LIGHT = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B8860B", "#4B4B9B", "#555555"];
const DARK = ["#56B4E9", "#F28E4B", "#3FC99B", "#E6A4CB", "#9AD0F5", "#F0E442", "#B3B3F5", "#BBBBBB"];
const GRID = 240;
const MOST_LEGEND = 24;
// More lines than this are put on a common grid: the union of their steps would be long.
const MOST_JOINED = 40;
let plot = null;

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
function colour(index) {
  const base = isDark() ? DARK : LIGHT;
  if (index < base.length) return base[index];
  return `hsl(${(index * 137.5) % 360} 60% ${isDark() ? 65 : 42}%)`;
}

function chooseCurve() {
  const keys = [...new Set(data.curves.map(([, key]) => key))];
  if (!keys.includes(view.curve)) {
    view.curve = ["running_loss", "loss", "val_loss"].find((key) => keys.includes(key)) ?? keys[0] ?? null;
  }
  const phases = [...new Set(data.curves.filter(([, key]) => key === view.curve).map(([phase]) => phase))];
  if (!phases.includes(view.phase)) view.phase = mostCommonPhase() ?? null;
  return { keys, phases };
}

// The phase that most runs have; of several the last, which trains the final model; a control is none.
function mostCommonPhase() {
  const counts = new Map();
  for (const run of data.runs) {
    for (const [place] of run.curves) {
      const [phase, key] = data.curves[place];
      const isControl = run.phases.some(([name, , , control]) => name === phase && control);
      if (key === view.curve && !isControl) counts.set(phase, (counts.get(phase) ?? 0) + 1);
    }
  }
  let best;
  for (const [phase, n] of counts) if (best === undefined || n >= counts.get(best)) best = phase;
  return best;
}

function seriesOf(runs) {
  const most = view.lines === "all" ? Infinity : Number(view.lines);
  const pinned = runs.filter(isPinned);
  const pool = pinned.length ? pinned : runs;
  const place = data.curves.findIndex(([phase, key]) => phase === view.phase && key === view.curve);
  const having = pool.filter((run) => run.curves.some(([index]) => index === place));
  let n_without = 0;
  if (!view.band) {
    const lines = [];
    for (const run of having) {
      if (lines.length >= most) break;
      const found = curveOf(run, view.phase, view.curve, view.x);
      if (found) lines.push({ label: labelOf(run), run, x: found[0], y: found[1], n: 1 });
      else n_without += 1;
    }
    return { lines, n_runs: having.length, n_without };
  }
  const groups = new Map();
  for (const run of having) {
    const label = labelOf(run, false);
    const name = data.swept.some((_, index) => !data.seeds[index]) ? label : "all runs";
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(run);
  }
  const lines = [];
  for (const [label, members] of groups) {
    if (lines.length >= most) break;
    const curves = members.map((run) => curveOf(run, view.phase, view.curve, view.x)).filter((found) => found);
    n_without += members.length - curves.length;
    if (curves.length) lines.push({ label: `${label} (n = ${curves.length})`, run: members[0], ...meanOf(curves) });
  }
  return { lines, n_runs: having.length, n_without };
}

function interpolate([x, y], at) {
  if (at < x[0] || at > x[x.length - 1]) return null;
  let [low, high] = [0, x.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= at) low = middle; else high = middle;
  }
  const width = x[high] - x[low];
  return width > 0 ? y[low] + (y[high] - y[low]) * (at - x[low]) / width : y[low];
}

function gridOf(curves, n) {
  const start = Math.min(...curves.map(([x]) => x[0]));
  const end = Math.max(...curves.map(([x]) => x[x.length - 1]));
  if (end === start) return [start];
  return Array.from({ length: n }, (_, index) => start + (end - start) * index / (n - 1));
}

// Mean and standard deviation where at least half of the runs have a value: the end is not that of one run alone.
function meanOf(curves) {
  const shared = curves.every(([x]) => x.length === curves[0][0].length && x.every((value, index) => value === curves[0][0][index]));
  const x = shared ? [...curves[0][0]] : gridOf(curves, GRID);
  const [kept, y, low, high] = [[], [], [], []];
  for (const at of x) {
    const values = curves.map((curve) => interpolate(curve, at)).filter((value) => value !== null);
    if (values.length * 2 < curves.length) continue;
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    const deviation = values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0;
    kept.push(at); y.push(mean); low.push(mean - deviation); high.push(mean + deviation);
  }
  return { x: kept, y, low, high, n: curves.length };
}

function aligned(lines) {
  const columns = lines.flatMap((line) => (line.low ? [[line.x, line.y], [line.x, line.low], [line.x, line.high]] : [[line.x, line.y]]));
  if (columns.length > MOST_JOINED) {
    const grid = gridOf(columns, GRID);
    return [grid, ...columns.map((curve) => grid.map((at) => interpolate(curve, at)))];
  }
  const joined = uPlot.join(columns.map(([x, y]) => [Array.from(x), Array.from(y)]));
  return joined;
}

function renderCurves(runs) {
  plot?.destroy();
  plot = null;
  chooseCurve();
  const { lines, n_runs, n_without } = view.curve === null ? { lines: [], n_runs: 0, n_without: 0 } : seriesOf(runs);
  $("legend").replaceChildren();
  $("cursor").textContent = "";
  if (!lines.length) {
    const why = n_without ? `none of these runs records the ${view.x === "tokens" ? "tokens of a step" : "time"}` : "no run shown here has recorded it";
    $("curves").replaceChildren(el("p", { class: "note" }, view.curve === null ? "No run has recorded a curve yet." : `No curve of ${view.curve} in ${view.phase}: ${why}.`));
    $("curve-note").textContent = "";
    return;
  }
  $("curves").replaceChildren();
  const columns = aligned(lines);
  const ink = getComputedStyle(document.body).getPropertyValue("--ink");
  const faint = getComputedStyle(document.body).getPropertyValue("--line");
  const series = [{}];
  const bands = [];
  const lineOf = [null];
  lines.forEach((line, index) => {
    const stroke = colour(index);
    const hasFew = line.x.length < 40;
    series.push({ label: line.label, stroke, width: line.run && isPinned(line.run) ? 2 : 1.4, spanGaps: true, points: { show: hasFew && lines.length <= MOST_JOINED, size: 4 } });
    lineOf.push(line);
    if (line.low) {
      const at = series.length;
      for (const _ of [0, 1]) { series.push({ stroke: "transparent", spanGaps: true, points: { show: false } }); lineOf.push(null); }
      bands.push({ series: [at + 1, at], fill: `color-mix(in srgb, ${stroke} 22%, transparent)` });
    }
  });
  const values = lines.flatMap((line) => [Math.min(...line.y), Math.max(...line.y)]);
  const canLog = Math.min(...values) > 0;
  const isLog = view.log && canLog;
  const unit = { step: "step", tokens: "tokens", time: "seconds of training" }[view.x];
  const axis = (label) => ({ label, stroke: ink, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint }, font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: 0 });
  plot = new uPlot({
    width: $("curves").clientWidth, height: 300, series, bands, legend: { show: false },
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
    axes: [{ ...axis(unit), size: 32, values: (_, ticks) => ticks.map(shortText) }, { ...axis(view.curve), size: 62, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : numberText(tick))) }],
    cursor: { focus: { prox: 30 }, drag: { x: true, y: false } },
    focus: { alpha: 0.25 },
    hooks: { setCursor: [(self) => showCursor(self, lineOf, unit)], setSeries: [(self, index) => { focused = index; showCursor(self, lineOf, unit); }] },
  }, columns, $("curves"));
  $("legend").replaceChildren(...lines.slice(0, MOST_LEGEND).map((line, index) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = colour(index);
    return el("button", { title: line.run.name, onclick: () => showRun(line.run),
      onmouseenter: () => plot?.setSeries(seriesIndex(lineOf, line), { focus: true }), onmouseleave: () => plot?.setSeries(null, { focus: true }) },
    swatch, line.label);
  }), lines.length > MOST_LEGEND ? el("span", { class: "note" }, `and ${lines.length - MOST_LEGEND} more`) : "");
  const parts = [`${view.curve} of ${view.phase}: ${view.band ? `${lines.length} groups` : `${lines.length} of ${n_runs} runs`}.`];
  if (view.band) parts.push("Line: mean over the runs that differ in seeds alone. Band: ± one standard deviation over n runs.");
  if (n_without) parts.push(`${n_without} runs have no tokens of a step.`);
  if (view.log && !canLog) parts.push("Linear: values of 0 or less have no logarithm.");
  if (runs.some(isPinned)) parts.push("Pinned runs alone.");
  $("curve-note").textContent = parts.join(" ");
}

let focused = null;
const seriesIndex = (lineOf, line) => lineOf.indexOf(line);
const shortText = (value) => (value == null ? "" : Math.abs(value) >= 1e4 ? Intl.NumberFormat("en-US", { notation: "compact" }).format(value) : numberText(value));

function showCursor(self, lineOf, unit) {
  const at = self.cursor.idx;
  const line = focused === null ? null : lineOf[focused];
  if (at == null || !line) { $("cursor").textContent = ""; return; }
  const value = interpolate([line.x, line.y], self.data[0][at]);
  $("cursor").textContent = value === null ? "" : `${line.label}: ${numberText(value)} at ${unit} ${shortText(self.data[0][at])}`;
}
