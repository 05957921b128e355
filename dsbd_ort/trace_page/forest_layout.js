// Positions of the nodes of an iteration's forest: a column per layer, a row per leaf.

const size = { width: 126, height: 32, column: 176, row: 39, top: 52, left: 12 };

// Columns before and after the start that the widest iterations need: stepping moves nothing.
const columns = trace.iterations.reduce(({ before, after }, iteration) => {
  const depths = iteration.nodes.map(depthIn(iteration));
  return {
    before: Math.max(before, -Math.min(...depths)),
    after: Math.max(after, ...depths, iteration.committed.length),
  };
}, { before: 0, after: 0 });

function fitColumns(width) {
  const fitting = (width - size.left) / (columns.before + 1 + columns.after);
  size.column = Math.min(Math.max(fitting, 150), 210);
  size.width = size.column - 46;
}

// Return a function: how many layers a node lies below the start (ancestors lie above it).
function depthIn(iteration) {
  const byId = iterationTable(iteration);
  const start = Math.max(...iteration.roots.map((id) => byId.get(id).position));
  return (node) => (node.role === "root" ? 0 : node.position - start);
}

function columnX(depth) {
  return size.left + (depth + columns.before) * size.column;
}

function layoutForest(iteration) {
  const places = new Map();
  const order = childOrder(iteration);
  const children = new Map(iteration.nodes.map((node) => [node.id, []]));
  const tops = [];
  for (const node of iteration.nodes) (children.get(node.parent) ?? tops).push(node);
  for (const siblings of [tops, ...children.values()]) {
    siblings.sort((a, b) => order(a) - order(b) || a.id - b.id);
  }
  const depth = depthIn(iteration);
  const reading = [];
  let numLeaves = 0;
  const place = (node) => {
    reading.push(node);
    const below = children.get(node.id).map(place);
    const row = below.length ? (below[0] + below.at(-1)) / 2 : numLeaves++;
    places.set(node.id, { x: columnX(depth(node)), y: size.top + row * size.row });
    return row;
  };
  tops.forEach(place);
  return {
    places, reading,
    deepest: Math.max(...iteration.nodes.map(depth), iteration.committed.length),
    hasAncestors: iteration.nodes.some((node) => node.role === "ancestor"),
    width: columnX(columns.after + 1),
    height: size.top + numLeaves * size.row,
  };
}

// Chosen nodes first, in the order chosen; then drafted ones in the order drafted.
function childOrder(iteration) {
  const ranks = new Map();
  const note = (layers, start) => layers.forEach((layer) => layer.forEach((id, rank) => {
    if (!ranks.has(id)) ranks.set(id, start + rank);
  }));
  note([iteration.roots], 0);
  note(iteration.committed, 1000);
  note(iteration.drafted, 2000);
  return (node) => ranks.get(node.id) ?? (node.role === "ancestor" ? 0 : 3000);
}

// Ids of nodes on the paths of the beams that are kept.
function survivingPath(iteration) {
  const byId = iterationTable(iteration);
  const path = new Set();
  for (const beam of iteration.beams) {
    for (let node = byId.get(beam.node); node; node = byId.get(node.parent)) path.add(node.id);
  }
  return path;
}
