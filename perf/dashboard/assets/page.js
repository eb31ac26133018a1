"use strict";
// The dashboard's behaviour. Data comes deflated in the page; what is shown is a function of `state`, which
// lives in the address (#case=…&pass=…), so that every view is a link and Back works.

const $ = (id) => document.getElementById(id);
const FILTERS = ["device", "pass", "mask", "dtype"];
const BLANK = { case: "", on: "", device: "", pass: "", mask: "", dtype: "", text: "", baseline: "" };
let about, lines, charts, state = { ...BLANK };

// ---- elements -------------------------------------------------------------------------------------------

/** A new element: text is always text, never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Fill a table: heads are [text, class], rows are arrays of texts, numbers or elements. */
function fill(table, caption, heads, rows) {
  const cell = (tag, content, kind) => element(tag, { class: kind, scope: tag === "th" ? "col" : null }, content);
  table.replaceChildren(
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...heads.map(([text, kind]) => cell("th", text, kind)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((x, i) => cell("td", x, heads[i][1]))))),
  );
}

/** A table that is made when its <details> is first opened. */
function fallback(id, caption, heads, rows) {
  const details = $(id), summary = details.querySelector("summary");
  details.open = false;
  details.replaceChildren(summary);
  details.ontoggle = () => {
    if (!details.open || details.querySelector("table")) return;
    const table = element("table");
    fill(table, caption, heads, rows());
    details.append(element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table));
  };
}

// ---- numbers --------------------------------------------------------------------------------------------

const ms = (x) => (x === null || x === undefined ? "–" : x.toPrecision(4) + " ms");
const times = (x) => (x === null || x === undefined ? "–" : x.toFixed(2) + "×");
const percent = (ratio) => (ratio >= 1 ? "+" : "−") + Math.abs(100 * (ratio - 1)).toFixed(1) + " %";
const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const day = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ");
const geomean = (xs) => Math.exp(xs.reduce((sum, x) => sum + Math.log(x), 0) / xs.length);
const bytes = (x) => {
  const at = Math.min(3, Math.floor(Math.log10(Math.max(x, 1)) / 3));
  return (at ? (x / 1e3 ** at).toPrecision(3) : String(x)) + [" B", " kB", " MB", " GB"][at];
};
const short = (text) => (/^[0-9a-f]{40}\+?$/.test(text) ? text.slice(0, 10) + (text.endsWith("+") ? "+" : "") : text);

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

/** Every line with its points: run, env, ms, low, high, and ratio by family; null where there is none. */
function decode(data) {
  const count = about.lines.reduce((sum, line) => sum + line.n, 0);
  const names = ["run", "env", "ms", "low", "high", ...about.families];
  const columns = {};
  let offset = 0;
  names.forEach((name, i) => {
    const width = i < 2 ? 4 : 2;
    columns[name] = column(data, offset, count, width);
    offset += count * width;
  });
  const real = (x) => (x === about.none ? null : Math.exp(x * about.step));
  let start = 0;
  return about.lines.map((line) => {
    const cut = (name) => Array.from(columns[name].subarray(start, start + line.n));
    const time = cut("ms").map((x) => (x === about.none ? null : line.unit * real(x)));
    const low = cut("low").map((x, i) => (time[i] === null ? null : time[i] / real(x)));
    const high = cut("high").map((x, i) => (time[i] === null ? null : time[i] * real(x)));
    const ratio = Object.fromEntries(about.families.map((name) => [name, cut(name).map(real)]));
    const points = { run: cut("run"), env: cut("env"), ms: time, low, high, ratio };
    start += line.n;
    return { ...line, ...points, deviceName: about.devices[line.device] };
  });
}

const last = (xs) => xs[xs.length - 1];
const lastRatio = (line, family) => (family && line.ratio[family] ? last(line.ratio[family]) : null);
const failing = (line) => last(line.ms) === null;

const slowerNow = (line) => line.latest.verdict === "slower";
const slowerThanBest = (line) => !failing(line) && line.loss > 1;
const tooFew = (line) => line.latest.verdict === "too few runs";

/** By rank (see dashboard.py); then what is farthest below its baseline. */
function worstFirst(a, b) {
  const ratio = (line) => lastRatio(line, state.baseline) ?? 9;
  return a.rank - b.rank || ratio(a) - ratio(b) || a.case.localeCompare(b.case);
}

const valueOf = (line, filter) => (filter === "device" ? line.deviceName : line.tags?.[filter] ?? "");

function shown() {
  const text = state.text.toLowerCase();
  const about = (line) => [line.case, line.tags?.model ?? "", line.tags?.shape ?? ""].join(" ").toLowerCase();
  const fits = (line) => FILTERS.every((name) => !state[name] || valueOf(line, name) === state[name]);
  return lines.filter((line) => fits(line) && about(line).includes(text));
}

// ---- charts ---------------------------------------------------------------------------------------------

async function makeCharts() {
  const items = JSON.parse($("data-charts").textContent);
  charts = {};
  Bokeh.set_log_level("error"); // empty charts have no ranges yet, and say so
  for (const [id, item] of Object.entries(items)) {
    const views = await Bokeh.embed.embed_item(item, id);
    charts[id] = [...views.roots][0].model;
  }
}

function put(id, source, data) {
  charts[id].document.get_model_by_name(source).data = data;
}

function paint() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  for (const chart of Object.values(charts)) {
    chart.setv({ background_fill_color: colour("--chart"), border_fill_color: colour("--chart") });
    for (const axis of [...chart.below, ...chart.left].filter((x) => x.axis_label !== undefined)) {
      axis.setv({ axis_label_text_color: colour("--faint"), major_label_text_color: colour("--faint"),
                  axis_line_color: colour("--rule"), major_tick_line_color: colour("--rule"),
                  minor_tick_line_color: null, axis_label_text_font_style: "normal" });
    }
    for (const grid of chart.center.filter((x) => x.grid_line_color !== undefined)) {
      grid.grid_line_color = colour("--rule");
    }
  }
}

/** What the lines of a chart are: those of `whose` that are among `present`. */
function legend(id, whose, present) {
  const entry = (name) => {
    const at = whose.indexOf(name), swatch = element("i", { "aria-hidden": "true" });
    swatch.style.borderColor = about.colours[at % about.colours.length];
    swatch.style.borderTopStyle = ["solid", "dashed", "dotted"][Math.floor(at / about.colours.length) % 3];
    return element("li", {}, swatch, name);
  };
  $(id).replaceChildren(...present.map(entry));
}

function spark(line) {
  const box = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  box.setAttribute("class", "spark");
  box.setAttribute("viewBox", "0 0 110 24");
  box.setAttribute("aria-hidden", "true");
  const step = Math.max(1, Math.floor(line.n / 55)), kept = [];
  for (let i = 0; i < line.n; i += step) {
    const part = line.ms.slice(i, i + step).filter((x) => x !== null).sort((a, b) => a - b);
    if (part.length) kept.push([i, part[part.length >> 1]]);
  }
  if (kept.length < 2) return box;
  const ys = kept.map((pair) => pair[1]), low = Math.min(...ys), high = Math.max(...ys);
  const x = (i) => (2 + (106 * i) / Math.max(1, line.n - 1)).toFixed(1);
  const y = (v) => (22 - (20 * (v - low)) / Math.max(high - low, 0.02 * high)).toFixed(1);
  const add = (tag, attributes) => {
    const child = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) child.setAttribute(name, value);
    box.append(child);
  };
  for (const change of line.changes) add("line", { x1: x(change.at), x2: x(change.at), y1: 1, y2: 23 });
  add("path", { d: "M" + kept.map(([i, v]) => `${x(i)} ${y(v)}`).join("L") });
  return box;
}

// ---- overview -------------------------------------------------------------------------------------------

/** Over runs, the geometric mean of every case's newest ratio: runs that measured a part move only that. */
function meansOverRuns(chosen, family) {
  const byRun = new Map();
  for (const line of chosen) {
    line.ratio[family]?.forEach((ratio, i) => {
      if (ratio === null) return;
      if (!byRun.has(line.run[i])) byRun.set(line.run[i], []);
      byRun.get(line.run[i]).push([line, ratio]);
    });
  }
  const newest = new Map();
  let sum = 0;
  return [...byRun.keys()].sort((a, b) => a - b).map((run) => {
    for (const [line, ratio] of byRun.get(run)) {
      sum += Math.log(ratio) - (newest.get(line) ?? 0);
      newest.set(line, Math.log(ratio));
    }
    return [run, Math.exp(sum / newest.size), newest.size];
  });
}

function showOverview() {
  const chosen = shown().sort(worstFirst);
  $("status").textContent = `${chosen.length} of ${lines.length} cases`
    + [[failing, "failing"], [slowerNow, "slower in the latest run"], [slowerThanBest, "slower than at best"]]
      .map(([is, what]) => [chosen.filter(is).length, what]).filter(([n]) => n).map(([n, what]) => `, ${n} ${what}`).join("");
  const devices = about.devices.filter((name) => chosen.some((line) => line.deviceName === name));
  $("cards").replaceChildren(...devices.map((name) => card(name, chosen.filter((line) => line.deviceName === name))));
  showMeans(chosen, devices);
  const heads = [["Case"], ["GPU", "wide"], ["Time", "number"],
                 ["Latest against before", "number"], ["Since best", "number"],
                 [state.baseline ? `÷ ${state.baseline}` : "÷", "number"], ["History", "wide"]];
  heads[0][1] = "case";
  fill($("cases"), `${chosen.length} cases`,
       heads, chosen.map(row));
}

function row(line) {
  const link = element("a", { href: address({ case: line.case, on: line.deviceName }) }, line.case);
  const model = line.tags?.model ? element("div", { class: "small" }, line.tags.model) : null;
  const now = failing(line) ? element("span", { class: "failed" }, "failed") : ms(last(line.ms));
  const lost = line.loss, better = line.changes.length && last(line.changes).after < last(line.changes).before;
  const since = !line.changes.length || failing(line) ? "–" : lost > 1
    ? element("span", { class: "worse" }, percent(lost))
    : element("span", { class: better ? "better" : "" }, better ? "best" : "–");
  const ratio = lastRatio(line, state.baseline), goal = line.goal?.[state.baseline];
  const shownRatio = element("span", { class: ratio !== null && goal && ratio < goal ? "worse" : "" },
    times(ratio) + (goal && ratio !== null ? ` (goal ${goal})` : ""));
  return [element("div", {}, link, model), line.deviceName, now, latest(line), since, shownRatio, spark(line)];
}

const interval = ({ low, high }) => `${percent(low).replace(" %", "")} … ${percent(high)}`;

/** The newest run against those before it: the change, and its interval below. */
function latest(line) {
  const { verdict, ratio } = line.latest;
  if (failing(line)) return element("span", { class: "failed" }, verdict === "failing" ? "fails now" : "fails still");
  if (tooFew(line)) return element("span", { class: "small" }, verdict);
  const kind = { slower: "worse", faster: "better" }[verdict];
  return element("div", {}, element("span", { class: kind }, percent(ratio)), element("div", { class: "small wide" }, interval(line.latest)));
}

function card(name, chosen) {
  const list = element("dl");
  const say = (what, value, kind) => list.append(element("dt", {}, what), element("dd", { class: kind }, value));
  for (const family of about.families) {
    const ratios = chosen.map((line) => lastRatio(line, family)).filter((x) => x !== null);
    if (ratios.length) say(`÷ ${family} (${ratios.length})`, times(geomean(ratios)));
  }
  const count = (is) => chosen.filter(is).length, bad = (n, kind) => [`${n} of ${chosen.length}`, n ? kind : ""];
  say("failing", ...bad(count(failing), "failed"));
  say("latest slower than before", ...bad(count(slowerNow), "worse"));
  say("slower than at best", ...bad(count(slowerThanBest), "worse"));
  if (count(tooFew)) say("too few runs to say", ...bad(count(tooFew), ""));
  say("last measured", day(Math.max(...chosen.map((line) => about.runs[last(line.run)][0]))));
  return element("div", { class: "card" }, element("h3", {}, name), list);
}

function showMeans(chosen, devices) {
  const family = state.baseline, rows = [];
  about.devices.forEach((name, i) => {
    const means = family && devices.includes(name)
      ? meansOverRuns(chosen.filter((line) => line.deviceName === name), family) : [];
    put("chart-overview", `overview-${i}`, { x: means.map((m) => m[0]), y: means.map((m) => m[1]),
      when: means.map((m) => `${day(about.runs[m[0]][0])}, ${m[2]} cases`) });
    means.forEach((m) => rows.push([name, day(about.runs[m[0]][0]), m[1].toFixed(3), m[2]]));
  });
  $("speed").hidden = !rows.length;
  legend("legend-overview", about.devices, about.devices.filter((name) => rows.some((row) => row[0] === name)));
  put("chart-overview", "one", { x: rows.length ? [0, about.runs.length - 1] : [], y: rows.length ? [1, 1] : [] });
  $("speed-title").textContent = `${family} ÷ tritoncp, geometric mean, run by run: above 1, tritoncp is faster`;
  fallback("overview-table", `Geometric mean of ${family} over tritoncp`,
    [["GPU"], ["Run"], ["Geometric mean", "number"], ["Cases", "number"]], () => rows.reverse());
}

const KERNEL_COLUMNS = { kernel: "", head_dim: "number", dtype: "", variant: "", config: "", registers: "number",
  spill_bytes: "number", shared_bytes: "number", mma: "", tma: "number", loop: "number", masked_loop: "number",
  loop_spills: "number", bound: "number", limit: "", failed: "" };

/** A table for each architecture, made when it is opened. */
function showResources() {
  if (!about.resources.length) return;
  const text = (x) => (x === undefined ? "–" : typeof x !== "object" ? String(x)
    : x.BLOCK_M !== undefined ? `${x.BLOCK_M}×${x.BLOCK_N} ${x.num_warps}/${x.num_stages}`
    : Array.isArray(x) ? x.join(" ") : Object.entries(x).map(([name, count]) => `${count} ${name}`).join(", "));
  $("resources").replaceChildren(element("h3", {}, "Compiled kernels, by architecture"),
    element("p", { class: "help" }, "Tiles are BLOCK_M×BLOCK_N warps/stages; loop: instructions of the inner loop; bound: part of the peak that its instructions allow."));
  for (const arch of new Set(about.resources.map((line) => line.arch))) {
    const kernels = about.resources.filter((line) => line.arch === arch), id = `kernels-${arch}`;
    const bad = kernels.filter((line) => line.spill_bytes > 0 || line.failed).length;
    const said = `${arch}: ${kernels.length} kernels` + (bad ? `, ${bad} with spilled registers or not compiled` : "");
    $("resources").append(element("details", { id }, element("summary", {}, said)));
    const names = Object.keys(KERNEL_COLUMNS).filter((name) => kernels.some((line) => line[name] !== undefined));
    fallback(id, `Compiled for ${arch}`, names.map((name) => [name.replace("_", " "), KERNEL_COLUMNS[name]]),
      () => kernels.map((line) => names.map((name) =>
        element("span", { class: name === "spill_bytes" && line[name] > 0 ? "worse" : "" }, text(line[name])))));
  }
}

// ---- one case -------------------------------------------------------------------------------------------

const envOf = (line, i) => about.envs[line.env[i]];
const whenOf = (line, i) => day(about.runs[line.run[i]][0]);
const commitOf = (line, i) => short(envOf(line, i).commit ?? "no commit");
const versionsOf = (line, i) => ["tritoncp", "torch", "triton", "driver"]
  .filter((name) => envOf(line, i)[name]).map((name) => `${name} ${envOf(line, i)[name]}`).join(", ");

function showCase(line) {
  $("status").textContent = `${line.case} on ${line.deviceName}: ${counted(line.n, "measurement")}, ${counted(line.changes.length, "change")} of level`;
  $("case-title").textContent = line.case;
  $("case-tags").textContent = [line.deviceName, ...Object.values(line.tags ?? {})].filter(Boolean).join(" · ");
  const why = line.fails[line.n - 1];
  $("case-failure").replaceChildren(...(why ? [element("div", { class: "note" }, element("strong", {}, "Failing: "), why)] : []));
  $("case-latest").textContent = latestInWords(line);
  $("case-latest").className = slowerNow(line) ? "worse" : "";
  showChanges(line);
  showTime(line);
  showRatio(line);
  showContenders(line);
  showRoofline(line);
  showRanks(line);
}

function latestInWords(line) {
  const { verdict, ratio, points } = line.latest;
  if (failing(line)) return "";
  if (tooFew(line)) return `Too few runs of this level (${points} before the latest) to say whether the latest fits them.`;
  return `The latest run is ${verdict === "as before" ? "as those before" : verdict + " than those before"}: ${percent(ratio)} `
    + `(${100 * about.confidence} % interval ${interval(line.latest)}) against ${counted(points, "run")} of the level before it.`;
}

function showChanges(line) {
  const items = line.changes.map((change) => {
    const slower = change.after > change.before;
    const item = element("li", {}, element("strong", { class: slower ? "worse" : "better" },
      `${Math.abs(100 * (change.after / change.before - 1)).toFixed(1)} % ${slower ? "slower" : "faster"}`),
      ` (${ms(change.before)} → ${ms(change.after)}) after `, element("code", {}, commitOf(line, change.from)),
      ` (${whenOf(line, change.from)}), up to `, element("code", {}, commitOf(line, change.at)), ` (${whenOf(line, change.at)}).`);
    const relative = Object.entries(change.relative).map(([name, x]) => `${name} ÷ tritoncp ${percent(x)}`);
    if (relative.length) item.append(element("div", { class: "small" }, `In the same runs: ${relative.join(", ")}.`));
    const others = change.causes.filter((c) => c.name !== "commit"); // the range is said above
    const causes = others.map((c) => `${c.name} ${short(c.before)} → ${short(c.after)}` + (c.away ? ` (${Math.abs(c.away)} ${c.away > 0 ? "later" : "before"})` : ""));
    item.append(element("div", { class: "small" }, causes.length ? `Changed there: ${causes.join("; ")}.`
      : change.causes.length ? "Only the commit changed there." : "Nothing that is recorded changed there: look at the machine."));
    return item;
  });
  for (const [i, why] of Object.entries(line.fails).slice(-5)) {
    items.push(element("li", {}, element("strong", { class: "failed" }, "failed "), `${whenOf(line, i)}, `,
      element("code", {}, commitOf(line, i)), `: ${why}`));
  }
  $("changes").replaceChildren(...(items.length ? items : [element("li", {}, "No change of level was found, and no failure.")]));
}

function showTime(line) {
  const at = [...line.ms.keys()], right = at.filter((i) => line.ms[i] !== null);
  const pick = (xs) => right.map((i) => xs[i]);
  put("chart-time", "time", { x: right, ms: pick(line.ms), low: pick(line.low), high: pick(line.high),
    when: right.map((i) => whenOf(line, i)), commit: right.map((i) => commitOf(line, i)), versions: right.map((i) => versionsOf(line, i)) });
  showMarks(line, at.slice(1));
  put("chart-time", "changes", { x: line.changes.map((c) => c.at - 0.5),
    colour: line.changes.map((c) => (c.after > c.before ? "#cc3311" : "#12936e")) });
  const edges = [0, ...line.changes.map((c) => c.at), line.n];
  const levels = line.changes.length ? [line.changes[0].before, ...line.changes.map((c) => c.after)] : [];
  put("chart-time", "levels", { x0: levels.map((_, i) => edges[i]), x1: levels.map((_, i) => edges[i + 1] - 1), y: levels });
  const failed = Object.keys(line.fails).map(Number), top = right.length ? Math.max(...pick(line.ms)) : 1;
  put("chart-time", "failures", { x: failed, y: failed.map(() => top), when: failed.map((i) => whenOf(line, i)), why: failed.map((i) => line.fails[i]) });
  fallback("time-table", `Times of ${line.case}, newest first`,
    [["Run"], ["Commit"], ["Median", "number"], ["Quartiles", "number"], ["Versions"], ["What happened"]],
    () => at.reverse().map((i) => {
      const change = line.changes.find((c) => c.at === i);
      const said = line.fails[i] ? `failed: ${line.fails[i]}` : change ? `level ${percent(change.after / change.before)}` : "";
      const spread = line.ms[i] === null ? "–" : `${line.low[i].toPrecision(4)} … ${line.high[i].toPrecision(4)}`;
      return [whenOf(line, i), element("code", {}, commitOf(line, i)), ms(line.ms[i]), spread, versionsOf(line, i), said];
    }));
}

/** Where something else changed: commits as ticks, versions as dotted lines and in words. */
function showMarks(line, at) {
  const names = Object.keys(Object.assign({}, ...about.envs)).filter((name) => name !== "commit");
  const differ = (name, i) => envOf(line, i)[name] !== envOf(line, i - 1)[name];
  const commits = at.filter((i) => differ("commit", i)), low = Math.min(...line.low.filter((x) => x !== null));
  put("chart-time", "commits", { x: commits.map((i) => i - 0.5), y: commits.map(() => low) });
  const marked = at.filter((i) => names.some((name) => differ(name, i)));
  const what = (i) => names.filter((name) => differ(name, i))
    .map((name) => `${name} ${envOf(line, i - 1)[name] ?? "?"} → ${envOf(line, i)[name] ?? "?"}`).join(", ");
  put("chart-time", "marks", { x: marked.map((i) => i - 0.5), what: marked.map(what) });
  $("marks").replaceChildren(...marked.slice(-8).reverse().map((i) => element("li", {}, `${whenOf(line, i)} (${i}): ${what(i)}`)));
}

function showRatio(line) {
  const families = about.families.filter((name) => line.ratio[name].some((x) => x !== null));
  $("ratio").hidden = !families.length;
  legend("legend-ratio", about.families, families);
  about.families.forEach((name, k) => {
    const at = [...line.ms.keys()].filter((i) => line.ratio[name][i] !== null);
    put("chart-ratio", `ratio-${k}`, { x: at, y: at.map((i) => line.ratio[name][i]), when: at.map((i) => whenOf(line, i)) });
  });
  put("chart-ratio", "one", { x: families.length ? [0, line.n - 1] : [], y: families.length ? [1, 1] : [] });
  fallback("ratio-table", `Baselines over tritoncp, ${line.case}, newest first`,
    [["Run"], ...families.map((name) => [name, "number"])],
    () => [...line.ms.keys()].reverse().map((i) => [whenOf(line, i), ...families.map((name) => times(line.ratio[name][i]))]));
}

function showContenders(line) {
  const rows = Object.entries(line.last).map(([name, found]) => [
    name,
    found.ms ? ms(found.ms) : element("span", { class: name === "tritoncp" ? "failed" : "" }, "none"),
    found.low ? `${found.low.toPrecision(4)} … ${found.high.toPrecision(4)}` : "–",
    found.tflops ?? "–",
    found.host_ms ? ms(found.host_ms) : "–",
    found.setup_s !== undefined ? `${found.setup_s} s` : "–",
    found.peak_bytes ? bytes(found.peak_bytes) : "–",
    found.why ?? (found.throttled ? `${found.throttled} throttled samples left out` : ""),
  ]);
  fill($("contenders"), `${whenOf(line, line.n - 1)}, commit ${commitOf(line, line.n - 1)}, ${versionsOf(line, line.n - 1)}`,
    [["Who"], ["Median", "number"], ["Quartiles", "number"], ["TFLOP/s", "number"], ["Host", "number"], ["Set-up", "number"], ["Memory", "number"], ["Why not"]], rows);
  $("machine").textContent = Object.entries(line.state ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
}

/** Where a case stands under the roof: FLOP per byte, TFLOP/s, and the part of the bound that it reaches. */
function standing(line) {
  const { flops, hbm_bytes: moved } = line.work ?? {}, roof = line.ceilings ?? {};
  if (!flops || !moved || !roof.matmul_tflops || failing(line)) return null;
  const x = flops / moved, y = flops / last(line.ms) / 1e9;
  return { case: line.case, x, y, part: y / Math.min(roof.matmul_tflops, (x * roof.copy_gbytes_per_s) / 1e3) };
}

function showRoofline(line) {
  const own = standing(line);
  $("roof").hidden = !own;
  if (!own) return;
  const others = shown().filter((other) => other.device === line.device).map(standing).filter(Boolean);
  const columns = (all) => ({ x: all.map((s) => s.x), y: all.map((s) => s.y), case: all.map((s) => s.case), part: all.map((s) => s.part) });
  put("chart-roofline", "roofline", columns(others));
  put("chart-roofline", "roofline-own", columns([own]));
  const { matmul_tflops: peak, copy_gbytes_per_s: copy } = line.ceilings, ridge = (1e3 * peak) / copy;
  const least = Math.min(ridge, ...others.map((s) => s.x)) / 2, most = Math.max(ridge, own.x, ...others.map((s) => s.x)) * 2;
  put("chart-roofline", "roof", { x: [least, ridge, most], y: [(least * copy) / 1e3, peak, peak] });
  $("roof-text").textContent = `${own.y.toFixed(0)} TFLOP/s of useful work at ${own.x.toFixed(0)} FLOP per byte: ${(100 * own.part).toFixed(0)} % of the bound `
    + `(${peak} TFLOP/s matrix product, ${copy} GB/s copy, both measured in that run).`;
  fallback("roof-table", "Useful work of the cases shown", [["Case", "case"], ["FLOP per byte", "number"], ["TFLOP/s", "number"], ["Of the bound", "number"]],
    () => others.map((s) => [s.case, s.x.toFixed(0), s.y.toFixed(1), `${(100 * s.part).toFixed(0)} %`]));
}

function showRanks(line) {
  const { rank_work: work, rank_bytes: sent, imbalance, wire_bytes: wire } = line.work ?? {};
  $("ranks").hidden = !work && !wire;
  if ($("ranks").hidden) return;
  $("ranks-text").textContent = [imbalance ? `Most work over mean: ${imbalance.toFixed(3)}.` : "", wire ? `A rank sends at most ${bytes(wire)}.` : ""].join(" ");
  const x = (work ?? []).map((_, i) => i);
  put("chart-work", "work", { x, y: work ?? [] });
  put("chart-bytes", "bytes", { x, y: (sent ?? []).map((b) => b / 1e6) });
  for (const id of ["chart-work", "chart-bytes", "ranks-table"]) $(id).hidden = !work;
  fallback("ranks-table", "Work and bytes of each rank", [["Rank", "number"], ["Blocks", "number"], ["Sent forward", "number"]],
    () => x.map((i) => [i, work[i], bytes(sent[i])]));
}

// ---- where we are ---------------------------------------------------------------------------------------

function address(changed) {
  const next = { ...state, ...changed };
  const words = Object.entries(next).filter(([name, value]) => value && !(name === "baseline" && value === standard()));
  return "#" + new URLSearchParams(words).toString();
}

/** The baseline that most cases have. */
function standard() {
  const count = (family) => lines.filter((line) => lastRatio(line, family) !== null).length;
  return [...about.families].sort((a, b) => count(b) - count(a))[0] ?? "";
}

function read() {
  state = { ...BLANK, baseline: standard(), ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  for (const name of [...FILTERS, "text", "baseline"]) if ($(name).value !== state[name]) $(name).value = state[name];
  const line = state.case && lines.find((line) => line.case === state.case && (!state.on || line.deviceName === state.on));
  $("overview").hidden = Boolean(line);
  $("case").hidden = !line;
  $("filters").hidden = Boolean(line);
  document.title = line ? `${line.case} · tritoncp performance` : "tritoncp performance";
  for (const id of ["home", "back"]) $(id).href = address({ case: "", on: "" });
  if (line) showCase(line);
  else showOverview();
  return line;
}

function go(changed) {
  history.replaceState(null, "", address(changed));
  read();
}

function choices() {
  const options = (id, values, all) => $(id).replaceChildren(...(all ? [element("option", { value: "" }, all)] : []),
    ...values.map((value) => element("option", { value }, value)));
  for (const name of FILTERS) options(name, [...new Set(lines.map((line) => valueOf(line, name)))].filter(Boolean).sort(), "all");
  options("baseline", about.families);
  for (const name of [...FILTERS, "text", "baseline"]) $(name).addEventListener("input", () => go({ [name]: $(name).value }));
  $("filters").addEventListener("reset", (event) => { event.preventDefault(); go({ ...BLANK, baseline: standard() }); });
  $("filters").addEventListener("submit", (event) => event.preventDefault());
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", dark);
  if (charts) paint();
}

function themes() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  theme(system.matches);
  system.addEventListener("change", () => theme(system.matches));
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
}

async function start() {
  themes();
  about = JSON.parse(new TextDecoder().decode(await inflate("data-about")));
  lines = decode(await inflate("data-points"));
  await makeCharts();
  paint();
  choices();
  showResources();
  if (about.problems.length) {
    $("problems").replaceChildren(element("h3", {}, "Lines that could not be read"),
      element("ul", {}, ...about.problems.map((text) => element("li", {}, text))));
  }
  if (about.missing) $("missing").replaceChildren(element("div", { class: "note" }, about.missing));
  $("footer").textContent = `Made ${about.made.replace("T", " ")} by tritoncp ${about.version}. Charts: Bokeh.`;
  read();
  window.addEventListener("hashchange", () => {
    if (location.hash === "#main") return $("main").focus();
    read() ? $("case-title").focus() : $("main").focus();
    scrollTo(0, 0);
  });
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => { $("status").textContent = `This page could not be drawn: ${error}`; throw error; });
