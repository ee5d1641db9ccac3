// ---- Colours ----

const stops = {
  light: [[255, 255, 255], [222, 235, 247], [158, 202, 225], [66, 146, 198], [8, 81, 156], [8, 35, 80]],
  dark: [[20, 23, 26], [48, 32, 84], [121, 40, 112], [201, 70, 82], [247, 151, 73], [252, 236, 170]],
};

function paletteOf(theme) {
  const table = new Uint32Array(256), chosen = stops[theme];
  for (let n = 0; n < 256; n++) {
    const place = (n / 255) * (chosen.length - 1), from = Math.min(Math.floor(place), chosen.length - 2);
    const mixed = [0, 1, 2].map((c) => Math.round(chosen[from][c] + (chosen[from + 1][c] - chosen[from][c]) * (place - from)));
    table[n] = (255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0];
  }
  return table;
}

// From a weight to 0..255, given the largest one.
function shadeOf(scale, highest) {
  if (!(highest > 0)) return () => 0;
  if (scale === "linear") return (p) => Math.min(255, Math.round((255 * p) / highest));
  return (p) => (p > 0 ? Math.max(0, Math.min(255, Math.round(255 * (1 + Math.log10(p / highest) / 4)))) : 0);
}

// An image with one pixel for each number.
function imageOf(numbers, columns, rows, palette, scale, highest) {
  const canvas = new OffscreenCanvas(Math.max(columns, 1), Math.max(rows, 1));
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer), shade = shadeOf(scale, highest);
  pixels.fill(palette[0]);
  for (let n = 0; n < numbers.length; n++) pixels[n] = palette[shade(numbers[n])];
  context.putImageData(image, 0, 0);
  return canvas;
}

function largest(numbers) {
  let highest = 0;
  for (const number of numbers) if (number > highest) highest = number;
  return highest;
}

// What the colours mean, beside the head's name.
function drawLegend() {
  const {context, width, height} = prepared(document.getElementById("legend")), tile = liveTile(state.head);
  const bar = 96, middle = height / 2, palette = paletteOf(state.theme), highest = tile ? tileHighest(tile) : highestOf(state.head);
  const style = getComputedStyle(document.documentElement), lowest = state.scale === "log" ? (highest / 1e4).toExponential(0) : "0";
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = style.getPropertyValue("--soft");
  context.textAlign = "right";
  context.fillText(lowest, width - bar - 56, middle);
  context.textAlign = "left";
  context.fillText(highest.toPrecision(3), width - 48, middle);
  const shades = imageOf(Float32Array.from({length: bar}, (_, n) => n / (bar - 1)), bar, 1, palette, "linear", 1);
  context.drawImage(shades, width - bar - 52, middle - 5, bar, 10);
  context.strokeStyle = style.getPropertyValue("--line");
  context.strokeRect(width - bar - 52.5, middle - 5.5, bar + 1, 11);
}
