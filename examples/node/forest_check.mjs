// One forest in one call against its paths one by one: the same logits, or the host is wrong.

import { range } from "./engine.mjs";
import { Forest } from "./forest.mjs";

const COUNT = 5; // likeliest tokens that are compared

/**
 * Return the largest difference of a logit between a forest pass and a plain pass of each path.
 *
 * The forest: the two likeliest tokens after the prompt, and after each of them its two.
 *
 * @param engine an `Engine`; its cache is left empty.
 */
export async function forestDifference(engine, promptIds) {
  const forest = new Forest(promptIds.at(-1), promptIds.length - 1);
  let layer = [0];
  while (forest.tokens.length < 7) {
    const children = [];
    for (const node of layer) {
      const { ids } = await plainPass(engine, promptIds, forest, node);
      children.push(...ids.slice(0, 2).map((id) => forest.add(id, node)));
    }
    layer = children;
  }
  await engine.keep([]);
  await engine.prefill(promptIds.slice(0, -1));
  const prefix = range(forest.numPrefixRows);
  const nodes = range(forest.tokens.length);
  const seen = nodes.map((node) => [
    ...prefix,
    ...forest.path(node).map((other) => forest.numPrefixRows + other),
  ]);
  const found = await engine.step(forest.tokens, forest.positions, seen, nodes, COUNT);
  let largest = 0;
  for (const node of nodes) {
    const wanted = await plainPass(engine, promptIds, forest, node);
    wanted.logits.forEach((logit, i) => {
      largest = Math.max(largest, Math.abs(logit - found[node].logits[i]));
    });
  }
  await engine.keep([]);
  return largest;
}

/** The likeliest tokens behind one path of the forest, computed as a sequence of its own. */
async function plainPass(engine, promptIds, forest, node) {
  const tokens = [...promptIds.slice(0, -1), ...forest.path(node).map((n) => forest.tokens[n])];
  await engine.keep([]);
  await engine.prefill(tokens.slice(0, -1));
  const last = tokens.length - 1;
  const [best] = await engine.step([tokens[last]], [last], [range(last + 1)], [0], COUNT);
  return best;
}
