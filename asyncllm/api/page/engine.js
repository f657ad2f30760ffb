// The live view of the engine, fed by its events.

import { ApiFailure, call, events } from "./events.js";

const $ = (id) => document.getElementById(id);
const STATES = ["free", "cached", "used", "shared"];
const HISTORY = 120; // snapshots, two a second

const rates = [];
let paused = false;
let last = null;
let connection = null; // the AbortController of the events that are read

// Reads events for as long as the page is there; `onDenied` is called where a key is asked for.
export async function startEngineView(onDenied) {
  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    reconnect();
  });
  document.addEventListener("visibilitychange", reconnect);
  new ResizeObserver(() => last !== null && drawBlocks(last.blocks)).observe($("blocks").parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last !== null && drawBlocks(last.blocks));
  for (let wait = 1000; ; wait = Math.min(wait * 2, 15000)) {
    await wanted();
    connection = new AbortController();
    try {
      const response = await call("engine/events", { signal: connection.signal });
      for await (const { name, data } of events(response)) {
        if (name === "end") throw new Error(JSON.parse(data));
        wait = 1000;
        setConnection("Live", "live");
        show(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof ApiFailure && [401, 403].includes(error.status)) await onDenied();
      else if (error instanceof ApiFailure && error.status === 429) setConnection("Too many viewers, trying again", "lost");
      else if (!connection.signal.aborted) setConnection("Connection lost, trying again", "lost");
    }
    if (!connection.signal.aborted) await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

// Nobody is served events who does not look at them.
function reconnect() {
  if (paused || document.hidden) {
    connection?.abort();
    setConnection(paused ? "Paused" : "Waiting", "");
  } else {
    wake();
  }
}

let wake = () => undefined;

function wanted() {
  if (!paused && !document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    wake = resolve;
  });
}

function setConnection(text, className) {
  if ($("connection").textContent !== text) $("connection").textContent = text;
  $("connection").className = `connection ${className}`;
}

function show(snapshot) {
  last = snapshot;
  const { blocks, times } = snapshot;
  set("running", number(snapshot.running));
  set("waiting", number(snapshot.waiting));
  set("rate", number(Math.round(snapshot.tokens_per_second)));
  set("ttft", pair(times.first_token_p50, times.first_token_p95));
  set("itl", pair(times.between_tokens_p50, times.between_tokens_p95));
  set("hits", `${(100 * snapshot.prefix_hit_rate).toFixed(0)} %`);
  for (const name of ["finished", "aborted", "preemptions"]) set(name, number(snapshot[name]));
  set("blocks-used", number(blocks.used - blocks.shared));
  set("blocks-shared", number(blocks.shared));
  set("blocks-cached", number(blocks.cached));
  set("blocks-free", number(blocks.free));
  set("blocks-summary", blocks.per_cell > 1 ? `${number(blocks.total)} blocks, ${blocks.per_cell} a cell` : `${number(blocks.total)} blocks`);
  drawRate(snapshot.tokens_per_second);
  drawBlocks(blocks);
  showRequests(snapshot);
}

function set(id, text) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
}

function number(value) {
  return value.toLocaleString("en");
}

function pair(median, high) {
  if (median === null) return "–";
  return `${milliseconds(median)} / ${milliseconds(high)} ms`;
}

function milliseconds(seconds) {
  const value = 1000 * seconds;
  return value < 10 ? value.toFixed(1) : number(Math.round(value));
}

function drawRate(rate) {
  rates.push(rate);
  if (rates.length > HISTORY) rates.shift();
  const most = Math.max(...rates, 1);
  const points = rates.map((value, i) => `${(240 * (HISTORY - rates.length + i)) / (HISTORY - 1)},${46 - (44 * value) / most}`);
  $("rate-line").setAttribute("points", points.join(" "));
  set("rate-summary", Math.max(...rates) === 0 ? "No tokens in the last minute" : `At most ${number(Math.round(most))}`);
}

function drawBlocks({ cells }) {
  const canvas = $("blocks");
  const width = canvas.clientWidth;
  if (width === 0 || cells.length === 0) return;
  const size = Math.max(4, Math.min(14, Math.floor(Math.sqrt((width * 220) / cells.length))));
  const columns = Math.max(1, Math.floor(width / size));
  const height = size * Math.ceil(cells.length / columns);
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colours = STATES.map((state) => style.getPropertyValue(`--${state}`));
  const surface = style.getPropertyValue("--surface");
  const side = size - (size > 5 ? 2 : 1);
  for (let i = 0; i < cells.length; i += 1) {
    const state = Number(cells[i]);
    const x = (i % columns) * size;
    const y = Math.floor(i / columns) * size;
    paint.fillStyle = colours[state === 1 ? 0 : state];
    paint.fillRect(x, y, side, side);
    if (state === 1) { // half a cell: told apart without its colour too
      paint.fillStyle = colours[1];
      paint.beginPath();
      paint.moveTo(x, y);
      paint.lineTo(x + side, y);
      paint.lineTo(x, y + side);
      paint.fill();
    } else if (state === 3 && side > 4) { // a ring
      paint.fillStyle = surface;
      paint.fillRect(x + side / 3, y + side / 3, side / 3, side / 3);
    }
  }
}

function showRequests({ requests, running, waiting }) {
  const rows = requests.map((request) => {
    const row = document.createElement("tr");
    const cells = [
      request.number,
      request.stage,
      number(request.prompt_tokens),
      number(request.generated_tokens),
      `${request.age.toFixed(1)} s`,
    ];
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  });
  $("requests").replaceChildren(...rows);
  $("requests-none").hidden = rows.length > 0;
  const more = running + waiting - rows.length;
  set("requests-more", more > 0 ? `the oldest ${rows.length}, and ${number(more)} more` : "");
}
