// ---- The overview: every head as a small map; of a model, its layers one below the other ----

const overview = document.getElementById("overview"), caption = document.getElementById("caption");
const headButtons = [], layerRows = [], rowMaps = [];
const rowGap = 3;  // CSS pixels between heads in a row, as page.css has it
const inLayers = () => data.layers > 1 && state.sort === "order";

// A map, or in layers a row of them, has a canvas only while it is in sight: a browser's time for a frame grows with the
// square of their number.
const drawnMaps = new Map();
const inSight = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) {
    if (!isIntersecting) {
      drawnMaps.delete(target);
      target.replaceChildren();
    } else if (!drawnMaps.has(target)) {
      drawnMaps.set(target, target.appendChild(document.createElement("canvas")));
      drawMap(target);
    }
  }
}, {root: overview, rootMargin: "40px"});

function placeForMaps(heads) {
  const map = document.createElement("span");
  map.className = "map";
  map.heads = heads;
  return map;
}

let watched = null;
function watchMaps() {
  const targets = inLayers() ? rowMaps : headButtons.map(({map}) => map);
  if (watched === targets[0]) return;
  watched = targets[0];
  inSight.disconnect();
  for (const map of drawnMaps.keys()) map.replaceChildren();
  drawnMaps.clear();
  for (const map of targets) inSight.observe(map);
}

function makeOverview(choose) {
  data.heads.forEach((head, index) => {
    const button = document.createElement("button"), map = placeForMaps([index]);
    const name = document.createElement("span"), figure = document.createElement("span");
    button.type = "button";
    name.className = "name";
    figure.className = "figure";
    name.textContent = head.name;
    button.append(map, name, figure);
    button.addEventListener("click", () => choose(index));
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => describeHead(index));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => describeHead(state.head));
    headButtons.push({button, map, figure});
    (layerRows[head.layer] ??= []).push(index);
  });
  rowMaps.push(...layerRows.map(placeForMaps));
  overview.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1}[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const order = orderOfHeads(), place = (order.indexOf(state.head) + step + order.length) % order.length;
    choose(order[place]);
    headButtons[order[place]].button.focus();
    event.preventDefault();
    event.stopPropagation();
  });
  const widest = Math.max(...layerRows.map((row) => row.length));
  overview.style.setProperty("--heads", widest);
  document.body.classList.toggle("layered", data.layers > 1);
  caption.hidden = data.layers === 1;
}

function describeHead(index) {
  caption.textContent = `${data.heads[index].name}: ${figureOf(index)}`;
}

// The cosine between the maps of two heads, for all heads and the chosen one.
let similarities = {head: -1, values: []};
function similarity(index) {
  if (similarities.head !== state.head) {
    const maps = data.heads.map((_, head) => headPart(arrays.mean, head)), chosen = maps[state.head];
    const product = (a, b) => a.reduce((sum, number, n) => sum + number * b[n], 0), own = product(chosen, chosen);
    const values = maps.map((map) => product(map, chosen) / Math.sqrt(product(map, map) * own) || 0);
    similarities = {head: state.head, values};
  }
  return similarities.values[index];
}

function orderOfHeads() {
  const order = data.heads.map((_, index) => index);
  if (state.sort === "entropy") order.sort((a, b) => data.heads[a].entropy - data.heads[b].entropy);
  if (state.sort === "distance") order.sort((a, b) => data.heads[a].distance - data.heads[b].distance);
  if (state.sort === "similarity") order.sort((a, b) => similarity(b) - similarity(a));
  return order;
}

function figureOf(index) {
  const head = data.heads[index];
  if (state.sort === "distance") return `distance ${head.distance.toPrecision(3)}`;
  if (state.sort === "similarity") return `similarity ${similarity(index).toFixed(2)}`;
  return `entropy ${Math.max(0, head.entropy).toFixed(2)}`;
}

// One scale for all: a head whose weights are all small looks pale beside one with clear focus.
let look = null;
function drawOverview() {
  look = {palette: paletteOf(state.theme), range: rangeOf(arrays[state.value])};
  for (const map of drawnMaps.keys()) drawMap(map);
}

function drawMap(map) {
  const canvas = drawnMaps.get(map), density = devicePixelRatio || 1, {width, height} = map.getBoundingClientRect();
  const border = inLayers() ? 1 : 0;  // of the buttons that lie over a row
  const step = (width + rowGap) / map.heads.length, size = Math.max(1, Math.round((step - rowGap - 2 * border) * density));
  Object.assign(canvas, {width: Math.max(size, Math.round(width * density)), height: Math.max(size, Math.round(height * density))});
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = data.mapKeys > size;
  context.imageSmoothingQuality = "high";
  map.heads.forEach((head, n) => {
    const numbers = headPart(arrays[state.value], head);
    const image = imageOf(numbers, data.mapKeys, data.mapRows, look.palette, state.scale, look.range);
    context.drawImage(image, Math.round((n * step + border) * density), Math.round(border * density), size, size);
  });
}

function cornerText(text, className) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  element.setAttribute("aria-hidden", "true");
  return element;
}

// Scrolls the maps, and nothing else, to one of them.
function reveal(index) {
  const box = overview.getBoundingClientRect(), own = headButtons[index].button.getBoundingClientRect();
  const into = (low, high, begin, end) => (low < begin ? low - begin : high > end ? Math.min(high - end, low - begin) : 0);
  const left = box.left + (inLayers() ? 60 : 4), top = box.top + (inLayers() ? 20 : 4);  // below what stays in sight
  overview.scrollTop += into(own.top, own.bottom, top, box.bottom - 4);
  overview.scrollLeft += into(own.left, own.right, left, box.right - 4);
}

// Marks the head that is chosen.
function markHead(index, chosen) {
  const {button} = headButtons[index];
  button.setAttribute("aria-pressed", String(chosen));
  button.tabIndex = chosen ? 0 : -1;  // one stop for the Tab key; arrows go on from it
}

// Layers as rows and heads as columns, or one after the other as sorted.
function arrangeOverview() {
  overview.classList.toggle("in-layers", inLayers());
  const focused = document.activeElement;
  if (inLayers()) {
    const columns = Math.max(...layerRows.map((row) => row.length)), every = Math.ceil(columns / 16);
    const numbers = Array.from({length: columns}, (_, n) => cornerText(n % every ? "" : String(n), "column"));
    const at = (element, row, column) => Object.assign(element.style, {gridRow: row + 2, gridColumn: column}) && element;
    const rows = layerRows.flatMap((row, n) => [
      at(cornerText(data.heads[row[0]].name.split(",")[0], "layer"), n, 1),
      at(rowMaps[n], n, `2 / ${row.length + 2}`),
      ...row.map((index, head) => at(headButtons[index].button, n, head + 2)),
    ]);
    overview.replaceChildren(cornerText("head", "column"), ...numbers, ...rows);
  } else {
    overview.replaceChildren(...orderOfHeads().map((index) => headButtons[index].button));
    for (const {button} of headButtons) button.style.gridArea = "";
  }
  if (overview.contains(focused)) focused.focus({preventScroll: true});
  headButtons.forEach(({button, figure}, index) => {
    markHead(index, index === state.head);
    figure.textContent = figureOf(index);
    button.title = `${data.heads[index].name}, ${figureOf(index)}`;
    button.setAttribute("aria-label", button.title);
  });
  describeHead(state.head);
  watchMaps();
}
