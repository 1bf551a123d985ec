// The timeline of turns: an overview of the whole run, and below it one row per rank for the window in view.
// Drag to pan; Ctrl + wheel, the buttons or + and - to zoom; arrow keys move. Canvas, because turns are many.
(function timeline() {
  const T = DATA.timeline, host = document.getElementById("fig-timeline");
  caption(host, "Turns on each engine.", "A bar is one turn, from its arrival at the engine to its last token. Drag to pan; Ctrl + wheel, or + and − to zoom; point at a bar to read it.");
  if (!T) { element(host, "p", {class: "empty"}, "No events were recorded (observe.trace)."); return; }
  const M = T.marks, KINDS = {rollout: "blue", train: "orange", sync: "green", evaluate: "purple", load_version: "green",
    train_step: "pale", forward_backward: "orange", optimizer: "red", publish: "green"};
  const CYCLE = ["blue", "purple", "sky"], GUTTER = innerWidth < 600 ? 86 : 104, AXIS = 26;
  const view = {from: 0, to: T.end}, colors = {};
  const byRow = T.rows.map(() => []);
  M.row.forEach((row, i) => byRow[row].push(i));
  const longest = byRow.map(list => list.reduce((most, i) => Math.max(most, M.length[i]), 0));

  const bar = element(host, "div", {class: "tools"});
  const pick = labelled("Step", T.steps.map((s, i) => [i, s.attempt > 1 ? `${s.step} (attempt ${s.attempt})` : s.step]));
  const paint = labelled("Colour by", [["version", "policy version"], ["group", "group"], ["finish", "finish reason"], ["length", "tokens"]]);
  const press = (text, name, act) => element(bar, "button", {type: "button", "aria-label": name}, text).addEventListener("click", act);
  press("‹", "Previous step", () => choose(+pick.value - 1));
  press("›", "Next step", () => choose(+pick.value + 1));
  press("+", "Zoom in", () => zoom(0.5));
  press("−", "Zoom out", () => zoom(2));
  press("Whole run", "Show the whole run", () => look(0, T.end));
  const legend = element(host, "ul", {class: "legend"});
  for (const [name, color] of [["rollout", "blue"], ["training", "orange"], ["weight sync", "green"], ["evaluation", "purple"]]) {
    const item = element(legend, "li");
    element(item, "i", {style: `background:var(--${color})`});
    item.append(name);
  }
  const overview = element(host, "canvas", {class: "overview", "aria-hidden": "true"});
  const scroller = element(host, "div", {class: "rows"});
  const canvas = element(scroller, "canvas", {class: "turns", tabindex: 0, role: "img",
    "aria-label": `Timeline of ${M.row.length} spans on ${T.rows.length} ranks. Arrow keys pan, plus and minus zoom.`});
  const note = element(host, "p", {class: "muted"});

  function labelled(text, options) {
    const label = element(bar, "label", {}, text), select = element(label, "select");
    for (const [value, name] of options) element(select, "option", {value}, name);
    return select;
  }

  const heights = T.rows.map(row => {
    if (row.role === "coordinator") return 18;
    if (row.role === "trainer") return Math.min(30, 8 * row.lanes + 4);
    return T.rows.length > 40 ? 22 : Math.max(26, Math.min(row.lanes * 9, 120));
  });
  const tops = [];
  const height = heights.reduce((y, h, i) => { tops[i] = y; return y + h + 8; }, AXIS);

  function fit(node, high) {
    const wide = node.clientWidth, ratio = Math.min(devicePixelRatio || 1, 2);
    node.width = wide * ratio;
    node.height = high * ratio;
    node.style.height = high + "px";
    const g = node.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "12px " + getComputedStyle(document.documentElement).getPropertyValue("--sans");
    g.textBaseline = "middle";
    return [g, wide];
  }

  const scale = wide => time => GUTTER + (time - view.from) / (view.to - view.from) * (wide - GUTTER - 2);

  function color(i, row) {
    const kind = M.kinds[M.kind[i]];
    if (kind !== "turn") return colors[KINDS[kind] || "grey"];
    if (paint.value === "version") return colors[CYCLE[Math.max(0, M.version[i] ?? 0) % CYCLE.length]];
    if (paint.value === "finish") return colors[{stop: "blue", length: "orange", abort: "red"}[M.finishes[M.finish[i]].toLowerCase()] || "grey"];
    if (paint.value === "length") return `color-mix(in srgb, ${colors.red} ${Math.round(100 * (M.tokens[i] || 0) / mostTokens)}%, ${colors.sky})`;
    let hash = 7;
    for (const letter of M.id[i].split(".")[0]) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
    return colors[CYCLE[hash % CYCLE.length]];
  }
  const mostTokens = M.tokens.reduce((most, n) => Math.max(most, n || 0), 1);
  const detailed = (from, to) => !T.kept || T.kept.some(([a, b]) => from < b && to > a);

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ink", "soft", "rule", "faint", "paper", "blue", "orange", "green", "red", "purple", "sky", "grey", "pale"])
      colors[name] = style.getPropertyValue("--" + name).trim();
    drawOverview();
    const [g, wide] = fit(canvas, height), x = scale(wide);
    drawAxis(g, wide, x);
    let drawn = 0;
    T.rows.forEach((row, r) => {
      g.fillStyle = colors.soft;
      g.fillText(shorten(g, row.name), 0, tops[r] + heights[r] / 2);
      g.fillStyle = colors.faint;
      g.fillRect(GUTTER, tops[r], wide - GUTTER, heights[r]);
      if (row.occupancy.length) drawOccupancy(g, row, r, x);
      drawn += drawMarks(g, row, r, x, wide);
    });
    canvas.dataset.drawn = drawn;
    note.textContent = detailed(view.from, view.to) ? (T.kept ? "Single turns are kept for some steps of this long run; elsewhere the grey area shows how many ran." : "")
      : "No single turns are kept for this part of the run: the grey area shows how many ran. trace.json.gz has them all.";
  }

  function shorten(g, name) {
    while (g.measureText(name).width > GUTTER - 8) name = name.slice(0, -2) + "…";
    return name;
  }

  function drawAxis(g, wide, x) {
    const marks = ticks(view.from / 1000, view.to / 1000, Math.max(2, wide / 110));
    const digits = Math.max(0, -Math.floor(Math.log10((marks[1] - marks[0]) || 1) + 1e-9)) + ((marks[1] - marks[0]) % 1 === 0.25 ? 1 : 0);
    g.textAlign = "center";
    for (const second of marks) {
      const at = x(second * 1000);
      if (at < GUTTER + 14 || at > wide - 20) continue;
      g.fillStyle = colors.soft;
      g.fillText(second.toFixed(Math.min(4, digits)) + " s", at, 10);
      g.fillStyle = colors.rule;
      g.fillRect(at, AXIS - 6, 1, height);
    }
    g.textAlign = "left";
  }

  function drawOccupancy(g, row, r, x) {
    const most = Math.max(1, ...row.occupancy), bin = T.end / row.occupancy.length;
    const first = Math.max(0, Math.floor(view.from / bin)), last = Math.min(row.occupancy.length - 1, Math.ceil(view.to / bin));
    g.fillStyle = colors.pale;
    if (view.to - view.from < bin * 60 && detailed(view.from, view.to)) return;
    g.globalAlpha = 0.6;
    for (let i = first; i <= last; i++) {
      const left = Math.max(GUTTER, x(i * bin)), high = heights[r] * row.occupancy[i] / most;
      g.fillRect(left, tops[r] + heights[r] - high, Math.max(1, x((i + 1) * bin) - left + 0.3), high);
    }
    g.globalAlpha = 1;
  }

  // Marks of a row are sorted by start: begin at the first that could reach into the window if it were the longest.
  function firstMark(r) {
    const list = byRow[r];
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (M.start[list[middle]] < view.from - longest[r]) low = middle + 1; else high = middle;
    }
    return low;
  }

  function box(i, r, x) {
    const lane = heights[r] / T.rows[r].lanes, left = Math.max(GUTTER, x(M.start[i]));
    const thick = Math.max(0.8, Math.min(lane - (lane > 4 ? 1.5 : 0.3), 16));
    return [left, tops[r] + M.lane[i] * lane + (lane - thick) / 2, Math.max(0.8, x(M.start[i] + M.length[i]) - left - 0.5), thick];
  }

  function drawMarks(g, row, r, x, wide) {
    let drawn = 0;
    for (let k = firstMark(r); k < byRow[r].length; k++) {
      const i = byRow[r][k];
      if (M.start[i] > view.to) break;
      if (M.start[i] + M.length[i] < view.from) continue;
      g.fillStyle = color(i, row);
      const [left, top, width, thick] = box(i, r, x);
      g.fillRect(left, top, Math.min(width, wide - left), thick);
      drawn++;
    }
    return drawn;
  }

  function drawOverview() {
    const [g, wide] = fit(overview, 34), x = time => GUTTER + time / (T.end || 1) * (wide - GUTTER - 2);
    g.fillStyle = colors.soft;
    g.fillText("whole run", 0, 17);
    T.rows.forEach((row, r) => {
      if (row.role !== "coordinator") return;
      for (const i of byRow[r]) {
        g.fillStyle = color(i, row);
        g.fillRect(x(M.start[i]), 12, Math.max(0.7, x(M.start[i] + M.length[i]) - x(M.start[i]) - 0.3), 10);
      }
    });
    g.fillStyle = colors.ink;
    g.globalAlpha = 0.12;
    g.fillRect(x(view.from), 2, Math.max(3, x(view.to) - x(view.from)), 30);
    g.globalAlpha = 1;
    g.strokeStyle = colors.ink;
    g.strokeRect(x(view.from), 2.5, Math.max(3, x(view.to) - x(view.from)), 29);
  }

  function look(from, to) {
    const span = Math.max(2, Math.min(to - from, T.end || 2));
    view.from = Math.max(0, Math.min(from, T.end - span));
    view.to = view.from + span;
    draw();
  }
  function zoom(factor, at = (view.from + view.to) / 2) { look(at - (at - view.from) * factor, at + (view.to - at) * factor); }
  function choose(i) {
    if (!T.steps[i]) return;
    pick.value = i;
    const s = T.steps[i], pad = (s.end - s.start) * 0.03;
    look(s.start - pad, s.end + pad);
  }
  const timeAt = event => view.from + (event.clientX - canvas.getBoundingClientRect().left - GUTTER) / (canvas.clientWidth - GUTTER) * (view.to - view.from);

  function describe(i, row) {
    const kind = M.kinds[M.kind[i]], seconds = M.length[i] / 1000;
    const lines = [kind === "turn" ? `turn ${M.id[i]}` : `${kind}${M.id[i] ? `, step ${M.id[i]}` : ""}`, `${row.name}, ${seconds.toFixed(3)} s`];
    if (M.tokens[i] !== null) lines.push(`${M.tokens[i]} tokens` + (seconds ? `, ${short(M.tokens[i] / seconds)} tokens/s` : ""));
    if (M.version[i] !== null) lines.push(`policy version ${M.version[i]}`);
    if (M.finishes[M.finish[i]]) lines.push(`finish: ${M.finishes[M.finish[i]]}`);
    return lines.join("\n");
  }

  function hover(event) {
    const area = canvas.getBoundingClientRect(), px = event.clientX - area.left, py = event.clientY - area.top, x = scale(canvas.clientWidth);
    const r = tops.findIndex((top, i) => py >= top && py <= top + heights[i]);
    let hit = -1;
    for (let k = r < 0 ? 1e9 : firstMark(r); k < (byRow[r] || []).length && M.start[byRow[r][k]] <= view.to; k++) {
      const [left, top, width, thick] = box(byRow[r][k], r, x);
      if (px >= left - 1 && px <= left + width + 1 && py >= top - 1 && py <= top + thick + 1) hit = byRow[r][k];
    }
    if (hit < 0) hideTip(); else showTip(event, describe(hit, T.rows[r]));
  }

  let drag = null;
  canvas.addEventListener("pointerdown", event => { drag = {x: event.clientX, from: view.from, to: view.to}; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", event => {
    if (!drag) { hover(event); return; }
    const shift = (drag.x - event.clientX) / (canvas.clientWidth - GUTTER) * (drag.to - drag.from);
    look(drag.from + shift, drag.to + shift);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.004), timeAt(event));
  }, {passive: false});
  canvas.addEventListener("keydown", event => {
    const step = (view.to - view.from) / 5;
    const act = {ArrowLeft: () => look(view.from - step, view.to - step), ArrowRight: () => look(view.from + step, view.to + step),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Home: () => look(0, T.end)}[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  function jump(event) {
    const time = (event.offsetX - GUTTER) / (overview.clientWidth - GUTTER) * T.end, half = (view.to - view.from) / 2;
    look(time - half, time + half);
  }
  overview.addEventListener("pointerdown", event => { overview.setPointerCapture(event.pointerId); jump(event); });
  overview.addEventListener("pointermove", event => { if (event.buttons) jump(event); });
  pick.addEventListener("change", () => choose(+pick.value));
  paint.addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = 0;
  new ResizeObserver(() => { if (canvas.clientWidth !== width) { width = canvas.clientWidth; draw(); } }).observe(scroller);

  if (T.steps.length) {
    const middle = Math.floor(T.steps.length / 2), seen = T.kept ? T.steps.findIndex((s, i) => i >= middle && T.kept.some(([a]) => Math.abs(a - s.start) < 1)) : middle;
    choose(seen < 0 ? 0 : seen);
  } else look(0, T.end);
})();
