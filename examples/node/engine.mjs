// One engine of a bundle and its caches: rows are appended, and kept or dropped.

import path from "node:path";

import ort from "onnxruntime-node";

import { HostError } from "./bundle.mjs";

const MAX_STEP_ROWS = 256;
const LOG_ERRORS = 3;
const CACHE_TYPES = {
  fp32: ["float32", Float32Array],
  fp16: ["float16", Uint16Array], // the bits of the numbers: nobody here reads them
};

/**
 * The target or the draft of a bundle.
 *
 * Every cache is one tensor that is both `past` (fed) and `present` (fetched), so the engine and
 * the prune graph write into it and nothing is handed back.
 */
export class Engine {
  /** Open the engine of `role` with caches of `capacity` rows. */
  static async open({ folder, manifest }, role, capacity) {
    const entry = manifest[role];
    const other = entry.caches.find(({ dtype }) => !(dtype in CACHE_TYPES));
    if (other !== undefined) {
      throw new HostError(
        `${role} has caches of ${other.dtype}, the CPU provider runs ` +
          `${Object.keys(CACHE_TYPES).join(" and ")}; export with --dtype fp32`,
      );
    }
    const options = { logSeverityLevel: LOG_ERRORS };
    if (entry.quantization === "int8-dynamic") {
      // else sums saturate on x86 without VNNI
      options.extra = { session: { x64quantprecision: "1" } };
    }
    const [model, prune] = await Promise.all(
      ["model.onnx", "prune.onnx"].map((name) =>
        ort.InferenceSession.create(path.join(folder, role, name), options),
      ),
    );
    return new Engine(entry, model, prune, capacity);
  }

  constructor(entry, model, prune, capacity) {
    this.entry = entry;
    this.capacity = capacity;
    this.numRows = 0;
    this.numCalls = 0;
    this.positions = []; // of the rows in the cache
    this.model = model;
    this.prune = prune;
    [this.past, this.present] = emptyCaches(entry.caches, capacity);
  }

  /**
   * Append rows, parents before children; return the likeliest tokens of the asked ones.
   *
   * @param tokens S token ids.
   * @param positions S positions; siblings share one.
   * @param seen S arrays: the cache rows that a node sees, counted from the first row of the
   *   cache; the S new rows are numRows .. numRows + S - 1, and a node sees its own.
   * @param logitRows which of the S nodes (0 .. S-1) are asked for.
   * @param count how many tokens of each.
   * @param allowed for each asked node the ids to choose from; undefined for all.
   * @returns for each asked node {ids, logits}, the likeliest first.
   */
  async step(tokens, positions, seen, logitRows, count, allowed) {
    const size = tokens.length;
    if (this.numRows + size > this.capacity) {
      throw new HostError(`${this.numRows + size} rows, but the caches hold ${this.capacity}`);
    }
    this.positions.splice(this.numRows, Infinity, ...positions);
    const feeds = {
      input_ids: int64(tokens, [1, size]),
      position_ids: int64(positions, [1, size]),
      write_indices: int64([this.numRows], [1]),
      logit_rows: int64(logitRows, [logitRows.length]),
      ...this.#masks(positions, seen),
      ...this.past,
    };
    const fetches = { ...this.present }; // not the full logits that a top-k head leaves behind
    for (const name of headOutputs(this.entry)) fetches[name] = null;
    const outputs = await this.model.run(feeds, fetches);
    this.numRows += size;
    this.numCalls += 1;
    return logitRows.map((_, row) => likeliest(outputs, row, count, allowed?.[row]));
  }

  /**
   * Append a prompt, or any tokens that follow each other; return nothing.
   *
   * One row is asked for all the same: ONNX Runtime 1.30 ends the process when a top-k head gets
   * none. Its likeliest tokens are not looked for.
   */
  async prefill(tokens) {
    for (let start = 0; start < tokens.length; start += MAX_STEP_ROWS) {
      const chunk = tokens.slice(start, start + MAX_STEP_ROWS);
      const first = this.numRows;
      const positions = chunk.map((_, node) => first + node);
      await this.step(chunk, positions, chunk.map((_, node) => range(first + node + 1)), [0], 0);
    }
  }

  /** Keep the cache rows `rows` (increasing), which become rows 0, 1, 2 ...; drop all others. */
  async keep(rows) {
    const inPlace = rows.findIndex((row, index) => row !== index);
    if (inPlace >= 0) {
      const moved = rows.slice(inPlace);
      const feeds = {
        src_rows: int64(moved, [moved.length]),
        write_indices: int64([inPlace], [1]),
        ...this.past,
      };
      await this.prune.run(feeds, this.present);
    }
    this.positions = rows.map((row) => this.positions[row]);
    this.numRows = rows.length;
  }

  /** The mask inputs of the graph, [1, 1, S, capacity]: what a node does not see is false. */
  #masks(positions, seen) {
    const masks = {};
    for (const name of this.entry.masks) {
      const window =
        name === "attention_mask_sliding" ? this.entry.sliding_window : Number.POSITIVE_INFINITY;
      const bits = new Uint8Array(seen.length * this.capacity);
      seen.forEach((rows, node) => {
        for (const row of rows) {
          const isNear = positions[node] - this.positions[row] < window;
          bits[node * this.capacity + row] = isNear ? 1 : 0;
        }
      });
      masks[name] = new ort.Tensor("bool", bits, [1, 1, seen.length, this.capacity]);
    }
    return masks;
  }
}

/** [0, 1, ..., count - 1] */
export const range = (count) => Array.from({ length: count }, (_, index) => index);

const int64 = (values, dims) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);

/** Return the caches, zeros, by input name and, the same tensors, by output name. */
function emptyCaches(caches, capacity) {
  const [past, present] = [{}, {}];
  for (const { layer, num_heads, key_width, value_width, dtype } of caches) {
    const [type, ArrayType] = CACHE_TYPES[dtype];
    for (const [part, width] of Object.entries({ key: key_width, value: value_width })) {
      const numbers = new ArrayType(num_heads * capacity * width);
      const cache = new ort.Tensor(type, numbers, [1, num_heads, capacity, width]);
      past[`past_key_values.${layer}.${part}`] = cache;
      present[`present.${layer}.${part}`] = cache;
    }
  }
  return [past, present];
}

/** The outputs of the head that this host reads. */
const headOutputs = ({ logits }) => (logits === "full" ? ["logits"] : ["top_ids", "top_logits"]);

/** The `count` likeliest tokens of one row, from all logits or from a top-k head. */
function likeliest({ logits, top_ids, top_logits }, row, count, allowed) {
  if (allowed !== undefined) {
    return likeliestAllowed({ logits, top_ids, top_logits }, row, count, allowed);
  }
  if (logits === undefined) {
    const most = top_ids.dims[1];
    if (count > most) {
      throw new HostError(`${count} tokens asked for, the engine returns ${most} of a row`);
    }
    const [first, stop] = [row * most, row * most + count];
    return {
      ids: Array.from(top_ids.data.subarray(first, stop), Number),
      logits: Array.from(top_logits.data.subarray(first, stop)),
    };
  }
  const numbers = logits.data.subarray(row * logits.dims[1], (row + 1) * logits.dims[1]);
  const ids = [];
  while (ids.length < count) {
    let best = -1;
    numbers.forEach((value, id) => {
      if ((best < 0 || value > numbers[best]) && !ids.includes(id)) best = id;
    });
    ids.push(best);
  }
  return { ids, logits: ids.map((id) => numbers[id]) };
}

/** The likeliest of the allowed tokens of one row, fewer where there are fewer. */
function likeliestAllowed({ logits, top_ids, top_logits }, row, count, allowed) {
  const most = logits === undefined ? top_ids.dims[1] : logits.dims[1];
  const numbers = (logits ?? top_logits).data.subarray(row * most, (row + 1) * most);
  const ids = logits === undefined
    ? Array.from(top_ids.data.subarray(row * most, (row + 1) * most), Number)
    : undefined;
  const found = allowed
    .map((id) => ({ id, logit: numbers[ids === undefined ? id : ids.indexOf(id)] }))
    .filter(({ logit }) => logit !== undefined)
    .sort((a, b) => b.logit - a.logit || a.id - b.id)
    .slice(0, count);
  return { ids: found.map(({ id }) => id), logits: found.map(({ logit }) => logit) };
}
