// ---- One head: the matrix, zoomed from the whole down to single cells ----

const matrix = document.getElementById("matrix");
const margins = {left: data.queryTokens ? 92 : 52, bottom: data.keyTokens ? 70 : 26};
const images = new Map();

function headImage(head) {
  const name = [head, state.value, state.scale, state.theme].join();
  if (!images.has(name)) {
    const numbers = headPart(arrays[state.value], head);
    if (images.size > 64) images.clear();
    images.set(name, imageOf(numbers, data.mapKeys, data.mapRows, paletteOf(state.theme), state.scale, highestOf(head)));
  }
  return images.get(name);
}

// The weight that the strongest colour stands for.
const highest = {};
function highestOf(head) {
  return (highest[[head, state.value]] ??= largest(headPart(arrays[state.value], head)));
}

function tileImage(tile) {
  const name = [state.value, state.scale, state.theme].join();
  tile.images[name] ??= imageOf(tile[state.value], tile.columns, tile.rows, paletteOf(state.theme), state.scale, tileHighest(tile));
  return tile.images[name];
}

// Means of finer cells are larger: up to the largest weight of the head, in a part of single weights.
function tileHighest(tile) {
  return Math.max(highestOf(tile.head), (tile[`${state.value}Highest`] ??= largest(tile[state.value])));
}

// The canvas in CSS pixels, drawn at the screen's own density.
function prepared(canvas) {
  const box = canvas.getBoundingClientRect(), density = devicePixelRatio || 1;
  const width = Math.max(1, Math.round(box.width * density)), height = Math.max(1, Math.round(box.height * density));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, box.width, box.height);
  return {context, width: box.width, height: box.height};
}

function plotArea() {
  const box = matrix.getBoundingClientRect();
  return {x: margins.left, y: 0, width: Math.max(1, box.width - margins.left), height: Math.max(1, box.height - margins.bottom)};
}

const xOf = (area, j) => area.x + ((j - state.view.k0) / (state.view.k1 - state.view.k0)) * area.width;
const yOf = (area, i) => area.y + ((i - state.view.r0) / (state.view.r1 - state.view.r0)) * area.height;

function drawPart(context, area, image, r0, r1, k0, k1) {
  const x = xOf(area, k0), y = yOf(area, r0);
  context.drawImage(image, x, y, xOf(area, k1) - x, yOf(area, r1) - y);
}

function drawMatrix() {
  const {context, width, height} = prepared(matrix), area = plotArea(), style = getComputedStyle(document.documentElement);
  context.save();
  context.beginPath();
  context.rect(area.x, area.y, area.width, area.height);
  context.clip();
  context.imageSmoothingEnabled = false;
  drawPart(context, area, headImage(state.head), 0, data.mapRows * data.rowCell, 0, data.mapKeys * data.keyCell);
  const tile = liveTile(state.head);
  if (tile) {
    drawPart(context, area, tileImage(tile), tile.r0, tile.r0 + tile.rows * tile.rowCell, tile.k0, tile.k0 + tile.columns * tile.keyCell);
  }
  drawNumbers(context, area);
  context.strokeStyle = style.getPropertyValue("--cursor");
  context.lineWidth = 2;
  const cell = cellAt(state.head, state.cursor.i, state.cursor.j), x = xOf(area, cell.k0), y = yOf(area, cell.r0);
  context.strokeRect(x, y, Math.max(2, xOf(area, cell.k1) - x), Math.max(2, yOf(area, cell.r1) - y));
  context.restore();
  drawAxes(context, area, width, height, style);
}

// The weights themselves, where cells have room for them.
function drawNumbers(context, area) {
  const {r0, r1, k0, k1} = state.view;
  if (area.width / (k1 - k0) < 44 || area.height / (r1 - r0) < 18) return;
  const tile = liveTile(state.head), shade = shadeOf(state.scale, tile ? tileHighest(tile) : highestOf(state.head));
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let i = Math.floor(r0); i < r1; i++) {
    for (let j = Math.floor(k0); j < k1; j++) {
      const weight = exactWeight(state.head, i, j);
      if (weight === null || weight === 0) continue;
      const dark = state.theme === "light" ? shade(weight) <= 128 : shade(weight) > 165;
      context.fillStyle = dark ? "#1c1f23" : "#f1f3f5";
      const text = weight >= 0.001 ? weight.toPrecision(3).slice(0, 6) : weight.toExponential(0);
      context.fillText(text, xOf(area, j + 0.5), yOf(area, i + 0.5));
    }
  }
}

function drawAxes(context, area, width, height, style) {
  context.fillStyle = style.getPropertyValue("--soft");
  context.font = "11px system-ui, sans-serif";
  const label = (begin, end, pixels, least) => Math.max(1, Math.ceil(((end - begin) * least) / pixels));
  const rowStep = label(state.view.r0, state.view.r1, area.height, 15), keyStep = label(state.view.k0, state.view.k1, area.width, 14);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let i = Math.ceil(state.view.r0 / rowStep) * rowStep; i < state.view.r1; i += rowStep) {
    context.fillText(clipped(context, shown(queryToken(i)), area.x - 8), area.x - 5, Math.max(6, yOf(area, Math.min(i + 0.5, state.view.r1))));
  }
  for (let j = Math.ceil(state.view.k0 / keyStep) * keyStep; j < state.view.k1; j += keyStep) {
    const x = xOf(area, Math.min(j + 0.5, state.view.k1)), y = area.height + 6;
    context.save();
    context.translate(x, y);
    if (data.keyTokens) context.rotate(-Math.PI / 3);
    context.textAlign = data.keyTokens ? "right" : "center";
    if (data.keyTokens || keyStep === 1 || j % (keyStep * 4) === 0) context.fillText(clipped(context, shown(keyToken(j)), 74), 0, data.keyTokens ? 0 : 6);
    context.restore();
  }
}

// As much of a text as fits, found by halving.
function clipped(context, text, pixels) {
  if (context.measureText(text).width <= pixels) return text;
  let low = 1, high = text.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (context.measureText(text.slice(0, middle) + "\u2026").width <= pixels) low = middle;
    else high = middle;
  }
  return text.slice(0, low) + "\u2026";
}

// ---- Moving about ----

// Scales the view about a point (in rows and keys); it stays inside the matrix and shows at least a few cells.
function zoomBy(factor, i, j) {
  const view = state.view;
  const scaled = (low, high, at, size) => {
    const span = Math.min(size, Math.max(Math.min(6, size), (high - low) * factor));
    const begin = Math.min(Math.max(0, at - ((at - low) / (high - low)) * span), size - span);
    return [begin, begin + span];
  };
  [view.r0, view.r1] = scaled(view.r0, view.r1, i, data.queries);
  [view.k0, view.k1] = scaled(view.k0, view.k1, j, data.keys);
}

function moveBy(rows, keys) {
  const view = state.view;
  const moved = (low, high, by, size) => {
    const begin = Math.min(Math.max(0, low + by), size - (high - low));
    return [begin, begin + high - low];
  };
  [view.r0, view.r1] = moved(view.r0, view.r1, rows, data.queries);
  [view.k0, view.k1] = moved(view.k0, view.k1, keys, data.keys);
}

function showAll() {
  Object.assign(state.view, {r0: 0, r1: data.queries, k0: 0, k1: data.keys});
}

function placeAt(event) {
  const box = matrix.getBoundingClientRect(), area = plotArea();
  const row = state.view.r0 + ((event.clientY - box.top - area.y) / area.height) * (state.view.r1 - state.view.r0);
  const key = state.view.k0 + ((event.clientX - box.left - area.x) / area.width) * (state.view.k1 - state.view.k0);
  return {row, key, inside: row >= 0 && row < data.queries && key >= 0 && key < data.keys};
}

// The view follows a cursor that the keyboard moves out of it.
function followCursor() {
  const {view, cursor} = state;
  const shift = (low, high, at) => (at < low ? at - low : at + 1 > high ? at + 1 - high : 0);
  moveBy(shift(view.r0, view.r1, cursor.i), shift(view.k0, view.k1, cursor.j));
}
