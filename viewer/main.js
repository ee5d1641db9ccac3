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
    drawNote();
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
  on("pin", () => { state.pinned = !state.pinned; redraw(); });
  on("copy-link", async () => {
    history.replaceState(null, "", linkText());
    await navigator.clipboard?.writeText(location.href).catch(() => {});
  });
  document.getElementById("copy-link").hidden = !hasAddress;
  document.getElementById("value-label").hidden = single && !data.live;  // of one weight, mean and largest are one
}

// What the numbers are.
function exactness() {
  if (arrays.weights) return "Every weight is exact.";
  if (data.live) return "Every zoom level is computed from the queries and keys, and exact.";
  const cells = single ? "Every weight, in three digits"
    : `Cells of ${data.rowCell} x ${data.keyCell} weights, with their means and maxima in three digits`;
  return `${cells}${data.top ? "; the strongest keys of each row are exact" : ""}.`;
}

const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

async function start() {
  document.title = data.title;
  document.getElementById("title").textContent = data.title;
  const heads = counted(data.heads.length, "head"), keys = counted(data.keys, "key");
  const queries = data.queries === 1 ? "1 query" : `${data.queries} queries`;
  document.getElementById("subtitle").textContent =
    `${data.layers > 1 ? `${data.layers} layers, ` : ""}${heads}, ${queries}, ${keys}${data.options ? `; ${data.options}` : ""}`;
  await loadArrays();
  document.getElementById("exactness").textContent = exactness();
  chooseOpening();
  readLink();
  applyTheme();
  makeOverview(chooseHead);
  arrangeOverview();
  layOut();
  drawOverview();
  listenToControls();
  listenToWheel();
  listenToPointers();
  listenToProfiles();
  listenToKeys();
  addEventListener("resize", () => { layOut(); drawOverview(); redraw(); });
  addEventListener("hashchange", () => { readLink(); applyTheme(); chooseHead(state.head); });
  chooseHead(state.head);
  headButtons[state.head].button.scrollIntoView({block: "nearest"});
  requestAnimationFrame(() => { document.documentElement.dataset.ready = "true"; });  // behind the first drawing
}

start();
