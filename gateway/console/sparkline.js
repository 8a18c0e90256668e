// Drawings of lines without axes. Their labels say what they show.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 160;
const HEIGHT = 36;

/** A chart of `values`, the last at the right end. Fewer than `least` values leave the left part empty. */
export function sparkline(values, label, least = 2) {
  const high = Math.max(1e-9, ...values);
  const x = (place) => WIDTH - ((values.length - 1 - place) * WIDTH) / (Math.max(least, values.length) - 1);
  const y = (value) => HEIGHT - 2 - (value / high) * (HEIGHT - 4);
  const points = values.map((value, place) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`);
  const area = shape("polygon", [`${x(0).toFixed(1)},${HEIGHT}`, ...points, `${WIDTH},${HEIGHT}`]);
  return svg(WIDTH, HEIGHT, label, [area, shape("polyline", points)]);
}

/** A drawing that is stretched to its element. */
export function svg(width, height, label, shapes) {
  const element = document.createElementNS(SVG, "svg");
  const size = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "spark" };
  for (const [name, value] of Object.entries({ ...size, role: "img", "aria-label": label })) element.setAttribute(name, value);
  element.append(...shapes);
  return element;
}

export function shape(name, points) {
  const element = document.createElementNS(SVG, name);
  element.setAttribute("points", points.join(" "));
  return element;
}
