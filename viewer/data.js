// ---- The data: what the file holds, unpacked ----

const data = JSON.parse(document.getElementById("data").textContent);

async function unpack(name, Kind) {
  const text = data.blobs[name];
  if (text === undefined) return null;
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Kind(await new Response(stream).arrayBuffer());
}

// The upper halves of 32-bit floats: three digits, which is what a colour or a mean needs.
async function unpackShort(name) {
  const halves = await unpack(name, Uint16Array);
  if (halves === null) return null;
  const bits = new Uint32Array(halves.length);
  for (let n = 0; n < halves.length; n++) bits[n] = halves[n] << 16;
  return new Float32Array(bits.buffer);
}

const arrays = {};
async function loadArrays() {
  const [mean, max, entropy, received, topKeys, topWeights, weights] = await Promise.all([
    unpackShort("mapMean"), unpackShort("mapMax"), unpackShort("entropy"), unpackShort("received"),
    unpack("topKeys", Int32Array), unpack("topWeights", Float32Array), unpack("weights", Float32Array)]);
  // Where every weight is here, it is its own mean and maximum; of single weights in three digits, too.
  Object.assign(arrays, {mean: weights ?? mean, max: weights ?? max ?? mean, entropy, received, topKeys, topWeights, weights});
}

function headPart(array, head) {
  const size = array.length / data.heads.length;
  return array.subarray(head * size, (head + 1) * size);
}

// What each key receives and the entropy of each row, in bins. Where every weight is here, both come from them.
const profiles = new Map();
function profileOf(name, head) {
  if (!arrays.weights) return headPart(arrays[name], head);
  if (!profiles.has(head)) {
    const weights = headPart(arrays.weights, head), received = new Float32Array(data.keys), entropy = new Float32Array(data.queries);
    weights.forEach((p, n) => {
      received[n % data.keys] += p;
      if (p > 0) entropy[Math.floor(n / data.keys)] -= p * Math.log(p);
    });
    profiles.set(head, {received, entropy});
  }
  return profiles.get(head)[name];
}

// The weight of one cell: exact where the file or the server holds it, null elsewhere.
function exactWeight(head, i, j) {
  if (arrays.weights) return headPart(arrays.weights, head)[i * data.keys + j];
  const cell = liveCell(head, i, j);
  if (cell && cell.r1 - cell.r0 === 1 && cell.k1 - cell.k0 === 1) return cell.max;
  const found = topOf(head, i).find((entry) => entry.key === j);
  return found ? found.weight : null;
}

// The strongest keys of a row, as far as they are known.
function topOf(head, i) {
  if (arrays.weights) return strongest(headPart(arrays.weights, head).subarray(i * data.keys, (i + 1) * data.keys));
  const asked = liveRow(head, i);
  if (asked) return asked;
  const list = [];
  if (arrays.topKeys) {
    const keys = headPart(arrays.topKeys, head), weights = headPart(arrays.topWeights, head);
    for (let n = i * data.top; n < (i + 1) * data.top; n++) {
      if (keys[n] >= 0) list.push({key: keys[n], weight: weights[n]});
    }
  }
  return list;
}

function strongest(weights) {
  const list = [];
  weights.forEach((weight, key) => {
    if (!(weight > 0) || (list.length === 8 && weight <= list[7].weight)) return;
    const place = list.findIndex((entry) => entry.weight < weight);
    list.splice(place < 0 ? list.length : place, 0, {key, weight});
    list.length = Math.min(list.length, 8);
  });
  return list;
}

// Where there is no list for each row: the strongest cells of the row's line in the map.
function topCellsOf(head, i) {
  const line = Math.floor(i / data.rowCell), mean = headPart(arrays.mean, head);
  const cells = [];
  for (let c = 0; c < data.mapKeys; c++) {
    const begin = c * data.keyCell, end = Math.min(begin + data.keyCell, data.keys);
    cells.push({begin, end, share: mean[line * data.mapKeys + c] * (end - begin)});
  }
  return cells.sort((a, b) => b.share - a.share).slice(0, 8).filter((cell) => cell.share > 0);
}

// The finest cell that is known around a weight.
function cellAt(head, i, j) {
  if (exactWeight(head, i, j) !== null) {
    const weight = exactWeight(head, i, j);
    return {mean: weight, max: weight, r0: i, r1: i + 1, k0: j, k1: j + 1};
  }
  return liveCell(head, i, j) ?? mapCell(head, i, j);
}

function mapCell(head, i, j) {
  const line = Math.floor(i / data.rowCell), column = Math.floor(j / data.keyCell);
  const at = line * data.mapKeys + column;
  return {mean: headPart(arrays.mean, head)[at], max: headPart(arrays.max, head)[at],
          r0: line * data.rowCell, r1: Math.min((line + 1) * data.rowCell, data.queries),
          k0: column * data.keyCell, k1: Math.min((column + 1) * data.keyCell, data.keys)};
}

if (data.queryTokens === "same") data.queryTokens = data.keyTokens;
const keyToken = (j) => (data.keyTokens ? data.keyTokens[j] : String(j));
const queryToken = (i) => (data.queryTokens ? data.queryTokens[i] : String(i));
