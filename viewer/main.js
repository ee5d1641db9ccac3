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
  markHead(state.head, false);
  state.head = index;
  markHead(index, true);
  document.getElementById("head-name").textContent = data.heads[index].name;
  if (state.sort === "similarity") arrangeOverview();  // their order depends on the chosen one
  else describeHead(index);
  reveal(index);
  redraw();
}

function applyTheme() {
  document.documentElement.dataset.theme = state.theme;
  document.getElementById("theme").textContent = state.theme === "dark" ? "Light" : "Dark";
}

const choices = ["sort", "value", "scale"];
function showChoices() {
  for (const name of choices) document.getElementById(name).value = state[name];
}

function listenToControls() {
  showChoices();
  for (const name of choices) {
    const select = document.getElementById(name);
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
    const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
    const button = document.getElementById("copy-link");
    button.textContent = copied ? "Copied" : "In the address";
    setTimeout(() => { button.textContent = "Link"; }, 1500);
  });
  document.getElementById("copy-link").hidden = !hasAddress;
  document.getElementById("sort-label").hidden = data.heads.length === 1;
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
  addEventListener("hashchange", () => {
    readLink();
    applyTheme();
    showChoices();
    arrangeOverview();
    drawOverview();
    chooseHead(state.head);
  });
  chooseHead(state.head);
  requestAnimationFrame(() => { document.documentElement.dataset.ready = "true"; });  // behind the first drawing
}

start();
