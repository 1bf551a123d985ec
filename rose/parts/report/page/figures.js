// The report's figures: which numbers, in which colours, with which captions.
const PHASES = {rollout: "var(--blue)", train: "var(--orange)", sync: "var(--green)", idle: "var(--pale)", other: "var(--grey)"};
const figure = id => document.getElementById(id);
const curve = name => DATA.curves[name] || [];

function drawSuccess() {
  const xs = DATA.curves.x, evals = DATA.evals;
  const all = [...xs, ...evals.map(e => e.step)];
  const range = all.length ? [Math.min(...all), Math.max(...all)] : null;
  const hues = HUES.filter(hue => !["var(--blue)", "var(--red)"].includes(hue));
  const m = DATA.members;
  const members = m.names.slice(0, hues.length).map((name, i) => ({name, color: hues[i], y: m.y[i]}));
  const lines = [{name: "training", color: "var(--blue)", y: curve("success")}, ...members];
  lineChart(figure("fig-success"), xs, lines, {
    title: "Success rate.", text: (members.length ? "Lines" : "Line") + ": training episodes of each step. Points: held-out tasks with 95% intervals.",
    legend: [...lines.map(s => [s.name, s.color]), ["held-out", "var(--red)"]],
    x: range, y: [0, 1], format: percent, smooth: true, extra: c => evals.forEach(e => {
      const x = c.x(e.step), mark = element(c.svg, "g", {class: "held-out"});
      element(mark, "line", {x1: x, x2: x, y1: c.y(e.low), y2: c.y(e.high), style: "stroke:var(--red)", "stroke-width": 2});
      for (const v of [e.low, e.high]) element(mark, "line", {x1: x - 4, x2: x + 4, y1: c.y(v), y2: c.y(v), style: "stroke:var(--red)", "stroke-width": 2});
      element(mark, "circle", {cx: x, cy: c.y(e.rate), r: 4.5, style: "fill:var(--red);stroke:var(--paper)", "stroke-width": 1.5});
      mark.addEventListener("pointermove", event => showTip(event, `Held-out, step ${e.step}: ${percent(e.rate)}\n95% interval ${percent(e.low)} to ${percent(e.high)}\n${e.successes} of ${e.n} solved`));
      mark.addEventListener("pointerleave", hideTip);
    })});
}

function simple(id, title, text, names, options = {}) {
  const series = names.map(([key, name], i) => ({name, color: HUES[i], y: curve(key)})).filter(s => s.y.length);
  lineChart(figure(id), DATA.curves.x, series, {title, text, smooth: true, ...options});
}

function drawPhases() {
  const names = Object.keys(PHASES);
  barChart(figure("fig-phases"), DATA.phases.map(row => {
    const total = names.reduce((sum, name) => sum + row[name], 0);
    const label = row.first === row.last ? `Step ${row.first}` : `Mean of steps ${row.first} to ${row.last}`;
    return {from: row.first - 0.5, to: row.last + 0.5, parts: names.map(name => ({color: PHASES[name], value: row[name]})),
      tip: `${label}: ${total.toFixed(2)} s\n` + names.filter(name => row[name] > 0)
        .map(name => `${name}: ${row[name].toFixed(2)} s (${percent(row[name] / (total || 1))})`).join("\n")};
  }), {title: "Phases of each step,", text: "in seconds. Idle: nothing to do but wait; other: not in any phase.", stacked: true, height: 250,
    legend: names.filter(name => DATA.phases.some(row => row[name] > 0)).map(name => [name, PHASES[name]])});
}

function drawThroughput() {
  const e = DATA.engines, many = e.names.length > HUES.length;
  const series = e.names.map((name, i) => ({name, y: e.y[i], color: many ? "var(--grey)" : HUES[i], thin: many}));
  if (many) series.push({name: "mean", color: "var(--blue)", y: e.x.map((_, i) => {
    const values = e.y.map(row => row[i]).filter(v => v !== null);
    return values.length ? values.reduce((a, b) => a + b) / values.length : null;
  })});
  lineChart(figure("fig-throughput"), e.x, series.reverse(), {title: "Generated tokens per second,", fromZero: true, height: 210,
    text: many ? "each of the engines (grey) and their mean." : "by engine.", legend: many ? [] : series.slice().reverse().map(s => [s.name, s.color])});
}

// Shares of trajectories, early against late: `h` has the edges of its bins, or a label for each.
function drawHistogram(id, h, unit, options) {
  const colors = ["var(--pale)", "var(--blue)"];
  const label = side => side.first === side.last ? `step ${side.first}` : `steps ${side.first} to ${side.last}`;
  const sides = h ? h.sides : [];
  const use = sides.length === 1 ? [colors[1]] : colors;
  const labels = h ? h.labels || h.edges.slice(1).map((high, i) => `${short(h.edges[i])} to ${short(high)}`) : [];
  const bars = labels.map((words, i) => ({from: i, to: i + 1,
    parts: sides.map((side, k) => ({color: use[k], value: side.shares[i]})),
    tip: `${words} ${unit}\n` + sides.map(side => `${label(side)}: ${percent(side.shares[i])}`).join("\n")}));
  const every = Math.max(1, Math.ceil(bars.length / Math.max(3, figure(id).clientWidth / 64)));
  const ticks = h && h.edges ? h.edges.map((edge, i) => [i, short(edge)]) : labels.map((words, i) => [i + 0.5, words]);
  barChart(figure(id), bars, {legend: sides.map((side, k) => [label(side), use[k]]), format: percent,
    xTicks: ticks.filter((_, i) => i % every === 0), ...options});
}

function drawAll() {
  drawSuccess();
  simple("fig-reward", "Mean reward", "of the trajectories of each step.", [["reward_mean", "reward"]]);
  drawPhases();
  drawThroughput();
  drawHistogram("fig-lengths", DATA.lengths, "tokens", {title: "Response length,", text: "share of the trajectories per bin of generated tokens.", xTitle: "Response tokens"});
  drawHistogram("fig-rewards", DATA.rewards, "reward", {title: "Rewards,", text: "share of the trajectories.", xTitle: "Reward"});
  drawHistogram("fig-turnshares", DATA.turns, "turns", {title: "Turns,", text: "share of the trajectories.", xTitle: "Turns"});
  simple("fig-tokens", "Response tokens", "over training.", [["response_tokens_mean", "mean"], ["response_tokens_max", "longest"]], {fromZero: true});
  simple("fig-turns", "Turns", "of the trajectories of each step.", [["turns_mean", "mean"]], {fromZero: true});
  simple("fig-unusable", "Unusable", "tool calls, which could not be read, and trajectories that a limit truncated, in each step.", [["invalid_calls", "calls"], ["truncated", "truncated"]], {fromZero: true});
  simple("fig-mismatch", "Mismatch KL,", "engine against trainer, in nats per token.", [["mismatch_kl", "KL"]], {log: true});
  simple("fig-ratio", "Largest importance ratio", "of trainer to engine, over the tokens of a step.", [["mismatch_max_ratio", "ratio"]], {log: true});
  simple("fig-clipped", "Clipped tokens,", "share of a step's: by the algorithm's clip, and by the cap of importance weights.", [["clip_fraction", "clip"], ["importance_capped", "cap"]], {format: percent, fromZero: true});
  simple("fig-staleness", "Staleness,", "versions between the weights that made a token and those that it trained.", [["staleness_mean", "mean"], ["staleness_max", "most"]], {fromZero: true});
  simple("fig-lr", "Learning rate.", "", [["lr", "rate"]], {fromZero: true, smooth: false});
  simple("fig-entropy", "Policy entropy,", "in nats per token.", [["entropy", "entropy"]], {fromZero: true});
  if (DATA.curves.reference_kl) simple("fig-reference", "KL to the reference,", "policy against the model that the run began with, in nats per token.", [["reference_kl", "KL"]], {fromZero: true});
  simple("fig-equal", "Groups with equal rewards,", "share of the trained ones, which teach nothing where rewards of a group are compared.", [["groups_equal", "share"]], {fromZero: true});
  simple("fig-grad", "Gradient norm", "before clipping.", [["grad_norm", "norm"]], {fromZero: true});
}

