"use strict";
// The data of the page, what is chosen of it, and how values are found and written.

const $ = (id) => document.getElementById(id);
let data;
let byName = new Map();
let oneExperiment = false;
const NEEDED = { tab: "runs", filter: "", sort: "updated", down: true, pins: [], columns: null, curve: null, phase: null,
  x: "step", lines: "12", band: false, log: false, metric: null, fx: null, fy: null };
const view = { ...NEEDED };

// Every text of a run comes from a file: it becomes text, never markup.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

function prepare(plain) {
  data = plain;
  byName = new Map();
  for (const run of data.runs) {
    run.words = new Map(run.words.map(([key, value]) => [data.swept[key], value]));
    run.values = new Map(run.metrics.map(([key, ...rest]) => [key, rest]));
    byName.set(run.name, run);
  }
  oneExperiment = new Set(data.runs.map((run) => run.name.slice(0, run.name.lastIndexOf("/")))).size < 2;
  view.pins = view.pins.filter((name) => byName.has(name));
}

// The manifest's leaves in which this run differs from others; read when they are asked for.
function configOf(run) {
  if (run.leaves === undefined) {
    run.leaves = new Map();
    for (let index = 0; index < run.config.length; index += 2) {
      run.leaves.set(data.keys[run.config[index]], data.values[run.config[index + 1]]);
    }
  }
  return run.leaves;
}

const isPinned = (run) => view.pins.includes(run.name);
const shortName = (run) => run.name.slice(run.name.lastIndexOf("/") + 1);

// The words that tell a run from others, or its name.
function labelOf(run, withSeed = true) {
  const words = [...run.words].filter(([key]) => withSeed || !data.seeds[data.swept.indexOf(key)]);
  return words.map(([key, value]) => `${key.split(".").slice(-1)[0]}=${value}`).join(" ") || shortName(run);
}

function numberText(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}

// A value to the second digit of its ±.
function measuredText(value, spread) {
  if (!spread || !Number.isFinite(spread)) return numberText(value);
  const decimals = 1 - Math.floor(Math.log10(Math.abs(spread)));
  if (decimals > 9 || decimals < -6) return numberText(value);
  return value.toLocaleString("en-US", { minimumFractionDigits: Math.max(0, decimals), maximumFractionDigits: Math.max(0, decimals) });
}

function ageText(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.max(0, Math.round(seconds))} s`;
}

const metricIndex = (key) => data.metrics.findIndex(([name]) => name === key);
const metricValue = (run, index) => run.values.get(index)?.[0];
const lastOf = (run, kind) => run.last[kind]?.[2];
const tokensOf = (run) => {
  let total = 0;
  for (const [name, , each] of run.phases) {
    const point = run.curves.find(([place]) => data.curves[place][0] === name);
    const steps = point === undefined ? 0 : lastStep(run, name);
    if (each == null) return undefined;
    total += each * steps;
  }
  return total || undefined;
};

const BASE = {
  run: ["run", (run) => run.name, "word"],
  state: ["state", (run) => run.state, "word"],
  step: ["step", (run) => run.step, "number"],
  loss: ["loss (last)", (run) => lastOf(run, "loss"), "number"],
  held_out: ["held-out loss (last)", (run) => lastOf(run, "held_out"), "number"],
  seconds: ["training time", (run) => run.seconds || undefined, "number"],
  tokens: ["tokens", tokensOf, "number"],
  sweep: ["sweep", (run) => run.sweep, "word"],
  tag: ["tags", (run) => run.tags.join(", "), "word"],
  note: ["note", (run) => run.note, "word"],
  updated: ["last sign", (run) => run.updated, "number"],
};

// A column by its id: a name of BASE, `m:KEY` of a metric, `k:KEY` of the command line, `c:KEY` of the manifest.
function columnOf(id) {
  if (BASE[id]) return { id, title: BASE[id][0], value: BASE[id][1], kind: BASE[id][2] };
  const key = id.slice(2);
  if (id.startsWith("m:")) {
    const index = metricIndex(key);
    return index < 0 ? null : { id, title: key, value: (run) => metricValue(run, index), kind: "number", metric: index };
  }
  if (id.startsWith("k:")) return { id, title: key, value: (run) => asNumber(run.words.get(key)), kind: "word" };
  return { id, title: key, value: (run) => asNumber(configOf(run).get(key)), kind: "word" };
}

function asNumber(text) {
  if (text === undefined || text === "") return undefined;
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
}

function defaultColumns() {
  const some = (kind) => data.runs.some((run) => run.last[kind]);
  return [
    "run", "state", "step", ...data.swept.slice(0, 6).map((key) => `k:${key}`),
    ...(some("loss") ? ["loss"] : []), ...(some("held_out") ? ["held_out"] : []),
    ...data.headline.slice(0, 3).map((index) => `m:${data.metrics[index][0]}`),
    ...(data.sweeps.length ? ["sweep"] : []),
    ...(data.runs.some((run) => run.tags.length) ? ["tag"] : []), ...(data.runs.some((run) => run.note) ? ["note"] : []),
    "seconds", "updated",
  ];
}

// ----- filter: words of which all must hold; `key=value`, `key<number`, `key~text`, or a text anywhere.

const CONDITION = /^([^=<>!~]+)(!=|<=|>=|=|<|>|~)(.*)$/;

function compileFilter(text) {
  const words = text.match(/"[^"]*"|\S+/g) ?? [];
  const tests = words.map((word) => word.replaceAll('"', "")).map((word) => {
    const parts = CONDITION.exec(word);
    if (!parts) {
      const sought = word.toLowerCase();
      return (run) => haystack(run).includes(sought);
    }
    const [, key, sign, wanted] = parts;
    const find = finderOf(key);
    return find === null ? () => false : (run) => holds(find(run), sign, wanted);
  });
  return (run) => tests.every((test) => test(run));
}

function finderOf(key) {
  if (BASE[key]) return BASE[key][1];
  if (data.swept.includes(key)) return (run) => run.words.get(key);
  const metric = metricIndex(key);
  if (metric >= 0) return (run) => metricValue(run, metric);
  if (data.keys.includes(key)) return (run) => configOf(run).get(key);
  const near = data.swept.find((name) => name.endsWith(`.${key}`));
  if (near) return (run) => run.words.get(near);
  return null;
}

function holds(value, sign, wanted) {
  if (sign === "!=") return String(value ?? "") !== wanted;
  if (value === undefined || value === null) return false;
  if (sign === "~") return String(value).toLowerCase().includes(wanted.toLowerCase());
  if (sign === "=") {
    return String(value) === wanted || (wanted !== "" && Number(value) === Number(wanted)) ||
      String(value).split(", ").includes(wanted);
  }
  const [one, other] = [Number(value), Number(wanted)];
  return { "<": one < other, ">": one > other, "<=": one <= other, ">=": one >= other }[sign];
}

function haystack(run) {
  run.text ??= [run.name, run.state, run.sweep, run.note, ...run.tags, ...[...run.words].map((pair) => pair.join("="))]
    .join(" ").toLowerCase();
  return run.text;
}

function shownRuns() {
  const keep = compileFilter(view.filter);
  const column = columnOf(view.sort) ?? columnOf("updated");
  const sign = view.down ? -1 : 1;
  const keyed = data.runs.filter(keep).map((run) => ({ run, value: column.value(run), pinned: isPinned(run) }));
  keyed.sort((a, b) => (b.pinned - a.pinned) || order(a.value, b.value, sign) || (a.run.name < b.run.name ? -1 : 1));
  return keyed.map((item) => item.run);
}

function order(a, b, sign) {
  const [noA, noB] = [a === undefined || a === "", b === undefined || b === ""];
  if (noA || noB) return noA - noB; // what has no value comes last in both directions
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * (String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0);
}

// ----- curves

function decode(run) {
  if (run.points === undefined) {
    const text = atob(run.packed);
    const bytes = new Uint8Array(text.length);
    for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
    const floats = new Float32Array(bytes.buffer);
    run.points = new Map();
    let at = 0;
    for (const [place, n] of run.curves) {
      run.points.set(place, [floats.subarray(at, at + n), floats.subarray(at + n, at + 2 * n),
        floats.subarray(at + 2 * n, at + 3 * n)]);
      at += 3 * n;
    }
  }
  return run.points;
}

function lastStep(run, phase) {
  let last = 0;
  for (const [place, [steps]] of decode(run)) {
    if (data.curves[place][0] === phase && steps.length) last = Math.max(last, steps[steps.length - 1]);
  }
  return last;
}

// [x, y] of a run's curve, or null where it has none, or no tokens of a step.
function curveOf(run, phase, key, axis) {
  const place = data.curves.findIndex(([name, metric]) => name === phase && metric === key);
  const found = decode(run).get(place);
  if (!found || !found[0].length) return null;
  const [steps, seconds, values] = found;
  if (axis === "time") return [seconds, values];
  if (axis === "step") return [steps, values];
  const each = run.phases.find(([name]) => name === phase)?.[2];
  return each == null ? null : [Float64Array.from(steps, (step) => step * each), values];
}

// ----- the chosen view in the address, so that a link shows the same

function save() {
  const kept = Object.fromEntries(Object.entries(view).filter(([key, value]) =>
    JSON.stringify(value) !== JSON.stringify(NEEDED[key])));
  const text = Object.keys(kept).length ? `#${encodeURIComponent(JSON.stringify(kept))}` : " ";
  history.replaceState(null, "", text === " " ? location.pathname + location.search : text);
}

function restore() {
  if (location.hash.length < 3) return;
  try {
    const kept = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    for (const key of Object.keys(NEEDED)) {
      if (key in kept && (NEEDED[key] === null || typeof kept[key] === typeof NEEDED[key])) view[key] = kept[key];
    }
    if (!Array.isArray(view.pins)) view.pins = [];
    if (!Array.isArray(view.columns)) view.columns = null;
  } catch (error) {
    console.warn("the address holds no view", error);
  }
}
