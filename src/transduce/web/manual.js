// The page at /docs: keeps each command equal to its form, and sends the requests of the forms to its own server. Text
// from the server is only ever set as text, because of the content-security policy.
"use strict";

(() => {
  const TOKEN_KEY = "transduce.token"; // as in api.js: the page at / and this page share the token
  const OTHER_TEXT = "1, 2, 3."; // instead of the German example, because every language can contain numbers
  const WIDTH = 64; // as in manual.py: characters in a line of JSON
  const MAX_SHOWN = 5000; // characters of a response
  const $ = (id) => document.getElementById(id);
  const forms = [...document.querySelectorAll("form.try")];

  // The browser may refuse storage. The token is then kept until the page is closed.
  let token = null;
  try { token = JSON.parse(sessionStorage.getItem(TOKEN_KEY)); } catch { /* no token */ }

  function storeToken(value) {
    token = value;
    try { sessionStorage.setItem(TOKEN_KEY, JSON.stringify(token)); } catch { /* not stored */ }
  }

  // JSON for people: a value on one line if it fits.
  function pretty(value, width = WIDTH, indent = "") {
    const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
    if (!isObject && !Array.isArray(value)) return JSON.stringify(value);
    const items = Object.entries(value), [open, close] = isObject ? ["{", "}"] : ["[", "]"], inner = `${indent}  `;
    const texts = (width) => items.map(([name, one]) =>
      (isObject ? `${JSON.stringify(name)}: ` : "") + pretty(one, width, inner));
    const text = open + texts(Infinity).join(", ") + close;
    if (indent.length + text.length <= width) return text;
    return `${open}\n${texts(width).map((line) => inner + line).join(",\n")}\n${indent}${close}`;
  }

  // A word of a shell command, as shlex.quote writes it.
  const quote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);

  const addressOf = (form) => new URL(form.dataset.path.slice(1), document.baseURI).href;

  // The fields of a form that have a value; null for a request without a body.
  function bodyOf(form) {
    if (form.dataset.method === "GET") return null;
    const fields = [...form.elements].filter(({ name, value }) => name && (value !== "" || name === "q"));
    return Object.fromEntries(fields.map(({ name, value, type }) => [name, type === "number" ? Number(value) : value]));
  }

  function showCommand(form) {
    const body = bodyOf(form), parts = ["curl", "-s", quote(addressOf(form))];
    const needsToken = !$("access").hidden || token;
    if (needsToken) parts.push("-H", quote(`authorization: Bearer ${token ?? "TOKEN"}`));
    if (body) parts.push("-H 'content-type: application/json' -d", quote(pretty(body, Infinity)));
    form.closest(".route").querySelector(".command").textContent = parts.join(" ");
  }

  function showCommands() {
    for (const form of forms) showCommand(form);
  }

  function request(form) {
    const body = bodyOf(form), headers = {};
    if (token) headers.authorization = `Bearer ${token}`;
    if (body) headers["content-type"] = "application/json";
    return fetch(addressOf(form), { method: form.dataset.method, headers, body: body && JSON.stringify(body) });
  }

  function askForToken() {
    storeToken(null);
    $("access").hidden = false;
    showCommands();
  }

  function readable(text) {
    let shown = text;
    try { shown = pretty(JSON.parse(text)); } catch { /* not JSON */ }
    const n = shown.length - MAX_SHOWN;
    return n > 0 ? `${shown.slice(0, MAX_SHOWN)}\n… and ${n.toLocaleString("en")} more characters` : shown;
  }

  async function send(form) {
    const status = form.querySelector(".status"), result = form.querySelector(".result"), began = performance.now();
    const button = form.querySelector("[type=submit]");
    status.textContent = "sending\u2026";
    button.disabled = true;
    try {
      const response = await request(form), text = await response.text();
      status.textContent = `Status ${response.status}, ${Math.round(performance.now() - began)}\u00a0ms`;
      result.textContent = readable(text);
      result.hidden = false;
      if (response.status === 401 || (response.status === 403 && token)) askForToken();
    } catch {
      status.textContent = "The server cannot be reached.";
    }
    button.disabled = false;
  }

  // Uses languages of this server, if it does not have those of the examples.
  async function start() {
    const languages = forms.find((form) => form.dataset.path === "/languages");
    const response = await request(languages).catch(() => null);
    if (response?.status === 401 || response?.status === 403) askForToken();
    if (!response?.ok) return;
    const directions = (await response.json()).flatMap(({ code, targets }) => targets.map((target) => [code, target]));
    for (const { elements: { q, source, target } } of forms) {
      if (!source || directions.some(([from, to]) => from === source.value && to === target.value)) continue;
      [[source.value, target.value], q.value] = [directions[0], OTHER_TEXT];
    }
    showCommands();
  }

  function addCopyButton(code) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "plain", textContent: "Copy" });
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.querySelector("pre").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    code.append(button);
  }

  for (const form of forms) {
    form.hidden = false;
    form.addEventListener("input", () => showCommand(form));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send(form);
    });
  }
  if (navigator.clipboard) {
    for (const command of document.querySelectorAll(".command")) addCopyButton(command.parentElement);
  }
  $("access").addEventListener("submit", (event) => {
    event.preventDefault();
    storeToken($("token").value.trim());
    $("token").value = "";
    $("access").hidden = true;
    start();
  });
  showCommands();
  start();
})();
