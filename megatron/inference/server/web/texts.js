function lines(result) {
  const found = (result.masks ?? []).map((candidates, i) =>
    "mask " + (i + 1) + ": " + candidates.map((one) => one.token + " " + one.probability.toFixed(3)).join(", "));
  if (result.log_likelihood != null)
    found.push("pseudo-log-likelihood: " + result.log_likelihood.toFixed(4) + " over " + result.num_tokens + " tokens");
  if (result.in_order != null) found.push("probability of this order: " + result.in_order.toFixed(4));
  if (result.text != null) found.push("output: " + result.text + (result.finished ? "" : " …"));
  if (result.filled != null) found.push("filled: " + result.filled);
  if (result.notice != null) found.push("notice: " + result.notice);
  return found;
}

async function send(signal) {
  const texts = at("prompt").value.split("\n").filter((line) => line);
  at("text").textContent = "";
  const answer = await (await ask(PATH, signal, { ...settings(), texts })).json();
  nameModel(answer.model);
  at("text").textContent = answer.results.map((result, i) =>
    [texts[i], ...lines(result).map((line) => "  " + line)].join("\n")).join("\n");
  return texts.length === 1 ? "one text" : texts.length + " texts";
}
