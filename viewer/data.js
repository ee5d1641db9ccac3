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
  Object.assign(arrays, {mean, max, entropy, received, topKeys, topWeights, weights});
}

function headPart(array, head) {
  const size = array.length / data.heads.length;
  return array.subarray(head * size, (head + 1) * size);
}

// The weight of one cell: exact where the file or the server holds it, null elsewhere.
function exactWeight(head, i, j) {
  if (arrays.weights) return headPart(arrays.weights, head)[i * data.keys + j];
  const tile = liveTile(head);
  if (tile && tile.rowCell === 1 && tile.keyCell === 1 && i >= tile.r0 && i < tile.r1 && j >= tile.k0 && j < tile.k1) {
    return tile.max[(i - tile.r0) * tile.columns + (j - tile.k0)];
  }
  const found = topOf(head, i).find((entry) => entry.key === j);
  return found ? found.weight : null;
}

// The strongest keys of a row, as far as the file knows them.
function topOf(head, i) {
  const list = [];
  if (arrays.topKeys) {
    const keys = headPart(arrays.topKeys, head), weights = headPart(arrays.topWeights, head);
    for (let n = i * data.top; n < (i + 1) * data.top; n++) {
      if (keys[n] >= 0) list.push({key: keys[n], weight: weights[n]});
    }
  }
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

// Line breaks and the like, made visible.
const shown = (token) => token.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/^ +| +$/g, (s) => "\u2423".repeat(s.length));
