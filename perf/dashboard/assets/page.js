// Runs when the page is ready. Arguments: cases, points and shown (sources), chosen (a filter), filters, axes,
// entries (of the legend of baselines).
const $ = (id) => document.getElementById(id);
const rows = cases.data;

/** Show the case of a row: its texts, and its points in the charts. */
function show(row) {
  const [start, stop] = [rows.start[row], rows.stop[row]], data = {};
  for (const [name, values] of Object.entries(points.data)) data[name] = values.slice(start, stop);
  data.x = data.time.map((_, i) => i);
  shown.data = data;
  const labels = new Map(data.x.map((i) => [i, `${data.time[i].slice(0, 10)}\n${data.commit[i].slice(0, 9)}`]));
  for (const axis of axes) axis.major_label_overrides = labels;
  entries.forEach((entry, i) => { entry.visible = data[`ratio ${i}`].some(Number.isFinite); });
  $("case-title").textContent = rows.case[row];
  $("case-text").innerHTML = rows.html[row];
  $("case-figures").innerHTML = rows.figures[row];
}

/** Show the cases that fit every control. */
function filter() {
  const words = filters.text.value.toLowerCase();
  const fits = (row) => rows.words[row].includes(words)
    && Object.entries(filters).every(([name, { value }]) => name === "text" || !value || rows[name][row] === value);
  chosen.booleans = rows.case.map((_, row) => fits(row));
  const count = chosen.booleans.filter(Boolean).length;
  $("count").textContent = `${count} of ${rows.case.length} cases`;
}

/** Show the case that the address names, the first one without a name. */
function follow() {
  const row = rows.address.indexOf(location.hash.slice(1));
  show(Math.max(0, row));
  if (row >= 0) $("case").scrollIntoView();
}

for (const control of Object.values(filters)) control.properties.value.change.connect(filter);
filters.text.properties.value_input?.change.connect(() => { filters.text.value = filters.text.value_input; });
cases.selected.properties.indices.change.connect(() => {
  const [row] = cases.selected.indices;
  if (row !== undefined) location.hash = rows.address[row];
});
addEventListener("hashchange", follow);
filter();
follow();
document.documentElement.dataset.ready = "yes";
