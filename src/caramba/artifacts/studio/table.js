// The table of runs, the differences of some of them, and the dialog of one number or run.

const CHUNK = 60;
let rendered = { runs: [], n: 0, columns: [] };

function renderTable(runs) {
  const ids = view.columns ?? defaultColumns();
  const columns = ids.map(columnOf).filter((column) => column !== null);
  const head = el("tr", {}, ...columns.map((column) => {
    const isSorted = view.sort === column.id;
    return el("th", { scope: "col", class: column.kind === "word" && !column.id.startsWith("k:") ? "word" : null, title: column.title,
      "aria-sort": isSorted ? (view.down ? "descending" : "ascending") : null },
    el("button", { onclick: () => sortBy(column) }, ...breakable(column.title), isSorted ? (view.down ? " ▼" : " ▲") : ""));
  }));
  rendered = { runs, n: 0, columns, body: el("tbody") };
  $("runs").replaceChildren(el("thead", {}, head), rendered.body);
  renderMore();
}

// A long key breaks after its marks, not within a word.
const breakable = (text) => text.split(/(?<=[._@/,=])/).flatMap((part, index) => (index ? [el("wbr"), part] : [part]));

function renderMore() {
  const { runs, columns, body } = rendered;
  const end = Math.min(runs.length, rendered.n + CHUNK);
  body.append(...runs.slice(rendered.n, end).map((run) => row(run, columns)));
  rendered.n = end;
  $("more").textContent = end < runs.length ? `${end} of ${runs.length} runs; scroll for more` : "";
}

function sortBy(column) {
  if (view.sort === column.id) view.down = !view.down;
  else [view.sort, view.down] = [column.id, column.id === "updated" || (column.metric !== undefined && isHigher(column.metric))];
  update();
}

const isHigher = (metric) => data.metrics[metric][2] === 1;

function row(run, columns) {
  const cells = columns.map((column) => (column.id === "run" ? nameCell(run) : cell(run, column)));
  return el("tr", { class: isPinned(run) ? "pinned" : null }, ...cells);
}

function nameCell(run) {
  const pinned = isPinned(run);
  return el("th", { scope: "row", title: run.name }, el("div", { class: "name" },
    el("button", { class: "pin", "aria-pressed": String(pinned), "aria-label": `pin ${run.name}`,
      onclick: () => pin(run) }, pinned ? "★" : "☆"),
    el("button", { onclick: () => showRun(run) }, oneExperiment ? shortName(run) : run.name),
    run.problems.length ? el("span", { class: "problem", title: run.problems.join("\n") }, "⚠") : null));
}

function pin(run) {
  view.pins = isPinned(run) ? view.pins.filter((name) => name !== run.name) : [...view.pins, run.name];
  update();
}

function cell(run, column) {
  const value = column.value(run);
  if (value === undefined || value === "" || value === null) return el("td", {}, "–");
  const kind = column.kind === "word" && typeof value !== "number" ? "word" : null;
  if (column.metric !== undefined) {
    const [, spread] = run.values.get(column.metric);
    return el("td", {}, el("button", { onclick: () => showMetric(run, column.metric) }, measuredText(value, spread)),
      spread ? el("span", { class: "spread" }, ` ± ${measuredText(spread, spread)}`) : null);
  }
  if (column.id === "state") return el("td", { class: `word ${run.state}`, title: run.error || null }, value);
  if (column.id === "step") {
    const text = run.phase ? `${run.phase} ${run.step.toLocaleString("en-US")}${run.steps ? `/${run.steps.toLocaleString("en-US")}` : ""}` : "–";
    return el("td", {}, text);
  }
  if (column.id === "updated") return el("td", { title: new Date(1000 * value).toISOString() }, `${ageText(Date.now() / 1000 - value)} ago`);
  if (column.id === "seconds") return el("td", { title: `${value} s` }, ageText(value));
  if (column.id === "loss" || column.id === "held_out") {
    return el("td", {}, el("button", { onclick: () => showLast(run, column.id) }, numberText(value)));
  }
  return el("td", { class: kind, title: String(value) }, typeof value === "number" ? String(run.words.get(column.title) ?? numberText(value)) : String(value));
}

// ----- one number, one run

function dialog(title, pairs, ...more) {
  const list = el("dl", {}, ...pairs.filter(([, value]) => value !== undefined && value !== "" && value !== null)
    .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  $("detail").replaceChildren(el("button", { class: "close", onclick: () => $("detail").close() }, "Close"),
    el("h2", { id: "detail-title" }, title), list, ...more);
  $("detail").showModal();
}

function originOf(run) {
  return [["run", run.name], ["folder", run.path], ["manifest, SHA-256", run.sha && el("code", {}, run.sha)],
    ["git", run.git || "not recorded"], ["proxy teacher", run.proxy]];
}

function spreadText(spread, isError, n) {
  if (spread === null || spread === undefined) return undefined;
  return `${spread} (${isError ? "standard error of the mean" : "standard deviation"}${n ? `, n = ${n.toLocaleString("en-US")}` : ""})`;
}

function showMetric(run, metric) {
  const [value, spread, isError, n] = run.values.get(metric);
  const [key, unit] = data.metrics[metric];
  const link = run.link && el("a", { href: `${run.link}#${encodeURIComponent(`metric:${key}`)}` }, "report.html");
  dialog(`${numberText(value)} ${unit}`, [["key", el("code", {}, key)], ["value", `${value} ${unit}`],
    ["±", spreadText(spread, isError, n)], ["in", link || `${run.path}/artifacts/report.json`], ...originOf(run)]);
}

function showLast(run, kind) {
  const [phase, step, value] = run.last[kind];
  const key = kind === "loss" ? "running_loss, or loss" : "val_loss";
  dialog(numberText(value), [["key", el("code", {}, key)], ["value", String(value)], ["phase", phase],
    ["step", step.toLocaleString("en-US")], ["in", `${run.path}/events.jsonl`], ...originOf(run)]);
}

function showRun(run) {
  const steps = run.phase ? `${run.phase}, step ${run.step}${run.steps ? ` of ${run.steps}` : ""}` : "";
  const words = [...run.words].map((pair) => pair.join("=")).join(" ");
  dialog(run.name, [["state", el("span", { class: run.state }, run.state)], ["error", run.error], ["at", steps],
    ["swept", words], ["sweep", run.sweep], ["tags", run.tags.join(", ")], ["note", run.note],
    ["report", run.link && el("a", { href: run.link }, "report.html")], ["begun", new Date(1000 * run.started).toISOString()],
    ...originOf(run).slice(1), ["cannot be read", run.problems.join("\n")]],
  el("button", { onclick: () => { $("detail").close(); pin(run); } }, isPinned(run) ? "Unpin" : "Pin"));
}

// ----- what differs between n runs

const MOST_COLUMNS = 8;

function renderDifferences(runs) {
  const pinned = runs.filter(isPinned);
  const chosen = pinned.length > 1 ? pinned : runs.slice(0, MOST_COLUMNS);
  const place = $("view-differences");
  if (chosen.length < 2) {
    place.replaceChildren(el("p", { class: "note" }, "Differences need two runs: pin some with ☆, or widen the filter."));
    return;
  }
  const keys = data.keys.filter((key) => new Set(chosen.map((run) => configOf(run).get(key))).size > 1);
  const metrics = data.metrics.map((_, index) => index).filter((index) =>
    new Set(chosen.map((run) => metricValue(run, index))).size > 1);
  const note = `${chosen.length} runs${pinned.length > 1 ? " (pinned)" : ": the first of the table; pin runs to choose"}: ` +
    `${keys.length} keys of the manifest and ${metrics.length} metrics differ.` +
    (data.left_out ? ` ${data.left_out} keys are left out of this page: caramba compare has them.` : "");
  const head = el("tr", {}, el("th", { scope: "col" }, "key"), ...chosen.map((run) => el("th", { scope: "col", title: run.name },
    el("button", { onclick: () => showRun(run) }, labelOf(run)))));
  const body = el("tbody", {},
    ...keys.map((key) => el("tr", {}, el("th", { scope: "row", title: key }, el("code", {}, ...breakable(key))),
      ...chosen.map((run) => {
        const text = configOf(run).get(key) ?? "–";
        return el("td", { title: text }, text);
      }))),
    ...metrics.map((index) => metricRow(chosen, index)));
  place.replaceChildren(el("p", { class: "note" }, note, " ± is defined by the number that it follows: click it. The best of a metric is bold."),
    el("div", { class: "scroll", role: "region", "aria-label": "Differences", tabindex: "0" },
      el("table", { id: "differences" }, el("thead", {}, head), body)));
}

function metricRow(chosen, index) {
  const values = chosen.map((run) => metricValue(run, index)).filter((value) => value !== undefined);
  const best = isHigher(index) ? Math.max(...values) : Math.min(...values);
  const key = data.metrics[index][0];
  return el("tr", {}, el("th", { scope: "row", title: key }, el("code", {}, ...breakable(key))), ...chosen.map((run) => {
    const value = metricValue(run, index);
    if (value === undefined) return el("td", {}, "–");
    const spread = run.values.get(index)[1];
    return el("td", { class: value === best ? "best" : null },
      el("button", { onclick: () => showMetric(run, index) }, measuredText(value, spread)),
      spread ? el("span", { class: "spread" }, ` ± ${measuredText(spread, spread)}`) : null);
  }));
}
