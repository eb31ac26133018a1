// The data of the page: every case on every series, a line, with its points as columns.

const FILTERS = ["device", "pass", "mask", "dtype", "verdict"];
const BLANK = { view: "", case: "", on: "", before: "", after: "", device: "", pass: "", mask: "", dtype: "", verdict: "", text: "", baseline: "" };
let about, lines, charts, state = { ...BLANK };

async function inflate(id) {
  const packed = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Undo the byte planes of a column of all points. */
function column(data, offset, count, width) {
  const whole = new Uint8Array(count * width);
  for (let plane = 0; plane < width; plane++) {
    for (let i = 0; i < count; i++) whole[i * width + plane] = data[offset + plane * count + i];
  }
  return width === 4 ? new Int32Array(whole.buffer) : new Int16Array(whole.buffer);
}

const WIDE = ["run", "env", "ms", "error"];

/** Every line with its points: run, env, ms, standard error of its logarithm, samples, low, high, and ratio by
 * family; null where there is none. */
function decode(data) {
  const count = about.lines.reduce((sum, line) => sum + line.n, 0);
  const names = [...WIDE, "samples", "low", "high", ...about.families];
  const columns = {};
  let offset = 0;
  names.forEach((name, i) => {
    const width = i < WIDE.length ? 4 : 2;
    columns[name] = column(data, offset, count, width);
    offset += count * width;
  });
  const reader = ([step, none]) => (x) => (x === none ? null : Math.exp(x * step));
  const real = reader(about.steps.narrow), exact = reader(about.steps.wide);
  let start = 0;
  return about.lines.map((line, index) => {
    const cut = (name) => Array.from(columns[name].subarray(start, start + line.n));
    const time = cut("ms").map(exact).map((x) => (x === null ? null : line.unit * x));
    const low = cut("low").map((x, i) => (time[i] === null ? null : time[i] / real(x)));
    const high = cut("high").map((x, i) => (time[i] === null ? null : time[i] * real(x)));
    const ratio = Object.fromEntries(about.families.map((name) => [name, cut(name).map(real)]));
    const points = { run: cut("run"), env: cut("env"), ms: time, low, high, ratio,
      error: cut("error").map(exact), samples: cut("samples") };
    start += line.n;
    return { ...line, ...points, index, deviceName: about.devices[line.device] };
  });
}

const last = (xs) => xs[xs.length - 1];
const lastRatio = (line, family) => (family && line.ratio[family] ? last(line.ratio[family]) : null);
const failing = (line) => last(line.ms) === null;
const measured = (line) => line.status !== "missing" && line.status !== "not measured"; // in the latest run

const slowerNow = (line) => line.status === "slower";
const slowerThanBest = (line) => !failing(line) && line.loss > 1;
const tooFew = (line) => line.status === "too few runs";

/** The answers to "which cases?" of the filter by status, in its order. */
const VERDICTS = {
  failing,
  "over its bound": (line) => Boolean(line.alarms?.length),
  slower: slowerNow,
  missing: (line) => line.status === "missing",
  faster: (line) => line.status === "faster",
  "as before": (line) => line.status === "as before",
  "too few runs": tooFew,
  "not measured": (line) => line.status === "not measured",
  "slower than at best": slowerThanBest,
};

/** By rank (see page.py); then what is farthest below its baseline. */
function worstFirst(a, b) {
  const ratio = (line) => lastRatio(line, state.baseline) ?? 9;
  return a.rank - b.rank || ratio(a) - ratio(b) || a.case.localeCompare(b.case);
}

const valueOf = (line, filter) => (filter === "device" ? line.deviceName : line.tags?.[filter] ?? "");
const fits = (line, filter) => (filter === "verdict" ? VERDICTS[state.verdict]?.(line) : valueOf(line, filter) === state[filter]);

function shown() {
  const text = state.text.toLowerCase();
  const words = (line) => [line.case, line.tags?.model ?? "", line.tags?.shape ?? ""].join(" ").toLowerCase();
  return lines.filter((line) => FILTERS.every((name) => !state[name] || fits(line, name)) && words(line).includes(text));
}

// ---- runs and commits -----------------------------------------------------------------------------------

const envOf = (line, i) => about.envs[line.env[i]];
const whenOf = (line, i) => day(about.runs[line.run[i]][0]);
const commitOf = (line, i) => short(envOf(line, i).commit ?? "no commit");
const versionsOf = (line, i) => ["tritoncp", "torch", "triton", "driver"]
  .filter((name) => envOf(line, i)[name]).map((name) => `${name} ${envOf(line, i)[name]}`).join(", ");
const commitOfRun = (run) => about.envs[about.runs[run][2]].commit ?? "";
const nameOfRun = (run) => `${day(about.runs[run][0])}, ${short(commitOfRun(run)) || "no commit"}`;

/** The commits between two points, linked to the repository where its address is known. */
function commitRange(line, from, to) {
  const [before, after] = [from, to].map((i) => (envOf(line, i).commit ?? "").replace(/\+$/, ""));
  const text = element("code", {}, before === after ? commitOf(line, to) : `${commitOf(line, from)} … ${commitOf(line, to)}`);
  const names = [before, after].every((commit) => /^[0-9a-f]{7,64}$/.test(commit));
  if (!about.compare || !names || before === after) return text;
  return element("a", { href: about.compare.replace("BEFORE", before).replace("AFTER", after), rel: "noreferrer" }, text);
}
