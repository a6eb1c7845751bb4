// Parallel coordinates, effects of swept keys and frontiers by Observable Plot, which runs when a tab first needs it.

function library() {
  if (window.Plot === undefined) {
    for (const id of ["d3", "plot.umd"]) document.head.append(el("script", {}, $(id).textContent));
  }
  return window.Plot;
}

const costs = () => [["seconds", "training time (s)"], ["tokens", "tokens trained"], ["step", "steps"]];
const measures = () => [...(data.runs.some((run) => run.last.held_out) ? [["held_out", "held-out loss (last)"]] : []),
  ...(data.runs.some((run) => run.last.loss) ? [["loss", "loss (last)"]] : []),
  ...data.metrics.map(([key, unit]) => [`m:${key}`, unit ? `${key} (${unit})` : key])];
const sweptKeys = () => data.swept.filter((_, index) => !data.seeds[index]);
const higherIsBetter = (id) => id.startsWith("m:") && isHigher(metricIndex(id.slice(2)));

function chooseMetric() {
  const ids = measures().map(([id]) => id);
  if (!ids.includes(view.metric)) {
    view.metric = data.headline.length ? `m:${data.metrics[data.headline[0]][0]}` : ids[0] ?? null;
  }
}

function style() {
  return { fontSize: "12px", color: "var(--ink)", background: "transparent", overflow: "hidden" };
}

function isWide(values) {
  const found = values.filter((value) => typeof value === "number");
  return found.length === values.length && found.length > 0 && Math.min(...found) > 0 && Math.max(...found) / Math.min(...found) > 20;
}

function figureOf(title, chart, note, items) {
  if (items) chart.addEventListener("click", () => { if (chart.value?.run) showRun(chart.value.run); });
  return el("figure", {}, el("h3", {}, title), chart, el("figcaption", {}, note));
}

function renderSweep(runs) {
  chooseMetric();
  const keys = sweptKeys();
  const column = view.metric === null ? null : columnOf(view.metric);
  const items = column === null ? [] : runs.map((run) => ({ run, value: column.value(run) })).filter((item) => item.value !== undefined);
  if (!keys.length || !items.length) {
    const why = !keys.length ? "The runs differ in no key of the command line but seeds." : "No run shown here has this metric yet.";
    $("parallel").replaceChildren(el("p", { class: "note" }, why));
    $("effects").replaceChildren();
    return;
  }
  const Plot = library();
  $("parallel").replaceChildren(figureOf("All swept keys", parallel(Plot, items, keys, column), "A line is a run; its colour is the metric. Click one for the run.", items));
  $("effects").replaceChildren(...keys.map((key) => effect(Plot, items, key, column)));
}

const wordOf = (run, key) => run.words.get(key) ?? "default";

function scaleOf(words) {
  const distinct = [...new Set(words)];
  const numbers = distinct.map(Number);
  const isNumeric = numbers.every((number) => Number.isFinite(number)) && distinct.every((word) => word !== "");
  distinct.sort((a, b) => (isNumeric ? Number(a) - Number(b) : a < b ? -1 : 1));
  return { distinct, isNumeric };
}

function parallel(Plot, items, keys, column) {
  const low = Math.min(...items.map((item) => item.value));
  const high = Math.max(...items.map((item) => item.value));
  const isLog = isWide(items.map((item) => item.value));
  const part = (value) => (high === low ? 0.5 : isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
  const axes = keys.map((key) => ({ key, ...scaleOf(items.map((item) => wordOf(item.run, key))) }));
  const heights = (axis, word) => (axis.distinct.length < 2 ? 0.5 : axis.distinct.indexOf(word) / (axis.distinct.length - 1));
  const points = items.flatMap((item) => [
    ...axes.map((axis) => ({ run: item.run, name: item.run.name, value: item.value, axis: axis.key, height: heights(axis, wordOf(item.run, axis.key)), word: wordOf(item.run, axis.key) })),
    { run: item.run, name: item.run.name, value: item.value, axis: column.title, height: part(item.value), word: numberText(item.value) },
  ]);
  const labels = [
    ...axes.flatMap((axis) => spaced(axis.distinct).map((word) => ({ axis: axis.key, height: heights(axis, word), word: cut(word, 16) }))),
    ...[0, 0.5, 1].map((share) => ({ axis: column.title, height: share, word: numberText(isLog ? low * (high / low) ** share : low + share * (high - low)) })),
  ];
  const width = Math.max($("view-sweep").clientWidth, 130 * (keys.length + 1));
  return Plot.plot({
    width, height: 320, marginLeft: 70, marginRight: 90, marginBottom: 44, style: style(),
    x: { type: "point", domain: [...keys, column.title], label: null, tickFormat: (key) => cut(key.split("@")[0].split(".").slice(-2).join("."), 22), padding: 0.1 },
    y: { axis: null, domain: [-0.05, 1.05] },
    color: { type: isLog ? "log" : "linear", scheme: "viridis", range: isDark() ? [0.3, 1] : [0, 0.85],
      reverse: !higherIsBetter(view.metric) !== isDark() },
    marks: [
      Plot.ruleX([...keys, column.title], { stroke: "var(--line)" }),
      Plot.line(points, { x: "axis", y: "height", z: "name", stroke: "value", strokeOpacity: items.length > 100 ? 0.35 : 0.75, strokeWidth: 1.5 }),
      Plot.text(labels, { x: "axis", y: "height", text: "word", dx: 5, textAnchor: "start", stroke: "var(--back)", strokeWidth: 4, fill: "var(--ink)" }),
      Plot.tip(points, Plot.pointer({ x: "axis", y: "height", title: (point) => `${labelOf(point.run)}\n${column.title}: ${numberText(point.value)}`, fill: "var(--back)" })),
    ],
  });
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const spaced = (words) => (words.length <= 14 ? words : words.filter((_, index) => index % Math.ceil(words.length / 14) === 0));

function effect(Plot, items, key, column) {
  const { distinct, isNumeric } = scaleOf(items.map((item) => wordOf(item.run, key)));
  const at = (word) => (isNumeric ? Number(word) : word);
  const points = items.map((item) => ({ run: item.run, x: at(wordOf(item.run, key)), y: item.value }));
  const means = distinct.map((word) => {
    const values = points.filter((point) => point.x === at(word)).map((point) => point.y);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const deviation = values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1)) : 0;
    return { x: at(word), mean, low: mean - deviation, high: mean + deviation };
  });
  const logX = isNumeric && isWide(distinct.map(Number));
  const logY = isWide(points.map((point) => point.y));
  const sureLow = means.map((mean) => ({ ...mean, low: logY ? Math.max(mean.low, Math.min(...points.map((point) => point.y)) / 2) : mean.low }));
  const chart = Plot.plot({
    width: Math.min(420, $("view-sweep").clientWidth), height: 250, marginLeft: 62, marginRight: 36, marginBottom: 40, style: style(),
    x: { type: isNumeric ? (logX ? "log" : "linear") : "point", label: null, nice: isNumeric && !logX,
      ...(isNumeric && distinct.length <= 6 ? { ticks: distinct.map(Number) } : isNumeric ? { ticks: 5 } : {}),
      tickFormat: (value) => (isNumeric ? numberText(value) : cut(String(value), distinct.length > 4 ? 8 : 14)) },
    y: { type: logY ? "log" : "linear", label: null, grid: true, ticks: 5, tickFormat: numberText },
    marks: [
      Plot.dot(points, { x: "x", y: "y", r: 2.5, stroke: colour(0), strokeOpacity: 0.55 }),
      isNumeric ? Plot.line(means, { x: "x", y: "mean", stroke: colour(1), strokeWidth: 2 }) : null,
      Plot.ruleX(sureLow, { x: "x", y1: "low", y2: "high", stroke: colour(1), strokeWidth: 2 }),
      Plot.dot(means, { x: "x", y: "mean", fill: colour(1), r: 4 }),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: (point) => `${labelOf(point.run)}\n${numberText(point.y)}`, fill: "var(--back)" })),
    ],
  });
  return figureOf(`${column.title} by ${key}`, chart, "Circle: a run. Dot and bar: mean and standard deviation of the runs with that value.", items);
}

// Across is a cost: bytes of a student's cache where the runs differ in them, else the time.
function chooseFrontier() {
  chooseMetric();
  const known = [...costs(), ...measures()].map(([id]) => id);
  const differs = (index) => new Set(data.runs.map((run) => metricValue(run, index)).filter((value) => value !== undefined)).size > 1;
  if (!known.includes(view.fx)) {
    const bytes = data.metrics.findIndex(([key], index) => key.includes(".student.") && key.includes("bytes") && differs(index));
    view.fx = bytes < 0 ? "seconds" : `m:${data.metrics[bytes][0]}`;
  }
  if (!known.includes(view.fy)) view.fy = view.metric;
}

function renderFrontier(runs) {
  chooseFrontier();
  const [x, y] = [columnOf(view.fx), view.fy === null ? null : columnOf(view.fy)];
  const items = y === null ? [] : runs.map((run) => ({ run, x: x.value(run), y: y.value(run) })).filter((item) =>
    Number.isFinite(item.x) && Number.isFinite(item.y));
  if (!items.length) {
    $("frontier").replaceChildren(el("p", { class: "note" }, "No run shown here has both numbers."));
    return;
  }
  const Plot = library();
  const front = frontOf(items, higherIsBetter(view.fx), higherIsBetter(view.fy));
  const [logX, logY] = [isWide(items.map((item) => item.x)), isWide(items.map((item) => item.y))];
  const names = [...costs(), ...measures()];
  const nameOf = (id) => names.find(([known_id]) => known_id === id)?.[1] ?? id;
  const chart = Plot.plot({
    width: $("view-frontier").clientWidth, height: 380, marginLeft: 62, marginRight: 36, marginBottom: 40, style: style(),
    x: { type: logX ? "log" : "linear", label: null, nice: !logX, grid: true, ticks: $("view-frontier").clientWidth < 600 ? 4 : 8, tickFormat: shortText },
    y: { type: logY ? "log" : "linear", label: null, nice: !logY, grid: true, ticks: 6, tickFormat: numberText },
    marks: [
      Plot.line(front, { x: "x", y: "y", curve: "step-after", stroke: colour(1), strokeWidth: 2 }),
      Plot.dot(items, { x: "x", y: "y", r: 3.5, fill: (item) => (front.includes(item) ? colour(1) : "var(--faint)") }),
      Plot.tip(items, Plot.pointer({ x: "x", y: "y", title: (item) => `${labelOf(item.run)}\n${numberText(item.x)}, ${numberText(item.y)}`, fill: "var(--back)" })),
    ],
  });
  const note = `Across: ${nameOf(view.fx)}, ${higherIsBetter(view.fx) ? "more" : "less"} is better. The line joins the ${front.length} of ${items.length} runs that no other run beats in both.`;
  $("frontier").replaceChildren(figureOf(nameOf(view.fy), chart, note, items));
}

// Runs that no other is at least as good as in both and better in one.
function frontOf(items, higherX, higherY) {
  const [signX, signY] = [higherX ? -1 : 1, higherY ? -1 : 1];
  const sorted = [...items].sort((a, b) => signX * (a.x - b.x) || signY * (a.y - b.y));
  const front = [];
  let best = Infinity;
  for (const item of sorted) {
    if (signY * item.y < best) { front.push(item); best = signY * item.y; }
  }
  return front;
}
