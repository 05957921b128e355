// A saved trie of token sequences, read from its file: docs/constraints.md says what is in it.

import { readFile } from "node:fs/promises";
import { crc32 } from "node:zlib";

import { HostError } from "./bundle.mjs";

const VERSION = 2n;
const SEAL_BYTES = 132;
const MAGIC = "\x93NUMPY\x01\x00";
const TYPES = { "<i8": BigInt64Array, "<i4": Int32Array, "|b1": Uint8Array, "<u4": Uint32Array };

/** Which tokens may follow a path of new tokens. The state of a path is a node of the trie. */
export class Trie {
  /**
   * @param arrays {head, rowOffsets, tokens, isEnd} of the file.
   * @param ends ids that end a sequence where a longer one goes on, and with head[1] everywhere.
   */
  constructor({ head, rowOffsets, tokens, isEnd }, ends) {
    this.rowOffsets = rowOffsets;
    this.tokens = tokens;
    this.isEnd = isEnd;
    this.needsEnd = head[1] === 1n;
    this.ends = ends;
    this.start = 0;
  }

  /** The tokens that may follow; none where the path has ended. */
  allowed(state) {
    if (state === null) return [];
    const following = this.tokens.subarray(...this.#row(state));
    const mayEnd = this.isEnd[state] === 1 && (following.length > 0 || this.needsEnd);
    return [...following, ...(mayEnd ? this.ends : [])];
  }

  /** The state of a path with one more of its allowed tokens; null behind an end. */
  next(state, token) {
    const [first, stop] = this.#row(state);
    const place = this.tokens.subarray(first, stop).indexOf(token);
    return place < 0 ? null : first + place + 1;
  }

  #row(state) {
    return [Number(this.rowOffsets[state]), Number(this.rowOffsets[state + 1])];
  }
}

/** Read the trie in `file` for a model of this vocabulary and these end-of-sequence ids. */
export async function openTrie(file, { vocab_size, eos_token_ids }) {
  let content;
  try {
    content = await readFile(file);
  } catch (error) {
    throw new HostError(`cannot read ${file} (${error.message})`);
  }
  const [head, headEnd] = readArray(file, content, 0);
  if (head[0] !== VERSION) {
    throw new HostError(`${file} is a trie of version ${head[0]}, this host reads ${VERSION}`);
  }
  checkSeal(file, content);
  const arrays = [];
  for (let offset = headEnd; arrays.length < 3; ) {
    const [array, end] = readArray(file, content, offset);
    arrays.push(array);
    offset = end;
  }
  const [rowOffsets, tokens, isEnd] = arrays;
  if (rowOffsets.length !== isEnd.length + 1 || tokens.length !== isEnd.length - 1) {
    throw new HostError(`${file} has arrays that make no trie; save it again`);
  }
  const highest = tokens.reduce((most, token) => Math.max(most, token), -1);
  if (highest >= vocab_size) {
    throw new HostError(
      `${file} has the token id ${highest}; expected 0 to ${vocab_size - 1}, the model's vocabulary`,
    );
  }
  return new Trie({ head, rowOffsets, tokens, isEnd }, eos_token_ids);
}

/** Refuse a file whose last array is not the checksum of all bytes before it. */
function checkSeal(file, content) {
  const stop = content.length - SEAL_BYTES;
  const [seal] = stop > 0 ? readArray(file, content, stop) : [[]];
  if (seal[0] !== crc32(content.subarray(0, stop))) throw damaged(file);
}

function damaged(file) {
  return new HostError(`${file} is no saved trie, or not whole; save it again`);
}

/** Return the .npy array (format 1.0, one dimension) at an offset, and where it ends. */
function readArray(file, content, offset) {
  if (content.toString("latin1", offset, offset + MAGIC.length) !== MAGIC) throw damaged(file);
  const begin = offset + MAGIC.length + 2;
  const header = content.toString("latin1", begin, begin + content.readUInt16LE(begin - 2));
  const [, type] = /'descr': '([^']+)'/.exec(header) ?? [];
  const [, size] = /'shape': \((\d+),\)/.exec(header) ?? [];
  const first = begin + header.length;
  if (TYPES[type] === undefined || size === undefined) throw damaged(file);
  const stop = first + Number(size) * TYPES[type].BYTES_PER_ELEMENT;
  if (stop > content.length) throw damaged(file);
  return [new TYPES[type](Uint8Array.from(content.subarray(first, stop)).buffer), stop];
}
