// The training report: shows the data that insight/report/page.py put into the page. One script without imports,
// because browsers do not load modules for a page opened from disk. Text from the data is only ever set as text, and
// styles only through CSSOM, because of the strict content-security policy.
"use strict";

(() => {
  const AXES = { step: "Step", tokens: "Tokens", seconds: "Time" };
  const CHARTS = [
    {
      title: "Training loss", of: "curves", key: "loss", isSmoothed: true,
      about: "per target token, with label smoothing",
    },
    { title: "Validation perplexity", of: "validations", key: "perplexity", hasLog: true, about: "per target token" },
    { title: "Validation loss", of: "validations", key: "loss", about: "per target token, without label smoothing" },
    { title: "Validation BLEU", of: "validations", key: "bleu", fromZero: true, about: "of greedy translations" },
    { title: "Learning rate", of: "curves", key: "learning_rate", fromZero: true },
    { title: "Gradient norm", of: "curves", key: "gradient_norm", fromZero: true },
    { title: "Tokens per second", of: "curves", key: "tokens_per_second", fromZero: true, about: "target tokens" },
    { title: "Memory", of: "curves", key: "memory_bytes", fromZero: true },
  ];
  const N_LARGE = 4; // charts that are drawn large
  const MARKS = { // the name of a kind of event, and its shape
    resumed: ["resumed", "M-4 -5 L5 0 L-4 5 Z"],
    "out of memory": ["out of memory", "M-4.5 -4.5 H4.5 V4.5 H-4.5 Z"],
    "bad step": ["NaN or infinite", "M-4 -4 L4 4 M-4 4 L4 -4"],
    damaged: ["damaged checkpoint", "M0 -6 L6 0 L0 6 L-6 0 Z"],
    plan: ["number of steps changed", "M-5 4 V-1 M0 4 V-5 M5 4 V1"],
    end: ["final model", "M0 -6 L1.8 -1.9 L6 -1.8 L2.8 1.2 L4 5.6 L0 3 L-4 5.6 L-2.8 1.2 L-6 -1.8 L-1.8 -1.9 Z"],
  };
  const STATES = {
    finished: "Finished", training: "Training", stopped: "Stopped", failed: "Failed", waiting: "Not started",
  };
  const ABOUT_TRANSLATIONS =
    "Validation sentences, translated greedily at each validation. Underlined words are in the reference too.";
  const ABOUT_MAPS =
    "Heat maps: how much each piece of the translation (rows) attends to each piece of the source (columns).";
  const ABOUT_OVERLAP = "Overlap: pairs that were dropped because one of their sides occurs in the validation pairs.";
  const CHECKSUMS = { train: "training pairs", valid: "validation pairs", subwords: "subwords" };
  const N_COLOURS = 6;
  const MARGIN = { left: 50, right: 12, top: 18, bottom: 22 }; // of a chart, in pixels
  const OUTLIER = 3; // a value this many times above the 98th percentile does not stretch a chart
  const SMOOTHING = 0.8, MANY_POINTS = 100; // a training loss of more points is smoothed unless the reader changes it
  const MAX_DOTS = 60; // a curve of more points has no dots
  const REACH = 12; // pixels: a curve without a point this near to the pointer shows no value
  const MAX_SHOWN_MARKS = 5; // of a run at one place
  const MAX_ROWS = 50; // of the table of steps, for each run
  const MAX_CELL = 22, MIN_CELL = 3, MIN_LABELLED_CELL = 11; // of a heat map, in pixels
  const MAX_HEIGHT = 360; // of its cells together, in pixels; cells with labels may need more
  const MAX_LABEL = 12; // characters of a piece beside a heat map
  const N_LEVELS = 12; // colours of a heat map, in report.css

  const data = JSON.parse(document.getElementById("report-data").textContent), { runs } = data;
  const isSingle = runs.length === 1;

  // Elements

  function build(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") element.textContent = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  const make = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) =>
    build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const bdi = (text) => make("bdi", { dir: "auto", text });
  const note = (text) => make("span", { class: "note", text });
  const code = (text) => make("code", { text });

  // A region that scrolls if its content is too large, with the keyboard too. Names of regions must differ.
  const nRegions = new Map();
  function scrollable(name, content) {
    const n = (nRegions.get(name) ?? 0) + 1, label = `Table: ${name}${n > 1 ? `, ${n}` : ""}`;
    nRegions.set(name, n);
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
  }

  // A cell is a text, an element, or a list of these. The classes are those of the columns.
  function table(titles, rows, classes = []) {
    const of = (column) => (classes[column] ? { class: classes[column] } : {});
    const head = titles.map((text, i) => (text ? make("th", { scope: "col", text, ...of(i) }) : make("td")));
    const body = rows.map((row) => make("tr", {}, ...row.map((cell, i) => make("td", of(i), ...[cell].flat()))));
    return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  }

  // Content that is made when it is first opened.
  function details(summary, content) {
    const element = make("details", {}, make("summary", { text: summary }));
    element.addEventListener("toggle", () => {
      if (element.open && element.childElementCount === 1) element.append(content());
    });
    return element;
  }

  function segments(name, legend, options, selected, onchoose) {
    const labels = options.map(([value, text]) => make("label", {}, make("input", {
      type: "radio", name, value, ...(value === selected ? { checked: "" } : {}), onchange: () => onchoose(value),
    }), make("span", { text })));
    return make("fieldset", {}, make("legend", { text: legend }), make("div", { class: "segments" }, ...labels));
  }

  function card(id, title, about, ...children) {
    const heading = make("h2", { id: `${id}-title`, text: title });
    const header = make("header", {}, heading, ...(about ? [make("p", { class: "note", text: about })] : []));
    return make("section", { class: "card", id, "aria-labelledby": `${id}-title` }, header, ...children);
  }

  // A list of facts: label, value, remark.
  function factList(facts) {
    return make("dl", {}, ...facts.map(([label, value, remark]) => make("div", {},
      make("dt", { text: label }), make("dd", {}, bdi(value)), make("dd", { class: "note" }, bdi(remark)))));
  }

  // Runs have colours, and names if there are several.
  const colourOf = (run) => `run-${run % N_COLOURS} dash-${Math.floor(run / N_COLOURS) % 3}`;
  const swatch = (run) => make("i", { class: `swatch ${colourOf(run)}`, "aria-hidden": "true" });
  const named = (run) => (isSingle ? [] : [swatch(run), " ", bdi(runs[run].name)]);
  const nameCell = (run) => (isSingle ? [] : [bdi(runs[run].name)]);
  const withRun = (columns, run = "run") => (isSingle ? columns : [run, ...columns]);

  // Numbers as text

  const isNumber = (x) => typeof x === "number";
  const whole = (x) => (isNumber(x) ? Math.round(x).toLocaleString("en") : "-");
  const percent = (share) => (isNumber(share) ? `${(100 * share).toFixed(1)}\u00a0%` : "-");
  const oneDecimal = (x) => (isNumber(x) ? x.toFixed(1) : "-");

  function precise(x, digits = 4) {
    if (!isNumber(x)) return "-";
    if (x === 0) return "0";
    if (Math.abs(x) >= 1000) return whole(x);
    return Math.abs(x) < 1e-3 ? x.toExponential(2).replace("-", "\u2212") : x.toPrecision(digits);
  }

  function short(x) {
    if (!isNumber(x)) return "-";
    const [size, unit] = x >= 1e9 ? [1e9, "B"] : x >= 1e6 ? [1e6, "M"] : x >= 1e4 ? [1e3, "k"] : [1, ""];
    return unit ? `${Number((x / size).toPrecision(3))}\u00a0${unit}` : whole(x);
  }

  function time(seconds) {
    if (!isNumber(seconds)) return "-";
    if (seconds < 90) return `${Math.round(seconds)}\u00a0s`;
    const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60);
    if (minutes < 90) return `${minutes}\u00a0min`;
    if (hours < 48) return `${hours}\u00a0h ${minutes % 60}\u00a0min`;
    return `${Math.floor(hours / 24)}\u00a0d ${hours % 24}\u00a0h`;
  }

  // Hours, minutes and seconds, for places on the axis.
  function clock(seconds) {
    if (!isNumber(seconds)) return "-";
    const total = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
    return `${Math.floor(total / 3600)}:${pad(Math.floor(total / 60) % 60)}:${pad(total % 60)}`;
  }

  function memory(bytes) {
    if (!isNumber(bytes)) return "-";
    return bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)}\u00a0GiB` : `${Math.round(bytes / 2 ** 20)}\u00a0MiB`;
  }

  function place(value, axis) {
    return axis === "step" ? `step ${whole(value)}` : axis === "tokens" ? `${short(value)} tokens` : clock(value);
  }

  const FORMATS = { memory_bytes: memory, tokens_per_second: whole, bleu: oneDecimal };

  // Scales

  function linearTicks(low, high, n, unit = 1) {
    const least = (high - low) / unit / Math.max(1, n), power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999) * power * unit, ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step || 0); // no -0
    return ticks;
  }

  function logTicks(low, high, n) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of [1, 2, 5]) ticks.push(Number(`${factor}e${power}`));
    }
    const inside = ticks.filter((tick) => tick >= low && tick <= high);
    if (inside.length < 2) return linearTicks(low, high, n);
    return inside.length > 2 * n ? inside.filter((tick) => Number.isInteger(Math.log10(tick))) : inside;
  }

  const timeUnit = (seconds) => (seconds >= 7200 ? [3600, "h"] : seconds >= 180 ? [60, "min"] : [1, "s"]);

  // An exponential moving average. Dividing by the sum of the weights removes the bias of the first values.
  function smooth(values, weight) {
    let sum = 0, weights = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      weights = weight * weights + (1 - weight);
      return sum / weights;
    });
  }

  // The index of the value nearest to x, -1 if there are no values. They ascend.
  function nearest(values, x) {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle;
      else high = middle;
    }
    return high < 0 || Math.abs(values[high] - x) < Math.abs(values[low] - x) ? high : low;
  }

  // Curves

  const nPoints = Math.max(...runs.map((run) => run.curves.loss.length));
  const view = {
    axis: "step", isLog: true, smoothing: nPoints > MANY_POINTS ? SMOOTHING : 0, hidden: new Set(), emphasised: null,
    x: null, // the place that the reader points at
  };
  const visibleRuns = () => [...runs.keys()].filter((run) => !view.hidden.has(run));

  // The points of a chart for one run: places on the axis, values as they were logged, and values as they are drawn.
  function pointsOf(spec, run) {
    const columns = runs[run][spec.of], xs = columns[view.axis], raw = columns[spec.key];
    if (xs.includes(null)) return { xs: [], raw: [], values: [] };
    const values = spec.isSmoothed && view.smoothing ? smooth(raw, view.smoothing) : raw;
    return { xs, raw, values, low: columns[`${spec.key}_low`], high: columns[`${spec.key}_high`] };
  }

  // The colour of a mark tells its kind or, if there are several runs, its run.
  function markClass(kind, run) {
    return `event ${kind.replaceAll(" ", "-")} ${isSingle ? "by-kind" : run === undefined ? "" : colourOf(run)}`;
  }

  class Chart {
    constructor(spec, isLarge) {
      this.spec = spec;
      this.height = isLarge ? 230 : 150;
      this.id = `${spec.of}-${spec.key}`;
      this.format = FORMATS[spec.key] ?? precise;
      this.about = note("");
      this.current = make("span", { class: "current" });
      this.summary = make("p", { class: "hidden", id: `${this.id}-summary` });
      this.tip = make("div", { class: "tip", hidden: "" });
      this.svg = draw("svg", { "aria-hidden": "true" });
      this.plot = make("div", {
        class: "plot",
        onpointermove: (event) => this.point(event), onpointerdown: (event) => this.point(event),
        // A finger that is lifted leaves the values on the screen.
        onpointerleave: (event) => event.pointerType !== "touch" && showPlace(null),
        onblur: () => showPlace(null), onkeydown: (event) => this.key(event),
      }, this.svg, this.tip);
      this.root = make("figure", { class: "chart" },
        make("figcaption", {}, make("h3", { text: spec.title }), this.about, this.current), this.plot, this.summary);
    }

    // `highX`: the end of the axis, the same for all charts.
    paint(highX) {
      this.points = new Map(visibleRuns().map((run) => [run, pointsOf(this.spec, run)]));
      this.places = [...new Set([...this.points.values()].flatMap(({ xs }) => xs))].sort((a, b) => a - b);
      const drawn = [...this.points.values()].flatMap(({ values }) => values.filter(isNumber));
      this.isEmpty = !drawn.length;
      this.plot.classList.toggle("empty", this.isEmpty);
      this.about.textContent = this.spec.about ?? "";
      this.describe();
      if (this.isEmpty) {
        this.svg.replaceChildren();
        return;
      }
      this.width = this.plot.clientWidth;
      this.setScales(drawn, highX);
      build(this.svg, { width: this.width, height: this.height }, []);
      const clip = `${this.id}-clip`, { left, top } = MARGIN;
      const [width, height] = [this.width - left - MARGIN.right, this.height - top - MARGIN.bottom];
      const inside = draw("rect", { x: left - 6, y: top - 6, width: width + 12, height: height + 8 });
      this.cross = draw("g", { class: "cross" });
      const curves = [...this.points.keys()].map((run) => this.curve(run));
      this.svg.replaceChildren(
        draw("clipPath", { id: clip }, inside), this.grid(), this.marks(),
        draw("g", { "clip-path": `url(#${clip})` }, ...curves), this.cross);
    }

    setScales(drawn, highX) {
      const isLog = this.spec.hasLog && view.isLog, sorted = [...drawn].sort((a, b) => a - b);
      const usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
      let low = this.spec.fromZero ? Math.min(0, sorted[0]) : sorted[0], high = sorted.at(-1);
      if (!isLog && usual > 0 && high > OUTLIER * usual) {
        this.about.textContent = `cut off, up to ${this.format(high)}`;
        high = 1.5 * usual;
      }
      if (isLog) [low, high] = [Math.log(Math.max(low, 1e-9)), Math.log(Math.max(high, 1e-9))];
      if (high - low < 1e-9 * Math.abs(high) || high === low) {
        const room = 0.05 * Math.abs(high) || 0.5;
        [low, high] = [low - room, high + room];
      }
      const padding = 0.05 * (high - low);
      [low, high] = [low === 0 && this.spec.fromZero ? 0 : low - padding, high + padding];
      const bottom = this.height - MARGIN.bottom, tall = bottom - MARGIN.top;
      const wide = this.width - MARGIN.left - MARGIN.right, scale = (y) => (isLog ? Math.log(Math.max(y, 1e-9)) : y);
      this.highX = highX;
      this.x = (value) => MARGIN.left + (value / highX) * wide;
      this.valueAt = (pixel) => ((pixel - MARGIN.left) / wide) * highX;
      this.y = (value) => bottom - ((scale(value) - low) / (high - low)) * tall;
      const n = Math.max(4, Math.floor(tall / 30)), unit = high >= 2 ** 30 ? 2 ** 30 : 2 ** 20;
      this.ticks = isLog ? logTicks(Math.exp(low), Math.exp(high), n)
        : linearTicks(low, high, n, this.spec.key === "memory_bytes" ? unit : 1);
    }

    grid() {
      const { left, right } = MARGIN, end = this.width - right, bottom = this.height - MARGIN.bottom;
      const nTicks = Math.max(2, Math.min(6, Math.floor((end - left) / 62)));
      const [unit, unitName] = view.axis === "seconds" ? timeUnit(this.highX) : [1, ""];
      const xText = (value) => {
        if (unitName) return `${Number((value / unit).toPrecision(4))}\u00a0${unitName}`;
        return view.axis === "tokens" || value >= 1e5 ? short(value) : whole(value);
      };
      const rows = this.ticks.flatMap((value) => [
        draw("line", { x1: left, x2: end, y1: this.y(value), y2: this.y(value) }),
        draw("text", { x: left - 6, y: this.y(value) + 4, "text-anchor": "end", text: this.tickText(value) }),
      ]);
      const columns = linearTicks(0, this.highX, nTicks, unit).map((value) => {
        const x = this.x(value), anchor = value === 0 ? "start" : x > this.width - 30 ? "end" : "middle";
        return draw("text", { x, y: this.height - 6, "text-anchor": anchor, text: xText(value) });
      });
      const base = draw("line", { class: "base", x1: left, x2: end, y1: bottom, y2: bottom });
      return draw("g", { class: "grid" }, ...rows, ...columns, base);
    }

    tickText(value) {
      if (value === 0) return "0";
      if (this.spec.key === "memory_bytes") return memory(value).replace(".0", "");
      if (this.spec.key === "learning_rate") return value.toExponential().replace("-", "\u2212").slice(0, 7);
      return Math.abs(value) >= 1e4 ? short(value) : String(Number(value.toPrecision(4)));
    }

    curve(run) {
      const { xs, raw, values, low, high } = this.points.get(run);
      const isFaded = view.emphasised !== null && view.emphasised !== run;
      const group = draw("g", { class: `${colourOf(run)}${isFaded ? " faded" : ""}` });
      if (low) group.append(draw("path", { class: "band", d: this.outline(xs, low, high) }));
      if (values !== raw) group.append(draw("path", { class: "raw", d: this.path(xs, raw) }));
      group.append(draw("path", { class: "line", d: this.path(xs, values) }));
      for (const [i, x] of xs.length <= MAX_DOTS ? xs.entries() : []) {
        if (values[i] === null) continue;
        const isBest = this.spec.of === "validations" && i === runs[run].validations.best;
        const r = isBest ? 4.5 : xs.length > MAX_DOTS / 2 ? 1.8 : 2.6;
        group.append(draw("circle", { class: isBest ? "dot best" : "dot", cx: this.x(x), cy: this.y(values[i]), r }));
      }
      return group;
    }

    at(x, value) {
      return `${this.x(x).toFixed(1)} ${this.y(value).toFixed(1)}`;
    }

    path(xs, values) {
      let text = "";
      for (const [i, x] of xs.entries()) {
        if (values[i] === null) continue;
        const begins = i === 0 || values[i - 1] === null, ends = i + 1 === xs.length || values[i + 1] === null;
        text += `${begins ? "M" : "L"}${this.at(x, values[i])}${begins && ends ? "h0" : ""}`; // h0 draws a dot
      }
      return text;
    }

    // From the lowest to the highest value of the steps that each point stands for.
    outline(xs, low, high) {
      const known = [...xs.keys()].filter((i) => low[i] !== null);
      const there = known.map((i) => this.at(xs[i], high[i]));
      const back = known.reverse().map((i) => this.at(xs[i], low[i]));
      return known.length ? `M${[...there, ...back].join("L")}Z` : "";
    }

    // The marks of a run that can be placed on the axis.
    marksOf(run) {
      return runs[run].marks.filter((mark) => mark.kind in MARKS && mark[view.axis] !== null);
    }

    // Events: a shape above the chart and a line through it.
    marks() {
      return draw("g", {}, ...visibleRuns().flatMap((run) => this.marksOf(run).map((mark) => {
        const x = this.x(mark[view.axis]), middle = Math.min(x, this.width - 7).toFixed(1);
        return draw("g", { class: markClass(mark.kind, run) },
          draw("line", { x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom }),
          draw("path", { transform: `translate(${middle} 8) scale(.9)`, d: MARKS[mark.kind][1] }));
      })));
    }

    // The text for screen readers, and the last value beside the title.
    describe() {
      const parts = [...this.points].flatMap(([run, { xs, raw }]) => {
        const known = [...xs.keys()].filter((i) => raw[i] !== null);
        if (!known.length) return [];
        const say = (i) => `${this.format(raw[i])} at ${place(xs[i], view.axis)}`;
        const lowest = known.reduce((a, b) => (raw[b] < raw[a] ? b : a));
        const highest = known.reduce((a, b) => (raw[b] > raw[a] ? b : a));
        const ends = `from ${say(known[0])} to ${say(known.at(-1))}`;
        return [`${isSingle ? "" : `${runs[run].name}: `}${ends}; lowest ${say(lowest)}; highest ${say(highest)}.`];
      });
      this.summary.textContent = parts.join(" ");
      const last = isSingle && this.points.get(0)?.raw.findLast(isNumber);
      this.current.textContent = isNumber(last) ? this.format(last) : "";
      if (!this.isEmpty) {
        this.sayPlace(0, parts.join(" "));
        return;
      }
      const names = ["role", "tabindex", ...this.plot.getAttributeNames().filter((name) => name.startsWith("aria-"))];
      for (const name of names) this.plot.removeAttribute(name);
      this.plot.dataset.note = view.hidden.size === runs.length ? "all runs are hidden" : "no values yet";
    }

    sayPlace(i, text) {
      build(this.plot, {
        role: "slider", tabindex: "0", "aria-label": `${this.spec.title}: values along the curve`,
        "aria-describedby": this.summary.id, "aria-valuemin": 0, "aria-valuemax": this.places.length - 1,
        "aria-valuenow": i, "aria-valuetext": text,
      }, []);
    }

    // Pointing, and the keyboard

    point(event) {
      if (this.isEmpty) return;
      const x = this.valueAt(event.clientX - this.plot.getBoundingClientRect().left);
      this.show(this.places[nearest(this.places, x)]);
    }

    key(event) {
      if (this.isEmpty || event.ctrlKey || event.metaKey || event.altKey) return;
      const last = this.places.length - 1, far = Math.max(1, Math.round(last / 20));
      const i = view.x === null ? -1 : nearest(this.places, view.x);
      const next = {
        ArrowRight: i + 1, ArrowUp: i + 1, ArrowLeft: i - 1, ArrowDown: i - 1, PageUp: i + far, PageDown: i - far,
        Home: 0, End: last,
      }[event.key];
      if (event.key === "Escape") showPlace(null);
      else if (next === undefined) return;
      else this.show(this.places[Math.max(0, Math.min(last, next))]);
      event.preventDefault();
    }

    // The points at a place, one for each run that has one near it.
    pointsAt(x) {
      return [...this.points].flatMap(([run, points]) => {
        const i = nearest(points.xs, x);
        return i >= 0 && Math.abs(this.x(points.xs[i]) - this.x(x)) <= REACH ? [{ run, i, ...points }] : [];
      });
    }

    // Shows the values at a place in this chart, and a line at this place in all charts.
    show(x) {
      showPlace(x);
      const points = this.pointsAt(x), when = this.placeText(x, points);
      const lines = points.map(({ run, i, raw, values, low, high }) => {
        const range = low && low[i] !== null ? ` (${this.format(low[i])} to ${this.format(high[i])})` : "";
        const smoothed = values !== raw && raw[i] !== null ? `, smoothed ${this.format(values[i])}` : "";
        return [run, raw[i] === null ? "no finite value" : `${this.format(raw[i])}${range}${smoothed}`, "b"];
      });
      for (const run of visibleRuns()) {
        const marks = this.marksOf(run).filter((mark) => Math.abs(this.x(mark[view.axis]) - this.x(x)) < REACH / 2);
        const texts = marks.slice(0, MAX_SHOWN_MARKS).map((mark) => mark.text), nMore = marks.length - texts.length;
        lines.push(...[...texts, ...(nMore ? [`and ${nMore} more events`] : [])].map((text) => [run, text, "small"]));
      }
      this.tip.replaceChildren(make("p", { text: when }), ...lines.map(([run, text, tag]) =>
        make("p", {}, ...named(run), isSingle ? "" : " ", make(tag, {}, bdi(text)))));
      this.tip.hidden = false;
      const middle = this.x(x), isLeft = middle > this.width / 2;
      this.tip.style.left = isLeft ? "auto" : `${middle + 10}px`;
      this.tip.style.right = isLeft ? `${this.width - middle + 10}px` : "auto";
      this.tip.style.maxWidth = `${Math.max(120, (isLeft ? middle : this.width - middle) - 14)}px`;
      const texts = lines.map(([run, text]) => (isSingle ? text : `${runs[run].name} ${text}`));
      this.sayPlace(this.places.indexOf(x), [when, ...texts].join("; "));
    }

    // A place as text; for a single run by step, tokens and time.
    placeText(x, points) {
      if (!isSingle || !points.length) return place(x, view.axis);
      const columns = runs[0][this.spec.of], [{ i }] = points;
      const axes = Object.keys(AXES).filter((axis) => columns[axis][i] !== null);
      return axes.map((axis) => place(columns[axis][i], axis)).join(" \u00b7 ");
    }

    paintPlace() {
      this.tip.hidden = true;
      if (this.isEmpty) return;
      const { x } = view, points = x === null ? [] : this.pointsAt(x).filter(({ i, values }) => values[i] !== null);
      const line = { x1: this.x(x), x2: this.x(x), y1: MARGIN.top, y2: this.height - MARGIN.bottom };
      this.cross.replaceChildren(...(x === null ? [] : [draw("line", line)]), ...points.map(({ run, i, xs, values }) =>
        draw("circle", { class: `dot ${colourOf(run)}`, cx: this.x(xs[i]), cy: this.y(values[i]), r: 4 })));
    }
  }

  const charts = CHARTS.map((spec, i) => new Chart(spec, i < N_LARGE));

  function showPlace(x) {
    view.x = x;
    charts.forEach((chart) => chart.paintPlace());
  }

  function paintCharts() {
    const ends = visibleRuns().flatMap((run) => {
      const { curves, validations, marks } = runs[run];
      return [curves[view.axis].at(-1), validations[view.axis].at(-1), marks.at(-1)?.[view.axis]];
    });
    const highX = Math.max(1e-9, ...ends.filter(isNumber));
    charts.forEach((chart) => chart.paint(highX));
    showPlace(null);
  }

  function curvesCard() {
    const output = make("output", { text: view.smoothing.toFixed(2), for: "smoothing" });
    const slider = make("input", {
      type: "range", id: "smoothing", min: "0", max: "0.98", step: "0.02", value: view.smoothing,
      oninput: () => change("smoothing", Number(slider.value)),
    });
    const change = (name, value) => {
      view[name] = value;
      output.textContent = view.smoothing.toFixed(2);
      paintCharts();
    };
    const scales = [["log", "Log"], ["linear", "Linear"]];
    const label = make("label", { for: "smoothing", text: "Smoothing of the training loss" });
    const controls = make("div", { class: "choice" },
      segments("axis", "Axis", Object.entries(AXES), view.axis, (axis) => change("axis", axis)),
      segments("scale", "Perplexity", scales, "log", (scale) => change("isLog", scale === "log")),
      make("div", { class: "range" }, label, slider, output));
    return card("curves", "Curves", "Point at a curve, or focus it and press the arrow keys, to see its values.",
      controls, ...(isSingle ? [] : [runButtons()]), markLegend(),
      make("div", { class: "charts large" }, ...charts.slice(0, N_LARGE).map((chart) => chart.root)),
      make("div", { class: "charts small" }, ...charts.slice(N_LARGE).map((chart) => chart.root)),
      details("Values as tables", () => make("div", {}, ...validationTable(), ...stepTable(), ...eventTable())));
  }

  // Buttons that hide and show runs, and emphasise the one that the pointer is on.
  function runButtons() {
    const emphasise = (run) => { view.emphasised = run; paintCharts(); };
    const buttons = runs.map(({ name }, run) => {
      const button = make("button", {
        type: "button", class: "plain", "aria-pressed": "true",
        onclick: () => {
          if (!view.hidden.delete(run)) view.hidden.add(run);
          button.setAttribute("aria-pressed", String(!view.hidden.has(run)));
          paintCharts();
        },
        onpointerenter: () => emphasise(run), onpointerleave: () => emphasise(null),
      }, swatch(run), " ", bdi(name));
      return button;
    });
    return make("div", { class: "run-buttons", role: "group", "aria-label": "Runs that are shown" }, ...buttons);
  }

  function markLegend() {
    const kinds = Object.entries(MARKS).flatMap(([kind, [name, path]]) => {
      const n = runs.flatMap((run) => run.marks).filter((mark) => mark.kind === kind).length;
      const shape = draw("svg", { width: 14, height: 14, "aria-hidden": "true", class: markClass(kind) },
        draw("path", { transform: "translate(7 7) scale(.9)", d: path }));
      return n ? [make("span", {}, shape, ` ${name}${n > 1 ? ` (${n})` : ""}`)] : [];
    });
    const texts = [
      ...(runs.some((run) => run.validations.best !== null) ? ["\u25cb lowest validation loss"] : []),
      ...(runs.some((run) => run.curves.loss_low) ? ["shaded: from the lowest to the highest value near a point"] : []),
    ];
    return make("p", { class: "note mark-legend" }, ...kinds, ...texts.map((text) => make("span", { text })));
  }

  const withTitle = (title, content) => [make("h3", { text: title }), content];

  function validationTable() {
    const titles = ["step", "tokens", "time", "loss", "perplexity", "token accuracy", "BLEU", ""];
    const rows = runs.flatMap(({ validations: v }, run) => v.step.map((step, i) => withRun([
      whole(step), short(v.tokens[i]), clock(v.seconds[i]), precise(v.loss[i]), precise(v.perplexity[i]),
      percent(v.accuracy[i]), oneDecimal(v.bleu[i]), i === v.best ? "lowest loss" : "",
    ], nameCell(run))));
    if (!rows.length) return withTitle("Validations", note("There was no validation yet."));
    return withTitle("Validations", scrollable("validations", table(withRun(titles), rows, withRun([], "words"))));
  }

  function stepTable() {
    const titles = ["step", "tokens", "time", "loss", "gradient norm", "learning rate", "tokens/s", "memory"];
    const rows = runs.flatMap(({ curves: c }, run) => evenly(c.step.length, MAX_ROWS).map((i) => withRun([
      whole(c.step[i]), short(c.tokens[i]), clock(c.seconds[i]), precise(c.loss[i]), precise(c.gradient_norm[i]),
      precise(c.learning_rate[i]), whole(c.tokens_per_second[i]), memory(c.memory_bytes[i]),
    ], nameCell(run))));
    if (!rows.length) return [];
    const title = nPoints > MAX_ROWS ? `Training, at most ${MAX_ROWS} points` : "Training";
    return withTitle(title, scrollable("training", table(withRun(titles), rows, withRun([], "words"))));
  }

  function eventTable() {
    const rows = runs.flatMap((run, r) => run.marks.map((mark) =>
      withRun([whole(mark.step), clock(mark.seconds), bdi(mark.text)], nameCell(r))));
    if (!rows.length) return [];
    const classes = withRun(["", "", "words"], "words");
    return withTitle("Events", scrollable("events", table(withRun(["step", "time", "event"]), rows, classes)));
  }

  // At most `limit` of the numbers from 0 to n - 1, evenly spaced.
  function evenly(n, limit) {
    if (n <= limit) return Array.from({ length: n }, (_, i) => i);
    return Array.from({ length: limit }, (_, i) => Math.round((i * (n - 1)) / (limit - 1)));
  }

  // The head

  const pill = (run) => make("span", { class: `pill ${run.state}`, text: STATES[run.state] ?? run.state });

  function bestFact({ validations: v }) {
    if (v.best === null) return ["-", ""];
    const i = v.best, loss = `loss ${precise(v.loss[i])}`, accuracy = `token accuracy ${percent(v.accuracy[i])}`;
    return [`perplexity ${precise(v.perplexity[i])}`, `at step ${whole(v.step[i])}; ${loss}, ${accuracy}`];
  }

  function bleuFact({ validations: v }) {
    const known = [...v.bleu.keys()].filter((i) => v.bleu[i] !== null);
    if (!known.length) return ["-", ""];
    const highest = known.reduce((a, b) => (v.bleu[b] > v.bleu[a] ? b : a));
    return [oneDecimal(v.bleu[highest]), `the highest, at step ${whole(v.step[highest])}; greedy translations`];
  }

  function finalFact({ choice }) {
    if (!choice) return ["not chosen yet", ""];
    const { steps, perplexity } = choice.candidates[choice.taken];
    const what = steps.length > 1 ? `average of ${steps.length} checkpoints` : "one checkpoint";
    return [what, [
      `step${steps.length > 1 ? "s" : ""} ${steps.map(whole).join(", ")}`,
      ...(isNumber(perplexity) ? [`perplexity ${precise(perplexity)}`] : []),
      ...(isNumber(choice.bleu) ? [`BLEU ${oneDecimal(choice.bleu)}`] : []),
    ].join("; ")];
  }

  function testFact({ scores }) {
    const newest = scores.at(-1), score = newest?.scores[0];
    if (!score) return ["-", "no test scores in the card"];
    return [`${score.name} ${oneDecimal(score.value)}`, `on ${newest.files.join(" and ")}`];
  }

  function stepsText({ step, max_steps: maxSteps }) {
    return isNumber(maxSteps) ? `${whole(step)} of ${whole(maxSteps)}` : whole(step);
  }

  function factsOf(run) {
    const { seconds_left: secondsLeft, n_ranks: nRanks, why_plain: whyPlain } = run;
    const left = isNumber(secondsLeft) ? [`about ${time(secondsLeft)}`, "at the mean speed so far"] : ["-", ""];
    const machine = [run.dtype, nRanks > 1 ? `${nRanks} processes` : "", whyPlain ? `plain passes: ${whyPlain}` : ""];
    return [
      ["Steps", stepsText(run), isNumber(run.epoch) ? `${precise(run.epoch, 3)} epochs` : ""],
      ["Time used", time(run.seconds), ""],
      ...(runs.some((other) => isNumber(other.seconds_left)) ? [["Time left", ...left]] : []),
      ["Target tokens", short(run.tokens), isNumber(run.batch_tokens) ? `batches of ${whole(run.batch_tokens)}` : ""],
      ["Size", run.size ?? "-", isNumber(run.parameters) ? `${short(run.parameters)} parameters` : ""],
      ["Machine", run.device ?? "-", machine.filter(Boolean).join(", ")],
      ["Best validation", ...bestFact(run)],
      ["Validation BLEU", ...bleuFact(run)],
      ["Final model", ...finalFact(run)],
      ["Test", ...testFact(run)],
    ];
  }

  function missingParts() {
    const items = runs.flatMap((run, r) => run.missing.map((text) =>
      make("li", {}, ...(isSingle ? [] : [...nameCell(r), ": "]), bdi(text))));
    const title = make("h3", { text: "What this report lacks" });
    return items.length ? [make("div", { class: "missing" }, title, make("ul", {}, ...items))] : [];
  }

  function overviewCard() {
    if (!isSingle) return sideBySideCard();
    const [run] = runs, share = isNumber(run.max_steps) ? Math.min(1, run.step / Math.max(1, run.max_steps)) : 0;
    return make("section", { class: "card", "aria-label": "Overview" },
      make("div", { class: "title" }, make("h2", {}, bdi(run.name)), pill(run), note(run.note)),
      make("progress", { max: 1, value: share, "aria-label": `Steps that are done: ${percent(share)}` }),
      factList(factsOf(run)), ...missingParts());
  }

  function sideBySideCard() {
    const facts = runs.map(factsOf), row = (label, cells) =>
      make("tr", {}, make("th", { scope: "row", text: label }), ...cells.map((cell) => make("td", {}, ...cell)));
    const names = runs.map((_, run) => make("th", { scope: "col" }, ...named(run)));
    const cell = ([, value, remark]) => [make("b", {}, bdi(value)), note(remark)];
    const rows = facts[0].map(([label], i) => row(label, facts.map((of) => cell(of[i]))));
    return card("overview", "Runs", null, scrollable("runs", make("table", { class: "side-by-side" },
      make("thead", {}, make("tr", {}, make("td"), ...names)),
      make("tbody", {}, row("State", runs.map((run) => [pill(run), note(run.note)])), ...rows))), ...missingParts());
  }

  function scoresCard() {
    const chosen = runs.flatMap(({ choice }, run) => {
      const badge = (name) => (name === choice.taken ? make("span", { class: "badge", text: "taken" }) : "");
      return Object.entries(choice?.candidates ?? {}).map(([name, { steps, loss, perplexity, accuracy }]) => withRun([
        name, steps.map(whole).join(", "), precise(loss), precise(perplexity), percent(accuracy), badge(name),
      ], nameCell(run)));
    });
    const scored = runs.flatMap((run, r) => run.scores.flatMap((entry) => entry.scores.map((score) => withRun([
      [bdi(entry.files.join(", ")), note(` ${whole(entry.n_sentences)} sentences`)], score.name,
      make("b", { text: oneDecimal(score.value) }), score.interval ? score.interval.map(oneDecimal).join(" to ") : "-",
      [entry.search, entry.precision.replace("torch.", "")].filter(Boolean).join(", "), code(score.signature),
    ], nameCell(r)))));
    if (!chosen.length && !scored.length) return [];
    const chosenTitles = withRun(["candidate", "checkpoints", "loss", "perplexity", "token accuracy", ""]);
    const scoredTitles = withRun(["test", "score", "value", "95 % interval", "search", "signature"]);
    const chosenTable = table(chosenTitles, chosen, withRun(["words", "words"], "words"));
    const scoredClasses = withRun(["words", "words", "", "", "words", "words signature"], "words");
    const scoredTable = table(scoredTitles, scored, scoredClasses);
    return [card("scores", "Final model and scores", null,
      ...(chosen.length ? withTitle("Candidates for the final model, on the validation text",
        scrollable("candidates for the final model", chosenTable)) : []),
      ...(scored.length ? withTitle("Test scores, from the card of the model", scrollable("test scores", scoredTable))
        : [note("There are no test scores yet: transduce evaluate adds them to the card of the model.")]))];
  }

  // Sample translations

  // The stops of the slider: all steps with sample translations of any run, and the final models at the end.
  function stopsOf() {
    const all = runs.flatMap((run) => run.translations);
    const steps = all.filter((one) => !one.is_final).map((one) => one.step);
    const stops = [...new Set(steps)].sort((a, b) => a - b).map((step) => ({ step, isFinal: false }));
    return all.some((one) => one.is_final) ? [...stops, { step: Infinity, isFinal: true }] : stops;
  }

  // The newest translations of a run at a stop.
  function translatedAt(run, { step, isFinal }) {
    return run.translations.findLast((one) => one.step <= step && (isFinal || !one.is_final)) ?? null;
  }

  const keyOf = (sample) => `${sample.source}\n${sample.reference}`;
  const sampleIn = (one, key) => one?.samples.find((sample) => keyOf(sample) === key);

  function scoreText({ validations, choice }, one) {
    if (!one) return "not translated";
    const perplexity = one.is_final
      ? choice?.candidates[choice.taken].perplexity : validations.perplexity[validations.step.indexOf(one.step)];
    return [
      ...(isNumber(perplexity) ? [`perplexity ${precise(perplexity)}`] : []),
      ...(isNumber(one.bleu) ? [`BLEU ${oneDecimal(one.bleu)}`] : []),
    ].join(", ");
  }

  function translationsCard() {
    const stops = stopsOf(), last = stops.length - 1, samples = new Map();
    if (!stops.length) return [];
    for (const sample of runs.flatMap((run) => run.translations.flatMap((one) => one.samples))) {
      samples.set(keyOf(sample), sample);
    }
    const blocks = [...samples.keys()].map((key) => new Sample(key, samples.get(key)));
    const range = { type: "range", id: "validation", min: 0, max: last, value: last };
    const slider = make("input", { ...range, oninput: () => show() });
    const output = make("output", { for: "validation" });
    const move = (by) => { slider.value = Number(slider.value) + by; show(); };
    const button = (text, name, by) =>
      make("button", { type: "button", class: "plain", text, "aria-label": name, onclick: () => move(by) });
    const buttons = [button("\u2190", "Previous validation", -1), button("\u2192", "Next validation", 1)];
    function show() {
      const i = Number(slider.value), stop = stops[i], name = stop.isFinal ? "Final model" : `Step ${whole(stop.step)}`;
      const at = runs.map((run) => translatedAt(run, stop));
      output.textContent = isSingle ? `${name}: ${scoreText(runs[0], at[0])}` : name;
      slider.setAttribute("aria-valuetext", output.textContent);
      [buttons[0].disabled, buttons[1].disabled] = [i === 0, i === last];
      blocks.forEach((block) => block.show(at));
    }
    const hasAttention = blocks.some((block) => block.hasAttention);
    const about = hasAttention ? `${ABOUT_TRANSLATIONS} ${ABOUT_MAPS}` : ABOUT_TRANSLATIONS;
    const label = make("label", { for: "validation", text: "Validation" });
    const controls = make("div", { class: "slider" }, label, buttons[0], slider, buttons[1], output);
    const title = hasAttention ? "Sample translations and alignment" : "Sample translations";
    const element = card("translations", title, about, controls, ...blocks.map((block) => block.root));
    let width = 0;
    new ResizeObserver(() => {
      if (element.clientWidth !== width) show();
      width = element.clientWidth;
    }).observe(element);
    show();
    return [element];
  }

  // The words of a translation, with those marked that the reference has too.
  function markedWords(translation, reference) {
    const bare = (word) => word.toLowerCase().replace(/^[^\p{L}\p{N}]+|[^\p{L}\p{N}]+$/gu, "");
    const counts = new Map();
    for (const word of reference.split(/\s+/).map(bare)) counts.set(word, (counts.get(word) ?? 0) + 1);
    return translation.split(/(\s+)/).filter(Boolean).map((word) => {
      const key = bare(word), n = counts.get(key) ?? 0;
      if (!key || !n) return word;
      counts.set(key, n - 1);
      return make("mark", { text: word });
    });
  }

  // One sentence with its translations by all runs.
  class Sample {
    constructor(key, { source, reference }) {
      this.key = key;
      this.lines = runs.map(() => make("p", { class: "translation", dir: "auto" }));
      this.steps = runs.map(() => note(""));
      this.maps = runs.map((run, r) => {
        const all = run.translations.map((one) => sampleIn(one, key)?.attention).filter(Boolean);
        return all.length ? new HeatMap(r, all) : null;
      });
      const maps = this.maps.filter(Boolean).map((map) => map.root);
      this.hasAttention = maps.length > 0;
      const label = (...children) => make("p", { class: "label" }, ...children);
      const text = (content) => make("p", { class: "text", dir: "auto", text: content });
      const labelOf = (run) => (isSingle ? label("translation") : label(...named(run), " ", this.steps[run]));
      this.root = make("article", { class: "sample" },
        make("div", { class: "texts" }, label("source"), text(source), label("reference"), text(reference),
          ...this.lines.flatMap((line, run) => [labelOf(run), line]),
          details("At every validation", () => this.history())),
        ...(maps.length ? [make("div", { class: "maps" }, ...maps)] : []));
    }

    // `at`: the translations of each run at this stop, or null.
    show(at) {
      at.forEach((one, run) => {
        const sample = sampleIn(one, this.key);
        const absent = !sample ? "not translated" : sample.translation.trim() ? "" : "empty";
        this.lines[run].replaceChildren(...(absent
          ? [make("span", { class: "absent", text: absent })] : markedWords(sample.translation, sample.reference)));
        this.steps[run].textContent = !one ? "" : one.is_final ? "final" : `step ${whole(one.step)}`;
        this.maps[run]?.show(sample?.attention);
      });
    }

    history() {
      const rows = runs.flatMap((run, r) => run.translations.flatMap((one) => {
        const sample = sampleIn(one, this.key);
        if (!sample) return [];
        const text = make("bdi", { dir: "auto" }, ...markedWords(sample.translation, sample.reference));
        return [withRun([one.is_final ? "final" : whole(one.step), text], named(r))];
      }));
      const classes = withRun(["", "words"], "words");
      return scrollable("translations of this sentence", table(withRun(["step", "translation"]), rows, classes));
    }
  }

  const pieceText = (piece) => ({ "<s>": "start", "</s>": "end" })[piece] ?? (piece.replace(/^\u2581/, "") || "\u2423");
  const shorten = (text, n) => ([...text].length > n ? `${[...text].slice(0, n - 1).join("")}\u2026` : text);

  // The attention of one translation at a time: rows are its pieces, columns the pieces of the source. The size is that
  // of the largest of `all`, so that the page does not move with the slider.
  class HeatMap {
    constructor(run, all) {
      this.svg = draw("svg", { role: "img" });
      this.status = make("p", { class: "note status" });
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => this.status.replaceChildren());
      const title = isSingle ? [] : [make("p", { class: "note" }, ...named(run))];
      this.root = make("div", { class: "heat-map" }, ...title, this.svg, this.status);
      const most = (of) => Math.max(...all.map(of)), widest = (pieces) =>
        10 + 7 * Math.max(...pieces.map((piece) => [...shorten(pieceText(piece), MAX_LABEL)].length));
      this.nRows = most(({ target }) => target.length);
      this.nColumns = most(({ source }) => source.length);
      this.labels = [most(({ target }) => widest(target)), most(({ source }) => widest(source))];
    }

    // Chooses the size of a cell, and whether there is room for the pieces beside the cells.
    layOut() {
      const room = this.root.clientWidth || 320;
      const byHeight = Math.max(MIN_LABELLED_CELL, Math.floor(MAX_HEIGHT / this.nRows));
      [this.left, this.top] = this.labels;
      this.cell = Math.min(MAX_CELL, byHeight, Math.floor((room - this.left - 2) / this.nColumns));
      if (this.cell >= MIN_LABELLED_CELL) return true;
      [this.left, this.top] = [0, 0];
      this.cell = Math.max(MIN_CELL, Math.min(MAX_CELL, (room - 2) / this.nColumns));
      return false;
    }

    show(attention) {
      this.attention = attention;
      this.root.hidden = !attention;
      this.svg.replaceChildren();
      this.status.replaceChildren();
      if (!attention) return;
      const hasLabels = this.layOut(), { left, top, cell } = this, size = cell > 8 ? cell - 1 : cell;
      const width = left + cell * this.nColumns + 1, height = top + cell * this.nRows + 1;
      build(this.svg, { width, height, "aria-label": this.text() }, []);
      this.svg.append(...attention.weights.flatMap((row, t) => row.map((weight, s) => {
        const level = Math.round(N_LEVELS * (weight / 1000) ** 0.7);
        const at = { x: left + s * cell, y: top + t * cell, width: size, height: size };
        return draw("rect", { class: `level-${level}`, ...at });
      })));
      if (!hasLabels) return;
      const base = (i) => (i + 0.5) * cell + 4, turned = (s) => `translate(${left + base(s)} ${top - 6}) rotate(-90)`;
      const label = (piece, attributes) => draw("text", { text: shorten(pieceText(piece), MAX_LABEL), ...attributes });
      this.svg.append(
        ...attention.target.map((piece, t) => label(piece, { x: left - 6, y: top + base(t), "text-anchor": "end" })),
        ...attention.source.map((piece, s) => label(piece, { transform: turned(s) })));
    }

    // For each piece of the translation, the source piece that gets the most attention.
    text() {
      const { source, target, weights } = this.attention;
      const parts = target.map((piece, t) => {
        const s = weights[t].indexOf(Math.max(...weights[t]));
        return `${pieceText(piece)} to ${pieceText(source[s])} ${percent(weights[t][s] / 1000)}`;
      });
      return `Attention: ${parts.join(", ")}`;
    }

    point(event) {
      const box = this.svg.getBoundingClientRect(), { source, target, weights } = this.attention;
      const s = Math.floor((event.clientX - box.left - this.left) / this.cell);
      const t = Math.floor((event.clientY - box.top - this.top) / this.cell), weight = weights[t]?.[s];
      const bold = (piece) => make("b", {}, bdi(pieceText(piece)));
      this.status.replaceChildren(...(weight === undefined ? []
        : [bold(target[t]), " attends to ", bold(source[s]), `: ${percent(weight / 1000)}`]));
    }
  }

  // The data

  function dataCard() {
    const groups = new Map(); // runs that were trained on the same data
    for (const [run, { data: prepared }] of runs.entries()) {
      if (!prepared) continue;
      const key = `${prepared.train.sha256} ${prepared.valid.sha256}`;
      groups.set(key, [...(groups.get(key) ?? []), run]);
    }
    if (!groups.size) return [];
    const parts = [...groups.values()].flatMap((group) => {
      const names = group.flatMap((run, i) => [i ? ", " : "", ...named(run)]);
      const title = groups.size > 1 ? [make("h3", { class: "of-run" }, ...names)] : [];
      return [...title, ...dataParts(runs[group[0]].data)];
    });
    return [card("data", "Data", null, ...parts)];
  }

  const total = (items, of) => items.reduce((sum, item) => sum + of(item), 0);
  const nDropped = (corpus) => total(Object.values(corpus.dropped), (n) => n);

  function dataParts(prepared) {
    const { corpora, train, valid } = prepared, nRead = total(corpora, (corpus) => corpus.n_read);
    const { cleaned, valid_corpora: validCorpora, vocab_size: vocabSize, vocab_size_given: isRequested } = prepared;
    const facts = [
      ["Pairs read", whole(nRead), ""],
      ["For training", whole(train.n_pairs), nRead ? percent(train.n_pairs / nRead) : ""],
      ["For validation", whole(valid.n_pairs), validCorpora.length ? "from other files" : "held out of the same text"],
      ["Dropped", whole(total(corpora, nDropped)), cleaned ? "by the rules of cleaning" : "cleaning was switched off"],
      ["Vocabulary", whole(vocabSize), isRequested ? "as requested" : "chosen by the size of the text"],
    ];
    const lengths = prepared.lengths ? withTitle("Tokens per sentence", bars(prepared.lengths)) : [];
    return [
      factList(facts),
      make("div", { class: "two" }, make("div", {}, ...corpusTables(prepared)), make("div", {}, ...lengths)),
      ...droppedTable(corpora),
    ];
  }

  function corpusTables({ corpora, valid_corpora: validCorpora, train, valid }) {
    const mean = (split, side) => (split.n_pairs ? oneDecimal(split[`n_${side}_tokens`] / split.n_pairs) : "-");
    const row = (corpus, kind, ...counts) => {
      const { source_language: source, target_language: target, both_ways: bothWays, n_read: n } = corpus;
      const name = kind ? [bdi(corpus.name), note(` ${kind}`)] : bdi(corpus.name);
      return [name, `${source} ${bothWays ? "\u2194" : "\u2192"} ${target}`, whole(n), whole(corpus.n_kept), ...counts];
    };
    const rows = [
      ...corpora.map((corpus) =>
        row(corpus, "", whole(corpus.n_held_out), whole(corpus.n_shared), whole(nDropped(corpus)))),
      ...validCorpora.map((corpus) => row(corpus, "validation", "-", "-", "-")),
    ];
    const splits = [["training", train], ["validation", valid]].map(([name, split]) => [
      name, whole(split.n_pairs), whole(split.n_source_tokens), whole(split.n_target_tokens),
      mean(split, "source"), mean(split, "target"),
    ]);
    const titles = ["corpus", "languages", "read", "kept", "held out", "overlap", "dropped"];
    const splitTitles = ["", "pairs", "source tokens", "target tokens", "per source", "per target"];
    return [
      ...withTitle("Corpora", scrollable("corpora", table(titles, rows, ["words", "words"]))), note(ABOUT_OVERLAP),
      scrollable("training and validation", table(splitTitles, splits, ["words"])),
    ];
  }

  function droppedTable(corpora) {
    const isOne = corpora.length === 1, withCorpus = (cells, name) => (isOne ? cells : [name, ...cells]);
    const rows = corpora.flatMap((corpus) => Object.entries(corpus.dropped).map(([rule, n]) => {
      const [line, source, target] = corpus.examples[rule] ?? [];
      const example = line === undefined ? "" : [note(`line ${whole(line)}: `), bdi(source), note(" = "), bdi(target)];
      return withCorpus([rule, whole(n), percent(n / Math.max(1, corpus.n_read)), example], bdi(corpus.name));
    }));
    if (!rows.length) return [];
    const titles = withCorpus(["reason", "pairs", "share", "first example"], "corpus");
    const classes = withCorpus(["words", "", "", "words example"], "words");
    return withTitle("Dropped pairs by reason", scrollable("dropped pairs by reason", table(titles, rows, classes)));
  }

  // Lengths of sentences, as bars with their numbers.
  function bars({ bars: all, is_sample: isSample }) {
    const most = Math.max(1, ...all.flatMap(({ source, target }) => [source, target]));
    const bar = (n, side) => {
      const element = make("i", { class: side });
      element.style.setProperty("--w", n / most);
      return [element, note(whole(n))];
    };
    const span = (first, last) => (first === last ? whole(first) : `${whole(first)}\u2013${whole(last)}`);
    const rows = all.map(({ first, last, source, target }) =>
      [span(first, last), bar(source, "source"), bar(target, "target")]);
    const chart = table(["tokens", "source", "target"], rows, ["words", "words", "words"]);
    chart.classList.add("bars");
    const about = `End marks do not count.${isSample ? " Counted on a sample and scaled up." : ""}`;
    return make("div", {}, chart, make("p", { class: "note", text: about }));
  }

  // Settings

  function settingText(value) {
    if (value === null || value === undefined) return "none";
    return typeof value === "object" ? JSON.stringify(value) : String(value);
  }

  function settingRow(row) {
    const badges = [
      ...(row.departs ? [make("span", { class: "badge", text: "not as in base" })] : []),
      ...(row.differ ? [" ", make("span", { class: "badge quiet", text: "runs differ" })] : []),
    ];
    const values = row.values.map((value, run) => (row.is_known[run] ? settingText(value) : "-"));
    return make("tr", row.differ ? { class: "differ" } : {},
      make("th", { scope: "row", class: "words" }, code(row.name)),
      ...[...values, "base" in row ? settingText(row.base) : "-"].map((text) => make("td", { class: "words", text })),
      make("td", { class: "words" }, ...badges));
  }

  function settingsCard() {
    if (!data.settings.length) return [];
    const all = [...data.settings].sort((a, b) => Number(b.differ) - Number(a.differ)); // else the order of run.json
    const filters = {
      all: ["All", () => true],
      departs: ["Not as in the base model", (row) => row.departs],
      ...(isSingle ? {} : { differ: ["Different between runs", (row) => row.differ] }),
    };
    const options = Object.entries(filters).map(([name, [text, passes]]) =>
      [name, `${text} (${all.filter(passes).length})`]);
    const status = make("p", { class: "note", role: "status" }), body = make("tbody");
    let filter = "all";
    const show = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = all.filter(filters[filter][1]).filter((row) => {
        const texts = [row.name, ...row.values.map(settingText)].map((text) => text.toLowerCase());
        return words.every((word) => texts.some((text) => text.includes(word)));
      });
      body.replaceChildren(...rows.map(settingRow));
      status.textContent = `${rows.length} of ${all.length} settings`;
    };
    const search = make("input", { type: "search", id: "search", spellcheck: "false", oninput: show });
    show();
    const values = isSingle ? [["value"]] : runs.map((_, run) => named(run));
    const titles = [["setting"], ...values, ["base model"]].map((title) =>
      make("th", { scope: "col", class: "words" }, ...title));
    const head = make("thead", {}, make("tr", {}, ...titles, make("td")));
    const about = "The values of the base model are those of the paper, where the paper states them.";
    return [card("settings", "Settings", about,
      make("div", { class: "choice" },
        segments("filter", "Show", options, filter, (name) => { filter = name; show(); }),
        make("div", { class: "search" }, make("label", { for: "search", text: "Search" }), search), status),
      scrollable("settings", make("table", { class: "settings" }, head, body)))];
  }

  // What to do with a run, and where it comes from

  function provenanceCard() {
    return card("provenance", "Use and provenance", null, ...runs.flatMap((run, r) => [
      ...(isSingle ? [] : [make("h3", { class: "of-run" }, ...named(r))]),
      make("div", { class: "two" },
        make("div", {}, make("h3", { text: "Commands" }), ...run.commands.map(commandLine)),
        make("div", {}, ...withTitle("Versions and checksums", checksumTable(run)))),
    ]));
  }

  function checksumTable({ path, started, config_hash: configHash, versions, hashes }) {
    const { files = {}, ...rest } = hashes;
    const rows = [
      ["run", path], ["started", started], ["settings", configHash], ...Object.entries(versions),
      ...Object.entries(rest).map(([name, hash]) => [CHECKSUMS[name] ?? name, hash]), ...Object.entries(files ?? {}),
    ].filter(([, value]) => value !== null && value !== undefined);
    const row = ([name, value]) => make("tr", {}, make("td", { class: "words" }, bdi(name)),
      make("td", { class: "words signature" }, code(settingText(value))));
    return make("table", { class: "checksums" }, make("tbody", {}, ...rows.map(row)));
  }

  function commandLine({ does, command }) {
    const text = code(command), say = (word) => {
      button.textContent = word;
      button.setAttribute("aria-label", `${word}: ${command}`);
    };
    const button = make("button", {
      type: "button", class: "plain",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(command);
          say("Copied");
        } catch {
          getSelection().selectAllChildren(text); // the reader can copy it with the keyboard
          say("Selected");
        }
        setTimeout(() => say("Copy"), 1500);
      },
    });
    say("Copy");
    return make("div", { class: "command" }, note(does), make("div", {}, text, button));
  }

  // The page

  function themeButton() {
    const page = document.documentElement, order = ["auto", "light", "dark"];
    const button = make("button", {
      type: "button", class: "plain theme", text: "Theme: auto",
      onclick: () => {
        const next = order[(order.indexOf(page.dataset.theme ?? "auto") + 1) % 3];
        if (next === "auto") delete page.dataset.theme;
        else page.dataset.theme = next;
        button.textContent = `Theme: ${next}`;
      },
    });
    return button;
  }

  function mount(root) {
    const cards = [
      ...scoresCard(), curvesCard(), ...translationsCard(), ...dataCard(), ...settingsCard(), provenanceCard(),
    ];
    const isUnderWay = runs.some((run) => run.state === "training" || run.state === "waiting");
    const written = `written ${data.written}${isUnderWay ? "; write it again for newer values" : ""}`;
    const links = cards.map((section) =>
      make("a", { href: `#${section.id}`, text: section.querySelector("h2").textContent }));
    root.append(
      make("header", { class: "top" }, make("h1", { text: "Training report" }),
        make("p", { class: "note", text: `${written} \u00b7 transduce ${data.version}` }), themeButton()),
      overviewCard(), make("nav", { "aria-label": "Sections" }, ...links), ...cards);
    let width = 0;
    new ResizeObserver(() => {
      if (root.clientWidth !== width) paintCharts();
      width = root.clientWidth;
    }).observe(root);
    paintCharts();
    root.dataset.drawn = "all";
  }

  mount(document.getElementById("report"));
})();
