// The matrix and graph view of a page of layouts; what they are is JSON in #layouts, see layout_page.py.
"use strict";

const layouts = JSON.parse(document.getElementById("layouts").textContent).map(unpacked);
const byId = (id) => document.getElementById(id);
const canvas = byId("canvas"), pen = canvas.getContext("2d"), tip = byId("tip"), status_ = byId("status");
const TIES = 60000; // drawn of a graph, at most

let layout = layouts[0];
let mode = "matrix";
let view = { scale: 1, x: 0, y: 0 }; // a point p of the picture is at view.x + p.x * view.scale
let fitted = true; // whether the whole is in view, as it is to be in a window of another size
let hovered = null; // [row, column] of the matrix, or a node of the graph
let spread = null; // {steps, now, last, timer}

// -- data ------------------------------------------------------------------------------------------------------------

function numbers(text) {
  const bytes = Uint8Array.from(atob(text.slice(1)), (letter) => letter.charCodeAt(0));
  return text[0] === "2" ? new Uint16Array(bytes.buffer) : new Uint32Array(bytes.buffer);
}

function unpacked(packed) {
  const start = numbers(packed.start), cols = numbers(packed.cols), counts = packed.counts && numbers(packed.counts);
  return { ...packed, start, cols, counts, graph: null, positions: {} };
}

/** The number of stored blocks of a cell. */
function stored(of, row, col) {
  let low = of.start[row], high = of.start[row + 1] - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (of.cols[middle] === col) return of.counts ? of.counts[middle] : 1;
    if (of.cols[middle] < col) low = middle + 1;
    else high = middle - 1;
  }
  return 0;
}

/** Each node's neighbours, none twice and not itself; and for squares the outputs that each input leads to. */
function graphOf(of) {
  if (of.graph) return of.graph;
  const [rows, cols] = of.cells, square = rows === cols, nodes = square ? rows : rows + cols;
  const near = Array.from({ length: nodes }, () => []), ahead = square ? Array.from({ length: nodes }, () => []) : null;
  for (let row = 0; row < rows; row++) {
    for (let k = of.start[row]; k < of.start[row + 1]; k++) {
      const col = square ? of.cols[k] : of.cols[k] + rows;
      if (square) ahead[col].push(row);
      if (row === col) continue;
      near[row].push(col);
      near[col].push(row);
    }
  }
  of.graph = { square, nodes, ahead, near: near.map((list) => [...new Set(list)].sort((a, b) => a - b)) };
  return of.graph;
}

/** Where the nodes are in a unit square: [x0, y0, x1, y1, ...]. */
function positionsOf(of, name) {
  if (of.positions[name]) return of.positions[name];
  const graph = graphOf(of), n = graph.nodes, at = new Float32Array(2 * n);
  const put = (node, x, y) => { at[2 * node] = x; at[2 * node + 1] = y; };
  if (name === "columns") {
    const [rows, cols] = of.cells;
    for (let i = 0; i < rows; i++) put(i, 0.9, 0.05 + (0.95 * (i + 0.5)) / rows);
    for (let j = 0; j < cols; j++) put(rows + j, 0.1, 0.05 + (0.95 * (j + 0.5)) / cols);
  } else if (name === "torus") {
    const [height, width] = of.torus, most = Math.max(height, width);
    for (let i = 0; i < n; i++) put(i, ((i % width) + 0.5) / most, (Math.floor(i / width) + 0.5) / most);
  } else if (name === "hubs") {
    const order = [...Array(n).keys()].sort((a, b) => graph.near[b].length - graph.near[a].length || a - b);
    order.forEach((node, rank) => {
      const radius = 0.48 * Math.sqrt((rank + 0.5) / n), angle = 2.399963 * rank; // the golden angle: evenly filled
      put(node, 0.5 + radius * Math.cos(angle), 0.5 + radius * Math.sin(angle));
    });
  } else {
    for (let i = 0; i < n; i++) {
      const angle = (2 * Math.PI * i) / n - Math.PI / 2;
      put(i, 0.5 + 0.46 * Math.cos(angle), 0.5 + 0.46 * Math.sin(angle));
    }
  }
  return (of.positions[name] = at);
}

// -- drawing ---------------------------------------------------------------------------------------------------------

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function extent() {
  return mode === "matrix" ? { width: layout.cells[1], height: layout.cells[0] } : { width: 1, height: 1 };
}

function fit() {
  const box = canvas.getBoundingClientRect(), of = extent(), room = 8;
  const scale = Math.min((box.width - 2 * room) / of.width, (box.height - 2 * room) / of.height);
  view = { scale, x: (box.width - of.width * scale) / 2, y: (box.height - of.height * scale) / 2 };
  fitted = true;
  draw();
}

function draw() {
  const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
  const width = Math.round(box.width * ratio), height = Math.round(box.height * ratio);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  if (mode === "matrix") drawMatrix(box);
  else drawGraph(box);
  Object.assign(canvas.dataset, { mode, scale: view.scale, x: view.x, y: view.y, nodes: layout.graph?.nodes ?? "" });
}

function drawMatrix(box) {
  const [rows, cols] = layout.cells, s = view.scale;
  pen.fillStyle = color("tint");
  pen.fillRect(view.x, view.y, cols * s, rows * s);
  pen.fillStyle = color("sparse");
  const first = Math.max(Math.floor(-view.y / s), 0), last = Math.min(Math.ceil((box.height - view.y) / s), rows);
  const gap = s >= 10 ? 1 : 0, size = Math.max(s - gap, 1);
  const full = layout.counts ? layout.counts.reduce((most, count) => Math.max(most, count), 1) : 1;
  for (let row = first; row < last; row++) {
    const y = view.y + row * s;
    for (let k = layout.start[row]; k < layout.start[row + 1]; k++) {
      const x = view.x + layout.cols[k] * s;
      if (x < -s || x > box.width) continue;
      if (layout.counts) pen.globalAlpha = 0.25 + (0.75 * Math.log1p(layout.counts[k])) / Math.log1p(full);
      pen.fillRect(x, y, size, size);
    }
  }
  pen.globalAlpha = 1;
  pen.strokeStyle = color("soft");
  pen.strokeRect(view.x - 0.5, view.y - 0.5, cols * s + 1, rows * s + 1);
  if (hovered) {
    const [row, col] = hovered;
    pen.fillStyle = color("dense");
    pen.globalAlpha = 0.16;
    pen.fillRect(view.x, view.y + row * s, cols * s, Math.max(s, 1));
    pen.fillRect(view.x + col * s, view.y, Math.max(s, 1), rows * s);
    pen.globalAlpha = 1;
    pen.strokeStyle = color("dense");
    pen.strokeRect(view.x + col * s, view.y + row * s, size, size);
  }
}

function drawGraph(box) {
  const graph = graphOf(layout), at = positionsOf(layout, byId("positions").value), s = view.scale;
  const x = (node) => view.x + at[2 * node] * s, y = (node) => view.y + at[2 * node + 1] * s;
  const ties = graph.near.reduce((sum, list) => sum + list.length, 0) / 2, every = Math.ceil(ties / TIES) || 1;
  pen.lineWidth = 1;
  if (!spread) {
    pen.strokeStyle = color("sparse");
    pen.globalAlpha = Math.min(0.5, Math.max(0.04, 300 / (ties || 1)));
    pen.beginPath();
    let nth = 0;
    for (let i = 0; i < graph.nodes; i++) {
      for (const j of graph.near[i]) {
        if (j < i || nth++ % every) continue;
        pen.moveTo(x(i), y(i));
        pen.lineTo(x(j), y(j));
      }
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }
  const torus = byId("positions").value === "torus", across = torus ? s / Math.max(...layout.torus) : 0;
  // Nodes do not cover each other.
  const room = graph.square ? (0.16 * s) / Math.sqrt(graph.nodes) : (0.4 * s) / Math.max(...layout.cells);
  const radius = torus ? Math.max(across * 0.36, 1) : Math.min(5, Math.max(1.2, room));
  const paint = (node, style, by = 1) => {
    const px = x(node), py = y(node), r = radius * by;
    if (px < -r || py < -r || px > box.width + r || py > box.height + r) return;
    pen.fillStyle = style;
    if (r < 2.5) return pen.fillRect(px - r, py - r, 2 * r, 2 * r);
    pen.beginPath();
    pen.arc(px, py, r, 0, 7);
    pen.fill();
  };
  const [plain, hot, soft] = [color("sparse"), color("dense"), color("line")];
  for (let i = 0; i < graph.nodes; i++) {
    if (!spread) paint(i, plain);
    else if (spread.steps[i] < 0 || spread.steps[i] > spread.now) paint(i, soft);
    else {
      // The newest is in another colour than what was there: the older, the paler.
      const age = spread.now - spread.steps[i];
      pen.globalAlpha = age ? Math.max(1 - 0.12 * (age - 1), 0.4) : 1;
      paint(i, age ? plain : hot);
      pen.globalAlpha = 1;
    }
  }
  if (!graph.square) {
    pen.fillStyle = color("soft");
    pen.font = "13px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillText("inputs", view.x + 0.1 * s, view.y + 0.025 * s);
    pen.fillText("outputs", view.x + 0.9 * s, view.y + 0.025 * s);
  }
  if (hovered === null) return;
  if (!spread) {
    pen.strokeStyle = hot;
    pen.beginPath();
    for (const j of graph.near[hovered]) {
      pen.moveTo(x(hovered), y(hovered));
      pen.lineTo(x(j), y(j));
    }
    pen.stroke();
    for (const j of graph.near[hovered]) paint(j, hot, 1.4);
  }
  paint(hovered, color("ink"), 1.6);
}

// -- what is under the pointer -----------------------------------------------------------------------------------------

function range(first, count, each, end) {
  const last = Math.min((first + count) * each, end) - 1;
  return last === first * each ? `${last}` : `${first * each} to ${last}`;
}

function cellText(row, col) {
  const step = layout.step, [rows, cols] = layout.grid, [height, width] = layout.block;
  const features = `outputs ${range(row * step, step, height, layout.shape[0])}, ` +
    `inputs ${range(col * step, step, width, layout.shape[1])}`;
  if (step === 1) return `block row ${row}, column ${col}: ${stored(layout, row, col) ? "stored" : "not stored"}\n${features}`;
  const inside = Math.min(step, rows - row * step) * Math.min(step, cols - col * step);
  return `block rows ${range(row * step, step, 1, rows)}, columns ${range(col * step, step, 1, cols)}: ` +
    `${stored(layout, row, col)} of ${inside} stored\n${features}`;
}

function nodeText(node) {
  const graph = graphOf(layout), near = graph.near[node], [rows] = layout.cells, [height, width] = layout.block;
  const output = graph.square || node < rows, index = output ? node : node - rows;
  const kind = graph.square ? "block" : output ? "block of outputs" : "block of inputs";
  const shown = near.slice(0, 12).map((other) => (graph.square || other < rows ? other : other - rows)).join(", ");
  const list = near.length ? `: ${shown}${near.length > 12 ? ", ..." : ""}` : "";
  const features = range(index, 1, output ? height : width, layout.shape[output ? 0 : 1]);
  const step = spread && spread.steps[node] >= 0 ? `\nreached in step ${spread.steps[node]}` : "";
  return `${kind} ${index}, features ${features}\n${near.length} neighbours${list}${step}`;
}

function find(event) {
  const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  if (mode === "matrix") {
    const row = Math.floor((py - view.y) / view.scale), col = Math.floor((px - view.x) / view.scale);
    return row >= 0 && col >= 0 && row < layout.cells[0] && col < layout.cells[1] ? [row, col] : null;
  }
  const at = positionsOf(layout, byId("positions").value);
  let best = null, least = 14 ** 2;
  for (let i = 0; i < at.length / 2; i++) {
    const far = (view.x + at[2 * i] * view.scale - px) ** 2 + (view.y + at[2 * i + 1] * view.scale - py) ** 2;
    if (far < least) [best, least] = [i, far];
  }
  return best;
}

function hover(event) {
  const found = (event && find(event)) ?? null, same = String(found) === String(hovered);
  hovered = found;
  tip.hidden = hovered === null;
  if (hovered !== null) {
    tip.textContent = mode === "matrix" ? cellText(...hovered) : nodeText(hovered);
    const box = canvas.parentElement.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    // On the side where there is room.
    tip.style.left = `${Math.max(0, x + 16 + tip.offsetWidth > box.width ? x - tip.offsetWidth - 12 : x + 16)}px`;
    tip.style.top = `${Math.max(0, y + 16 + tip.offsetHeight > box.height ? y - tip.offsetHeight - 12 : y + 16)}px`;
  }
  if (!same) draw();
}

// -- spreading ---------------------------------------------------------------------------------------------------------

function calm() {
  if (spread) clearInterval(spread.timer);
  spread = null;
}

function spreadFrom(node) {
  calm();
  const graph = graphOf(layout), steps = new Int32Array(graph.nodes).fill(-1), counts = [1];
  steps[node] = 0;
  for (let front = [node], step = 1; front.length; step++) {
    const next = [];
    for (const from of front) {
      for (const to of graph.ahead[from]) if (steps[to] < 0) { steps[to] = step; next.push(to); }
    }
    if (next.length) counts.push(counts[step - 1] + next.length);
    front = next;
  }
  spread = { steps, now: 0, last: counts.length - 1, timer: 0 };
  const tell = () => {
    const name = `from block ${node}, step ${spread.now} of ${spread.last}`;
    say(`${name}: ${counts[spread.now].toLocaleString("en")} of ${graph.nodes.toLocaleString("en")} blocks reached`);
    draw();
  };
  spread.timer = setInterval(() => {
    if (spread.now >= spread.last) return clearInterval(spread.timer);
    spread.now++;
    tell();
  }, 700);
  tell();
}

function middle() {
  const [height, width] = layout.torus ?? [1, layout.cells[0]];
  return Math.floor(height / 2) * width + Math.floor(width / 2);
}

// -- the rest ----------------------------------------------------------------------------------------------------------

function say(text) {
  status_.textContent = text;
}

function told() {
  const [rows, cols] = layout.grid;
  if (!layout.blocks) return "No block is stored.";
  if (mode === "graph") {
    const spreads = rows === cols ? "; click it to see activity spread from it" : "";
    return `Point at a node for its neighbours${spreads}.`;
  }
  const cells = layout.step > 1 ? `, drawn in cells of ${layout.step} x ${layout.step}` : "";
  return `${layout.blocks.toLocaleString("en")} of ${(rows * cols).toLocaleString("en")} blocks are stored${cells}.`;
}

function look(next) {
  view = next;
  fitted = false;
  draw();
}

function zoom(by, x, y) {
  const box = canvas.getBoundingClientRect();
  [x, y] = [x ?? box.width / 2, y ?? box.height / 2];
  const of = extent(), least = (0.5 * Math.min(box.width, box.height)) / Math.max(of.width, of.height);
  const most = mode === "matrix" ? Math.max(80, 2 * least) : 400 * box.width;
  const scale = Math.min(Math.max(view.scale * by, least), most), real = scale / view.scale;
  look({ scale, x: x - (x - view.x) * real, y: y - (y - view.y) * real });
}

function show(next) {
  mode = next;
  calm();
  hovered = null;
  tip.hidden = true;
  const square = layout.cells[0] === layout.cells[1];
  const drawable = layout.step === 1;
  byId("graph").disabled = !drawable;
  byId("graph").title = drawable ? "" : "too many blocks for this view";
  if (!drawable) mode = "matrix";
  for (const name of ["matrix", "graph"]) byId(name).setAttribute("aria-pressed", String(mode === name));
  for (const name of ["positions", "spread"]) byId(name).hidden = mode !== "graph" || !square;
  const positions = byId("positions");
  for (const option of positions.options) option.hidden = square === (option.value === "columns");
  const wanted = square ? positions.value : "columns";
  positions.value = square && wanted === "columns" ? layout.positions_first : wanted;
  canvas.setAttribute("aria-label", `${mode} of ${layout.name}`);
  say(told());
  fit();
}

function choose(index) {
  layout = layouts[index];
  document.querySelectorAll("[data-of]").forEach((part) => { part.hidden = Number(part.dataset.of) !== index; });
  if (layout.positions_first) byId("positions").value = layout.positions_first;
  show(mode);
}

let held = null; // where the pointer went down, and whether it moved since
canvas.addEventListener("pointerdown", (event) => {
  held = { x: event.clientX, y: event.clientY, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!held) return hover(event);
  const [dx, dy] = [event.clientX - held.x, event.clientY - held.y];
  if (!held.moved && Math.hypot(dx, dy) < 4) return;
  held = { x: event.clientX, y: event.clientY, moved: true };
  tip.hidden = true;
  hovered = null;
  look({ ...view, x: view.x + dx, y: view.y + dy });
});
canvas.addEventListener("pointerup", (event) => {
  const clicked = held && !held.moved;
  held = null;
  if (!clicked || mode !== "graph") return;
  const node = find(event);
  if (node !== null && graphOf(layout).square) spreadFrom(node);
});
canvas.addEventListener("pointercancel", () => { held = null; });
canvas.addEventListener("pointerleave", () => hover(null));
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = canvas.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
  const move = moves[event.key];
  if (move) look({ ...view, x: view.x + move[0], y: view.y + move[1] });
  else if (event.key === "+" || event.key === "=") zoom(1.4);
  else if (event.key === "-") zoom(1 / 1.4);
  else if (event.key === "0") fit();
  else return;
  event.preventDefault();
});
byId("closer").addEventListener("click", () => zoom(1.6));
byId("farther").addEventListener("click", () => zoom(1 / 1.6));
byId("fit").addEventListener("click", fit);
byId("matrix").addEventListener("click", () => show("matrix"));
byId("graph").addEventListener("click", () => show("graph"));
byId("spread").addEventListener("click", () => spreadFrom(middle()));
byId("positions").addEventListener("change", () => show("graph"));
byId("which").addEventListener("change", (event) => choose(Number(event.target.value)));
window.addEventListener("resize", () => (fitted ? fit() : draw()));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
byId("which").parentElement.hidden = layouts.length === 1;
choose(0);
if (location.hash === "#as-graph") show("graph");
