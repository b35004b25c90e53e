/* A scale maps values to pixels, by themselves or by their logarithm, and knows the round numbers to label. */

function makeScale(low, high, from, to, log) {
  const forth = log ? Math.log : (value) => value;
  const back = log ? Math.exp : (value) => value;
  const start = forth(low);
  const slope = (to - from) / (forth(high) - start);
  return {
    low, high, log,
    pixel: (value) => from + slope * (forth(value) - start),
    value: (pixel) => back(start + (pixel - from) / slope),
    ticks: (count) => (log && high / low > 4 ? logTicks(low, high, count) : linearTicks(low, high, count)),
  };
}

/* About `count` multiples of 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((multiple) => multiple * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) {
    ticks.push(i * step + 0); // + 0: no negative zero
  }
  return ticks;
}

/* 1, 2 and 5 of every decade, or only its 1 where these are too many. */
function logTicks(low, high, count) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const multiple of [1, 2, 5]) ticks.push(multiple * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  const isPower = (tick) => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-9;
  return inside.length > count ? inside.filter(isPower) : inside;
}

/* Texts for ticks, with as many decimals as tell neighbours apart. */
function tickTexts(ticks) {
  const gaps = ticks.slice(1).map((tick, i) => tick - ticks[i]);
  const smallest = Math.min(...gaps, Math.abs(ticks.at(-1) ?? 1) || 1);
  const decimals = Math.max(0, Math.min(9, -Math.floor(Math.log10(smallest) + 1e-6)));
  const large = Math.max(...ticks.map(Math.abs)) >= 1e6;
  return ticks.map((tick) => (large ? shortNumber(tick) : number(tick, gaps.length ? decimals : undefined)));
}

function number(value, decimals) {
  if (decimals === undefined) return Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  const digits = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return value.toLocaleString("en", digits).replace("-", "−");
}

function signed(value, decimals) {
  return (value > 0 ? "+" : "") + number(value, decimals);
}

/* 3 to 4 significant digits of anything, powers of ten where they are needed. */
function shortNumber(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2);
  const [divisor, unit] = [[1e12, "T"], [1e9, "B"], [1e6, "M"]].find(([each]) => size >= each) ?? [1, ""];
  return number(value / divisor) + unit;
}
