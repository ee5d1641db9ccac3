// ---- Exact parts from the server, where there is one ----

const live = {tile: null, wanted: "", timer: 0};

function liveTile(head) {
  return live.tile && live.tile.head === head ? live.tile : null;
}

// Asks for the part that the view shows, in cells as fine as the screen can show.
function askForTile(redraw) {
  if (!data.live) return;
  const {r0, r1, k0, k1} = state.view;
  const part = {head: state.head, r0: Math.floor(r0), r1: Math.min(Math.ceil(r1), data.queries),
                k0: Math.floor(k0), k1: Math.min(Math.ceil(k1), data.keys)};
  part.rc = Math.max(1, Math.ceil((part.r1 - part.r0) / 512));
  part.kc = Math.max(1, Math.ceil((part.k1 - part.k0) / 512));
  const query = new URLSearchParams(part).toString();
  if (query === live.wanted) return;
  live.wanted = query;
  clearTimeout(live.timer);
  live.timer = setTimeout(async () => {
    const answer = await fetch(`${data.live}/tile?${query}`);
    if (answer.status !== 200 || live.wanted !== query) return;  // 204: too large a part, the map has to do
    const numbers = new Float32Array(await answer.arrayBuffer()), half = numbers.length / 2;
    if (live.wanted !== query) return;
    live.tile = {head: part.head, r0: part.r0, r1: part.r1, k0: part.k0, k1: part.k1, rowCell: part.rc, keyCell: part.kc,
                 rows: Math.ceil((part.r1 - part.r0) / part.rc), columns: Math.ceil((part.k1 - part.k0) / part.kc),
                 mean: numbers.subarray(0, half), max: numbers.subarray(half), images: {}};
    redraw();
  }, 40);
}
