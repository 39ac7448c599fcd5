// Hovering, tapping and selecting, the same for all charts. `locate(x, y)` returns what is at a point of the plot:
// {tip, outline: [elements], client}, or null.

const bubble = document.getElementById("tip");

function showTip(text, event) {
  bubble.textContent = text;
  bubble.hidden = false;
  const { width, height } = bubble.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - width - 6);
  const y = event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18;
  bubble.style.left = `${Math.max(4, x)}px`;
  bubble.style.top = `${Math.max(4, y)}px`;
}

function hideTip() {
  bubble.hidden = true;
  for (const outline of document.querySelectorAll("svg .outline")) outline.replaceChildren();
}

function hover(chart, locate) {
  const box = node("rect", { class: "hover", x: 0, y: 0, width: chart.width, height: chart.height });
  const outline = node("g", { class: "outline" });
  chart.plot.append(outline, box);
  const at = (event) => {
    const area = box.getBoundingClientRect();
    return locate(((event.clientX - area.left) * chart.width) / area.width, ((event.clientY - area.top) * chart.height) / area.height);
  };
  const show = (event) => {
    const target = at(event);
    outline.replaceChildren(...(target?.outline ?? []));
    if (target) showTip(target.tip, event);
    else bubble.hidden = true;
  };
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerdown", show);
  box.addEventListener("click", (event) => {
    const client = at(event)?.client;
    if (client !== undefined) choose(state.client === client ? null : client);
  });
}

document.addEventListener("pointermove", (event) => {
  if (!bubble.hidden && !(event.target instanceof Element && event.target.classList.contains("hover"))) hideTip();
});
document.addEventListener("scroll", hideTip, { passive: true });
