/* Curves in an SVG, to hover and zoom. Charts share one horizontal view, so a zoom in one is a zoom in all; a chart
   keeps a vertical range of its own once a box was drawn in it. The page says what is drawn:

   { lines: [{ run, kind: "raw" | "mean", x, y }], marks: [{ run, kind, x, y, title }], levels: [{ y, kind, text }],
     limits: ([low, high] of x) => [low, high] of y, extent: [low, high], xLabel, yLabel, logX, logY,
     heading: (x) => text, value: (y) => text } */

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 8, right: 22, bottom: 34, left: 74 };
const MARKERS = ["o", "s", "D", "^", "v", "P"]; // as in curves.png: of run i the (i + 1)th
const MARKER_PATHS = {
  o: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
  s: "M-3.5 -3.5h7v7h-7Z",
  D: "M0 -5L5 0L0 5L-5 0Z",
  "^": "M0 -4.5L4.5 4H-4.5Z",
  v: "M0 4.5L4.5 -4H-4.5Z",
  P: "M-1.5 -4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
  spike: "M0 0L4 -8H-4Z",
  nonfinite: "M-4 -4L4 4M-4 4L4 -4",
};

function svg(name, attributes = {}, parent = null, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent?.append(element);
  return element;
}

function colourOf(run) {
  return run.place === null ? "var(--run-baseline)" : `var(--run-${run.place})`;
}

function markerOf(run) {
  return MARKER_PATHS[run.place === null ? "o" : MARKERS[(run.place + 1) % MARKERS.length]];
}

class Chart {
  constructor(host, { height, view, onView, onHover }) {
    Object.assign(this, { host, height, view, onView, onHover, boxY: null, content: null });
    this.svg = svg("svg", { height, tabindex: 0, role: "img", "aria-label": host.id.replace("-", ": ") });
    this.clip = svg("rect", {}, svg("clipPath", { id: `${host.id}-clip` }, svg("defs", {}, this.svg)));
    this.axes = svg("g", {}, this.svg);
    this.curves = svg("g", { "clip-path": `url(#${host.id}-clip)` }, this.svg);
    this.front = svg("g", { "clip-path": `url(#${host.id}-clip)` }, this.svg);
    this.selection = svg("rect", { class: "selection", visibility: "hidden" }, this.svg);
    this.hit = svg("rect", { class: "hit" }, this.svg);
    this.tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    host.append(this.svg, this.tip);
    this.listen();
    new ResizeObserver(() => this.content && this.svg.clientWidth !== this.width && this.draw()).observe(host);
  }

  /* --- drawing --- */

  set(content) {
    this.content = content;
    this.draw();
  }

  draw() {
    const { content, height } = this;
    this.width = this.svg.clientWidth || 800;
    const [left, right, top, bottom] = [MARGIN.left, this.width - MARGIN.right, MARGIN.top, height - MARGIN.bottom];
    const range = this.view.x ?? content.extent;
    this.x = makeScale(range[0], range[1], left, right, content.logX);
    this.y = makeScale(...(this.boxY ?? content.limits(range)), bottom, top, content.logY);
    for (const rect of [this.clip, this.hit]) place(rect, left, top, right - left, bottom - top);
    this.drawAxes(left, right, top, bottom);
    this.drawCurves(left, right, top);
    this.hover(null);
  }

  drawAxes(left, right, top, bottom) {
    const { axes, content } = this;
    axes.replaceChildren();
    const ticksX = this.x.ticks(Math.max(3, this.width / 110));
    const ticksY = this.y.ticks(Math.max(3, this.height / 55));
    const [textsX, textsY] = [tickTexts(ticksX), tickTexts(ticksY)];
    ticksX.forEach((tick, i) => {
      const at = this.x.pixel(tick);
      svg("line", { class: "grid", x1: at, x2: at, y1: top, y2: bottom }, axes);
      svg("text", { x: at, y: bottom + 15, "text-anchor": "middle" }, axes, textsX[i]);
    });
    ticksY.forEach((tick, i) => {
      const at = this.y.pixel(tick);
      svg("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }, axes);
      svg("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, axes, textsY[i]);
    });
    svg("path", { class: "frame", d: `M${left} ${top}V${bottom}H${right}` }, axes);
    const below = `translate(${(left + right) / 2} ${bottom + 30})`;
    const beside = `translate(12 ${(top + bottom) / 2}) rotate(-90)`;
    svg("text", { transform: below, "text-anchor": "middle", class: "label" }, axes, content.xLabel);
    svg("text", { transform: beside, "text-anchor": "middle", class: "label" }, axes, content.yLabel);
  }

  drawCurves(left, right, top) {
    const { curves, content } = this;
    curves.replaceChildren();
    for (const level of content.levels) {
      const at = this.y.pixel(level.y);
      svg("line", { class: level.kind, x1: left, x2: right, y1: at, y2: at }, curves);
      if (level.text) svg("text", { x: right - 4, y: at - 5, "text-anchor": "end" }, curves, level.text);
    }
    const faint = 0.4 / Math.sqrt(Math.max(1, content.lines.filter((line) => line.kind === "raw").length));
    for (const line of content.lines) {
      const dash = line.run.dash ? `stroke-dasharray:${line.run.dash}` : "";
      const style = `color:${colourOf(line.run)};${line.kind === "mean" ? dash : `opacity:${faint}`}`;
      const d = pathOf(line.x, line.y, this.x, this.y);
      svg("path", { class: line.kind, "data-run": line.run.name, "data-points": line.x.length, style, d }, curves);
    }
    for (const mark of content.marks) {
      if (mark.x < this.x.low || mark.x > this.x.high) continue;
      const transform = `translate(${this.x.pixel(mark.x)} ${mark.y === null ? top + 8 : this.y.pixel(mark.y)})`;
      const d = MARKER_PATHS[mark.kind] ?? markerOf(mark.run);
      const look = { class: `mark ${mark.kind}`, "data-run": mark.run.name, style: `color:${colourOf(mark.run)}` };
      svg("title", {}, svg("path", { ...look, d, transform }, curves), mark.title);
    }
  }

  /* --- hovering --- */

  /* Show the values at x (null: none); the box with their texts only where the pointer is. */
  hover(x, withTip = false) {
    this.front.replaceChildren();
    this.tip.hidden = true;
    if (x === null || !this.content || x < this.x.low || x > this.x.high) return;
    const at = this.x.pixel(x);
    svg("line", { class: "cross", x1: at, x2: at, y1: MARGIN.top, y2: this.height - MARGIN.bottom }, this.front);
    const found = this.valuesAt(x);
    for (const each of found) {
      const pixel = { cx: this.x.pixel(each.x), cy: this.y.pixel(each.y), r: 4 };
      svg("circle", { class: "dot", ...pixel, style: `color:${colourOf(each.run)}` }, this.front);
    }
    if (withTip && found.length) this.showTip(at, x, found);
  }

  /* The running mean nearest to x of each run that reaches it, and the logged value there, largest first. */
  valuesAt(x) {
    const reach = 0.02 * (this.x.pixel(this.x.high) - this.x.pixel(this.x.low));
    const found = [];
    for (const line of this.content.lines.filter((each) => each.kind === "mean" && each.x.length)) {
      const i = nearest(line.x, x);
      if (!Number.isFinite(line.y[i]) || Math.abs(this.x.pixel(line.x[i]) - this.x.pixel(x)) > reach) continue;
      const raw = this.content.lines.find((each) => each.kind === "raw" && each.run === line.run);
      found.push({ run: line.run, x: line.x[i], y: line.y[i], raw: raw && raw.y[nearest(raw.x, line.x[i])] });
    }
    return found.sort((a, b) => b.y - a.y);
  }

  showTip(at, x, found) {
    const { content, tip } = this;
    const table = document.createElement("table");
    const cell = (row, kind, textContent = "") =>
      row.appendChild(Object.assign(document.createElement(kind), { textContent }));
    const head = table.createTHead().insertRow();
    cell(head, "th", content.heading(x));
    if (found.some((each) => each.raw !== undefined)) for (const text of ["mean", "logged"]) cell(head, "td", text);
    const body = table.createTBody();
    for (const each of found) {
      const row = body.insertRow();
      cell(row, "th").append(nameOf(each.run));
      cell(row, "td", content.value(each.y));
      if (each.raw !== undefined) cell(row, "td", content.value(each.raw));
    }
    tip.replaceChildren(table);
    tip.hidden = false;
    const left = at + 18 + tip.offsetWidth > this.width ? at - 18 - tip.offsetWidth : at + 18;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${MARGIN.top + 6}px`;
  }

  /* --- zooming --- */

  listen() {
    const { hit } = this;
    hit.addEventListener("pointerdown", (event) => event.button === 0 && this.grab(event));
    hit.addEventListener("pointermove", (event) => this.onHover(this.x.value(this.at(event)[0]), this));
    hit.addEventListener("pointerleave", () => this.onHover(null, this));
    addEventListener("pointermove", (event) => this.grabbed && this.select(this.boxTo(this.at(event))));
    addEventListener("pointerup", (event) => this.grabbed && this.release(event));
    addEventListener("pointercancel", () => this.letGo());
    hit.addEventListener("dblclick", () => this.zoom(null, null));
    hit.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  at(event) {
    const box = this.svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  grab(event) {
    event.preventDefault(); // no text is selected
    this.svg.focus({ preventScroll: true });
    this.grabbed = this.at(event);
  }

  select(box) {
    place(this.selection, box.left, box.top, box.right - box.left, box.bottom - box.top);
    this.selection.setAttribute("visibility", "visible");
  }

  /* What is dragged over: a band of x, or a box where the pointer moved vertically too. */
  boxTo([x, y]) {
    const [fromX, fromY] = this.grabbed;
    const inside = (value, low, high) => Math.max(low, Math.min(high, value));
    const between = (a, b, low, high) => [inside(Math.min(a, b), low, high), inside(Math.max(a, b), low, high)];
    const [left, right] = between(fromX, x, MARGIN.left, this.width - MARGIN.right);
    const [high, low] = [MARGIN.top, this.height - MARGIN.bottom];
    const flat = Math.abs(y - fromY) < 24;
    const [top, bottom] = flat ? [high, low] : between(fromY, y, high, low);
    return { left, right, top, bottom, flat };
  }

  release(event) {
    const box = this.boxTo(this.at(event));
    this.letGo();
    if (box.right - box.left < 6) return;
    const rangeY = box.flat ? this.boxY : [this.y.value(box.bottom), this.y.value(box.top)];
    this.zoom([this.x.value(box.left), this.x.value(box.right)], rangeY);
  }

  letGo() {
    this.grabbed = null;
    this.selection.setAttribute("visibility", "hidden");
  }

  zoom(rangeX, rangeY) {
    this.boxY = rangeY;
    this.onView(rangeX);
  }

  wheel(event) {
    if (!event.ctrlKey) return;
    event.preventDefault();
    this.scaleBy(Math.exp(event.deltaY / 300), this.at(event)[0]);
  }

  /* Widen (factor above 1) or narrow the view about a pixel. */
  scaleBy(factor, about) {
    const ends = [MARGIN.left, this.width - MARGIN.right].map((end) => about + (end - about) * factor);
    this.viewPixels(ends);
  }

  viewPixels(ends) {
    const [low, high] = this.content.extent;
    const range = ends.map((end) => Math.max(low, Math.min(high, this.x.value(end))));
    if (range[0] < range[1]) this.zoom(range[0] === low && range[1] === high ? null : range, this.boxY);
  }

  key(event) {
    const [left, right] = [MARGIN.left, this.width - MARGIN.right];
    const step = 0.15 * (right - left);
    const closer = () => this.scaleBy(0.7, (left + right) / 2);
    const whole = () => this.zoom(null, null);
    const actions = {
      "+": closer,
      "=": closer,
      "-": () => this.scaleBy(1 / 0.7, (left + right) / 2),
      0: whole,
      Escape: whole,
      ArrowLeft: () => this.shift(-step),
      ArrowRight: () => this.shift(step),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  shift(pixels) {
    const ends = [MARGIN.left, this.width - MARGIN.right];
    const [low, high] = this.content.extent.map((end) => this.x.pixel(end));
    const bounded = Math.max(low - ends[0], Math.min(high - ends[1], pixels));
    this.viewPixels(ends.map((end) => end + bounded));
  }
}

function place(rect, x, y, width, height) {
  for (const [key, value] of Object.entries({ x, y, width, height })) rect.setAttribute(key, Math.max(0, value));
}
