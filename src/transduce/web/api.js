// Requests of the page at / to its server, and the browser's storage.
"use strict";

window.Api = (() => {
  // Browser storage. If the browser refuses it, nothing is stored and no error is raised.
  function storage(areaName) {
    const area = () => window[areaName];
    const attempt = (work, fallback) => {
      try { return work(); } catch { return fallback; }
    };
    return {
      isAvailable: attempt(() => {
        area().setItem("transduce.test", "");
        area().removeItem("transduce.test");
        return true;
      }, false),
      get: (key, fallback) => attempt(() => JSON.parse(area().getItem(`transduce.${key}`)) ?? fallback, fallback),
      set: (key, value) => attempt(() => area().setItem(`transduce.${key}`, JSON.stringify(value))),
      remove: (key) => attempt(() => area().removeItem(`transduce.${key}`)),
    };
  }

  class ApiError extends Error {
    // `retryAfter`: seconds to wait before another attempt, or null.
    constructor(message, code, retryAfter = null) {
      super(message);
      this.code = code;
      this.retryAfter = retryAfter;
    }
  }

  const toSentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

  // Throws ApiError, or an AbortError if `signal` cancels the request.
  async function request(path, body, { token, signal }) {
    const headers = {};
    if (token) headers.authorization = `Bearer ${token}`;
    if (body) headers["content-type"] = "application/json";
    let response;
    try {
      const method = body ? "POST" : "GET";
      response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.", 0);
    }
    if (response.ok) return response.json();
    const { error } = await response.json().catch(() => ({}));
    const text = typeof error === "string" ? error : `the server returned status ${response.status}`;
    const retryAfter = Number(response.headers.get("retry-after")) || null;
    throw new ApiError(toSentence(text), response.status, retryAfter);
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

  return { storage, ApiError, toSentence, request, pause };
})();
