// ---- Mouse, touch and keys ----

// A row that is chosen stays while the pointer moves.
function select(i, j) {
  state.cursor = {i, j};
  state.pinned = true;
  redraw();
}

function release() {
  state.pinned = false;
  redraw();
}

const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.hidden = text === "";
  if (tip.hidden) return;
  tip.textContent = text;
  const {width, height} = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

function listenToWheel() {
  matrix.addEventListener("wheel", (event) => {
    const {row, key, inside} = placeAt(event);
    if (!inside || (isWhole() && event.deltaY > 0)) return;  // nothing further out: the page scrolls
    event.preventDefault();
    tip.hidden = true;  // what lies under the pointer changes
    zoomBy(Math.exp(event.deltaY * 0.0015), row, key);
    redraw();
  }, {passive: false});
  matrix.addEventListener("dblclick", (event) => {
    const {row, key} = placeAt(event);
    zoomBy(0.35, row, key);
    redraw();
  });
}

// One pointer points, clicks and drags, two pinch. A finger on the whole matrix scrolls the page: the browser then takes
// it away, which is a pointercancel.
function listenToPointers() {
  const down = new Map();
  let start = null, moved = false, apart = 0;
  const middle = () => {
    const [a, b] = [...down.values()];
    return {clientX: (a.clientX + b.clientX) / 2, clientY: (a.clientY + b.clientY) / 2};
  };
  const distance = () => {
    const [a, b] = [...down.values()];
    return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
  };
  matrix.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch") matrix.setPointerCapture(event.pointerId);
    down.set(event.pointerId, event);
    moved = down.size > 1;
    start = {...placeAt(event), x: event.clientX, y: event.clientY};
    if (down.size === 2) apart = distance();
  });
  matrix.addEventListener("pointermove", (event) => {
    const place = placeAt(event);
    if (down.has(event.pointerId)) down.set(event.pointerId, event);
    if (down.size === 2) {
      const {row, key} = placeAt(middle()), now = distance();
      zoomBy(apart / Math.max(1, now), row, key);
      apart = now;
    } else if (down.size === 1 && start) {
      moved ||= Math.hypot(event.clientX - start.x, event.clientY - start.y) > 5;
      if (moved && (event.pointerType !== "touch" || !isWhole())) moveBy(start.row - place.row, start.key - place.key);
    } else if (place.inside && event.pointerType !== "touch") {
      const i = Math.floor(place.row), j = Math.floor(place.key);
      if (state.pinned) showTip(event, describe(i, j));
      else state.cursor = {i, j};
    } else {
      showTip(event, "");
    }
    redraw();
  });
  const up = (event, chosen) => {
    const place = placeAt(event), only = down.size === 1;
    down.delete(event.pointerId);
    if (chosen && only && !moved && place.inside) choose(Math.floor(place.row), Math.floor(place.key));
    start = null;
  };
  matrix.addEventListener("pointerup", (event) => up(event, event.button === 0));
  matrix.addEventListener("pointercancel", (event) => up(event, false));
  matrix.addEventListener("pointerleave", (event) => showTip(event, ""));
}

// A click on the row that is pinned lets it go.
function choose(i, j) {
  const {cursor, pinned} = state;
  if (pinned && cursor.i === i && cursor.j === j) release();
  else select(i, j);
}

function listenToProfiles() {
  const listen = (id, describeAt, chosen) => {
    const canvas = document.getElementById(id);
    canvas.addEventListener("pointermove", (event) => showTip(event, describeAt(event)));
    canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
    canvas.addEventListener("click", chosen);
  };
  const key = (event) => Math.floor(placeAt(event).key), row = (event) => Math.floor(placeAt(event).row);
  const isKey = (j) => j >= 0 && j < data.keys, isRow = (i) => i >= 0 && i < data.queries;
  listen("key-profile", (event) => (isKey(key(event)) ? describeProfile("received", key(event)) : ""),
         (event) => isKey(key(event)) && select(state.cursor.i, key(event)));
  listen("row-profile", (event) => (isRow(row(event)) ? describeProfile("entropy", row(event)) : ""),
         (event) => isRow(row(event)) && select(row(event), state.cursor.j));
}

// Keys act wherever the focus is, unless a control there has a use for them.
function listenToKeys() {
  const steps = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  const zooms = {"+": 0.6, "=": 0.6, "-": 1 / 0.6};
  document.addEventListener("keydown", (event) => {
    const {target, key} = event, cursor = state.cursor;
    if (event.ctrlKey || event.metaKey || event.altKey || target instanceof HTMLSelectElement) return;
    if (key === "Enter" && target instanceof HTMLButtonElement) return;
    if (steps[key]) {
      const [rows, keys] = steps[key], cell = cellAt(state.head, cursor.i, cursor.j), size = event.shiftKey ? 10 : 1;
      cursor.i = Math.min(data.queries - 1, Math.max(0, cursor.i + rows * size * (cell.r1 - cell.r0)));
      cursor.j = Math.min(data.keys - 1, Math.max(0, cursor.j + keys * size * (cell.k1 - cell.k0)));
      followCursor();
    } else if (zooms[key]) {
      zoomBy(zooms[key], cursor.i + 0.5, cursor.j + 0.5);
    } else if (key === "0") {
      showAll();
    } else if (key === "Enter") {
      state.pinned = !state.pinned;
    } else if (key === "Escape") {
      state.pinned = false;
    } else if (key === "[" || key === "]") {
      const order = orderOfHeads(), at = order.indexOf(state.head) + (key === "]" ? 1 : -1);
      chooseHead(order[(at + order.length) % order.length]);
    } else {
      return;
    }
    event.preventDefault();
    tip.hidden = true;
    redraw();
  });
}
