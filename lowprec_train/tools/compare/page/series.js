/* Packed numbers become curves here: decoded, averaged, subtracted, and thinned to what a screen can show. */

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

/* Little-endian FP32 to an array of doubles. */
function floats(text) {
  return Float64Array.from(new Float32Array(bytes(text).buffer));
}

/* [index, value, ...] with straight lines between: see numbers.py. */
function fromKnots(knots) {
  if (!knots.length) return new Float64Array(0);
  const values = new Float64Array(knots.at(-2) + 1);
  values[0] = knots[1];
  for (let k = 2; k < knots.length; k += 2) {
    const [i, a, j, b] = knots.slice(k - 2, k + 2);
    for (let at = i + 1; at <= j; at++) values[at] = a + ((b - a) * (at - i)) / (j - i);
  }
  return values;
}

/* The running mean as curves.drawn of Python has it, at the points themselves: the mean of the window about a point, the
   largest odd number of them up to `size`; at the start the window shrinks about its point; the last half window is the
   least-squares line through the last window. A value that is not finite spoils its own windows only. */
function smooth(values, size) {
  const n = values.length;
  const half = Math.floor((Math.min(size, n) - 1) / 2);
  if (half < 1) return Float64Array.from(values);
  const means = new Float64Array(n);
  let [from, to, sum, spoiled] = [0, -1, 0, 0];
  const count = (value, sign) => (Number.isFinite(value) ? (sum += sign * value) : (spoiled += sign));
  for (let i = 0; i < n - half; i++) {
    const reach = Math.min(i, half);
    while (to < i + reach) count(values[++to], 1);
    while (from < i - reach) count(values[from++], -1);
    means[i] = spoiled ? NaN : sum / (2 * reach + 1);
  }
  const middle = n - 1 - half;
  let [slope, squares] = [0, 0];
  for (let k = -half; k <= half; k++) {
    slope += k * (values[middle + k] - values[middle]);
    squares += k * k;
  }
  for (let k = 1; k <= half; k++) means[middle + k] = means[middle] + (slope / squares) * k;
  return means;
}

/* The first index whose x is at least `value`, x increasing. */
function lowerBound(x, value) {
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(x, value) {
  const i = lowerBound(x, value);
  return i > 0 && (i === x.length || value - x[i - 1] < x[i] - value) ? i - 1 : i;
}

/* y at `value`, on the straight line between neighbours; NaN outside of x. */
function interpolate(x, y, value) {
  const i = lowerBound(x, value);
  if (i < x.length && x[i] === value) return y[i];
  if (i === 0 || i === x.length) return NaN;
  return y[i - 1] + ((y[i] - y[i - 1]) * (value - x[i - 1])) / (x[i] - x[i - 1]);
}

/* Differences of two curves at the x that both have. */
function differencesAtCommon(x, y, baseX, baseY) {
  const found = { x: [], y: [] };
  for (let i = 0, j = 0; i < x.length && j < baseX.length; ) {
    if (x[i] === baseX[j]) {
      found.x.push(x[i]);
      found.y.push(y[i++] - baseY[j++]);
    } else if (x[i] < baseX[j]) i++;
    else j++;
  }
  return found;
}

/* Differences at the baseline's x within both ranges, the first curve interpolated. */
function differencesAtBase(x, y, baseX, baseY) {
  const found = { x: [], y: [] };
  baseX.forEach((value, i) => {
    if (value < x[0] || value > x.at(-1)) return;
    found.x.push(value);
    found.y.push(interpolate(x, y, value) - baseY[i]);
  });
  return found;
}

/* The `d` of a path. Where several points share a pixel column, its first, lowest, highest and last remain, so a
   thinned curve looks as the whole one does. What is not finite interrupts it. */
function pathOf(x, y, scaleX, scaleY) {
  const parts = [];
  const from = Math.max(0, lowerBound(x, scaleX.low) - 1);
  const to = Math.min(x.length, lowerBound(x, scaleX.high) + 2);
  let pen = false;
  for (const i of thinned(x, y, from, to, scaleX)) {
    if (!Number.isFinite(scaleY.pixel(y[i]))) {
      pen = false;
      continue;
    }
    const pixelY = Math.max(-1e4, Math.min(1e4, scaleY.pixel(y[i])));
    parts.push((pen ? "L" : "M") + scaleX.pixel(x[i]).toFixed(1) + " " + pixelY.toFixed(1));
    pen = true;
  }
  return parts.join("");
}

function thinned(x, y, from, to, scaleX) {
  const kept = [];
  for (let i = from; i < to; ) {
    const column = Math.round(scaleX.pixel(x[i]));
    let [first, lowest, highest] = [i, i, i];
    const broken = [];
    for (; i < to && Math.round(scaleX.pixel(x[i])) === column; i++) {
      if (!Number.isFinite(y[i])) broken.push(i);
      else {
        if (!(y[lowest] <= y[i])) lowest = i;
        if (!(y[highest] >= y[i])) highest = i;
      }
    }
    kept.push(...[...new Set([first, lowest, highest, i - 1, ...broken.slice(0, 1)])].sort((a, b) => a - b));
  }
  return kept;
}
