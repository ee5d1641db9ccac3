// ---- The overview: every head as a small map; of a model, its layers one below the other ----

const overview = document.getElementById("overview"), caption = document.getElementById("caption");
const headButtons = [], layerRows = [];
const inLayers = () => data.layers > 1 && state.sort === "order";

function makeOverview(choose) {
  data.heads.forEach((head, index) => {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    const name = document.createElement("span"), figure = document.createElement("span");
    button.type = "button";
    name.className = "name";
    figure.className = "figure";
    name.textContent = head.name;
    button.append(canvas, name, figure);
    button.addEventListener("click", () => choose(index));
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => describeHead(index));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => describeHead(state.head));
    headButtons.push({button, canvas, figure});
    (layerRows[head.layer] ??= []).push(index);
  });
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
let likenesses = {head: -1, values: []};
function likeness(index) {
  if (likenesses.head !== state.head) {
    const maps = data.heads.map((_, head) => headPart(arrays.mean, head)), chosen = maps[state.head];
    const product = (a, b) => a.reduce((sum, number, n) => sum + number * b[n], 0), own = product(chosen, chosen);
    const values = maps.map((map) => product(map, chosen) / Math.sqrt(product(map, map) * own) || 0);
    likenesses = {head: state.head, values};
  }
  return likenesses.values[index];
}

function orderOfHeads() {
  const order = data.heads.map((_, index) => index);
  if (state.sort === "entropy") order.sort((a, b) => data.heads[a].entropy - data.heads[b].entropy);
  if (state.sort === "distance") order.sort((a, b) => data.heads[a].distance - data.heads[b].distance);
  if (state.sort === "similarity") order.sort((a, b) => likeness(b) - likeness(a));
  return order;
}

function figureOf(index) {
  const head = data.heads[index];
  if (state.sort === "distance") return `distance ${head.distance.toPrecision(3)}`;
  if (state.sort === "similarity") return `likeness ${likeness(index).toFixed(2)}`;
  return `entropy ${head.entropy.toFixed(2)}`;
}

// One scale for all: a head whose weights are all small looks pale beside one with clear focus.
function drawOverview() {
  const palette = paletteOf(state.theme), highest = largest(arrays[state.value]);
  headButtons.forEach(({canvas}, index) => {
    const numbers = headPart(arrays[state.value], index);
    const image = imageOf(numbers, data.mapKeys, data.mapRows, palette, state.scale, highest);
    const size = Math.max(16, Math.round((canvas.clientWidth || 84) * (devicePixelRatio || 1)));
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = data.mapKeys > size;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, size, size);
  });
}

function cornerText(text, className) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  element.setAttribute("aria-hidden", "true");
  return element;
}

// Layers as rows and heads as columns, or one after the other as sorted.
function arrangeOverview() {
  overview.classList.toggle("in-layers", inLayers());
  const focused = document.activeElement;
  if (inLayers()) {
    const columns = Math.max(...layerRows.map((row) => row.length)), every = Math.ceil(columns / 16);
    const numbers = Array.from({length: columns}, (_, n) => cornerText(n % every ? "" : String(n), "column"));
    const rows = layerRows.flatMap((row) => {
      const line = [cornerText(data.heads[row[0]].name.split(",")[0], "layer"), ...row.map((index) => headButtons[index].button)];
      while (line.length <= columns) line.push(cornerText("", "column"));
      return line;
    });
    overview.replaceChildren(cornerText("head", "column"), ...numbers, ...rows);
  } else {
    overview.replaceChildren(...orderOfHeads().map((index) => headButtons[index].button));
  }
  if (overview.contains(focused)) focused.focus({preventScroll: true});
  headButtons.forEach(({button, figure}, index) => {
    button.setAttribute("aria-pressed", String(index === state.head));
    button.tabIndex = index === state.head ? 0 : -1;  // one stop for the Tab key; arrows go on from it
    figure.textContent = figureOf(index);
    button.title = `${data.heads[index].name}, ${figureOf(index)}`;
    button.setAttribute("aria-label", button.title);
  });
  describeHead(state.head);
}
