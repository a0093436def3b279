// The page at /: translates text as it is typed. It sends requests only to its own server, and the history stays in the
// browser.
"use strict";

(() => {
  const { make } = Inspector, { storage, ApiError, toSentence, request, pause } = Api;
  const BREAKS = /\r\n|[\n\r\v\f\u001c\u001d\u001e\u0085\u2028\u2029]/; // everything that ends a line on the server
  const TYPING_PAUSE = 250; // milliseconds without a key before a request is sent
  const HISTORY_PAUSE = 1500; // milliseconds before a finished translation is added to the history
  const LINES_PER_REQUEST = 4; // few, so that the first of many lines appear soon
  const N_ALTERNATIVES = 3;
  const MAX_ATTEMPTS = 5, MAX_WAIT = 30; // seconds
  const MAX_CACHED = 300; // lines
  const MAX_HISTORY = 30;
  const THEMES = ["auto", "light", "dark"];
  // Sentences to start with, by source language. Another language gets a hint instead.
  const EXAMPLES = {
    de: [
      "Tom hat gestern ein neues Auto gekauft, weil das alte kaputt war.",
      "Kannst du mir sagen, wie spät es ist?",
      "Wenn es morgen regnet, bleiben wir zu Hause.",
    ],
    en: [
      "Tom bought a new car yesterday because the old one was broken.",
      "Can you tell me what time it is?",
      "If it rains tomorrow, we will stay at home.",
    ],
  };
  const $ = (id) => document.getElementById(id);

  const local = storage("localStorage"), session = storage("sessionStorage");

  let token = session.get("token", null);

  // Sends a request, and sends it again after a refusal with Retry-After.
  async function requestWithRetries(path, body, signal) {
    for (let attempt = 1; ; attempt++) {
      try {
        const response = await request(path, body, { token, signal });
        hideProblem();
        return response;
      } catch (error) {
        if (error.code === 401 || (error.code === 403 && token)) askForToken();
        if (!error.retryAfter || attempt >= MAX_ATTEMPTS) throw error;
        const wait = Math.min(error.retryAfter, MAX_WAIT);
        showProblem(`${error.message} Trying again in ${wait}\u00a0s.`);
        await pause(1000 * wait, signal);
      }
    }
  }

  function showProblem(text, retry = null) {
    if ($("problem-text").textContent !== text) $("problem-text").textContent = text;
    $("retry").hidden = !retry;
    $("retry").onclick = retry;
    $("problem").hidden = false;
  }

  function hideProblem() {
    $("problem").hidden = true;
    $("access").hidden = true;
  }

  // Shows a failed request. A request that was cancelled shows nothing.
  function showFailure(error, retry) {
    if (error.name === "AbortError") return;
    if (!(error instanceof ApiError)) throw error;
    setStatus("");
    if (error.code === 401 || error.code === 403) showProblem(error.message);
    else showProblem(error.message, retry);
  }

  function askForToken() {
    token = null;
    session.remove("token");
    $("access").hidden = false;
    $("token").focus();
  }

  // State

  const state = {
    languages: [], limits: {}, lines: [], // {source, response, prefix, chosen, isStale}, or null for a blank line
    selected: null, // the line and the word whose details are shown
  };
  const cache = new Map(); // {response, prefix, chosen} by languages and line
  let controller = new AbortController(), typingTimer = 0, historyTimer = 0, inspector = null;

  const languagePair = () => ({ source: $("source").value, target: $("target").value });
  const keyOf = (line) => JSON.stringify([$("source").value, $("target").value, line]);

  function addToCache(line, entry) {
    cache.delete(keyOf(line));
    cache.set(keyOf(line), entry);
    if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
  }

  function setStatus(text) {
    $("status").textContent = text;
  }

  // Reads the lines of the text. A line that is not cached shows the old response in its place, marked as stale.
  function updateLines() {
    const before = state.lines;
    state.lines = $("text").value.split(BREAKS).map((line, i) => {
      if (!line.trim()) return null;
      const entry = cache.get(keyOf(line));
      return { source: line, ...(entry ?? { response: before[i]?.response }), isStale: !entry };
    });
  }

  function cancelRequests() {
    controller.abort();
    controller = new AbortController();
    clearTimeout(typingTimer);
  }

  function onTextChange() {
    cancelRequests();
    clearTimeout(historyTimer);
    closeWord();
    closeInspector();
    updateLines();
    render();
    renderStart();
    $("problem").hidden = true;
    if (!checkLength()) return;
    const isWaiting = state.lines.some((line) => line?.isStale);
    setStatus(isWaiting ? "\u2026" : "");
    if (isWaiting) typingTimer = setTimeout(translate, TYPING_PAUSE, controller.signal);
    else onTranslated();
  }

  async function translate(signal) {
    const waiting = [...new Set(state.lines.filter((line) => line?.isStale).map((line) => line.source))];
    const nPerRequest = Math.min(LINES_PER_REQUEST, state.limits.explained_texts ?? LINES_PER_REQUEST);
    setStatus("translating\u2026");
    try {
      for (let first = 0; first < waiting.length; first += nPerRequest) {
        const q = waiting.slice(first, first + nPerRequest);
        const body = { q, ...languagePair(), alternatives: nAlternatives() };
        const { lines } = await requestWithRetries("explain", body, signal);
        q.forEach((line, i) => addToCache(line, { response: lines[i], prefix: null, chosen: [] }));
        updateLines();
        render();
      }
      setStatus("");
      onTranslated();
    } catch (error) {
      showFailure(error, onTextChange);
    }
  }

  const nAlternatives = () => Math.min(N_ALTERNATIVES, state.limits.alternatives ?? 0);

  // Called once per finished translation: a screen reader reads it, and the history stores it.
  function onTranslated() {
    const text = translation();
    $("live").textContent = text;
    clearTimeout(historyTimer);
    if (text.trim()) historyTimer = setTimeout(() => addToHistory(text), HISTORY_PAUSE);
  }

  const translation = () => state.lines.map((line) => line?.response?.translatedText ?? "").join("\n");

  // Drawing

  function render() {
    const lang = $("target").value, { selected } = state;
    const lines = state.lines.map((line, i) => {
      if (!line?.response) return make("p", { class: line ? "line waiting" : "line", text: "\u00a0" });
      return Words.line(line.response, {
        lang, chosen: line.chosen, isStale: line.isStale,
        onpick: (word) => selectWord(i, word), onpoint: (word) => pointAt(i, word),
      });
    });
    const isEmpty = !state.lines.some((line) => line?.response);
    $("output").replaceChildren(...(state.lines.some(Boolean) ? lines : []));
    const first = $("output").querySelector(".word");
    if (first) first.tabIndex = 0;
    $("legend").hidden = $("attention").hidden = isEmpty;
    $("copy").hidden = isEmpty || !navigator.clipboard;
    $("undo").hidden = !state.lines.some((line) => line?.prefix);
    if (selected) markSelected(selected.line, selected.word);
    renderFlags();
    renderAlternatives();
    highlightSource(selected);
  }

  // Warnings about the translation. That another translation scored as high is not one.
  function renderFlags() {
    const flags = new Map(state.lines.flatMap((line) => Object.entries(line?.response?.flags ?? {})));
    flags.delete("close");
    for (const text of flags.values()) {
      $("output").append(make("p", { class: "note flag", text: toSentence(text) }));
    }
  }

  // The number of the selected line, or of the first line with a translation; -1 if there is none.
  function currentLine() {
    const i = state.selected?.line ?? state.lines.findIndex((line) => line?.response);
    return i >= 0 && state.lines[i]?.response ? i : -1;
  }

  function renderAlternatives() {
    const i = currentLine(), line = state.lines[i];
    const alternatives = line ? line.response.alternatives : [];
    $("alternatives").hidden = !alternatives.length;
    const hasSeveralLines = state.lines.filter(Boolean).length > 1;
    $("alternatives-title").textContent = hasSeveralLines ? `Alternatives for line ${i + 1}` : "Alternatives";
    $("alternatives-list").replaceChildren(...alternatives.length
      ? Words.alternatives(line.response, $("target").value, (text) => force(i, text, true)) : []);
  }

  // While there is no text: sentences to start with, and what the model can do.
  function renderStart() {
    $("start").hidden = $("text").value !== "" || !state.languages.length;
    const { source, target } = languagePair(), examples = EXAMPLES[source] ?? [];
    $("hint").textContent = examples.length ? "Type a sentence above, or try one of these:"
      : `Type a sentence in ${nameOf(source)} above.`;
    $("examples").hidden = !examples.length;
    $("examples").replaceChildren(...examples.map((text) => make("button", {
      type: "button", class: "example", lang: source, text,
      onclick: () => { $("text").value = text; onTextChange(); $("text").focus(); },
    })));
    $("abilities").textContent = `The model translates ${nameOf(source)} to ${nameOf(target)}. It was trained on ` +
      "single lines and their translations, so it translates each line alone. A line that is longer than those of " +
      "its training is translated in parts.";
  }

  const wordElement = (line, word) =>
    $("output").querySelectorAll("p.line")[line]?.querySelector(`[data-word="${word}"]`);

  function markSelected(line, word) {
    for (const element of $("output").querySelectorAll(".word")) {
      const isSelected = element === wordElement(line, word);
      element.setAttribute("aria-pressed", String(isSelected));
      element.tabIndex = isSelected ? 0 : -1;
    }
  }

  // Highlights the source words that a word is aligned with. The mirror lies behind the text field and has the same
  // text in the same place, with a background on these words.
  function highlightSource(at) {
    const lines = $("text").value.split(BREAKS), line = at && state.lines[at.line];
    const aligned = line && !line.isStale ? Words.alignedWords(line.response, at.word) ?? [] : [];
    const parts = lines.flatMap((text, i) => {
      if (i !== at?.line || !aligned.length) return [i ? "\n" : "", text];
      let word = -1;
      return [i ? "\n" : "", ...Words.wordsOf(text).map(({ part, isWord }) =>
        (isWord && aligned.includes(++word) ? make("mark", { text: part }) : part))];
    });
    $("mirror").replaceChildren(...parts, "\u200b");
    fitHeight();
  }

  function pointAt(line, word) {
    highlightSource(word === null ? state.selected : { line, word });
  }

  function fitHeight() {
    $("text").style.height = `${$("mirror").offsetHeight}px`;
  }

  // Whether the text is within the limit. The server's limit is for one request; the page applies it to all lines.
  function checkLength() {
    const n = [...$("text").value].length, limit = state.limits.characters;
    $("count").textContent = limit ? `${n.toLocaleString("en")} / ${limit.toLocaleString("en")}` : "";
    $("count").classList.toggle("over", n > limit);
    $("clear").hidden = n === 0;
    if (!(n > limit)) return true;
    showProblem(`The text has ${n.toLocaleString("en")} characters, the limit is ${limit.toLocaleString("en")}.`);
    return false;
  }

  // The details of a word, and changes to the translation

  function selectWord(i, word) {
    const line = state.lines[i];
    if (line.isStale) return;
    if (state.selected?.line === i && state.selected.word === word) { closeWord(); return; }
    state.selected = { line: i, word };
    markSelected(i, word);
    highlightSource(state.selected);
    renderAlternatives();
    const { response } = line;
    Words.panel($("word"), response, line.source, word, {
      onforce: (t, piece) => force(i, [...response.tokens.slice(0, t).map((each) => each.piece), piece]),
      onreplace: (text) => force(i, `${textBefore(response, word)} ${text}`.trim()),
      onclose: leaveWord,
    });
    $("word").scrollIntoView({ block: "nearest" });
  }

  const textBefore = (response, word) =>
    response.translatedText.trim().split(/([ \t]+)/).slice(0, 2 * word).join("").trim();

  function leaveWord() {
    wordElement(state.selected.line, state.selected.word)?.focus();
    closeWord();
  }

  function closeWord() {
    state.selected = null;
    $("word").hidden = true;
    $("word").replaceChildren();
    for (const element of $("output").querySelectorAll('[aria-pressed="true"]')) {
      element.setAttribute("aria-pressed", "false");
    }
    highlightSource(null);
  }

  // Translates line `i` again. The translation must begin with `prefix`: a list of pieces, or a text. The last word of
  // the prefix is selected, unless the prefix is the whole translation.
  async function force(i, prefix, isWhole = false) {
    const { source, chosen } = state.lines[i], isText = typeof prefix === "string";
    cancelRequests();
    setStatus("translating\u2026");
    try {
      const body = { q: source, ...languagePair(), alternatives: nAlternatives(), prefix };
      const response = await requestWithRetries("explain", body, controller.signal);
      const nForced = isText ? nTokens(response, prefix) : prefix.length;
      const nowChosen = isWhole ? [] : [...chosen.filter((t) => t < nForced - 1), nForced - 1];
      addToCache(source, { response, prefix, chosen: nowChosen });
      closeInspector();
      closeWord();
      updateLines();
      render();
      setStatus("");
      if (state.lines.some((line) => line?.isStale)) translate(controller.signal); // lines whose request was cancelled
      else onTranslated();
      const word = isWhole ? 0 : response.tokens[nForced - 1]?.word ?? 0;
      if (!isWhole) selectWord(i, word);
      wordElement(i, word)?.focus({ preventScroll: true });
    } catch (error) {
      showFailure(error, () => force(i, prefix, isWhole));
    }
  }

  // The number of tokens at the start of a translation that spell the text.
  function nTokens(response, text) {
    let n = 0;
    for (let spelt = ""; n < response.tokens.length && spelt.trim().length < text.length; n++) {
      spelt += response.tokens[n].piece.replaceAll("\u2581", " ");
    }
    return n;
  }

  function undoChoices() {
    for (const line of state.lines) if (line?.prefix) cache.delete(keyOf(line.source));
    onTextChange();
  }

  // Arrow keys move from word to word in the translation.
  function onOutputKey(event) {
    const words = [...$("output").querySelectorAll(".word")], i = words.indexOf(event.target);
    if (i < 0) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) {
      const next = words[i + step];
      if (next) {
        for (const word of words) word.tabIndex = word === next ? 0 : -1;
        next.focus();
      }
    } else if (event.key === "Enter" || event.key === " ") event.target.click();
    else if (event.key === "Escape") closeWord();
    else return;
    event.preventDefault();
    event.stopPropagation(); // the inspector handles arrow keys too
  }

  // The attention inspector

  function closeInspector() {
    inspector?.destroy();
    inspector = null;
    $("inspector").classList.remove("inspector");
    $("show-attention").setAttribute("aria-expanded", "false");
  }

  async function toggleInspector() {
    if (inspector) { closeInspector(); return; }
    const { source, prefix } = state.lines[currentLine()];
    $("show-attention").setAttribute("aria-busy", "true");
    try {
      // The same alternatives as for /explain, so that the search and its result are the same.
      const body = { q: source, ...languagePair(), alternatives: nAlternatives(), ...(prefix ? { prefix } : {}) };
      const records = await requestWithRetries("inspect", body, controller.signal);
      inspector = Inspector.mount($("inspector"), records, { isEmbedded: true });
      $("show-attention").setAttribute("aria-expanded", "true");
    } catch (error) {
      showFailure(error, toggleInspector);
    } finally {
      $("show-attention").removeAttribute("aria-busy");
    }
  }

  // The history: {text, said, source, target} for each entry, where `said` is the translation

  const isHistoryOn = () => local.isAvailable && $("keep").checked;

  function addToHistory(said) {
    if (!isHistoryOn()) return;
    const text = $("text").value, entries = local.get("history", []), newest = entries[0];
    const continuesNewest = newest && (text.startsWith(newest.text) || newest.text.startsWith(text));
    const others = entries.slice(continuesNewest ? 1 : 0).filter((entry) => entry.text !== text);
    local.set("history", [{ text, said, ...languagePair() }, ...others].slice(0, MAX_HISTORY));
    renderHistory();
  }

  function renderHistory() {
    const entries = local.get("history", []), n = entries.length ? `${entries.length}` : "";
    $("history-note").textContent = local.isAvailable ? n : "this browser does not allow storage";
    $("forget").hidden = !entries.length;
    $("keep").disabled = !local.isAvailable;
    $("history-list").replaceChildren(...entries.map((entry) => make("li", {}, make("button", {
      type: "button", class: "entry", onclick: () => restore(entry),
    }, make("span", { dir: "auto", text: String(entry.text) }),
    make("span", { dir: "auto", class: "note", text: String(entry.said) })))));
  }

  function restore({ text, source, target }) {
    if (state.languages.some(({ code, targets }) => code === source && targets.includes(target))) {
      $("source").value = source;
      fillTargets(target);
    }
    $("text").value = text;
    onTextChange();
    scrollTo({ top: 0 });
    $("text").focus();
  }

  // Languages and themes

  const language = (code) => state.languages.find((each) => each.code === code);
  const nameOf = (code) => language(code)?.name ?? code;

  function fillTargets(preferred) {
    const from = language($("source").value), targets = from?.targets ?? [];
    $("target").replaceChildren(...targets.map((code) => make("option", { value: code, text: nameOf(code) })));
    if (targets.includes(preferred)) $("target").value = preferred;
    const { source, target } = languagePair();
    $("swap").hidden = !language(target)?.targets.includes(source);
    $("text").lang = source;
    $("about").textContent = from ? `${from.name} to ${nameOf(target)}` : "";
    if (local.isAvailable && source) local.set("pair", { source, target });
  }

  function swap() {
    const { source, target } = languagePair(), translated = translation();
    $("source").value = target;
    fillTargets(source);
    if (translated.trim()) $("text").value = translated;
    onTextChange();
  }

  async function start() {
    try {
      const requests = [requestWithRetries("languages"), requestWithRetries("limits")];
      [state.languages, state.limits] = await Promise.all(requests);
    } catch (error) {
      showFailure(error, start);
      return;
    }
    const sources = state.languages.filter(({ targets }) => targets.length);
    const preferred = local.get("pair", {});
    $("source").replaceChildren(...sources.map(({ code, name }) => make("option", { value: code, text: name })));
    if (sources.some(({ code }) => code === preferred.source)) $("source").value = preferred.source;
    fillTargets(preferred.target);
    onTextChange();
  }

  function setTheme(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").textContent = `Theme: ${theme}`;
    inspector?.recolour();
  }

  function nextTheme() {
    const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3];
    setTheme(theme);
    local.set("theme", theme);
  }

  function addListeners() {
    const onLanguageChange = () => { fillTargets($("target").value); onTextChange(); };
    $("text").addEventListener("input", onTextChange);
    $("source").addEventListener("change", onLanguageChange);
    $("target").addEventListener("change", onLanguageChange);
    $("swap").addEventListener("click", swap);
    $("clear").addEventListener("click", () => { $("text").value = ""; onTextChange(); $("text").focus(); });
    $("undo").addEventListener("click", undoChoices);
    $("output").addEventListener("keydown", onOutputKey);
    $("word").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && state.selected) leaveWord();
    });
    $("show-attention").addEventListener("click", toggleInspector);
    $("theme").addEventListener("click", nextTheme);
    $("forget").addEventListener("click", () => {
      local.remove("history");
      clearTimeout(historyTimer);
      renderHistory();
    });
    $("keep").addEventListener("change", () => local.set("keep", $("keep").checked));
    $("copy").addEventListener("click", async () => {
      await navigator.clipboard.writeText(translation());
      $("copy").textContent = "Copied";
      setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
    });
    $("access").addEventListener("submit", (event) => {
      event.preventDefault();
      token = $("token").value.trim();
      session.set("token", token);
      $("token").value = "";
      start();
    });
    new ResizeObserver(fitHeight).observe($("mirror"));
  }

  setTheme(THEMES.includes(local.get("theme", "auto")) ? local.get("theme", "auto") : "auto");
  $("keep").checked = local.isAvailable && local.get("keep", true);
  addListeners();
  renderHistory();
  start();
})();
