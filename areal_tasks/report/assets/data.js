// The page's data, and what is asked of it in more than one place.

/** The data of the page, its samples in one list that knows their runs. */
export function load() {
  const data = JSON.parse(document.getElementById("data").textContent);
  data.runs.forEach((run, index) => {
    run.index = index;
    run.visible = true;
    run.samples.forEach((sample) => Object.assign(sample, { run, text: haystack(sample) }));
  });
  data.samples = data.runs.flatMap((run) => run.samples);
  return data;
}

function haystack(sample) {
  const parts = [sample.prompt, sample.completion, sample.answer, sample.parsed, sample.detail, sample.id];
  return parts.filter((part) => part !== undefined).join("\n").toLowerCase();
}

export const KINDS = { scalars: "training", evaluate: "evaluation", batch: "demonstration" };

/** Where a sample stands in time, in words. */
export function when(sample) {
  return sample.evaluated === undefined ? `iteration ${sample.it}` : `version ${sample.evaluated}`;
}

/** The tokens of a sample: id, text, position, and for generated ones what is known of each. */
export function tokensOf(sample) {
  const { ids, own, cut } = sample.tokens;
  const generated = new Map();
  let count = 0;
  for (const [start, length] of own) for (let i = 0; i < length; i++) generated.set(start + i, count++);
  return ids.map((id, i) => {
    const position = cut && i >= cut[0] ? i + cut[1] : i;
    const known = generated.has(i) ? valuesAt(sample.tokens, generated.get(i)) : null;
    return { id, position, text: sample.run.vocabulary[id], own: known !== null, cutBefore: !!cut && i === cut[0], ...known };
  });
}

function valuesAt(columns, i) {
  const found = {};
  for (const name of ["lp", "adv", "ver", "ref", "prox"]) {
    const column = columns[name];
    if (column) found[name] = column.length === 1 ? column[0] : column[i];
  }
  return found;
}
