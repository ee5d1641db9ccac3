// ---- Where the page opens: on a head and a row with something to see ----

// Clear focus, and on something that the words decide: not on the first key, not on one key that every row attends to, and
// not at one distance (each word's own place, the word before) whatever the words are.
function focusOf(index) {
  const head = data.heads[index], received = profileOf("received", index);
  const sum = received.reduce((total, share) => total + share, 0) || 1, most = Math.log(data.keys) || 1;
  const bins = received.length, everywhere = bins > 1 ? (largest(received) / sum - 1 / bins) / (1 - 1 / bins) : 0;
  return Math.max(0, 1 - head.entropy / most) * (1 - head.first) * (1 - everywhere) * (1 - atOneDistance(index)) ** 2;
}

// The largest share of a head's weight that lies at one distance between query and key, as finely as the map has it.
function atOneDistance(index) {
  const {mapRows, mapKeys} = data, shares = new Float32Array(mapRows + mapKeys), weights = headPart(arrays.mean, index);
  let sum = 0;
  weights.forEach((p, n) => {
    shares[mapRows + (n % mapKeys) - Math.floor(n / mapKeys)] += p;
    sum += p;
  });
  return sum > 0 ? largest(shares) / sum : 1;
}

function openingHead() {
  let best = {index: 0, focus: -1};
  data.heads.forEach((_, index) => {
    const focus = focusOf(index);
    if (focus > best.focus) best = {index, focus};
  });
  return best.index;
}

// How many keys a row has weights for, as finely as the map has it.
function keysSeen(head, i) {
  const begin = Math.floor(i / data.rowCell) * data.mapKeys;
  return data.keyCell * headPart(arrays.mean, head).subarray(begin, begin + data.mapKeys).reduce((count, p) => count + (p > 0), 0);
}

// The row of a head whose strongest key is clearest among the many that it sees, of keys that are neither the first, nor the
// row's own place, nor one that a third of all weight goes to; without such a row, the last one.
function openingCursor(head) {
  const received = profileOf("received", head), third = received.reduce((total, share) => total + share, 0) / 3;
  const {offset} = data, step = Math.max(1, Math.floor(data.queries / 2000));
  const keysOf = (i) => rowEntries(head, i);
  let best = null;
  for (let i = 0; i < data.queries; i += step) {
    const entries = keysOf(i), strongest = entries[0];
    if (!strongest || strongest.begin === 0 || received[Math.floor(strongest.begin / data.keyBin)] > third) continue;
    if (i + offset >= strongest.begin && i + offset < strongest.end) continue;
    const clear = strongest.share * Math.log(1 + keysSeen(head, i));
    if (!best || clear > best.clear) best = {i, j: strongest.begin, clear};
  }
  const last = data.queries - 1;
  return best ?? {i: last, j: keysOf(last)[0]?.begin ?? Math.max(0, Math.min(last + offset, data.keys - 1))};
}

function chooseOpening() {
  state.head = openingHead();
  const {i, j} = openingCursor(state.head);
  state.cursor = {i, j};
}
