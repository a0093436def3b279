// Shows a translation word by word, and the details of a word: its probability, its alternatives and its alignment.
// Text from the server is only ever set as text, and styles only through CSSOM, because of the content-security policy.
"use strict";

window.Words = (() => {
  const { make, percents } = Inspector;
  const UNSURE = 0.8, DOUBTFUL = 0.5; // probabilities below which a word is marked; translate.html has the legend
  const END = "</s>";

  // Probabilities of different tokens, or of different translations, as texts that never add up to more than 100 %.
  function percentTexts(shares) {
    return percents(shares).map((text, i) => (shares[i] < 0.0005 ? "< 0.1\u00a0%" : text));
  }

  const percentText = (share) => percentTexts([share])[0];
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

  function probabilityOf(tokens) {
    return tokens.reduce((product, token) => product * Math.min(1, token.probability), 1);
  }

  function meter(share) {
    const element = make("i", { class: "meter" });
    element.style.setProperty("--w", share);
    return element;
  }

  // The numbers of the source words that a word is aligned with; null if the model does not name alignment heads.
  function alignedWords(response, word) {
    return response.alignment && response.alignment.filter(([, target]) => target === word).map(([source]) => source);
  }

  // One element for each piece if the pieces spell the word, otherwise one for the whole word.
  function makePieces(text, tokens, isChosen) {
    const spellsWord = tokens.map((token) => withoutSpaceMark(token.piece)).join("") === text;
    const parts = spellsWord
      ? tokens.map((token, i) => [withoutSpaceMark(token.piece), isChosen[i]])
      : [[text, isChosen.some(Boolean)]];
    return parts.map(([part, partIsChosen]) => make("span", { class: partIsChosen ? "chosen" : "", text: part }));
  }

  // One line, word by word. `onpick(word)` and `onpoint(word)` get the number of a word; `onpoint(null)`: none.
  function line(response, { lang, chosen = [], isStale = false, onpick, onpoint }) {
    const root = make("p", { class: isStale ? "line stale" : "line", dir: "auto", lang });
    const places = tokenPlaces(response);
    let n = -1;
    for (const { part, isWord } of wordsOf(response.translatedText)) {
      if (!isWord) { root.append(part); continue; }
      const word = ++n, at = places[word] ?? [], tokens = at.map((t) => response.tokens[t]);
      const probability = probabilityOf(tokens);
      const mark = probability < DOUBTFUL ? " doubtful" : probability < UNSURE ? " unsure" : "";
      root.append(make("span", {
        class: `word${mark}`, title: `probability ${percentText(probability)}`,
        role: "button", tabindex: "-1", "aria-pressed": "false",
        "data-word": word, onclick: () => onpick(word),
        onpointerenter: () => onpoint(word), onpointerleave: () => onpoint(null),
      }, ...makePieces(part, tokens, at.map((t) => chosen.includes(t)))));
    }
    return root;
  }

  // A token and its alternatives, the most probable first. `before`: the pieces before it in the same word, which are
  // shown too. `title`: above the list.
  function choice(response, t, before, title, onforce) {
    const token = response.tokens[t], canForce = t < response.n_first;
    const name = (piece) => {
      if (piece === END) return [make("span", { class: "mark", text: "end of the sentence" })];
      if (isByte(piece)) return [make("span", { class: "mark", text: `byte ${piece.slice(3, 5)}` })];
      const gap = piece.startsWith("\u2581") && before ? "\u00a0" : "";
      const start = before ? [make("span", { class: "before", text: before })] : [];
      return [...start, gap, withoutSpaceMark(piece) || "\u2423"];
    };
    const others = token.runners_up.map(([piece, probability]) => [piece, probability, false]);
    const entries = [[token.piece, token.probability, true], ...others].sort((a, b) => b[1] - a[1]);
    const texts = percentTexts(entries.map(([, probability]) => probability));
    const items = entries.map(([piece, probability, isCurrent], i) => {
      const content = [make("bdi", {}, ...name(piece)), meter(probability), make("small", { text: texts[i] })];
      if (isCurrent) return make("li", { class: "current", "aria-current": "true" }, ...content);
      return make("li", {}, make("button", {
        type: "button", class: "runner", onclick: () => onforce(t, piece),
        ...(!canForce || piece === END || isByte(piece) ? { disabled: "" } : {}),
      }, ...content));
    });
    return make("div", { class: "choice" }, make("h3", { text: title }), make("ol", { "aria-label": title }, ...items));
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
    const n = places.length;
    const choices = places.map((t, i) => {
      const title = n > 1 ? `Probability of token ${i + 1} of ${n}` : "Probability of the token";
      const element = choice(response, t, before, title, onforce);
      before += withoutSpaceMark(response.tokens[t].piece);
      return element;
    });
    const tokens = places.map((t) => response.tokens[t]), whole = percentText(probabilityOf(tokens));
    const factors = tokens.map((token) => percentText(token.probability)).join(" \u00d7 ");
    const about = n > 1 ? `probability ${whole} = ${factors}` : `probability ${whole}`;
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
    const note = canForce
      ? "Each percentage is the probability of a token at this place, after the words before it. Choose another " +
        "token: the rest of the sentence is then translated again."
      : "This line was translated in parts. Only words of the first part can be changed.";
    root.replaceChildren(
      make("div", { class: "head" }, make("h2", {}, make("bdi", { text })),
        ...(n ? [make("span", { class: "note", text: about })] : []), alignmentNote(response, source, word),
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

  // The probabilities of whole translations are very small if these are long: then they have more digits.
  function percentTextsOfLines(shares) {
    if (Math.max(...shares) >= 0.001) return percentTexts(shares);
    return shares.map((share) => (share < 0.00001 ? "< 0.001\u00a0%" : `${(100 * share).toFixed(3)}\u00a0%`));
  }

  // The translation and its alternatives, the most probable first. `onchoose(text)` gets the text of an alternative.
  function alternatives(response, lang, onchoose) {
    const entries = [[response.translatedText, Math.exp(response.log_prob), true],
      ...response.alternatives.map(({ text, log_prob: logProb }) => [text, Math.exp(logProb), false])];
    entries.sort((a, b) => b[1] - a[1]);
    const texts = percentTextsOfLines(entries.map(([, share]) => share));
    return entries.map(([text, share, isCurrent], i) => {
      const words = compareWords(response.translatedText, text).flatMap(([word, differs], n) =>
        [n ? " " : "", differs ? make("mark", { text: word }) : word]);
      const content = [make("span", { dir: "auto", lang }, ...words), meter(share),
        make("small", { text: texts[i] })];
      return make("li", {}, isCurrent
        ? make("p", { class: "alternative", "aria-current": "true" }, ...content)
        : make("button", { type: "button", class: "alternative", onclick: () => onchoose(text) }, ...content));
    });
  }

  return { wordsOf, alignedWords, line, panel, alternatives };
})();
