// A small line chart without axes. Its label says what it shows.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 160;
const HEIGHT = 36;

/** A chart of `values`, the last at the right end; `most` values fill the width. */
export function sparkline(values, most, label) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label, class: "spark" })) {
    svg.setAttribute(name, value);
  }
  const high = Math.max(1e-9, ...values);
  const x = (place) => WIDTH - ((values.length - 1 - place) * WIDTH) / (most - 1);
  const y = (value) => HEIGHT - 2 - (value / high) * (HEIGHT - 4);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", values.map((value, place) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  svg.append(line);
  return svg;
}
