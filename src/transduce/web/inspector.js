// The attention inspector: Inspector.mount(element, data) shows the records of insight/attention.py. With
// {isEmbedded: true} it omits the sentence, its translation and their probabilities, which the page around it shows.
// One script without imports, because browsers do not load modules for a page opened from disk. Text from a record is
// only ever set as text, and styles only through CSSOM, because of the strict content-security policy.
"use strict";

window.Inspector = (() => {
  // Rows (queries) and columns (attended tokens) of each kind of attention.
  const SIDES = { encoder: ["source", "source"], decoder: ["target", "target"], memory: ["target", "source"] };
  const ABOUT = {
    encoder: "Each source token attends to all source tokens.",
    decoder: "Each token of the translation attends to itself and to the tokens before it.",
    memory: "Each token of the translation attends to the source tokens to predict the next token.",
  };
  const CAN_HOVER = matchMedia("(hover: hover)").matches;
  const ABOUT_PROBABILITIES = "The probability of each token. " + (CAN_HOVER
    ? "Point at a token to see its alternatives; click it to see its attention."
    : "Tap a token to see its alternatives and its attention.");
  const HOW_TO_SELECT = CAN_HOVER
    ? "Point at a token or a cell to see its weights; click to select it."
    : "Tap a token or a cell to see its weights.";
  const ABOUT_SHARES =
    "The last columns are shares of attention, averaged over the tokens of this sentence. Each token is counted at " +
    "one place only, so a row adds up to 100\u00a0%. For memory attention, the same, the previous and the next word " +
    "are the source words of the word just translated, of the one before it and of the next one.";
  const NARROW = "(max-width: 52rem)"; // as in the style sheet: cards are below each other
  const SECTIONS = {
    text: "Text", head: "Head", lines: "Lines", map: "Heat map", heads: "All heads", words: "Words",
  };
  const FOLDED_IF_NARROW = ["map", "words", "meanings"];
  const TITLES = { source: "source", target: "translation" };
  const UNSURE = 0.5; // probability below which a token is marked
  const MANY_TOKENS = 60; // above this number, rows are lower and fewer lines are drawn
  const MIN_LINE_WEIGHT = 0.03; // without a selection, lines of smaller weights are not drawn
  const MAX_CANVAS_SIZE = 16000; // pixels: browsers do not draw larger canvases
  const MIN_CELL = 1.25, MAX_CELL = 28, MAX_CELL_WIDTH = 44, MIN_LABELLED_CELL = 11; // pixels
  const MIN_CAPTION = 24; // pixels

  // The height of a row of the lines, in pixels.
  const rowHeight = (n) => (n > MANY_TOKENS ? 20 : n > 30 ? 24 : 28);

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

  // A region that scrolls if its content is too large, with the keyboard too.
  function scrollable(name, ...children) {
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, ...children);
  }

  const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

  // Shares of one whole as texts that never add up to more than 100 %, and to 100 % if the shares are the whole: what
  // rounding raised most is lowered, and the reverse.
  function percents(shares) {
    const sum = (numbers) => numbers.reduce((total, n) => total + n, 0);
    const thousandths = shares.map((share) => Math.round(1000 * share)), excess = sum(thousandths) - 1000;
    const isWhole = sum(shares) > 0.9995, step = excess > 0 ? -1 : isWhole ? 1 : 0;
    const rise = (i) => step * (1000 * shares[i] - thousandths[i]);
    const byRise = [...shares.keys()].sort((i, j) => rise(j) - rise(i));
    for (const i of byRise.slice(0, Math.abs(excess))) thousandths[i] += step;
    return thousandths.map((n) => percent(n / 1000));
  }

  // The words of a line, separated by spaces and tabs as in Python.
  const wordsOf = (text) => text.match(/[^ \t]+/g) ?? [];

  // The value of each float16 bit pattern from 0 to 1, the range of weights.
  const FLOAT16_VALUES = Float32Array.from({ length: 0x3c01 }, (_, bits) => {
    const exponent = bits >> 10, fraction = bits & 1023;
    return exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : (fraction / 1024) * 2 ** -14;
  });

  function unpack(packed, layer) {
    const bytes = atob(packed.layers[layer]), weights = new Float32Array(bytes.length / 2);
    for (let i = 0; i < weights.length; i++) {
      weights[i] = FLOAT16_VALUES[bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8)];
    }
    return weights;
  }

  // The text of a piece without the space mark. Start and end marks have names.
  function displayText(piece, isMark) {
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
      return { text: displayText(piece, isMark), isMark };
    });
  }

  // The colours of the style sheet. `ramp`: a colour for each weight, in steps of 1 / 255.
  function readPalette(element) {
    const probe = make("span");
    element.append(probe);
    const read = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
    };
    const stops = [0, 1, 2, 3].map((i) => read(`ramp-${i}`));
    const ramp = new Uint32Array(256); // little-endian RGBA, the format of ImageData
    for (let i = 0; i < 256; i++) {
      const position = (i / 255) ** 0.7 * 3, low = Math.min(2, Math.floor(position)), fraction = position - low;
      const [r, g, b] = stops[low].map((c, k) => Math.round(c + (stops[low + 1][k] - c) * fraction));
      ramp[i] = (255 << 24) | (b << 16) | (g << 8) | r;
    }
    const palette = { ramp, accent: read("accent"), ink: read("ink"), muted: read("muted"), warm: read("warm") };
    probe.remove();
    return palette;
  }

  const css = ([r, g, b], alpha = 1) => `rgba(${r},${g},${b},${alpha})`;

  // Resizes a canvas (in CSS pixels, sharp on any screen) and returns its context, which draws in CSS pixels.
  function resizeCanvas(canvas, width, height) {
    const scale = Math.min(window.devicePixelRatio || 1, MAX_CANVAS_SIZE / Math.max(width, height, 1));
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    const context = canvas.getContext("2d");
    context.setTransform(canvas.width / Math.max(width, 1), 0, 0, canvas.height / Math.max(height, 1), 0, 0);
    return context;
  }

  // Draws one head with one pixel per weight.
  function drawWeights(canvas, weights, first, nRows, nColumns, ramp) {
    const image = new ImageData(nColumns, nRows), pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i++) pixels[i] = ramp[Math.round(255 * weights[first + i])];
    canvas.width = nColumns;
    canvas.height = nRows;
    // Draw on the CPU: there are many canvases.
    canvas.getContext("2d", { willReadFrequently: true }).putImageData(image, 0, 0);
    return canvas;
  }

  // The weights of one head, reduced to at most the given size. Each value is the largest weight of its block.
  function downsample(weights, first, nRows, nColumns, maxRows, maxColumns) {
    const rows = Math.min(nRows, maxRows), columns = Math.min(nColumns, maxColumns);
    const largest = new Float32Array(rows * columns);
    const column = Int32Array.from({ length: nColumns }, (_, c) => Math.floor((c * columns) / nColumns));
    for (let r = 0, i = first; r < nRows; r++) {
      const start = Math.floor((r * rows) / nRows) * columns;
      for (let c = 0; c < nColumns; c++, i++) {
        if (weights[i] > largest[start + column[c]]) largest[start + column[c]] = weights[i];
      }
    }
    return [largest, rows, columns];
  }

  // Two columns of tokens or words with lines between them. With `allowHorizontal`, two rows if both fit into one line.
  // `matrix.at(l, r)`: the strength of each line. `captions`: of the columns, if any.
  class Columns {
    constructor(left, right, { label, captions = [], onhover, onselect, allowHorizontal = false }) {
      this.sides = [left, right];
      this.allowHorizontal = allowHorizontal;
      this.row = rowHeight(Math.max(left.length, right.length));
      this.canvas = make("canvas", { "aria-hidden": "true" });
      this.buttons = [left, right].map((items) => items.map((item) =>
        make("button", { type: "button", class: "token", tabindex: "-1", "aria-pressed": "false" },
          tokenText(item), make("small"))));
      const lists = this.buttons.map((buttons, side) => make("ol", {
        class: side ? "right" : "left",
        "aria-label": `${label[side]}`,
      }, ...buttons.map((button) => make("li", {}, button))));
      this.root = make("div", { class: this.row < 28 ? "columns small" : "columns" },
        ...captions.map((text, side) => make("span", { class: `caption ${side ? "right" : "left"}`, text })),
        lists[0], this.canvas, lists[1]);
      this.root.style.setProperty("--row", `${this.row}px`);
      lists.forEach((list, side) => {
        const indexOf = (event) => this.buttons[side].indexOf(event.target.closest("button"));
        list.addEventListener("pointerover", (e) => indexOf(e) >= 0 && onhover({ side, index: indexOf(e) }));
        list.addEventListener("pointerleave", () => onhover(null));
        list.addEventListener("click", (e) => indexOf(e) >= 0 && onselect({ side, index: indexOf(e) }));
        list.addEventListener("keydown", (e) => {
          const step = { ArrowDown: 1, ArrowUp: -1 }[e.key], next = indexOf(e) + step;
          if (!step) return;
          e.preventDefault();
          if (!this.buttons[side][next]) return;
          onselect({ side, index: next }, true);
          this.buttons[side][next].focus();
        });
      });
    }

    // Chooses rows if they are allowed and both fit into one line. Returns whether it did.
    layOut() {
      this.root.classList.toggle("horizontal", this.allowHorizontal);
      const lists = this.root.querySelectorAll("ol");
      const isHorizontal = this.allowHorizontal && [...lists].every((list) => list.scrollWidth <= list.clientWidth);
      this.root.classList.toggle("horizontal", isHorizontal);
      return isHorizontal;
    }

    paint(matrix, active, selected, palette) {
      const [nLeft, nRight] = this.sides.map((items) => items.length), isHorizontal = this.layOut();
      const height = isHorizontal ? 84 : this.row * Math.max(nLeft, nRight);
      this.canvas.style.height = `${height}px`;
      const width = this.canvas.clientWidth, start = this.canvas.getBoundingClientRect().left;
      const context = resizeCanvas(this.canvas, width, height);
      const middles = isHorizontal && this.buttons.map((buttons) => buttons.map((button) => {
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
        for (const r of this.lineEnds(matrix, l, nRight, active)) {
          const ends = isHorizontal
            ? [middles[0][l], 3, middles[1][r], height - 3]
            : [2, (l + 0.5) * this.row - 1, width - 2, (r + 0.5) * this.row - 1];
          this.line(context, ends, isHorizontal, matrix.at(l, r), palette);
        }
      }
    }

    // The right ends of the lines from l: all lines of the active token, or the strongest lines if none is active.
    lineEnds(matrix, l, nRight, active) {
      if (active) {
        if (active.side === 0 && active.index !== l) return [];
        const all = active.side === 0 ? Array.from({ length: nRight }, (_, r) => r) : [active.index];
        return all.filter((r) => matrix.at(l, r) >= 0.003);
      }
      const ends = [];
      for (let r = 0; r < nRight; r++) if (matrix.at(l, r) >= MIN_LINE_WEIGHT) ends.push(r);
      return ends.sort((a, b) => matrix.at(l, b) - matrix.at(l, a)).slice(0, nRight > MANY_TOKENS ? 3 : 8);
    }

    line(context, [x, y, toX, toY], isHorizontal, w, palette) {
      context.strokeStyle = css(palette.accent, Math.min(1, 0.06 + 0.94 * w));
      context.lineWidth = 1 + 2 * w;
      context.beginPath();
      context.moveTo(x, y);
      const [bendX, bendY] = isHorizontal ? [0, (toY - y) * 0.5] : [(toX - x) * 0.45, 0];
      context.bezierCurveTo(x + bendX, y + bendY, toX - bendX, toY - bendY, toX, toY);
      context.stroke();
    }
  }

  // One head as a heat map, with its tokens along the sides if there is room.
  class HeatMap {
    constructor({ onhover, onselect }) {
      this.canvas = make("canvas", { class: "heat", role: "img" });
      this.root = scrollable("Heat map", this.canvas);
      const cell = (event) => {
        const box = this.canvas.getBoundingClientRect();
        const column = Math.floor((event.clientX - box.left - this.left) / this.width);
        const row = Math.floor((event.clientY - box.top - this.top) / this.height);
        const isInside = row >= 0 && column >= 0 && row < this.nRows && column < this.nColumns;
        return isInside ? { side: 0, index: row, other: column } : null;
      };
      this.canvas.addEventListener("pointermove", (event) => onhover(cell(event)));
      this.canvas.addEventListener("pointerleave", () => onhover(null));
      this.canvas.addEventListener("click", (event) => cell(event) && onselect({ side: 0, index: cell(event).index }));
    }

    // `height`: of a row, if rows must line up with those of the lines; otherwise null, and cells are squares.
    paint(picture, rows, columns, active, palette, height) {
      const room = this.root.clientWidth, probe = this.canvas.getContext("2d");
      if (!room) return; // folded
      this.nRows = rows.length;
      this.nColumns = columns.length;
      const font = `12px ${getComputedStyle(this.root).fontFamily}`;
      probe.font = font;
      const widest = (items) => Math.min(100, 16 + Math.max(...items.map((item) => probe.measureText(item.text).width)));
      const maxWidth = height ? MAX_CELL_WIDTH : MAX_CELL;
      const fit = (left) => Math.max(MIN_CELL, Math.min(maxWidth, (room - left - 2) / this.nColumns));
      this.left = widest(rows);
      this.width = Math.floor(fit(this.left));
      const hasColumnLabels = this.width >= MIN_LABELLED_CELL, hasRowLabels = hasColumnLabels || height !== null;
      if (!hasRowLabels) this.left = 0;
      if (!hasColumnLabels) this.width = fit(this.left);
      this.height = height ?? this.width;
      this.top = hasColumnLabels ? widest(columns) : 0;
      const w = this.width * this.nColumns, h = this.height * this.nRows;
      const canvasWidth = this.left + w + 2, canvasHeight = this.top + h + 2;
      this.canvas.style.width = `${canvasWidth}px`;
      this.canvas.style.height = `${canvasHeight}px`;
      const context = resizeCanvas(this.canvas, canvasWidth, canvasHeight);
      context.clearRect(0, 0, canvasWidth, canvasHeight);
      context.imageSmoothingEnabled = false;
      context.drawImage(picture, this.left, this.top, w, h);
      if (this.width > 8) {
        for (let i = 1; i < this.nColumns; i++) context.clearRect(this.left + i * this.width - 1, this.top, 1, h);
      }
      if (this.height > 8) {
        for (let i = 1; i < this.nRows; i++) context.clearRect(this.left, this.top + i * this.height - 1, w, 1);
      }
      this.labels(context, hasRowLabels ? rows : [], hasColumnLabels ? columns : [], active, palette, font);
      this.outline(context, active, palette);
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
        context.translate(this.left - 6, this.top + (i + 0.5) * this.height);
        draw(item, active?.side === 0 && active.index === i, this.left - 8);
        context.restore();
      });
      columns.forEach((item, i) => {
        context.save();
        context.textAlign = "left";
        context.translate(this.left + (i + 0.5) * this.width, this.top - 6);
        context.rotate(-Math.PI / 2);
        draw(item, active?.other === i || (active?.side === 1 && active.index === i), this.top - 8);
        context.restore();
      });
    }

    // Outlines the active row and column.
    outline(context, active, palette) {
      if (!active) return;
      context.strokeStyle = css(palette.warm);
      context.lineWidth = 1.5;
      const row = active.side === 0 ? active.index : null, column = active.side === 1 ? active.index : active.other;
      const [w, h] = [this.width * this.nColumns, this.height * this.nRows], margin = this.width < 6 ? 2 : 0.5;
      const thicker = 2 * margin - 1;
      if (row !== null) context.strokeRect(this.left, this.top + row * this.height - margin, w, this.height + thicker);
      if (column !== undefined) {
        context.strokeRect(this.left + column * this.width - margin, this.top, this.width + thicker, h);
      }
    }
  }

  // The whole page, with the selected record, kind, layer, head and token as its state.
  class View {
    static nViews = 0;

    constructor(root, data, { isEmbedded = false } = {}) {
      this.root = root;
      this.data = data;
      this.isEmbedded = isEmbedded;
      this.number = ++View.nViews;
      this.names = data.names;
      const isNarrow = matchMedia(NARROW).matches;
      this.isOpen = (name) => !(isNarrow && FOLDED_IF_NARROW.includes(name));
      this.isKindOpen = (kind) => !isNarrow || kind === this.state.kind;
      this.state = { record: 0, kind: "memory", layer: 0, head: 0, selected: null, hover: null };
      this.listening = new AbortController();
      const signal = this.listening.signal;
      root.classList.add("inspector");
      window.addEventListener("keydown", (event) => this.key(event), { signal });
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour(), { signal });
      this.resizeObserver = new ResizeObserver(() => { this.paint(); this.paintWords(); });
      this.build();
      this.resizeObserver.observe(root);
    }

    destroy() {
      this.listening.abort();
      this.resizeObserver.disconnect();
      this.sectionObserver.disconnect();
      clearTimeout(this.drawing);
      this.root.replaceChildren();
    }

    get record() { return this.data.records[this.state.record]; }
    get shape() { return this.record.weights[this.state.kind].shape; }
    get active() { return this.state.hover ?? this.state.selected; }

    headOf(kind, layer, head) {
      return this.record.heads.find((h) => h.kind === kind && h.layer === layer && h.head === head);
    }

    build() {
      const { kind, layer, head } = this.record.heads[this.record.most_telling];
      Object.assign(this.state, { kind, layer, head, selected: null, hover: null });
      this.palette = readPalette(this.root);
      this.wordLinks = this.record.alignment ?? [];
      this.status = make("p", { class: "status", "aria-live": "polite" });
      this.choice = make("section", { class: "card", id: this.idOf("head"), "aria-label": "Head" });
      this.pair = make("div", { class: "pair" });
      this.shownPair = null;
      this.chips = [];
      this.wordSpans = [[], []];
      const top = this.isEmbedded ? this.sentenceChoice() : [this.top()];
      const text = this.isEmbedded ? [] : [this.sentenceCard()], navigation = this.navigation();
      this.root.replaceChildren(
        ...top, navigation, ...text, this.choice, this.pair, this.overviewCard(), this.wordsCard(), this.footer());
      this.showHead();
      this.drawOverview();
      this.observeSections(navigation);
    }

    idOf(name) { return `inspector-${this.number}-${name}`; }

    // A card that can be folded. On narrow screens some are folded at first.
    card(name, title, notes, ...children) {
      const summary = make("summary", {}, make("h2", { text: title }), ...notes);
      const card = make("details", { class: `card ${name}-card`, id: this.idOf(name) }, summary, ...children);
      card.open = this.isOpen(name);
      return card;
    }

    // Links to the sections, which the style sheet shows on narrow screens only.
    navigation() {
      const names = Object.keys(SECTIONS).filter((name) => !(this.isEmbedded && name === "text"));
      const unfold = (name) => {
        const section = document.getElementById(this.idOf(name));
        if (section?.tagName === "DETAILS") section.open = true;
      };
      return make("nav", { class: "contents", "aria-label": "Sections" }, ...names.map((name) =>
        make("a", { href: `#${this.idOf(name)}`, text: SECTIONS[name], onclick: () => unfold(name) })));
    }

    // Marks the link of the section near the top of the screen.
    observeSections(navigation) {
      this.sectionObserver?.disconnect();
      const links = [...navigation.children];
      const sections = links.map((link) => document.getElementById(link.hash.slice(1)));
      const visible = new Set();
      this.sectionObserver = new IntersectionObserver((entries) => {
        for (const { target, isIntersecting } of entries) visible[isIntersecting ? "add" : "delete"](target);
        const current = sections.findIndex((section) => visible.has(section));
        links.forEach((link, i) => {
          if (i === current) link.setAttribute("aria-current", "true");
          else link.removeAttribute("aria-current");
        });
      }, { rootMargin: "-64px 0px -70% 0px" });
      for (const section of sections) if (section) this.sectionObserver.observe(section);
    }

    top() {
      const { model, direction } = this.data;
      const about = [model, direction && direction.replace("-", " \u2192 ")].filter(Boolean).join(", ");
      const [layers, heads] = this.record.weights.memory.shape;
      const counts = `${layers} decoder layers of ${heads} heads`;
      const theme = document.documentElement.dataset.theme ?? "auto";
      return make("header", { class: "top" },
        make("h1", { text: "Attention inspector" }),
        make("p", { class: "note", text: [about, counts].filter(Boolean).join(" \u00b7 ") }),
        ...this.sentenceChoice(),
        make("button", { type: "button", class: "plain theme", text: `Theme: ${theme}`, onclick: () => this.nextTheme() }));
    }

    sentenceChoice() {
      const { records } = this.data;
      if (records.length === 1) return [];
      const select = make("select", {
        "aria-label": "Sentence",
        onchange: () => {
          this.state.record = select.selectedIndex;
          this.build();
          this.root.querySelector("select").focus({ preventScroll: true });
        },
      }, ...records.map(({ part: [number, nParts], text: full }, i) => {
        const part = nParts > 1 ? ` (part ${number} of ${nParts})` : "";
        const text = full.length > 70 ? `${[...full].slice(0, 69).join("")}\u2026` : full;
        return make("option", { text: `${i + 1}. ${text}${part}`, ...(i === this.state.record ? { selected: "" } : {}) });
      }));
      return [select];
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
      this.palette = readPalette(this.root);
      this.showHead();
      this.paintWords();
      this.drawOverview();
    }

    // The sentence, its translation, and the probability of each token.
    sentenceCard() {
      const { text, translation, tokens, target, flags, part } = this.record;
      this.alternatives = make("p", { class: "alternatives", "aria-live": "polite" });
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
          onclick: () => this.selectPredicted(t),
          onpointerenter: () => this.showAlternatives(t),
          onfocus: () => this.showAlternatives(t),
        }, tokenText({ text: displayText(token.piece, isMark), isMark }), make("small", { text: percent(token.probability) }),
        make("span", { class: "bar" }, bar));
      });
      const tokenList = make("div", { class: "tokens", role: "group", "aria-label": "Tokens of the translation" },
        ...this.chips);
      const notes = flags.map((flag) => `${flag}: ${this.names.flags[flag] ?? ""}`);
      if (part[1] > 1) notes.unshift(`part ${part[0]} of ${part[1]}`);
      const isLong = tokens.length > MANY_TOKENS;
      const attributes = { class: `card${isLong ? " long" : ""}`, id: this.idOf("text"), "aria-label": "Translation" };
      const card = make("section", attributes,
        this.sentence("sentence", text, 0), this.sentence("translation", translation, 1), tokenList, this.alternatives,
        ...notes.map((note) => make("p", { class: "note", text: note })));
      this.showAlternatives(null);
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

    showAlternatives(t) {
      if (t === null) {
        this.alternatives.textContent = ABOUT_PROBABILITIES;
        return;
      }
      const token = this.record.tokens[t];
      const name = (piece) => make("b", {}, tokenText({ text: displayText(piece, piece === "</s>") }));
      const [chosen, ...others] = percents([token.probability, ...token.runners_up.map(([, p]) => p)]);
      const runnersUp = token.runners_up.flatMap(([piece], i) => [i ? ", " : "", name(piece), ` ${others[i]}`]);
      this.alternatives.replaceChildren(name(token.piece), ` ${chosen}; alternatives: `, ...runnersUp);
    }

    // Shows the attention that predicted token t.
    selectPredicted(t) {
      if (this.state.kind === "encoder") this.choose({ kind: "memory" });
      this.select({ side: 0, index: t }, true);
    }

    // Changes the selected kind, layer or head.
    choose(change) {
      const kind = change.kind ?? this.state.kind;
      const [layers, heads] = this.record.weights[kind].shape;
      const changesSides = SIDES[kind].join() !== SIDES[this.state.kind].join();
      Object.assign(this.state, change, changesSides ? { selected: null, hover: null } : {});
      this.state.layer = Math.max(0, Math.min(layers - 1, this.state.layer));
      this.state.head = Math.max(0, Math.min(heads - 1, this.state.head));
      this.showHead();
    }

    segments(name, legend, options, selected, onchoose) {
      return make("fieldset", { class: name }, make("legend", { text: legend }),
        make("div", { class: "segments" }, ...options.map(([value, text]) => make("label", {},
          make("input", {
            type: "radio", name: `${name}-${this.id ??= Math.random().toString(36).slice(2)}`, value,
            ...(value === selected ? { checked: "" } : {}), onchange: () => onchoose(value),
          }), make("span", { text })))));
    }

    showHead() {
      const { kind, layer, head, record } = this.state, [layers, heads, nRows, nColumns] = this.shape;
      const focused = document.activeElement;
      const hadFocus = this.choice.contains(focused) ? focused.closest("fieldset")?.className : null;
      const numbers = (n) => Array.from({ length: n }, (_, i) => [String(i), String(i + 1)]);
      const kinds = Object.entries(this.names.kinds);
      const summary = this.headOf(kind, layer, head), placeNames = this.names.places[kind];
      const distance = summary.distance.toFixed(1), entropy = summary.entropy.toFixed(1);
      const parts = this.partsOf(summary);
      const shares = parts.map(([place, share, text]) => {
        const bar = make("i");
        bar.style.setProperty("--w", share);
        return make("span", {}, make("span", { text: placeNames[place] ?? place }), make("span", {}, bar, text));
      });
      this.choice.replaceChildren(
        make("div", { class: "choice" },
          this.segments("kind-choice", "Attention", kinds, kind, (kind) => this.choose({ kind })),
          this.segments("layer-choice", "Layer", numbers(layers), String(layer), (i) => this.choose({ layer: Number(i) })),
          this.segments("head-choice", "Head", numbers(heads), String(head), (i) => this.choose({ head: Number(i) }))),
        make("div", { class: "summary" },
          make("span", {}, make("strong", { text: `${summary.label}, ${summary.number}` }),
            make("span", { text: `: ${this.names.meanings[summary.label]}` }))),
        make("p", { class: "note", text: "Where the attention of this head goes, averaged over the attending tokens " +
          `(mean distance ${distance} tokens, mean entropy ${entropy} bits):` }),
        make("div", { class: "shares" }, ...shares), this.status);
      if (hadFocus) this.choice.querySelector(`.${hadFocus} input:checked`)?.focus();

      const key = `${record} ${kind} ${layer}`;
      if (this.unpacked?.key !== key) this.unpacked = { key, weights: unpack(this.record.weights[kind], layer) };
      const first = head * nRows * nColumns, weights = this.unpacked.weights;
      this.matrix = { at: (row, column) => weights[first + row * nColumns + column], isShare: true };
      this.picture = drawWeights(make("canvas"), weights, first, nRows, nColumns, this.palette.ramp);
      this.showPair();
      for (const button of this.root.querySelectorAll(".head")) {
        button.setAttribute("aria-pressed", String(button.dataset.at === `${kind} ${layer} ${head}`));
      }
      this.paint();
    }

    // For each place, its share of the attention of a head and this share as a text. They add up to 100 %.
    partsOf(summary) {
      const places = Object.keys(this.names.places[summary.kind]).filter((place) => place in summary.parts);
      const parts = places.map((place) => [place, summary.parts[place]]);
      const sum = parts.reduce((all, [, share]) => all + share, 0);
      parts.push(["elsewhere", Math.max(0, 1 - sum)]);
      const texts = percents(parts.map(([, share]) => share));
      return parts.map(([place, share], i) => [place, share, texts[i]]);
    }

    showPair() {
      const sides = SIDES[this.state.kind], key = `${this.state.record} ${sides}`;
      if (this.shownPair === key && this.pair.firstChild) return;
      this.shownPair = key;
      this.items = sides.map((side) => itemsOf(this.record, side));
      const handlers = {
        onhover: (at) => { this.state.hover = at; this.paint(); },
        onselect: (at, staysSelected) => this.select(at, staysSelected),
      };
      const label = [`Queries: ${TITLES[sides[0]]}`, `Attended tokens: ${TITLES[sides[1]]}`];
      const captions = [`from: ${TITLES[sides[0]]}`, `to: ${TITLES[sides[1]]}`];
      this.columns = new Columns(...this.items, { label, captions, ...handlers });
      this.heat = new HeatMap(handlers);
      const legend = make("span", { class: "note legend" }, "0", make("i"), "100\u00a0%");
      const lines = scrollable("Lines", this.columns.root);
      lines.classList.add("lines");
      const isWhole = Math.max(...this.items.map((items) => items.length)) <= MANY_TOKENS;
      for (const region of [lines, this.heat.root]) region.classList.toggle("whole", isWhole);
      this.pair.replaceChildren(
        this.card("lines", "Lines", [], lines), this.card("map", "Heat map", [legend], this.heat.root));
    }

    // Whether the lines and the heat map are next to each other, and short enough for equal rows.
    get isAligned() {
      const [lines, map] = this.pair.children, isBeside = lines.offsetTop === map.offsetTop;
      return isBeside && lines.open && map.open && this.columns.row >= rowHeight(MANY_TOKENS);
    }

    // Moves the lines down, or the heat map, so that their first rows are at the same height.
    alignRows() {
      const { root } = this.columns, { canvas } = this.heat;
      canvas.style.marginTop = "";
      const isAligned = this.isAligned, start = canvas.getBoundingClientRect().top + this.heat.top;
      const offset = isAligned ? start - root.getBoundingClientRect().top : MIN_CAPTION;
      root.style.setProperty("--top", `${Math.max(MIN_CAPTION, offset)}px`);
      if (isAligned && offset < MIN_CAPTION) canvas.style.marginTop = `${MIN_CAPTION - offset}px`;
    }

    // Selecting the selected token again clears the selection, unless `staysSelected`.
    select(at, staysSelected = false) {
      const { selected } = this.state;
      const isSame = selected && selected.side === at?.side && selected.index === at?.index;
      this.state.selected = isSame && !staysSelected ? null : at;
      this.state.hover = null;
      this.paint();
      if (this.state.selected) this.scrollToToken(at.index * this.columns.row);
    }

    // Scrolls the lines so that a token at y is in the middle, unless it is already visible.
    scrollToToken(y) {
      const lines = this.pair.querySelector(".lines"), { scrollTop, clientHeight } = lines;
      if (y < scrollTop || y + this.columns.row > scrollTop + clientHeight) lines.scrollTop = y - clientHeight / 2;
    }

    paint() {
      if (!this.columns) return;
      const { kind, layer, head, selected } = this.state;
      this.heat.paint(this.picture, ...this.items, this.active, this.palette, this.isAligned ? this.columns.row : null);
      this.alignRows();
      this.columns.paint(this.matrix, this.active, selected, this.palette);
      const name = `${this.names.kinds[kind]}, layer ${layer + 1}, head ${head + 1}`;
      this.heat.canvas.setAttribute("aria-label", `Attention of ${name}: rows attend to columns`);
      const predicted = kind !== "encoder" && this.active?.side === 0 ? this.active.index : -1;
      this.chips.forEach((chip, t) => chip.classList.toggle("active", t === predicted));
      this.describe();
    }

    describe() {
      const at = this.active, { kind } = this.state;
      if (!at) {
        this.status.textContent = `${ABOUT[kind]} ${HOW_TO_SELECT}`;
        return;
      }
      const bold = (item) => make("b", {}, tokenText(item)), [queries, attended] = this.items;
      const weight = (i) => (at.side ? this.matrix.at(i, at.index) : this.matrix.at(at.index, i));
      const others = (at.side ? queries : attended).map((item, i) => [item, weight(i)]);
      const strongest = others.sort((a, b) => b[1] - a[1]).slice(0, 4).filter(([, w]) => w >= 0.0005);
      const parts = [bold((at.side ? attended : queries)[at.index])];
      if (at.side) {
        // Each of these is a share of another token's attention, so their sum means nothing.
        const list = strongest.flatMap(([item, w], i) => [i ? ", " : "", `${percent(w)} of `, bold(item)]);
        parts.push(" gets these shares of the attention of other tokens: ", ...list);
      } else {
        const texts = percents(strongest.map(([, w]) => w));
        const next = kind === "encoder" ? null : this.record.tokens[at.index];
        if (next) parts.push(", predicting ", bold({ text: displayText(next.piece, next.piece === "</s>") }), ",");
        parts.push(" attends to ", ...strongest.flatMap(([item], i) => [i ? ", " : "", bold(item), ` ${texts[i]}`]));
      }
      if (at.other !== undefined) parts.push("; this cell: ", bold(attended[at.other]), ` ${percent(weight(at.other))}`);
      this.status.replaceChildren(...parts);
    }

    // Small heat maps of all heads, with their labels and what the labels mean.
    overviewCard() {
      const groups = Object.entries(this.names.kinds).map(([kind, name]) => {
        const [layers, heads] = this.record.weights[kind].shape;
        const rows = Array.from({ length: layers }, (_, layer) => make("div", { class: "layer" },
          make("span", { class: "note", text: `${layer + 1}` }),
          make("div", {}, ...Array.from({ length: heads }, (_, head) => this.tile(kind, layer, head)))));
        const group = make("details", { class: "kind" }, make("summary", {}, make("h3", { text: name })), ...rows);
        group.open = this.isKindOpen(kind);
        return group;
      });
      const kinds = make("div", { class: "kinds" }, ...groups);
      kinds.style.setProperty("--min-width", `${Math.min(8, this.shape[1]) * 4.8 + 1.5}rem`); // a row holds one layer
      const measurements = make("details", { class: "measurements" },
        make("summary", { text: "Measurements of each head" }));
      measurements.addEventListener("toggle", () => {
        if (measurements.open && !measurements.querySelector("table")) measurements.append(this.table());
      });
      const about = "one row of small heat maps for each layer; select one to see it above";
      return this.card("heads", "All heads", [make("span", { class: "note", text: about })],
        kinds, this.meanings(), measurements);
    }

    tile(kind, layer, head) {
      const { label, number } = this.headOf(kind, layer, head);
      return make("button", {
        type: "button", class: "head", "data-at": `${kind} ${layer} ${head}`, "aria-pressed": "false",
        title: `${label}, ${number}: ${this.names.meanings[label]}`,
        "aria-label": `${this.names.kinds[kind]}, layer ${layer + 1}, head ${head + 1}: ${label}, ${number}`,
        onclick: () => { this.choose({ kind, layer, head }); this.choice.scrollIntoView({ block: "nearest" }); },
      }, make("canvas"), make("span", { class: "label", text: label }), make("span", { class: "number", text: number }));
    }

    meanings() {
      const rows = Object.entries(this.names.meanings).flatMap(([label, meaning]) =>
        [make("dt", { text: label }), make("dd", { text: meaning })]);
      const meanings = make("details", { class: "meanings" }, make("summary", { text: "What the labels mean" }),
        make("p", { text: this.names.rule }), make("dl", {}, ...rows));
      meanings.open = this.isOpen("meanings");
      return meanings;
    }

    // Draws layer by layer, so that the page can react in between.
    drawOverview() {
      clearTimeout(this.drawing);
      const remaining = Object.keys(this.names.kinds).flatMap((kind) =>
        this.record.weights[kind].layers.map((_, layer) => [kind, layer]));
      const next = () => {
        if (!remaining.length) { this.root.dataset.drawn = "all"; return; }
        const [kind, layer] = remaining.shift(), packed = this.record.weights[kind];
        const [, heads, nRows, nColumns] = packed.shape, weights = unpack(packed, layer);
        const canvases = this.root.querySelectorAll(`.head[data-at^="${kind} ${layer} "] canvas`);
        const width = canvases[0].clientWidth || 96, height = canvases[0].clientHeight || 58;
        for (let head = 0; head < heads; head++) {
          const [largest, rows, columns] = downsample(weights, head * nRows * nColumns, nRows, nColumns, height, width);
          drawWeights(canvases[head], largest, 0, rows, columns, this.palette.ramp);
        }
        this.drawing = setTimeout(next, 0);
      };
      delete this.root.dataset.drawn;
      this.drawing = setTimeout(next, 0);
    }

    table() {
      const names = { ...this.names.places.encoder, elsewhere: "elsewhere" };
      const titles = [
        "attention", "layer", "head", "label", "number", "distance (tokens)", "entropy (bits)", ...Object.values(names),
      ];
      const head = make("tr", {}, ...titles.map((text, i) =>
        make("th", { scope: "col", text, ...(i === 3 ? { class: "words" } : {}) })));
      const rows = this.record.heads.map((summary) => {
        const shares = Object.fromEntries(this.partsOf(summary).map(([place, , text]) => [place, text]));
        const { kind, layer, head, label, number, distance, entropy } = summary;
        return make("tr", {},
          ...[this.names.kinds[kind], layer + 1, head + 1].map((text) => make("td", { text })),
          make("td", { class: "words", text: label }),
          ...[number, distance.toFixed(1), entropy.toFixed(2)].map((text) => make("td", { text })),
          ...Object.keys(names).map((place) => make("td", { text: shares[place] ?? "" })));
      });
      return scrollable("Measurements of each head",
        make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)),
        make("p", { class: "note", text: ABOUT_SHARES }));
    }

    wordsCard() {
      const { text, translation, alignment } = this.record;
      const sides = [text, translation].map((side) => wordsOf(side).map((word) => ({ text: word })));
      const note = make("span", { class: "note", text: "corresponding words, by the alignment heads of the model" });
      this.words = null;
      if (alignment === null) {
        return this.card("words", "Word alignment", [],
          make("p", { class: "note", text: "This model does not name its alignment heads." }));
      }
      const nTarget = sides[1].length, linked = new Set(this.wordLinks.map(([s, t]) => s * nTarget + t));
      this.wordMatrix = { at: (s, t) => (linked.has(s * nTarget + t) ? 1 : 0), isShare: false };
      const highlight = (at) => {
        this.linkWords(at?.side ?? 0, at ? at.index : null);
        this.paintWords(at);
      };
      const label = ["Words of the source", "Words of the translation"];
      this.words = new Columns(...sides, { label, onhover: highlight, onselect: highlight, allowHorizontal: true });
      return this.card("words", "Word alignment", [note], scrollable("Word alignment", this.words.root));
    }

    paintWords(active = null) {
      this.words?.paint(this.wordMatrix, active, null, this.palette);
    }

    footer() {
      const keys = {
        "\u2190 \u2192": "head", "Shift \u2190 \u2192": "layer", "1 2 3": "kind of attention", "J K": "token",
        Esc: "clear the selection",
      };
      return make("footer", { class: "note keys" }, ...Object.entries(keys).map(([key, action]) =>
        make("span", {}, make("kbd", { text: key }), ` ${action}`)));
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      // These elements use the same keys themselves.
      if (event.target.closest?.("select, input, textarea, [contenteditable]")) return;
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

  function mount(element, data, options) {
    return new View(element, data, options);
  }

  const records = document.getElementById("records");
  if (records) {
    addEventListener("DOMContentLoaded", () => {
      Inspector.mount(document.getElementById("inspector"), JSON.parse(records.textContent));
    });
  }
  return { mount, make, percents };
})();
