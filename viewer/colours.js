// ---- Colours ----

const stops = {
  light: [[255, 255, 255], [222, 235, 247], [158, 202, 225], [66, 146, 198], [8, 81, 156], [8, 35, 80]],
  dark: [[20, 23, 26], [48, 32, 84], [121, 40, 112], [201, 70, 82], [247, 151, 73], [252, 236, 170]],
};
// Where there is no weight at all, as masks leave it: no shade of the others.
const maskedColour = {light: [228, 230, 226], dark: [44, 52, 50]};

const packedColour = ([red, green, blue]) => (255 << 24) | (blue << 16) | (green << 8) | red;

function paletteOf(theme) {
  const table = new Uint32Array(257), chosen = stops[theme];
  for (let n = 0; n < 256; n++) {
    const place = (n / 255) * (chosen.length - 1), from = Math.min(Math.floor(place), chosen.length - 2);
    table[n] = packedColour([0, 1, 2].map((c) => Math.round(chosen[from][c] + (chosen[from + 1][c] - chosen[from][c]) * (place - from))));
  }
  table[256] = packedColour(maskedColour[theme]);
  return table;
}

// The ink in which text on each shade is read best: the one of the two with more contrast to it.
const inks = {};
function inkOf(theme, shade) {
  inks[theme] ??= Array.from(paletteOf(theme), (colour) => {
    const light = [0, 8, 16].map((bits) => ((colour >> bits) & 255) / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    const luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
    return luminance > 0.179 ? "#000000" : "#ffffff";  // where both have a contrast of 4.6
  });
  return inks[theme][shade];
}

// The weights that the palest and the strongest logarithmic colour stand for: the smallest and the largest, one power of
// ten apart at least, so that rounding errors are no pattern, and four at most.
const logRange = ({lowest, highest}) => [Math.min(Math.max(lowest, highest / 1e4), highest / 10), highest];

// From a weight to 0..255, given the range of all of them; 256 for a weight of 0.
function shadeOf(scale, range) {
  const [low, high] = scale === "linear" ? [0, range.highest] : logRange(range), span = Math.log(high / low);
  if (!(high > 0)) return () => 256;
  const part = scale === "linear" ? (p) => p / high : (p) => Math.log(p / low) / span;
  return (p) => (p > 0 ? Math.max(0, Math.min(255, Math.round(255 * part(p)))) : 256);
}

// An image with one pixel for each number.
function imageOf(numbers, columns, rows, palette, scale, range) {
  const canvas = new OffscreenCanvas(Math.max(columns, 1), Math.max(rows, 1));
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer), shade = shadeOf(scale, range);
  pixels.fill(palette[256]);
  for (let n = 0; n < numbers.length; n++) pixels[n] = palette[shade(numbers[n])];
  context.putImageData(image, 0, 0);
  return canvas;
}

// The smallest and the largest of the numbers above 0.
function rangeOf(numbers) {
  let lowest = Infinity, highest = 0;
  for (const number of numbers) {
    if (number > highest) highest = number;
    if (number > 0 && number < lowest) lowest = number;
  }
  return {lowest, highest};
}

const largest = (numbers) => rangeOf(numbers).highest;

// What the colours mean, beside the head's name.
function drawLegend() {
  const {context, width, height} = prepared(document.getElementById("legend")), tile = liveTile(state.head);
  const bar = 96, middle = height / 2, range = tile ? tileRange(tile) : headRange(state.head);
  const style = getComputedStyle(document.documentElement), soft = style.getPropertyValue("--soft");
  const text = (what, x, align) => {
    context.textAlign = align;
    context.fillStyle = soft;
    context.fillText(what, x, middle + 0.5);
  };
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.strokeStyle = style.getPropertyValue("--line");
  text(state.scale === "log" && range.highest > 0 ? shortWeight(logRange(range)[0]) : "0", 34, "right");
  const shades = imageOf(Float32Array.from({length: bar}, (_, n) => (n + 0.5) / bar), bar, 1, paletteOf(state.theme), "linear", {highest: 1});
  context.drawImage(shades, 39, middle - 5, bar, 10);
  context.strokeRect(38.5, middle - 5.5, bar + 1, 11);
  text(range.highest.toPrecision(3), 42 + bar, "left");
  if (!(tile ? tile.max : headPart(arrays.max, state.head)).includes(0)) return;
  context.fillStyle = `rgb(${maskedColour[state.theme]})`;
  context.fillRect(width - 60, middle - 5, 12, 10);
  context.strokeRect(width - 60.5, middle - 5.5, 13, 11);
  text("masked", width - 43, "left");
}
