// node main.mjs BUNDLE --prompt TEXT: continue a prompt with a bundle, from JavaScript alone.

import { parseArgs } from "node:util";

import { HostError, openBundle, openTokenizer } from "./bundle.mjs";
import { Engine } from "./engine.mjs";
import { forestDifference } from "./forest_check.mjs";
import { speculate } from "./speculate.mjs";
import { openTrie } from "./trie.mjs";

const USAGE = `node main.mjs BUNDLE (--prompt TEXT | --ids 1,2,3) [--max-new-tokens 32]
    [--draft-length 4] [--draft-branches 2] [--trie items.trie] [--check-forest] [--json]`;
const OPTIONS = {
  prompt: { type: "string" },
  ids: { type: "string" },
  "max-new-tokens": { type: "string", default: "32" },
  "draft-length": { type: "string" },
  "draft-branches": { type: "string" },
  trie: { type: "string" },
  "check-forest": { type: "boolean", default: false },
  json: { type: "boolean", default: false },
};
const FOREST_LIMIT = { fp32: 1e-3, fp16: 5e-2 };

async function main(args) {
  const { values, folder } = readArguments(args);
  const bundle = await openBundle(folder);
  const tokenizer = await openTokenizer(bundle);
  const promptIds = values.ids
    ? values.ids.split(",").map((id) => wholeNumber("ids", id, 0))
    : tokenizer.encode(values.prompt);
  const options = {
    maxNewTokens: wholeNumber("max-new-tokens", values["max-new-tokens"], 1),
    ...draftOptions(bundle, values),
    trie: values.trie && (await openTrie(values.trie, bundle.manifest.target)),
  };
  checkRequest(bundle, promptIds, options);
  const forestRows = 8 + options.draftLength * options.draftBranches;
  const capacity = promptIds.length + options.maxNewTokens + forestRows;
  const target = await Engine.open(bundle, "target", capacity);
  const draft = bundle.manifest.draft && (await Engine.open(bundle, "draft", capacity));
  if (values["check-forest"]) await checkForest(target, promptIds);
  const answer = await speculate(target, draft, promptIds, options);
  const text = tokenizer.decodeAfter(promptIds, answer.tokenIds);
  console.log(values.json ? JSON.stringify({ prompt_ids: promptIds, ...snake(answer), text }) : text);
}

function readArguments(args) {
  let parsed;
  try {
    parsed = parseArgs({ args, options: OPTIONS, allowPositionals: true });
  } catch (error) {
    throw new HostError(`${error.message}\n${USAGE}`);
  }
  const { values, positionals } = parsed;
  if (positionals.length !== 1 || (values.prompt === undefined) === (values.ids === undefined)) {
    throw new HostError(`expected one bundle, and either --prompt or --ids\n${USAGE}`);
  }
  return { values, folder: positionals[0] };
}

/** How much is drafted: nothing without a draft, where every iteration is one token. */
function draftOptions({ folder, manifest }, values) {
  const names = ["draft-length", "draft-branches"];
  if (manifest.draft !== null) {
    const [draftLength, draftBranches] = names.map((name, index) =>
      wholeNumber(name, values[name] ?? [4, 2][index], 1),
    );
    return { draftLength, draftBranches };
  }
  const given = names.find((name) => values[name] !== undefined);
  if (given !== undefined) {
    throw new HostError(
      `--${given} is given, but the bundle ${folder} has no draft; leave it out, or add a draft ` +
        `with: dsbd-export --bundle ${folder} --draft DRAFT`,
    );
  }
  return { draftLength: 0, draftBranches: 0 };
}

function checkRequest({ manifest, roles }, promptIds, { maxNewTokens }) {
  const { target } = manifest;
  const wrong = promptIds.find((id) => id >= target.vocab_size);
  if (wrong !== undefined || promptIds.length === 0) {
    throw new HostError(
      `the prompt has ${wrong === undefined ? "no token" : `token id ${wrong}`}; expected one or ` +
        `more from 0 to ${target.vocab_size - 1}`,
    );
  }
  const context = Math.min(...roles.map((role) => manifest[role].context_length));
  const most = promptIds.length + maxNewTokens;
  if (most > context) {
    throw new HostError(
      `${promptIds.length} prompt tokens and ${maxNewTokens} new ones are ${most} positions, the ` +
        `models were made for ${context}; shorten the prompt or lower --max-new-tokens`,
    );
  }
}

async function checkForest(target, promptIds) {
  const difference = await forestDifference(target, promptIds);
  const limit = FOREST_LIMIT[target.entry.dtype];
  const line = `forest pass against plain passes: largest difference ${difference.toExponential(1)}`;
  if (!(difference <= limit)) throw new HostError(`${line}, at most ${limit} is rounding`);
  console.error(line);
}

function wholeNumber(name, text, least) {
  const value = Number(text);
  if (!Number.isInteger(value) || value < least) {
    throw new HostError(`--${name} is ${text}; expected a whole number of at least ${least}`);
  }
  return value;
}

const snake = ({ tokenIds, finishReason, numIterations }) => ({
  token_ids: tokenIds,
  finish_reason: finishReason,
  num_iterations: numIterations,
});

try {
  await main(process.argv.slice(2));
} catch (error) {
  if (!(error instanceof HostError)) throw error;
  console.error(error.message);
  process.exitCode = 2;
}
