// What a model writes as Markdown becomes elements: no HTML of the model's, no pictures, and links that open elsewhere.

const reader = markdownit({ breaks: true }).disable("image");

// The page's policy allows no style attributes, by which the library aligns the cells of a table.
reader.core.ruler.push("aligned", ({ tokens }) => {
  for (const token of tokens) {
    const style = token.attrGet("style");
    if (!style) continue;
    token.attrs = token.attrs.filter(([name]) => name !== "style");
    token.attrSet("class", style.replace("text-align:", "at-"));
  }
});

function markdown(text) {
  const made = DOMPurify.sanitize(reader.render(text), {
    RETURN_DOM_FRAGMENT: true,
    USE_PROFILES: { html: true },
    FORBID_ATTR: ["style", "id", "name"],
    FORBID_TAGS: ["style", "form", "input", "img"],
  });
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const code of made.querySelectorAll("pre > code")) {
    const block = element("div", "code");
    const bar = element("div", "codebar");
    bar.append(element("span", "", code.className.replace("language-", "")), copyButton(() => code.textContent));
    code.parentNode.replaceWith(block);
    block.append(bar, element("pre", "", code.textContent));
  }
  for (const table of made.querySelectorAll("table")) {
    const box = element("div", "table");
    table.replaceWith(box);
    box.append(table);
  }
  return made;
}

function copyButton(textOf) {
  const button = element("button", "plain", "Copy");
  button.type = "button";
  button.addEventListener("click", () => copyText(textOf(), button));
  return button;
}

/** Copies a text, or, where the browser does not let a page do so, says that it did not. */
async function copyText(text, button) {
  let told = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    told = "Not allowed";
  }
  const before = (button.before ??= button.textContent);
  button.textContent = told;
  setTimeout(() => (button.textContent = before), 1500);
}
