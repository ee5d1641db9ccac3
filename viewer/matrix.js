// ---- One head: the matrix, zoomed from the whole down to single cells ----

const matrix = document.getElementById("matrix");
const images = new Map();

function headImage(head) {
  const name = [head, state.value, state.scale, state.theme].join();
  if (!images.has(name)) {
    const numbers = headPart(arrays[state.value], head);
    if (images.size > 64) images.clear();
    images.set(name, imageOf(numbers, data.mapKeys, data.mapRows, paletteOf(state.theme), state.scale, headRange(head)));
  }
  return images.get(name);
}

// The weights that the colours of a head stand for.
const headRanges = {};
function headRange(head) {
  return (headRanges[[head, state.value]] ??= rangeOf(headPart(arrays[state.value], head)));
}

function tileImage(tile) {
  const name = [state.value, state.scale, state.theme].join();
  tile.images[name] ??= imageOf(tile[state.value], tile.columns, tile.rows, paletteOf(state.theme), state.scale, tileRange(tile));
  return tile.images[name];
}

// Means of finer cells are larger, and smaller: up to the largest weight of the head, in a part of single weights.
function tileRange(tile) {
  const head = headRange(tile.head), own = (tile[`${state.value}Range`] ??= rangeOf(tile[state.value]));
  return {lowest: Math.min(head.lowest, own.lowest), highest: Math.max(head.highest, own.highest)};
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

// ---- Sizes ----

// In CSS pixels: the labels beside and below the matrix, the matrix itself, and the entropies on its right.
const sizes = {left: 0, bottom: 0, width: 1, height: 1, side: 64};

// Cells are square, so that the diagonal is one, unless one side of the matrix is many times the other.
function layOut() {
  const detail = document.getElementById("detail"), room = detail.clientWidth, narrow = room < 560;
  sizes.left = data.queryTokens ? (narrow ? 62 : 88) : 50;
  sizes.bottom = data.keyTokens ? 66 : 24;
  sizes.side = narrow ? 40 : 64;
  const panel = room > 720 ? Math.max(270, Math.min(420, room * 0.36)) + 20 : 0;
  const around = 356 + sizes.bottom;  // what else is on the first screen: the header, the profile, the arcs, the footer
  const most = {width: Math.max(120, room - panel - sizes.left - sizes.side - 8),
                height: narrow ? room : Math.max(260, Math.min(1100, innerHeight - around))};
  const ratio = data.keys / data.queries, cell = Math.min(most.width / data.keys, most.height / data.queries, 72);
  const square = ratio <= 5 && ratio >= 0.2;
  sizes.width = Math.floor(square ? cell * data.keys : Math.min(most.width, 72 * data.keys));
  sizes.height = Math.floor(square ? cell * data.queries : Math.min(most.height, Math.max(28, 28 * data.queries)));
  const size = (id, width, height) => Object.assign(document.getElementById(id).style, {width: `${width}px`, height: `${height}px`});
  size("matrix", sizes.left + sizes.width, sizes.height + sizes.bottom);
  size("key-profile", sizes.left + sizes.width, 40);
  size("row-profile", sizes.side, sizes.height + sizes.bottom);
  document.getElementById("key-title").style.paddingLeft = `${sizes.left}px`;
  document.getElementById("query-axis").style.width = `${sizes.left - 5}px`;
}

const plotArea = () => ({x: sizes.left, y: 0, width: sizes.width, height: sizes.height});
const xOf = (area, j) => area.x + ((j - state.view.k0) / (state.view.k1 - state.view.k0)) * area.width;
const yOf = (area, i) => area.y + ((i - state.view.r0) / (state.view.r1 - state.view.r0)) * area.height;

function drawPart(context, area, image, r0, r1, k0, k1) {
  const x = xOf(area, k0), y = yOf(area, r0);
  context.drawImage(image, x, y, xOf(area, k1) - x, yOf(area, r1) - y);
}

function drawMatrix() {
  const {context} = prepared(matrix), area = plotArea(), style = getComputedStyle(document.documentElement);
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
  drawCursor(context, area, style);
  context.restore();
  context.strokeStyle = style.getPropertyValue("--line");
  context.strokeRect(area.x - 0.5, area.y + 0.5, area.width, area.height - 0.5);
  drawAxes(context, area, style);
  matrix.style.touchAction = isWhole() ? "pan-x pan-y" : "none";  // where there is nothing to move, a swipe scrolls the page
}

// The row as a frame, the cell inside it.
function drawCursor(context, area, style) {
  const cell = cellAt(state.head, state.cursor.i, state.cursor.j), x = xOf(area, cell.k0), y = yOf(area, cell.r0);
  const height = Math.max(2, yOf(area, cell.r1) - y);
  context.strokeStyle = style.getPropertyValue("--cursor");
  context.lineWidth = state.pinned ? 1.5 : 1;
  context.globalAlpha = state.pinned ? 1 : 0.6;
  context.strokeRect(area.x + 0.5, y, area.width - 1, height);
  context.globalAlpha = 1;
  context.lineWidth = 2;
  context.strokeRect(x, y, Math.max(2, xOf(area, cell.k1) - x), height);
}

const shortWeight = (p) => (p >= 0.001 ? p.toPrecision(3).slice(0, 6) : p.toExponential(0));

// The weights themselves, where cells have room for them.
function drawNumbers(context, area) {
  const {r0, r1, k0, k1} = state.view;
  if (area.width / (k1 - k0) < 44 || area.height / (r1 - r0) < 18) return;
  const tile = liveTile(state.head), shade = shadeOf(state.scale, tile ? tileRange(tile) : headRange(state.head));
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let i = Math.floor(r0); i < r1; i++) {
    for (let j = Math.floor(k0); j < k1; j++) {
      const weight = exactWeight(state.head, i, j);
      if (weight === null || weight === 0) continue;
      context.fillStyle = inkOf(state.theme, shade(weight));
      context.fillText(shortWeight(weight), xOf(area, j + 0.5), yOf(area, i + 0.5));
    }
  }
}

// ---- Labels ----

// 1, 2, 5, 10, 20, ...: the first that is as large.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least);
}

// Words where each has room for its own, else positions, far enough apart.
function drawAxes(context, area, style) {
  const {r0, r1, k0, k1} = state.view, {i: row, j: key} = state.cursor;
  const soft = style.getPropertyValue("--soft"), ink = style.getPropertyValue("--ink");
  const rowPixels = area.height / (r1 - r0), keyPixels = area.width / (k1 - k0);
  const rowWords = data.queryTokens && rowPixels >= 10, keyWords = data.keyTokens && keyPixels >= 10;
  const rowStep = rowWords ? 1 : niceStep(16 / rowPixels), keyStep = keyWords ? 1 : niceStep(34 / keyPixels);
  const font = (strong) => `${strong ? "600 " : ""}11px system-ui, sans-serif`;
  const places = (begin, end, step) => {
    const found = [];
    for (let n = Math.ceil(begin / step) * step; n < end; n += step) found.push(n);
    return found;
  };
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.font = font(false);
  context.fillStyle = soft;
  context.fillText("key \u2192", area.x - 9, area.height + 11);
  for (const i of places(r0, r1, rowStep)) {
    context.font = font(i === row);
    context.fillStyle = i === row ? ink : soft;
    const text = rowWords ? clipped(context, shown(queryToken(i)), area.x - 8) : String(i);
    context.fillText(text, area.x - 5, Math.min(area.height - 5, Math.max(6, yOf(area, Math.min(i + 0.5, r1)))));
  }
  for (const j of places(k0, k1, keyStep)) {
    context.save();
    context.font = font(j === key);
    context.fillStyle = j === key ? ink : soft;
    const half = keyWords ? 0 : context.measureText(String(j)).width / 2;  // numbers end where the matrix does
    context.translate(Math.min(xOf(area, Math.min(j + 0.5, k1)), area.x + area.width - half), area.height + (keyWords ? 6 : 11));
    if (keyWords) context.rotate(-Math.PI / 3);
    context.textAlign = keyWords ? "right" : "center";
    context.fillText(keyWords ? clipped(context, shown(keyToken(j)), 66) : String(j), 0, 0);
    context.restore();
  }
}

// As much of a text as fits, found by halving.
function clipped(context, text, pixels) {
  if (context.measureText(text).width <= pixels) return text;
  let low = 1, high = text.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (context.measureText(first(text, middle) + "\u2026").width <= pixels) low = middle;
    else high = middle;
  }
  return first(text, low) + "\u2026";
}

// A file has cells of some size; looking closer shows nothing more, and a server would.
function drawNote() {
  const note = document.getElementById("note"), {r0, r1, k0, k1} = state.view;
  const coarse = !data.live && !single;
  const close = Math.min((k1 - k0) / data.keyCell, (r1 - r0) / data.rowCell) < 40;
  note.hidden = !(coarse && close);
  if (!note.hidden && !note.textContent) {
    const code = document.createElement("code");
    code.textContent = "headway.view(..., serve=True)";
    note.append(`This file holds cells of ${data.rowCell} \u00d7 ${data.keyCell} weights and nothing finer. `, code, " shows every weight.");
  }
}

// ---- Moving about ----

const isWhole = () => state.view.r1 - state.view.r0 >= data.queries && state.view.k1 - state.view.k0 >= data.keys;

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
  const box = matrix.getBoundingClientRect(), area = plotArea(), {r0, r1, k0, k1} = state.view;
  const down = (event.clientY - box.top - area.y) / area.height, across = (event.clientX - box.left - area.x) / area.width;
  const row = r0 + down * (r1 - r0), key = k0 + across * (k1 - k0);
  return {row, key, inside: down >= 0 && down < 1 && across >= 0 && across < 1};
}

// The view follows a cursor that the keyboard moves out of it.
function followCursor() {
  const {view, cursor} = state;
  const shift = (low, high, at) => (at < low ? at - low : at + 1 > high ? at + 1 - high : 0);
  moveBy(shift(view.r0, view.r1, cursor.i), shift(view.k0, view.k1, cursor.j));
}
