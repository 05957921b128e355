// The parts around the forest: strip, summary, facts, time, texts, legend.

function byId(id) {
  return document.getElementById(id);
}

function showRequest() {
  const { config, iterations } = trace;
  const tokens = firstLayers.at(-1);
  const settings = [plural(config.num_beams, "beam")];
  if (config.draft_beams.length) settings.push(`drafts of ${config.draft_beams.join(", ")}`);
  if (config.coupling) settings.push(`${config.coupling} coupling`);
  settings.push(`${config.width_policy} width`);
  if (config.constraint) settings.push(config.constraint);
  byId("strategy").textContent = `${config.strategy} · ${settings.join(" · ")}`;
  byId("totals").textContent = iterations.length
    ? `${plural(tokens, "token")} in ${plural(iterations.length, "iteration")}, one target call each: ` +
      `${(tokens / iterations.length).toFixed(2)} tokens per call. Prompt: ${plural(numPrompt, "token")}.`
    : "The request was given up before its first iteration ended.";
  const present = new Set(iterations.flatMap((iteration) => iteration.nodes.map((node) => node.role)));
  const shown = Object.entries(roles).filter(([name]) => present.has(name));
  byId("legend").append(...shown.map(([name, role]) => element("li", { title: role.note },
    svgIcon(name), role.name)));
  byId("legend").append(
    element("li", { class: "target" }, element("span", { class: "swatch" }), "p̃ of the target"),
    element("li", { class: "draft" }, element("span", { class: "swatch" }), "q̃ of the draft"));
  const drafting = new Set(iterations.flatMap((iteration) => iteration.nodes.map((node) => node.proposer)));
  for (const [name, note] of Object.entries(proposers).filter(([name]) => drafting.has(name))) {
    byId("legend").append(element("li", { class: "proposer", title: note }, `${name}: drafted without the model`));
  }
  if (trace.iterations.some((iteration) => iteration.nodes.some(isHeldBack))) {
    byId("legend").append(element("li", { class: "forbidden" }, "⊘ likely tokens forbidden"));
  }
}

function svgIcon(role) {
  return svg("svg", { viewBox: "-1 -1 14 14", width: 14, height: 14, class: `node ${role}`, "aria-hidden": true },
    svg("path", { d: roles[role].shape, class: "shape" }));
}

function buildStrip(go) {
  const most = Math.max(...trace.iterations.map((iteration) => iteration.committed.length));
  trace.iterations.forEach((iteration, index) => {
    const number = iteration.committed.length;
    const height = (layers) => `height: ${(100 * layers) / most}%`;
    const button = element("button", {
      type: "button", "aria-label": `iteration ${index + 1}: ${plural(number, "layer")} committed`,
      title: `iteration ${index + 1}: ${plural(number, "layer")}`, tabindex: -1,
    }, element("span", { class: "bonus", style: height(1) }), element("span", { class: "accepted", style: height(number - 1) }));
    button.addEventListener("click", () => go(index));
    byId("strip").append(button);
  });
}

function showWhere(index) {
  const last = trace.iterations.length - 1;
  byId("where").textContent = `${index + 1} / ${last + 1}`;
  for (const id of ["first", "previous"]) byId(id).disabled = index === 0;
  for (const id of ["next", "last"]) byId(id).disabled = index === last;
  [...byId("strip").children].forEach((button, place) => {
    button.toggleAttribute("aria-current", place === index);
    button.tabIndex = place === index ? 0 : -1;
    if (place === index) button.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}

function summaryOf(index) {
  const iteration = trace.iterations[index];
  const numAccepted = iteration.committed.length - 1;
  const numBonus = iteration.nodes.filter((node) => node.role === "bonus").length;
  const drafted = iteration.drafted.length
    ? `The draft proposed ${plural(iteration.drafted.length, "layer")}. `
    : "Nothing was drafted. ";
  const accepted = numAccepted
    ? `The target accepted ${plural(numAccepted, "layer")}, then selected one more`
    : "The target selected one layer";
  const bonus = numBonus ? `, with ${plural(numBonus, "token")} not drafted` : "";
  const numOn = iteration.beams.filter((beam) => goesOn(beam, iteration)).length;
  const numEnded = iteration.beams.length - numOn;
  const alive = `${plural(numOn, "beam")} ${numOn === 1 ? "continues" : "continue"}`;
  const ended = numEnded ? `, ${numEnded} ${numEnded === 1 ? "has" : "have"} ended` : "";
  return `${drafted}${accepted}${bonus}. ${alive}${ended}.`;
}

// Who drafted the nodes of an iteration's layers, and how many: ["model 4", "ngram 2"].
function draftersOf(iteration) {
  const table = iterationTable(iteration);
  const counts = new Map();
  for (const id of new Set(iteration.drafted.flat())) {
    const { proposer } = table.get(id);
    if (proposer && !iteration.roots.includes(id)) counts.set(proposer, (counts.get(proposer) ?? 0) + 1);
  }
  return [...counts].map(([name, count]) => `${name} ${count}`);
}

function showFacts(iteration) {
  const facts = [
    ["layers committed", `${iteration.committed.length}`],
    ["drafted per layer", iteration.drafted.map((layer) => layer.length).join(" ") || "–"],
    ["drafted by", draftersOf(iteration).join(", ") || "–"],
    ["width per layer", iteration.committed.map((layer) => layer.length).join(" ")],
    ["rows by the draft", `${iteration.rows.draft}`],
    ["rows by the target", `${iteration.rows.target}`],
  ];
  byId("facts").replaceChildren(...facts.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function showTimes(iteration) {
  const parts = Object.entries(iteration.seconds);
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const shown = parts.filter(([, seconds]) => seconds > 0);
  byId("times").replaceChildren(...shown.map(([name, seconds]) =>
    element("span", { class: name, style: `flex-grow: ${seconds / total}` })));
  byId("time-words").replaceChildren(...parts.map(([name, seconds]) =>
    element("span", { class: name }, element("span", { class: "swatch" }),
      `${name} ${(1000 * seconds).toFixed(1)} ms`)));
}

function showTexts(index) {
  const iteration = trace.iterations[index];
  const beams = rankedBeams(iteration);
  const agreed = numAgreed(beams);
  const best = beams[0].rows;
  const parts = [element("span", { class: "prompt" }, trace.prompt.text)];
  best.forEach((row, place) => {
    const kinds = [place >= firstLayers[index] ? "new" : "", place >= agreed ? "open" : ""];
    parts.push(element("span", { class: kinds.join(" ").trim() }, trace.hypotheses[row].text));
  });
  parts.push(element("span", { class: "open" }, restOf(best)));
  byId("best").replaceChildren(...parts);
  byId("best").scrollTop = byId("best").scrollHeight;
  byId("beams").replaceChildren(...beams.map((beam) => beamLine(beam, iteration, agreed)));
}

function goesOn(beam, iteration) {
  const node = iteration.nodes.find((other) => other.id === beam.node);
  return node !== undefined && !node.has_ended;
}

function beamLine(beam, iteration, agreed) {
  const tail = textOf(beam.rows.slice(agreed));
  const lines = tail.replaceAll("\n", "⏎\n").split("\n");
  const shown = lines.length > 4 ? ["…", ...lines.slice(-4)] : lines;
  const ended = goesOn(beam, iteration) ? "" : ", ended";
  const badge = beam.node === null ? "–" : `${iteration.beams.findIndex((other) => other.node === beam.node) + 1}`;
  return element("li", {},
    element("span", { class: "badge", title: "number in the forest" }, badge),
    element("code", {}, tail === "" ? "(no text of its own)" : shown.join("\n")),
    element("small", {}, `log-probability ${beam.logprob.toFixed(2)}${ended}`));
}
