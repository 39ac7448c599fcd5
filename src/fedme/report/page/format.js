// Numbers as text. Values come unrounded and are rounded once, to even digits at a tie, as Python does: one number, one text.

function fixed(value, digits) {
  const size = Math.abs(value);
  if ((size * 2 ** (digits + 1)) % 2 !== 1) return value.toFixed(digits);
  const low = Math.floor(size * 10 ** digits);
  return ((Math.sign(value) * (low + (low % 2))) / 10 ** digits).toFixed(digits);
}

const isPercent = (metric) => story.curves.metrics[metric].percent;
const higher = () => story.curves.metrics[headline].higher; // whether higher is better
const titles = () => Object.fromEntries(Object.entries(story.curves.metrics).map(([key, metric]) => [key, metric.title]));
const known = (value) => value !== null && value !== undefined;
const plain = (value) => `${+value.toPrecision(5)}`;
const bare = (value, metric = headline) => (isPercent(metric) ? `${+(100 * value).toFixed(2)}` : plain(value));
const written = (value, metric = headline, digits = 1) => (!known(value) ? "–" : isPercent(metric) ? `${fixed(100 * value, digits)} %` : plain(value));
const points = (value) => (known(value) ? `${value >= 0 ? "+" : ""}${isPercent(headline) ? fixed(100 * value, 1) : plain(value)}` : "unknown");
const unit = () => (isPercent(headline) ? " points" : "");
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const shorten = (text, length = 16) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// The unit in which megabytes are written: that of the largest.
function sizeUnit(megabytes) {
  const [factor, name] = [[1e6, "TB"], [1e3, "GB"], [1, "MB"], [1e-3, "kB"]].find(([size]) => megabytes >= size) ?? [1e-6, "bytes"];
  return { factor, name };
}

// A table as CSV. A text that a spreadsheet would take for a formula gets an apostrophe.
function csv(rows) {
  const cell = (value) => {
    if (!known(value)) return "";
    const text = typeof value === "string" && /^[=+\-@\t]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : `${value}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}
