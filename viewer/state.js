// ---- What is shown; a link restores it ----

const state = {
  head: 0, sort: "order", value: "mean", scale: "log",
  theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
  view: {r0: 0, r1: data.queries, k0: 0, k1: data.keys},
  cursor: {i: 0, j: 0},
};

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
  const view = state.view;
  view.r0 = number("r0", 0, data.queries) ?? view.r0;
  view.r1 = number("r1", view.r0, data.queries) ?? view.r1;
  view.k0 = number("k0", 0, data.keys) ?? view.k0;
  view.k1 = number("k1", view.k0, data.keys) ?? view.k1;
  state.cursor.i = Math.floor(number("i", 0, data.queries - 1) ?? state.cursor.i);
  state.cursor.j = Math.floor(number("j", 0, data.keys - 1) ?? state.cursor.j);
}

function linkText() {
  const {head, sort, value, scale, theme, view, cursor} = state;
  const short = (x) => String(Math.round(x * 100) / 100);
  const link = {head, sort, value, scale, theme, r0: short(view.r0), r1: short(view.r1), k0: short(view.k0),
                k1: short(view.k1), i: cursor.i, j: cursor.j};
  return "#" + new URLSearchParams(link).toString();
}

let linkTimer = 0;
function rememberLink() {
  clearTimeout(linkTimer);
  linkTimer = setTimeout(() => history.replaceState(null, "", linkText()), 200);
}
