// Sorts the trials by any column; without this the table simply stays in the order of the trials.
for (const head of document.querySelectorAll(".trials th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  const key = (row) => {
    const cell = row.cells[head.cellIndex];
    const text = cell.dataset.value ?? cell.textContent;
    const number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  const order = (a, b) => (typeof a === typeof b ? (a < b ? -1 : Number(a > b)) : typeof a === "number" ? -1 : 1);
  button.addEventListener("click", () => {
    const down = head.ariaSort === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.ariaSort = down ? "descending" : "ascending";
    const body = head.closest("table").tBodies[0];
    const rows = [...body.rows].sort((a, b) => order(key(a), key(b)));
    body.append(...(down ? rows.reverse() : rows));
  });
}

// Copies the command; without this, a click on it selects it whole.
const copy = document.getElementById("copy");
const chosen = () => {
  const range = document.createRange();
  range.selectNodeContents(document.getElementById("apply"));
  getSelection().removeAllRanges();
  getSelection().addRange(range);
};
if (copy) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    chosen();
    const copied = await (navigator.clipboard?.writeText(getSelection().toString()) ?? Promise.reject()).then(
      () => true,
      () => document.execCommand("copy"), // where the browser keeps its clipboard from files
    );
    copy.textContent = copied ? "Copied" : "Selected: press Ctrl-C";
  });
}
