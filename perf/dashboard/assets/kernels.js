// Tables of compiled kernels.

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
