// The embedded trace, and functions on it that several parts of the page use.

const trace = JSON.parse(document.getElementById("trace").textContent);

// How each role is named, drawn and explained. Shapes lie in a box of 12 by 12.
const roles = {
  root: {
    name: "live beam", shape: "M1 1H11V11H1Z", note: "A beam that was live when this iteration began.",
  },
  accepted: {
    name: "accepted", shape: "M6 0.5A5.5 5.5 0 1 1 5.99 0.5Z",
    note: "Drafted, and the target chose it: a layer that cost no target call of its own.",
  },
  bonus: {
    name: "bonus", shape: "M6 0L7.6 4.1 12 4.4 8.6 7.2 9.7 11.5 6 9.1 2.3 11.5 3.4 7.2 0 4.4 4.4 4.1Z",
    note: "The target chose it although it was not drafted. The iteration ends with such a layer.",
  },
  finished: {
    name: "finished", shape: "M1 0.5H3.5V11.5H1ZM5 1.5H12L9.5 4.5 12 7.5H5Z",
    note: "A sequence ends here: one of the finished hypotheses of the beam search.",
  },
  kept: {
    name: "kept for later", shape: "M6 0L12 6 6 12 0 6Z",
    note: "Not reached yet, but below a beam that continues: already computed, it costs nothing later.",
  },
  rejected: {
    name: "rejected", shape: "M1 1L11 11M11 1L1 11",
    note: "Drafted, but the target chose others of its layer: by weight, and by chance when sampling.",
  },
  pruned: {
    name: "pruned", shape: "M1 6H11",
    note: "Below a node that was not chosen: its rows are dropped from both caches.",
  },
  ancestor: {
    name: "chosen earlier", shape: "M6 1.5A4.5 4.5 0 1 1 5.99 1.5Z",
    note: "Stays until both models have computed what is below it.",
  },
};

// Who drafts without the model: nodes of theirs are marked.
const proposers = {
  ngram: "It followed the last tokens before: drafted by the n-gram drafter.",
  constraint: "One of the few tokens that the constraint allows here: drafted without a model.",
};

function iterationTable(iteration) {
  return new Map(iteration.nodes.map((node) => [node.id, node]));
}

// Layers committed before each iteration: [0, 3, 4, ...].
const firstLayers = trace.iterations.reduce(
  (sums, iteration) => [...sums, sums.at(-1) + iteration.committed.length], [0]);

const numPrompt = trace.prompt.token_ids.length;

function label(node) {
  return trace.labels[node.token];
}

// Rows of trace.hypotheses from the first new token to the given one.
function chain(hypothesis) {
  const rows = [];
  for (let row = hypothesis; row !== 0; row = trace.hypotheses[row].parent) rows.push(row);
  return rows.reverse();
}

// Text after the last row that a later token could still change.
function restOf(rows) {
  return rows.length ? trace.hypotheses[rows.at(-1)].rest : "";
}

function textOf(rows) {
  return rows.map((row) => trace.hypotheses[row].text).join("") + restOf(rows);
}

function logprob(rows) {
  return rows.reduce((sum, row) => sum + trace.hypotheses[row].logprob, 0);
}

// Beams of an iteration, best first by the score that ranks sequences.
function rankedBeams(iteration) {
  const beams = iteration.beams.map((beam) => {
    const rows = chain(beam.hypothesis);
    const sum = logprob(rows);
    return { ...beam, rows, logprob: sum, score: sum / rows.length ** trace.config.length_penalty };
  });
  return beams.sort((a, b) => b.score - a.score);
}

function numAgreed(beams) {
  const [first, ...others] = beams.map((beam) => beam.rows);
  const parts = first.findIndex((row, index) => others.some((rows) => rows[index] !== row));
  return parts < 0 ? first.length : parts;
}

function probability(value) {
  if (value === null) return "not computed";
  return value >= 0.001 || value === 0 ? value.toFixed(3) : value.toExponential(1);
}

function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

// An HTML element with text or children.
function element(name, attributes = {}, ...content) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}
