// The forest as SVG, and the details of the node under the pointer or the focus.

function svg(name, attributes, ...content) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

function drawForest(index) {
  const iteration = trace.iterations[index];
  const layout = layoutForest(iteration);
  const onPath = survivingPath(iteration);
  const drawing = svg("svg", {
    viewBox: `0 0 ${layout.width} ${layout.height}`, width: layout.width, height: layout.height,
  });
  drawing.append(...columnHeads(index, layout));
  for (const node of layout.reading) {
    drawing.append(...edge(node, layout, onPath), ...stay(node, layout, iteration));
  }
  for (const node of layout.reading) drawing.append(nodeBox(node, layout, iteration, onPath));
  return drawing;
}

function columnHeads(index, layout) {
  const iteration = trace.iterations[index];
  const heads = [];
  if (layout.hasAncestors) {
    heads.push(svg("g", { class: "column" },
      svg("text", { x: columnX(-1), y: 19, class: "title" }, "before"),
      svg("text", { x: columnX(-1), y: 36, class: "line" }, "chosen earlier")));
  }
  for (let column = 0; column <= layout.deepest; column += 1) {
    const isCommitted = column <= iteration.committed.length;
    const x = columnX(column);
    const [title, line] = columnTexts(iteration, column, firstLayers[index]);
    heads.push(svg("g", { class: isCommitted ? "column committed" : "column" },
      svg("rect", {
        x: x - 10, y: 0, width: size.column - 6, height: layout.height, rx: 8, class: "band",
      }),
      svg("text", { x, y: 19, class: "title" }, title),
      svg("text", { x, y: 36, class: "line" }, line)));
  }
  return heads;
}

function columnTexts(iteration, column, firstLayer) {
  if (column === 0) return ["start", plural(iteration.roots.length, "live beam")];
  const drafted = iteration.drafted[column - 1];
  const committed = iteration.committed[column - 1];
  const isBonus = (id) => iteration.nodes.some((node) => node.id === id && node.role === "bonus");
  const mark = !committed ? "" : committed.some(isBonus) ? " ★" : " ✓";
  const drafts = drafted ? `${drafted.length} drafted` : "none drafted";
  return [`token ${firstLayer + column}${mark}`, `${drafts} → ${committed ? `width ${committed.length}` : "not reached"}`];
}

function edge(node, layout, onPath) {
  const from = layout.places.get(node.parent);
  if (!from) return [];
  const to = layout.places.get(node.id);
  const [x1, y1] = [from.x + size.width, from.y + size.height / 2];
  const [x2, y2] = [to.x, to.y + size.height / 2];
  const middle = (x1 + x2) / 2;
  const isPath = onPath.has(node.id) ? " path" : "";
  return [svg("path", {
    class: `edge ${node.role}${isPath}`,
    d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`,
    "stroke-width": 1.2 + 4.5 * (node.p ?? 0),
  })];
}

// An ended beam is a candidate of every later layer: a line as far as it was chosen.
function stay(node, layout, iteration) {
  const last = iteration.committed.findLastIndex((layer) => layer.includes(node.id));
  const { x, y } = layout.places.get(node.id);
  const end = columnX(last + 1) + size.width;
  if (!node.has_ended || end <= x + size.width) return [];
  const middle = y + size.height / 2;
  return [svg("path", { class: "stay", d: `M${x + size.width + 8} ${middle}H${end}M${end} ${middle - 7}v14` })];
}

function nodeBox(node, layout, iteration, onPath) {
  const { x, y } = layout.places.get(node.id);
  const role = roles[node.role];
  const bar = (value, top, kind) => svg("rect", {
    x: 8, y: top, width: Math.max(0, (size.width - 16) * (value ?? 0)), height: 3, rx: 1.5,
    class: `bar ${kind}`,
  });
  const rank = iteration.beams.findIndex((beam) => beam.node === node.id);
  const state = onPath.has(node.id) ? "" : " lost";
  const box = svg("g", {
    class: `node ${node.role}${state}`, transform: `translate(${x} ${y})`, tabindex: -1, role: "img",
    "data-node": node.id, "aria-label": nodeWords(node),
  },
  svg("rect", { width: size.width, height: size.height, rx: node.role === "accepted" ? 12 : 5, class: "box" }),
  svg("path", { d: role.shape, transform: "translate(8 5)", class: "shape" }),
  svg("text", { x: 26, y: 15 }, shortened(label(node), Math.floor((size.width - (rank < 0 ? 30 : 52)) / 8))),
  bar(node.p, 21, "target"), bar(node.q, 26, "draft"));
  if (node.proposer in proposers) {
    const x = size.width - (isHeldBack(node) ? 22 : 8);
    box.append(svg("text", { x, y: size.height - 2, class: "proposer" }, node.proposer));
  }
  if (isHeldBack(node)) {
    box.append(svg("text", { x: size.width - 13, y: size.height - 5, class: "forbidden" }, "⊘"));
  }
  if (node.has_ended) box.append(svg("path", { d: "M0 -2V34", transform: `translate(${size.width + 4} 0)`, class: "end" }));
  if (rank >= 0) {
    box.append(svg("circle", { cx: size.width - 13, cy: 11, r: 8, class: "badge" }),
      svg("text", { x: size.width - 13, y: 15, class: "rank" }, `${rank + 1}`));
  }
  return box;
}

// Whether the constraint forbids probable tokens of the target after a node.
function isHeldBack(node) {
  return node.forbidden.some(([, p]) => p >= 0.1);
}

function shortened(text, most) {
  const characters = [...text];
  return characters.length <= most ? text : `${characters.slice(0, most - 1).join("")}…`;
}

function nodeWords(node) {
  const held = isHeldBack(node) ? ", likely tokens forbidden after it" : "";
  const drafted = node.proposer ? ` drafted by ${node.proposer},` : "";
  return `${label(node)}, ${roles[node.role].name},${drafted} target ${probability(node.p)}, draft ${probability(node.q)}${held}`;
}

function nodeFacts(node, iteration) {
  const rankIn = (layers) => layers.flatMap((layer, index) => {
    const rank = layer.indexOf(node.id);
    return rank < 0 ? [] : [`${rank + 1} of ${layer.length}${layers.length > 1 ? ` in layer ${index + 1}` : ""}`];
  });
  const weight = node.log_weight ?? (node.p === 0 ? "−∞" : "not computed");
  return [
    ["target p̃", probability(node.p)],
    ["draft q̃", probability(node.q)],
    ["log weight of the path", typeof weight === "number" ? weight.toFixed(3) : weight],
    ["drafted by", node.proposer ?? "none"],
    ["rank in the draft", rankIn(iteration.drafted)[0] ?? "not drafted now"],
    ["rank in the choice", rankIn(iteration.committed)[0] ?? "not chosen"],
    ["token id", node.token],
    ["position", node.position],
  ];
}

// Probable tokens of the target that the constraint forbids here.
function forbiddenAfter(node) {
  if (!node.forbidden.length) return [];
  const entries = node.forbidden.map(([token, p]) =>
    element("li", {}, element("s", {}, trace.labels[token]), ` ${probability(p)}`));
  return [
    element("p", { class: "forbidden" }, "forbidden after it"),
    element("ul", { class: "forbidden" }, ...entries),
  ];
}

function detailsOf(node, iteration) {
  const role = roles[node.role];
  const rows = nodeFacts(node, iteration).map(([name, value]) =>
    element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, `${value}`)));
  const ended = node.has_ended ? " A sequence ends here." : "";
  return [
    element("p", { class: "token" }, label(node)),
    element("p", { class: `role ${node.role}` }, role.name),
    element("p", {}, role.note + ended),
    ...(node.proposer in proposers ? [element("p", {}, proposers[node.proposer])] : []),
    element("table", {}, ...rows),
    ...forbiddenAfter(node),
  ];
}
