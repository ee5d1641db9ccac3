// ---- Everything together ----

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawMatrix();
    drawLegend();
    drawProfiles();
    drawRow();
    rememberLink();
    askForView();
  });
}

function chooseHead(index) {
  state.head = index;
  document.getElementById("head-name").textContent = data.heads[index].name;
  arrangeOverview();
  redraw();
}

function applyTheme() {
  document.documentElement.dataset.theme = state.theme;
  document.getElementById("theme").textContent = state.theme === "dark" ? "Light" : "Dark";
}

function listenToControls() {
  for (const name of ["sort", "value", "scale"]) {
    const select = document.getElementById(name);
    select.value = state[name];
    select.addEventListener("change", () => {
      state[name] = select.value;
      arrangeOverview();
      drawOverview();
      redraw();
    });
  }
  const on = (id, action) => document.getElementById(id).addEventListener("click", action);
  on("theme", () => {
    state.theme = state.theme === "dark" ? "light" : "dark";
    applyTheme();
    drawOverview();
    redraw();
  });
  const middle = () => [(state.view.r0 + state.view.r1) / 2, (state.view.k0 + state.view.k1) / 2];
  on("zoom-in", () => { zoomBy(0.5, ...middle()); redraw(); });
  on("zoom-out", () => { zoomBy(2, ...middle()); redraw(); });
  on("zoom-all", () => { showAll(); redraw(); });
  on("copy-link", async () => {
    history.replaceState(null, "", linkText());
    await navigator.clipboard?.writeText(location.href).catch(() => {});
  });
}

function listenToMouse() {
  let drag = null;
  matrix.addEventListener("wheel", (event) => {
    event.preventDefault();
    const {row, key} = placeAt(event);
    zoomBy(Math.exp(event.deltaY * 0.0015), row, key);
    redraw();
  }, {passive: false});
  matrix.addEventListener("pointerdown", (event) => {
    matrix.setPointerCapture(event.pointerId);
    drag = placeAt(event);
  });
  matrix.addEventListener("pointermove", (event) => {
    const place = placeAt(event);
    if (drag && event.buttons) {
      moveBy(drag.row - place.row, drag.key - place.key);
    } else if (place.inside) {
      state.cursor = {i: Math.floor(place.row), j: Math.floor(place.key)};
    }
    redraw();
  });
  matrix.addEventListener("pointerup", () => { drag = null; });
  matrix.addEventListener("dblclick", (event) => {
    const {row, key} = placeAt(event);
    zoomBy(0.35, row, key);
    redraw();
  });
}

function listenToKeys() {
  const steps = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  matrix.addEventListener("keydown", (event) => {
    const cursor = state.cursor, size = event.shiftKey ? 10 : 1, zoom = {"+": 0.6, "=": 0.6, "-": 1 / 0.6}[event.key];
    if (steps[event.key]) {
      const [rows, keys] = steps[event.key], cell = cellAt(state.head, cursor.i, cursor.j);
      cursor.i = Math.min(data.queries - 1, Math.max(0, cursor.i + rows * size * (cell.r1 - cell.r0)));
      cursor.j = Math.min(data.keys - 1, Math.max(0, cursor.j + keys * size * (cell.k1 - cell.k0)));
      followCursor();
    } else if (zoom) {
      zoomBy(zoom, cursor.i + 0.5, cursor.j + 0.5);
    } else if (event.key === "0") {
      showAll();
    } else {
      return;
    }
    event.preventDefault();
    redraw();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target instanceof HTMLSelectElement || (event.key !== "[" && event.key !== "]")) return;
    const order = orderOfHeads(), at = order.indexOf(state.head) + (event.key === "]" ? 1 : -1);
    chooseHead(order[(at + order.length) % order.length]);
  });
}

// What the numbers are.
function exactness() {
  if (arrays.weights) return "Every weight is exact.";
  if (data.live) return "Every zoom level is computed from the queries and keys, and exact.";
  const cells = data.rowCell === 1 && data.keyCell === 1 ? "Every weight, in three digits"
    : `Cells of ${data.rowCell} x ${data.keyCell} weights, with their means and maxima in three digits`;
  return `${cells}${data.top ? "; the strongest keys of each row are exact" : ""}.`;
}

async function start() {
  document.title = data.title;
  document.getElementById("title").textContent = data.title;
  const heads = data.layers > 1 ? `${data.layers} layers, ${data.heads.length} heads` : `${data.heads.length} heads`;
  document.getElementById("subtitle").textContent =
    `${heads}, ${data.queries} queries, ${data.keys} keys${data.options ? `; ${data.options}` : ""}`;
  await loadArrays();
  document.getElementById("exactness").textContent = exactness();
  readLink();
  applyTheme();
  if (data.layers === 1) document.getElementById("detail").append(text);  // beside one layer's heads it has no room
  makeOverview(chooseHead);
  arrangeOverview();
  drawOverview();
  listenToControls();
  listenToMouse();
  listenToKeys();
  addEventListener("resize", () => { drawOverview(); redraw(); });
  addEventListener("hashchange", () => { readLink(); applyTheme(); chooseHead(state.head); });
  chooseHead(state.head);
  document.documentElement.dataset.ready = "true";
}

start();
