// The page at /: text in, its translation as it is typed. What is asked goes to this server alone, and the history
// stays in the browser.
"use strict";

(() => {
  const { make } = Inspector, { keeper, Failure, sentence, ask, pause } = Asking;
  const BREAKS = /\r\n|[\n\r\v\f\u001c\u001d\u001e\u0085\u2028\u2029]/; // all that ends a line for the server
  const PAUSE = 250; // milliseconds without a key before anything is asked
  const SETTLED = 1500; // before a translation is worth remembering
  const AT_ONCE = 4; // lines in a request, so that the first of many are there soon
  const N_ALTERNATIVES = 3;
  const MOST_TRIES = 5, MOST_WAIT = 30; // seconds
  const MOST_KNOWN = 300; // lines whose answers are held
  const MOST_HISTORY = 30;
  const THEMES = ["auto", "light", "dark"];
  const $ = (id) => document.getElementById(id);

  const kept = keeper("localStorage"), session = keeper("sessionStorage");

  let token = session.get("token", null);

  // Again where the server says when.
  async function askUntilAnswered(path, body, signal) {
    for (let tries = 1; ; tries++) {
      try {
        const answer = await ask(path, body, { token, signal });
        solved();
        return answer;
      } catch (error) {
        if (error.code === 401 || (error.code === 403 && token)) askForToken();
        if (!error.wait || tries >= MOST_TRIES) throw error;
        const wait = Math.min(error.wait, MOST_WAIT);
        complain(`${error.message} Trying again in ${wait}\u00a0s.`);
        await pause(1000 * wait, signal);
      }
    }
  }

  function complain(text, again = null) {
    if ($("problem-text").textContent !== text) $("problem-text").textContent = text;
    $("again").hidden = !again;
    $("again").onclick = again;
    $("problem").hidden = false;
  }

  function solved() {
    $("problem").hidden = true;
    $("access").hidden = true;
  }

  // Of what failed for good. What was only overtaken says nothing.
  function failed(error, again) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Failure)) throw error;
    setState("");
    if (error.code === 401 || error.code === 403) complain(error.message);
    else complain(error.message, again);
  }

  function askForToken() {
    token = null;
    session.remove("token");
    $("access").hidden = false;
    $("token").focus();
  }

  // What is known, and what is shown

  const state = {
    languages: [], limits: {}, lines: [], // {source, answer, prefix, chosen, isStale}, or null for a blank one
    at: null, // the line and word that are looked into
  };
  const known = new Map();
  let asking = new AbortController(), typing = 0, settling = 0, inspector = null;

  const pair = () => ({ source: $("source").value, target: $("target").value });
  const keyOf = (line) => JSON.stringify([$("source").value, $("target").value, line]);

  function remember(line, found) {
    known.delete(keyOf(line));
    known.set(keyOf(line), found);
    if (known.size > MOST_KNOWN) known.delete(known.keys().next().value);
  }

  function setState(text) {
    $("state").textContent = text;
  }

  // What is known of each line; where nothing is, what stood there before, as stale.
  function match() {
    const before = state.lines;
    state.lines = $("text").value.split(BREAKS).map((line, i) => {
      if (!line.trim()) return null;
      const found = known.get(keyOf(line));
      return { source: line, ...(found ?? { answer: before[i]?.answer }), isStale: !found };
    });
  }

  function changed() {
    asking.abort();
    asking = new AbortController();
    clearTimeout(typing);
    clearTimeout(settling);
    closeWord();
    closeInspector();
    match();
    render();
    $("problem").hidden = true;
    if (!count()) return;
    const isWaiting = state.lines.some((line) => line?.isStale);
    setState(isWaiting ? "\u2026" : "");
    if (isWaiting) typing = setTimeout(translate, PAUSE, asking.signal);
    else settle();
  }

  async function translate(signal) {
    const waiting = [...new Set(state.lines.filter((line) => line?.isStale).map((line) => line.source))];
    const atOnce = Math.min(AT_ONCE, state.limits.explained_texts ?? AT_ONCE);
    setState("translating\u2026");
    try {
      for (let first = 0; first < waiting.length; first += atOnce) {
        const q = waiting.slice(first, first + atOnce);
        const { lines } = await askUntilAnswered("explain", { q, ...pair(), alternatives: nAlternatives() }, signal);
        q.forEach((line, i) => remember(line, { answer: lines[i], prefix: null, chosen: [] }));
        match();
        render();
      }
      setState("");
      settle();
    } catch (error) {
      failed(error, changed);
    }
  }

  const nAlternatives = () => Math.min(N_ALTERNATIVES, state.limits.alternatives ?? 0);

  // Once, when it is whole: a screen reader reads it, and the history keeps it.
  function settle() {
    const text = translation();
    $("live").textContent = text;
    clearTimeout(settling);
    if (text.trim()) settling = setTimeout(() => addToHistory(text), SETTLED);
  }

  const translation = () => state.lines.map((line) => line?.answer?.translatedText ?? "").join("\n");

  // Drawing

  function render() {
    const lang = $("target").value, at = state.at;
    const lines = state.lines.map((line, i) => {
      if (!line?.answer) return make("p", { class: line ? "line waiting" : "line", text: "\u00a0" });
      return Words.line(line.answer, {
        lang, chosen: line.chosen, isStale: line.isStale,
        onpick: (word) => pick(i, word), onpoint: (word) => point(i, word),
      });
    });
    const isEmpty = !state.lines.some((line) => line?.answer);
    $("output").replaceChildren(...(state.lines.some(Boolean) ? lines : []));
    const first = $("output").querySelector(".word");
    if (first) first.tabIndex = 0;
    $("legend").hidden = $("inside").hidden = isEmpty;
    $("copy").hidden = isEmpty || !navigator.clipboard;
    $("release").hidden = !state.lines.some((line) => line?.prefix);
    if (at) mark(at.line, at.word);
    renderFlags();
    renderOthers();
    highlight(at);
  }

  // What is less than it should be; that a choice was close is no fault.
  function renderFlags() {
    const flags = new Map(state.lines.flatMap((line) => Object.entries(line?.answer?.flags ?? {})));
    flags.delete("close");
    for (const said of flags.values()) {
      $("output").append(make("p", { class: "note flag", text: sentence(said) }));
    }
  }

  // The line that is looked into, or the first.
  function current() {
    const i = state.at?.line ?? state.lines.findIndex((line) => line?.answer);
    return i >= 0 && state.lines[i]?.answer ? i : -1;
  }

  function renderOthers() {
    const i = current(), line = state.lines[i];
    const others = line ? line.answer.alternatives : [];
    $("others").hidden = !others.length;
    const isOneOfMany = state.lines.filter(Boolean).length > 1;
    $("others-title").textContent = isOneOfMany ? `Alternatives to line ${i + 1}` : "Alternatives";
    $("others-list").replaceChildren(...others.map((other) =>
      Words.alternative(line.answer, other, $("target").value, (text) => force(i, text, true))));
  }

  const span = (line, word) => $("output").querySelectorAll("p.line")[line]?.querySelector(`[data-word="${word}"]`);

  function mark(line, word) {
    for (const one of $("output").querySelectorAll(".word")) {
      const isIt = one === span(line, word);
      one.setAttribute("aria-pressed", String(isIt));
      one.tabIndex = isIt ? 0 : -1;
    }
  }

  // Source words, behind the text that is typed: the same text in the same place, whose words have a ground.
  function highlight(at) {
    const lines = $("text").value.split(BREAKS), line = at && state.lines[at.line];
    const seen = line && !line.isStale ? Words.sourceWords(line.answer, at.word) ?? [] : [];
    const parts = lines.flatMap((text, i) => {
      if (i !== at?.line || !seen.length) return [i ? "\n" : "", text];
      let word = -1;
      return [i ? "\n" : "", ...Words.wordsOf(text).map(({ part, isWord }) =>
        (isWord && seen.includes(++word) ? make("mark", { text: part }) : part))];
    });
    $("mirror").replaceChildren(...parts, "\u200b");
    grow();
  }

  function point(line, word) {
    highlight(word === null ? state.at : { line, word });
  }

  // As tall as what is in it.
  function grow() {
    $("text").style.height = `${$("mirror").offsetHeight}px`;
  }

  // Whether there are not too many. The limit is a request's; here it is kept for all lines together.
  function count() {
    const n = [...$("text").value].length, most = state.limits.characters;
    $("count").textContent = most ? `${n.toLocaleString("en")} / ${most.toLocaleString("en")}` : "";
    $("count").classList.toggle("over", n > most);
    $("clear").hidden = n === 0;
    if (!(n > most)) return true;
    complain(`The text has ${n.toLocaleString("en")} characters, the limit is ${most.toLocaleString("en")}.`);
    return false;
  }

  // Looking into a word, and saying another

  function pick(i, word) {
    const line = state.lines[i];
    if (line.isStale) return;
    if (state.at?.line === i && state.at.word === word) { closeWord(); return; }
    state.at = { line: i, word };
    mark(i, word);
    highlight(state.at);
    renderOthers();
    const { answer } = line;
    Words.panel($("word"), answer, line.source, word, {
      onforce: (t, piece) => force(i, [...answer.tokens.slice(0, t).map((token) => token.piece), piece]),
      onsay: (text) => force(i, `${before(answer, word)} ${text}`.trim()),
      onclose: leaveWord,
    });
    $("word").scrollIntoView({ block: "nearest" });
  }

  const before = (answer, word) =>
    answer.translatedText.trim().split(/([ \t]+)/).slice(0, 2 * word).join("").trim();

  function leaveWord() {
    span(state.at.line, state.at.word)?.focus();
    closeWord();
  }

  function closeWord() {
    state.at = null;
    $("word").hidden = true;
    $("word").replaceChildren();
    for (const one of $("output").querySelectorAll('[aria-pressed="true"]')) one.setAttribute("aria-pressed", "false");
    highlight(null);
  }

  // `prefix`: pieces, or a text. Its last word stays in view, unless it is the whole translation.
  async function force(i, prefix, isWhole = false) {
    const { source, chosen } = state.lines[i], isText = typeof prefix === "string";
    asking.abort();
    asking = new AbortController();
    clearTimeout(typing);
    setState("translating\u2026");
    try {
      const body = { q: source, ...pair(), alternatives: nAlternatives(), prefix };
      const answer = await askUntilAnswered("explain", body, asking.signal);
      const nForced = isText ? nTokens(answer, prefix) : prefix.length;
      const all = isWhole ? [] : [...chosen.filter((t) => t < nForced - 1), nForced - 1];
      remember(source, { answer, prefix, chosen: all });
      closeInspector();
      closeWord();
      match();
      render();
      setState("");
      if (state.lines.some((line) => line?.isStale)) translate(asking.signal); // what this has overtaken
      else settle();
      const word = isWhole ? 0 : answer.tokens[nForced - 1]?.word ?? 0;
      if (!isWhole) pick(i, word);
      span(i, word)?.focus({ preventScroll: true });
    } catch (error) {
      failed(error, () => force(i, prefix, isWhole));
    }
  }

  // How many of the first tokens spell the text.
  function nTokens(answer, text) {
    let n = 0;
    for (let said = ""; n < answer.tokens.length && said.trim().length < text.length; n++) {
      said += answer.tokens[n].piece.replaceAll("\u2581", " ");
    }
    return n;
  }

  function release() {
    for (const line of state.lines) if (line?.prefix) known.delete(keyOf(line.source));
    changed();
  }

  // In the translation, arrows go from word to word.
  function walk(event) {
    const words = [...$("output").querySelectorAll(".word")], i = words.indexOf(event.target);
    if (i < 0) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) {
      const next = words[i + step];
      if (next) {
        for (const one of words) one.tabIndex = one === next ? 0 : -1;
        next.focus();
      }
    } else if (event.key === "Enter" || event.key === " ") event.target.click();
    else if (event.key === "Escape") closeWord();
    else return;
    event.preventDefault();
    event.stopPropagation(); // the inspector listens to arrows too
  }

  // The inspector

  function closeInspector() {
    inspector?.destroy();
    inspector = null;
    $("inspector").classList.remove("inspector");
    $("look").setAttribute("aria-expanded", "false");
  }

  async function toggleInspector() {
    if (inspector) { closeInspector(); return; }
    const { source, prefix } = state.lines[current()];
    $("look").setAttribute("aria-busy", "true");
    try {
      const more = prefix ? { prefix } : {};
      const body = { q: source, ...pair(), alternatives: nAlternatives(), ...more }; // the same search again
      const records = await askUntilAnswered("inspect", body, asking.signal);
      inspector = Inspector.mount($("inspector"), records);
      $("look").setAttribute("aria-expanded", "true");
    } catch (error) {
      failed(error, toggleInspector);
    } finally {
      $("look").removeAttribute("aria-busy");
    }
  }

  // The history

  const keeps = () => kept.isOn && $("keep").checked;

  function addToHistory(said) {
    if (!keeps()) return;
    const text = $("text").value, entries = kept.get("history", []), newest = entries[0];
    const goesOn = newest && (text.startsWith(newest.text) || newest.text.startsWith(text));
    const others = entries.slice(goesOn ? 1 : 0).filter((entry) => entry.text !== text);
    kept.set("history", [{ text, said, ...pair() }, ...others].slice(0, MOST_HISTORY));
    renderHistory();
  }

  function renderHistory() {
    const entries = kept.get("history", []);
    $("history-note").textContent = !kept.isOn ? "this browser keeps none" : entries.length ? `${entries.length}` : "";
    $("forget").hidden = !entries.length;
    $("keep").disabled = !kept.isOn;
    $("history-list").replaceChildren(...entries.map((entry) => make("li", {}, make("button", {
      type: "button", class: "entry", onclick: () => recall(entry),
    }, make("span", { dir: "auto", text: String(entry.text) }),
    make("span", { dir: "auto", class: "note", text: String(entry.said) })))));
  }

  function recall({ text, source, target }) {
    if (state.languages.some((one) => one.code === source && one.targets.includes(target))) {
      $("source").value = source;
      fillTargets(target);
    }
    $("text").value = text;
    changed();
    scrollTo({ top: 0 });
    $("text").focus();
  }

  // Languages and themes

  function fillTargets(wanted) {
    const from = state.languages.find((one) => one.code === $("source").value);
    const name = (code) => state.languages.find((one) => one.code === code)?.name ?? code;
    const targets = from?.targets ?? [];
    $("target").replaceChildren(...targets.map((code) => make("option", { value: code, text: name(code) })));
    if (targets.includes(wanted)) $("target").value = wanted;
    const { source, target } = pair(), back = state.languages.find((one) => one.code === target);
    $("swap").hidden = !back?.targets.includes(source);
    $("text").lang = source;
    $("about").textContent = from ? `${from.name} to ${name(target)}, by attention alone` : "";
    if (kept.isOn && source) kept.set("pair", { source, target });
  }

  function swap() {
    const { source, target } = pair(), said = translation();
    $("source").value = target;
    fillTargets(source);
    if (said.trim()) $("text").value = said;
    changed();
  }

  async function begin() {
    try {
      [state.languages, state.limits] = await Promise.all([askUntilAnswered("languages"), askUntilAnswered("limits")]);
    } catch (error) {
      failed(error, begin);
      return;
    }
    const sources = state.languages.filter((one) => one.targets.length);
    const wanted = kept.get("pair", {});
    $("source").replaceChildren(...sources.map(({ code, name }) => make("option", { value: code, text: name })));
    if (sources.some((one) => one.code === wanted.source)) $("source").value = wanted.source;
    fillTargets(wanted.target);
    changed();
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
    kept.set("theme", theme);
  }

  function listen() {
    $("text").addEventListener("input", changed);
    $("source").addEventListener("change", () => { fillTargets($("target").value); changed(); });
    $("target").addEventListener("change", () => { fillTargets($("target").value); changed(); });
    $("swap").addEventListener("click", swap);
    $("clear").addEventListener("click", () => { $("text").value = ""; changed(); $("text").focus(); });
    $("release").addEventListener("click", release);
    $("output").addEventListener("keydown", walk);
    $("word").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && state.at) leaveWord();
    });
    $("look").addEventListener("click", toggleInspector);
    $("theme").addEventListener("click", nextTheme);
    $("forget").addEventListener("click", () => { kept.remove("history"); clearTimeout(settling); renderHistory(); });
    $("keep").addEventListener("change", () => kept.set("keep", $("keep").checked));
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
      begin();
    });
    new ResizeObserver(grow).observe($("mirror"));
  }

  setTheme(THEMES.includes(kept.get("theme", "auto")) ? kept.get("theme", "auto") : "auto");
  $("keep").checked = kept.isOn && kept.get("keep", true);
  listen();
  renderHistory();
  begin();
})();
