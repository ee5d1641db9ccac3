// ---- The data ----

const data = JSON.parse(document.getElementById("data").textContent);
for (const step of data.steps) step.numbers = step.numbers.map(Number);  // "-Infinity" and "NaN" travel as texts

// What is given stands together on the first screen; then one screen for each step.
const given = data.steps.filter((step) => step.kind === "given");
const screens = [null, ...data.steps.filter((step) => step.kind !== "given")];
// A step's number, as the text that print() shows has it; of what is given, "1–3, 5".
function numberOf(step) {
  const numbers = (step ? [step] : given).map((one) => data.steps.indexOf(one) + 1), runs = [];
  for (const number of numbers) {
    if (runs.length && runs.at(-1).last === number - 1) runs.at(-1).last = number;
    else runs.push({first: number, last: number});
  }
  return runs.map(({first: begin, last}) => (begin === last ? `${begin}` : `${begin}${last === begin + 1 ? ", " : "\u2013"}${last}`)).join(", ");
}
const items = Math.max(...data.steps.map((step) => step.items));
const heads = Math.max(...data.steps.map((step) => step.heads));

const state = {
  screen: 0, item: 0, head: 0, cell: null,
  theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
};

function readLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const whole = (name, size) => Math.min(size - 1, Math.max(0, Math.floor(Number(link.get(name)) || 0)));
  state.screen = whole("step", screens.length);
  state.item = whole("item", items);
  state.head = whole("head", heads);
  if (["light", "dark"].includes(link.get("theme"))) state.theme = link.get("theme");
}

function rememberLink() {
  const {screen: step, item, head, theme} = state;
  const link = "#" + new URLSearchParams({step, item, head, theme}).toString();
  if (location.protocol !== "about:") history.replaceState(null, "", link);  // inside a notebook the page has no address
}

// ---- Numbers and labels ----

// As many decimals as four or five digits take, the same for all numbers of a step.
function digitsOf(step) {
  const finite = step.numbers.filter(Number.isFinite), largest = Math.max(0, ...finite.map(Math.abs));
  if (largest >= 1e7 || (largest > 0 && largest < 1e-3)) return (x) => x.toExponential(3);
  if (finite.every(Number.isInteger)) return (x) => x.toFixed(0);
  const decimals = Math.min(4, Math.max(1, 4 - Math.floor(Math.log10(Math.max(largest, 1)))));
  return (x) => x.toFixed(decimals);
}

const special = (x) => (Number.isNaN(x) ? "NaN" : x < 0 ? "−∞" : "∞");
const cellText = (digits, x) => (x === 0 ? "0" : Number.isFinite(x) ? digits(x) : special(x)).replace("-", "−");
const short = (x) => (Number.isFinite(x) ? String(Number(x.toPrecision(5))) : special(x)).replace("-", "−");

function labelOf(axis, n) {
  const tokens = axis === "query" ? data.queryTokens : axis === "key" || axis === "token" ? data.keyTokens : null;
  if (tokens && tokens.length) return rightToLeft.test(tokens[n]) ? isolated(tokens[n]) : shown(tokens[n]);
  return (["query", "key", "token"].includes(axis) ? axis[0] : "") + n;
}

const nameOfCell = (step, i, j) =>
  `${step.symbol}[${[[step.rowAxis, i], [step.columnAxis, j]].filter(([axis]) => axis).map(([axis, n]) => labelOf(axis, n)).join(", ")}]`;

// ---- Which matrix of a step, and which cells of it ----

// A step with fewer heads (grouped keys, heads side by side) or without batch shows the one that belongs to the choice.
function matrixOf(step) {
  const item = step.items === 1 ? 0 : state.item, head = Math.floor((state.head * step.heads) / heads);
  return {item, head};
}

const numberAt = (step, {item, head}, i, j) => step.numbers[((item * step.heads + head) * step.rows + i) * step.columns + j];

// The cells of a source that number (i, j) of a step is made of, in the order in which they are summed.
function cellsOf(step, {step: index, part}, i, j) {
  const source = data.steps[index], own = matrixOf(step);
  const item = source.items === 1 ? 0 : own.item;
  const head = part === "join" ? Math.floor(j / source.columns) : Math.floor((own.head * source.heads) / step.heads);
  const row = (r) => Array.from({length: source.columns}, (_, c) => [r, c]);
  const found = {
    cell: () => [[i, j]], row: () => row(i), other_row: () => row(j), row_entry: () => [[i, 0]],
    column: () => Array.from({length: source.rows}, (_, r) => [r, j]), column_entry: () => [[0, j]],
    split: () => [[i, own.head * step.columns + j]], join: () => [[i, j % source.columns]],
  }[part]();
  return {source, matrix: {item, head}, cells: found, numbers: found.map(([r, c]) => numberAt(source, {item, head}, r, c))};
}

// ---- How a number comes about, in words ----

const shortened = (terms, sign) => (terms.length <= 8 ? terms : [...terms.slice(0, 4), "…", ...terms.slice(-3)]).join(sign);

function arithmetic(step, i, j) {
  const value = numberAt(step, matrixOf(step), i, j), sources = step.sources.map((source) => cellsOf(step, source, i, j));
  const right = step.formula.slice(step.formula.indexOf(" = ") + 3);
  if (step.kind === "product") {
    const [a, b, bias] = sources.map((source) => source.numbers);
    const factor = (x) => (x < 0 ? `(${short(x)})` : short(x));
    const terms = a.map((x, n) => `${factor(x)} × ${factor(b[n])}`).concat(bias ? [factor(bias[0])] : []);
    return `${shortened(terms, " + ") || "an empty sum"} = ${short(value)}`;
  }
  if (step.kind === "regrouped") {
    const {source, cells: [[r, c]], matrix} = sources[0];
    return `${nameOfCell(source, r, c)}${source.heads > 1 ? ` of head ${matrix.head}` : ""} = ${short(value)}`;
  }
  if (step.kind === "allowed") return `${right.split(", ")[0]}: ${value ? "yes" : "no"}`;
  if (step.kind === "reduced") {
    const terms = sources[0].numbers.map(short), sinks = step.formula.includes("sink");
    if (step.symbol === "m") return `the largest of ${shortened(sinks ? [...terms, "the sink"] : terms, ", ")} = ${short(value)}`;
    return `${shortened(sinks ? [...terms, "exp(sink − m)"] : terms, " + ") || "an empty sum"} = ${short(value)}`;
  }
  const forbidding = sources.filter(({source}) => ["allowed", "mask"].includes(source.symbol));
  if (forbidding.length) {
    const names = forbidding.filter(({numbers}) => numbers[0] === 0).map(({source}) => source.name);
    return names.length ? `−∞: forbidden by ${names.join(" and ")}` : `${short(value)}: allowed`;
  }
  if (step.symbol === "E" && sources[0].numbers[0] === -Infinity) return "exp(−∞) = 0";
  if (step.symbol === "P" && sources[1]?.numbers[0] === 0) return "0: this query sees no key";
  let text = right.split(/ where|, slope/)[0];
  for (const {source, numbers} of sources) {
    text = text.replace(new RegExp(`\\b${source.symbol}\\[[^\\]]*\\]`), () => short(numbers[0]));
  }
  return step.name.includes("dropout") ? `${text.split(" * ")[0]} ${value ? "kept" : "dropped"}: ${short(value)}` : `${text} = ${short(value)}`;
}

// ---- Tables ----

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Blue above 0 and orange below, stronger for larger numbers.
function paint(cell, x, largest) {
  if (!Number.isFinite(x)) {
    cell.classList.add("forbidden");
  } else if (x !== 0) {
    const share = Math.round(8 + 42 * Math.min(1, Math.abs(x) / largest));
    cell.style.backgroundColor = `color-mix(in srgb, var(${x > 0 ? "--mark" : "--arc"}) ${share}%, var(--card))`;
  }
}

// One matrix of a step. `cells[i][j]` of the result are its table cells.
function tableOf(step, matrix, isResult) {
  const digits = digitsOf(step), largest = Math.max(...step.numbers.filter(Number.isFinite).map(Math.abs), 1e-300);
  const columns = Array.from({length: step.columns}, (_, j) => j), table = element("table"), cells = [];
  if (step.columnAxis) {
    table.append(element("thead", {}, element("tr", {}, element("th"),
      ...columns.map((j) => element("th", {scope: "col", textContent: labelOf(step.columnAxis, j)})))));
  }
  const body = element("tbody");
  for (let i = 0; i < step.rows; i++) {
    cells.push(columns.map((j) => {
      const x = numberAt(step, matrix, i, j), cell = element("td", {textContent: cellText(digits, x), title: String(x)});
      paint(cell, x, largest);
      if (isResult) {
        cell.tabIndex = -1;
        cell.setAttribute("aria-label", `${nameOfCell(step, i, j)} is ${short(x)}`);
        cell.addEventListener("pointerenter", () => showCell(i, j));
        cell.addEventListener("focus", () => showCell(i, j));
        cell.addEventListener("click", () => cell.focus());
      }
      return cell;
    }));
    body.append(element("tr", {}, element("th", {scope: "row", textContent: step.rowAxis ? labelOf(step.rowAxis, i) : ""}), ...cells[i]));
  }
  table.append(body);
  return {table, cells};
}

function figureOf(step, matrix, isResult) {
  const {table, cells} = tableOf(step, matrix, isResult), where = [];
  if (step.hasItems && step.items > 1) where.push(`item ${matrix.item}`);
  if (step.hasHeads && step.heads > 1) where.push(`head ${matrix.head}`);
  const caption = element("figcaption", {}, element("b", {textContent: step.symbol}), ` ${step.name === step.symbol ? "" : step.name}${where.length ? `, ${where.join(", ")}` : ""} `,
    element("span", {className: "shape", textContent: step.shape}));
  const figure = element("figure", {className: isResult ? "result" : ""}, caption,
    step.numbers.length ? element("div", {className: "scroll"}, table) : "no numbers");
  table.setAttribute("aria-label", `${step.symbol}, ${step.name}`);
  return {figure, cells, step, matrix};
}

// ---- One screen ----

let operands = [], result = null;

function showScreen() {
  const step = screens[state.screen], flow = document.getElementById("flow");
  const set = (id, text) => { document.getElementById(id).textContent = text; };
  flow.replaceChildren();
  operands = [];
  result = null;
  state.cell = null;
  set("step-name", step ? `${numberOf(step)}. ${step.name}` : "What is given");
  set("formula", step ? step.formula : "");
  set("why", step ? step.why : "The numbers that everything below is computed from.");
  set("cell", "");
  if (!step) {
    for (const one of given) flow.append(figureOf(one, matrixOf(one), false).figure);
  } else {
    for (const source of step.sources) {
      const one = data.steps[source.step], shown = matrixOf(one);
      const wanted = source.part === "join" ? Array.from({length: one.heads}, (_, head) => ({...shown, head})) : [shown];
      operands.push(...wanted.map((matrix) => figureOf(one, matrix, false)));
    }
    result = figureOf(step, matrixOf(step), true);
    if (operands.length) flow.append(...operands.map(({figure}) => figure), element("span", {className: "arrow", textContent: "→", ariaHidden: "true"}));
    flow.append(result.figure);
    if (step.numbers.length) {
      result.cells[0][0].tabIndex = 0;
      set("cell", "Point at a number of the result, or move there with the Tab and arrow keys, to see what it is made of.");
    }
  }
  document.getElementById("previous").disabled = state.screen === 0;
  document.getElementById("next").disabled = state.screen === screens.length - 1;
  for (const button of document.querySelectorAll("#steps button")) {
    const chosen = Number(button.dataset.screen) === state.screen;
    chosen ? button.setAttribute("aria-current", "step") : button.removeAttribute("aria-current");
    if (chosen) button.scrollIntoView({block: "nearest"});
  }
  rememberLink();
}

// Marks a number of the result and the numbers that it is made of.
function showCell(i, j) {
  for (const marked of document.querySelectorAll("#flow .source, #flow .current")) marked.classList.remove("source", "current");
  const step = screens[state.screen];
  state.cell = {i, j};
  result.cells[i][j].classList.add("current");
  for (const source of step.sources) {
    const {source: from, matrix, cells} = cellsOf(step, source, i, j);
    const shown = operands.find((one) => one.step === from && one.matrix.head === matrix.head && one.matrix.item === matrix.item);
    if (!shown || !cells.length) continue;
    for (const [r, c] of cells) shown.cells[r][c].classList.add("source");
    bringIntoView(shown.cells[cells[0][0]][cells[0][1]]);
  }
  document.getElementById("cell").textContent = `${nameOfCell(step, i, j)} = ${arithmetic(step, i, j)}`;
}

// Scrolls a long table, and nothing but the table.
function bringIntoView(cell) {
  const box = cell.closest(".scroll"), outer = box.getBoundingClientRect(), inner = cell.getBoundingClientRect();
  if (inner.top < outer.top + 30 || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - outer.height / 2;
  if (inner.left < outer.left + 90 || inner.right > outer.right) box.scrollLeft += inner.left - outer.left - outer.width / 2;
}

function moveTo(screen) {
  state.screen = Math.min(screens.length - 1, Math.max(0, screen));
  showScreen();
}

// ---- Controls ----

function makeSteps() {
  document.getElementById("steps").append(...screens.map((step, n) => {
    const button = element("button", {type: "button"}, element("span", {className: "number", textContent: numberOf(step)}),
      element("span", {textContent: step ? step.name : "what is given"}),
      element("span", {className: "shape", textContent: step ? step.shape : ""}));
    button.dataset.screen = n;
    button.addEventListener("click", () => moveTo(n));
    return element("li", {}, button);
  }));
}

function applyTheme() {
  document.documentElement.dataset.theme = state.theme;
  document.getElementById("theme").textContent = state.theme === "dark" ? "Light" : "Dark";
}

function makeChoice(name, count) {
  const select = document.getElementById(name);
  select.append(...Array.from({length: count}, (_, n) => element("option", {value: n, textContent: n})));
  select.value = state[name];
  document.getElementById(`${name}-label`).hidden = count < 2;
  select.addEventListener("change", () => { state[name] = Number(select.value); showScreen(); });
}

function chooseHead(head) {
  state.head = (head + heads) % heads;
  document.getElementById("head").value = state.head;
  showScreen();
}

function listen() {
  const on = (id, action) => document.getElementById(id).addEventListener("click", action);
  on("previous", () => moveTo(state.screen - 1));
  on("next", () => moveTo(state.screen + 1));
  on("theme", () => { state.theme = state.theme === "dark" ? "light" : "dark"; applyTheme(); rememberLink(); });
  const moves = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  const screensBy = {n: 1, p: -1, ArrowRight: 1, ArrowLeft: -1};
  document.addEventListener("keydown", (event) => {
    if (event.target instanceof HTMLSelectElement || event.ctrlKey || event.altKey || event.metaKey) return;
    const inResult = event.target instanceof HTMLTableCellElement && state.cell;
    if (inResult && moves[event.key]) {
      const [rows, columns] = moves[event.key];
      result.cells[state.cell.i + rows]?.[state.cell.j + columns]?.focus();
    } else if (screensBy[event.key]) {
      moveTo(state.screen + screensBy[event.key]);
    } else if (event.key === "[" || event.key === "]") {
      chooseHead(state.head + (event.key === "]" ? 1 : -1));
    } else {
      return;
    }
    event.preventDefault();
  });
  addEventListener("hashchange", () => { readLink(); applyTheme(); showScreen(); });
}

function start() {
  document.title = data.title;
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = data.options;
  readLink();
  makeSteps();
  makeChoice("item", items);
  makeChoice("head", heads);
  applyTheme();
  listen();
  showScreen();
  document.documentElement.dataset.ready = "true";
}

start();
