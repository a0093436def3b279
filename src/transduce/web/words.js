// A translation as words that can be looked into: how sure each was, what else could have been said, where it looked.
// Text that comes from a server is only ever set as text, and styles only through CSSOM, as the policy demands.
"use strict";

window.Words = (() => {
  const { make } = Inspector;
  const UNSURE = 0.5;
  const END = "</s>";

  const percent = (share) => (share < 0.0005 ? "< 0.1\u00a0%" : `${(100 * share).toFixed(1)}\u00a0%`);
  const plain = (piece) => piece.replace(/^\u2581/, "");
  const isByte = (piece) => /^<0x[0-9A-F]{2}>$/.test(piece);

  // Words as the server counts them, and what lies between.
  function wordsOf(text) {
    return text.split(/([ \t]+)/).map((part) => ({ part, isWord: Boolean(part) && !/^[ \t]+$/.test(part) }));
  }

  // The tokens of each word of a translation, by their places.
  function placesOf(answer) {
    const places = [];
    answer.tokens.forEach((token, t) => {
      if (token.word !== null) (places[token.word] ??= []).push(t);
    });
    return places;
  }

  // Words of the source that the word was aligned with; null where the model cannot tell.
  function sourceWords(answer, word) {
    return answer.alignment && answer.alignment.filter(([, target]) => target === word).map(([source]) => source);
  }

  // How its pieces are drawn: each by itself where they spell the word, else as one.
  function pieces(text, tokens, isChosen) {
    const isSpelt = tokens.map((token) => plain(token.piece)).join("") === text;
    const parts = isSpelt ? tokens.map((token, i) => [plain(token.piece), token.probability, isChosen[i]])
      : [[text, Math.min(1, ...tokens.map((token) => token.probability)), isChosen.some(Boolean)]];
    return parts.map(([part, probability, isOne]) => {
      const kinds = `piece${probability < UNSURE ? " unsure" : ""}${isOne ? " chosen" : ""}`;
      const span = make("span", { class: kinds, text: part });
      span.style.setProperty("--doubt", 1 - probability);
      return span;
    });
  }

  // One line, word by word. `onpick(word)` is called with its number.
  function line(answer, { lang, chosen = [], isStale = false, onpick, onpoint }) {
    const root = make("p", { class: isStale ? "line stale" : "line", dir: "auto", lang });
    const places = placesOf(answer);
    let word = -1;
    for (const { part, isWord } of wordsOf(answer.translatedText)) {
      if (!isWord) { root.append(part); continue; }
      const own = ++word, at = places[own] ?? [];
      root.append(make("span", {
        class: "word", role: "button", tabindex: "-1", "aria-pressed": "false",
        "data-word": own, onclick: () => onpick(own),
        onpointerenter: () => onpoint(own), onpointerleave: () => onpoint(null),
      }, ...pieces(part, at.map((t) => answer.tokens[t]), at.map((t) => chosen.includes(t)))));
    }
    return root;
  }

  // What else could have been said at one place; what stands before it in the word is shown with it.
  function choice(answer, t, before, onforce) {
    const token = answer.tokens[t], canForce = t < answer.n_first;
    const bar = (share) => {
      const found = make("i");
      found.style.setProperty("--w", share);
      return found;
    };
    const name = (piece) => {
      if (piece === END) return [make("span", { class: "mark", text: "end of the sentence" })];
      if (isByte(piece)) return [make("span", { class: "mark", text: `byte ${piece.slice(3, 5)}` })];
      const gap = piece.startsWith("\u2581") && before ? "\u00a0" : "";
      return [...(before ? [make("span", { class: "before", text: before })] : []), gap, plain(piece) || "\u2423"];
    };
    const said = make("p", { class: token.probability < UNSURE ? "said unsure" : "said" },
      make("bdi", {}, ...name(token.piece)), bar(token.probability),
      make("small", { text: percent(token.probability) }));
    const others = token.runners_up.map(([piece, probability]) => make("li", {}, make("button", {
      type: "button", class: "runner", onclick: () => onforce(t, piece),
      ...(!canForce || piece === END || isByte(piece) ? { disabled: "" } : {}),
    }, make("bdi", {}, ...name(piece)), bar(probability), make("small", { text: percent(probability) }))));
    return make("div", { class: "choice" }, said, make("ol", { "aria-label": "Say instead" }, ...others));
  }

  function lookedAt(answer, source, word) {
    const found = sourceWords(answer, word);
    if (!found?.length) {
      const text = found ? "It looked at no word of the source in particular."
        : "This model does not say which of its heads align words.";
      return make("p", { class: "note", text });
    }
    const words = wordsOf(source.trim()).filter(({ isWord }) => isWord);
    return make("p", { class: "looked" }, make("span", { class: "note", text: "looked at" }),
      ...found.map((s) => make("bdi", { class: "seen", text: words[s]?.part ?? "" })));
  }

  // The panel of a word. `onforce(t, piece)`, `onsay(text)`: how the translation is to go on at this place.
  function panel(root, answer, source, word, { onforce, onsay, onclose }) {
    const places = placesOf(answer)[word] ?? [];
    const text = wordsOf(answer.translatedText).filter(({ isWord }) => isWord)[word]?.part ?? "";
    let before = "";
    const choices = places.map((t) => {
      const found = choice(answer, t, before, onforce);
      before += plain(answer.tokens[t].piece);
      return found;
    });
    const own = make("input", {
      type: "text", autocomplete: "off", spellcheck: "false", "aria-label": "A word of yours",
      placeholder: "or a word of yours",
    });
    const say = make("button", { type: "submit", class: "plain", text: "Say this" });
    const form = make("form", { class: "own" }, own, say);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (own.value.trim()) onsay(own.value.trim());
    });
    const canForce = places.length > 0 && places[0] < answer.n_first;
    const note = canForce ? "Choose what to say instead, and the rest is translated again from there."
      : "Of a long line that was translated in parts, only the first can be changed.";
    root.replaceChildren(
      make("div", { class: "head" }, make("h2", {}, make("bdi", { text })), lookedAt(answer, source, word),
        make("button", {
          type: "button", class: "plain round", "aria-label": "Close", text: "\u00d7", onclick: onclose,
        })),
      make("div", { class: "choices" }, ...choices,
        make("div", { class: "instead" }, make("p", { class: "note", text: note }), ...(canForce ? [form] : []))));
    root.hidden = false;
  }

  // Words of `text` that are not in `best`, by the longest run of words that both have in this order.
  function differing(best, text) {
    const a = best.split(/[ \t]+/), b = text.split(/[ \t]+/);
    const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
    for (let i = a.length - 1; i >= 0; i--) {
      for (let j = b.length - 1; j >= 0; j--) {
        common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
      }
    }
    const found = [];
    for (let i = 0, j = 0; j < b.length;) {
      if (i < a.length && a[i] === b[j]) { found.push([b[j], false]); i++; j++; }
      else if (i < a.length && common[i + 1][j] >= common[i][j + 1]) i++;
      else found.push([b[j++], true]);
    }
    return found;
  }

  function alternative(answer, other, lang, onchoose) {
    const words = differing(answer.translatedText, other.text).flatMap(([word, isOther], i) =>
      [i ? " " : "", isOther ? make("mark", { text: word }) : word]);
    const ratio = Math.exp(other.log_prob - answer.log_prob);
    const likely = ratio < 1 ? `${Math.max(1, Math.round(100 * ratio))}\u00a0% as likely` : "as likely";
    return make("li", {}, make("button", { type: "button", class: "other", onclick: () => onchoose(other.text) },
      make("span", { dir: "auto", lang }, ...words), make("small", { class: "note", text: likely })));
  }

  return { wordsOf, sourceWords, line, panel, alternative };
})();
