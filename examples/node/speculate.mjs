// Greedy speculative decoding: the draft proposes a forest, the target verifies it in one call.
// Without a draft the forest is its root alone, and an iteration is one token.

import { HostError } from "./bundle.mjs";
import { range } from "./engine.mjs";
import { Forest } from "./forest.mjs";

/**
 * Continue a prompt with the target's likeliest tokens, as greedy decoding without a draft would.
 *
 * @param target, draft two `Engine`s with empty caches; `draft` may be null.
 * @param options {maxNewTokens, draftLength, draftBranches}: from the draft's `draftBranches`
 *   likeliest next tokens a chain of `draftLength` tokens each is drafted. With a `trie` the answer
 *   is one of its sequences.
 * @returns {tokenIds, finishReason, numIterations}; an end-of-sequence token is included.
 */
export async function speculate(target, draft, promptIds, options) {
  const { maxNewTokens, draftLength, draftBranches, trie } = options;
  const ends = new Set(target.entry.eos_token_ids);
  const tokens = [...promptIds];
  const limit = promptIds.length + maxNewTokens;
  let numIterations = 0;
  let state = trie?.start;
  await target.prefill(tokens.slice(0, -1));
  for (;;) {
    const length = Math.min(draftLength, limit - tokens.length - 1);
    const walk = new TrieWalk(trie, state);
    const drafted = await draftForest(draft, tokens, length, draftBranches, walk);
    const { path, next } = await verify(target, drafted.forest, walk);
    numIterations += 1;
    const chosen = path.slice(1).map((node) => drafted.forest.tokens[node]);
    for (const token of next === undefined ? chosen : [...chosen, next]) {
      tokens.push(token);
      state = trie?.next(state, token);
      const isEnd = ends.has(token);
      const isWhole = !isEnd && trie !== undefined && trie.allowed(state).length === 0;
      if (isEnd || isWhole || tokens.length === limit) {
        const finishReason = isEnd ? "eos" : isWhole ? "stop" : "length";
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
async function verify(target, forest, walk) {
  const nodes = range(forest.tokens.length);
  const best = await target.step(
    forest.tokens,
    forest.positions,
    nodes.map((node) => seenRows(forest, node, (other) => forest.numPrefixRows + other)),
    nodes,
    1,
    walk.allowed(forest, nodes),
  );
  const path = [0];
  for (;;) {
    const node = path.at(-1);
    const next = best[node].ids[0];
    if (next === undefined && walk.goesOn(forest, node)) {
      throw new HostError("the top-k head leaves out every token of the trie; export full logits");
    }
    const child = forest.child(node, next);
    if (child < 0) return { path, next };
    path.push(child);
  }
}

/** Grow a forest behind `tokens`; `rows` maps its nodes to the draft's cache rows. */
async function draftForest(draft, tokens, length, branches, walk) {
  const forest = new Forest(tokens.at(-1), tokens.length - 1);
  const rows = new Map();
  if (draft === null) return { forest, rows };
  await draft.prefill(tokens.slice(draft.numRows, -1)); // what was accepted and has no row yet
  let layer = [0];
  for (let depth = 0; depth < length && layer.length > 0; depth += 1) {
    layer.forEach((node, index) => rows.set(node, draft.numRows + index));
    const best = await draft.step(
      layer.map((node) => forest.tokens[node]),
      layer.map((node) => forest.positions[node]),
      layer.map((node) => seenRows(forest, node, (other) => rows.get(other))),
      range(layer.length),
      depth === 0 ? branches : 1,
      walk.allowed(forest, layer),
    );
    layer = layer.flatMap((node, index) => best[index].ids.map((token) => forest.add(token, node)));
  }
  return { forest, rows };
}

/** The states of a trie along a forest; without a trie every token is allowed. */
class TrieWalk {
  constructor(trie, rootState) {
    this.trie = trie;
    this.rootState = rootState;
  }

  /** For each node the tokens that may follow. */
  allowed(forest, nodes) {
    return this.trie && nodes.map((node) => this.trie.allowed(this.#state(forest, node)));
  }

  goesOn(forest, node) {
    return this.trie === undefined || this.trie.allowed(this.#state(forest, node)).length > 0;
  }

  #state(forest, node) {
    return forest
      .path(node)
      .slice(1)
      .reduce((state, other) => this.trie.next(state, forest.tokens[other]), this.rootState);
  }
}

/** The forest mask's rule: a node sees the prefix, its ancestors and itself. */
function seenRows(forest, node, rowOfNode) {
  return [...range(forest.numPrefixRows), ...forest.path(node).map(rowOfNode)];
}
