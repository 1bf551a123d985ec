// The lending report's figures. DATA: {x: minutes since start, curves: {name: values}}, written by rose/parts/lending/operator/report.py.

function draw(id, title, text, curves, options = {}) {
  const series = curves.map(([key, name, color]) => ({name, color: `var(--${color})`, y: DATA.curves[key]}));
  lineChart(document.getElementById(id), DATA.x, series,
    {title, text, fromZero: true, xTitle: "Minutes since start", xName: "Minute", height: 210, ...options});
}

function drawAll() {
  draw("fig-attainment", "SLO attainment", "so far: share of the requests within both P99 targets.",
    [["attained_with", "while lending", "blue"], ["attained_without", "otherwise", "orange"]], {y: [0, 1], format: percent});
  draw("fig-requests", "Requests running", "in each engine.", [["online", "online", "orange"], ["rollout", "rollouts", "blue"]]);
  draw("fig-tokens", "Lent tokens per second,", "of prompts and generated.", [["prompt_rate", "prompt", "sky"], ["made_rate", "generated", "blue"]]);
  draw("fig-gate", "Gate open,", "share of the time with rollouts to compute.", [["gate", "open", "green"]], {y: [0, 1], format: percent});
  draw("fig-losses", "Evictions", "so far.", [["evicted", "requests evicted", "red"]]);
  draw("fig-memory", "KV memory,", "in GiB: what each engine may use, and what it uses.",
    [["held", "online, may use", "orange"], ["used", "online, uses", "red"], ["budget", "rollouts, may use", "blue"], ["rollout_used", "rollouts, use", "sky"]]);
}

