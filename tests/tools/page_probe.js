/* Uses the page as a reader does, and leaves what it saw as JSON in an element #probe. */
const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(event.message));

const lines = (chart, kind) => charts[chart].content.lines.filter((line) => line.kind === kind);
const ends = (chart, kind) => Object.fromEntries(lines(chart, kind).map((line) => [line.run.name, [line.x.at(-1), line.y.at(-1)]]));
const box = (id) => (({ left, top, right, bottom }) => [left, top, right, bottom])(document.getElementById(id).getBoundingClientRect());
const press = (selector) => document.querySelector(selector).click();
const named = (name) => [...document.querySelectorAll("#legend button")].find((button) => button.title === name);

function choose(id, value, event = "change") {
  const element = document.getElementById(id);
  if (element.type === "checkbox") element.checked = value;
  else element.value = value;
  element.dispatchEvent(new Event(event));
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
  seen.first = Object.fromEntries(lines("loss", "mean").map((line) => [line.run.name, [line.x[0], line.y[0]]]));
  seen.gap = { steps: ends("gap", "mean") };
  seen.boxes = { loss: box("chart-loss"), gap: box("chart-gap") };
  seen.marks = [...document.querySelectorAll("#chart-loss .mark")].map((mark) => [mark.classList[1], mark.dataset.run, mark.textContent]);
  seen.finals = Object.fromEntries([...document.querySelectorAll("#finals [data-gap]")].map((row) => [row.dataset.run, Number(row.dataset.gap)]));
  seen.levels = [...document.querySelectorAll("#chart-gap line.limit, #chart-loss line.unigram")].length;

  point("pointermove", "loss", charts.loss.x.pixel(2500), 100);
  seen.tip = [...charts.loss.tip.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
  seen.crosses = document.querySelectorAll("line.cross").length;
  seen.otherTips = [charts.gap.tip.hidden, charts.metric.tip.hidden];

  drag("gap", [charts.gap.x.pixel(1000), 100], [charts.gap.x.pixel(2000), 105]);
  seen.zoomed = { view: view.x, ranges: Object.values(charts).map((chart) => [chart.x.low, chart.x.high]), y: [charts.loss.y.low, charts.loss.y.high] };
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
  seen.tokens = { view: view.x, ends: ends("loss", "raw"), label: charts.loss.content.xLabel, title: document.getElementById("gap-title").textContent };
  press("[data-value=time]");
  seen.time = { ends: ends("loss", "raw"), label: charts.loss.content.xLabel, gap: ends("gap", "mean") };
  press("[data-value=steps]");

  choose("log-y", true);
  choose("log-x", true);
  const middle = (scale, ends) => scale.pixel(Math.sqrt(scale.low * scale.high)) - (scale.pixel(scale.low) + scale.pixel(scale.high)) / 2;
  seen.logarithmic = [middle(charts.loss.x), middle(charts.loss.y), middle(charts.gap.x)];
  choose("log-y", false);
  choose("log-x", false);

  named("fp4").click();
  seen.hidden = { loss: Object.keys(drawn("loss")), gap: Object.keys(drawn("gap")), pressed: named("fp4").getAttribute("aria-pressed") };
  named("fp4").click();
  named("fp4").dispatchEvent(new MouseEvent("click", { shiftKey: true }));
  seen.alone = Object.keys(drawn("loss"));
  named("fp4").dispatchEvent(new MouseEvent("click", { shiftKey: true }));
  seen.again = Object.keys(drawn("loss")).length;

  choose("raw", false);
  seen.rawPaths = document.querySelectorAll("#chart-loss path.raw").length;
  choose("raw", true);
  choose("window", 0, "input");
  seen.unsmoothed = ends("loss", "mean");
  choose("metric", "train/grad_norm");
  seen.metric = drawn("metric");

  const mapOf = (title) => [...document.querySelectorAll("#maps canvas")].find((canvas) => canvas.dataset.map === title);
  const pixels = (canvas) => [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
  const maps = () => Object.fromEntries([...document.querySelectorAll("#maps canvas")].map((canvas) => [canvas.dataset.map, [canvas.width, canvas.height]]));
  seen.maps = { first: maps(), pixels: pixels(mapOf("fprop.a")), bars: document.getElementById("map-bars").textContent };
  const cell = mapOf("fprop.a").getBoundingClientRect();
  const over = { clientX: cell.left + 0.9 * cell.width, clientY: cell.top + 0.9 * cell.height };
  mapOf("fprop.a").dispatchEvent(new PointerEvent("pointermove", over));
  seen.maps.tip = document.querySelector(".map .tip").textContent;
  choose("map-run", "");
  choose("map-name", "fprop.a");
  seen.maps.both = maps();
  choose("map-figure", "stalled_pct");
  seen.maps.states = maps();

  const colours = () => ["body", "section", "#chart-loss path[data-run=bf16].mean"].map((each) => getComputedStyle(document.querySelector(each))[each === "section" || each === "body" ? "backgroundColor" : "color"]);
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
