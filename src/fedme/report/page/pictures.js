// Charts as files: always light, with their styles inlined.

const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "font-size", "font-weight", "font-style", "text-anchor"];

function standalone(svg) {
  const root = document.documentElement;
  const theme = root.dataset.theme;
  root.dataset.theme = "light";
  const copy = svg.cloneNode(true);
  const originals = svg.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((target, index) => {
    const style = getComputedStyle(originals[index]);
    target.removeAttribute("style");
    target.removeAttribute("class");
    for (const name of STYLES) {
      const value = style.getPropertyValue(name);
      if (name.startsWith("font") || name === "text-anchor" ? target.tagName === "text" : !["g", "text"].includes(target.tagName) || name === "fill") target.setAttribute(name, value);
    }
    if (target.tagName === "text") target.setAttribute("font-family", "Helvetica, Arial, sans-serif");
    if (originals[index].matches(".hover, .outline, .outline *")) target.dataset.omit = "";
  });
  for (const omitted of copy.querySelectorAll("[data-omit]")) omitted.remove();
  copy.removeAttribute("tabindex");
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  if (theme === undefined) delete root.dataset.theme;
  else root.dataset.theme = theme;
  return new XMLSerializer().serializeToString(copy);
}

// All charts that are drawn now, and the numbers behind them; `fedme report --pictures` calls this.
window.pictures = () =>
  views.flatMap((view) => {
    const svg = document.querySelector(`#${view.id} figure svg`);
    return svg ? [{ name: view.id, width: svg.width.baseVal.value, height: svg.height.baseVal.value, svg: standalone(svg), csv: csv(view.csv()) }] : [];
  });

function download(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

const fileName = (id, format) => `${story.title}-${id}.${format}`.replace(/[^\w.-]+/g, "-");

function save(id, format) {
  const name = fileName(id, format);
  if (format === "csv") return download(name, new Blob([csv(views.find((view) => view.id === id).csv())], { type: "text/csv" }));
  const svg = document.querySelector(`#${id} figure svg`);
  const text = standalone(svg);
  if (format === "pdf") return printChart(id, svg);
  if (format === "svg") return download(name, new Blob([text], { type: "image/svg+xml" }));
  const image = new Image();
  image.onload = () => {
    const canvas = element("canvas", { width: 3 * svg.width.baseVal.value, height: 3 * svg.height.baseVal.value });
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => download(name, blob));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

// Print a page as large as the chart: "save as PDF" keeps it a vector drawing.
function printChart(id, svg) {
  const [width, height] = [svg.width.baseVal.value, svg.height.baseVal.value].map((size) => `${Math.ceil(size)}px`);
  const style = element("style", {}, `@media print { @page { size: ${width} ${height}; margin: 0 } header, footer, section:not(#${id}), #${id} > :not(figure), figure details { display: none } main, section#${id} { margin: 0; padding: 0; max-width: none } }`);
  document.head.append(style);
  addEventListener("afterprint", () => style.remove(), { once: true });
  print();
}
