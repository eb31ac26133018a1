// The address, the filters, the colours, and the start of the page.

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

/** The view that the address names: a case, the comparison, or the overview. */
function read() {
  state = { ...BLANK, baseline: standard(), ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  for (const name of [...FILTERS, "text", "baseline"]) if ($(name).value !== state[name]) $(name).value = state[name];
  const line = state.case && lines.find((line) => line.case === state.case && (!state.on || line.deviceName === state.on));
  const view = line ? "case" : state.view === "compare" ? "compare" : "overview";
  for (const name of ["overview", "case", "compare"]) $(name).hidden = name !== view;
  const title = { case: line?.case, compare: "Compare" }[view];
  document.title = (title ? `${title} · ` : "") + "tritoncp performance";
  for (const id of ["home", "back", "to-overview"]) $(id).href = address({ view: "", case: "", on: "", before: "", after: "" });
  $("to-compare").href = address({ view: "compare", case: "", on: "" });
  $("to-overview").toggleAttribute("aria-current", view === "overview");
  $("to-compare").toggleAttribute("aria-current", view === "compare");
  if (view === "case") showCase(line);
  else if (view === "compare") showComparison();
  else showOverview();
  return view;
}

function go(changed) {
  for (const order of Object.values(orders)) order.page = 0;
  history.replaceState(null, "", address(changed));
  read();
}

function choices() {
  const options = (id, values, all) => $(id).replaceChildren(...(all ? [element("option", { value: "" }, all)] : []),
    ...values.map((value) => element("option", { value }, value)));
  for (const name of FILTERS.filter((name) => name !== "verdict")) {
    options(name, [...new Set(lines.map((line) => valueOf(line, name)))].filter(Boolean).sort(), "all");
  }
  options("verdict", Object.keys(VERDICTS), "all");
  options("baseline", about.families);
  for (const name of [...FILTERS, "text", "baseline"]) $(name).addEventListener("input", () => go({ [name]: $(name).value }));
  for (const name of ["before", "after"]) $(name).addEventListener("change", () => go({ ...state, [name]: $(name).value }));
  $("swap").addEventListener("click", () => go({ ...state, before: state.after, after: state.before }));
  $("filters").addEventListener("reset", (event) => { event.preventDefault(); go({ ...BLANK, baseline: standard() }); });
  for (const id of ["filters", "sides"]) $(id).addEventListener("submit", (event) => event.preventDefault());
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
    const view = read();
    ({ case: $("case-title"), compare: $("compare-title") }[view] ?? $("main")).focus();
    scrollTo(0, 0);
  });
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => { $("status").textContent = `This page could not be drawn: ${error}`; throw error; });
