// An entry of the log: a question, or an answer as it streams in, with its tokens' probabilities and its figures.

const LEVELS = [0.9, 0.6, 0.3, 0.1];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function addEntry(log, kind, title, text) {
  const entry = element("article", `entry ${kind}`);
  if (title) entry.append(element("h2", "", title));
  const said = element("div", "said");
  if (text) said.append(kind === "completion" ? element("span", "given", text) : text);
  entry.append(said);
  log.append(entry);
  return entry;
}

/** The answer to a request. isPlain: shown as plain text, not as Markdown. before: the text that it continues. */
class Answer {
  constructor(entry, { isPlain, before = "" }) {
    this.entry = entry;
    this.said = entry.querySelector(":scope > .said");
    entry.querySelector(":scope > .failed")?.remove();
    this.isPlain = isPlain;
    this.text = before;
    this.calls = [];
    this.count = 0;
    this.started = performance.now();
    this.pending = [];
    entry.classList.add("busy");
    this.about = entry.appendChild(element("p", "about"));
  }

  add(part) {
    const now = performance.now();
    if (part.text || part.reasoning || part.tokens.length || part.calls?.length) {
      this.first ??= now;
      this.last = now;
      this.count += part.tokens.length || 1;
    }
    this.usage = part.usage ?? this.usage;
    this.reason = part.reason ?? this.reason;
    this.text += part.text;
    if (part.reasoning) this.think(part.reasoning);
    for (const call of part.calls ?? []) this.call(call);
    if (this.isPlain) this.pending.push(...shownTokens(part));
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  think(text) {
    if (!this.thought) {
      const details = element("details", "thought");
      details.append(element("summary", "", "Reasoning"), (this.thought = element("p", "said")));
      this.said.before(details);
    }
    this.thought.append(text);
  }

  call(call) {
    const { name, arguments: text } = call.function ?? {};
    const known = (this.calls[call.index ?? 0] ??= { id: call.id, name: "", arguments: "", shown: this.said.parentNode.insertBefore(element("pre"), this.about) });
    known.id ??= call.id;
    known.name += name ?? "";
    known.arguments += text ?? "";
    known.shown.append(name ? `${name} ` : "", text ?? "");
  }

  show(isLast) {
    this.frame = null;
    this.about.textContent = this.figures();
    if (this.isPlain) this.said.append(...this.pending);
    else if (isLast || !this.showsAgain || performance.now() > this.showsAgain) this.render();
    else this.frame = requestAnimationFrame(() => this.show());
    this.pending = [];
    this.onshow?.();
  }

  /** All text so far. A long one takes a while, so that it is shown again after ten times as long. */
  render() {
    const started = performance.now();
    this.said.replaceChildren(markdown(this.text));
    const ended = performance.now();
    this.showsAgain = ended + 10 * (ended - started);
  }

  figures() {
    if (!this.first) return "";
    const count = this.usage?.completion_tokens ?? this.count;
    const seconds = (this.last - this.first) / 1000;
    const facts = [`${count} ${count === 1 ? "token" : "tokens"}`];
    if (count > 1 && seconds > 0) facts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    facts.push(`first after ${Math.round(this.first - this.started)} ms`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.usage) facts.push(`prompt ${this.usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
    if (this.reason) facts.push(this.reason === "length" ? "ended at max tokens" : `ended by ${this.reason}`);
    return facts.join(" · ");
  }

  end(error) {
    if (this.frame) cancelAnimationFrame(this.frame);
    if (error?.name === "AbortError") this.reason = "you";
    this.show(true);
    this.entry.classList.remove("busy");
    if (error && error.name !== "AbortError") {
      const failed = element("p", "failed", error.message);
      failed.setAttribute("role", "alert");
      this.entry.append(failed);
    }
  }
}

/** What a part adds to the text. A token shows the text that it brought: none for an end, half a letter with the next. */
function shownTokens({ text, tokens }) {
  if (!text) return [];
  if (!tokens.length) return [text];
  const isPlain = tokens.map((token) => token.text).join("") === text;
  return isPlain ? tokens.map((token) => tokenSpan(token, token.text)) : [tokenSpan(tokens.at(-1), text)];
}

function tokenSpan(token, text) {
  const probability = Math.exp(token.logprob ?? 0);
  const level = LEVELS.findIndex((least) => probability >= least);
  const span = element("span", `token p${level < 0 ? 4 : level}`, text);
  span.tabIndex = -1;
  span.token = token;
  return span;
}

// The tip: what else the model could have said. By pointer, by touch, and by the arrow keys.
const tip = document.getElementById("tip");

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return `${value >= 10 ? value.toFixed(1) : value.toPrecision(2)} %`;
}

function showTip(span) {
  const { text, logprob, others } = span.token;
  const rows = others.some(([other]) => other === text) ? others : [[text, logprob], ...others];
  const table = element("table");
  for (const [other, value] of [...rows].sort((a, b) => b[1] - a[1])) {
    const row = table.insertRow();
    row.className = other === text ? "chosen" : "";
    row.insertCell().textContent = JSON.stringify(other).slice(1, -1).slice(0, 24);
    row.insertCell().textContent = percent(value);
  }
  tip.replaceChildren(table);
  tip.hidden = false;
  const place = span.getClientRects()[0];
  const below = place.bottom + tip.offsetHeight + 6 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? place.bottom + 5 : Math.max(8, place.top - tip.offsetHeight - 5)}px`;
}

function watchTokens(log) {
  const hide = () => (tip.hidden = true);
  log.addEventListener("pointerover", (event) => event.target.token && showTip(event.target));
  log.addEventListener("pointerout", hide);
  log.addEventListener("focusin", (event) => event.target.token && showTip(event.target));
  log.addEventListener("focusout", hide);
  log.addEventListener("scroll", hide);
  log.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const all = [...log.querySelectorAll(".token")];
    if (!step || !all.length) return;
    event.preventDefault();
    const at = all.indexOf(document.activeElement);
    all[Math.max(0, Math.min(all.length - 1, at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step))].focus();
  });
}
