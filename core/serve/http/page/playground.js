// The playground: a form, a log, and the request that the form stands for.

const byId = (id) => document.getElementById(id);
const [log, prompt, parameters, model] = ["log", "prompt", "parameters", "model"].map(byId);
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

function requestOf(text) {
  const request = { model: model.value };
  if (mode() === "chat") {
    const system = parameters.elements.system.value.trim();
    const messages = system ? [{ role: "system", content: system }] : [];
    request.messages = [...messages, ...conversation, { role: "user", content: text }];
  } else {
    request.prompt = text;
  }
  Object.assign(request, sampling());
  if (byId("logprobs").checked) Object.assign(request, mode() === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  return { ...request, stream: true, stream_options: { include_usage: true } };
}

function showCurl() {
  const body = JSON.stringify(requestOf(prompt.value || "…"), null, 1).replaceAll("'", "'\\''");
  const auth = key() ? " -H 'Authorization: Bearer …'" : "";
  byId("curl").textContent = `curl -N ${new URL(PATHS[mode()], location.href)} -H 'Content-Type: application/json'${auth} -d '${body}'`;
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

async function send(text) {
  const [name, request, controller] = [mode(), requestOf(text), new AbortController()];
  setRunning(controller);
  if (name === "chat") addEntry(log, "user", "You", text);
  const answer = new Answer(name === "chat" ? addEntry(log, "assistant", "Model") : addEntry(log, "completion", "", text));
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
  if (name === "chat" && answer.text && log.contains(answer.entry)) {
    conversation.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
  }
  if (failed && failed.name !== "AbortError" && !answer.text && !prompt.value) prompt.value = text;
  showCurl();
}

function submit() {
  const text = prompt.value;
  if (running || !text.trim() || !parameters.reportValidity()) return;
  if (mode() === "chat") prompt.value = "";
  send(text);
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
for (const form of [parameters, byId("key-form")]) form.addEventListener("submit", (event) => event.preventDefault());
byId("copy").addEventListener("click", async () => {
  const text = byId("curl").textContent;
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else getSelection().selectAllChildren(byId("curl"));
  byId("copy").textContent = navigator.clipboard ? "Copied" : "Selected";
  setTimeout(() => (byId("copy").textContent = "Copy"), 1500);
});
const wide = matchMedia("(min-width: 861px)").matches;
byId("engine").open = byId("sampling").open = wide;
for (const panel of wide ? [] : document.querySelectorAll("aside details")) panel.name = "panel"; // one at a time
watchTokens(log);
setMode(mode());
showModels();
watchEngine(() => apiHeaders(key()));
