// Hovering, tapping, selecting and reading with the keyboard, the same for all charts. `locate(x, y)` returns what is at a point
// of the plot: {tip, outline: [elements], client}, or null.

const bubble = document.getElementById("tip");

function showTip(text, left, top) {
  bubble.textContent = text;
  bubble.hidden = false;
  const { width, height } = bubble.getBoundingClientRect();
  const x = Math.min(left + 14, innerWidth - width - 6);
  const y = top + 18 + height > innerHeight ? top - height - 10 : top + 18;
  bubble.style.left = `${Math.max(4, x)}px`;
  bubble.style.top = `${Math.max(4, y)}px`;
}

function hideTip() {
  bubble.hidden = true;
  for (const outline of document.querySelectorAll("svg .outline")) outline.replaceChildren();
}

let keyed = null; // {id, x, y}: where the keyboard reads, in plot coordinates

// `steps` are the distances of arrow keys.
function hover(chart, locate, steps = { x: 12, y: 12 }) {
  const box = node("rect", { class: "hover", x: 0, y: 0, width: chart.width, height: chart.height });
  const outline = node("g", { class: "outline" });
  chart.plot.append(outline, box);
  const scaled = () => {
    const area = box.getBoundingClientRect();
    return { area, fx: area.width / chart.width || 1, fy: area.height / chart.height || 1 };
  };
  const showAt = (x, y, left, top) => {
    const target = locate(x, y);
    outline.replaceChildren(...(target?.outline ?? []));
    if (target) showTip(target.tip, left, top);
    else bubble.hidden = true;
    return target;
  };
  const place = (event) => {
    const { area, fx, fy } = scaled();
    return [(event.clientX - area.left) / fx, (event.clientY - area.top) / fy];
  };
  const show = (event) => showAt(...place(event), event.clientX, event.clientY);
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerdown", show);
  box.addEventListener("click", (event) => {
    const client = locate(...place(event))?.client;
    if (client !== undefined) choose(state.client === client ? null : client);
  });
  const id = chart.svg.closest("section")?.id;
  const read = () => {
    const { area, fx, fy } = scaled();
    return showAt(keyed.x, keyed.y, area.left + keyed.x * fx, area.top + keyed.y * fy);
  };
  chart.svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Escape") {
      hideTip();
      if (state.client !== null) choose(null);
    } else if (event.key in moves) {
      event.preventDefault(); // the page does not scroll
      const first = keyed?.id !== id;
      if (first) keyed = { id, x: steps.x / 2, y: steps.y / 2 };
      const [dx, dy] = first ? [0, 0] : moves[event.key];
      keyed.x = Math.min(chart.width - 0.5, Math.max(0.5, keyed.x + dx * steps.x));
      keyed.y = Math.min(chart.height - 0.5, Math.max(0.5, keyed.y + dy * steps.y));
      read();
    } else if ((event.key === "Enter" || event.key === " ") && keyed?.id === id) {
      event.preventDefault();
      const client = locate(keyed.x, keyed.y)?.client;
      if (client !== undefined) choose(state.client === client ? null : client);
    }
  });
  chart.svg.addEventListener("blur", hideTip);
}

document.addEventListener("pointermove", (event) => {
  if (!bubble.hidden && !(event.target instanceof Element && event.target.classList.contains("hover"))) hideTip();
});
document.addEventListener("scroll", hideTip, { passive: true });
