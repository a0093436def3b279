// Shows a translation word by word, and the details of a word: its probability, its alternatives and its alignment.
// Text from the server is only ever set as text, and styles only through CSSOM, because of the content-security policy.
"use strict";

window.Words = (() => {
  const { make } = Inspector;
  const UNSURE = 0.5; // probability below which a piece is marked
  const END = "</s>";

  const percent = (share) => (share < 0.0005 ? "< 0.1\u00a0%" : `${(100 * share).toFixed(1)}\u00a0%`);
  const withoutSpaceMark = (piece) => piece.replace(/^\u2581/, "");
  const isByte = (piece) => /^<0x[0-9A-F]{2}>$/.test(piece);

  // Words and the gaps between them. Words are separated by spaces and tabs, as on the server.
  function wordsOf(text) {
    return text.split(/([ \t]+)/).map((part) => ({ part, isWord: Boolean(part) && !/^[ \t]+$/.test(part) }));
  }

  // For each word of a translation, the places of its tokens.
  function tokenPlaces(response) {
    const places = [];
    response.tokens.forEach((token, t) => {
      if (token.word !== null) (places[token.word] ??= []).push(t);
    });
    return places;
  }

  // The numbers of the source words that a word is aligned with; null if the model does not name alignment heads.
  function alignedWords(response, word) {
    return response.alignment && response.alignment.filter(([, target]) => target === word).map(([source]) => source);
  }

  // One element for each piece if the pieces spell the word, otherwise one for the whole word.
  function makePieces(text, tokens, isChosen) {
    const spellsWord = tokens.map((token) => withoutSpaceMark(token.piece)).join("") === text;
    const parts = spellsWord
      ? tokens.map((token, i) => [withoutSpaceMark(token.piece), token.probability, isChosen[i]])
      : [[text, Math.min(1, ...tokens.map((token) => token.probability)), isChosen.some(Boolean)]];
    return parts.map(([part, probability, partIsChosen]) => {
      const classes = `piece${probability < UNSURE ? " unsure" : ""}${partIsChosen ? " chosen" : ""}`;
      const span = make("span", { class: classes, text: part });
      span.style.setProperty("--doubt", 1 - probability);
      return span;
    });
  }

  // One line, word by word. `onpick(word)` and `onpoint(word)` get the number of a word; `onpoint(null)`: none.
  function line(response, { lang, chosen = [], isStale = false, onpick, onpoint }) {
    const root = make("p", { class: isStale ? "line stale" : "line", dir: "auto", lang });
    const places = tokenPlaces(response);
    let n = -1;
    for (const { part, isWord } of wordsOf(response.translatedText)) {
      if (!isWord) { root.append(part); continue; }
      const word = ++n, at = places[word] ?? [];
      root.append(make("span", {
        class: "word", role: "button", tabindex: "-1", "aria-pressed": "false",
        "data-word": word, onclick: () => onpick(word),
        onpointerenter: () => onpoint(word), onpointerleave: () => onpoint(null),
      }, ...makePieces(part, at.map((t) => response.tokens[t]), at.map((t) => chosen.includes(t)))));
    }
    return root;
  }

  // A token and its alternatives. `before`: the pieces before it in the same word, which are shown too.
  function choice(response, t, before, onforce) {
    const token = response.tokens[t], canForce = t < response.n_first;
    const bar = (share) => {
      const element = make("i");
      element.style.setProperty("--w", share);
      return element;
    };
    const name = (piece) => {
      if (piece === END) return [make("span", { class: "mark", text: "end of the sentence" })];
      if (isByte(piece)) return [make("span", { class: "mark", text: `byte ${piece.slice(3, 5)}` })];
      const gap = piece.startsWith("\u2581") && before ? "\u00a0" : "";
      const start = before ? [make("span", { class: "before", text: before })] : [];
      return [...start, gap, withoutSpaceMark(piece) || "\u2423"];
    };
    const current = make("p", { class: token.probability < UNSURE ? "current unsure" : "current" },
      make("bdi", {}, ...name(token.piece)), bar(token.probability),
      make("small", { text: percent(token.probability) }));
    const runnersUp = token.runners_up.map(([piece, probability]) => make("li", {}, make("button", {
      type: "button", class: "runner", onclick: () => onforce(t, piece),
      ...(!canForce || piece === END || isByte(piece) ? { disabled: "" } : {}),
    }, make("bdi", {}, ...name(piece)), bar(probability), make("small", { text: percent(probability) }))));
    return make("div", { class: "choice" }, current, make("ol", { "aria-label": "Use instead" }, ...runnersUp));
  }

  function alignmentNote(response, source, word) {
    const aligned = alignedWords(response, word);
    if (!aligned?.length) {
      const text = aligned ? "Not aligned with any word of the source."
        : "This model does not name its alignment heads.";
      return make("p", { class: "note", text });
    }
    const words = wordsOf(source.trim()).filter(({ isWord }) => isWord);
    return make("p", { class: "aligned" }, make("span", { class: "note", text: "aligned with" }),
      ...aligned.map((s) => make("bdi", { class: "source-word", text: words[s]?.part ?? "" })));
  }

  // The details of a word. `onforce(t, piece)` and `onreplace(text)` change the translation at this place.
  function panel(root, response, source, word, { onforce, onreplace, onclose }) {
    const places = tokenPlaces(response)[word] ?? [];
    const text = wordsOf(response.translatedText).filter(({ isWord }) => isWord)[word]?.part ?? "";
    let before = "";
    const choices = places.map((t) => {
      const element = choice(response, t, before, onforce);
      before += withoutSpaceMark(response.tokens[t].piece);
      return element;
    });
    const input = make("input", {
      type: "text", autocomplete: "off", spellcheck: "false", "aria-label": "Another word",
      placeholder: "or type another word",
    });
    const submit = make("button", { type: "submit", class: "plain", text: "Use this word" });
    const form = make("form", { class: "custom" }, input, submit);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (input.value.trim()) onreplace(input.value.trim());
    });
    const canForce = places.length > 0 && places[0] < response.n_first;
    const note = canForce ? "Choose an alternative. The rest of the sentence is then translated again."
      : "This line was translated in parts. Only words of the first part can be changed.";
    root.replaceChildren(
      make("div", { class: "head" }, make("h2", {}, make("bdi", { text })), alignmentNote(response, source, word),
        make("button", {
          type: "button", class: "plain round", "aria-label": "Close", text: "\u00d7", onclick: onclose,
        })),
      make("div", { class: "choices" }, ...choices,
        make("div", { class: "instead" }, make("p", { class: "note", text: note }), ...(canForce ? [form] : []))));
    root.hidden = false;
  }

  // Each word of `text`, and whether it differs from `best`: whether it is outside the longest common subsequence.
  function compareWords(best, text) {
    const a = best.split(/[ \t]+/), b = text.split(/[ \t]+/);
    const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
    for (let i = a.length - 1; i >= 0; i--) {
      for (let j = b.length - 1; j >= 0; j--) {
        common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
      }
    }
    const words = [];
    for (let i = 0, j = 0; j < b.length;) {
      if (i < a.length && a[i] === b[j]) { words.push([b[j], false]); i++; j++; }
      else if (i < a.length && common[i + 1][j] >= common[i][j + 1]) i++;
      else words.push([b[j++], true]);
    }
    return words;
  }

  function alternative(response, { text, log_prob: logProb }, lang, onchoose) {
    const words = compareWords(response.translatedText, text).flatMap(([word, differs], i) =>
      [i ? " " : "", differs ? make("mark", { text: word }) : word]);
    const ratio = Math.exp(logProb - response.log_prob);
    const likelihood = ratio < 1 ? `${Math.max(1, Math.round(100 * ratio))}\u00a0% as likely` : "as likely";
    return make("li", {}, make("button", { type: "button", class: "alternative", onclick: () => onchoose(text) },
      make("span", { dir: "auto", lang }, ...words), make("small", { class: "note", text: likelihood })));
  }

  return { wordsOf, alignedWords, line, panel, alternative };
})();
