// Charts: made by Bokeh from the page, filled here, and coloured by the scheme.

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

/** Label a chart's x axis, whose positions are whole numbers, with dates and commits: [seconds, commit] of each. */
function showRunsOnAxis(id, runs) {
  const [axis] = charts[id].below, room = Math.max(2, Math.floor(($(id).clientWidth || innerWidth) / 110));
  const step = Math.max(1, Math.ceil(runs.length / room));
  const ticks = [...runs.keys()].filter((i) => (runs.length - 1 - i) % step === 0); // the newest has a label
  axis.major_label_overrides = new Map(ticks.map((i) => [i, `${day(runs[i][0]).slice(0, 10)}\n${short(runs[i][1]).slice(0, 9)}`]));
  axis.ticker.ticks = ticks;
  axis.ticker.minor_ticks = [];
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
