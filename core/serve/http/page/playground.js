// The playground: a form, a log, and the request that the form stands for.

const byId = (id) => document.getElementById(id);
const [log, prompt, parameters, constraints, model] = ["log", "prompt", "parameters", "constraints", "model"].map(byId);
const modes = [...document.querySelectorAll("[name=mode]")];
const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };
const EMPTY = {
  chat: "Say something to the model.",
  completion: "Give the model a text to continue.",
};
let conversation = [];
let running = null;

const mode = () => document.documentElement.dataset.mode;
const key = () => byId("key").value;

function sampling() {
  const values = {};
  for (const field of parameters.elements) {
    if (field.type === "number" && field.value !== "") values[field.name] = Number(field.value);
  }
  const stop = parameters.elements.stop.value.split("\n").filter(Boolean);
  return stop.length ? { ...values, stop } : values;
}

/** A request. said: messages of a chat after the conversation so far, or the text to complete. Throws FormError. */
function requestOf(said) {
  const request = { model: model.value };
  if (mode() === "chat") {
    const system = parameters.elements.system.value.trim();
    request.messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation, ...said];
    Object.assign(request, toolsOf(constraints.elements));
  } else {
    request.prompt = said;
  }
  Object.assign(request, sampling(), formOf(constraints.elements));
  if (byId("logprobs").checked) Object.assign(request, mode() === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  return { ...request, stream: true, stream_options: { include_usage: true } };
}

const fromUser = (text) => [{ role: "user", content: text }];

function showCurl() {
  const text = prompt.value || "…";
  let body = null;
  let wrong = null;
  try {
    body = JSON.stringify(requestOf(mode() === "chat" ? fromUser(text) : text), null, 1).replaceAll("'", "'\\''");
  } catch (error) {
    wrong = error.message;
  }
  byId("form-error").hidden = wrong === null;
  byId("form-error").textContent = wrong ?? "";
  const auth = key() ? " -H 'Authorization: Bearer …'" : "";
  byId("curl").textContent = body === null ? wrong : `curl -N ${new URL(PATHS[mode()], location.href)} -H 'Content-Type: application/json'${auth} -d '${body}'`;
}

function setMode(name) {
  document.documentElement.dataset.mode = name;
  for (const one of modes) one.checked = one.value === name;
  prompt.placeholder = name === "chat" ? "Message" : "Text to continue";
  log.dataset.empty = EMPTY[name];
  byId("go").textContent = name === "chat" ? "Send" : "Complete";
  clear();
}

function clear() {
  running?.abort();
  conversation = [];
  log.replaceChildren();
  showCurl();
}

const scroller = () => (getComputedStyle(log).overflowY === "auto" ? log : document.scrollingElement);

function following() {
  const box = scroller();
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function toEnd() {
  const box = scroller();
  box.scrollTop = box.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  byId("go").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  log.setAttribute("aria-busy", String(Boolean(controller)));
}

/** Ask for an answer to `said`, see requestOf. shown: entries that stand for it, taken away where it is asked again.
 * goesOn: an answer that this one continues. */
async function send(said, shown, goesOn) {
  let request;
  try {
    request = requestOf(said);
  } catch (error) {
    byId("shape").open = true;
    return showCurl();
  }
  const [name, controller] = [mode(), new AbortController()];
  const isChat = name === "chat";
  if (goesOn && isChat) Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  setRunning(controller);
  log.querySelectorAll(".actions .latest").forEach((one) => one.remove());
  const entry = goesOn?.entry ?? (isChat ? addEntry(log, "assistant", "Model") : shown[0]);
  goesOn?.about.remove();
  const answer = new Answer(entry, { isPlain: !isChat || byId("logprobs").checked, before: goesOn?.text });
  if (goesOn && answer.isPlain !== goesOn.isPlain) answer.said.replaceChildren(answer.text);
  toEnd();
  answer.onshow = () => answer.follows && toEnd();
  let failed;
  try {
    for await (const event of events(PATHS[name], request, key(), controller.signal)) {
      answer.follows = following();
      answer.add(parts(event));
    }
  } catch (error) {
    failed = error;
    if (error.status === 401) byId("access").open = true;
  }
  answer.follows = following();
  answer.end(failed);
  if (running === controller) setRunning(null);
  if (!log.contains(answer.entry)) return;
  const before = [...conversation];
  const question = goesOn && isChat ? said.slice(0, -1) : said;
  const calls = answer.calls.filter(Boolean);
  if (isChat && (answer.text || calls.length)) conversation.push(...question, messageOf(answer, calls));
  const typed = isChat ? question.at(-1)?.role === "user" && question.at(-1).content : said;
  if (failed && failed.name !== "AbortError" && !answer.text && !prompt.value && typed) prompt.value = typed;
  addActions(answer, {
    again: () => {
      conversation = before;
      answer.entry.remove();
      send(question, isChat ? shown : [addEntry(log, "completion", "", question)]);
    },
    further: () => {
      conversation = before;
      send(isChat ? [...question, { role: "assistant", content: answer.text }] : question + answer.text, shown, isChat ? answer : { ...answer, text: "" });
    },
  });
  if (calls.length && !failed) askForResults(answer, calls);
  showCurl();
  answer.follows && toEnd();
}

function messageOf(answer, calls) {
  const message = { role: "assistant", content: answer.text || null };
  if (calls.length) {
    message.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  }
  return message;
}

function addActions(answer, { again, further }) {
  answer.entry.querySelector(".actions")?.remove();
  const line = element("p", "actions");
  const add = (text, act) => {
    const button = element("button", "plain latest", text);
    button.type = "button";
    button.addEventListener("click", () => !running && act());
    line.append(button);
  };
  if (answer.text) line.append(copyButton(() => answer.text));
  add("Regenerate", again);
  if (answer.text && ["length", "you"].includes(answer.reason)) add("Continue", further);
  answer.entry.append(line);
}

/** A field for what each called function gave, and a button that sends them. */
function askForResults(answer, calls) {
  const form = element("form", "results");
  for (const call of calls) {
    const label = element("label", "", `Result of ${call.name}`);
    label.append(element("textarea"));
    form.append(label);
  }
  const button = element("button", "", calls.length > 1 ? "Send results" : "Send result");
  form.append(button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    button.remove();
    const fields = [...form.querySelectorAll("textarea")];
    for (const field of fields) field.readOnly = true;
    send(calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: fields[index].value })), []);
  });
  answer.entry.append(form);
}

function submit() {
  const text = prompt.value;
  if (running || !text.trim() || !parameters.reportValidity()) return;
  if (mode() !== "chat") return send(text, [addEntry(log, "completion", "", text)]);
  prompt.value = "";
  send(fromUser(text), [addEntry(log, "user", "You", text)]);
}

async function showModels() {
  try {
    const response = await fetch("v1/models", { headers: apiHeaders(key()) });
    if (response.status === 401) byId("access").open = true;
    if (!response.ok) return;
    const names = (await response.json()).data.map((card) => card.id);
    model.replaceChildren(...names.map((name) => new Option(name)));
    model.disabled = names.length < 2;
    model.title = model.value;
    showCurl();
  } catch {
    // the state says that there is no connection
  }
}

for (const one of modes) one.addEventListener("change", () => setMode(one.value));
byId("clear").addEventListener("click", clear);
byId("stop").addEventListener("click", () => running?.abort());
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
document.addEventListener("input", showCurl);
byId("key").addEventListener("change", showModels);
for (const form of [parameters, constraints, byId("key-form")]) form.addEventListener("submit", (event) => event.preventDefault());
byId("copy").addEventListener("click", () => copyText(byId("curl").textContent, byId("copy")));
constraints.elements.form.addEventListener("change", () => showForm(constraints.elements));
const THEMES = { Auto: "", Light: "light", Dark: "dark" };
byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const name = names[(names.indexOf(byId("theme").textContent) + 1) % names.length];
  byId("theme").textContent = name;
  byId("theme").ariaLabel = `Colours: ${name}`;
  document.documentElement.dataset.theme = THEMES[name];
});
const wide = matchMedia("(min-width: 861px)").matches;
byId("engine").open = byId("sampling").open = wide;
for (const panel of wide ? [] : document.querySelectorAll("aside details")) panel.name = "panel"; // one at a time
watchTokens(log);
setMode(mode());
showModels();
watchEngine(() => apiHeaders(key()));
