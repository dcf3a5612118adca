"use strict";
// What a model writes reaches the page only as textContent.

const $ = id => document.getElementById(id);
const EXIT_THRESHOLDS = [null, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5];
const DEFAULT_EXIT = {rule: "kl", threshold: 0.002};
const MAX_RESUMES = 5;
const RULES = {state: "change of state", kl: "change of prediction"};
const VISIBLE = {" ": "␣", "\n": "↵", "\r": "←", "\t": "→"};
let models = [], controller = null, scale = 1, reconnecting = null, keyRequest = null;

class Unreachable extends Error {}

// ---- The server

async function api(path, body, signal) {
  const key = sessionStorage.getItem("key"), headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = {headers, signal, method: body ? "POST" : "GET", body: body && JSON.stringify(body)};
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw signal?.aborted ? error : new Unreachable();
  }
  if (response.ok) return response;
  if (response.status === 401) {
    await (keyRequest ??= askKey().finally(() => { keyRequest = null; }));
    return api(path, body, signal);
  }
  if ([502, 503, 504].includes(response.status)) throw new Unreachable();
  const answer = await response.json().catch(() => null);
  throw new Error(sentence(answer?.error) ?? `The server answered ${response.status} to ${path}.`);
}

function sentence(error) {
  if (!error?.message) return null;
  return error.param && !error.message.includes(error.param) ? `${error.param}: ${error.message}` : error.message;
}

async function* streamEvents(response, signal) {
  // One object per server-sent event; a stream that ends before [DONE] was cut off.
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let buffer = ""; ;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw signal.aborted ? error : new Unreachable();
    }
    if (part.done) throw new Unreachable();
    const events = (buffer + part.value.replaceAll("\r", "")).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trim()).join("");
      if (data === "[DONE]") return;
      if (!data) continue;
      const value = JSON.parse(data);
      if (value.error) throw value.error.code === "stopping" ? new Unreachable() : new Error(sentence(value.error));
      yield value;
    }
  }
}

function askKey() {
  $("key").value = "";
  $("key-dialog").showModal();
  return new Promise((resolve, reject) => {
    let given = false;
    $("key-form").onsubmit = event => {
      event.preventDefault();
      given = $("key").value !== "";
      if (given) sessionStorage.setItem("key", $("key").value);
      $("key-dialog").close();
    };
    $("key-cancel").onclick = () => $("key-dialog").close();
    $("key-dialog").onclose = () => given ? resolve() : reject(new Error("This server needs an API key. Press Generate to enter one."));
  });
}

async function loadModels() {
  models = (await (await api("v1/models")).json()).data;
  const chosen = $("model").value;
  $("model").replaceChildren(...models.map(model => new Option(model.id, model.id)));
  if (models.some(model => model.id === chosen)) $("model").value = chosen;
  else chooseModel();
}

function reconnect() {
  const retry = async () => {
    for (let seconds = 1; ; seconds = Math.min(2 * seconds, 8)) {
      setStatus("lost", `No connection to the server. What is written is kept. Trying again in ${seconds} s.`);
      await new Promise(resolve => { setTimeout(resolve, 1000 * seconds); });
      try {
        await loadModels();
        return setStatus(controller ? "busy" : "ok", "Connected again.");
      } catch (error) {
        if (!(error instanceof Unreachable)) throw error;
      }
    }
  };
  return reconnecting ??= retry().finally(() => { reconnecting = null; });
}

// ---- One depth: its settings, text and figures

class Side {
  constructor() {
    this.element = $("side").content.firstElementChild.cloneNode(true);
    $("sides").append(this.element);
    for (const part of ["loops", "exit", "given", "tokens", "histogram", "speed", "count", "mean"])
      this[part + "Element"] = this.element.querySelector("." + part);
    this.exitElement.max = EXIT_THRESHOLDS.length - 1;
    this.tokens = [];
    this.used = null;  // the settings of the text
    this.element.addEventListener("input", () => this.showSettings());
    this.tokensElement.addEventListener("pointerover", event => this.onHover(event));
    this.tokensElement.addEventListener("pointerout", () => clearTimeout(timer));
    this.tokensElement.addEventListener("click", event => event.target.closest(".token")?.focus());
    this.tokensElement.addEventListener("focusin", event => this.onFocus(event.target));
    this.tokensElement.addEventListener("keydown", event => this.onKey(event));
  }

  get loops() { return Number(this.loopsElement.value); }
  get threshold() { return EXIT_THRESHOLDS[this.exitElement.value]; }

  setModel({looped, default_loops: loops, max_loops: most, exit_rules: rules}, isSecond) {
    this.loopsElement.max = looped ? most : 1;
    this.loopsElement.value = looped ? (isSecond ? Math.max(1, Math.round(loops / 4)) : loops) : 1;
    this.loopsElement.disabled = !looped;
    this.exitElement.disabled = !rules.length;
    this.exitElement.value = rules.includes(DEFAULT_EXIT.rule) ? EXIT_THRESHOLDS.indexOf(DEFAULT_EXIT.threshold) : 0;
    this.showSettings();
  }

  showSettings() {
    const {threshold} = this;
    const text = threshold === null ? "off" : $("rule").value === "state" ? `< ${percent(threshold)}` : `< ${threshold}`;
    this.element.querySelector(".loops-value").textContent = this.loopsElement.disabled ? "no loop" : this.loops;
    this.element.querySelector(".exit-value").textContent = text;
    this.exitElement.setAttribute("aria-valuetext", text);
    showScale();
  }

  clear(prompt, settings) {
    closeInspector();
    this.tokens = [];
    this.promptIds = null;
    this.used = settings;
    this.givenElement.textContent = prompt;
    this.tokensElement.replaceChildren();
    rescale(Math.max(...shownSides().map(side => side.used?.loops ?? side.loops)));
  }

  async generate(common, signal) {
    const looped = !this.loopsElement.disabled;
    const rule = $("rule").value, exit = this.threshold === null ? null : `${rule}:${this.threshold}`;
    const settings = {model: common.model, loops: this.loops, residual: rule === "state" ? this.threshold : null};
    let started = false;  // until the request is accepted, the text before it stays
    const start = () => {
      if (!started) this.clear(common.prompt, settings);
      started = true;
    };
    this.element.classList.add("busy");
    try {
      for (let resumes = 0; ; resumes++) {
        try {
          // After a lost connection, the tokens so far are part of the prompt.
          const tokens = started ? this.tokens.length : 0, max_tokens = common.max_tokens - tokens;
          const prompt = tokens ? this.idsBefore(tokens) : common.prompt;
          const body = {...common, prompt, max_tokens, ...(looped && {num_loops: settings.loops, exit})};
          if (max_tokens > 0) await this.stream(body, start, signal);
          return;
        } catch (error) {
          if (!(error instanceof Unreachable) || resumes === MAX_RESUMES) throw error;
          await Promise.race([reconnect(), aborted(signal)]);
        }
      }
    } finally {
      this.element.classList.remove("busy");
    }
  }

  async stream(request, start, signal) {
    const response = await api("v1/completions", {...request, stream: true, return_depths: true}, signal);
    start();
    for await (const event of streamEvents(response, signal)) {
      const choice = event.choices?.[0];
      if (!choice) continue;
      this.promptIds ??= choice.parcae?.prompt_token_ids ?? null;
      for (const token of choice.parcae?.tokens ?? []) this.add(token);
    }
  }

  add(token) {
    if (token.id === null) {  // the rest of an incomplete character
      this.tokensElement.lastElementChild?.append(token.text);
      return;
    }
    const now = performance.now(), span = document.createElement("span");
    if (!this.tokens.length) this.start = now;
    this.latest = now;
    span.className = "token";
    span.classList.toggle("break", /^\s*\n\s*$/.test(token.text));
    span.classList.toggle("empty", token.text === "");
    span.classList.toggle("plain", this.loopsElement.disabled);
    span.textContent = token.text;
    span.setAttribute("role", "option");
    span.setAttribute("aria-label", `${spoken(token.text)}, ${plural(token.loops, "loop")}`);
    span.style.setProperty("--depth", depth(token.loops));
    span.tabIndex = this.tokens.length ? -1 : 0;
    span.dataset.index = this.tokens.length;
    this.tokens.push({...token, span});
    this.tokensElement.append(span);
    this.showFigures();
  }

  idsBefore(index) { return [...this.promptIds, ...this.tokens.slice(0, index).map(token => token.id)]; }

  get speed() { return (this.tokens.length - 1) / (this.latest - this.start) * 1000; }
  get meanLoops() { return this.tokens.reduce((sum, token) => sum + token.loops, 0) / this.tokens.length; }

  showFigures() {
    const count = this.tokens.length, counts = Array(scale).fill(0);
    for (const token of this.tokens) counts[Math.min(token.loops, scale) - 1]++;
    this.countElement.textContent = count || "–";
    this.speedElement.textContent = count > 1 && this.speed < Infinity ? number(this.speed) : "–";
    this.meanElement.textContent = count ? this.meanLoops.toFixed(1) : "–";
    const most = Math.max(1, ...counts);
    this.histogramElement.replaceChildren(...counts.map((value, index) => {
      const column = document.createElement("div"), bar = column.appendChild(document.createElement("i"));
      column.title = `${plural(index + 1, "loop")}: ${plural(value, "token")}`;
      bar.classList.toggle("none", !value);
      bar.style.setProperty("--share", value / most);
      bar.style.setProperty("--depth", depth(index + 1));
      column.append(isLabelled(index + 1, scale) ? index + 1 : "\u00a0");
      return column;
    }));
    const spread = counts.map((value, index) => value && `${index + 1}: ${value}`).filter(Boolean).join(", ");
    this.histogramElement.setAttribute("aria-label", `Tokens by number of loops. ${spread || "No tokens yet."}`);
  }

  onHover(event) {
    // A token that was clicked or reached by keyboard stays until it loses the focus.
    const token = event.target.closest(".token");
    const isKept = inspected && document.activeElement?.classList.contains("token");
    if (!token || isKept || event.pointerType !== "mouse") return;
    clearTimeout(timer);
    timer = setTimeout(() => inspect(this, Number(token.dataset.index)), HOVER_DELAY);
  }

  onFocus(span) {
    for (const token of this.tokens) token.span.tabIndex = token.span === span ? 0 : -1;
    inspect(this, Number(span.dataset.index));
  }

  onKey(event) {
    const index = Number(event.target.dataset.index), last = this.tokens.length - 1;
    const line = {ArrowUp: -1, ArrowDown: 1}[event.key];
    const target = {ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last}[event.key] ?? (line && this.inNextLine(index, line));
    if (target === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.tokens[Math.max(0, Math.min(last, target))].span.focus();
  }

  inNextLine(index, direction) {
    // The token of the next line that is nearest horizontally.
    const boxes = this.tokens.map(token => token.span.getClientRects()[0] ?? token.span.getBoundingClientRect());
    const here = boxes[index], height = here.height / 2;
    let next = index;
    while (boxes[next] && (boxes[next].top - here.top) * direction < height) next += direction;
    if (!boxes[next]) return index;
    const top = boxes[next].top;
    let best = next;
    for (; boxes[next] && Math.abs(boxes[next].top - top) < height; next += direction)
      if (Math.abs(boxes[next].left - here.left) < Math.abs(boxes[best].left - here.left)) best = next;
    return best;
  }
}

// ---- The page

const aborted = signal => new Promise((_, reject) => { signal.addEventListener("abort", () => reject(signal.reason)); });
const shownSides = () => $("compare").checked ? [first, second] : [first];
const depth = loops => scale > 1 ? (loops - 1) / (scale - 1) : 1;
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const number = value => value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
const percent = value => `${value >= 0.0995 ? Math.round(100 * value) : Number((100 * value).toPrecision(1))}\u00a0%`;
const isLabelled = (loop, loops) => {
  const step = loops <= 8 ? 1 : 2 ** Math.ceil(Math.log2(loops / 4));
  return loop === 1 || loop === loops || (loop % step === 0 && loops - loop >= step);
};
const visible = text => text.replace(/[ \n\r\t]/g, sign => VISIBLE[sign]) || "·";
const spoken = text => text.trim() || (text.includes("\n") ? "new line" : text ? "space" : "part of a character");

function setStatus(state, text) {
  $("status").dataset.state = state;
  $("status").textContent = text;
}

function setAlert(text) {
  $("alert").hidden = !text;
  $("alert").textContent = text;
}

function chooseModel() {
  const model = models.find(model => model.id === $("model").value) ?? models[0];
  if (!model) return setAlert("The server has no model.");
  $("max-tokens").value = Math.min($("max-tokens").value, model.parcae.context_length);
  // A number of loops has a slider of its own.
  const rules = model.parcae.exit_rules.filter(rule => rule !== "budget").sort((a, b) => (b in RULES) - (a in RULES) || b.localeCompare(a));
  $("rule").replaceChildren(...rules.map(rule => new Option(RULES[rule] ?? rule, rule)));
  if (rules.includes(DEFAULT_EXIT.rule)) $("rule").value = DEFAULT_EXIT.rule;
  first.setModel(model.parcae, false);
  second.setModel(model.parcae, true);
}

function rescale(loops) {
  scale = loops;
  for (const side of [first, second]) {
    side.showFigures();
    for (const token of side.tokens) token.span.style.setProperty("--depth", depth(token.loops));
  }
}

function showScale() {
  // Before the first text, the legend follows the sliders.
  const sides = shownSides();
  if (!controller && !sides.some(side => side.tokens.length)) rescale(Math.max(...sides.map(side => side.loops)));
}

function showSides() {
  second.element.hidden = !$("compare").checked;
  $("sides").classList.toggle("two", $("compare").checked);
  first.element.setAttribute("aria-label", $("compare").checked ? "First depth" : "Text");
  second.element.setAttribute("aria-label", "Second depth");
  for (const side of [first, second]) side.tokensElement.setAttribute("aria-label", "Generated tokens");
  showScale();
}

async function generate() {
  if (controller) return;
  const sides = shownSides(), seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number($("seed").value);
  const common = {prompt: $("prompt").value, seed,
    max_tokens: Number($("max-tokens").value) || 1, temperature: Number($("temperature").value)};
  controller = new AbortController();
  setAlert("");
  setStatus("busy", "Generating …");
  $("generate").disabled = $("compare").disabled = $("model").disabled = true;
  $("stop").hidden = false;
  const {signal} = controller, before = sides.map(side => side.tokens), ready = models.length ? null : loadModels();
  const results = await Promise.allSettled(sides.map(async side => {
    await ready;
    await side.generate({model: $("model").value, ...common}, signal);
  }));
  const errors = results.map(result => result.reason).filter(error => error && !signal.aborted);
  const isNew = sides.every((side, index) => side.tokens !== before[index]);
  controller = null;
  $("generate").disabled = $("compare").disabled = $("model").disabled = false;
  $("stop").hidden = true;
  const outcome = signal.aborted ? "Stopped" : errors.length ? "Ended early" : "Finished";
  setStatus("ok", isNew ? `${outcome}: ${sides.length > 1 ? agreement() : describe(first)}` : "Nothing was generated.");
  if (errors.length) setAlert(errors[0] instanceof Unreachable ? "The connection was lost too often. What is written is kept." : errors[0].message);
}

function describe(side) {
  const count = side.tokens.length, speed = count > 1 ? `, ${number(side.speed)} per second` : "";
  const loops = count && !side.loopsElement.disabled ? `, ${side.meanLoops.toFixed(1)} loops on average` : "";
  const context = models.find(model => model.id === side.used?.model)?.parcae.context_length;
  const full = side.promptIds?.length + count >= context ? " The model's context is full." : "";
  return `${plural(count, "token")}${speed}${loops}.${full}`;
}

function agreement() {
  // Marks the first token in which the texts differ.
  const length = Math.min(first.tokens.length, second.tokens.length);
  let index = 0;
  while (index < length && first.tokens[index].id === second.tokens[index].id) index++;
  if (index === first.tokens.length && index === second.tokens.length) return "both depths wrote the same.";
  for (const side of [first, second]) side.tokens[index]?.span.classList.add("differs");
  return index ? `the texts agree in the first ${plural(index, "token")}.` : "the texts differ from the first token on.";
}

// ---- Start

const first = new Side(), second = new Side();
const showTemperature = () => { $("temperature-value").textContent = Number($("temperature").value).toFixed(2); };
$("composer").addEventListener("submit", event => { event.preventDefault(); generate(); });
$("stop").addEventListener("click", () => controller?.abort());
$("compare").addEventListener("change", showSides);
$("model").addEventListener("change", chooseModel);
$("rule").addEventListener("change", () => { for (const side of [first, second]) side.showSettings(); });
$("temperature").addEventListener("input", showTemperature);
$("close").addEventListener("click", closeInspector);
document.addEventListener("keydown", event => {
  if (event.key === "Escape") closeInspector();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); generate(); }
});
showTemperature();
showSides();
loadModels().catch(error => error instanceof Unreachable ? reconnect() : Promise.reject(error)).then(
  () => setStatus("ok", "Connected."), error => { setStatus("lost", "Not connected."); setAlert(error.message); });
