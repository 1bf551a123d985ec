// Small SVG charts: axes with round ticks, lines, stacked bars, and a cursor with a tooltip. Text is only ever
// set as text nodes. A chart is drawn at its figure's width and drawn again when that changes.
const SVG = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");
const HUES = ["var(--blue)", "var(--orange)", "var(--green)", "var(--purple)", "var(--red)", "var(--sky)"];

function element(parent, name, attributes = {}, text = null) {
  const svg = name === "svg" || parent.namespaceURI === SVG;
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return parent.appendChild(node);
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
}
const hideTip = () => { tip.hidden = true; };

function niceStep(span, count) {
  const rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].find(m => m * power >= rough * 0.999) * power;
}

function ticks(low, high, count, whole = false) {
  let step = niceStep(high - low || 1, count);
  if (whole) step = Math.max(1, Math.ceil(step));
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) result.push(i * step);
  return result;
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(3) + " k";
  if (size < 1e-3) {
    const [digits, power] = value.toExponential(1).replace(".0", "").split("e-");
    return `${digits.replace("-", "−")}×10⁻${[...power].map(d => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]).join("")}`;
  }
  return String(+value.toPrecision(3)).replace("-", "−");
}
const percent = value => +(100 * value).toFixed(1) + "%";

// The frame of a chart: caption, optional legend, axes. Returns the scales and the plotting group.
function frame(figure, o) {
  const width = Math.max(260, figure.clientWidth), height = o.height || 230;
  const m = {left: 50, right: 12, top: 10, bottom: 40};
  const svg = element(figure, "svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": o.label});
  const x = v => m.left + (v - o.x[0]) / (o.x[1] - o.x[0] || 1) * (width - m.left - m.right);
  const raw = o.log ? v => Math.log10(v) : v => v;
  const [low, high] = o.y.map(raw);
  const y = v => height - m.bottom - (raw(v) - low) / (high - low || 1) * (height - m.top - m.bottom);
  const marks = o.log ? logTicks(low, high) : ticks(o.y[0], o.y[1], 5);
  for (const v of marks) {
    element(svg, "line", {class: "grid", x1: m.left, x2: width - m.right, y1: y(v), y2: y(v)});
    element(svg, "text", {x: m.left - 8, y: y(v) + 4, "text-anchor": "end"}, (o.format || short)(v));
  }
  element(svg, "line", {class: "axis", x1: m.left, x2: width - m.right, y1: height - m.bottom, y2: height - m.bottom});
  for (const [v, text] of o.xTicks || ticks(o.x[0], o.x[1], Math.min(8, width / 70), true).map(v => [v, short(v)])) {
    element(svg, "line", {class: "axis", x1: x(v), x2: x(v), y1: height - m.bottom, y2: height - m.bottom + 4});
    element(svg, "text", {x: x(v), y: height - m.bottom + 17, "text-anchor": "middle"}, text);
  }
  element(svg, "text", {x: (m.left + width - m.right) / 2, y: height - 5, "text-anchor": "middle"}, o.xTitle || "Training step");
  return {svg, x, y, width, height, m};
}

function logTicks(low, high) {
  const all = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e++) for (const k of [1, 2, 5]) all.push(k * 10 ** e);
  const inside = all.filter(v => Math.log10(v) >= low - 1e-9 && Math.log10(v) <= high + 1e-9);
  const decades = inside.filter(v => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9);
  return decades.length >= 3 ? decades : inside;
}

function caption(figure, title, text, legend = []) {
  figure.replaceChildren();
  const node = element(figure, "figcaption");
  element(node, "b", {}, title);
  if (text) node.append(" " + text);
  if (legend.length < 2) return;
  const list = element(figure, "ul", {class: "legend"});
  for (const [name, color] of legend) {
    const item = element(list, "li");
    element(item, "i", {style: `background:${color}`});
    item.append(name);
  }
}

function path(xs, ys, c) {
  let d = "", pen = "M";
  xs.forEach((x, i) => {
    if (ys[i] === null || ys[i] === undefined) { pen = "M"; return; }
    d += `${pen}${c.x(x).toFixed(1)} ${c.y(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return d.replace(/M([^ML]+)(?=M|$)/g, "M$1l0.01 0"); // a lone point becomes a dot through the round cap
}

// Centred moving average over about a tenth of the points: the trend over the noisy curve.
function smooth(ys) {
  const half = Math.floor(Math.min(ys.length / 20, 20));
  if (half < 1) return null;
  return ys.map((_, i) => {
    const near = ys.slice(Math.max(0, i - half), i + half + 1).filter(v => v !== null);
    return near.length ? near.reduce((a, b) => a + b) / near.length : null;
  });
}

// A vertical cursor that snaps to the nearest of `xs` and shows `text(i)`.
function cursor(c, xs, text) {
  const line = element(c.svg, "line", {class: "cursor", y1: c.m.top, y2: c.height - c.m.bottom, visibility: "hidden"});
  const area = element(c.svg, "rect", {x: c.m.left, y: c.m.top, width: c.width - c.m.left - c.m.right,
    height: c.height - c.m.top - c.m.bottom, fill: "transparent"});
  area.addEventListener("pointermove", event => {
    const box = c.svg.getBoundingClientRect(), at = (event.clientX - box.left) * c.width / box.width;
    let best = 0;
    xs.forEach((x, i) => { if (Math.abs(c.x(x) - at) < Math.abs(c.x(xs[best]) - at)) best = i; });
    line.setAttribute("x1", c.x(xs[best]));
    line.setAttribute("x2", c.x(xs[best]));
    line.setAttribute("visibility", "visible");
    showTip(event, text(best));
  });
  area.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); hideTip(); });
}

function extent(lists, fromZero) {
  const values = lists.flat().filter(v => v !== null && v !== undefined);
  let low = Math.min(...values), high = Math.max(...values);
  if (fromZero) low = Math.min(0, low);
  if (low === high) { high += Math.abs(high) * 0.1 || 1; low -= fromZero ? 0 : Math.abs(low) * 0.1; }
  const step = niceStep(high - low, 5);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

// series: [{name, color, y, thin}]; o: {title, text, y, format, fromZero, log, xTitle, xName, extra(c)}
function lineChart(figure, xs, series, o) {
  caption(figure, o.title, o.text, o.legend || series.filter(s => !s.thin).map(s => [s.name, s.color]));
  const points = series.flatMap(s => s.y).filter(v => v !== null && v !== undefined);
  if (!points.length && !o.x) { element(figure, "p", {class: "empty"}, "Nothing was recorded yet."); return; }
  const x = o.x || [xs[0], xs[xs.length - 1]];
  const log = o.log && Math.min(...points) > 0 && Math.max(...points) / Math.min(...points) > 30;
  const y = o.y || (log ? [Math.min(...points) / 1.2, Math.max(...points) * 1.2] : extent([points], o.fromZero));
  const c = frame(figure, {...o, log, x: x[0] === x[1] ? [x[0] - 0.5, x[1] + 0.5] : x, y, label: `${o.title} ${o.text || ""}`});
  for (const s of series) {
    const trend = o.smooth ? smooth(s.y) : null;
    element(c.svg, "path", {class: trend || s.thin ? "line raw" : "line", d: path(xs, s.y, c), style: `stroke:${s.color}`});
    if (trend) element(c.svg, "path", {class: "line", d: path(xs, trend, c), style: `stroke:${s.color}`});
  }
  if (xs.length) cursor(c, xs, i => `${o.xName || "Step"} ${+xs[i].toFixed(1)}\n` + series.slice(0, 12).filter(s => s.y[i] !== null)
    .map(s => `${s.name}: ${(o.format || short)(s.y[i])}`).join("\n"));
  if (o.extra) o.extra(c);
}

// bars: [{from, to, parts: [{name, color, value}], tip}] in units of x
function barChart(figure, bars, o) {
  caption(figure, o.title, o.text, o.legend);
  if (!bars.length) { element(figure, "p", {class: "empty"}, "Nothing was recorded yet."); return; }
  const tops = bars.map(b => o.stacked ? b.parts.reduce((sum, p) => sum + p.value, 0) : Math.max(...b.parts.map(p => p.value)));
  const c = frame(figure, {...o, x: [bars[0].from, bars[bars.length - 1].to], y: extent([tops], true), label: `${o.title} ${o.text || ""}`});
  for (const bar of bars) {
    const left = c.x(bar.from), full = c.x(bar.to) - left, gap = Math.min(6, full * 0.16);
    const wide = o.stacked ? full - gap : (full - gap) / bar.parts.length;
    let base = 0;
    bar.parts.forEach((p, i) => {
      const top = c.y(base + p.value);
      element(c.svg, "rect", {x: left + gap / 2 + (o.stacked ? 0 : i * wide), width: Math.max(0.5, wide), y: top,
        height: Math.max(0, c.y(base) - top), style: `fill:${p.color}`});
      if (o.stacked) base += p.value;
    });
  }
  cursor(c, bars.map(b => (b.from + b.to) / 2), i => bars[i].tip);
}
