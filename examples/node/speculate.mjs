// Greedy speculative decoding: the draft proposes a forest, the target verifies it in one call.
// Without a draft the forest is its root alone, and an iteration is one token.

import { range } from "./engine.mjs";
import { Forest } from "./forest.mjs";

/**
 * Continue a prompt with the target's likeliest tokens, as greedy decoding without a draft would.
 *
 * @param target, draft two `Engine`s with empty caches; `draft` may be null.
 * @param options {maxNewTokens, draftLength, draftBranches}: from the draft's `draftBranches`
 *   likeliest next tokens a chain of `draftLength` tokens each is drafted.
 * @returns {tokenIds, finishReason, numIterations}; an end-of-sequence token is included.
 */
export async function speculate(target, draft, promptIds, options) {
  const { maxNewTokens, draftLength, draftBranches } = options;
  const ends = new Set(target.entry.eos_token_ids);
  const tokens = [...promptIds];
  const limit = promptIds.length + maxNewTokens;
  let numIterations = 0;
  await target.prefill(tokens.slice(0, -1));
  for (;;) {
    const length = Math.min(draftLength, limit - tokens.length - 1);
    const drafted = await draftForest(draft, tokens, length, draftBranches);
    const { path, next } = await verify(target, drafted.forest);
    numIterations += 1;
    for (const token of [...path.slice(1).map((node) => drafted.forest.tokens[node]), next]) {
      tokens.push(token);
      const isEnd = ends.has(token);
      if (isEnd || tokens.length === limit) {
        const finishReason = isEnd ? "eos" : "length";
        return { tokenIds: tokens.slice(promptIds.length), finishReason, numIterations };
      }
    }
    const { numPrefixRows } = drafted.forest;
    await target.keep([...range(numPrefixRows), ...path.map((node) => numPrefixRows + node)]);
    if (draft === null) continue;
    const draftRows = path.map((node) => drafted.rows.get(node)).filter((row) => row !== undefined);
    await draft.keep([...range(numPrefixRows), ...draftRows]);
  }
}

/** Compute the whole forest in one call of the target; return the path that it agrees with. */
async function verify(target, forest) {
  const nodes = range(forest.tokens.length);
  const best = await target.step(
    forest.tokens,
    forest.positions,
    nodes.map((node) => seenRows(forest, node, (other) => forest.numPrefixRows + other)),
    nodes,
    1,
  );
  const path = [0];
  for (;;) {
    const node = path.at(-1);
    const next = best[node].ids[0];
    const child = forest.child(node, next);
    if (child < 0) return { path, next };
    path.push(child);
  }
}

/** Grow a forest behind `tokens`; `rows` maps its nodes to the draft's cache rows. */
async function draftForest(draft, tokens, length, branches) {
  const forest = new Forest(tokens.at(-1), tokens.length - 1);
  const rows = new Map();
  if (draft === null) return { forest, rows };
  await draft.prefill(tokens.slice(draft.numRows, -1)); // what was accepted and has no row yet
  let layer = [0];
  for (let depth = 0; depth < length; depth += 1) {
    layer.forEach((node, index) => rows.set(node, draft.numRows + index));
    const best = await draft.step(
      layer.map((node) => forest.tokens[node]),
      layer.map((node) => forest.positions[node]),
      layer.map((node) => seenRows(forest, node, (other) => rows.get(other))),
      range(layer.length),
      depth === 0 ? branches : 1,
    );
    layer = layer.flatMap((node, index) => best[index].ids.map((token) => forest.add(token, node)));
  }
  return { forest, rows };
}

/** The forest mask's rule: a node sees the prefix, its ancestors and itself. */
function seenRows(forest, node, rowOfNode) {
  return [...range(forest.numPrefixRows), ...forest.path(node).map(rowOfNode)];
}
