// Stepping from iteration to iteration, the details of a node, light and dark.

let current = 0;

function show(index) {
  const last = trace.iterations.length - 1;
  current = Math.min(Math.max(index, 0), last);
  const iteration = trace.iterations[current];
  const hadFocus = byId("forest").contains(document.activeElement);
  hideDetails();
  showWhere(current);
  byId("summary").textContent = summaryOf(current);
  showFacts(iteration);
  showTimes(iteration);
  fitColumns(byId("forest").clientWidth);
  byId("forest").replaceChildren(drawForest(current));
  nodeBoxes()[0].setAttribute("tabindex", 0);
  if (hadFocus) nodeBoxes()[0].focus();
  showTexts(current);
  history.replaceState(null, "", `#${current + 1}`);
}

function nodeBoxes() {
  return [...byId("forest").querySelectorAll("g.node")];
}

function showDetails(box) {
  const iteration = trace.iterations[current];
  const node = iteration.nodes.find((other) => other.id === Number(box.dataset.node));
  const details = byId("details");
  details.replaceChildren(...detailsOf(node, iteration));
  details.hidden = false;
  box.setAttribute("aria-describedby", "details");
  const place = box.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = details;
  const isRoomRight = place.right + 8 + width < window.innerWidth;
  const left = isRoomRight ? place.right + 8 : Math.max(8, place.left - width - 8);
  const top = Math.min(Math.max(8, place.top - 20), window.innerHeight - height - 8);
  details.style.left = `${left}px`;
  details.style.top = `${Math.max(8, top)}px`;
}

function hideDetails() {
  byId("details").hidden = true;
}

// A focus may scroll the forest: details that are shown stay next to their node.
function followScroll() {
  const box = document.activeElement?.closest("g.node");
  if (box && !byId("details").hidden) showDetails(box);
  else hideDetails();
}

function focusNeighbour(box, step) {
  const boxes = nodeBoxes();
  const next = boxes[Math.min(Math.max(boxes.indexOf(box) + step, 0), boxes.length - 1)];
  box.setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
}

const stepByKey = {
  ArrowRight: () => show(current + 1),
  ArrowLeft: () => show(current - 1),
  Home: () => show(0),
  End: () => show(trace.iterations.length - 1),
  Escape: hideDetails,
};
const nodeStepByKey = { ArrowDown: 1, ArrowUp: -1 };

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const box = document.activeElement?.closest("g.node");
  if (event.key in stepByKey) stepByKey[event.key]();
  else if (box && event.key in nodeStepByKey) focusNeighbour(box, nodeStepByKey[event.key]);
  else return;
  event.preventDefault();
}

function listenToForest() {
  const forest = byId("forest");
  const boxOf = (event) => event.target.closest("g.node");
  for (const name of ["pointerover", "focusin"]) {
    forest.addEventListener(name, (event) => boxOf(event) && showDetails(boxOf(event)));
  }
  for (const name of ["pointerout", "focusout"]) forest.addEventListener(name, hideDetails);
  forest.addEventListener("scroll", followScroll);
}

function isDark() {
  return getComputedStyle(document.documentElement).getPropertyValue("color-scheme") === "dark"
    || (!document.documentElement.style.colorScheme && matchMedia("(prefers-color-scheme: dark)").matches);
}

function showTheme() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
}

// trace.html#12 is iteration 12.
function showAddressed() {
  show((Number(location.hash.slice(1)) || 1) - 1);
}

function begin() {
  showRequest();
  showTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  byId("theme").addEventListener("click", () => {
    document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
    showTheme();
  });
  if (!trace.iterations.length) return;
  buildStrip(show);
  byId("first").addEventListener("click", () => show(0));
  byId("previous").addEventListener("click", () => show(current - 1));
  byId("next").addEventListener("click", () => show(current + 1));
  byId("last").addEventListener("click", () => show(trace.iterations.length - 1));
  document.addEventListener("keydown", onKey);
  listenToForest();
  window.addEventListener("resize", () => show(current));
  window.addEventListener("hashchange", showAddressed);
  showAddressed();
}

begin();
