// A bundle on disk, opened from its manifest: docs/bundle.md says what is in it.

import { readFile, stat } from "node:fs/promises";
import path from "node:path";

import { Tokenizer } from "@huggingface/tokenizers";

const SCHEMA_VERSIONS = [4, 3, 2]; // 2 and 3 have one `kv` for all layers
const MANIFEST_FIELDS = ["schema_version", "versions", "target", "draft", "files"];
const ENTRY_FIELDS = [
  ...["family", "vocab_size", "bos_token_id", "eos_token_ids", "context_length", "num_layers"],
  ...["caches", "dtype"],
  ...["quantization", "logits", "full_logits", "bit_exact", "masks", "sliding_window", "parity"],
  "unread_inputs", // text is all that a host has
  "adapter", // for people
];
const CACHE_FIELDS = ["kind", "layer", "num_heads", "key_width", "value_width", "dtype"];
const ATTENTION_ROWS = "attention rows";
const LOGITS_KIND = /^(full|topk:[1-9][0-9]*)$/;

/** What a bundle or a request is refused for; `main.mjs` prints it as one line. */
export class HostError extends Error {}

/** Read dsbd.json of `folder`, check what a host depends on, return {folder, manifest, roles}. */
export async function openBundle(folder) {
  const file = path.join(folder, "dsbd.json");
  let manifest;
  try {
    manifest = JSON.parse(await readFile(file, "utf8"));
  } catch (error) {
    throw new HostError(`cannot read ${file} (${error.message}); make one with dsbd-export`);
  }
  if (!SCHEMA_VERSIONS.includes(manifest?.schema_version)) {
    throw new HostError(
      `${file} has schema_version ${JSON.stringify(manifest?.schema_version)}, this host reads ` +
        `${SCHEMA_VERSIONS.join(", ")}; export again with the version of dsbd-ort that this ` +
        "host came with",
    );
  }
  checkFields(file, manifest, MANIFEST_FIELDS);
  const roles = manifest.draft === null ? ["target"] : ["target", "draft"];
  for (const role of roles) {
    if (typeof manifest[role] !== "object" || manifest[role] === null) {
      const found = JSON.stringify(manifest[role]);
      throw new HostError(`${file}: ${role} is ${found}, expected an entry; export again`);
    }
    if (manifest.schema_version < 4) manifest[role] = withCaches(manifest[role]);
    checkFields(`${file}: ${role}`, manifest[role], ENTRY_FIELDS);
    for (const cache of manifest[role].caches) {
      if (cache.kind !== ATTENTION_ROWS) {
        throw new HostError(
          `${file}: ${role} has a cache of kind ${JSON.stringify(cache.kind)}: the model does not ` +
            "attend in all layers, which this host does not run; use dsbd-run or the C library",
        );
      }
      checkFields(`${file}: ${role}: a cache`, cache, CACHE_FIELDS);
    }
    checkLogits(`${file}: ${role}`, manifest[role].logits);
  }
  await checkFiles(folder, manifest.files, roles);
  for (const field of ["vocab_size", "bos_token_id", "eos_token_ids"]) {
    const [target, draft = target] = roles.map((role) => JSON.stringify(manifest[role][field]));
    if (target !== draft) {
      throw new HostError(
        `target and draft differ in ${field}: ${target} and ${draft}; export a pair that shares ` +
          "its tokenizer",
      );
    }
  }
  return { folder, manifest, roles };
}

/** Return an entry of version 2 or 3 with the caches of each layer, which are all alike there. */
function withCaches({ kv, ...entry }) {
  const { num_layers, num_heads, head_dim, dtype } = kv;
  const widths = { key_width: head_dim, value_width: head_dim };
  const caches = Array.from({ length: num_layers }, (_, layer) => {
    return { kind: ATTENTION_ROWS, layer, num_heads, ...widths, dtype };
  });
  return { ...entry, num_layers, caches };
}

/** Return {encode(text), decodeAfter(promptIds, ids)} of a bundle; both work on arrays of numbers. */
export async function openTokenizer({ folder, manifest }) {
  const config = await readJsonIfThere(path.join(folder, "tokenizer_config.json"));
  const tokenizer = new Tokenizer(
    JSON.parse(await readFile(path.join(folder, "tokenizer.json"), "utf8")),
    config,
  );
  const bos = manifest.target.bos_token_id;
  const addsBos =
    config.add_bos_token === true && bos !== null && !tokenizer.encode("").ids.includes(bos);
  const decode = (ids) => tokenizer.decode(ids, { skip_special_tokens: true });
  return {
    encode: (text) => [...(addsBos ? [bos] : []), ...tokenizer.encode(text).ids],
    // Behind a prompt: many decoders drop the space before the first word of a text.
    decodeAfter: (promptIds, ids) =>
      decode([...promptIds, ...ids]).slice(wholeText(decode(promptIds)).length),
  };
}

/** Return a text without the character that is not finished at its end. */
function wholeText(text) {
  return text.replace(/\uFFFD$/, "");
}

/** Refuse what only a later version knows: a field that is null says that the bundle lacks it. */
function checkFields(where, object, known) {
  for (const [name, value] of Object.entries(object)) {
    if (!known.includes(name) && value !== null) {
      throw unknownTo(where, name);
    }
  }
}

function checkLogits(where, logits) {
  if (!LOGITS_KIND.test(logits)) throw unknownTo(where, `logits ${JSON.stringify(logits)}`);
}

const unknownTo = (where, what) =>
  new HostError(
    `${where} has ${what}, which this host does not know; use the host of the version of ` +
      "dsbd-ort that made the bundle",
  );

async function checkFiles(folder, files, roles) {
  const needed = roles.flatMap((role) => [`${role}/model.onnx`, `${role}/prune.onnx`]);
  for (const name of ["tokenizer.json", ...needed]) {
    if (!(name in files)) {
      throw new HostError(`dsbd.json of ${folder} lists no ${name}; export again`);
    }
  }
  for (const [name, { size }] of Object.entries(files)) {
    if (path.isAbsolute(name) || name.split(/[\\/]/).includes("..")) {
      throw new HostError(`dsbd.json names ${name}, a file outside the bundle; refused`);
    }
    const found = await stat(path.join(folder, name)).catch(() => undefined);
    if (found?.size !== size) {
      throw new HostError(
        `${path.join(folder, name)} has ${found?.size ?? "no"} bytes, the manifest says ${size}; ` +
          "copy the whole bundle or export again",
      );
    }
  }
}

async function readJsonIfThere(file) {
  try {
    return JSON.parse(await readFile(file, "utf8"));
  } catch (error) {
    if (error.code === "ENOENT") return {};
    throw error;
  }
}
