// A small line chart without axes. Its label says what it shows.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 160;
const HEIGHT = 36;

/** A chart of `values`, the last at the right end. Fewer than `least` values leave the left part empty. */
export function sparkline(values, label, least = 2) {
  const svg = document.createElementNS(SVG, "svg");
  const size = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "spark" };
  for (const [name, value] of Object.entries({ ...size, role: "img", "aria-label": label })) svg.setAttribute(name, value);
  const high = Math.max(1e-9, ...values);
  const x = (place) => WIDTH - ((values.length - 1 - place) * WIDTH) / (Math.max(least, values.length) - 1);
  const y = (value) => HEIGHT - 2 - (value / high) * (HEIGHT - 4);
  const points = values.map((value, place) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`);
  svg.append(shape("polygon", [`${x(0).toFixed(1)},${HEIGHT}`, ...points, `${WIDTH},${HEIGHT}`]), shape("polyline", points));
  return svg;
}

function shape(name, points) {
  const element = document.createElementNS(SVG, name);
  element.setAttribute("points", points.join(" "));
  return element;
}
