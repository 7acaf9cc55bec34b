// A streamed answer of the API, event by event.

class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function apiHeaders(key) {
  return key ? { "Content-Type": "application/json", Authorization: `Bearer ${key}` } : { "Content-Type": "application/json" };
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error.message ?? text, response.status);
  } catch {
    return new ApiError(text.slice(0, 300) || response.statusText || `status ${response.status}`, response.status);
  }
}

/** The events of a POST, parsed; ends with [DONE]. Throws ApiError, and AbortError when the signal says so. */
async function* events(path, body, key, signal) {
  const response = await fetch(path, { method: "POST", headers: apiHeaders(key), body: JSON.stringify(body), signal });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message ?? "the stream broke off", 0);
      yield event;
    }
  }
}

/** The parts of an event in one form for both endpoints: text, reasoning, tokens with their probabilities, the end. */
function parts(event) {
  const choice = event.choices?.[0];
  if (!choice) return { usage: event.usage, text: "", reasoning: "", tokens: [] };
  const delta = choice.delta ?? {};
  return {
    usage: event.usage,
    text: choice.text ?? delta.content ?? "",
    reasoning: delta.reasoning ?? delta.reasoning_content ?? "",
    calls: delta.tool_calls ?? [],
    tokens: choice.text === undefined ? chatTokens(choice.logprobs) : completionTokens(choice.logprobs),
    reason: choice.finish_reason,
  };
}

function chatTokens(logprobs) {
  return (logprobs?.content ?? []).map((one) => ({
    text: one.token,
    logprob: one.logprob,
    others: one.top_logprobs.map((other) => [other.token, other.logprob]),
  }));
}

function completionTokens(logprobs) {
  return (logprobs?.tokens ?? []).map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    others: Object.entries(logprobs.top_logprobs?.[index] ?? {}),
  }));
}
