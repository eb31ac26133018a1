// One case: its changes, charts, contenders and ranks.

function showCase(line) {
  $("status").textContent = `${line.case} on ${line.deviceName}: ${counted(line.n, "measurement")}, ${counted(line.changes.length, "change")} of level`;
  $("case-title").textContent = line.case;
  $("case-tags").textContent = [line.deviceName, ...Object.values(line.tags ?? {})].filter(Boolean).join(" · ");
  const why = line.fails[line.n - 1];
  $("case-failure").replaceChildren(...(why ? [element("div", { class: "note" }, element("strong", {}, "Failing: "), why)] : []), ...alarmsOf(line));
  $("case-latest").textContent = latestInWords(line);
  $("case-latest").className = slowerNow(line) || line.status === "missing" ? "worse" : "";
  showChanges(line);
  showTime(line);
  showRatio(line);
  showContenders(line);
  showRoofline(line);
  showRanks(line);
}

function latestInWords(line) {
  const { verdict, ratio, points } = line.latest;
  if (!measured(line)) return `The latest run of this series, ${nameOfRun(about.cards[line.card].run)}, did not measure this case: the figures are of ${whenOf(line, line.n - 1)}.`;
  if (failing(line)) return "";
  if (verdict === "too few runs") return `Too few runs of this level (${points} before the latest) to say whether the latest fits them.`;
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
    if (about.compare) item.append(" Commits: ", commitRange(line, change.from, change.at));
    const relative = Object.entries(change.relative).map(([name, x]) => `${name} ÷ tritoncp ${percent(x)}`);
    if (relative.length) item.append(element("div", { class: "small" }, `In the same runs: ${relative.join(", ")}.`));
    const causes = change.causes.filter((cause) => cause.name !== "commit").map(causeText); // the range is said above
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
  const at = [...line.ms.keys()];
  for (const id of ["chart-time", "chart-ratio"]) showRunsOnAxis(id, at.map((i) => [about.runs[line.run[i]][0], envOf(line, i).commit ?? ""]));
  const right = at.filter((i) => line.ms[i] !== null);
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
    + (own.part > 1 && !line.alarms?.length ? "(bounds are measured: up to 110 % counts as at the bound) " : "") + `(${peak} TFLOP/s matrix product, ${copy} GB/s copy, both measured in that run).`;
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
