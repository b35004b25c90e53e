/* Uses the page as a reader does, and leaves what it saw as JSON in an element #probe. */
const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(event.message));

const lines = (chart, kind) => charts[chart].content.lines.filter((line) => line.kind === kind);
const ofLines = (chart, kind, value) =>
  Object.fromEntries(lines(chart, kind).map((line) => [line.run.name, value(line)]));
const ends = (chart, kind) => ofLines(chart, kind, (line) => [line.x.at(-1), line.y.at(-1)]);
const all = (selector) => [...document.querySelectorAll(selector)];
const press = (selector) => document.querySelector(selector).click();
const named = (name) => all("#legend button").find((button) => button.title === name);

function choose(id, value, event = "change") {
  const element = document.getElementById(id);
  if (element.type === "checkbox") element.checked = value;
  else element.value = value;
  element.dispatchEvent(new Event(event));
}

function box(id) {
  const { left, top, right, bottom } = document.getElementById(id).getBoundingClientRect();
  return [left, top, right, bottom];
}

function point(type, chart, x, y, more = {}) {
  const frame = charts[chart].svg.getBoundingClientRect();
  const place = { clientX: frame.left + x, clientY: frame.top + y, button: 0, bubbles: true, ...more };
  charts[chart].hit.dispatchEvent(new (type === "wheel" ? WheelEvent : PointerEvent)(type, place));
}

function drag(chart, from, to) {
  point("pointerdown", chart, ...from);
  point("pointermove", chart, ...to);
  point("pointerup", chart, ...to);
}

/* The values that the last point of each drawn path stands for. */
function drawn(chart) {
  const { x, y, host } = charts[chart];
  const found = {};
  for (const path of host.querySelectorAll("path.mean[data-points]")) {
    const [px, py] = path.getAttribute("d").match(/[ML]([^ML]+)$/)[1].split(" ").map(Number);
    found[path.dataset.run] = [x.value(px), y.value(py), Number(path.dataset.points)];
  }
  return found;
}

/* Of each faint path the lowest and highest value drawn, and those of its numbers. */
function reaches() {
  const found = {};
  for (const path of document.querySelectorAll("#chart-loss path.raw")) {
    const pixels = [...path.getAttribute("d").matchAll(/ (-?[\d.]+)/g)].map((each) => Number(each[1]));
    const values = lines("loss", "raw").find((line) => line.run.name === path.dataset.run).y.filter(Number.isFinite);
    const ends = [Math.max(...pixels), Math.min(...pixels)].map(charts.loss.y.value);
    const dips = pixels.filter((pixel) => charts.loss.y.value(pixel) < ends[0] + 0.3).length;
    found[path.dataset.run] = [ends, [Math.min(...values), Math.max(...values)], pixels.length, dips];
  }
  return found;
}

function probe() {
  seen.ready = document.documentElement.dataset.ready;
  seen.drawn = { loss: drawn("loss"), gap: drawn("gap"), metric: drawn("metric") };
  seen.reaches = reaches();
  seen.first = ofLines("loss", "mean", (line) => [line.x[0], line.y[0]]);
  seen.gap = { steps: ends("gap", "mean") };
  seen.boxes = { loss: box("chart-loss"), gap: box("chart-gap") };
  seen.marks = all("#chart-loss .mark").map((mark) => [mark.classList[1], mark.dataset.run, mark.textContent]);
  seen.finals = Object.fromEntries(all("#finals [data-gap]").map((row) => [row.dataset.run, Number(row.dataset.gap)]));
  seen.levels = all("#chart-gap line.limit, #chart-loss line.unigram").length;

  point("pointermove", "loss", charts.loss.x.pixel(2500), 100);
  seen.tip = all("#chart-loss .tip tbody tr").map((row) => [...row.cells].map((cell) => cell.textContent));
  seen.crosses = all("line.cross").length;
  seen.otherTips = [charts.gap.tip.hidden, charts.metric.tip.hidden];

  drag("gap", [charts.gap.x.pixel(1000), 100], [charts.gap.x.pixel(2000), 105]);
  const ranges = Object.values(charts).map((chart) => [chart.x.low, chart.x.high]);
  seen.zoomed = { view: view.x, ranges, y: [charts.loss.y.low, charts.loss.y.high] };
  drag("loss", [charts.loss.x.pixel(1200), 100], [charts.loss.x.pixel(1400), 200]);
  seen.boxed = { view: view.x, y: charts.loss.boxY, canReset: !document.getElementById("reset").disabled };
  point("dblclick", "loss", 300, 100);
  seen.whole = { view: view.x, y: charts.loss.boxY, disabled: document.getElementById("reset").disabled };
  point("wheel", "loss", charts.loss.x.pixel(2500), 100, { deltaY: -300, ctrlKey: true, cancelable: true });
  seen.wheeled = view.x;
  charts.loss.svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  seen.shifted = view.x;
  charts.loss.svg.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
  press("#last");
  seen.last = view.x;

  press("[data-value=tokens]");
  seen.gap.tokens = ends("gap", "mean");
  const title = document.getElementById("gap-title").textContent;
  seen.tokens = { view: view.x, ends: ends("loss", "raw"), label: charts.loss.content.xLabel, title };
  press("[data-value=time]");
  seen.time = { ends: ends("loss", "raw"), label: charts.loss.content.xLabel };
  press("[data-value=steps]");

  choose("log-y", true);
  choose("log-x", true);
  const middle = ({ low, high, pixel }) => pixel(Math.sqrt(low * high)) - (pixel(low) + pixel(high)) / 2;
  seen.logarithmic = [middle(charts.loss.x), middle(charts.loss.y), middle(charts.gap.x)];
  choose("log-y", false);
  choose("log-x", false);

  named("fp4").click();
  const pressed = named("fp4").getAttribute("aria-pressed");
  seen.hidden = { loss: Object.keys(drawn("loss")), gap: Object.keys(drawn("gap")), pressed };
  named("fp4").click();
  named("fp4").dispatchEvent(new MouseEvent("click", { shiftKey: true }));
  seen.alone = Object.keys(drawn("loss"));
  named("fp4").dispatchEvent(new MouseEvent("click", { shiftKey: true }));
  seen.again = Object.keys(drawn("loss")).length;

  choose("raw", false);
  seen.rawPaths = all("#chart-loss path.raw").length;
  choose("raw", true);
  choose("window", 0, "input");
  seen.unsmoothed = ends("loss", "mean");
  choose("metric", "train/grad_norm");
  seen.metric = drawn("metric");

  const sizes = (each) => [each.dataset.map, [each.width, each.height]];
  const maps = () => Object.fromEntries(all("#maps canvas").map(sizes));
  const canvas = all("#maps canvas").find((each) => each.dataset.map === "fprop.a");
  const pixels = [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
  seen.maps = { first: maps(), pixels, bars: document.getElementById("map-bars").textContent };
  const cells = canvas.getBoundingClientRect();
  const over = { clientX: cells.left + 0.9 * cells.width, clientY: cells.top + 0.9 * cells.height };
  canvas.dispatchEvent(new PointerEvent("pointermove", over));
  seen.maps.tip = document.querySelector(".map .tip").textContent;
  choose("map-run", "");
  choose("map-name", "fprop.a");
  seen.maps.both = maps();
  choose("map-figure", "stalled_pct");
  seen.maps.states = maps();

  const styleOf = (selector) => getComputedStyle(document.querySelector(selector));
  const grounds = () => ["body", "section"].map((each) => styleOf(each).backgroundColor);
  const colours = () => [...grounds(), styleOf("path[data-run=bf16].mean").color];
  seen.light = colours();
  press("#theme");
  seen.dark = colours();
}

try {
  probe();
} catch (error) {
  seen.errors.push(String(error.stack));
}
const told = Object.assign(document.createElement("pre"), { id: "probe", textContent: JSON.stringify(seen) });
document.body.append(told);
