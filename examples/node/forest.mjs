// The drafted tokens of one iteration as a tree; node 0 is the last token that is certain.

/**
 * A tree of tokens, parents before children.
 *
 * With the prefix of 5 rows, the nodes "def" -> "read", "def" -> "write", "read" -> "_" have the
 * parents [-1, 0, 0, 1] and the positions [5, 6, 6, 7]; node 3 sees rows 0-4, 5, 6 and 8.
 */
export class Forest {
  constructor(rootToken, numPrefixRows) {
    this.numPrefixRows = numPrefixRows;
    this.tokens = [rootToken];
    this.parents = [-1];
    this.positions = [numPrefixRows];
  }

  /** Add a node, return its number. */
  add(token, parent) {
    this.tokens.push(token);
    this.parents.push(parent);
    this.positions.push(this.positions[parent] + 1);
    return this.tokens.length - 1;
  }

  /** The nodes from node 0 to `node`. */
  path(node) {
    return node < 0 ? [] : [...this.path(this.parents[node]), node];
  }

  /** The child of `node` with this token, or -1. */
  child(node, token) {
    return this.parents.findIndex((parent, i) => parent === node && this.tokens[i] === token);
  }
}
