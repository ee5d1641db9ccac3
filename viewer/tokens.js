// ---- Tokens: texts from elsewhere, as both pages show them ----

// The first letters of a text; no letter is cut in two.
const first = (text, count) => Array.from(text.slice(0, 2 * count)).slice(0, count).join("");

// A token as it can be seen: line breaks and the like as signs, one of nothing visible as its codes, nothing that turns the
// text around it, not endless.
function shown(token) {
  if (token === "") return "(empty)";
  if (/^[\u00a0\u00ad\u200b-\u200d\u2028\u2029\u2060\u3000\ufeff]+$/.test(token)) {
    return Array.from(token.slice(0, 8), (letter) => `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`).join(" ");
  }
  const cut = token.length > 80 ? first(token, 79) + "\u2026" : token;
  return cut.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd")
    .replace(/^ +| +$/g, (s) => "\u2423".repeat(s.length));
}
// ... inside other text, with a direction of its own.
const isolated = (token) => `\u2068${shown(token)}\u2069`;
const quoted = (token) => `\u201c${isolated(token)}\u201d`;

const rightToLeft = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
