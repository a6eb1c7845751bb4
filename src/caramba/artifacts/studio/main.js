// The tabs and controls, and what is drawn again when one changes.

const TABS = [["runs", "Runs"], ["differences", "Differences"], ["sweep", "Sweep"], ["frontier", "Frontier"]];

function select(label, options, value, change) {
  const field = el("select", { "aria-label": label, onchange: (event) => { change(event.target.value); update(); } },
    ...options.map(([id, text]) => el("option", { value: id, selected: id === value }, text)));
  return el("label", {}, label, field);
}

function check(label, value, change) {
  return el("label", {}, el("input", { type: "checkbox", checked: value, onchange: (event) => { change(event.target.checked); update(); } }), label);
}

function renderHead() {
  const count = (state) => data.runs.filter((run) => run.state === state).length;
  const states = ["finished", "running", "failed", "interrupted", "waiting"].filter(count).map((state) => `${count(state)} ${state}`);
  $("title").textContent = data.title;
  const sweeps = data.sweeps.length ? `, ${data.sweeps.length} ${data.sweeps.length === 1 ? "sweep" : "sweeps"}` : "";
  $("facts").textContent = `${data.runs.length.toLocaleString("en-US")} runs (${states.join(", ") || "none"})${sweeps}; ${data.made}`;
  $("title").title = data.folder;
  $("tabs").replaceChildren(...TABS.map(([id, text]) => el("button", { role: "tab", "aria-selected": String(view.tab === id),
    "aria-controls": `view-${id}`, onclick: () => { view.tab = id; update(); } }, text)));
}

function renderControls() {
  const { keys, phases } = chooseCurve();
  $("curve-controls").replaceChildren(
    select("Curve", keys.map((key) => [key, key]), view.curve, (value) => { view.curve = value; }),
    select("Phase", phases.map((phase) => [phase, phase]), view.phase, (value) => { view.phase = value; }),
    select("By", [["step", "step"], ["tokens", "tokens"], ["time", "time"]], view.x, (value) => { view.x = value; }),
    select("Lines", [["12", "12"], ["50", "50"], ["200", "200"], ["all", "all"]], view.lines, (value) => { view.lines = value; }),
    check("mean over seeds", view.band, (value) => { view.band = value; }),
    check("log", view.log, (value) => { view.log = value; }));
  $("table-controls").replaceChildren(chooser(), el("button", { onclick: () => { view.pins = []; update(); }, disabled: !view.pins.length },
    `Unpin ${view.pins.length || "all"}`), el("button", { onclick: download }, "CSV"));
  const metricChoice = (label, value, extra, change) => select(label, [...extra, ...measures()], value, change);
  chooseFrontier();
  $("sweep-controls").replaceChildren(metricChoice("Metric", view.metric, [], (value) => { view.metric = value; }));
  $("frontier-controls").replaceChildren(metricChoice("Across", view.fx, costs(), (value) => { view.fx = value; }),
    metricChoice("Up", view.fy, costs(), (value) => { view.fy = value; }));
}

let isChoosing = false;

function chooser() {
  const chosen = view.columns ?? defaultColumns();
  const ids = [...Object.keys(BASE), ...data.swept.map((key) => `k:${key}`), ...data.metrics.map(([key]) => `m:${key}`),
    ...data.keys.map((key) => `c:${key}`)];
  const list = el("div");
  const fill = (sought) => list.replaceChildren(search, ...[...chosen, ...ids.filter((id) => !chosen.includes(id))]
    .filter((id) => columnOf(id) !== null && columnOf(id).title.toLowerCase().includes(sought)).slice(0, 80)
    .map((id) => el("label", {}, el("input", { type: "checkbox", checked: chosen.includes(id), disabled: id === "run",
      onchange: (event) => { toggle(id, event.target.checked); } }), ` ${columnOf(id).title}`)));
  const search = el("input", { type: "search", placeholder: "find a column", "aria-label": "find a column", oninput: () => { fill(search.value.toLowerCase()); search.focus(); } });
  const box = el("details", { class: "chooser", open: isChoosing, ontoggle: () => { isChoosing = box.open; if (box.open) fill(""); } },
    el("summary", {}, "Columns"), list);
  if (isChoosing) fill("");
  return box;
}

function toggle(id, isOn) {
  const chosen = view.columns ?? defaultColumns();
  view.columns = isOn ? [...chosen, id] : chosen.filter((other) => other !== id);
  update();
}

function download() {
  const columns = (view.columns ?? defaultColumns()).map(columnOf).filter((column) => column !== null);
  // A spreadsheet would run a text that begins like a formula.
  const safe = (text) => (/^[=+\-@\t\r]/.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text);
  const quoted = (value) => `"${safe(String(value ?? "")).replaceAll('"', '""')}"`;
  const lines = [columns.map((column) => quoted(column.title)), ...shownRuns().map((run) => columns.map((column) => quoted(column.value(run))))];
  const address = URL.createObjectURL(new Blob([lines.map((line) => line.join(",")).join("\n")], { type: "text/csv" }));
  el("a", { href: address, download: "runs.csv" }).click();
  URL.revokeObjectURL(address);
}

function renderProblems() {
  const bad = data.runs.filter((run) => run.problems.length);
  const lines = [...data.problems, ...bad.slice(0, 50).flatMap((run) => run.problems.map((text) => `${run.name}: ${text}`))];
  $("problems").replaceChildren(...(lines.length ? [el("details", {}, el("summary", { class: "problem" },
    `${bad.length} ${bad.length === 1 ? "run has" : "runs have"} files that cannot be read whole, or values that are not finite`), ...lines.map((line) => el("p", { class: "note" }, line)))] : []));
}

function update() {
  for (const [id] of TABS) $(`view-${id}`).hidden = id !== view.tab;
  renderHead();
  renderControls();
  const runs = shownRuns();
  $("counts").textContent = view.filter ? `${runs.length} of ${data.runs.length} runs` : "";
  if (view.tab === "runs") { renderCurves(runs); renderTable(runs); renderProblems(); }
  if (view.tab === "differences") renderDifferences(runs);
  if (view.tab === "sweep") renderSweep(runs);
  if (view.tab === "frontier") { renderFrontier(runs); }
  save();
}

// A live page asks its server whether runs have changed, and takes the new data with the view as it is.
let version = null;

async function poll() {
  try {
    const found = await (await fetch("version")).text();
    if (version !== null && found !== version) {
      prepare(await (await fetch("data.json")).json());
      update();
    }
    version = found;
  } catch (error) {
    $("counts").textContent = "the server does not answer";
  }
  setTimeout(poll, 3000);
}

function start() {
  restore();
  prepare(JSON.parse($("data").textContent));
  $("filter").value = view.filter;
  let waiting = null;
  $("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { view.filter = $("filter").value; update(); }, 120);
  });
  new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting) && rendered.n < rendered.runs.length) renderMore();
  }, { rootMargin: "400px" }).observe($("more"));
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(update, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  update();
  document.body.getBoundingClientRect(); // the layout is part of the first view
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  if (document.body.dataset.live === "1") poll();
}

start();
