"use strict";
// How the prediction of one token formed, loop by loop. Uses the helpers of page.js.

const TOP = 10, COLUMNS = 3, HOVER_DELAY = 140, LINE = 12;
const CEILINGS = [0.002, 0.004, 0.008, 0.02, 0.04, 0.08, 0.2, 0.5, 1];  // and their halves: exact as `percent` writes them
let inspected = null, timer = 0;

async function inspect(side, index) {
  clearTimeout(timer);
  const token = side.tokens[index];
  if (!token || (inspected?.token === token && !$("inspector").hidden)) return;
  inspected?.token.span.setAttribute("aria-selected", "false");
  inspected?.controller.abort();
  const current = inspected = {token, controller: new AbortController()};
  token.span.setAttribute("aria-selected", "true");
  $("token").textContent = visible(token.text);
  const {model, loops, residual} = side.used;
  $("facts").textContent = [`Number ${index + 1}`, `id ${token.id}`, side.loopsElement.disabled ? "" :
    token.loops < loops ? `stopped after ${token.loops} of ${plural(loops, "loop")}` : plural(loops, "loop")].filter(Boolean).join(" · ");
  $("inspector").hidden = false;
  if (innerWidth < 1000 && token.span.getBoundingClientRect().bottom > 0.36 * innerHeight)
    token.span.scrollIntoView({block: "end"});  // its margin keeps it above the sheet
  try {
    if (!token.trace) {
      $("finding").textContent = "Computing …";
      const body = {model, prompt: side.idsBefore(index), num_loops: loops, top: TOP};
      token.trace = await (await api("v1/trace", body, current.controller.signal)).json();
    }
    if (inspected !== current) return;
    drawTrace(token, residual);
  } catch (error) {
    if (inspected !== current || current.controller.signal.aborted) return;
    $("finding").textContent = error instanceof Unreachable ? "No connection to the server." : error.message;
    $("charts").replaceChildren();
    $("predictions").replaceChildren();
  }
}

function closeInspector() {
  clearTimeout(timer);
  if (!inspected) return;
  inspected.controller.abort();
  inspected.token.span.setAttribute("aria-selected", "false");
  if ($("inspector").contains(document.activeElement)) inspected.token.span.focus();
  inspected = null;
  $("inspector").hidden = true;
}

function drawTrace(token, threshold) {
  const rows = token.trace.loops, used = Math.min(token.loops, rows.length);
  $("finding").textContent = finding(rows.slice(0, used), token);
  const final = rows[used - 1].top, candidates = new Map([[token.id, token.text]]);
  for (const {id, text} of [...final.slice(0, 2), rows[0].top[0], ...final.slice(2)])
    if (candidates.size < 4) candidates.set(id, text);
  const chances = [...candidates].map(([id, text]) => ({label: visible(text).slice(0, 9),
    values: rows.map(row => row.top.find(entry => entry.id === id)?.probability ?? 0)}));
  const highest = Math.max(...chances.flatMap(series => series.values));
  const ceiling = CEILINGS.find(value => value >= highest) ?? 1;
  const exitLoop = used < rows.length ? used : null;
  const residuals = rows.map(row => Math.max(row.residual, 1e-9));
  const lowest = Math.min(-1, Math.floor(Math.log10(Math.min(...residuals, threshold ?? 1))));  // power of ten
  $("charts").replaceChildren(
    chart("Probability after each loop", chances, {low: 0, high: ceiling, ticks: [0, ceiling / 2, ceiling], format: percent, height: 122, exitLoop}),
    chart("Change of the state by each loop (residual)", [{values: residuals, label: ""}],
      {log: true, low: 10 ** lowest, high: Math.max(1, ...residuals), ticks: powers(lowest), format: percent, height: 92, threshold, exitLoop}));
  $("predictions").replaceChildren(table(rows, token, used));
}

const powers = lowest => {
  const step = Math.ceil(-lowest / 3), ticks = [];
  for (let power = 0; power >= lowest; power -= step) ticks.push(10 ** power);
  return ticks;
};

function finding(rows, token) {
  const winners = rows.map(row => row.top[0]), last = winners.at(-1), quote = entry => `“${visible(entry.text)}”`;
  const chance = row => row.top.find(entry => entry.id === token.id)?.probability;
  if (last.id !== token.id) {
    const own = chance(rows.at(-1));
    return `Sampled: ${quote(last)} was likelier with ${percent(last.probability)}, this token ${own === undefined ? "was not among the ten likeliest" : `had ${percent(own)}`}.`;
  }
  const before = winners.findLastIndex(entry => entry.id !== token.id);
  if (before >= 0) return `The likeliest token since loop ${before + 2}, now with ${percent(last.probability)}. After loop ${before + 1} it was ${quote(winners[before])}.`;
  return `The likeliest token from the first loop on: ${percent(chance(rows[0]))} after loop 1` + (rows.length > 1 ? `, ${percent(last.probability)} after loop ${rows.length}.` : ".");
}

function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function chart(title, series, {low, high, log, ticks, format, height, threshold, exitLoop}) {
  const width = 340, left = 44, right = width - (series[0].label ? 74 : 12), top = 8, bottom = height - 18;
  const loops = series[0].values.length, value = log ? Math.log10 : number => number;
  const x = loop => loops > 1 ? left + 8 + (loop - 1) / (loops - 1) * (right - left - 8) : (left + right) / 2;
  const y = number => bottom - (value(number) - value(low)) / (value(high) - value(low)) * (bottom - top);
  const figure = document.createElement("figure"), drawing = svg("svg", {viewBox: `0 0 ${width} ${height}`, "aria-hidden": true});
  figure.appendChild(document.createElement("figcaption")).textContent = title;
  figure.append(drawing);
  for (const tick of ticks) drawing.append(svg("path", {class: "grid", d: `M${left} ${y(tick)}H${right}`}),
    svg("text", {x: left - 6, y: y(tick) + 4, "text-anchor": "end"}, format(tick)));
  for (let loop = 1; loop <= loops; loop++) if (isLabelled(loop, loops))
    drawing.append(svg("text", {x: x(loop), y: height - 3, "text-anchor": "middle"}, loop));
  if (threshold) drawing.append(svg("path", {class: "exit-line", d: `M${left} ${y(threshold)}H${right}`}));
  if (exitLoop) drawing.append(svg("path", {class: "exit-line", d: `M${x(exitLoop)} ${top}V${bottom}`}));
  const labels = [];
  series.forEach(({values, label}, index) => {
    const points = values.map((number, place) => [x(place + 1), y(number)]);
    drawing.append(svg("path", {class: `line s${index}`, d: "M" + points.map(point => point.join(" ")).join("L")}));
    for (const [cx, cy] of points) drawing.append(svg("circle", {class: `s${index}`, cx, cy, r: loops > 24 ? 1.2 : 2.4}));
    if (label) labels.push({label, index, at: points.at(-1)[1] + 4});
  });
  spread(labels, bottom + 4);
  for (const {label, index, at} of labels)
    drawing.append(svg("text", {class: `label t${index}`, x: right + 8, y: at}, label));
  return figure;
}

function spread(labels, lowest) {
  // Each beside the end of its line, moved only as far as the next label or the axis makes it.
  labels.sort((a, b) => a.at - b.at);
  labels.forEach((entry, place) => { if (place) entry.at = Math.max(entry.at, labels[place - 1].at + LINE); });
  for (const entry of labels.toReversed()) {
    entry.at = Math.min(entry.at, lowest);
    lowest = entry.at - LINE;
  }
}

function table(rows, token, used) {
  const element = document.createElement("table"), head = element.createTHead().insertRow(), body = element.createTBody();
  for (const title of ["Loop", "Likeliest tokens"]) {
    const cell = head.appendChild(document.createElement("th"));
    cell.scope = "col";
    cell.textContent = title;
    if (title !== "Loop") cell.colSpan = COLUMNS;
  }
  rows.forEach((row, index) => {
    const line = body.insertRow(), title = line.appendChild(document.createElement("th"));
    line.className = index + 1 > used ? "after" : index + 1 === used && used < rows.length ? "exit" : "";
    title.scope = "row";
    title.textContent = index + 1;
    for (const entry of row.top.slice(0, COLUMNS)) {
      const cell = line.insertCell();
      cell.classList.toggle("chosen", entry.id === token.id);
      cell.style.setProperty("--p", entry.probability);
      cell.title = entry.text;
      const content = cell.appendChild(document.createElement("div"));
      content.appendChild(document.createElement("code")).textContent = visible(entry.text);
      content.appendChild(document.createElement("span")).textContent = percent(entry.probability);
    }
  });
  return element;
}
