// A bundle on disk, opened from its manifest: docs/bundle.md says what is in it.

import { readFile, stat } from "node:fs/promises";
import path from "node:path";

import { Tokenizer } from "@huggingface/tokenizers";

const SCHEMA_VERSION = 2;
const ROLES = ["target", "draft"];
const FILES = ["tokenizer.json", ...ROLES.flatMap((r) => [`${r}/model.onnx`, `${r}/prune.onnx`])];

/** What a bundle or a request is refused for; `main.mjs` prints it as one line. */
export class HostError extends Error {}

/** Read dsbd.json of `folder`, check what a host depends on, return {folder, manifest}. */
export async function openBundle(folder) {
  const file = path.join(folder, "dsbd.json");
  let manifest;
  try {
    manifest = JSON.parse(await readFile(file, "utf8"));
  } catch (error) {
    throw new HostError(`cannot read ${file} (${error.message}); make one with dsbd-export`);
  }
  if (manifest.schema_version !== SCHEMA_VERSION) {
    throw new HostError(
      `${file} has schema_version ${manifest.schema_version}, this host reads ${SCHEMA_VERSION}; ` +
        "export again with the version of dsbd-ort that this host came with",
    );
  }
  await checkFiles(folder, manifest.files);
  for (const field of ["vocab_size", "bos_token_id", "eos_token_ids"]) {
    const [target, draft] = ROLES.map((role) => JSON.stringify(manifest[role][field]));
    if (target !== draft) {
      throw new HostError(
        `target and draft differ in ${field}: ${target} and ${draft}; export a pair that shares ` +
          "its tokenizer",
      );
    }
  }
  return { folder, manifest };
}

/** Return {encode(text), decode(ids)} of a bundle; both work on arrays of numbers. */
export async function openTokenizer({ folder, manifest }) {
  const config = await readJsonIfThere(path.join(folder, "tokenizer_config.json"));
  const tokenizer = new Tokenizer(
    JSON.parse(await readFile(path.join(folder, "tokenizer.json"), "utf8")),
    config,
  );
  const bos = manifest.target.bos_token_id;
  const addsBos =
    config.add_bos_token === true && bos !== null && !tokenizer.encode("").ids.includes(bos);
  return {
    encode: (text) => [...(addsBos ? [bos] : []), ...tokenizer.encode(text).ids],
    decode: (ids) => tokenizer.decode(ids, { skip_special_tokens: true }),
  };
}

async function checkFiles(folder, files) {
  for (const name of FILES) {
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
