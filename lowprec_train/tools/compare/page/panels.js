/* What stands beside the charts: a run's name with its line, and the final gaps with their intervals. */

/* A swatch as the run's curve looks: colour, dashes. */
function swatchOf(run) {
  const swatch = svg("svg", { width: 24, height: 10, "aria-hidden": "true", style: `color:${colourOf(run)}` });
  const dash = run.dash ? `stroke-dasharray:${run.dash}` : "";
  svg("path", { d: "M0 5H24", class: "mean", style: dash }, swatch);
  return swatch;
}

function nameOf(run) {
  const span = Object.assign(document.createElement("span"), { className: "run" });
  span.append(swatchOf(run), shortened(run.name));
  return span;
}

/* At most 32 characters: paths and generated names differ at their ends. */
function shortened(name) {
  return name.length <= 32 ? name : "…" + name.slice(-31);
}

/* Give every run named in the text its swatch, and every bar its colour. */
function colourNames(runs) {
  const byName = new Map(runs.map((run) => [run.name, run]));
  for (const element of document.querySelectorAll("main [data-run]")) {
    const run = byName.get(element.dataset.run);
    if (element.classList.contains("run")) element.prepend(swatchOf(run));
    else element.style.color = colourOf(run);
  }
}

/* One row a run: the final gap as a point with its interval, the held-out gap hollow. */
function drawFinals(host, numbers, hidden) {
  const rows = numbers.runs.filter((run) => run.gap && !hidden.has(run.name));
  const width = host.clientWidth || 300;
  const height = 30 * rows.length + 26;
  const names = Math.min(150, 12 + 6.6 * Math.max(0, ...rows.map((run) => shortened(run.name).length)));
  const drawing = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "final gaps" });
  host.replaceChildren(drawing);
  if (!rows.length) return;
  const [low, high] = finalLimits(rows, numbers.gate);
  const scale = makeScale(low, high, names, width - 64, false);
  const ticks = scale.ticks(Math.max(2, (width - names - 64) / 55));
  tickTexts(ticks).forEach((text, i) => {
    const x = scale.pixel(ticks[i]);
    svg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: height - 22 }, drawing);
    svg("text", { x, y: height - 8, "text-anchor": "middle" }, drawing, text);
  });
  const level = (value, kind) => {
    svg("line", { class: kind, x1: scale.pixel(value), x2: scale.pixel(value), y1: 0, y2: height - 22 }, drawing);
  };
  level(0, "zero");
  for (const side of numbers.gate === null ? [] : [-1, 1]) {
    if (side * numbers.gate > low && side * numbers.gate < high) level(side * numbers.gate, "limit");
  }
  rows.forEach((run, row) => drawFinal(drawing, run, scale, 30 * row + 15, width));
}

function finalLimits(rows, gate) {
  const values = rows.flatMap((run) => [run.gap.mean, run.gap.low, run.gap.high, run.held]);
  const known = values.filter((value) => value !== null);
  const near = known.filter((value) => Math.abs(value) < 1);
  const all = [0, ...(near.length ? near : known)];
  const reach = Math.max(...all.map(Math.abs), 1e-4);
  const limits = gate !== null && gate < 5 * reach ? [...all, -gate, gate] : all;
  const margin = 0.08 * (Math.max(...limits) - Math.min(...limits) || reach);
  return [Math.min(...limits) - margin, Math.max(...limits) + margin];
}

function drawFinal(drawing, run, scale, y, width) {
  const { mean, low, high } = run.gap;
  const style = `color:${colourOf(run)}`;
  const group = svg("g", { style, "data-run": run.name, "data-gap": mean ?? "" }, drawing);
  const inside = (value) => Math.max(scale.pixel(scale.low), Math.min(scale.pixel(scale.high), scale.pixel(value)));
  const marker = (value, kind) => {
    svg("path", { class: kind, d: markerOf(run), transform: `translate(${inside(value)} ${y})` }, group);
  };
  const text = mean === null ? "not finite" : signed(mean, 4);
  svg("text", { x: 0, y: y + 4, class: "label" }, group, shortened(run.name));
  svg("text", { x: width, y: y + 4, "text-anchor": "end", class: "label" }, group, text);
  if (low !== null) svg("path", { class: "mean", d: `M${inside(low)} ${y}H${inside(high)}` }, group);
  if (mean !== null) marker(mean, "mark solid");
  if (run.held !== null) marker(run.held, "mark");
}
