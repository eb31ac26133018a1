// Cards of the latest run of each series: against the run before it, and against the few before it.

const ratioText = (pair) => (pair ? element("span", { class: { slower: "worse", faster: "better" }[pair[1]] }, percent(pair[0])) : "–");

/** How a case did in the latest run, in a word or two. */
function statusOf(line) {
  const names = { failing: "fails now", "still failing": "fails still" };
  const bad = ["failing", "still failing", "slower", "missing"].includes(line.status);
  return element("span", { class: bad ? "worse" : line.status === "faster" ? "better" : "small" }, names[line.status] ?? line.status);
}

/** The cards with their lines, the worst first. */
function sortCards() {
  const cards = about.cards.map((facts, number) => ({ ...facts, lines: lines.filter((line) => line.card === number).sort(worstFirst) }));
  const urgency = (card) => Math.min(...card.lines.map((line) => line.rank));
  return cards.sort((a, b) => isWorse(b) - isWorse(a) || urgency(a) - urgency(b));
}

const showCards = () => $("cards").replaceChildren(...sortCards().map(card));

const countOf = (card, name) => card.lines.filter(VERDICTS[name]).length;
const newFailures = (card) => card.lines.filter((line) => line.status === "failing").length;
const isWorse = (card) => Boolean(newFailures(card) + countOf(card, "slower") + countOf(card, "missing"));

/** The answer to "did the latest run get worse?", as a sentence. */
function verdictOf(card) {
  if (card.before === null && !isWorse(card)) return ["The first run: nothing to compare it with", ""];
  const parts = [[newFailures(card), "failing now"], [countOf(card, "slower"), "slower than their noise allows"],
    [countOf(card, "missing"), "missing"]];
  const bad = parts.filter(([n]) => n).map(([n, what]) => `${n} ${what}`).join(", ");
  if (bad) return [`Worse: ${bad}`, "worse"];
  const unknown = countOf(card, "too few runs");
  if (unknown === card.cases) return ["Too few runs to say", ""];
  return ["Not worse" + (unknown ? ` (${unknown} with too few runs to say)` : ""), "better"];
}

function card(facts) {
  const [sentence, kind] = verdictOf(facts);
  const node = element("article", { class: `card ${kind && `is-${kind}`}` }, element("h3", {}, facts.series),
    element("p", { class: `verdict ${kind}` }, sentence), alarmOfCard(facts),
    element("p", { class: "small" }, "Latest run: ", element("code", {}, nameOfRun(facts.run)), `, ${facts.cases} of ${counted(facts.lines.length, "case")}.`));
  if (facts.before !== null) node.append(againstTable(facts), worstTable(facts));
  node.append(figures(facts));
  return node;
}

// ---- alarms: figures above the bound of the device -------------------------------------------------------

const worstAlarm = (line) => [...(line.alarms ?? [])].sort((a, b) => b[1] - a[1])[0];
const shareText = (share) => `${(100 * share).toFixed(0)} % of the bound`;

/** All alarms of a case, in full. */
const alarmsOf = (line) => (line.alarms ?? []).map(([contender, share]) =>
  element("div", { class: "note" }, element("strong", {}, "Alarm: "), `${contender}: ${shareText(share)}: the figure or the count is wrong`));

/** The worst alarm of a case, for a table. */
function alarmOf(line) {
  const alarm = worstAlarm(line);
  return alarm ? element("div", { class: "alarm" }, `${alarm[0] === "tritoncp" ? "" : `${alarm[0]}: `}${shareText(alarm[1])}`) : null;
}

function alarmOfCard({ lines: ofCard }) {
  const worst = ofCard.filter((line) => line.alarms?.length).sort((a, b) => worstAlarm(b)[1] - worstAlarm(a)[1]);
  if (!worst.length) return null;
  return element("p", { class: "alarm" }, `Alarm: ${counted(worst.length, "case")} above the bound: ${shareText(worstAlarm(worst[0])[1])} in `,
    caseLink(worst[0]), ": the figure or the count is wrong.");
}

/** Counts and mean against the run before, and against the few before; each leads to the comparison. */
function againstTable(facts) {
  const table = element("table", { class: "against" });
  const row = (name, label, runs) => {
    const earlier = (line) => line.run.some((run, i) => runs.includes(run) && line.ms[i] !== null);
    const pairs = facts.lines.filter(measured).map((line) => line[name]).filter(Boolean);
    const count = (kind) => pairs.filter((pair) => pair[1] === kind).length;
    const number = (n, kind) => element("span", { class: n ? kind : "" }, String(n));
    const words = (run) => about.runs[run][1];
    const link = element("a", { href: address({ view: "compare", before: runs.map(words).join(","), after: words(facts.run) }) }, label);
    return [link, pairs.length ? percent(geomean(pairs.map((pair) => pair[0]))) : "–", number(count("slower"), "worse"), number(count("faster"), "better"),
      number(facts.lines.filter((line) => measured(line) && failing(line) && earlier(line)).length, "worse"),
      number(facts.lines.filter((line) => !measured(line) && line.run.some((run) => runs.includes(run))).length, "worse")];
  };
  const rows = [row("before", "The run before", [facts.before])];
  if (facts.few.length > 1) rows.push(row("few", `The last ${facts.few.length} before`, facts.few));
  fill(table, "Past the noise of each case:", [["Against"], ["Mean", "number wide"], ["Slower", "number"], ["Faster", "number"], ["Failing", "number"], ["Missing", "number"]], rows);
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Latest run of ${facts.series}` }, table);
}

function worstTable(facts) {
  const table = element("table", { class: "worst" }), worst = facts.lines.filter((line) => line.status !== "not measured").slice(0, 5);
  fill(table, "Worst cases:", [["Case", "case"], ["Latest run"], ["Against run before", "number"], [`Against last ${facts.few.length}`, "number"], ["Noise", "number wide"]],
    worst.map((line) => [caseLink(line), element("div", {}, statusOf(line), alarmOf(line)), ratioText(line.before), ratioText(line.few),
      line.noise === undefined ? "–" : `±${(100 * line.noise).toFixed(1)} %`]));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Worst cases of ${facts.series}` }, table);
}

const caseLink = (line) => element("a", { href: address({ view: "", case: line.case, on: line.deviceName }) }, line.case);

function figures(facts) {
  const list = element("dl");
  const say = (what, value, kind) => list.append(element("dt", {}, what), element("dd", { class: kind }, value));
  for (const family of about.families) {
    const ratios = facts.lines.map((line) => lastRatio(line, family)).filter((x) => x !== null);
    if (ratios.length) say(`÷ ${family}, geometric mean of ${ratios.length}`, times(geomean(ratios)));
  }
  for (const name of ["failing", "slower than at best", "too few runs"]) {
    const n = countOf(facts, name);
    if (n) say(name, `${n} of ${facts.lines.length}`, name === "too few runs" ? "" : "worse");
  }
  return list;
}
