// Two sides of the history next to each other, by the rules of `tritoncp perf compare` (see compare.py).

/** The half-width of Student's interval, by cubic interpolation of the page's table over 1 / freedom. */
function student(freedom) {
  const table = about.student, at = (table.length - 1) / freedom;
  const first = Math.min(Math.max(0, Math.floor(at) - 1), table.length - 4);
  let sum = 0;
  for (let i = first; i < first + 4; i++) {
    let weight = 1;
    for (let j = first; j < first + 4; j++) if (j !== i) weight *= (at - j) / (i - j);
    sum += weight * table[i];
  }
  return sum;
}

/** Whether a point is on the side that a word names, by kind: a run or version, a commit, a device. */
const NAMED = [
  (word) => (line, i) => about.runs[line.run[i]][1] === word || envOf(line, i).tritoncp === word,
  (word) => (/^[0-9a-f+]{4,}$/i.test(word) ? (line, i) => (envOf(line, i).commit ?? "").startsWith(word.toLowerCase()) : () => false),
  (word) => (line) => line.deviceName.toLowerCase().includes(word.toLowerCase()),
];

/** The points that a word names: arrays of indices, by line. */
function pointsOfWord(word) {
  for (const named of NAMED) {
    const is = named(word), side = new Map();
    for (const line of lines) {
      const at = [...line.ms.keys()].filter((i) => is(line, i));
      if (at.length) side.set(line, at);
    }
    if (side.size) return side;
  }
  return new Map();
}

/** The points that a word names; or, if none does, those of several words with commas between them. */
function pointsOf(words) {
  const whole = pointsOfWord(words);
  if (whole.size || !words.includes(",")) return whole;
  const side = new Map();
  for (const word of words.split(",").map((part) => part.trim()).filter(Boolean)) {
    for (const [line, at] of pointsOfWord(word)) side.set(line, [...(side.get(line) ?? []), ...at]);
  }
  return new Map([...side].map(([line, at]) => [line, [...new Set(at)].sort((a, b) => a - b)]));
}

/** Points by case, and by series unless the sides have no series in common. */
function groupPoints(side, bySeries) {
  const groups = new Map();
  for (const [line, at] of side) {
    const key = JSON.stringify([line.case, bySeries ? line.deviceName : ""]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(...at.map((i) => ({ line, i })));
  }
  for (const points of groups.values()) points.sort((a, b) => a.line.run[a.i] - b.line.run[b.i]);
  return groups;
}

/** Times with at most seven digits, as they are in a history, are exact; others to seven digits. */
const timeOf = ({ line, i }) => (line.ms[i] === null ? null : Number(line.ms[i].toPrecision(7)));

/** A logarithm of a time: mean, variance (null: unknown), degrees of freedom; null if all failed. */
function estimate(points) {
  const timed = points.filter(({ line, i }) => line.ms[i] !== null);
  if (!timed.length) return null;
  const logs = timed.map((point) => Math.log(timeOf(point))), n = logs.length;
  const mean = logs.reduce((sum, x) => sum + x, 0) / n;
  if (n > 1) return { mean, variance: logs.reduce((sum, x) => sum + (x - mean) ** 2, 0) / (n - 1) / n, freedom: n - 1 };
  const { line, i } = timed[0], error = line.error[i];
  return { mean, variance: error === null ? null : error ** 2, freedom: Math.max(1, line.samples[i] - 1) };
}

function compareCase(key, before, after) {
  const [name, series] = JSON.parse(key), first = estimate(before), second = estimate(after);
  const newest = last(after), fails = newest.line.ms[newest.i] === null;
  const row = { case: name, series, line: newest.line, runs: [before.length, after.length], why: fails ? newest.line.fails[newest.i] : "",
    before: first && Math.exp(first.mean), after: fails || !second ? null : Math.exp(second.mean), ratio: null, low: null, high: null };
  if (row.before === null || row.after === null) return row;
  const middle = second.mean - first.mean;
  row.ratio = Math.exp(middle);
  if (first.variance === null || second.variance === null) return row;
  const total = first.variance + second.variance;
  const parts = first.variance ** 2 / first.freedom + second.variance ** 2 / second.freedom;
  const width = parts ? student(total ** 2 / parts) * Math.sqrt(total) : 0;
  return { ...row, low: Math.exp(middle - width), high: Math.exp(middle + width) };
}

/** Compare two sides: rows, worst first, and the cases without a row. */
function compareSides(before, after) {
  const series = (side) => new Set([...side.keys()].map((line) => line.deviceName));
  const both = new Set([...series(before)].filter((name) => series(after).has(name)));
  const [first, second] = [before, after].map((side) => groupPoints(side, both.size > 0));
  const rows = [...first.keys()].filter((key) => second.has(key)).map((key) => compareCase(key, first.get(key), second.get(key)));
  const order = (row) => row.ratio ?? (row.after === null ? Infinity : -Infinity);
  const cases = new Set([...after.keys()].map((line) => line.case));
  const dropped = [...first.keys()].filter((key) => !second.has(key)).map((key) => JSON.parse(key));
  const compared = (name) => (both.size ? both.has(name) : name === "");
  const names = (keys) => keys.map(([name]) => name);
  return {
    rows: rows.sort((a, b) => (order(a) === order(b) ? 0 : order(b) - order(a))),
    missing: names(dropped.filter(([name, on]) => compared(on) || !cases.has(name))),
    added: names([...second.keys()].filter((key) => !first.has(key)).map((key) => JSON.parse(key))),
    absent: [...new Set(dropped.filter(([name, on]) => !compared(on) && cases.has(name)).map(([, on]) => on))].sort(),
  };
}

function verdict(row) {
  if (row.after === null) return row.before === null ? "fails, as before" : "FAILED";
  if (row.before === null) return "works now";
  if (row.low === null) return "one figure each";
  return row.low > 1 ? "slower" : row.high < 1 ? "faster" : "as before";
}

function summary({ rows, missing, added, absent }) {
  const ratios = rows.map((row) => row.ratio).filter(Boolean);
  return `${rows.length} cases` + (ratios.length ? `, geometric mean ${percent(geomean(ratios))}` : "")
    + [["not measured again", missing], ["new", added], ["no measurement after on", absent]]
      .filter(([, list]) => list.length).map(([label, list]) => `; ${label}: ${list.join(", ")}`).join("");
}

// ---- the view -------------------------------------------------------------------------------------------

/** The latest run and the one before it, of the first card: what the view starts with. */
function standardSides() {
  const { run, before } = sortCards().find((card) => card.before !== null) ?? about.cards[0];
  return { before: about.runs[before ?? run][1], after: about.runs[run][1] };
}

/** Fill the two lists of runs and commits, newest first, and choose the sides in them. */
function chooseSides() {
  const option = ([value, text]) => element("option", { value }, text);
  const runs = about.runs.map(([, word], run) => [word, nameOfRun(run)]).reverse();
  const commits = [...new Set(about.runs.map((_, run) => commitOfRun(run)))].filter(Boolean).reverse().map((commit) => [commit, short(commit)]);
  for (const name of ["before", "after"]) {
    const list = $(name), words = state[name];
    if (!list.options.length) {
      list.append(element("optgroup", { label: "Runs" }, ...runs.map(option)), element("optgroup", { label: "Commits" }, ...commits.map(option)));
    }
    const parts = words.split(",").filter(Boolean);
    const text = parts.length > 1 ? `${parts.length} runs together` : words;
    if (![...list.options].some(({ value }) => value === words)) list.prepend(option([words, text]));
    list.value = words;
  }
}

function showComparison() {
  Object.assign(state, { ...standardSides(), ...Object.fromEntries(["before", "after"].filter((name) => state[name]).map((name) => [name, state[name]])) });
  chooseSides();
  const sides = [state.before, state.after].map(pointsOf), comparison = compareSides(...sides);
  const unknown = [state.before, state.after].filter((_, i) => !sides[i].size);
  $("compare-summary").textContent = summary(comparison)
    + unknown.map((words) => `; “${words}” names no run, version, commit or device of this page`).join("");
  $("status").textContent = "";
  const time = (x) => (x === null ? "failed" : String(Number(Number(x.toPrecision(10)).toPrecision(4)))); // as format_time
  const change = (row) => (row.ratio === null ? "–" : element("span", { class: row.low > 1 ? "worse" : row.high !== null && row.high < 1 ? "better" : "" }, percent(row.ratio)));
  const worse = (row) => ["slower", "FAILED"].includes(verdict(row));
  fillPages("compare-table", `${state.after} against ${state.before}: largest loss first`, [
    { name: "Case", kind: "case", value: (row) => row.case, cell: (row) => element("div", {}, caseLink(row.line), row.why ? element("div", { class: "small" }, row.why) : null) },
    { name: "GPU", kind: "wide", value: (row) => row.series, cell: (row) => row.series },
    { name: "Before, ms", kind: "number", value: (row) => row.before, cell: (row) => time(row.before) },
    { name: "After, ms", kind: "number", value: (row) => row.after, cell: (row) => time(row.after) },
    { name: "Change", kind: "number", value: (row) => row.ratio ?? (row.after === null ? Infinity : null), cell: change },
    { name: `${100 * about.level}% interval`, kind: "number", value: (row) => row.low, cell: (row) => (row.low === null ? "unknown" : interval(row)) },
    { name: "Runs", kind: "number wide", value: (row) => row.runs[1], cell: (row) => row.runs.join(", ") },
    { name: "Verdict", kind: "", value: verdict, cell: (row) => element("span", { class: worse(row) ? "worse" : verdict(row) === "faster" ? "better" : "" }, verdict(row)) },
  ], comparison.rows);
}
