// The figures of a simulation report. rose/parts/simulator/study/page.py writes DATA; a figure without a place in the page is not drawn.
const place = id => document.getElementById(id);
const PHASES = {rollout: "var(--blue)", train: "var(--orange)", sync: "var(--green)", idle: "var(--pale)"};
const KINDS = {dedicated: "var(--blue)", cooperative: "var(--red)", spot: "var(--purple)", serverless: "var(--sky)", hybrid: "var(--orange)"};
const TEXT = 132, ROW = 26;

// A dot and its 95% interval per row, on a logarithmic scale with a line at 1.
function drawGains() {
  const host = place("fig-gains"), rows = DATA.gains;
  if (!host) return;
  caption(host, "Gain", DATA.gainWords);
  if (!rows.length) { element(host, "p", {class: "empty"}, "There is nothing to compare with."); return; }
  const wide = Math.max(260, host.clientWidth), high = rows.length * ROW + 36, left = Math.min(220, wide * 0.4);
  const ends = rows.flatMap(r => [r.mean, r.low ?? r.mean, r.high ?? r.mean, 1]);
  const low = Math.min(...ends) / 1.05, top = Math.max(...ends) * 1.05;
  const x = v => left + Math.log(v / low) / Math.log(top / low) * (wide - left - 70);
  const svg = element(host, "svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "Gains with intervals"});
  for (const v of ticks(low, top, 6)) {
    if (v <= 0) continue;
    element(svg, "line", {class: v === 1 ? "axis" : "grid", x1: x(v), x2: x(v), y1: 0, y2: high - 28});
    element(svg, "text", {x: x(v), y: high - 12, "text-anchor": "middle"}, short(v));
  }
  element(svg, "line", {class: "axis", x1: x(1), x2: x(1), y1: 0, y2: high - 28});
  rows.forEach((r, i) => {
    const y = i * ROW + ROW / 2, better = r.mean >= 1 ? "var(--blue)" : "var(--red)";
    element(svg, "text", {x: left - 10, y: y + 4, "text-anchor": "end"}, r.name);
    if (r.low !== null) element(svg, "line", {x1: x(r.low), x2: x(r.high), y1: y, y2: y, style: `stroke:${better}`, "stroke-width": 2});
    element(svg, "circle", {cx: x(r.mean), cy: y, r: 4.5, style: `fill:${better}`});
    element(svg, "text", {x: wide - 4, y: y + 4, "text-anchor": "end"}, `${r.mean.toFixed(2)} ×`);
  });
}

function drawPhases() {
  const host = place("fig-phases"), rows = DATA.phases;
  if (!host) return;
  caption(host, "Where a step's time goes,", "in seconds, mean over steps and seeds.", Object.entries(PHASES));
  const wide = Math.max(260, host.clientWidth), high = rows.length * ROW + 30, left = Math.min(220, wide * 0.4);
  const most = Math.max(...rows.map(r => r.total));
  const x = v => left + v / most * (wide - left - 60);
  const svg = element(host, "svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "Phases of a step by system"});
  for (const v of ticks(0, most, 6)) {
    element(svg, "line", {class: "grid", x1: x(v), x2: x(v), y1: 0, y2: high - 24});
    element(svg, "text", {x: x(v), y: high - 8, "text-anchor": "middle"}, short(v));
  }
  rows.forEach((r, i) => {
    let at = 0;
    element(svg, "text", {x: left - 10, y: i * ROW + ROW / 2 + 4, "text-anchor": "end"}, r.name);
    for (const [name, color] of Object.entries(PHASES)) {
      const bar = element(svg, "rect", {x: x(at), y: i * ROW + 5, width: Math.max(0, x(at + r[name]) - x(at)), height: ROW - 10, style: `fill:${color}`});
      bar.addEventListener("pointermove", event => showTip(event, `${r.name}, ${name}: ${r[name].toFixed(1)} s of ${r.total.toFixed(1)} s`));
      bar.addEventListener("pointerleave", hideTip);
      at += r[name];
    }
    element(svg, "text", {x: x(at) + 6, y: i * ROW + ROW / 2 + 4}, r.total.toFixed(1));
  });
}

// A row per worker, darker where it computed more; the steps' phases above.
let chosen = DATA.ours;
function drawTimeline() {
  const host = place("fig-timeline"), names = Object.keys(DATA.pictures);
  if (!host || !names.length) return;
  const P = DATA.pictures[chosen] || DATA.pictures[names[0]];
  caption(host, "Engines over time,", `seed ${DATA.seed}: the darker, the more of the time it had a turn. Above: the steps' phases.`,
    [...Object.entries(PHASES).slice(0, 3), ...[...new Set(P.kinds)].map(k => [k, KINDS[k]])]);
  const bar = element(host, "div", {class: "tools"}), label = element(bar, "label", {}, "System"), select = element(label, "select");
  for (const name of names) element(select, "option", name === chosen ? {value: name, selected: ""} : {value: name}, name);
  select.addEventListener("change", () => { chosen = select.value; drawTimeline(); drawServing(); });
  const row = P.workers.length > 40 ? 9 : 15, wide = Math.max(260, host.clientWidth), high = (P.workers.length + 2) * row + 34;
  const x = t => TEXT + t / P.end * (wide - TEXT - 4), svg = element(host, "svg", {viewBox: `0 0 ${wide} ${high}`, role: "img",
    "aria-label": `Timeline of ${P.workers.length} engines`});
  element(svg, "text", {x: TEXT - 8, y: row, "text-anchor": "end"}, "steps");
  P.steps.forEach((s, i) => ["rollout", "train", "sync"].forEach((name, k) => {
    const piece = element(svg, "rect", {x: x(s[k]), y: 2, width: Math.max(0, x(s[k + 1]) - x(s[k])), height: row + 2, style: `fill:${PHASES[name]}`});
    piece.addEventListener("pointermove", event => showTip(event, `step ${i}, ${name}: ${(s[k + 1] - s[k]).toFixed(1)} s`));
    piece.addEventListener("pointerleave", hideTip);
  }));
  P.workers.forEach((name, i) => {
    const y = (i + 1.6) * row, shares = P.busy[i], bin = P.end / shares.length;
    if (row > 10 || i % 4 === 0) element(svg, "text", {x: TEXT - 8, y: y + Math.min(11, row), "text-anchor": "end"}, name);
    element(svg, "rect", {x: TEXT, y, width: wide - TEXT - 4, height: row - 2, style: "fill:var(--faint)"});
    for (let a = 0; a < shares.length;) {
      let b = a + 1;
      while (b < shares.length && shares[b] === shares[a]) b++;
      if (shares[a] > 0) element(svg, "rect", {x: x(a * bin), y, width: Math.max(0.4, x(b * bin) - x(a * bin)), height: row - 2,
        style: `fill:${KINDS[P.kinds[i]]};opacity:${(0.15 + 0.85 * shares[a]).toFixed(2)}`});
      a = b;
    }
  });
  for (const v of ticks(0, P.end, Math.max(2, wide / 120)))
    element(svg, "text", {x: x(v), y: high - 8, "text-anchor": "middle"}, `${short(v)} s`);
}

function drawServing() {
  const P = DATA.pictures[chosen] || {serving: {}}, S = P.serving;
  const draw = (id, title, text, curves, options) => {
    if (!place(id)) return;
    const series = curves.filter(([key]) => S[key]).map(([key, name, color]) => ({name, color: `var(--${color})`, y: S[key]}));
    lineChart(place(id), S.x || [], series, {title, text, fromZero: true, height: 220, xTitle: "Seconds since start", xName: "Second", ...options});
  };
  draw("fig-load", "Online load", `of the cooperative devices under ${chosen}, mean.`,
    [["busy", "online requests compute, alone", "orange"], ["lent", "with a rollout turn", "blue"]], {y: [0, 1], format: percent});
  draw("fig-slo", "Online requests within both P99 targets", `under ${chosen}; the dashed line is the target.`,
    [["attained", "attained", "blue"]], {y: [Math.min(0.98, ...(S.attained || [1]).filter(v => v !== null)) - 0.005, 1], format: percent, extra: c => {
      element(c.svg, "line", {x1: c.m.left, x2: c.width - c.m.right, y1: c.y(0.99), y2: c.y(0.99), style: "stroke:var(--red)", "stroke-dasharray": "5 4", "stroke-width": 1.5});
    }});
}

function drawSweep() {
  const W = DATA.sweep;
  if (!W) return;
  for (const [id, key, title] of [["fig-sweep-step", "step_s", "Step time, s,"], ["fig-sweep-rate", "trajectories_s", "Trajectories trained per second,"]])
    if (place(id)) lineChart(place(id), W.x, W.systems.map((s, i) => ({name: s.name, color: HUES[i % HUES.length], y: s[key]})),
      {title, text: `over ${W.axis}.`, fromZero: true, xTitle: W.axis, xName: W.axis});
}

function drawAll() {
  drawGains();
  drawPhases();
  drawTimeline();
  drawServing();
  drawSweep();
}
