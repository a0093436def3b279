// Looks inside a translation: Inspector.mount(element, document) shows the records of insight/attention.py.
// One script without imports, since a page opened from disk may not load modules. Text that comes from a record is only
// ever set as text, and styles only through CSSOM, so that a strict content-security-policy can stand.
"use strict";

window.Inspector = (() => {
  // Who asks and who is looked at, by kind.
  const SIDES = { encoder: ["source", "source"], decoder: ["target", "target"], memory: ["target", "source"] };
  const ABOUT = {
    encoder: "Each token of the source looks at all of the source.",
    decoder: "Each token of the translation looks at itself and at what was said before it.",
    memory: "Each token of the translation looks at the source, to find what to say next.",
  };
  const HOW_LIKELY =
    "How likely each token was. Point at one to see what else could have been said; click to see what it looked at.";
  const OF_SHARES =
    "Shares of attention, averaged over the tokens of this sentence. For a decoder that looks at the source, words " +
    "are those aligned with what was just said, with what was said before that, and with what is to come.";
  const TITLES = { source: "source", target: "translation" };
  const UNSURE = 0.5;
  const LONG = 60; // tokens, from which on rows are lower and lines fewer
  const LEAST_LINE = 0.03;
  const TALLEST = 16000; // pixels: browsers draw no taller canvas
  const LEAST_CELL = 1.25, MOST_CELL = 28, LEAST_LABELLED = 11; // pixels

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") element.textContent = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  // What may be larger than its place: it scrolls by itself, by keyboard too.
  function scroller(name, ...children) {
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, ...children);
  }

  const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

  // float16 -> number, by a table: weights lie between 0 and 1, so that 15361 patterns are all there are.
  const HALVES = Float32Array.from({ length: 0x3c01 }, (_, bits) => {
    const exponent = bits >> 10, fraction = bits & 1023;
    return exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : (fraction / 1024) * 2 ** -14;
  });

  function unpack(packed, layer) {
    const bytes = atob(packed.layers[layer]), weights = new Float32Array(bytes.length / 2);
    for (let i = 0; i < weights.length; i++) {
      weights[i] = HALVES[bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8)];
    }
    return weights;
  }

  // How a piece is shown: without the mark of its space; start, end and language marks as what they are.
  function shown(piece, isMark) {
    if (isMark) return { "<s>": "start", "</s>": "end" }[piece] ?? piece;
    return piece.replace(/^\u2581/, "") || "\u2423";
  }

  function tokenText(item) {
    return make("bdi", { dir: "auto", text: item.text, ...(item.isMark ? { class: "mark" } : {}) });
  }

  function itemsOf(record, side) {
    const pieces = record[side], last = pieces.length - 1;
    return pieces.map((piece, i) => {
      const isMark = side === "source" ? i < record.n_tags || i === last : i === 0;
      return { text: shown(piece, isMark), isMark };
    });
  }

  function colours(element) {
    const probe = make("span");
    element.append(probe);
    const read = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
    };
    const stops = [0, 1, 2, 3].map((i) => read(`ramp-${i}`));
    const ramp = new Uint32Array(256); // little-endian RGBA, as ImageData has it
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) ** 0.7 * 3, low = Math.min(2, Math.floor(at)), part = at - low;
      const [r, g, b] = stops[low].map((c, k) => Math.round(c + (stops[low + 1][k] - c) * part));
      ramp[i] = (255 << 24) | (b << 16) | (g << 8) | r;
    }
    const found = { ramp, accent: read("accent"), ink: read("ink"), muted: read("muted"), warm: read("warm") };
    probe.remove();
    return found;
  }

  const css = ([r, g, b], alpha = 1) => `rgba(${r},${g},${b},${alpha})`;

  // A canvas of so many CSS pixels, sharp on any screen; its context draws in CSS pixels.
  function prepare(canvas, width, height) {
    const scale = Math.min(window.devicePixelRatio || 1, TALLEST / Math.max(width, height, 1));
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    const context = canvas.getContext("2d");
    context.setTransform(canvas.width / Math.max(width, 1), 0, 0, canvas.height / Math.max(height, 1), 0, 0);
    return context;
  }

  // One head as a picture of a pixel for each weight.
  function bitmap(canvas, weights, first, nRows, nColumns, ramp) {
    const image = new ImageData(nColumns, nRows), pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i++) pixels[i] = ramp[Math.round(255 * weights[first + i])];
    canvas.width = nColumns;
    canvas.height = nRows;
    canvas.getContext("2d", { willReadFrequently: true }).putImageData(image, 0, 0); // not by the GPU: they are many
    return canvas;
  }

  // The same of a head, made smaller where it is too large: of weights that fall together the largest stays.
  function shrunk(weights, first, nRows, nColumns, mostRows, mostColumns) {
    const rows = Math.min(nRows, mostRows), columns = Math.min(nColumns, mostColumns);
    const found = new Float32Array(rows * columns);
    const column = Int32Array.from({ length: nColumns }, (_, c) => Math.floor((c * columns) / nColumns));
    for (let r = 0, i = first; r < nRows; r++) {
      const start = Math.floor((r * rows) / nRows) * columns;
      for (let c = 0; c < nColumns; c++, i++) {
        if (weights[i] > found[start + column[c]]) found[start + column[c]] = weights[i];
      }
    }
    return [found, rows, columns];
  }

  // Two columns of tokens, or words, and lines between them; or two rows, where they are few and there is room.
  // `matrix.at(l, r)`: how strong each line is.
  class Columns {
    constructor(left, right, { label, onhover, onselect, mayLieAcross = false }) {
      this.sides = [left, right];
      this.mayLieAcross = mayLieAcross;
      this.row = Math.max(left.length, right.length) > LONG ? 20 : 28;
      this.canvas = make("canvas", { "aria-hidden": "true" });
      this.buttons = [left, right].map((items) => items.map((item) =>
        make("button", { type: "button", class: "token", tabindex: "-1", "aria-pressed": "false" },
          tokenText(item), make("small"))));
      const lists = this.buttons.map((buttons, side) => make("ol", {
        class: side ? "right" : "left",
        "aria-label": `${label[side]}`,
      }, ...buttons.map((button) => make("li", {}, button))));
      this.root = make("div", { class: this.row < 28 ? "columns small" : "columns" }, lists[0], this.canvas, lists[1]);
      this.root.style.setProperty("--row", `${this.row}px`);
      lists.forEach((list, side) => {
        const place = (event) => this.buttons[side].indexOf(event.target.closest("button"));
        list.addEventListener("pointerover", (e) => place(e) >= 0 && onhover({ side, index: place(e) }));
        list.addEventListener("pointerleave", () => onhover(null));
        list.addEventListener("click", (e) => place(e) >= 0 && onselect({ side, index: place(e) }));
        list.addEventListener("keydown", (e) => {
          const step = { ArrowDown: 1, ArrowUp: -1 }[e.key], next = place(e) + step;
          if (!step) return;
          e.preventDefault();
          if (!this.buttons[side][next]) return;
          onselect({ side, index: next }, true);
          this.buttons[side][next].focus();
        });
      });
    }

    // Whether both sides fit into one line each; then they lie as they are read.
    layOut() {
      this.root.classList.toggle("across", this.mayLieAcross);
      const lists = this.root.querySelectorAll("ol");
      const isAcross = this.mayLieAcross && [...lists].every((list) => list.scrollWidth <= list.clientWidth);
      this.root.classList.toggle("across", isAcross);
      return isAcross;
    }

    paint(matrix, active, selected, palette) {
      const [nLeft, nRight] = this.sides.map((items) => items.length), isAcross = this.layOut();
      const height = isAcross ? 84 : this.row * Math.max(nLeft, nRight);
      this.canvas.style.height = `${height}px`;
      const width = this.canvas.clientWidth, start = this.canvas.getBoundingClientRect().left;
      const context = prepare(this.canvas, width, height);
      const middles = isAcross && this.buttons.map((buttons) => buttons.map((button) => {
        const box = button.getBoundingClientRect();
        return box.left + box.width / 2 - start;
      }));
      const strength = (side, i) => {
        if (!active || active.side === side) return 0;
        return side ? matrix.at(active.index, i) : matrix.at(i, active.index);
      };
      this.buttons.forEach((buttons, side) => buttons.forEach((button, i) => {
        const isActive = Boolean(active) && active.side === side && active.index === i, w = strength(side, i);
        const isSelected = Boolean(selected) && selected.side === side && selected.index === i;
        button.classList.toggle("active", isActive);
        button.setAttribute("aria-pressed", String(isSelected));
        button.tabIndex = isSelected || (selected?.side !== side && i === 0) ? 0 : -1;
        button.style.setProperty("--w", w);
        const share = active && active.side !== side && w >= 0.0005 && matrix.isShare ? percent(w) : "";
        if (button.lastChild.textContent !== share) button.lastChild.textContent = share;
      }));
      for (let l = 0; l < nLeft; l++) {
        for (const r of this.visible(matrix, l, nRight, active)) {
          const ends = isAcross
            ? [middles[0][l], 3, middles[1][r], height - 3]
            : [2, (l + 0.5) * this.row - 1, width - 2, (r + 0.5) * this.row - 1];
          this.line(context, ends, isAcross, matrix.at(l, r), palette);
        }
      }
    }

    // Of a token that is looked into, all lines; else the strongest of each.
    visible(matrix, l, nRight, active) {
      if (active) {
        if (active.side === 0 && active.index !== l) return [];
        const all = active.side === 0 ? Array.from({ length: nRight }, (_, r) => r) : [active.index];
        return all.filter((r) => matrix.at(l, r) >= 0.003);
      }
      const found = [];
      for (let r = 0; r < nRight; r++) if (matrix.at(l, r) >= LEAST_LINE) found.push(r);
      return found.sort((a, b) => matrix.at(l, b) - matrix.at(l, a)).slice(0, nRight > LONG ? 3 : 8);
    }

    line(context, [x, y, toX, toY], isAcross, w, palette) {
      context.strokeStyle = css(palette.accent, Math.min(1, 0.06 + 0.94 * w));
      context.lineWidth = 1 + 2 * w;
      context.beginPath();
      context.moveTo(x, y);
      const [bendX, bendY] = isAcross ? [0, (toY - y) * 0.5] : [(toX - x) * 0.45, 0];
      context.bezierCurveTo(x + bendX, y + bendY, toX - bendX, toY - bendY, toX, toY);
      context.stroke();
    }
  }

  // One head as a heat map, tokens along its sides as far as there is room.
  class HeatMap {
    constructor({ onhover, onselect }) {
      this.canvas = make("canvas", { class: "heat", role: "img" });
      this.root = scroller("Heat map", this.canvas);
      const cell = (event) => {
        const box = this.canvas.getBoundingClientRect();
        const column = Math.floor((event.clientX - box.left - this.left) / this.cell);
        const row = Math.floor((event.clientY - box.top - this.top) / this.cell);
        const isIn = row >= 0 && column >= 0 && row < this.nRows && column < this.nColumns;
        return isIn ? { side: 0, index: row, other: column } : null;
      };
      this.canvas.addEventListener("pointermove", (event) => onhover(cell(event)));
      this.canvas.addEventListener("pointerleave", () => onhover(null));
      this.canvas.addEventListener("click", (event) => cell(event) && onselect({ side: 0, index: cell(event).index }));
    }

    paint(picture, rows, columns, active, palette) {
      const room = this.root.clientWidth, probe = this.canvas.getContext("2d");
      this.nRows = rows.length;
      this.nColumns = columns.length;
      const font = "12px system-ui, 'Segoe UI', 'Liberation Sans', sans-serif";
      probe.font = font;
      const widest = (items) => Math.min(100, 16 + Math.max(...items.map((item) => probe.measureText(item.text).width)));
      this.left = widest(rows);
      this.cell = Math.max(LEAST_CELL, Math.min(MOST_CELL, Math.floor((room - this.left - 2) / this.nColumns)));
      const isLabelled = this.cell >= LEAST_LABELLED;
      if (!isLabelled) {
        this.left = 0;
        this.cell = Math.max(LEAST_CELL, Math.min(MOST_CELL, (room - 2) / this.nColumns));
      }
      this.top = isLabelled ? widest(columns) : 0;
      const width = this.left + this.cell * this.nColumns + 2, height = this.top + this.cell * this.nRows + 2;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
      const context = prepare(this.canvas, width, height), gap = this.cell > 8 ? 1 : 0;
      context.clearRect(0, 0, width, height);
      context.imageSmoothingEnabled = false;
      context.drawImage(picture, this.left, this.top, this.cell * this.nColumns, this.cell * this.nRows);
      if (gap) {
        for (let i = 1; i < this.nColumns; i++) context.clearRect(this.left + i * this.cell - 1, this.top, 1, height);
        for (let i = 1; i < this.nRows; i++) context.clearRect(this.left, this.top + i * this.cell - 1, width, 1);
      }
      if (isLabelled) this.labels(context, rows, columns, active, palette, font);
      this.cross(context, active, palette);
    }

    labels(context, rows, columns, active, palette, font) {
      const draw = (item, isActive, room) => {
        context.font = isActive ? `600 ${font}` : font;
        context.fillStyle = css(isActive ? palette.ink : palette.muted);
        let text = item.text;
        while (text.length > 1 && context.measureText(text).width > room) text = `${[...text].slice(0, -2).join("")}\u2026`;
        context.fillText(text, 0, 0);
      };
      context.textBaseline = "middle";
      rows.forEach((item, i) => {
        context.save();
        context.textAlign = "right";
        context.translate(this.left - 6, this.top + (i + 0.5) * this.cell);
        draw(item, active?.side === 0 && active.index === i, this.left - 8);
        context.restore();
      });
      columns.forEach((item, i) => {
        context.save();
        context.textAlign = "left";
        context.translate(this.left + (i + 0.5) * this.cell, this.top - 6);
        context.rotate(-Math.PI / 2);
        draw(item, active?.other === i || (active?.side === 1 && active.index === i), this.top - 8);
        context.restore();
      });
    }

    cross(context, active, palette) {
      if (!active) return;
      context.strokeStyle = css(palette.warm);
      context.lineWidth = 1.5;
      const row = active.side === 0 ? active.index : null, column = active.side === 1 ? active.index : active.other;
      const [w, h] = [this.cell * this.nColumns, this.cell * this.nRows], out = this.cell < 6 ? 2 : 0.5;
      const thick = this.cell + 2 * out - 1;
      if (row !== null) context.strokeRect(this.left, this.top + row * this.cell - out, w, thick);
      if (column !== undefined) context.strokeRect(this.left + column * this.cell - out, this.top, thick, h);
    }
  }

  // Everything about one document: which record, kind, layer and head is looked at, and which token.
  class View {
    constructor(root, document_) {
      this.root = root;
      this.document = document_;
      this.names = document_.names;
      this.state = { record: 0, kind: "memory", layer: 0, head: 0, selected: null, hover: null };
      this.stopped = new AbortController();
      const signal = this.stopped.signal;
      root.classList.add("inspector");
      window.addEventListener("keydown", (event) => this.key(event), { signal });
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour(), { signal });
      this.resized = new ResizeObserver(() => { this.paint(); this.paintWords(); });
      this.build();
      this.resized.observe(root);
    }

    destroy() {
      this.stopped.abort();
      this.resized.disconnect();
      clearTimeout(this.drawing);
      this.root.replaceChildren();
    }

    get record() { return this.document.records[this.state.record]; }
    get shape() { return this.record.weights[this.state.kind].shape; }
    get active() { return this.state.hover ?? this.state.selected; }

    headOf(kind, layer, head) {
      return this.record.heads.find((one) => one.kind === kind && one.layer === layer && one.head === head);
    }

    build() {
      const { kind, layer, head } = this.record.heads[this.record.most_telling];
      Object.assign(this.state, { kind, layer, head, selected: null, hover: null });
      this.palette = colours(this.root);
      this.wordLinks = this.record.alignment ?? [];
      this.status = make("p", { class: "looking", "aria-live": "polite" });
      this.choice = make("section", { class: "card", "aria-label": "Which head" });
      this.pair = make("div", { class: "pair" });
      this.root.replaceChildren(
        this.top(), this.sentenceCard(), this.choice, this.pair, this.overviewCard(), this.wordsCard(), this.footer());
      this.showHead();
      this.drawOverview();
    }

    top() {
      const { model, direction, records } = this.document;
      const about = [model, direction && direction.replace("-", " \u2192 ")].filter(Boolean).join(", ");
      const [layers, heads] = this.record.weights.memory.shape;
      const counts = `${layers} decoder layers of ${heads} heads`;
      const select = make("select", {
        "aria-label": "Sentence",
        onchange: () => {
          this.state.record = select.selectedIndex;
          this.build();
          this.root.querySelector("select").focus();
        },
      }, ...records.map((one, i) => {
        const part = one.part[1] > 1 ? ` (part ${one.part[0]} of ${one.part[1]})` : "";
        const text = one.text.length > 70 ? `${[...one.text].slice(0, 69).join("")}\u2026` : one.text;
        return make("option", { text: `${i + 1}. ${text}${part}`, ...(i === this.state.record ? { selected: "" } : {}) });
      }));
      const theme = document.documentElement.dataset.theme ?? "auto";
      return make("header", { class: "top" },
        make("h1", { text: "Attention inspector" }),
        make("p", { class: "note", text: [about, counts].filter(Boolean).join(" \u00b7 ") }),
        ...(records.length > 1 ? [select] : []),
        make("button", { type: "button", class: "plain theme", text: `Theme: ${theme}`, onclick: () => this.nextTheme() }));
    }

    nextTheme() {
      const page = document.documentElement, order = ["auto", "light", "dark"];
      const next = order[(order.indexOf(page.dataset.theme ?? "auto") + 1) % 3];
      if (next === "auto") delete page.dataset.theme;
      else page.dataset.theme = next;
      this.root.querySelector(".theme").textContent = `Theme: ${next}`;
      this.recolour();
    }

    recolour() {
      this.palette = colours(this.root);
      this.showHead();
      this.paintWords();
      this.drawOverview();
    }

    // The sentence, its translation, and how likely each token was.
    sentenceCard() {
      const { text, translation, tokens, target, flags, part } = this.record;
      this.instead = make("p", { class: "instead", "aria-live": "polite" });
      this.chips = tokens.map((token, t) => {
        const isMark = token.piece === "</s>" && t === target.length - 1;
        const begins = isMark || t === 0 || token.piece.startsWith("\u2581");
        const after = tokens[t + 1];
        const ends = !after || after.piece.startsWith("\u2581") || (after.piece === "</s>" && t === target.length - 2);
        const bar = make("i");
        bar.style.setProperty("--w", token.probability);
        const unsure = token.probability < UNSURE ? " unsure" : "";
        return make("button", {
          type: "button",
          class: `chip${begins ? " begins" : ""}${ends ? " ends" : ""}${unsure}`,
          onclick: () => this.selectSaid(t),
          onpointerenter: () => this.showInstead(t),
          onfocus: () => this.showInstead(t),
        }, tokenText({ text: shown(token.piece, isMark), isMark }), make("small", { text: percent(token.probability) }),
        make("span", { class: "bar" }, bar));
      });
      const said = make("div", { class: "said", role: "group", "aria-label": "Tokens of the translation" },
        ...this.chips);
      const notes = flags.map((flag) => `${flag}: ${this.names.flags[flag] ?? ""}`);
      if (part[1] > 1) notes.unshift(`part ${part[0]} of ${part[1]}`);
      this.wordSpans = [[], []];
      const card = make("section", { class: `card${tokens.length > LONG ? " long" : ""}`, "aria-label": "Translation" },
        this.sentence("sentence", text, 0), this.sentence("translation", translation, 1), said, this.instead,
        ...notes.map((note) => make("p", { class: "note", text: note })));
      this.showInstead(null);
      return card;
    }

    sentence(className, text, side) {
      const isLong = text.length > 500;
      const line = make("p", { class: className, dir: "auto", ...(isLong ? { tabindex: "0" } : {}) });
      for (const part of text.split(/([ \t]+)/)) {
        if (!part || /^[ \t]+$/.test(part)) { line.append(part); continue; }
        const word = this.wordSpans[side].length;
        const span = make("span", {
          class: "word", text: part,
          onpointerenter: () => this.linkWords(side, word), onpointerleave: () => this.linkWords(side, null),
        });
        this.wordSpans[side].push(span);
        line.append(span);
      }
      return line;
    }

    linkWords(side, word) {
      this.wordSpans.forEach((spans) => spans.forEach((span) => span.classList.remove("linked")));
      if (word === null) return;
      this.wordSpans[side][word]?.classList.add("linked");
      for (const link of this.wordLinks) {
        if (link[side] === word) this.wordSpans[1 - side][link[1 - side]]?.classList.add("linked");
      }
    }

    showInstead(t) {
      if (t === null) {
        this.instead.textContent = HOW_LIKELY;
        return;
      }
      const token = this.record.tokens[t];
      const name = (piece) => make("b", {}, tokenText({ text: shown(piece, piece === "</s>") }));
      const others = token.runners_up.flatMap(([piece, p], i) => [i ? ", " : "", name(piece), ` ${percent(p)}`]);
      this.instead.replaceChildren(name(token.piece), ` ${percent(token.probability)}; instead: `, ...others);
    }

    // What a token looked at when it was about to be said.
    selectSaid(t) {
      if (this.state.kind === "encoder") this.choose({ kind: "memory" });
      this.select({ side: 0, index: t }, true);
    }

    // Which head is looked at
    choose(change) {
      const kind = change.kind ?? this.state.kind;
      const [layers, heads] = this.record.weights[kind].shape;
      const isOther = SIDES[kind].join() !== SIDES[this.state.kind].join();
      Object.assign(this.state, change, isOther ? { selected: null, hover: null } : {});
      this.state.layer = Math.max(0, Math.min(layers - 1, this.state.layer));
      this.state.head = Math.max(0, Math.min(heads - 1, this.state.head));
      this.showHead();
    }

    segments(name, legend, options, chosen, onchoose) {
      return make("fieldset", { class: name }, make("legend", { text: legend }),
        make("div", { class: "segments" }, ...options.map(([value, text]) => make("label", {},
          make("input", {
            type: "radio", name: `${name}-${this.id ??= Math.random().toString(36).slice(2)}`, value,
            ...(value === chosen ? { checked: "" } : {}), onchange: () => onchoose(value),
          }), make("span", { text })))));
    }

    showHead() {
      const { kind, layer, head, record } = this.state, [layers, heads, nRows, nColumns] = this.shape;
      const focused = document.activeElement;
      const hadFocus = this.choice.contains(focused) ? focused.closest("fieldset")?.className : null;
      const numbers = (n) => Array.from({ length: n }, (_, i) => [String(i), String(i + 1)]);
      const kinds = Object.entries(this.names.kinds);
      const found = this.headOf(kind, layer, head), words = this.names.places[kind];
      const distance = found.distance.toFixed(1), entropy = found.entropy.toFixed(1);
      const shares = Object.entries(found.shares).map(([place, share]) => {
        const bar = make("i");
        bar.style.setProperty("--w", share);
        return make("span", {}, make("span", { text: words[place] }), make("span", {}, bar, percent(share)));
      });
      this.choice.replaceChildren(
        make("div", { class: "choice" },
          this.segments("kind-choice", "Attention", kinds, kind, (kind) => this.choose({ kind })),
          this.segments("layer-choice", "Layer", numbers(layers), String(layer), (i) => this.choose({ layer: Number(i) })),
          this.segments("head-choice", "Head", numbers(heads), String(head), (i) => this.choose({ head: Number(i) }))),
        make("div", { class: "tends" },
          make("span", {}, "Looks mostly at ", make("strong", { text: found.label })),
          make("span", { class: "note", text: `${distance} tokens away, ${entropy} bits of entropy, on average` })),
        make("div", { class: "shares" }, ...shares), this.status);
      if (hadFocus) this.choice.querySelector(`.${hadFocus} input:checked`)?.focus();

      const key = `${record} ${kind} ${layer}`;
      if (this.unpacked?.key !== key) {
        this.unpacked = { key, weights: unpack(this.record.weights[kind], layer) }; // one layer at a time
      }
      const first = head * nRows * nColumns, weights = this.unpacked.weights;
      this.matrix = { at: (row, column) => weights[first + row * nColumns + column], isShare: true };
      this.picture = bitmap(make("canvas"), weights, first, nRows, nColumns, this.palette.ramp);
      this.showPair();
      for (const button of this.root.querySelectorAll(".head")) {
        button.setAttribute("aria-pressed", String(button.dataset.at === `${kind} ${layer} ${head}`));
      }
      this.paint();
    }

    showPair() {
      const sides = SIDES[this.state.kind], key = `${this.state.record} ${sides}`;
      if (this.shownPair === key && this.pair.firstChild) return;
      this.shownPair = key;
      this.items = sides.map((side) => itemsOf(this.record, side));
      const reactions = {
        onhover: (at) => { this.state.hover = at; this.paint(); },
        onselect: (at, isSet) => this.select(at, isSet),
      };
      const label = [`Tokens that ask: ${TITLES[sides[0]]}`, `Tokens that are looked at: ${TITLES[sides[1]]}`];
      this.columns = new Columns(...this.items, { label, ...reactions });
      this.heat = new HeatMap(reactions);
      const legend = make("span", { class: "note legend" }, "0", make("i"), "100\u00a0%");
      const lines = scroller("Lines", this.columns.root);
      lines.classList.add("lines");
      this.pair.replaceChildren(
        make("section", { class: "card" }, make("header", {}, make("h2", { text: "Lines" }),
          make("span", { class: "note", text: `${TITLES[sides[0]]} \u2192 ${TITLES[sides[1]]}` })), lines),
        make("section", { class: "card" }, make("header", {}, make("h2", { text: "Heat map" }), legend), this.heat.root));
    }

    select(at, isSet = false) {
      const { selected } = this.state;
      const isSame = selected && selected.side === at?.side && selected.index === at?.index;
      this.state.selected = isSame && !isSet ? null : at;
      this.state.hover = null;
      this.paint();
      if (this.state.selected) this.bringIntoView(at.index * this.columns.row);
    }

    // What was chosen elsewhere stands in the middle of the lines; what can be seen already stays where it is.
    bringIntoView(y) {
      const lines = this.pair.querySelector(".lines"), { scrollTop, clientHeight } = lines;
      if (y < scrollTop || y + this.columns.row > scrollTop + clientHeight) lines.scrollTop = y - clientHeight / 2;
    }

    paint() {
      if (!this.columns) return;
      const { kind, layer, head, selected } = this.state;
      this.columns.paint(this.matrix, this.active, selected, this.palette);
      this.heat.paint(this.picture, ...this.items, this.active, this.palette);
      const name = `${this.names.kinds[kind]}, layer ${layer + 1}, head ${head + 1}`;
      this.heat.canvas.setAttribute("aria-label", `Attention of ${name}: rows look at columns`);
      const said = kind !== "encoder" && this.active?.side === 0 ? this.active.index : -1;
      this.chips.forEach((chip, t) => chip.classList.toggle("active", t === said));
      this.describe();
    }

    describe() {
      const at = this.active, { kind } = this.state;
      if (!at) { this.status.textContent = `${ABOUT[kind]} Point at a token or a cell; click to hold it.`; return; }
      const bold = (item) => make("b", {}, tokenText(item)), [asks, looked] = this.items;
      const weight = (i) => (at.side ? this.matrix.at(i, at.index) : this.matrix.at(at.index, i));
      const others = (at.side ? asks : looked).map((item, i) => [item, weight(i)]);
      const first = others.sort((a, b) => b[1] - a[1]).slice(0, 4).filter(([, w]) => w >= 0.0005);
      const list = first.flatMap(([item, w], i) => [i ? ", " : "", bold(item), ` ${percent(w)}`]);
      const parts = [bold((at.side ? looked : asks)[at.index])];
      const next = kind !== "encoder" && !at.side ? this.record.tokens[at.index] : null;
      if (next) parts.push(", about to say ", bold({ text: shown(next.piece, next.piece === "</s>") }), ",");
      parts.push(at.side ? " is looked at by " : " looks at ", ...list);
      if (at.other !== undefined) parts.push("; here ", bold(looked[at.other]), ` ${percent(weight(at.other))}`);
      this.status.replaceChildren(...parts);
    }

    // All heads at a glance
    overviewCard() {
      const groups = Object.entries(this.names.kinds).map(([kind, name]) => {
        const [layers, heads] = this.record.weights[kind].shape;
        const rows = Array.from({ length: layers }, (_, layer) => make("div", { class: "layer" },
          make("span", { class: "note", text: `${layer + 1}` }),
          make("div", {}, ...Array.from({ length: heads }, (_, head) => {
            const { label } = this.headOf(kind, layer, head);
            return make("button", {
              type: "button", class: "head", "data-at": `${kind} ${layer} ${head}`, "aria-pressed": "false",
              "aria-label": `${name}, layer ${layer + 1}, head ${head + 1}: ${label}`,
              onclick: () => { this.choose({ kind, layer, head }); this.choice.scrollIntoView({ block: "nearest" }); },
            }, make("canvas"), make("span", { text: label }));
          }))));
        return make("div", { class: "kind" }, make("h3", { text: name }), ...rows);
      });
      const kinds = make("div", { class: "kinds" }, ...groups);
      kinds.style.setProperty("--least", `${Math.min(8, this.shape[1]) * 4.8 + 1.5}rem`); // all heads of a layer in a row
      const details = make("details", {}, make("summary", { text: "What each head tends to do, in numbers" }));
      details.addEventListener("toggle", () => {
        if (details.open && !details.querySelector("table")) details.append(this.table());
      });
      return make("section", { class: "card overview" }, make("header", {}, make("h2", { text: "All heads" }),
        make("span", { class: "note", text: "what each looks at most; rows ask, columns are looked at" })),
        kinds, details);
    }

    // Layer by layer, with time for the page in between.
    drawOverview() {
      clearTimeout(this.drawing);
      const waiting = Object.keys(this.names.kinds).flatMap((kind) =>
        this.record.weights[kind].layers.map((_, layer) => [kind, layer]));
      const next = () => {
        if (!waiting.length) { this.root.dataset.drawn = "all"; return; }
        const [kind, layer] = waiting.shift(), packed = this.record.weights[kind];
        const [, heads, nRows, nColumns] = packed.shape, weights = unpack(packed, layer);
        const canvases = this.root.querySelectorAll(`.head[data-at^="${kind} ${layer} "] canvas`);
        const width = canvases[0].clientWidth || 96, height = canvases[0].clientHeight || 58;
        for (let head = 0; head < heads; head++) {
          const [small, rows, columns] = shrunk(weights, head * nRows * nColumns, nRows, nColumns, height, width);
          bitmap(canvases[head], small, 0, rows, columns, this.palette.ramp);
        }
        this.drawing = setTimeout(next, 0);
      };
      delete this.root.dataset.drawn;
      this.drawing = setTimeout(next, 0);
    }

    table() {
      const names = { ...this.names.places.encoder };
      const titles = ["attention", "layer", "head", "looks mostly at", "distance", "entropy", ...Object.values(names)];
      const head = make("tr", {}, ...titles.map((text, i) =>
        make("th", { scope: "col", text, ...(i === 3 ? { class: "words" } : {}) })));
      const rows = this.record.heads.map((one) => make("tr", {},
        ...[this.names.kinds[one.kind], one.layer + 1, one.head + 1].map((text) => make("td", { text })),
        make("td", { class: "words", text: one.label }),
        ...[one.distance.toFixed(1), one.entropy.toFixed(2)].map((text) => make("td", { text })),
        ...Object.keys(names).map((place) => make("td", { text: place in one.shares ? percent(one.shares[place]) : "" }))));
      return scroller("What each head tends to do",
        make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)),
        make("p", { class: "note", text: OF_SHARES }));
    }

    wordsCard() {
      const sides = this.wordSpans.map((spans) => spans.map((span) => ({ text: span.textContent })));
      const header = make("header", {}, make("h2", { text: "Word alignment" }));
      this.words = null;
      if (this.record.alignment === null) {
        return make("section", { class: "card" }, header,
          make("p", { class: "note", text: "This model does not say which of its heads align words." }));
      }
      const nTarget = sides[1].length, linked = new Set(this.wordLinks.map(([s, t]) => s * nTarget + t));
      this.wordMatrix = { at: (s, t) => (linked.has(s * nTarget + t) ? 1 : 0), isShare: false };
      const react = (at) => {
        this.linkWords(at?.side ?? 0, at ? at.index : null);
        this.paintWords(at);
      };
      const label = ["Words of the source", "Words of the translation"];
      this.words = new Columns(...sides, { label, onhover: react, onselect: react, mayLieAcross: true });
      header.append(make("span", { class: "note", text: "which words belong together, by the heads that align best" }));
      return make("section", { class: "card words-card" }, header,
        scroller("Word alignment", this.words.root));
    }

    paintWords(active = null) {
      this.words?.paint(this.wordMatrix, active, null, this.palette);
    }

    footer() {
      const keys = {
        "\u2190 \u2192": "head", "Shift \u2190 \u2192": "layer", "1 2 3": "kind of attention", "J K": "token", Esc: "let go",
      };
      return make("footer", { class: "note" }, ...Object.entries(keys).map(([key, what]) =>
        make("span", {}, make("kbd", { text: key }), ` ${what}`)));
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest?.("select, input, textarea, [contenteditable]")) return; // which have arrows of their own
      const { layer, head, selected } = this.state;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const kind = Object.keys(this.names.kinds)[Number(event.key) - 1];
      const move = { j: 1, k: -1 }[event.key.toLowerCase()];
      if (step) this.choose(event.shiftKey ? { layer: layer + step } : { head: head + step });
      else if (kind) this.choose({ kind });
      else if (move) {
        const from = selected?.side === 0 ? selected.index : move > 0 ? -1 : 1;
        this.select({ side: 0, index: Math.max(0, Math.min(this.items[0].length - 1, from + move)) }, true);
      } else if (event.key === "Escape") this.select(null, true);
      else return;
      event.preventDefault();
    }
  }

  function mount(element, document_) {
    return new View(element, document_);
  }

  const records = document.getElementById("records");
  if (records) {
    addEventListener("DOMContentLoaded", () => {
      Inspector.mount(document.getElementById("inspector"), JSON.parse(records.textContent));
    });
  }
  return { mount, make };
})();
