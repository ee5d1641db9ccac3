// ---- Exact parts from the server, where there is one ----

const live = {tile: null, rows: new Map()};

function liveTile(head) {
  return live.tile && live.tile.head === head ? live.tile : null;
}

function liveCell(head, i, j) {
  const tile = liveTile(head);
  if (!tile) return null;
  const r = Math.floor((i - tile.r0) / tile.rowCell), c = Math.floor((j - tile.k0) / tile.keyCell);
  if (r < 0 || c < 0 || r >= tile.rows || c >= tile.columns) return null;
  const r0 = tile.r0 + r * tile.rowCell, k0 = tile.k0 + c * tile.keyCell, at = r * tile.columns + c;
  return {mean: tile.mean[at], max: tile.max[at], r0, r1: Math.min(r0 + tile.rowCell, data.queries),
          k0, k1: Math.min(k0 + tile.keyCell, data.keys)};
}

const liveRow = (head, i) => live.rows.get(`head=${head}&i=${i}`) ?? null;

const banner = document.getElementById("banner");
function tell(text) {
  banner.hidden = text === "";
  if (banner.textContent !== text) banner.textContent = text;
}

// Asks for what is wanted now, one question at a time: what was wanted meanwhile and no longer is, is never asked. A
// question without an answer is asked again when the page next wants something.
function asker(path, take) {
  let asked = "", wanted = "", busy = false;
  async function ask() {
    try {
      while (wanted !== asked) {
        asked = wanted;
        const answer = await fetch(`${path}?${asked}`);
        if (answer.status !== 200) throw new Error(await answer.text());
        take(asked, await answer.arrayBuffer());
        tell("");
      }
    } catch {
      asked = "";
      tell("The server of this page does not answer: it has stopped, or the connection is gone. What is here stays; " +
           "finer parts come back with the server.");
    } finally {
      busy = false;
    }
  }
  return (query) => {
    wanted = query;
    if (!busy && wanted !== asked) {
      busy = true;
      setTimeout(ask, 15);
    }
  };
}

const askTile = asker("tile", (query, bytes) => {
  const [r0, k0, rowCell, keyCell, rows, columns] = new Int32Array(bytes, 0, 6), count = rows * columns;
  live.tile = {head: Number(new URLSearchParams(query).get("head")), r0, k0, rowCell, keyCell, rows, columns,
               mean: new Float32Array(bytes, 24, count), max: new Float32Array(bytes, 24 + 4 * count, count), images: {}};
  redraw();
});

const askRow = asker("row", (query, bytes) => {
  const count = bytes.byteLength / 8, keys = new Int32Array(bytes, 0, count), weights = new Float32Array(bytes, 4 * count, count);
  if (live.rows.size > 1000) live.rows.clear();
  live.rows.set(query, Array.from(keys, (key, n) => ({key, weight: weights[n]})));
  redraw();
});

// The part that the view shows, and the row under the cursor.
function askForView() {
  if (!data.live || arrays.weights) return;
  const {r0, r1, k0, k1} = state.view;
  const part = {head: state.head, r0: Math.floor(r0), r1: Math.min(Math.ceil(r1), data.queries),
                k0: Math.floor(k0), k1: Math.min(Math.ceil(k1), data.keys)};
  askTile(new URLSearchParams(part).toString());
  if (!liveRow(state.head, state.cursor.i)) askRow(`head=${state.head}&i=${state.cursor.i}`);
}
