// ---- The overview: every head as a small map ----

const overview = document.getElementById("overview");
const headButtons = [];

function makeOverview(choose) {
  data.heads.forEach((head, index) => {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    const name = document.createElement("span"), figure = document.createElement("span");
    button.type = "button";
    name.className = "name";
    figure.className = "figure";
    name.textContent = head.name;
    button.append(canvas, name, figure);
    button.addEventListener("click", () => choose(index));
    headButtons.push({button, canvas, figure});
  });
}

function orderOfHeads() {
  const order = data.heads.map((_, index) => index);
  const likeness = (index) => data.similarity[state.head * data.heads.length + index];
  if (state.sort === "entropy") order.sort((a, b) => data.heads[a].entropy - data.heads[b].entropy);
  if (state.sort === "distance") order.sort((a, b) => data.heads[a].distance - data.heads[b].distance);
  if (state.sort === "similarity" && data.similarity) order.sort((a, b) => likeness(b) - likeness(a));
  return order;
}

function figureOf(index) {
  const head = data.heads[index];
  if (state.sort === "distance") return `distance ${head.distance.toPrecision(3)}`;
  if (state.sort === "similarity" && data.similarity) {
    return `likeness ${data.similarity[state.head * data.heads.length + index].toFixed(2)}`;
  }
  return `entropy ${head.entropy.toFixed(2)}`;
}

function drawOverview() {
  const palette = paletteOf(state.theme);
  headButtons.forEach(({button, canvas, figure}, index) => {
    const numbers = headPart(arrays[state.value], index);
    const image = imageOf(numbers, data.mapKeys, data.mapRows, palette, state.scale, largest(numbers));
    canvas.width = 112;
    canvas.height = 112;
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = data.mapKeys > 112;
    context.drawImage(image, 0, 0, 112, 112);
    figure.textContent = figureOf(index);
    button.setAttribute("aria-label", `${data.heads[index].name}, ${figureOf(index)}`);
  });
}

function arrangeOverview() {
  overview.append(...orderOfHeads().map((index) => headButtons[index].button));
  headButtons.forEach(({button, figure}, index) => {
    button.setAttribute("aria-pressed", String(index === state.head));
    figure.textContent = figureOf(index);
  });
}
