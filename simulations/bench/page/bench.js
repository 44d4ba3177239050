"use strict";
const form = document.querySelector("form");
const table = document.getElementById("cells");
const cells = [...table.tBodies];
const AXES = ["dataset", "protocol", "system"];

function filter() {
  let shown = 0;
  for (const cell of cells) {
    const asked = AXES.every(axis => ["", cell.dataset[axis]].includes(form.elements[axis].value));
    cell.hidden = !asked || (cell.classList.contains("missing") && !form.elements.missing.checked);
    shown += !cell.hidden;
  }
  document.getElementById("count").textContent = `${shown} of ${cells.length} cells shown`;
}

function expand(cell, open) {
  cell.querySelector(".facts").hidden = !open;
  cell.querySelector("th button").setAttribute("aria-expanded", open);
}

function keyOf(cell, column) {
  const text = cell.querySelectorAll("td[data-key]")[column]?.dataset.key;
  return text ? Number(text === "inf" ? Infinity : text) : NaN;
}

function sort(button) {
  const head = button.closest("th");
  const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
  for (const one of table.tHead.querySelectorAll("th")) one.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const sign = order === "descending" ? -1 : 1;
  const keys = new Map(cells.map(cell => [cell, keyOf(cell, Number(button.dataset.column))]));
  const compared = (a, b) => isNaN(a) - isNaN(b) || (a === b || isNaN(a) ? 0 : sign * (a < b ? -1 : 1));
  cells.sort((one, other) => compared(keys.get(one), keys.get(other)));
  table.append(...cells);
}

form.addEventListener("change", event => {
  if (event.target.name === "facts") cells.forEach(cell => expand(cell, event.target.checked));
  filter();
});
form.addEventListener("submit", event => event.preventDefault());
table.tHead.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (button) sort(button);
});
table.addEventListener("click", event => {
  const button = event.target.closest("tbody th button");
  if (button) expand(button.closest("tbody"), button.getAttribute("aria-expanded") !== "true");
});
cells.forEach(cell => expand(cell, false));
filter();
