// ---- The row under the cursor: its strongest keys, and profiles ----

const percent = (p) => (p >= 0.001 ? `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %` : p.toExponential(2));

function describeCursor() {
  const {i, j} = state.cursor, cell = cellAt(state.head, i, j);
  const who = `query ${i}${data.queryTokens ? ` ${quoted(queryToken(i))}` : ""}`;
  const whom = `key ${j}${data.keyTokens ? ` ${quoted(keyToken(j))}` : ""}`;
  if (exactWeight(state.head, i, j) !== null) return `${who} \u2192 ${whom}: weight ${cell.max.toPrecision(7)}`;
  if (cell.r1 - cell.r0 === 1 && cell.k1 - cell.k0 === 1) return `${who} \u2192 ${whom}: weight ${cell.max.toPrecision(3)}, in three digits`;
  return `${who} \u2192 ${whom}: cell of rows ${cell.r0}\u2013${cell.r1 - 1} and keys ${cell.k0}\u2013${cell.k1 - 1}, ` +
         `mean ${cell.mean.toPrecision(3)}, largest ${cell.max.toPrecision(3)}`;
}

function rowKeys() {
  const listed = topOf(state.head, state.cursor.i);
  if (listed.length) return listed.map(({key, weight}) => ({begin: key, end: key + 1, share: weight, name: shown(keyToken(key))}));
  return topCellsOf(state.head, state.cursor.i).map((cell) => ({...cell, name: cell.end - cell.begin === 1 ? shown(keyToken(cell.begin)) : `keys ${cell.begin}\u2013${cell.end - 1}`}));
}

function drawRow() {
  document.getElementById("cursor").textContent = describeCursor();
  const entries = rowKeys();
  document.getElementById("row-keys").replaceChildren(...entries.map(({name, share}) => {
    const chip = document.createElement("span"), bold = document.createElement("bdi");
    bold.textContent = name;
    chip.append(bold, ` ${percent(share)}`);
    return chip;
  }));
  drawArcs(entries);
  drawText(entries);
}

// The words around the cursor, each shaded by the weight that the row gives it; pointing at a word goes to its row.
const text = document.getElementById("text"), mostWords = 240;
let words = {begin: 0, elements: []};

function drawText(entries) {
  if (!data.keyTokens || data.queryTokens !== data.keyTokens) return;
  const {i} = state.cursor, {begin, elements} = words;
  if (!elements.length || i < begin || i >= begin + elements.length) fillText(i);
  const shares = arrays.weights ? headPart(arrays.weights, state.head).subarray(i * data.keys, (i + 1) * data.keys) : null;
  const most = entries.length ? entries[0].share : 0;
  words.elements.forEach((element, n) => {
    const key = words.begin + n, entry = shares ? null : entries.find(({begin: from, end}) => key >= from && key < end);
    const share = shares ? shares[key] : entry ? entry.share : 0;
    const strength = most > 0 ? Math.round(62 * Math.sqrt(Math.min(1, share / most))) : 0;
    element.style.background = strength > 4 ? `color-mix(in srgb, var(--arc) ${strength}%, transparent)` : "";
    element.classList.toggle("self", key === i);
  });
}

function fillText(i) {
  const begin = Math.max(0, Math.min(i - mostWords / 2, data.keys - mostWords)), end = Math.min(data.keys, begin + mostWords);
  const elements = Array.from({length: end - begin}, (_, n) => {
    const element = document.createElement("bdi");
    element.textContent = shown(keyToken(begin + n));
    element.addEventListener("pointerenter", () => {
      state.cursor.i = begin + n;
      redraw();
    });
    return element;
  });
  words = {begin, elements};
  text.replaceChildren(...elements.flatMap((element) => [element, " "]));
}

// Words in a line, and arcs from the row's own word to those it attends to; long texts show the part around the cursor.
function drawArcs(entries) {
  const canvas = document.getElementById("arcs"), {context, width, height} = prepared(canvas);
  const style = getComputedStyle(document.documentElement), named = data.keyTokens && data.queryTokens;
  const left = named ? 26 : 0;  // room for the first word
  const self = Math.min(data.keys - 1, state.cursor.i + Math.max(0, data.keys - data.queries));
  const most = named ? Math.max(8, Math.floor((width - left) / 34)) : data.keys;
  const begin = named ? Math.max(0, Math.min(self - Math.floor(most / 2), data.keys - most)) : 0;
  const end = Math.min(data.keys, begin + most), step = (width - left) / (end - begin), ground = height - (named ? 46 : 16);
  const x = (j) => left + (Math.min(end, Math.max(begin, j)) - begin) * step;
  context.strokeStyle = style.getPropertyValue("--line");
  context.beginPath();
  context.moveTo(0, ground);
  context.lineTo(width, ground);
  context.stroke();
  context.strokeStyle = style.getPropertyValue("--arc");
  for (const {begin: from, end: to, share} of entries) {
    const a = x(self + 0.5), b = x((from + to) / 2), middle = (a + b) / 2, rise = Math.min(ground - 6, 14 + Math.abs(a - b) * 0.45);
    context.lineWidth = 0.6 + 5 * share;
    context.globalAlpha = 0.25 + 0.75 * Math.min(1, share * 2);
    context.beginPath();
    context.moveTo(a, ground);
    context.quadraticCurveTo(middle, ground - 2 * rise, b, ground);
    context.stroke();
  }
  context.globalAlpha = 1;
  if (!named) return;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (let j = begin; j < end; j++) {
    context.save();
    context.translate(x(j + 0.5) + 3, ground + 8);
    context.rotate(-Math.PI / 4);
    context.fillStyle = style.getPropertyValue(j === self ? "--mark" : "--ink");
    context.fillText(clipped(context, shown(keyToken(j)), 54), 0, 0);
    context.restore();
  }
}

// Bars for a part of a profile: numbers over `size` places, of which [low, high) are seen.
function drawProfile(canvas, numbers, size, low, high, sideways, inset) {
  const {context, width, height} = prepared(canvas), highest = largest(numbers);
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
  if (!(highest > 0)) return;
  const length = (sideways ? height : width) - inset, bin = size / numbers.length;
  for (let n = Math.floor(low / bin); n < Math.min(numbers.length, Math.ceil(high / bin)); n++) {
    const from = ((n * bin - low) / (high - low)) * length, to = (((n + 1) * bin - low) / (high - low)) * length;
    const bar = (numbers[n] / highest) * ((sideways ? width : height) - 2);
    const thick = Math.max(0.6, to - from + (to - from < 3 ? 0.3 : -0.7));  // wide bars apart, narrow ones without seams
    if (sideways) context.fillRect(0, from, bar, thick);
    else context.fillRect(inset + from, height - bar, thick, bar);
  }
}

function drawProfiles() {
  const view = state.view;
  drawProfile(document.getElementById("key-profile"), headPart(arrays.received, state.head), data.keys, view.k0, view.k1, false, margins.left);
  drawProfile(document.getElementById("row-profile"), headPart(arrays.entropy, state.head), data.queries, view.r0, view.r1, true, margins.bottom);
}
