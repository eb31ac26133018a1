// The overview: charts over runs, all changes, all cases.

/** Over runs, geometric mean and worst quartile of every case's newest ratio: runs that measured a part move
 * only that. */
function meansOverRuns(chosen, family) {
  const byRun = new Map();
  for (const line of chosen) {
    line.ratio[family]?.forEach((ratio, i) => {
      if (ratio === null) return;
      if (!byRun.has(line.run[i])) byRun.set(line.run[i], []);
      byRun.get(line.run[i]).push([line.index, Math.log(ratio)]);
    });
  }
  const newest = new Map();
  return [...byRun.keys()].sort((a, b) => a - b).map((run) => {
    for (const [index, ratio] of byRun.get(run)) newest.set(index, ratio);
    const logs = Float64Array.from(newest.values()).sort();
    const mean = logs.reduce((sum, x) => sum + x, 0) / logs.length;
    return { run, mean: Math.exp(mean), worst: Math.exp(quantile(logs, 0.25)), cases: logs.length };
  });
}

/** The quantile of sorted numbers, between neighbours in proportion. */
function quantile(sorted, part) {
  const at = part * (sorted.length - 1), below = Math.floor(at);
  return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
}

/** The number of regressions in each run that measured one of these cases, by run. */
function countRegressions(chosen) {
  const counts = new Map();
  for (const line of chosen) {
    for (const run of line.run) if (!counts.has(run)) counts.set(run, 0);
    for (const i of line.regressions) counts.set(line.run[i], counts.get(line.run[i]) + 1);
  }
  return new Map([...counts].sort(([a], [b]) => a - b));
}

function showOverview() {
  const chosen = shown().sort(worstFirst);
  $("status").textContent = `${chosen.length} of ${lines.length} cases`
    + [[failing, "failing"], [slowerNow, "slower in the latest run"], [VERDICTS.missing, "missing"], [slowerThanBest, "slower than at best"]]
      .map(([is, what]) => [chosen.filter(is).length, what]).filter(([n]) => n).map(([n, what]) => `, ${n} ${what}`).join("");
  showCards();
  showRuns(chosen);
  showAllChanges(chosen);
  fillPages("cases", `${counted(chosen.length, "case")}`, caseColumns(), chosen);
}

/** The columns of the table of cases. */
function caseColumns() {
  const family = state.baseline;
  return [
    { name: "Case", kind: "case", value: (line) => line.case, cell: caseCell },
    { name: "GPU", kind: "wide", value: (line) => line.deviceName, cell: (line) => line.deviceName },
    { name: "Time", kind: "number", value: (line) => last(line.ms),
      cell: (line) => (failing(line) ? element("span", { class: "failed" }, "failed") : ms(last(line.ms))) },
    { name: "Latest against before", kind: "number", value: (line) => (failing(line) ? Infinity : line.latest.ratio), cell: latest },
    { name: "Since best", kind: "number", value: (line) => (failing(line) ? null : line.loss), cell: sinceBest },
    { name: family ? `÷ ${family}` : "÷", kind: "number", value: (line) => lastRatio(line, family), cell: baselineRatio },
    { name: "History", kind: "wide", value: (line) => line.changes.length, cell: spark },
  ];
}

const caseCell = (line) => element("div", {}, caseLink(line), line.tags?.model ? element("div", { class: "small" }, line.tags.model) : null, alarmOf(line));

function sinceBest(line) {
  if (!line.changes.length || failing(line)) return "–";
  if (line.loss > 1) return element("span", { class: "worse" }, percent(line.loss));
  return last(line.changes).after < last(line.changes).before ? element("span", { class: "better" }, "best") : "–";
}

function baselineRatio(line) {
  const ratio = lastRatio(line, state.baseline), goal = line.goal?.[state.baseline];
  return element("span", { class: ratio !== null && goal && ratio < goal ? "worse" : "" },
    times(ratio) + (goal && ratio !== null ? ` (goal ${goal})` : ""));
}

const interval = ({ low, high }) => `${percent(low).replace(" %", "")} … ${percent(high)}`;

/** The newest run against those before it: the change, and its interval below. */
function latest(line) {
  const { verdict, ratio } = line.latest;
  if (!measured(line) || failing(line)) return statusOf(line);
  if (ratio === null) return element("span", { class: "small" }, verdict);
  const kind = { slower: "worse", faster: "better" }[verdict];
  return element("div", {}, element("span", { class: kind }, percent(ratio)), element("div", { class: "small wide" }, interval(line.latest)));
}

// ---- charts over runs -----------------------------------------------------------------------------------

function showRuns(chosen) {
  const family = state.baseline, rows = [];
  const devices = about.devices.filter((name) => chosen.some((line) => line.deviceName === name));
  const ofDevice = (name) => chosen.filter((line) => line.deviceName === name);
  const counts = about.devices.map((name) => countRegressions(ofDevice(name)));
  const runs = [...new Set(counts.flatMap((count) => [...count.keys()]))].sort((a, b) => a - b);
  const at = new Map(runs.map((run, i) => [run, i])); // runs of other series take no room
  about.devices.forEach((name, i) => {
    const means = family ? meansOverRuns(ofDevice(name), family) : [], mean = new Map(means.map((m) => [m.run, m]));
    put("chart-overview", `overview-${i}`, { x: means.map((m) => at.get(m.run)), y: means.map((m) => m.mean), worst: means.map((m) => m.worst),
      when: means.map((m) => `${nameOfRun(m.run)}, ${m.cases} cases`) });
    const ours = [...counts[i].keys()], width = 0.8 / devices.length, shift = (devices.indexOf(name) + 0.5) * width - 0.4;
    put("chart-regressions", `regressions-${i}`, { x: ours.map((run) => at.get(run) + shift), width: ours.map(() => width),
      y: ours.map((run) => counts[i].get(run)), when: ours.map(nameOfRun) });
    for (const run of ours) {
      const { mean: m, worst, cases } = mean.get(run) ?? {};
      rows.push([run, name, nameOfRun(run), m?.toFixed(3) ?? "–", worst?.toFixed(3) ?? "–", counts[i].get(run), cases ?? "–"]);
    }
  });
  for (const id of ["chart-overview", "chart-regressions"]) showRunsOnAxis(id, runs.map((run) => [about.runs[run][0], commitOfRun(run)]));
  const ratios = rows.some((row) => row[3] !== "–");
  $("speed").hidden = !rows.length;
  $("chart-overview").hidden = $("speed-title").hidden = $("speed-help").hidden = !ratios;
  legend("legend-overview", about.devices, devices);
  $("speed-title").textContent = `${family} ÷ tritoncp, run by run: above 1, tritoncp is faster`;
  fallback("overview-table", `${family || "Regressions"}, run by run, newest first`,
    [["GPU"], ["Run"], ["Geometric mean", "number"], ["Worst quartile", "number"], ["Regressions", "number"], ["Cases", "number"]],
    () => rows.sort((a, b) => b[0] - a[0]).map((row) => row.slice(1)));
}

// ---- changes --------------------------------------------------------------------------------------------

/** All changes of these cases, newest first: of level, of the latest run alone, and to a failure. */
function listChanges(chosen) {
  const changes = [];
  for (const line of chosen) {
    const add = (kind, from, at, before, after, causes) => changes.push({ line, kind, from, at, before, after, causes, run: line.run[at], ratio: after && before ? after / before : null });
    for (const { at, from, before, after, causes } of line.changes) add("level", from, at, before, after, causes);
    for (const i of Object.keys(line.fails).map(Number)) if (i && line.ms[i - 1] !== null) add("failed", i - 1, i, line.ms[i - 1], null, causesAt(line, i));
    const end = line.n - 1, { verdict, ratio } = line.latest;
    if ((verdict === "slower" || verdict === "faster") && !line.changes.some((change) => change.at === end)) {
      add("one run", end - 1, end, line.ms[end] / ratio, line.ms[end], causesAt(line, end));
    }
  }
  const size = (change) => (change.ratio === null ? Infinity : Math.abs(Math.log(change.ratio)));
  return changes.sort((a, b) => b.run - a.run || size(b) - size(a));
}

/** What else changed at a point: attributes that differ from the point before. */
function causesAt(line, i) {
  const before = envOf(line, i - 1), after = envOf(line, i);
  return Object.keys(after).filter((name) => name in before && before[name] !== after[name])
    .map((name) => ({ name, before: before[name], after: after[name], away: 0 }));
}

const causeText = (cause) => `${cause.name} ${short(cause.before)} → ${short(cause.after)}`
  + (cause.away ? ` (${Math.abs(cause.away)} ${cause.away > 0 ? "later" : "before"})` : "");

/** The candidates besides the commits. */
function candidates({ causes }) {
  const versions = causes.filter((cause) => cause.name !== "commit").map(causeText);
  return versions.join("; ") || (causes.length ? "only the commit" : "nothing recorded");
}

function showAllChanges(chosen) {
  const changes = listChanges(chosen);
  $("all-changes").hidden = !changes.length;
  const size = (change) => {
    if (change.ratio === null) return element("span", { class: "failed" }, "failed");
    const text = element("span", { class: change.ratio > 1 ? "worse" : "better" }, percent(change.ratio));
    return element("div", {}, text, change.kind === "one run" ? element("div", { class: "small" }, "one run so far") : null);
  };
  fillPages("changes-list", `${counted(changes.length, "change")}, newest first`, [
    { name: "Date", kind: "date", value: (c) => c.run, cell: (c) => whenOf(c.line, c.at).slice(0, 10) },
    { name: "Case", kind: "case", value: (c) => c.line.case, cell: (c) => caseLink(c.line) },
    { name: "GPU", kind: "wide", value: (c) => c.line.deviceName, cell: (c) => c.line.deviceName },
    { name: "Change", kind: "number", value: (c) => c.ratio ?? Infinity, cell: size },
    { name: "Before → after", kind: "number", value: (c) => c.after, cell: (c) => `${ms(c.before).replace(" ms", "")} → ${ms(c.after)}` },
    { name: "Commits", kind: "commits", value: (c) => commitOf(c.line, c.at), cell: (c) => commitRange(c.line, c.from, c.at) },
    { name: "Candidates", kind: "", value: candidates, cell: candidates },
  ], changes);
}
