/* Heat maps of what telemetry saw: a figure at a time, for each operand and state a canvas with a pixel a cell, which
   the browser enlarges. Colours as in heatmap-NAME.png: one scale for all operands of all runs, one for each state. */

class HeatMaps {
  constructor(telemetry, runs) {
    Object.assign(this, { telemetry, runs });
    this.selects = ["figure", "run", "name"].map((id) => document.getElementById(`map-${id}`));
    const [figure, run, name] = this.selects;
    fill(figure, Object.entries(telemetry.figures).map(([key, each]) => [key, each.label]));
    const watched = runs.map((each, place) => [String(place), each.name]).filter(([place]) => this.anyOf(place));
    fill(run, [...watched, ["", "all runs"]]);
    figure.addEventListener("change", () => this.offerNames());
    for (const select of [run, name]) select.addEventListener("change", () => this.draw());
    document.getElementById("telemetry").hidden = false;
    const every = telemetry.every;
    if (every > 1) document.getElementById("map-hint").textContent = `A column is the mean of ${every} watched steps.`;
    this.offerNames();
  }

  anyOf(place) {
    return Object.values(this.telemetry.figures).some((figure) => figure.runs[place]?.length);
  }

  get figure() {
    return this.telemetry.figures[this.selects[0].value];
  }

  /* The operands and states that have the figure, the chosen one kept where it is among them. */
  offerNames() {
    const select = this.selects[2];
    const before = select.value;
    const names = [...new Set(Object.values(this.figure.runs).flatMap((maps) => maps.map((each) => each.name)))];
    fill(select, [["", "all"], ...names.map((each) => [each, each])]);
    select.value = names.includes(before) ? before : "";
    this.draw();
  }

  draw() {
    const [, run, name] = this.selects.map((select) => select.value);
    const shown = [];
    for (const [place, maps] of Object.entries(this.figure.runs)) {
      if (run !== "" && run !== place) continue;
      const prefix = run === "" ? `${this.runs[place].name}: ` : "";
      const ofRun = maps.filter((each) => name === "" || each.name === name);
      shown.push(...ofRun.map((map) => ({ map, title: prefix + map.name })));
    }
    const none = Object.assign(document.createElement("p"), { textContent: "This run has no such figure." });
    document.getElementById("maps").replaceChildren(...(shown.length ? shown.map((each) => this.panel(each)) : [none]));
    const groups = [...new Set(shown.map((each) => each.map.group))];
    document.getElementById("map-bars").replaceChildren(...groups.map((group) => this.bar(group)));
  }

  /* Red, green, blue of a value on the scale of its group. */
  colour(value, [low, high]) {
    const { colours } = this.telemetry;
    const share = Math.max(0, Math.min(1, (value - low) / (high - low)));
    const at = (this.figure.lightIsHigh ? share : 1 - share) * (colours.length - 1);
    const i = Math.min(colours.length - 2, Math.floor(at));
    return colours[i].map((part, k) => Math.round(part + (at - i) * (colours[i + 1][k] - part)));
  }

  bar(group) {
    const [low, high] = this.figure.limits[group];
    const span = document.createElement("span");
    const ramp = document.createElement("i");
    const stops = Array.from({ length: 12 }, (_, i) => this.colour(low + ((high - low) * i) / 11, [low, high]));
    ramp.style.background = `linear-gradient(to right, ${stops.map((rgb) => `rgb(${rgb})`)})`;
    span.append(`${group}: ${shortNumber(low)}`, ramp, shortNumber(high));
    return span;
  }

  panel({ map, title }) {
    const panel = Object.assign(document.createElement("div"), { className: "map" });
    const [steps, layers] = [fromKnots(map.steps), [...fromKnots(map.layers)]];
    const names = layers.map((layer) => this.telemetry.layers[layer]);
    const values = cellsOf(map, steps.length * names.length);
    const canvas = this.paint(map, steps.length, names.length, values);
    canvas.setAttribute("data-map", title);
    const height = Math.max(48, Math.min(380, 13 * names.length));
    const heading = Object.assign(document.createElement("h3"), { textContent: title });
    const frame = document.createElement("div");
    frame.style.height = `${height}px`;
    frame.append(canvas);
    panel.append(heading, rowNames(names, height), frame, stepNames(steps));
    explain(panel, canvas, names, steps, values);
    return panel;
  }

  paint(map, width, height, values) {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    values.forEach((value, i) => {
      if (!Number.isNaN(value)) image.data.set([...this.colour(value, this.figure.limits[map.group]), 255], 4 * i);
    });
    context.putImageData(image, 0, 0);
    return canvas;
  }
}

/* As many names as there is room for, each at the middle of its row. */
function rowNames(names, height) {
  const rows = Object.assign(document.createElement("div"), { className: "rows" });
  rows.style.height = `${height}px`;
  const every = Math.ceil((12 * names.length) / height);
  names.forEach((name, i) => {
    rows.append(Object.assign(document.createElement("span"), { textContent: i % every ? "" : shortened(name) }));
  });
  return rows;
}

/* Say the value of the cell under the pointer. */
function explain(panel, canvas, names, steps, values) {
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  panel.append(tip);
  const index = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = index((event.clientX - box.left) / box.width, steps.length);
    const row = index((event.clientY - box.top) / box.height, names.length);
    const value = values[row * steps.length + column];
    const said = Number.isNaN(value) ? "no number" : shortNumber(value);
    tip.textContent = `${names[row]}, step ${number(steps[column], 0)}: ${said}`;
    tip.hidden = false;
    const outer = panel.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(event.clientX - outer.left + 14, outer.width - tip.offsetWidth))}px`;
    tip.style.top = `${event.clientY - outer.top + 16}px`;
  });
}

function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}

/* Codes to values, row by row; NaN where there is no number. One code stands for a map of one colour. */
function cellsOf(map, size) {
  const codes = typeof map.cells === "number" ? new Uint8Array(size).fill(map.cells) : bytes(map.cells);
  return Float64Array.from(codes, (code) => (code ? map.low + ((code - 1) / 254) * (map.high - map.low) : NaN));
}

function stepNames(steps) {
  const names = Object.assign(document.createElement("div"), { className: "steps" });
  const ends = steps.length > 2 ? [0, Math.floor((steps.length - 1) / 2), steps.length - 1] : [...steps.keys()];
  const texts = ends.map((i) => number(steps[i], 0));
  names.append(...texts.map((textContent) => Object.assign(document.createElement("span"), { textContent })));
  return names;
}
