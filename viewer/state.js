// ---- What is shown; a link restores it ----

const single = data.rowCell === 1 && data.keyCell === 1;  // every weight has a cell of its own
const state = {
  head: 0, sort: "order", value: "mean",
  // A few hundred weights of a row differ visibly as they are; the small ones among thousands only by their powers.
  scale: Math.max(data.queries, data.keys) <= 256 ? "linear" : "log",
  theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
  view: {r0: 0, r1: data.queries, k0: 0, k1: data.keys},
  cursor: {i: 0, j: 0}, pinned: false,
};

const hasAddress = location.protocol !== "about:";  // inside a notebook's frame there is none

function readLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const number = (name, least, most) => {
    const found = Number(link.get(name));
    return link.has(name) && Number.isFinite(found) ? Math.min(most, Math.max(least, found)) : null;
  };
  const word = (name, allowed) => (allowed.includes(link.get(name)) ? link.get(name) : null);
  state.head = Math.floor(number("head", 0, data.heads.length - 1) ?? state.head);
  state.sort = word("sort", ["order", "entropy", "distance", "similarity"]) ?? state.sort;
  state.value = word("value", ["mean", "max"]) ?? state.value;
  state.scale = word("scale", ["log", "linear"]) ?? state.scale;
  state.theme = word("theme", ["light", "dark"]) ?? state.theme;
  state.pinned = link.has("pinned") ? link.get("pinned") === "1" : state.pinned;
  // A range with nothing in it is no range.
  const range = (low, high, before, size) => {
    const begin = number(low, 0, size) ?? before[0], end = number(high, 0, size) ?? before[1];
    return end - begin >= Math.min(1, size) ? [begin, end] : [0, size];
  };
  const view = state.view;
  [view.r0, view.r1] = range("r0", "r1", [view.r0, view.r1], data.queries);
  [view.k0, view.k1] = range("k0", "k1", [view.k0, view.k1], data.keys);
  state.cursor.i = Math.floor(number("i", 0, data.queries - 1) ?? state.cursor.i);
  state.cursor.j = Math.floor(number("j", 0, data.keys - 1) ?? state.cursor.j);
}

function linkText() {
  const {head, sort, value, scale, theme, view, cursor} = state;
  const short = (x) => String(Math.round(x * 100) / 100);
  const link = {head, sort, value, scale, theme, r0: short(view.r0), r1: short(view.r1), k0: short(view.k0),
                k1: short(view.k1), i: cursor.i, j: cursor.j, pinned: Number(state.pinned)};
  return "#" + new URLSearchParams(link).toString();
}

let linkTimer = 0;
function rememberLink() {
  if (!hasAddress) return;
  clearTimeout(linkTimer);
  linkTimer = setTimeout(() => history.replaceState(null, "", linkText()), 200);
}
