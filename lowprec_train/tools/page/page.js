/* What the page shows: the state that the controls change, and the charts made of it. */

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const state = { axis: "steps", logX: false, logY: false, raw: true, window: numbers.window, hidden: new Set() };
const view = { x: null }; // what all charts show of the x axis; null: all of it
const byId = (id) => document.getElementById(id);
const DIVERGED = 1; // nats: a run further away than this leaves the axes instead of flattening the others

/* --- curves --- */

for (const run of numbers.runs) {
  run.steps = fromKnots(run.steps);
  run.loss = floats(run.loss);
  run.tokens = run.tokens && fromKnots(run.tokens);
  for (const metric of Object.values(run.metrics)) {
    Object.assign(metric, { steps: fromKnots(metric.steps), values: floats(metric.values) });
  }
}
const baseline = numbers.runs[numbers.baseline];
const AXES = offeredAxes();

/* What x can be: of each axis its unit, its label and how a run's steps map to it. GPU time is tokens over the median
   rate, as in "speed at equal loss". */
function offeredAxes() {
  const axes = { steps: { of: (run, steps) => steps, label: "steps", unit: 1 } };
  if (numbers.runs.some((run) => !run.tokens)) return axes;
  const tokensAt = (run, step) => interpolate(run.steps, run.tokens, Math.max(run.steps[0], Math.min(run.steps.at(-1), step)));
  const most = Math.max(...numbers.runs.map((run) => run.tokens.at(-1)));
  const [unit, name] = [[1e9, "billion"], [1e6, "million"], [1e3, "thousand"]].find(([each]) => most >= each) ?? [1, ""];
  axes.tokens = { of: (run, steps) => steps.map((step) => tokensAt(run, step) / unit), label: `${name} tokens`.trim(), unit };
  if (numbers.runs.some((run) => !run.rate)) return axes;
  const longest = Math.max(...numbers.runs.map((run) => run.tokens.at(-1) / run.rate));
  const [seconds, word] = [[3600, "hours"], [60, "minutes"]].find(([each]) => longest >= 2 * each) ?? [1, "seconds"];
  axes.time = { of: (run, steps) => steps.map((step) => tokensAt(run, step) / run.rate / seconds), label: `GPU ${word} at the median rate`, unit: seconds };
  return axes;
}

function visible() {
  return numbers.runs.filter((run) => !state.hidden.has(run.name));
}

/* A faint line of the points and a strong one of their running mean, at the middle of its window. */
function linesOf(run, x, y, size = state.window) {
  const points = Math.max(1, Math.round(size / numbers.every));
  const mean = points > 1 ? { run, kind: "mean", x: smooth(x, points), y: smooth(y, points) } : { run, kind: "mean", x, y };
  return state.raw && points > 1 ? [{ run, kind: "raw", x, y }, mean] : [mean];
}

/* Faint lines first, the baseline last: it is what the others are seen against. */
function inOrder(lines) {
  const rank = (line) => (line.kind === "mean" ? 2 : 0) + (line.run === baseline ? 1 : 0);
  return lines.sort((a, b) => rank(a) - rank(b));
}

/* Smallest and largest finite y of the lines within a range of x. */
function reachOf(lines, [low, high]) {
  let reach = [Infinity, -Infinity];
  for (const line of lines) {
    for (let i = lowerBound(line.x, low); i < line.x.length && line.x[i] <= high; i++) {
      if (Number.isFinite(line.y[i])) reach = [Math.min(reach[0], line.y[i]), Math.max(reach[1], line.y[i])];
    }
  }
  return reach;
}

function widened([low, high], log = false, least = 1e-6) {
  if (!(low <= high)) return log ? [1, 10] : [0, 1];
  if (log) return [low / (high / low) ** 0.04 / 1.0005, high * (high / low) ** 0.04 * 1.0005];
  const margin = 0.05 * Math.max(high - low, least);
  return [low - margin, high + margin];
}

/* All of x that any run has, with room for a marker at its end. */
function extent() {
  const { of } = AXES[state.axis];
  const all = numbers.runs.flatMap((run) => [of(run, run.steps.slice(0, 1))[0], of(run, run.steps.slice(-1))[0]]);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  return state.logX ? [low, high * (high / low) ** 0.01] : [Math.min(0, low), high + 0.01 * (high - Math.min(0, low))];
}

function frame() {
  const axis = AXES[state.axis];
  const heading = (x) => (state.axis === "steps" ? `step ${number(Math.round(x), 0)}` : `${number(x)} ${axis.label}`);
  return { extent: extent(), xLabel: axis.label, logX: state.logX, heading, logY: false };
}

/* --- the three charts --- */

function lossContent() {
  const { of } = AXES[state.axis];
  const lines = inOrder(visible().flatMap((run) => linesOf(run, of(run, run.steps), run.loss)));
  const limits = (range) => {
    const reach = reachOf(lines, range);
    const base = reachOf(lines.filter((line) => line.run === baseline), range);
    if (base[0] <= base[1]) reach[1] = Math.min(reach[1], base[1] + Math.max(0.35 * (base[1] - base[0]), DIVERGED));
    if (!view.x && numbers.unigram !== null) reach[0] = Math.min(reach[0], numbers.unigram);
    return widened(reach, state.logY);
  };
  const level = { y: numbers.unigram, kind: "unigram", text: `validation unigram entropy ${numbers.unigram?.toFixed(2)}` };
  return {
    ...frame(), lines, limits, logY: state.logY, yLabel: "nats per token", value: (y) => number(y, 4),
    marks: visible().flatMap((run) => marksOf(run, of)), levels: numbers.unigram === null ? [] : [level],
  };
}

function marksOf(run, of) {
  const at = (step) => of(run, [step])[0];
  const said = (step, text) => `${run.name}, step ${number(step, 0)}: ${text}`;
  const marks = run.valid.steps.map((step, i) => ({ kind: "valid", step, y: run.valid.values[i], text: `held-out loss ${run.valid.values[i]}` }));
  const spikes = run.spikes.map(([step, loss, excess, length]) => ({
    kind: "spike", step, y: loss, text: `spike to ${number(loss, 3)}, ${number(excess, 3)} above its surroundings, ${length} logged step(s)`,
  }));
  const broken = run.nonfinite.map((step) => ({ kind: "nonfinite", step, y: null, text: "loss not finite" }));
  const shown = [...marks.filter((mark) => mark.y !== null), ...spikes, ...broken];
  return shown.map(({ kind, step, y, text }) => ({ run, kind, x: at(step), y, title: said(step, text) }));
}

/* Run minus baseline: at the steps of both, else at the baseline's tokens or times, the run interpolated. */
function gapOf(run) {
  const { of } = AXES[state.axis];
  const difference = state.axis === "steps" ? differencesAtCommon : differencesAtBase;
  const gap = difference(of(run, run.steps), run.loss, of(baseline, baseline.steps), baseline.loss);
  return [Float64Array.from(gap.x), Float64Array.from(gap.y)];
}

function gapContent() {
  const lines = inOrder(visible().filter((run) => run !== baseline).flatMap((run) => linesOf(run, ...gapOf(run))));
  const means = lines.filter((line) => line.kind === "mean");
  const settled = (range) => [view.x ? range[0] : range[0] + 0.1 * (range[1] - range[0]), range[1]];
  const limits = (range) => {
    const near = means.filter((line) => reachOf([line], settled(range)).every((end) => Math.abs(end) < DIVERGED));
    const reach = reachOf(near.length ? near : means, settled(range));
    if (!(reach[0] <= reach[1])) return [-DIVERGED, DIVERGED];
    const most = Math.max(Math.abs(reach[0]), Math.abs(reach[1]), 1e-4);
    if (numbers.gate !== null && numbers.gate < 5 * most) reach.push(-numbers.gate, numbers.gate);
    const ends = [Math.min(0, ...reach), Math.max(0, ...reach)];
    const margin = 0.2 * (ends[1] - ends[0]);
    return [ends[0] - margin, ends[1] + margin];
  };
  const gates = numbers.gate === null ? [] : [-1, 1].map((side) => ({ y: side * numbers.gate, kind: "limit", text: side > 0 ? "gate" : "" }));
  return {
    ...frame(), lines, limits, marks: [], levels: [{ y: 0, kind: "zero", text: "" }, ...gates],
    yLabel: "nats per token", value: (y) => signed(y, 4),
  };
}

function metricContent() {
  const { of } = AXES[state.axis];
  const name = byId("metric").value;
  const lines = visible().filter((run) => run.metrics[name]).flatMap((run) => metricLines(run, run.metrics[name], of));
  const means = lines.filter((line) => line.kind === "mean");
  return {
    ...frame(), lines: inOrder(lines), limits: (range) => widened(reachOf(means, range)), marks: [], levels: [],
    yLabel: name.split("/").slice(1).join("/") || name, value: shortNumber,
  };
}

/* A window of as many steps as that of the losses, in points of this metric. */
function metricLines(run, metric, of) {
  const apart = (steps) => (steps.at(-1) - steps[0]) / Math.max(1, steps.length - 1) || 1;
  const points = Math.round((state.window * apart(run.steps)) / numbers.every / apart(metric.steps));
  return linesOf(run, of(run, metric.steps), metric.values, Math.max(1, points) * numbers.every);
}

/* --- the page --- */

const charts = {};
const options = {
  view,
  onView: (range) => {
    view.x = range;
    if (range === null) for (const chart of Object.values(charts)) chart.boxY = null;
    draw();
  },
  onHover: (x, source) => Object.values(charts).forEach((chart) => chart.hover(x, chart === source)),
};

const CONTENTS = { loss: lossContent, gap: gapContent, metric: metricContent };

function draw() {
  for (const [name, chart] of Object.entries(charts)) chart.set(CONTENTS[name]());
  byId("reset").disabled = view.x === null && Object.values(charts).every((chart) => chart.boxY === null);
  drawFinals(byId("finals"), numbers, state.hidden);
}

/* Another axis or another scale: what was zoomed to means nothing there. */
function redrawWhole() {
  for (const chart of Object.values(charts)) chart.boxY = null;
  view.x = null;
  const hints = {
    steps: "At matched steps: the same batches, so most of their noise is common and leaves the difference.",
    tokens: "At matched tokens: fair when the batch sizes differ. The run is interpolated between its own points.",
    time: "At equal GPU time: what a run lost or gained by being faster or slower is in it. Batches differ, so single points are noisy.",
  };
  byId("gap-title").textContent = `Gap to ${shortened(baseline.name)} at ${{ steps: "matched steps", tokens: "matched tokens", time: "equal GPU time" }[state.axis]}`;
  byId("gap-hint").textContent = hints[state.axis];
  draw();
}

function drawLegend() {
  byId("legend").replaceChildren(...numbers.runs.map((run) => {
    const button = Object.assign(document.createElement("button"), { type: "button", title: run.name });
    button.setAttribute("aria-pressed", String(!state.hidden.has(run.name)));
    button.append(nameOf(run));
    button.addEventListener("click", (event) => toggle(run.name, event.shiftKey));
    button.addEventListener("pointerenter", () => emphasise(run.name));
    button.addEventListener("pointerleave", () => emphasise(null));
    const item = document.createElement("li");
    item.append(button);
    return item;
  }));
}

/* Hide or show a run; alone: it and the baseline only, or all again. */
function toggle(name, alone) {
  const others = numbers.runs.map((run) => run.name).filter((each) => each !== name && each !== baseline.name);
  if (alone) state.hidden = new Set(others.every((each) => state.hidden.has(each)) ? [] : others);
  else if (!state.hidden.delete(name)) state.hidden.add(name);
  drawLegend();
  draw();
}

function emphasise(name) {
  for (const path of document.querySelectorAll(".chart path[data-run]")) {
    path.classList.toggle("dimmed", name !== null && path.dataset.run !== name);
  }
}

function listen() {
  for (const button of document.querySelectorAll("[data-choice=axis] button")) {
    button.disabled = !(button.dataset.value in AXES);
    if (button.disabled) button.title = "a run has not logged what this needs";
    button.addEventListener("click", () => {
      state.axis = button.dataset.value;
      for (const each of button.parentElement.children) each.setAttribute("aria-pressed", String(each === button));
      redrawWhole();
    });
  }
  const whenChecked = (id, key, then) => byId(id).addEventListener("change", (event) => {
    state[key] = event.target.checked;
    then();
  });
  whenChecked("log-x", "logX", redrawWhole);
  whenChecked("log-y", "logY", redrawWhole);
  whenChecked("raw", "raw", draw);
  byId("reset").addEventListener("click", () => options.onView(null));
  byId("last").addEventListener("click", () => {
    const [low, high] = extent();
    for (const chart of Object.values(charts)) chart.boxY = null;
    options.onView([state.logX ? low * (high / low) ** 0.75 : low + 0.75 * (high - low), high]);
  });
  byId("metric").addEventListener("change", redrawMetric);
  byId("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.style.colorScheme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.style.colorScheme = dark ? "light" : "dark";
  });
}

function offerWindows() {
  const windows = [...new Set([1, 3, 10, 30, 100, 300, 1000, numbers.window])].filter((size) => size === numbers.window || size <= baseline.loss.length * numbers.every / 2);
  windows.sort((a, b) => a - b);
  const say = () => (byId("window-said").textContent = `${state.window} step${state.window > 1 ? "s" : ""}`);
  Object.assign(byId("window"), { max: windows.length - 1, value: windows.indexOf(numbers.window) });
  byId("window").addEventListener("input", (event) => {
    state.window = windows[event.target.value];
    say();
    draw();
  });
  say();
}

function redrawMetric() {
  const every = Math.max(...numbers.runs.map((run) => run.metrics[byId("metric").value]?.every ?? 1));
  byId("metric-hint").textContent = every > 1 ? `A point is the mean of ${every} logged ones.` : "";
  charts.metric.boxY = null;
  draw();
}

function start() {
  colourNames(numbers.runs);
  drawLegend();
  const metrics = [...new Set(numbers.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  fill(byId("metric"), metrics.map((name) => [name, name]));
  byId("metric").value = ["perf/tokens_per_sec_per_gpu", "train/grad_norm", ...metrics].find((name) => metrics.includes(name)) ?? "";
  offerWindows();
  listen();
  for (const [name, height] of [["loss", 420], ["gap", 330], ["metric", 260]]) {
    if (name !== "metric" || metrics.length) charts[name] = new Chart(byId(`chart-${name}`), { height, ...options });
  }
  redrawWhole();
  if (metrics.length) redrawMetric();
  if (numbers.telemetry) new HeatMaps(numbers.telemetry, numbers.runs);
  new ResizeObserver(() => drawFinals(byId("finals"), numbers, state.hidden)).observe(byId("finals").parentElement);
  document.documentElement.dataset.ready = "true";
}

start();
