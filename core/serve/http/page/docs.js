/* Sends the examples of /docs to this server and shows the responses. */
const key = document.getElementById("key");

async function send(form) {
  const { method, path } = form.dataset;
  const shown = form.querySelector("output"), body = form.querySelector("textarea");
  const headers = key.value ? { Authorization: `Bearer ${key.value}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  shown.textContent = "…";
  try {
    const answer = await fetch(path, { method, headers, body: body ? body.value : undefined });
    const status = `${answer.status} ${answer.statusText}\n`;
    const text = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let all = "";
    for (let part = await text.read(); !part.done; part = await text.read()) {
      all += part.value;
      shown.textContent = status + all;
    }
    if ((answer.headers.get("content-type") || "").startsWith("application/json"))
      shown.textContent = status + JSON.stringify(JSON.parse(all), null, 2);
    else if (!all) shown.textContent = status;
  } catch (error) {
    shown.textContent = `no answer: ${error.message}`;
  }
}

for (const form of document.forms)
  form.addEventListener("submit", (event) => { event.preventDefault(); send(form); });
