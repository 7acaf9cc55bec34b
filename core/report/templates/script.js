// A legend's button brings its line out of the others; the page says everything without it, too.
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const block = button.closest(".block");
    const on = button.getAttribute("aria-pressed") !== "true";
    for (const other of block.querySelectorAll(".legend button")) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", String(on));
    block.classList.toggle("picking", on);
    for (const line of block.querySelectorAll("[data-line]")) {
      line.classList.toggle("picked", on && line.dataset.line.startsWith(button.dataset.pick));
    }
  });
}
