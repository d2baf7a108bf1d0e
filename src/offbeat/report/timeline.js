/* The timeline: a row for each learner, its bars coloured by version, on a canvas that can be zoomed.

   Laws. The same version has the same colour in every row. A frame costs what is seen: bars are found by bisection, and
   where they are narrower than pixels, each pixel shows the shares of its moment, from sums that were made once. The
   page scrolls under the wheel as ever; only with ctrl or ⌘ does the wheel zoom. */
(() => {
  "use strict";

  const { button, hush, kinds, make, nothingElse, outside, say, shape, start, timelines, toggles } = report;
  const { axis, cut, exponent, fit, fixed, search, write, FONT } = writing;
  const VERSIONS = 7; // colours of versions; 2, 4, 8 or 16 learners that take turns do not meet the same one again
  const THIN = 2.5; // pixels of a bar, in the mean; if less, shares are drawn
  const FIRST = 40; // bars of computing that are seen at first, where there is room to read their versions
  const STACK = ["computing", "thrown", "updating", "sending", "evaluating", "other"]; // of shares, from the bottom
  const RECTANGLES = 40000; // of each part, that a frame draws at most
  const AXIS = 28; // height below the rows
  const PARTS = ["computing", "thrown", "sending", "waiting", "updating", "evaluating", "other"];
  const partOf = (name) => PARTS.find((part) => name.toLowerCase().startsWith(part.slice(0, 4))) || (/^appl/i.test(name) ? "updating" : "other");
  const TYPES = { u1: Uint8Array, i1: Int8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };

  const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /* Whether white is easier to read on the colour (#rrggbb) than black. */
  function isDark(colour) {
    const [red, green, blue] = [1, 3, 5].map((from) => {
      const part = parseInt(colour.slice(from, from + 2), 16) / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.18;
  }

  function empty(figure) {
    figure.querySelector(".plot").replaceChildren(make("p", { class: "empty" }, "nothing to show"));
    return () => {};
  }

  /* The legend of a timeline, whose entries {name, kind, swatch, wide, key} change with what is drawn. */
  function legend(figure, entries, changed, hidden) {
    const nodes = entries.map((entry) => {
      const node = make("button", { type: "button", class: "entry", title: "click: hide or show, double click: show alone" });
      const swatch = shape("svg", { class: entry.kind, width: entry.wide, height: 14, "aria-hidden": "true" });
      swatch.append(...entry.swatch);
      node.append(swatch, make("bdi", {}, cut(entry.name)));
      return node;
    });
    toggles(figure, nodes, entries.map((entry) => entry.key), changed, nothingElse, hidden);
  }

  function unpack({ type, bytes }) {
    const text = atob(bytes);
    const raw = new Uint8Array(text.length);
    for (let n = 0; n < text.length; n += 1) raw[n] = text.charCodeAt(n);
    return new TYPES[type](raw.buffer);
  }

  /* For each learner its bars as columns, and of each part the time spent on it before each bar. */
  function rowsOf(chart) {
    const [gaps, lengths, versions, marks] = [chart.gaps, chart.lengths, chart.versions, chart.marks].map(unpack);
    const parts = chart.whats.map((what) => PARTS.indexOf(partOf(what)));
    let bar = 0;
    return chart.counts.map((count) => {
      const row = { count, start: new Float64Array(count), end: new Float64Array(count), version: new Float64Array(count), what: new Uint16Array(count), part: new Uint8Array(count), thrown: new Uint8Array(count), spent: PARTS.map(() => null) };
      let [time, version] = [0, 0];
      for (let n = 0; n < count; n += 1, bar += 1) {
        const start = time + gaps[bar];
        time = start + lengths[bar];
        version += versions[bar];
        row.start[n] = start * chart.tick;
        row.end[n] = time * chart.tick;
        row.version[n] = version;
        row.what[n] = marks[bar] >> 1;
        row.thrown[n] = marks[bar] & 1;
        row.part[n] = marks[bar] & 1 ? 1 : parts[marks[bar] >> 1];
      }
      for (const part of new Set(row.part)) {
        const sums = new Float64Array(count + 1);
        for (let n = 0; n < count; n += 1) sums[n + 1] = sums[n] + (row.part[n] === part ? row.end[n] - row.start[n] : 0);
        row.spent[part] = sums;
      }
      return row;
    });
  }

  /* Of each part the share of each of `columns` pixels between two times: shares[part][column]. */
  function sharesOf(row, from, to, columns) {
    const each = (to - from) / columns;
    const shares = row.spent.map((sums) => (sums ? new Float32Array(columns) : null));
    const before = new Float64Array(PARTS.length);
    let n = 0;
    for (let column = 0; column <= columns; column += 1) {
      const time = from + column * each;
      n = search(row.start, time, n);
      for (let part = 0; part < PARTS.length; part += 1) {
        const sums = row.spent[part];
        if (!sums) continue;
        const over = n > 0 && row.part[n - 1] === part ? Math.max(0, row.end[n - 1] - time) : 0;
        const spent = sums[n] - over;
        if (column) shares[part][column - 1] = Math.min(1, (spent - before[part]) / each);
        before[part] = spent;
      }
    }
    return shares;
  }

  const unpacked = new Map(); // chart -> its rows
  function rowsOnce(chart) {
    if (!unpacked.has(chart)) unpacked.set(chart, rowsOf(chart));
    return unpacked.get(chart);
  }

  /* When the median learner has ended its first few bars of computing. */
  function firstOf(rows, few) {
    const ends = rows.filter((row) => row.count).map((row) => {
      let [n, seen] = [0, 0];
      for (; n < row.count && seen < few; n += 1) if (row.part[n] < 2) seen += 1;
      return row.end[n - 1];
    }).sort((a, b) => a - b);
    return ends.length ? ends[ends.length >> 1] : 0;
  }

  function canvas(holder, wide, high) {
    const ratio = devicePixelRatio || 1;
    fill(holder, wide, high, ratio);
    const context = holder.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    context.font = FONT;
    return context;
  }
  function fill(holder, wide, high, ratio) {
    if (holder.width !== Math.round(wide * ratio) || holder.height !== Math.round(high * ratio)) {
      [holder.width, holder.height] = [Math.round(wide * ratio), Math.round(high * ratio)];
      holder.style.width = `${wide}px`;
    }
  }

  /* The colours of the theme; `ink` is what can be read on each version's colour. */
  function palette(context) {
    const versions = Array.from({ length: VERSIONS }, (_, n) => colourOf(`v${n}`));
    const tile = document.createElement("canvas");
    [tile.width, tile.height] = [8, 8];
    const pen = tile.getContext("2d");
    pen.strokeStyle = colourOf("ink");
    pen.lineWidth = 1.4;
    pen.beginPath();
    for (const shift of [-8, 0, 8]) { pen.moveTo(shift, 8); pen.lineTo(shift + 8, 0); }
    pen.stroke();
    return {
      versions, inks: versions.map((colour) => (isDark(colour) ? "#ffffff" : "#14181d")), hatch: context.createPattern(tile, "repeat"),
      parts: PARTS.map(colourOf), ...Object.fromEntries(["ink", "soft", "grid", "axis", "card"].map((name) => [name, colourOf(name)])),
    };
  }

  function timeline(figure, chart) {
    const rows = rowsOnce(chart);
    const total = rows.reduce((most, row) => (row.count ? Math.max(most, row.end[row.count - 1]) : most), 0);
    if (!(total > 0)) return empty(figure);
    const plot = figure.querySelector(".plot");
    const each = Math.max(4, Math.min(30, Math.floor(620 / rows.length))); // height of a row
    const high = rows.length * each + AXIS;
    const [main, small, box] = [make("canvas"), make("canvas"), make("div", { class: "window" })];
    const overview = make("div", { class: "overview" });
    const said = make("span", { class: "said" });
    const least = Math.max(total * 1e-8, chart.tick * 20); // that can be zoomed to
    let [from, to] = [0, total];
    let [left, wide] = [0, 0]; // where bars begin, and how wide they all are
    let waiting = false; // for a frame
    let chosen = -1; // the row of the keys
    let longest = total; // that can be seen: more than there is where another run began slower
    const hidden = new Set(); // parts
    overview.append(small, box);
    plot.replaceChildren(main, overview);

    // --- what is seen ---------------------------------------------------------------------------------------------

    function see(a, b) {
      const span = Math.max(least, Math.min(longest, b - a));
      from = Math.max(0, Math.min(total - span, a + (b - a - span) / 2));
      to = from + span;
      hush(plot);
      if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); }
    }
    const zoom = (factor, place = (from + to) / 2) => see(place - (place - from) * factor, place + (to - place) * factor);
    const pan = (part) => see(from + (to - from) * part, to + (to - from) * part);
    const timeAt = (px) => from + ((px - left) / wide) * (to - from);

    /* So far that some tens of minibatches are seen, and in all timelines equally far, so that runs compare by eye. */
    function seeFirst() {
      const few = Math.max(6, Math.min(FIRST, Math.round(plot.clientWidth / 34)));
      const far = Math.max(...timelines.map((one) => firstOf(rowsOnce(one), few)));
      longest = Math.max(total, far);
      see(0, far);
    }

    // --- drawing --------------------------------------------------------------------------------------------------

    function measure() {
      const ruler = main.getContext("2d");
      ruler.font = FONT;
      const widest = Math.max(...chart.learners.map((name) => ruler.measureText(cut(name, 60)).width));
      left = Math.ceil(Math.min(widest + 12, plot.clientWidth * 0.28, 180));
      wide = Math.max(80, plot.clientWidth - left - 2);
    }

    function draw() {
      measure();
      const context = canvas(main, left + wide + 2, high);
      const colours = palette(context);
      context.fillStyle = colours.card; // paper shows through what is not painted
      context.fillRect(0, 0, left + wide + 2, high);
      const every = Math.ceil(15 / each); // names that would touch each other are left out
      context.textBaseline = "middle";
      for (const tick of axis("seconds", from, to, Math.max(2, wide / 110))) {
        const x = Math.round(left + ((tick.value - from) / (to - from)) * wide) + 0.5;
        context.fillStyle = colours.grid;
        context.fillRect(x - 0.5, 0, 1, high - AXIS + 5);
        context.fillStyle = colours.soft;
        const half = context.measureText(tick.text).width / 2;
        context.fillText(tick.text, Math.max(0, Math.min(left + wide + 2 - 2 * half, x - half)), high - AXIS / 2 + 4);
      }
      let shares = false;
      rows.forEach((row, index) => {
        const top = index * each;
        context.fillStyle = colours.ink;
        if (index % every === 0) context.fillText(fit(chart.learners[index] ?? "", left - 10), 0, Math.max(8, top + each / 2));
        const [first, last] = [Math.max(0, search(row.start, from) - 1), search(row.start, to)];
        const room = each > 8 ? Math.round(each * 0.12) : 0.5;
        if ((last - first) * THIN > wide) {
          shares = true;
          drawShares(context, colours, row, from, to, left, wide, top + room, each - 2 * room);
        } else drawBars(context, colours, row, first, last, top + room, each - 2 * room);
      });
      context.fillStyle = colours.axis;
      context.fillRect(left, high - AXIS, wide, 1);
      drawOverview();
      if (figure.dataset.mode !== (shares ? "shares" : "bars")) {
        figure.dataset.mode = shares ? "shares" : "bars";
        legend(figure, keysOf(rows, shares), draw, hidden);
      }
      const digits = Math.max(0, 2 - exponent(to - from));
      said.textContent = `${clock(from, digits)} to ${clock(to, digits)} of ${clock(total, digits)}${shares ? "; bars show shares of the time, zoom in to see versions" : ""}`;
    }

    function drawBars(context, colours, row, first, last, top, tall) {
      context.save();
      context.beginPath();
      context.rect(left, top, wide, tall);
      context.clip();
      const per = wide / (to - from);
      for (let n = first; n < last; n += 1) {
        const a = left + (Math.max(row.start[n], from) - from) * per;
        const b = left + (Math.min(row.end[n], to) - from) * per;
        if (b <= left) continue;
        const part = PARTS[row.part[n]];
        if (hidden.has(part)) continue;
        const gap = b - a > 3 ? 1 : 0; // so that bars of one colour can be counted
        if (part === "waiting") {
          context.fillStyle = colours.axis;
          context.fillRect(a, top + tall / 2 - 0.75, b - a, 1.5);
        } else if (part === "computing" || part === "thrown") {
          const version = ((row.version[n] % VERSIONS) + VERSIONS) % VERSIONS;
          context.fillStyle = colours.versions[version];
          context.globalAlpha = part === "thrown" ? 0.35 : 1;
          context.fillRect(a, top, b - a - gap, tall);
          context.globalAlpha = part === "thrown" ? 0.55 : 1;
          if (part === "thrown") { context.fillStyle = colours.hatch; context.fillRect(a, top, b - a - gap, tall); }
          context.globalAlpha = 1;
          if (b - a > 16 && tall >= 13 && part === "computing") {
            const words = (chart.whats[row.what[n]] ?? "").split(" ")[1] ?? String(row.version[n]);
            const half = context.measureText(words).width / 2;
            context.fillStyle = colours.inks[version];
            if (2 * half + 5 <= b - a) context.fillText(words, (a + b - gap) / 2 - half, top + tall / 2 + 0.5);
          }
        } else if (part === "evaluating") { // an empty box
          context.strokeStyle = colours.soft;
          context.lineWidth = 1.5;
          context.strokeRect(a + 0.75, top + 0.75, Math.max(0.5, b - a - 1.5 - gap), tall - 1.5);
        } else { // a low bar: green for sending, amber for updating
          context.fillStyle = colours.parts[row.part[n]];
          const low = part === "updating" ? 0.5 : 0.3;
          context.fillRect(a, top + tall * (0.5 - low / 2), b - a, tall * low);
        }
      }
      context.restore();
    }

    function drawShares(context, colours, row, a, b, x, room, top, tall) {
      const thick = Math.max(1, Math.ceil((rows.length * room) / RECTANGLES)); // of very many rows, coarser columns
      const columns = Math.ceil(room / thick);
      const shares = sharesOf(row, a, a + ((b - a) * columns * thick) / room, columns);
      const base = new Float32Array(columns);
      for (const name of [...STACK, "waiting"]) {
        const share = shares[PARTS.indexOf(name)];
        if (!share || hidden.has(name)) continue;
        context.fillStyle = colours.parts[PARTS.indexOf(name)];
        for (let column = 0; column < columns; column += 1) {
          if (share[column] < 0.004) continue;
          context.fillRect(x + column * thick, top + tall * (1 - base[column] - share[column]), thick, tall * share[column]);
          base[column] += share[column];
        }
      }
    }

    let overviewOf = ""; // the size and theme it was drawn for
    function drawOverview() {
      const tall = Math.max(3, Math.min(10, Math.floor(64 / rows.length)));
      const [px, py] = [Math.max(1, Math.floor(wide)), Math.min(120, tall * rows.length)];
      const now = `${px} ${devicePixelRatio} ${colourOf("card")} ${[...hidden]}`;
      overview.style.marginLeft = `${(100 * left) / (left + wide + 2)}%`; // parts, since paper has another width
      overview.style.width = `${(100 * px) / (left + wide + 2)}%`;
      if (now !== overviewOf) {
        overviewOf = now;
        const context = canvas(small, px, py);
        const colours = palette(context);
        const shown = Math.min(rows.length, Math.floor(py / tall)); // of very many learners, some
        for (let n = 0; n < shown; n += 1) drawShares(context, colours, rows[Math.floor((n * rows.length) / shown)], 0, total, 0, px, n * tall, tall - 1);
      }
      box.style.left = `${(100 * from) / total}%`;
      box.style.width = `${(100 * (to - from)) / total}%`;
    }

    // --- what is said ---------------------------------------------------------------------------------------------

    const clock = (time, digits) => `${digits > 9 ? write(time, "number") : fixed(Math.max(0, time), digits)} s`;

    function tell(px, py) {
      const index = Math.floor(py / each);
      const row = rows[index];
      if (!row || px < left || px > left + wide) return hush(plot);
      const name = chart.learners[index] ?? "";
      const place = outside(plot, px, py);
      const [first, last] = [Math.max(0, search(row.start, from) - 1), search(row.start, to)];
      if ((last - first) * THIN > wide) {
        const time = from + (Math.floor(px - left) / wide) * (to - from);
        const shares = sharesOf(row, time, time + (to - from) / wide, 1);
        const lines = PARTS.flatMap((part, n) => (shares[n] && !hidden.has(part) ? [{ kind: part, name: part === "thrown" ? "thrown away" : part, value: write(Math.max(0, shares[n][0]), "percent") }] : []));
        return say(plot, place, `${cut(name, 120)} at ${write(time, "seconds")}`, lines);
      }
      const time = timeAt(px);
      const n = search(row.start, time) - 1;
      if (n < 0 || row.end[n] < time || hidden.has(PARTS[row.part[n]])) return hush(plot);
      const took = row.end[n] - row.start[n];
      const digits = Math.max(0, 2 - exponent(took || 1));
      const lines = [{ name: "from", value: clock(row.start[n], digits) }, { name: "to", value: clock(row.end[n], digits) }, { name: "took", value: write(took, "seconds") }];
      if (row.version[n] >= 0) lines.unshift({ name: "version", value: write(row.version[n], "number") });
      if (row.thrown[n]) lines.push({ name: "cancelled", value: "thrown away" });
      return say(plot, place, `${cut(name, 120)}: ${cut(chart.whats[row.what[n]] ?? "", 60)}`, lines);
    }

    // --- pointer, wheel and keys ----------------------------------------------------------------------------------

    const held = new Map(); // pointers that are down -> x
    const local = (event) => event.clientX - plot.getBoundingClientRect().left;
    main.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      held.set(event.pointerId, local(event));
      main.setPointerCapture(event.pointerId);
    });
    main.addEventListener("pointermove", (event) => {
      const px = local(event);
      if (!held.has(event.pointerId)) return tell(px, event.clientY - plot.getBoundingClientRect().top);
      const before = held.get(event.pointerId);
      if (held.size === 2) { // a pinch: the other finger stays where it is
        const [other] = [...held].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
        if (Math.abs(px - other) > 4 && Math.abs(before - other) > 4) zoom(Math.abs(before - other) / Math.abs(px - other), timeAt((px + other) / 2));
      } else if (px !== before) see(from - ((px - before) / wide) * (to - from), to - ((px - before) / wide) * (to - from));
      return held.set(event.pointerId, px);
    });
    const release = (event) => held.delete(event.pointerId);
    main.addEventListener("pointerup", (event) => {
      release(event);
      if (event.pointerType === "touch") tell(local(event), event.clientY - plot.getBoundingClientRect().top);
    });
    main.addEventListener("pointercancel", release);
    main.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hush(plot); });
    plot.addEventListener("blur", () => hush(plot));
    plot.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 200), timeAt(local(event)));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / wide);
      else return;
      event.preventDefault();
    }, { passive: false });
    const jump = (event) => {
      if (event.type === "pointermove" && !overview.hasPointerCapture(event.pointerId)) return;
      if (event.type === "pointerdown") overview.setPointerCapture(event.pointerId);
      const middle = ((local(event) - left) / wide) * total;
      see(middle - (to - from) / 2, middle + (to - from) / 2);
    };
    overview.addEventListener("pointerdown", jump);
    overview.addEventListener("pointermove", jump);
    const pick = (by) => {
      chosen = Math.max(0, Math.min(rows.length - 1, chosen + by));
      tell(left + wide / 2, (chosen + 0.5) * each);
    };
    const KEYS = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => pick(-1), ArrowDown: () => pick(1), Home: seeFirst,
      End: () => see(total - (to - from), total), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => see(0, total), Escape: () => hush(plot),
    };
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || !(event.key in KEYS)) return;
      KEYS[event.key]();
      event.preventDefault();
    });

    // --- around it ------------------------------------------------------------------------------------------------

    const tools = make("div", { class: "tools" });
    tools.append(
      button("+", "zoom in (key +, or ctrl and wheel)", () => zoom(0.5)), button("−", "zoom out (key −, or ctrl and wheel)", () => zoom(2)),
      button("start", "the first minibatches (key Home)", seeFirst), button("all", "the whole run (key 0)", () => see(0, total)), said,
    );
    plot.before(tools);
    seeFirst();
    draw();
    return draw;
  }

  /* Entries of the legend: what the bars mean, or the colours of shares, of those that there are. */
  function keysOf(rows, shares) {
    const there = new Set(rows.flatMap((row) => row.spent.flatMap((sums, part) => (sums ? [PARTS[part]] : []))));
    const entry = (name, kind, wide, ...swatch) => ({ name, kind, wide, swatch });
    if (shares) {
      const plain = () => shape("rect", { class: "column", x: 4, y: 0, width: 14, height: 14, rx: 2 });
      return PARTS.filter((part) => there.has(part)).map((part) => ({ ...entry(part === "thrown" ? "thrown away" : part, part, 22, plain()), key: part }));
    }
    const versions = Array.from({ length: 5 }, (_, n) => {
      const node = shape("rect", { x: 9 * n, y: 0, width: 8, height: 14 });
      node.style.fill = `var(--v${n})`;
      return node;
    });
    const low = (tall) => shape("rect", { class: "column", x: 1, y: 7 - tall / 2, width: 20, height: tall });
    const hatched = shape("g");
    const faded = shape("rect", { x: 1, y: 0, width: 20, height: 14, opacity: 0.35 });
    const lines = shape("path", { class: "cross", d: "M1 8L9 0M1 14L15 0M7 14L21 0M13 14L21 6" });
    faded.style.fill = "var(--v0)";
    hatched.append(faded, lines);
    const entries = {
      computing: () => entry("computing; one colour for each version", "", 45, ...versions),
      thrown: () => entry("cancelled: thrown away", "", 22, hatched),
      waiting: () => entry("waiting", "", 22, shape("path", { class: "cross", d: "M1 7H21" })),
      sending: () => entry("sending", "sending", 22, low(4)),
      updating: () => entry("updating", "updating", 22, low(7)),
      evaluating: () => entry("evaluating", "", 22, shape("rect", { class: "cross", x: 1.5, y: 1, width: 19, height: 12, fill: "none" })),
      other: () => entry("other", "other", 22, low(4)),
    };
    return Object.entries(entries).filter(([part]) => there.has(part)).map(([part, made]) => ({ ...made(), key: part }));
  }

  kinds.timeline = timeline;
  start();
})();
