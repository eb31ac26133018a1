"use strict";
// Elements, tables, and numbers as text. The files of this folder are one script, in the order that page.py
// names. Data comes deflated in the page; what is shown is a function of `state`, which lives in the address
// (#case=…&pass=…), so that every view is a link and Back works.

const $ = (id) => document.getElementById(id);

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

const PAGE = 50; // rows
const orders = {}; // of each long table, by id: { by: column or -1, down, page, caption }

/**
 * Fill a long table, a page of it at a time, and let the reader sort it by any column.
 * columns: { name, kind, value(item): number, text or null, cell(item): content }; items in their first order.
 */
function fillPages(id, caption, columns, items) {
  const table = $(id), order = (orders[id] ??= { by: -1, down: true, page: 0 });
  if (order.caption !== caption) Object.assign(order, { caption, page: 0 }); // another table's pages
  const sorted = order.by < 0 ? items : sortBy(items, columns[order.by].value, order.down);
  const pages = Math.max(1, Math.ceil(items.length / PAGE));
  order.page = Math.min(order.page, pages - 1);
  const visible = sorted.slice(PAGE * order.page, PAGE * (order.page + 1));
  fill(table, caption, columns.map(({ name, kind }) => [name, kind]), visible.map((item) => columns.map(({ cell }) => cell(item))));
  const refresh = (change, focus) => { Object.assign(order, change); fillPages(id, caption, columns, items); focus?.().focus(); };
  table.querySelectorAll("th").forEach((head, i) => {
    const ours = order.by === i, arrow = ours ? (order.down ? " ▼" : " ▲") : "";
    const button = element("button", { type: "button", class: "sort" }, columns[i].name + arrow);
    button.onclick = () => refresh(nextOrder(order, i), () => table.querySelectorAll("th button")[i]);
    head.setAttribute("aria-sort", ours ? (order.down ? "descending" : "ascending") : "none");
    head.replaceChildren(button);
  });
  showPager(table, order.page, pages, items.length, refresh);
}

/** The order after a click on a column: largest first, then smallest first, then the first order refresh. */
function nextOrder(order, column) {
  if (order.by !== column) return { by: column, down: true, page: 0 };
  return order.down ? { down: false, page: 0 } : { by: -1, down: true, page: 0 };
}

/** Sort by a value, items without one last. */
function sortBy(items, value, down) {
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  const pairs = items.map((item) => [value(item) ?? null, item]);
  const side = down ? -1 : 1;
  pairs.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : side * compare(a, b)));
  return pairs.map(([, item]) => item);
}

function showPager(table, page, pages, count, refresh) {
  const box = table.parentElement, after = box.nextElementSibling;
  if (after?.classList.contains("pager")) after.remove();
  if (pages < 2) return;
  const button = (text, target, kind) => {
    const control = element("button", { type: "button", class: kind, disabled: target < 0 || target >= pages ? "" : null }, text);
    control.onclick = () => refresh({ page: target }, () => box.nextElementSibling.querySelector(`.${kind}:enabled`) ?? box);
    return control;
  };
  const range = `${PAGE * page + 1}–${Math.min(count, PAGE * (page + 1))} of ${count}`;
  box.after(element("nav", { class: "pager", "aria-label": `Pages of ${table.caption.textContent}` },
    button("Previous", page - 1, "previous"), element("span", {}, range), button("Next", page + 1, "next")));
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
