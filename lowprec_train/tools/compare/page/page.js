/* The page: its controls change the state, and the charts are drawn anew from it. */

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

const MATCHES = {
  steps: ["matched steps", "The same batches, so most of their noise is common and leaves the difference."],
  tokens: ["matched tokens", "Fair when batch sizes differ. The run is interpolated between its own points."],
  time: ["equal GPU time", "What a run gains by being faster is in it. Batches differ, so single points are noisy."],
};

/* Another axis or another scale: what was zoomed to means nothing there. */
function redrawWhole() {
  const [matched, hint] = MATCHES[state.axis];
  byId("gap-title").textContent = `Gap to ${shortened(baseline.name)} at ${matched}`;
  byId("gap-hint").textContent = hint;
  options.onView(null);
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
    const { style } = document.documentElement;
    const now = style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    style.colorScheme = now === "dark" ? "light" : "dark";
  });
}

function offerWindows() {
  const useful = [1, 3, 10, 30, 100, 300, 1000].filter((size) => size <= (baseline.loss.length * numbers.every) / 2);
  const windows = [...new Set([...useful, numbers.window])].sort((a, b) => a - b);
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
  const first = ["perf/tokens_per_sec_per_gpu", "train/grad_norm", ...metrics].find((name) => metrics.includes(name));
  byId("metric").value = first ?? "";
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
