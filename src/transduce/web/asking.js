// How the page at / asks its server, and what a browser may keep for it.
"use strict";

window.Asking = (() => {
  // What a browser keeps, where it may; where it may not, nothing is kept and nothing breaks.
  function keeper(name) {
    const area = () => window[name];
    const attempt = (work, otherwise) => {
      try { return work(); } catch { return otherwise; }
    };
    return {
      isOn: attempt(() => {
        area().setItem("transduce.test", "");
        area().removeItem("transduce.test");
        return true;
      }, false),
      get: (key, otherwise) => attempt(() => JSON.parse(area().getItem(`transduce.${key}`)) ?? otherwise, otherwise),
      set: (key, value) => attempt(() => area().setItem(`transduce.${key}`, JSON.stringify(value))),
      remove: (key) => attempt(() => area().removeItem(`transduce.${key}`)),
    };
  }

  class Failure extends Error {
    constructor(message, code, wait = null) {
      super(message);
      this.code = code;
      this.wait = wait;
    }
  }

  const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

  async function ask(path, body, { token, signal }) {
    const headers = {};
    if (token) headers.authorization = `Bearer ${token}`;
    if (body) headers["content-type"] = "application/json";
    let answer;
    try {
      const method = body ? "POST" : "GET";
      answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server cannot be reached.", 0);
    }
    if (answer.ok) return answer.json();
    const said = await answer.json().catch(() => ({}));
    const text = typeof said.error === "string" ? said.error : `the server answered with ${answer.status}`;
    const wait = Number(answer.headers.get("retry-after")) || null;
    throw new Failure(sentence(text), answer.status, wait);
  }

  function pause(milliseconds, signal) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, milliseconds);
      signal?.addEventListener("abort", () => {
        clearTimeout(timer);
        reject(new DOMException("", "AbortError"));
      });
    });
  }

  return { keeper, Failure, sentence, ask, pause };
})();
