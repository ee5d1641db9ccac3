// ---- The row under the cursor: its strongest keys, the text, arcs ----

const percent = (p) => `${p >= 0.001 ? (100 * p).toFixed(p < 0.1 ? 2 : 1) : Number((100 * p).toPrecision(2))} %`;

const nameOfQuery = (i) => `query ${i}${data.queryTokens ? ` ${quoted(queryToken(i))}` : ""}`;
const nameOfKey = (j) => `key ${j}${data.keyTokens ? ` ${quoted(keyToken(j))}` : ""}`;

function describe(i, j) {
  const cell = cellAt(state.head, i, j), pair = `${nameOfQuery(i)} \u2192 ${nameOfKey(j)}`;
  if (cell.max === 0) return `${pair}: masked, or a weight of 0`;
  if (exactWeight(state.head, i, j) !== null) return `${pair}: weight ${cell.max.toPrecision(7)}`;
  if (cell.r1 - cell.r0 === 1 && cell.k1 - cell.k0 === 1) return `${pair}: weight ${cell.max.toPrecision(3)}, in three digits`;
  return `${pair}: cell of rows ${cell.r0}\u2013${cell.r1 - 1} and keys ${cell.k0}\u2013${cell.k1 - 1}, ` +
         `mean ${cell.mean.toPrecision(3)}, largest ${cell.max.toPrecision(3)}`;
}

// The strongest keys of a row as [begin, end) and their share: single keys, or where a file has none, cells.
function rowEntries(head, i) {
  const listed = topOf(head, i);
  if (listed.length) return listed.map(({key, weight}) => ({begin: key, end: key + 1, share: weight}));
  return topCellsOf(head, i);
}

const nameOfEntry = ({begin, end}) => (end - begin === 1 ? shown(keyToken(begin)) : `keys ${begin}\u2013${end - 1}`);

function drawRow() {
  const {i, j} = state.cursor, pin = document.getElementById("pin"), all = rowEntries(state.head, i);
  const entries = all.filter(({share}) => share >= all[0].share / 100);  // the others would be lines without a length
  document.getElementById("cursor").textContent = describe(i, j);
  pin.setAttribute("aria-pressed", String(state.pinned));
  pin.textContent = state.pinned ? "Pinned" : "Pin";
  pin.title = state.pinned ? "Let the row follow the pointer again (Esc)" : "Keep this row while the pointer moves (Enter, or a click)";
  document.getElementById("row-keys").replaceChildren(...entries.map((entry) => rowKey(entry, entries[0].share)));
  drawArcs(entries);
  drawText(entries);
}

function rowKey(entry, most) {
  const line = document.createElement("span"), name = document.createElement("bdi");
  const bar = document.createElement("i"), number = document.createElement("b");
  line.setAttribute("role", "listitem");
  name.textContent = nameOfEntry(entry);
  line.title = nameOfKey(entry.begin);
  bar.className = "share";
  bar.style.width = `${(100 * entry.share) / most}%`;
  number.className = "percent";
  number.style.fontWeight = "400";
  number.textContent = percent(entry.share);
  line.append(name, bar, number);
  line.addEventListener("click", () => select(state.cursor.i, entry.begin));
  return line;
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
  const own = words.elements[i - words.begin], inside = own.offsetTop - text.offsetTop - text.scrollTop;
  if (!text.matches(":hover") && (inside < 0 || inside > text.clientHeight - own.offsetHeight)) {
    text.scrollTop += inside - text.clientHeight / 2;
  }
}

function fillText(i) {
  const begin = Math.max(0, Math.min(i - mostWords / 2, data.keys - mostWords)), end = Math.min(data.keys, begin + mostWords);
  const elements = Array.from({length: end - begin}, (_, n) => {
    const element = document.createElement("bdi");
    element.textContent = shown(keyToken(begin + n));
    element.addEventListener("pointerenter", (event) => {
      if (state.pinned || event.pointerType === "touch") return;
      state.cursor.i = begin + n;
      redraw();
    });
    element.addEventListener("click", () => select(begin + n, state.cursor.j));
    return element;
  });
  words = {begin, elements};
  text.dir = elements.filter(({textContent}) => rightToLeft.test(textContent)).length > elements.length / 2 ? "rtl" : "ltr";
  text.replaceChildren(...elements.flatMap((element) => [element, " "]));
}

// ---- Arcs ----

// Queries that are words of another text (a translation, say) have no place among the keys.
const apart = Boolean(data.queryTokens && data.keyTokens) && data.queryTokens !== data.keyTokens &&
  data.queryTokens.some((token, i) => token !== data.keyTokens[i + data.offset]);

// The key's place at which a query stands, null where there is none.
function placeOf(i) {
  const place = i + data.offset;
  return apart || place < 0 || place >= data.keys ? null : place;
}

// The places that an arc drawing of the row shows, in order: all keys where there is room, else the ends of the arcs with
// as much around them as fits, and a gap wherever something is left out.
function arcPlaces(entries, self, room) {
  if (data.keys <= room && entries.every(({begin, end}) => end - begin === 1)) return Array.from({length: data.keys}, (_, n) => ({begin: n, end: n + 1}));
  const ends = entries.map(({begin, end}) => ({begin, end})), cells = ends.filter(({begin, end}) => end - begin > 1);
  const inCell = (key) => cells.some(({begin, end}) => key >= begin && key < end);  // which then stands for the key
  if (self !== null) ends.push({begin: self, end: self + 1});
  for (let around = 8; ; around--) {
    const wanted = ends.flatMap(({begin, end}) => (end - begin > 1 ? [{begin, end}] : Array.from(
      {length: 2 * around + 1}, (_, n) => ({begin: begin - around + n, end: begin - around + n + 1}))));
    const inside = wanted.filter(({begin, end}) => begin >= 0 && end <= data.keys && (end - begin > 1 || !inCell(begin))).sort((a, b) => a.begin - b.begin || a.end - b.end);
    const places = [];
    let reached = 0;
    for (const place of inside) {
      if (place.begin < reached) continue;
      if (place.begin > reached) places.push({gap: true, begin: reached, end: place.begin});
      places.push(place);
      reached = place.end;
    }
    if (reached < data.keys) places.push({gap: true, begin: reached, end: data.keys});
    if (places.length <= room || around === 0) return places;
  }
}

// From the row's own word to those it attends to: among them, or above them where it is of another text.
function drawArcs(entries) {
  const {context, width, height} = prepared(document.getElementById("arcs")), style = getComputedStyle(document.documentElement);
  const self = placeOf(state.cursor.i), ground = height - 52, left = 30;
  const places = arcPlaces(entries, self, Math.floor((width - left) / 26)), step = Math.min(64, (width - left - 10) / places.length);
  const x = (key) => left + (places.findIndex(({begin, end}) => key >= begin && key < end) + 0.5) * step;
  const colour = (name) => style.getPropertyValue(name);
  const above = {x: Math.min(x(0) + (places.length - 1) * step / 2, width / 2), y: 20};
  context.strokeStyle = colour("--line");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, ground + 0.5);
  context.lineTo(width, ground + 0.5);
  context.stroke();
  context.strokeStyle = context.fillStyle = colour("--arc");
  const farthest = self === null ? 1 : Math.max(1, ...entries.map(({begin}) => Math.abs(x(begin) - x(self))));
  for (const {begin, share} of [...entries].reverse()) {
    const a = self === null ? above.x : x(self), b = x(begin), rise = 16 + (ground - 26) * Math.sqrt(Math.abs(a - b) / farthest);
    const part = share / entries[0].share;  // the strongest arc is full
    context.lineWidth = 0.8 + 3.2 * part;
    context.globalAlpha = 0.25 + 0.75 * part;
    context.beginPath();
    if (self === null) {
      const middle = (above.y + ground) / 2;
      context.moveTo(a, above.y);
      context.bezierCurveTo(a, middle, b, middle, b, ground);
    } else if (a === b) {
      context.arc(a, ground - 8, 6, 0, 2 * Math.PI);
    } else {
      context.moveTo(a, ground);
      context.bezierCurveTo(a, ground - 1.3 * rise, b, ground - 1.3 * rise, b, ground);
    }
    context.stroke();
  }
  context.globalAlpha = 1;
  if (self === null) {
    context.font = "600 12px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = colour("--mark");
    context.fillText(clipped(context, data.queryTokens ? shown(queryToken(state.cursor.i)) : nameOfQuery(state.cursor.i), 160), above.x, 9);
  }
  drawArcNames(context, places, entries, self, ground, x, colour);
}

function drawArcNames(context, places, entries, self, ground, x, colour) {
  const ends = new Set(entries.map(({begin}) => begin));
  context.textBaseline = "middle";
  for (const place of places) {
    const {begin, end, gap} = place, own = self !== null && self >= begin && self < end, strong = own || ends.has(begin);
    context.save();
    context.translate(x(begin) + 3, ground + (gap ? 6 : 9));
    context.font = `${strong && !gap ? "600 " : ""}11px system-ui, sans-serif`;
    context.fillStyle = colour(gap ? "--soft" : own ? "--mark" : strong ? "--ink" : "--soft");
    context.textAlign = gap ? "center" : "right";
    if (!gap) context.rotate(-Math.PI / 4);
    context.fillText(gap ? "\u22ef" : clipped(context, nameOfEntry(place), 62), 0, 0);
    context.restore();
  }
}

// ---- Profiles along the sides ----

// Bars for a part of a profile: numbers for `bin` places each, of which [low, high) are seen.
function drawProfile(canvas, numbers, bin, low, high, sideways, begin, length) {
  const {context, width, height} = prepared(canvas), highest = Math.max(1e-3, largest(numbers));  // no bars of rounding errors
  const style = getComputedStyle(document.documentElement);
  context.strokeStyle = style.getPropertyValue("--line");
  context.beginPath();
  context.moveTo(sideways ? 0.5 : begin, sideways ? begin : height - 0.5);
  context.lineTo(sideways ? 0.5 : begin + length, sideways ? begin + length : height - 0.5);
  context.stroke();
  context.fillStyle = style.getPropertyValue("--mark");
  for (let n = Math.floor(low / bin); n < Math.min(numbers.length, Math.ceil(high / bin)); n++) {
    const from = Math.max(0, ((n * bin - low) / (high - low)) * length), to = Math.min(length, (((n + 1) * bin - low) / (high - low)) * length);
    const bar = (numbers[n] / highest) * ((sideways ? width : height) - 2);
    const thick = Math.max(0.6, to - from + (to - from < 3 ? 0.3 : -0.7));  // wide bars apart, narrow ones without seams
    if (sideways) context.fillRect(1, begin + from, bar, thick);
    else context.fillRect(begin + from, height - 1 - bar, thick, bar);
  }
}

function drawProfiles() {
  const {r0, r1, k0, k1} = state.view, {left, width, height} = sizes;
  drawProfile(document.getElementById("key-profile"), profileOf("received", state.head), data.keyBin, k0, k1, false, left, width);
  drawProfile(document.getElementById("row-profile"), profileOf("entropy", state.head), data.rowBin, r0, r1, true, 0, height);
}

// What a place of a profile stands for, in words.
function describeProfile(name, at) {
  const numbers = profileOf(name, state.head), bin = name === "received" ? data.keyBin : data.rowBin;
  const size = name === "received" ? data.keys : data.queries, begin = Math.floor(at / bin) * bin;
  const end = Math.min(begin + bin, size), number = numbers[Math.floor(at / bin)];
  const whose = end - begin === 1 ? (name === "received" ? nameOfKey : nameOfQuery)(begin)
    : `${name === "received" ? "keys" : "queries"} ${begin}\u2013${end - 1}, on average`;
  return name === "received" ? `${whose}: receives ${number.toPrecision(3)} of the ${data.queries} rows' weight`
    : `${whose}: entropy ${number.toPrecision(3)}; ${Math.log(data.keys).toPrecision(3)} would be all keys alike`;
}
