const ENDS = { length: "the limit of tokens is reached", stop: "the text ended" };

async function modelName(signal) {
  const models = await (await ask("v1/models", signal)).json();
  nameModel(models.data[0].id);
  return models.data[0].id;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) return;
    const lines = (held + value).split("\n\n");
    held = lines.pop();
    for (const line of lines) yield line.replace(/^data: /, "");
  }
}

async function send(signal) {
  const shown = document.createElement("b");
  at("text").replaceChildren(at("prompt").value, shown);
  const model = await modelName(signal);
  const body = { ...settings(), model, prompt: at("prompt").value, stream: true, stream_options: { include_usage: true } };
  const response = await ask("v1/completions", signal, body);
  let tokens = 0, reason = "";
  for await (const line of events(response)) {
    if (line === "[DONE]") return tokens + " tokens; " + (ENDS[reason] ?? reason);
    const event = JSON.parse(line);
    if (event.error) throw new Error(event.error.message);
    tokens = event.usage?.completion_tokens ?? tokens;
    const choice = event.choices[0];
    if (!choice) continue;
    const box = at("text");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
    shown.append(choice.text);
    if (follows) box.scrollTop = box.scrollHeight;
    reason = choice.finish_reason ?? reason;
  }
  return lost({});
}

modelName().catch(() => {});  // named again with each request, which shows its errors
