// The form of an answer and the functions that the model may call: fields of JSON, checked before they are sent.

const FORMS = {
  json: (text) => (text ? { json: parsed(text, "The schema") } : { json: true }),
  regex: (text) => ({ regex: text }),
  choice: (text) => ({ choice: text.split("\n").filter(Boolean) }),
};
const PLACEHOLDERS = {
  json: 'A JSON schema, as {"type": "object", "properties": {"name": {"type": "string"}}}; empty: any JSON object',
  regex: "[0-9]{3}-[a-z]{2}",
  choice: "yes\nno",
};

class FormError extends Error {}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FormError(`${what} is not JSON: ${error.message}`);
  }
}

/** Fields of a request. Throws FormError. */
function formOf(fields) {
  const make = FORMS[fields.form.value];
  return make ? { structured_outputs: make(fields.formtext.value.trim()) } : {};
}

/** A list of functions, each as OpenAI's API has it or its definition alone. */
function toolsOf(fields) {
  const text = fields.tools.value.trim();
  if (!text) return {};
  const given = parsed(text, "The list of tools");
  const tools = (Array.isArray(given) ? given : [given]).map((one) => (one?.type === "function" ? one : { type: "function", function: one }));
  return { tools, tool_choice: fields.choice.value };
}

function showForm(fields) {
  const name = fields.form.value;
  fields.formtext.closest("label").hidden = !(name in FORMS);
  fields.formtext.placeholder = PLACEHOLDERS[name] ?? "";
}
