"use strict";
// Shared by the pages of all models, each of which adds: async function send(signal), which sends
// the request, shows the text and returns a description of its end.
const at = (id) => document.getElementById(id);
let leaving = null;  // aborts the running request

function show(message, isError = false) {
  at("status").textContent = message;
  at("status").className = isError ? "bad" : "faint";
}

function nameModel(name) {
  at("model").textContent = name;
  at("about").hidden = false;
}

function settings() {
  const known = [...document.querySelectorAll("[data-field]")].filter((input) => input.value !== "");
  return Object.fromEntries(known.map((input) =>
    [input.dataset.field, input.type === "number" ? Number(input.value) : input.value]));
}

function lost(error) {
  throw error.name === "AbortError" ? error : new Error("The connection to the server is lost: does it still run?");
}

async function ask(path, signal, body) {
  const key = at("key").value;
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: "Bearer " + key }) };
  const content = body && { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { headers, signal, ...content }).catch(lost);
  if (response.ok) return response;
  if (response.status === 401) {
    at("key-field").hidden = false;
    at("key").select();
    throw new Error((key ? "The API key is wrong" : "The API key is missing") + ": this server accepts requests with its key only.");
  }
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error?.message ?? answer.error ?? "The server answered with status " + response.status + ".");
}

// A disabled button loses the focus, which goes to the other one.
function setRunning(isRunning) {
  const [on, off] = isRunning ? [at("halt"), at("go")] : [at("go"), at("halt")];
  on.disabled = false;
  if (document.activeElement === off) on.focus();
  off.disabled = true;
  at("text").ariaBusy = isRunning;
}

async function run() {
  if (leaving) return;
  leaving = new AbortController();
  setRunning(true);
  show("running …");
  const startedAt = performance.now();
  const seconds = () => " after " + ((performance.now() - startedAt) / 1000).toFixed(1) + " s";
  try {
    const end = await send(leaving.signal);
    show("done" + seconds() + ": " + end);
  } catch (error) {
    if (error.name === "AbortError") show("stopped" + seconds());
    else show(error.message, true);
  } finally {
    leaving = null;
    setRunning(false);
  }
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
at("halt").addEventListener("click", () => leaving?.abort());
at("copy").addEventListener("click", () => {
  getSelection().selectAllChildren(at("text"));
  // navigator.clipboard is missing on pages without TLS, except localhost's.
  show(document.execCommand("copy") ? "copied" : "The browser refused: press Ctrl+C to copy the selected text.");
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") leaving?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !leaving) at("form").requestSubmit();
});
