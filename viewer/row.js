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

// Arcs from the row's own word to those it attends to: over the words between them, or, where these are too many, over
// the whole text with the names of the arcs' ends.
function drawArcs(entries) {
  const {context, width, height} = prepared(document.getElementById("arcs")), style = getComputedStyle(document.documentElement);
  const self = Math.min(data.keys - 1, state.cursor.i + Math.max(0, data.keys - data.queries)), left = 26, ground = height - 46;
  const most = Math.max(8, Math.floor((width - left) / 27)), low = Math.min(self, ...entries.map((entry) => entry.begin));
  const high = Math.max(self + 1, ...entries.map((entry) => entry.end)), near = high - low <= most;
  const begin = near ? Math.max(0, Math.min(Math.floor((low + high - most) / 2), data.keys - most)) : 0;
  const end = near ? Math.min(data.keys, begin + most) : data.keys, step = (width - left - 8) / (end - begin);
  const x = (j) => left + (j - begin) * step;
  context.strokeStyle = style.getPropertyValue("--line");
  context.beginPath();
  context.moveTo(0, ground);
  context.lineTo(width, ground);
  context.stroke();
  context.strokeStyle = style.getPropertyValue("--arc");
  for (const {begin: from, end: to, share} of entries) {
    const a = x(self + 0.5), b = x((from + to) / 2), rise = Math.min(ground - 6, 14 + Math.abs(a - b) * 0.45);
    const part = share / entries[0].share;  // the strongest arc is full
    context.lineWidth = 0.7 + 3 * part;
    context.globalAlpha = 0.25 + 0.75 * part;
    context.beginPath();
    context.moveTo(a, ground);
    context.quadraticCurveTo((a + b) / 2, ground - 2 * rise, b, ground);
    context.stroke();
  }
  context.globalAlpha = 1;
  const label = (place, text, colour) => {
    context.save();
    context.translate(place + 3, ground + 8);
    context.rotate(-Math.PI / 4);
    context.fillStyle = style.getPropertyValue(colour);
    context.fillText(clipped(context, text, 58), 0, 0);
    context.restore();
  };
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  const taken = [x(self + 0.5)];  // names stand apart
  label(taken[0], shown(keyToken(self)), "--mark");
  const others = near ? Array.from({length: end - begin}, (_, n) => ({place: x(begin + n + 0.5), text: shown(keyToken(begin + n))}))
    : entries.map((entry) => ({place: x((entry.begin + entry.end) / 2), text: entry.end - entry.begin === 1 ? entry.name : String(entry.begin)}));
  for (const {place, text} of others) {
    if (taken.some((other) => Math.abs(other - place) < 13)) continue;
    taken.push(place);
    label(place, text, "--ink");
  }
}

// Bars for a part of a profile: numbers over `size` places, of which [low, high) are seen.
function drawProfile(canvas, numbers, size, low, high, sideways, inset) {
  const {context, width, height} = prepared(canvas), highest = largest(numbers);
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
  if (!(highest > 0)) return;
  const length = (sideways ? height : width) - inset, bin = size / numbers.length;
  for (let n = Math.floor(low / bin); n < Math.min(numbers.length, Math.ceil(high / bin)); n++) {
    const from = Math.max(0, ((n * bin - low) / (high - low)) * length), to = (((n + 1) * bin - low) / (high - low)) * length;
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
