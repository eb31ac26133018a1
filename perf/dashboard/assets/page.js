// Runs when the page is ready. Arguments: points and shown (sources), axes, entries (of the legend of baselines).
const $ = (id) => document.getElementById(id);
const rows = [...$("cases").tBodies[0].rows];
const controls = document.querySelectorAll(".filters [name]");

/** Show the case of a row: its texts, and its points in the charts. */
function show(row) {
  const { start, stop } = row.dataset, data = {};
  for (const [name, values] of Object.entries(points.data)) data[name] = values.slice(start, stop);
  data.x = data.time.map((_, i) => i);
  shown.data = data;
  const labels = new Map(data.x.map((i) => [i, `${data.time[i].slice(0, 10)}\n${data.commit[i].slice(0, 9)}`]));
  const end = data.x.length - 1, parts = Math.min(innerWidth < 600 ? 2 : 4, end) || 1;
  const ticks = [...new Set(Array.from({ length: parts + 1 }, (_, i) => Math.round(i * end / parts)))];
  for (const axis of axes) {
    axis.major_label_overrides = labels;
    axis.ticker.ticks = ticks; // both ends are among them
  }
  entries.forEach((entry, i) => { entry.visible = data[`ratio ${i}`].some(Number.isFinite); });
  for (const other of rows) other.ariaSelected = other === row;
  const [text, figures] = row.querySelector("template").content.cloneNode(true).children;
  $("case-title").textContent = row.cells[0].textContent;
  $("case-text").replaceChildren(text);
  $("case-figures").replaceChildren(figures);
}

/** Show the cases that fit every control, and details of one of them. */
function filter() {
  const fits = (row) => [...controls].every(({ name, value }) =>
    name === "words" ? row.dataset.words.includes(value.toLowerCase()) : !value || row.dataset[name] === value);
  for (const row of rows) row.hidden = !fits(row);
  $("count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} cases`;
  const visible = rows.find((row) => !row.hidden);
  if (visible && rows.some((row) => row.hidden && row.ariaSelected === "true")) show(visible);
}

/** Show the case that the address names, the first one without a name. */
function follow() {
  const named = rows.find((row) => row.dataset.address === location.hash.slice(1));
  show(named ?? rows[0]);
  if (named) $("case").scrollIntoView();
}

/** Sort a table by the column of a button, the other way around at the second click; cells without a number go last. */
function sort(button) {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  const key = ({ cells: { [head.cellIndex]: { dataset, textContent } } }) =>
    dataset.value === undefined ? textContent : Number(dataset.value || sign * Infinity);
  for (const other of head.parentElement.cells) other.ariaSort = other === head ? (sign > 0 ? "ascending" : "descending") : null;
  body.append(...[...body.rows].sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b))));
}

for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sort(button));
for (const control of controls) control.addEventListener("input", filter);
$("cases").tBodies[0].addEventListener("click", ({ target }) => { location.hash = target.closest("tr").dataset.address; });
addEventListener("hashchange", follow);
filter();
follow();
document.documentElement.dataset.ready = "yes";
