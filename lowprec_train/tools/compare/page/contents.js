/* What the three charts show: the curves, marks and limits that follow from the numbers and the state. */

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const state = { axis: "steps", logX: false, logY: false, raw: true, window: numbers.window, hidden: new Set() };
const view = { x: null }; // what all charts show of the x axis; null: all of it
const byId = (id) => document.getElementById(id);
const DIVERGED = 1; // nats: a run further away than this leaves the axes instead of flattening the others

/* --- curves --- */

for (const run of numbers.runs) {
  run.steps = fromKnots(run.steps);
  run.loss = floats(run.loss);
  run.matched = run.matched && { x: fromKnots(run.matched.steps), y: floats(run.matched.values) };
  run.tokens = run.tokens && fromKnots(run.tokens);
  for (const metric of Object.values(run.metrics)) {
    Object.assign(metric, { steps: fromKnots(metric.steps), values: floats(metric.values) });
  }
}
const baseline = numbers.runs[numbers.baseline];
const AXES = offeredAxes();

/* What x can be: of each axis its label, and how a run's steps map to it. GPU time is tokens over the median
   rate, as in "speed at equal loss". */
function offeredAxes() {
  const axes = { steps: { label: "steps", of: (run, steps) => steps } };
  if (numbers.runs.some((run) => !run.tokens)) return axes;
  const within = (run, step) => Math.max(run.steps[0], Math.min(run.steps.at(-1), step));
  const tokensAt = (run, step) => interpolate(run.steps, run.tokens, within(run, step));
  const most = Math.max(...numbers.runs.map((run) => run.tokens.at(-1)));
  const units = [[1e9, "billion "], [1e6, "million "], [1e3, "thousand "], [1, ""]];
  const [unit, name] = units.find(([each]) => most >= each);
  axes.tokens = { label: `${name}tokens`, of: (run, steps) => steps.map((step) => tokensAt(run, step) / unit) };
  if (numbers.runs.some((run) => !run.rate)) return axes;
  const longest = Math.max(...numbers.runs.map((run) => run.tokens.at(-1) / run.rate));
  const [seconds, word] = [[3600, "hours"], [60, "minutes"], [0, "seconds"]].find(([each]) => longest >= 2 * each);
  const timeAt = (run, step) => tokensAt(run, step) / run.rate / (seconds || 1);
  axes.time = { label: `GPU ${word} at the median rate`, of: (run, steps) => steps.map((step) => timeAt(run, step)) };
  return axes;
}

function visible() {
  return numbers.runs.filter((run) => !state.hidden.has(run.name));
}

/* A faint line of the points and a strong one of their running mean. */
function linesOf(run, x, y, size = state.window) {
  const points = Math.max(1, Math.round(size / numbers.every));
  if (points === 1) return [{ run, kind: "mean", x, y }];
  const mean = { run, kind: "mean", x, y: smooth(y, points) };
  return state.raw ? [{ run, kind: "raw", x, y }, mean] : [mean];
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
  const text = `validation unigram entropy ${numbers.unigram?.toFixed(2)}`;
  const levels = numbers.unigram === null ? [] : [{ y: numbers.unigram, kind: "unigram", text }];
  const marks = visible().flatMap((run) => marksOf(run, of));
  const value = (y) => number(y, 4);
  return { ...frame(), lines, marks, levels, limits, value, logY: state.logY, yLabel: "nats per token" };
}

function marksOf(run, of) {
  const mark = (kind, step, y, text) => {
    const title = `${run.name}, step ${number(step, 0)}: ${text}`;
    return { run, kind, x: of(run, [step])[0], y, title };
  };
  const held = run.valid.steps.map((step, i) => [step, run.valid.values[i]]).filter(([, loss]) => loss !== null);
  const spiked = (loss, excess) => `spike to ${number(loss, 3)}, ${number(excess, 3)} above its surroundings`;
  return [
    ...held.map(([step, loss]) => mark("valid", step, loss, `held-out loss ${loss}`)),
    ...run.spikes.map(([step, loss, excess]) => mark("spike", step, loss, spiked(loss, excess))),
    ...run.nonfinite.map((step) => mark("nonfinite", step, null, "loss not finite")),
  ];
}

/* Run minus baseline: at the steps of both, as numbers.py has pooled it if losses are pooled, else at the baseline's tokens or times, the run interpolated. */
function gapOf(run) {
  const { of } = AXES[state.axis];
  if (run.matched && state.axis === "steps") return [run.matched.x, run.matched.y];
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
  const sides = numbers.gate === null ? [] : [[numbers.gate, "gate"], [-numbers.gate, ""]];
  const levels = [[0, "", "zero"], ...sides].map(([y, text, kind = "limit"]) => ({ y, text, kind }));
  const value = (y) => signed(y, 4);
  return { ...frame(), lines, marks: [], levels, limits, value, yLabel: "nats per token" };
}

function metricContent() {
  const { of } = AXES[state.axis];
  const name = byId("metric").value;
  const lines = visible().filter((run) => run.metrics[name]).flatMap((run) => metricLines(run, run.metrics[name], of));
  const means = lines.filter((line) => line.kind === "mean");
  const limits = (range) => widened(reachOf(means, range));
  const yLabel = name.split("/").slice(1).join("/") || name;
  return { ...frame(), lines: inOrder(lines), marks: [], levels: [], limits, value: shortNumber, yLabel };
}

/* A window of as many steps as that of the losses, in points of this metric. */
function metricLines(run, metric, of) {
  const apart = (steps) => (steps.at(-1) - steps[0]) / Math.max(1, steps.length - 1) || 1;
  const points = Math.round((state.window * apart(run.steps)) / numbers.every / apart(metric.steps));
  return linesOf(run, of(run, metric.steps), metric.values, Math.max(1, points) * numbers.every);
}
