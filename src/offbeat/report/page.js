/* Draws the charts of a page from the data that page.py put beside it, and answers pointer and keys.

   Laws. Text from the data becomes text and nothing else: textContent and createElement only. Numbers are written as
   number_format.py writes them. A chart is drawn when it comes near the window, or when there is time, or before printing;
   drawing it again gives the same picture.

   The order below: numbers and words, nodes, what is said at the pointer, legends, axes, the three charts in SVG, and
   last the page around them. The fourth kind of chart is in timeline.js, which also starts it all. */
const report = (() => {
  "use strict";

  const SVG = "http://www.w3.org/2000/svg";
  const LETTERS = 300; // of a name at most, wherever it is shown whole
  const FEW = 30; // points of a line that are all marked
  const SERIES = 8; // colours and marks of series, after which they begin again
  const FONT = '12.5px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif';
  const data = JSON.parse(document.getElementById("data").textContent);
  const timelines = data.filter((chart) => chart.kind === "timeline");
  const drawn = new Map(); // figure -> how to draw it again

  // --- numbers as number_format.py writes them ----------------------------------------------------------------------------

  const LARGE = 1e15, SMALL = 1e-4, NOTHING = 1e-300, MOST = 1e306, ROOM = 0.9995;
  const UNITS = {
    seconds: [[7200, 3600, "h"], [120, 60, "min"], [ROOM, 1, "s"], [ROOM * 1e-3, 1e-3, "ms"], [0, 1e-6, "µs"]],
    joules: [[ROOM * 1e6, 1e6, "MJ"], [ROOM * 1e3, 1e3, "kJ"], [ROOM, 1, "J"], [0, 1e-3, "mJ"]],
  };

  function write(value, form) {
    if (value === null || Number.isNaN(value)) return "–";
    const sign = value < 0 ? "−" : form === "signed-percent" && value > 0 ? "+" : "";
    const size = Math.abs(value);
    if (size === Infinity) return `${sign}∞`;
    return size < NOTHING ? writeSize(0, form) : sign + writeSize(size, form);
  }

  function writeSize(size, form) {
    if (form in UNITS) {
      const [, one, name] = size ? UNITS[form].find(([least]) => size >= least) : UNITS[form][2];
      return `${significant(size / one, 3)} ${name}`;
    }
    if (form === "percent" || form === "signed-percent") return `${percent(100 * Math.min(size, MOST))} %`;
    if (form === "times") return `${size >= 0.1 ? fixed(size, size >= 100 ? 0 : size >= 10 ? 1 : 2) : number(size, 2)}×`;
    if (form === "money") return size >= 1000 ? fixed(size, 0) : size >= 0.1 || !size ? fixed(size, 2) : number(size, 3);
    return number(size, 4);
  }

  function percent(size) {
    if (!size) return "0";
    return size >= 0.01 ? fixed(size, size >= 99.95 ? 0 : size >= 0.995 ? 1 : 2) : number(size, 1);
  }

  const number = (size, digits) => (size === Math.floor(size) && size < LARGE ? fixed(size, 0) : significant(size, digits));
  const exponent = (size) => Number(size.toExponential(17).split("e")[1]);
  const bare = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

  function significant(size, digits) {
    if (!size) return "0";
    let power = exponent(size);
    if (size >= SMALL && size < LARGE) return bare(fixed(size, Math.max(digits - 1 - power, 0)));
    let front = bare(fixed(size / Number(`1e${power}`), digits - 1));
    if (front === "10") [front, power] = ["1", power + 1];
    return `${front}e${power < 0 ? "−" : ""}${Math.abs(power)}`;
  }

  function fixed(size, digits) {
    if (size >= LARGE) return significant(size, 4);
    const whole = String(Math.floor(size * Number(`1e${digits}`) + 0.5)).padStart(digits + 1, "0");
    let front = whole.slice(0, whole.length - digits);
    if (Number(front) >= 10000) front = front.replace(/\B(?=(\d{3})+$)/g, ",");
    return digits ? `${front}.${whole.slice(whole.length - digits)}` : front;
  }

  // --- words ------------------------------------------------------------------------------------------------------

  /* At most so many letters. A pair of halves of one letter is not torn apart. */
  const cut = (text, letters = LETTERS) =>
    text.length <= letters ? text : `${Array.from(text.slice(0, 2 * letters)).slice(0, letters).join("")}…`;

  const ruler = document.createElement("canvas").getContext("2d");
  ruler.font = FONT;
  const width = (text) => ruler.measureText(text).width;

  /* The beginning of the text that is at most `room` pixels wide. */
  function fit(text, room) {
    const letters = Array.from(cut(text, 200));
    if (width(letters.join("")) <= room) return letters.join("");
    let [low, high] = [0, letters.length];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (width(`${letters.slice(0, middle).join("")}…`) <= room) low = middle;
      else high = middle - 1;
    }
    return low ? `${letters.slice(0, low).join("")}…` : "";
  }

  // --- nodes ------------------------------------------------------------------------------------------------------

  function fill(node, attributes, words) {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (words !== undefined) node.textContent = words;
    return node;
  }
  const make = (tag, attributes = {}, words) => fill(document.createElement(tag), attributes, words);
  const shape = (tag, attributes = {}, words) => fill(document.createElementNS(SVG, tag), attributes, words);
  const button = (words, about, act) => {
    const node = make("button", { type: "button", title: about }, words);
    node.addEventListener("click", act);
    return node;
  };
  const at = (value) => value.toFixed(1);

  /* Text in a picture; what did not fit whole is said at the pointer. */
  function label(x, y, words, attributes = {}, whole = words) {
    const node = shape("text", { x: at(x), y: at(y), ...attributes }, words);
    if (whole !== words) node.append(shape("title", {}, cut(whole)));
    return node;
  }

  const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /* Whether white is easier to read on the colour (#rrggbb) than black. */
  function isDark(colour) {
    const [red, green, blue] = [1, 3, 5].map((from) => {
      const part = parseInt(colour.slice(from, from + 2), 16) / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.18;
  }

  /* A mark of a series, so that lines can be told apart without colours. */
  function mark(kind, x, y, r) {
    const path = (...points) => `M${points.map(([dx, dy]) => `${at(x + dx * r)} ${at(y + dy * r)}`).join("L")}Z`;
    const marks = [
      () => `M${at(x - r)} ${at(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
      () => path([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]),
      () => path([0, -1.2], [1.1, 0.8], [-1.1, 0.8]),
      () => path([0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]),
      () => path([0, 1.2], [1.1, -0.8], [-1.1, -0.8]),
      () => path([-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]),
      () => path([-1.3, -0.6], [1.3, -0.6], [1.3, 0.6], [-1.3, 0.6]),
      () => path([-0.6, -1.3], [0.6, -1.3], [0.6, 1.3], [-0.6, 1.3]),
    ];
    return marks[kind % SERIES]();
  }

  // --- what is said at the pointer --------------------------------------------------------------------------------

  const tip = make("div", { class: "tip", role: "status", hidden: "" });
  document.body.append(tip);
  let speaker = null; // the plot that said it

  /* Beside the place (in the window), inside the window. Only `plot` can take it back: a plot that loses the focus
     to another must not hide what that one says. Rows are {kind, name, value}; `kind` is a class of colour. */
  function say(plot, [x, y], head, rows, more = "") {
    speaker = plot;
    tip.replaceChildren(make("div", { class: "head" }, cut(head)));
    for (const row of rows) {
      const node = make("div", { class: `row ${row.kind || ""}` });
      node.append(row.kind ? make("i") : make("span"), make("bdi", {}, cut(row.name)), make("b", {}, row.value));
      tip.append(node);
    }
    if (more) tip.append(make("div", { class: "more" }, more));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = x + 16 + box.width <= innerWidth - 8;
    const left = Math.max(8, Math.min(right ? x + 16 : x - 16 - box.width, innerWidth - 8 - box.width));
    const top = Math.max(8, Math.min(y - box.height / 2, innerHeight - 8 - box.height));
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }
  const hush = (plot) => { if (plot === speaker) tip.hidden = true; };
  addEventListener("scroll", () => hush(speaker), { passive: true });
  // A finger leaves when it is lifted: what it asked for stays until it touches something else.
  addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) hush(speaker); });

  const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };

  /* Pointer and keys on a plot: `move(x, y)` in its pixels, `step(direction)`, `leave()`. */
  function interact(plot, on) {
    const place = (event) => {
      const box = plot.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    plot.addEventListener("pointermove", (event) => on.move(...place(event)));
    plot.addEventListener("pointerdown", (event) => on.move(...place(event)));
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") on.leave(); });
    plot.addEventListener("blur", on.leave);
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key in STEPS) on.step(STEPS[event.key]);
      else if (event.key === "Escape") on.leave();
      else return;
      event.preventDefault();
    });
    return place;
  }

  /* The place in the window of a place in the plot. */
  function outside(plot, x, y) {
    const box = plot.getBoundingClientRect();
    return [box.left + x, box.top + y];
  }

  // --- legends ----------------------------------------------------------------------------------------------------

  /* A button for each entry {name, kind, swatch, wide, key}: a click hides or shows it, a double click shows it alone.
     `hidden` holds the keys, or else the names, of those that are hidden; `resetAlso` says whether there is something else to take back. */
  function legend(figure, entries, changed, resetAlso = { needed: () => false, act() {} }, hidden = new Set()) {
    const keyOf = (entry) => entry.key ?? entry.name;
    const reset = button("reset", "show everything again", () => { hidden.clear(); resetAlso.act(); update(); });
    reset.classList.add("reset");
    const buttons = entries.map((entry) => {
      const alone = () => {
        entries.forEach((other) => hidden.add(keyOf(other)));
        hidden.delete(keyOf(entry));
        update();
      };
      const node = button("", `${cut(entry.name)}\nclick: hide or show, double click: show alone`, (event) => {
        if (event.shiftKey) return alone();
        if (!hidden.delete(keyOf(entry))) hidden.add(keyOf(entry));
        return update();
      });
      node.classList.add("entry");
      node.addEventListener("dblclick", alone);
      const swatch = shape("svg", { class: entry.kind, width: entry.wide ?? 22, height: entry.wide ? 14 : 12, "aria-hidden": "true" });
      swatch.append(...entry.swatch);
      node.append(swatch, make("bdi", {}, cut(entry.name)));
      return node;
    });
    function show() {
      buttons.forEach((node, index) => node.setAttribute("aria-pressed", String(!hidden.has(keyOf(entries[index])))));
      reset.hidden = !hidden.size && !resetAlso.needed();
    }
    function update() { hush(speaker); show(); changed(); }
    figure.querySelector(".legend").replaceChildren(...buttons, reset);
    show();
    return { hidden, show };
  }

  /* The groups of a chart's series in their order, each with its colour. */
  function groupsOf(series) {
    const groups = new Map();
    for (const one of series) {
      if (!groups.has(one.group)) groups.set(one.group, { name: one.group, number: groups.size, kind: `c${groups.size % SERIES}`, series: [] });
      groups.get(one.group).series.push(one);
    }
    return groups;
  }

  // --- axes -------------------------------------------------------------------------------------------------------

  /* From values to pixels, and back with `.back`. On a log scale what is too small is at the edge. */
  function scale(low, high, first, last, log = false) {
    const to = log ? (value) => Math.log(Math.max(value, low)) : (value) => value;
    const [a, b] = [to(low), to(high)];
    const pixel = (value) => first + ((to(value) - a) / (b - a)) * (last - first);
    pixel.back = (place) => a + ((place - first) / (last - first)) * (b - a);
    return pixel;
  }

  function steps(low, high, most, whole) {
    const rough = (high - low) / Math.max(most, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((by) => by * power).find((one) => one >= rough * 0.999);
    if (whole) step = Math.max(1, step);
    const values = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && values.length < 100; n += 1) values.push(n * step);
    return { step, values };
  }

  /* Ticks {value, text} with one unit for all of them, the largest one that does not need many digits. */
  function axis(form, low, high, most, whole = false) {
    const size = Math.max(Math.abs(low), Math.abs(high));
    const units = UNITS[form] ? [...UNITS[form]] : [[0, form.endsWith("percent") ? 0.01 : 1, form.endsWith("percent") ? " %" : form === "times" ? "×" : ""]];
    while (units.length > 1 && size < units[0][0]) units.shift();
    const digitsOf = ([, one]) => Math.max(0, -Math.floor(Math.log10(steps(low / one, high / one, most, whole).step) + 1e-9));
    while (units.length > 1 && digitsOf(units[0]) > 2) units.shift();
    const digits = digitsOf(units[0]);
    const [, one, name] = units[0];
    const found = steps(low / one, high / one, most, whole);
    const after = UNITS[form] ? ` ${name}` : name;
    return found.values.map((value) => {
      const text = Math.abs(value) < found.step / 2 ? "0" : digits > 9 ? significant(Math.abs(value), 4) : fixed(Math.abs(value), digits);
      return { value: value * one, text: (value < 0 && text !== "0" ? "−" : "") + text + (text === "0" && UNITS[form] ? "" : after) };
    });
  }

  function logAxis(form, low, high) {
    const ticks = [];
    const decades = Math.log10(high / low);
    const every = Math.max(1, Math.ceil(decades / 8));
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const by of decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 3 ? [1, 2, 5] : [1]) {
        const value = Number(`${by}e${power}`);
        if (power % every === 0 && value >= low * 0.999 && value <= high * 1.001) ticks.push({ value, text: write(value, form).replace(/\.0+(?=\D|$)/, "") });
      }
    }
    return ticks;
  }

  /* The least and the greatest value, and a little room, so that there is always something between them. */
  function range(values, { log = false, fromZero = false }) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (log && value <= 0) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) return log ? [0.1, 1] : [0, 1];
    if (log) return low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
    if (fromZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (low === high) return low ? [low - Math.abs(low) / 10, high + Math.abs(high) / 10] : [0, 1];
    const room = (high - low) * 0.06;
    return [fromZero && low === 0 ? 0 : low - room, fromZero && high === 0 ? 0 : high + room];
  }

  /* The y axis of an SVG chart: grid, numbers, the label above it. Gives the scale and where the plot begins. */
  function yAxis(svg, domain, ticks, top, bottom, right, words) {
    const left = Math.ceil(Math.max(24, ...ticks.map((tick) => width(tick.text)))) + 10;
    const y = domain.log ? scale(domain.low, domain.high, bottom, top, true) : scale(domain.low, domain.high, bottom, top);
    for (const tick of ticks) {
      svg.append(shape("line", { class: "grid", x1: left, x2: right, y1: at(y(tick.value)), y2: at(y(tick.value)) }));
      svg.append(label(left - 8, y(tick.value) + 4, tick.text, { "text-anchor": "end" }));
    }
    svg.append(label(0, 12, fit(words, right), {}, words));
    return { y, left };
  }

  function canvasOfSvg(plot, height) {
    const wide = Math.max(200, plot.clientWidth);
    const svg = shape("svg", { width: wide, height, viewBox: `0 0 ${wide} ${height}`, "aria-hidden": "true" });
    plot.replaceChildren(svg);
    return { svg, wide };
  }

  function empty(figure) {
    figure.querySelector(".plot").replaceChildren(make("p", { class: "empty" }, "nothing to show"));
    return () => {};
  }

  // --- lines and dots ---------------------------------------------------------------------------------------------

  /* The first index whose value is not less. */
  function search(values, value, low = 0, high = values.length) {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /* The indices of a series that are drawn between two of them: of many points on one pixel the first, the last,
     the highest and the lowest. */
  function thinned(one, first, last, x) {
    const kept = [];
    if (last - first < 1500) {
      for (let index = first; index < last; index += 1) kept.push(index);
      return kept;
    }
    for (let index = first; index < last;) {
      const pixel = Math.floor(x(one.x[index]));
      let [end, low, high] = [index, index, index];
      for (; end < last && Math.floor(x(one.x[end])) === pixel; end += 1) {
        if (one.y[end] < one.y[low]) low = end;
        if (one.y[end] > one.y[high]) high = end;
      }
      kept.push(...new Set([index, Math.min(low, high), Math.max(low, high), end - 1]));
      index = end;
    }
    return kept;
  }

  function lineChart(figure, chart) {
    if (!chart.series.some((one) => one.x.length)) return empty(figure);
    const plot = figure.querySelector(".plot");
    const groups = groupsOf(chart.series);
    let zoomed = null; // the x values from and to which is shown; null: all
    let geometry = null; // of what was drawn last
    let chosen = null; // x of the keys
    let dragged = null; // where a drag began, in pixels
    const entries = [...groups.values()].map((group) => {
      const styles = new Set(group.series.map((one) => one.style));
      const lines = ["line", "dashed"].filter((style) => styles.has(style));
      const swatch = lines.map((style) => shape("path", { class: `curve ${style}`, d: "M1 6H21" }));
      return { ...group, swatch: [...swatch.slice(0, 1), shape("path", { class: "mark", d: mark(group.number, 11, 6, 4) })] };
    });
    const key = legend(figure, entries, draw, { needed: () => zoomed !== null, act: () => { zoomed = null; } });
    const shown = () => chart.series.filter((one) => one.x.length && !key.hidden.has(one.group));

    function draw() {
      const height = plot.clientWidth < 520 ? 280 : 360;
      const { svg, wide } = canvasOfSvg(plot, height);
      const [top, bottom, right] = [26, height - 46, wide - 14];
      const series = shown();
      const all = range(chart.series.flatMap((one) => (one.x.length ? [one.x[0], one.x[one.x.length - 1]] : [])), {});
      const room = (all[1] - all[0]) * 0.06 / 1.12; // of `range`, which an x axis needs less of
      const [from, to] = zoomed || [all[0] + room * 0.8, all[1] - room * 0.8];
      const spans = series.map((one) => [Math.max(0, search(one.x, from) - 1), Math.min(one.x.length, search(one.x, to) + 2)]);
      function* heights() {
        for (const [index, one] of series.entries()) for (let n = spans[index][0]; n < spans[index][1]; n += 1) yield one.y[n];
        yield* chart.levels.map((level) => level.value);
      }
      const [low, high] = range(heights(), chart);
      const ticks = chart.log ? logAxis(chart.yForm, low, high) : axis(chart.yForm, low, high, (bottom - top) / 52);
      const { y, left } = yAxis(svg, { low, high, log: chart.log }, ticks, top, bottom, right, chart.yLabel);
      const x = scale(from, to, left, right);
      for (const tick of axis(chart.xForm, from, to, Math.max(2, (right - left) / 92))) {
        const wideText = width(tick.text) / 2;
        svg.append(shape("line", { class: "axis", x1: at(x(tick.value)), x2: at(x(tick.value)), y1: bottom, y2: bottom + 5 }));
        svg.append(label(Math.min(Math.max(x(tick.value), wideText), wide - wideText), bottom + 20, tick.text, { "text-anchor": "middle" }));
      }
      svg.append(shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
      svg.append(label((left + right) / 2, height - 8, fit(chart.xLabel, right - left), { "text-anchor": "middle" }, chart.xLabel));
      const clip = `clip-${figure.dataset.chart}`;
      const clipped = shape("clipPath", { id: clip });
      clipped.append(shape("rect", { x: left - 6, y: top - 6, width: Math.max(0, right - left + 12), height: bottom - top + 12 }));
      const inside = shape("g", { "clip-path": `url(#${clip})` });
      svg.append(clipped, inside);
      series.forEach((one, index) => inside.append(drawSeries(one, spans[index], x, y, left, right)));
      drawLevels(svg, y, left, right);
      const cross = shape("g");
      svg.append(cross);
      geometry = { x, y, left, right, top, bottom, cross };
      key.show();
    }

    function drawSeries(one, [first, last], x, y, left, right) {
      const group = groups.get(one.group);
      const node = shape("g", { class: `series ${group.kind}` });
      const kept = thinned(one, first, last, x);
      const many = group.series.filter((other) => other.style === one.style).length > 2 ? " many" : "";
      if (one.style !== "dots") {
        node.append(shape("path", { class: `curve ${one.style}${many}`, d: kept.map((n, i) => `${i ? "L" : "M"}${at(x(one.x[n]))} ${at(y(one.y[n]))}`).join("") }));
      }
      // Few points are all marked. On a longer line a mark now and then, each group's elsewhere, is enough to tell it from the others.
      const every = one.style === "dots" || one.x.length <= FEW ? 0 : Math.max(60, (right - left) / 7);
      let next = every ? left + ((group.number % 4) * every) / 4 : -Infinity;
      let marks = "";
      for (const n of kept) {
        if (every && x(one.x[n]) < next) continue;
        marks += mark(group.number, x(one.x[n]), y(one.y[n]), many ? 2.8 : 3.6);
        next = every ? x(one.x[n]) + every : next;
      }
      node.append(shape("path", { class: "mark", d: marks }));
      return node;
    }

    function drawLevels(svg, y, left, right) {
      let before = -Infinity;
      for (const level of [...chart.levels].sort((a, b) => y(a.value) - y(b.value))) {
        const place = y(level.value);
        svg.append(shape("line", { class: "level", x1: left, x2: right, y1: at(place), y2: at(place) }));
        before = Math.max(place - 6, before + 15);
        svg.append(label(right - 4, before, fit(level.words, right - left - 12), { "text-anchor": "end", class: "halo" }, level.words));
      }
    }

    const nearest = (one, value) => {
      const n = search(one.x, value);
      return n > 0 && (n === one.x.length || value - one.x[n - 1] <= one.x[n] - value) ? n - 1 : n;
    };

    /* What is known at the x nearest to `value`; of many series those nearest to the pointer's height. */
    function tell(value, pointer = null) {
      const { x, y, left, right, top, bottom, cross } = geometry;
      const points = shown().map((one) => ({ one, n: nearest(one, value) })).filter(({ one, n }) => x(one.x[n]) >= left - 1 && x(one.x[n]) <= right + 1);
      if (!points.length) return leave();
      const best = points.reduce((a, b) => (Math.abs(b.one.x[b.n] - value) < Math.abs(a.one.x[a.n] - value) ? b : a));
      const place = best.one.x[best.n];
      const close = shown().map((one) => ({ one, n: nearest(one, place) })).filter(({ one, n }) => Math.abs(x(one.x[n]) - x(place)) <= 16);
      const far = ({ one, n }) => (pointer === null ? 0 : Math.abs(y(one.y[n]) - pointer));
      const said = new Set([...close].sort((a, b) => far(a) - far(b)).slice(0, 12));
      cross.replaceChildren(shape("line", { class: "cross", x1: at(x(place)), x2: at(x(place)), y1: top, y2: bottom }));
      const rows = close.filter((point) => said.has(point)).map(({ one, n }) => {
        const group = groups.get(one.group);
        cross.append(shape("path", { class: `mark ${group.kind}`, d: mark(group.number, x(one.x[n]), y(one.y[n]), 5) }));
        const where = one.x[n] === place ? "" : ` (at ${write(one.x[n], chart.xForm)})`;
        return { kind: group.kind, name: one.name, value: write(one.y[n], chart.yForm) + where };
      });
      const more = close.length > rows.length ? `and ${close.length - rows.length} more` : "";
      const spot = outside(plot, x(place), pointer === null ? (top + bottom) / 2 : pointer);
      say(plot, spot, `${chart.xLabel ? `${chart.xLabel}: ` : ""}${write(place, chart.xForm)}`, rows, more);
      return place;
    }

    function leave() {
      hush(plot);
      if (geometry) geometry.cross.replaceChildren();
      return null;
    }

    function step(direction) {
      const { x, left, right } = geometry;
      const places = [...new Set(shown().flatMap((one) => one.x))].filter((one) => x(one) >= left - 1 && x(one) <= right + 1).sort((a, b) => a - b);
      if (!places.length) return;
      const now = chosen === null ? -1 : search(places, chosen);
      chosen = places[Math.max(0, Math.min(places.length - 1, now + direction))];
      tell(chosen);
    }

    const place = interact(plot, {
      move(px, py) {
        if (dragged !== null) return;
        if (px < geometry.left - 8) leave();
        else chosen = tell(geometry.x.back(px), py);
      },
      leave() { if (dragged === null) leave(); },
      step,
    });
    const bounded = (px) => Math.max(geometry.left, Math.min(geometry.right, px));
    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button !== 0) return; // a finger scrolls the page
      dragged = bounded(place(event)[0]);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      if (dragged === null) return;
      const now = bounded(place(event)[0]);
      if (Math.abs(now - dragged) < 5) return;
      const { top, bottom, cross } = geometry;
      hush(plot);
      cross.replaceChildren(shape("rect", { class: "chosen", x: at(Math.min(now, dragged)), y: top, width: at(Math.abs(now - dragged)), height: bottom - top }));
    });
    plot.addEventListener("pointerup", (event) => {
      if (dragged === null) return;
      const ends = [dragged, bounded(place(event)[0])].sort((a, b) => a - b).map(geometry.x.back);
      const wide = Math.abs(bounded(place(event)[0]) - dragged);
      dragged = null;
      if (wide >= 5 && ends[1] > ends[0]) { zoomed = ends; chosen = null; draw(); }
    });
    plot.addEventListener("pointercancel", () => { dragged = null; leave(); });
    plot.addEventListener("dblclick", () => { if (zoomed) { zoomed = null; draw(); } });
    draw();
    return draw;
  }

  // --- columns ----------------------------------------------------------------------------------------------------

  /* Lines over a column, so that neighbours differ without colours; the first has none. */
  function hatch(svg, id, kind) {
    const lines = [null, "M-1 6L6 -1M4 11L11 4", "M4 -1L11 6M-1 4L6 11", "M0 5H10"][kind % 4];
    if (!lines) return null;
    const pattern = shape("pattern", { id, width: 10, height: 10, patternUnits: "userSpaceOnUse" });
    pattern.append(shape("path", { class: "hatch", d: lines }));
    svg.append(pattern);
    return `url(#${id})`;
  }

  /* A part of the time has its own colour wherever it stands; what is beside it has colours that no part has. */
  function colourParts(groups) {
    const isPart = ({ name }) => NAMES.includes(name.toLowerCase());
    if (!groups.some(isPart)) return;
    let others = 0;
    for (const group of groups) group.kind = isPart(group) ? partOf(group.name) : `c${SPARE[others++ % SPARE.length]}`;
  }

  function barChart(figure, chart) {
    const count = chart.categories.length;
    if (!count || !chart.series.some((one) => one.values.some((value) => value !== null))) return empty(figure);
    const plot = figure.querySelector(".plot");
    const groups = groupsOf(chart.series);
    colourParts([...groups.values()]);
    let geometry = null;
    let chosen = -1;
    const whole = chart.yForm === "number" && chart.series.every((one) => one.values.every((value) => value === null || Number.isInteger(value)));
    const entries = [...groups.values()].map((group) => ({
      ...group,
      swatch: [group.series.some((one) => one.style === "columns")
        ? shape("rect", { class: "column", x: 4, y: 0, width: 14, height: 12, rx: 2 })
        : shape("path", { class: "mark", d: mark(group.number, 11, 6, 5) })],
    }));
    const key = legend(figure, entries, draw);

    function draw() {
      const series = chart.series.filter((one) => !key.hidden.has(one.group));
      const wide = Math.max(200, plot.clientWidth);
      const longest = Math.max(...chart.categories.map((words) => width(cut(words, 60))));
      const guess = (wide - 70) / count; // what a category has, before the axis is known
      const slanted = longest > guess - 6 && longest > 40;
      const below = (slanted ? Math.min(longest, 150) * 0.6 + 22 : 26) + (chart.xLabel ? 20 : 0);
      const height = 254 + below;
      const { svg } = canvasOfSvg(plot, height);
      const [top, bottom, right] = [30, height - below, wide - 10];
      const [low, high] = range(series.flatMap((one) => one.values.filter((value) => value !== null)), { fromZero: true });
      const { y, left } = yAxis(svg, { low, high }, axis(chart.yForm, low, high, (bottom - top) / 48, whole), top, bottom, right, chart.yLabel);
      const band = (right - left) / count;
      const columns = series.filter((one) => one.style === "columns");
      const slot = Math.min((band * (band > 12 ? 0.76 : 0.94)) / Math.max(1, columns.length), 72);
      const middle = (category) => left + band * (category + 0.5);
      const place = (one, category) => {
        const own = columns.includes(one) ? columns.indexOf(one) : columns.findIndex((other) => other.group === one.group);
        return own < 0 ? middle(category) : middle(category) + (own - (columns.length - 1) / 2) * slot;
      };
      drawCategories(svg, { slanted, band, middle, bottom, left, right });
      // Values are written on the columns where each of them has room and no dot would stand on it.
      const said = columns.length === series.length && columns.every((one) => one.values.every((value) => width(write(value, chart.yForm)) < slot));
      for (const one of [...columns, ...series.filter((other) => other.style === "dots")]) {
        const group = groups.get(one.group);
        const node = shape("g", { class: `series ${group.kind}` });
        const over = one.style === "columns" ? hatch(node, `hatch-${figure.dataset.chart}-${group.number}`, group.number) : null;
        for (let category = 0; category < count; category += 1) {
          const value = one.values[category] ?? null;
          if (value === null) continue;
          const [centre, height_] = [place(one, category), Math.abs(y(value) - y(0))];
          if (one.style === "dots") {
            node.append(shape("path", { class: "mark", d: mark(group.number, centre, y(value), 5) }));
            continue;
          }
          const box = { x: at(centre - slot * 0.46), y: at(Math.min(y(value), y(0))), width: at(Math.max(0.6, slot * 0.92)), height: at(height_), rx: slot > 8 ? 2 : 0 };
          node.append(shape("rect", { class: "column", ...box }));
          if (over) node.append(shape("rect", { ...box, fill: over }));
          const words = write(value, chart.yForm);
          if (said) node.append(label(centre, (value < 0 ? y(value) + 15 : y(value) - 5), words, { "text-anchor": "middle", class: "halo" }));
        }
        svg.append(node);
      }
      svg.append(shape("line", { class: "axis", x1: left, x2: right, y1: at(y(0)), y2: at(y(0)) }));
      svg.append(label((left + right) / 2, height - 6, fit(chart.xLabel, right - left), { "text-anchor": "middle" }, chart.xLabel));
      const cross = shape("rect", { class: "chosen", y: top, height: bottom - top, width: at(band), hidden: "" });
      svg.append(cross);
      geometry = { left, band, top, bottom, middle, cross };
    }

    function drawCategories(svg, { slanted, band, middle, bottom, left, right }) {
      const longest = slanted ? 16 : Math.max(...chart.categories.map(width)) + 10;
      const every = Math.max(1, Math.ceil(longest / band));
      for (let category = 0; category < chart.categories.length; category += every) {
        const words = chart.categories[category];
        const [x, y] = [middle(category), bottom + 18];
        if (slanted) {
          const room = Math.min(150, (x - 4) / 0.8); // so that the first one does not leave the picture
          svg.append(label(x + 4, y - 2, fit(words, room), { "text-anchor": "end", transform: `rotate(-36 ${at(x + 4)} ${at(y - 2)})` }, words));
        } else svg.append(label(Math.max(x, left - 20), y, fit(words, Math.max(longest, right - left)), { "text-anchor": "middle" }, words));
      }
    }

    function tell(category, pointer = null) {
      chosen = Math.max(0, Math.min(count - 1, category));
      const { left, band, top, bottom, cross, middle } = geometry;
      fill(cross, { x: at(left + band * chosen) }).removeAttribute("hidden");
      const rows = chart.series.filter((one) => !key.hidden.has(one.group))
        .map((one) => ({ kind: groups.get(one.group).kind, name: one.name, value: write(one.values[chosen] ?? null, chart.yForm) }));
      const more = rows.length > 14 ? `and ${rows.length - 14} more` : "";
      const spot = outside(plot, middle(chosen), pointer === null ? (top + bottom) / 2 : pointer);
      say(plot, spot, `${chart.xLabel ? `${chart.xLabel}: ` : ""}${cut(chart.categories[chosen], 120)}`, rows.slice(0, 14), more);
    }
    function leave() { hush(plot); geometry.cross.setAttribute("hidden", ""); }
    interact(plot, {
      move(px, py) {
        const category = Math.floor((px - geometry.left) / geometry.band);
        if (category >= 0 && category < count) tell(category, py);
        else leave();
      },
      leave,
      step: (direction) => tell(chosen + direction),
    });
    draw();
    return draw;
  }

  // --- shares -----------------------------------------------------------------------------------------------------

  const PARTS = ["computing", "thrown", "sending", "waiting", "updating", "evaluating", "other"];
  const NAMES = PARTS.map((part) => (part === "thrown" ? "thrown away" : part)).filter((part) => part !== "other");
  const SPARE = [6, 7, 5]; // colours of series that no part has
  const partOf = (name) => PARTS.find((part) => name.toLowerCase().startsWith(part.slice(0, 4))) || (/^appl/i.test(name) ? "updating" : "other");

  function shareChart(figure, chart) {
    if (!chart.rows.length || !chart.parts.length) return empty(figure);
    const plot = figure.querySelector(".plot");
    let geometry = null;
    let chosen = -1;
    const entries = chart.parts.map((name) => {
      const swatch = [shape("rect", { class: "column", x: 4, y: 0, width: 14, height: 12, rx: 2 })];
      if (partOf(name) === "thrown") swatch.push(shape("path", { class: "hatch", d: "M4 8L12 0M8 12L18 2" }));
      return { name, kind: partOf(name), swatch };
    });
    const key = legend(figure, entries, draw);
    const share = (row, part) => (key.hidden.has(chart.parts[part]) ? 0 : Math.max(0, chart.values[row]?.[part] ?? 0));

    function draw() {
      const narrow = plot.clientWidth < 560; // the name stands above its bar
      const wide = Math.max(200, plot.clientWidth);
      const left = narrow ? 0 : Math.min(220, Math.max(...chart.rows.map((words) => width(cut(words, 60)))) * 1.06 + 16);
      const [each, bar] = narrow ? [52, 24] : [36, 26];
      const height = chart.rows.length * each + 30;
      const { svg } = canvasOfSvg(plot, height);
      const right = wide - 24; // half of "100 %"
      const bottom = height - 26;
      const x = scale(0, 1, left, right);
      for (const tick of axis("percent", 0, 1, narrow ? 4 : 10)) {
        svg.append(shape("line", { class: "grid", x1: at(x(tick.value)), x2: at(x(tick.value)), y1: 0, y2: bottom }));
        svg.append(label(x(tick.value), bottom + 18, tick.text, { "text-anchor": tick.value === 0 && narrow ? "start" : "middle" }));
      }
      const over = hatch(svg, `hatch-${figure.dataset.chart}`, 1);
      chart.rows.forEach((name, row) => {
        const top = row * each + (narrow ? 22 : 5);
        if (narrow) svg.append(label(0, top - 6, fit(name, right), { class: "name halo" }, name));
        else svg.append(label(left - 12, top + bar / 2 + 4.5, fit(name, (left - 16) / 1.06), { class: "name", "text-anchor": "end" }, name));
        let from = 0;
        chart.parts.forEach((part, index) => {
          const value = Math.min(share(row, index), 1 - from);
          if (value <= 0) return;
          const kind = partOf(part);
          const box = { x: at(x(from)), y: top, width: at(Math.max(0.3, x(from + value) - x(from) - 1)), height: bar };
          const node = shape("g", { class: `series ${kind}` });
          node.append(shape("rect", { class: "column", ...box }));
          if (kind === "thrown") node.append(shape("rect", { ...box, fill: over }));
          const words = write(value, "percent");
          if (width(words) + 8 <= x(from + value) - x(from)) {
            const ground = kind === "thrown" ? " on-light" : isDark(colourOf(kind)) ? " on-dark" : " on-light";
            node.append(label(x(from + value / 2), top + bar / 2 + 4.5, words, { class: `inside${ground}`, "text-anchor": "middle" }));
          }
          svg.append(node);
          from += value;
        });
      });
      geometry = { each, bar, wide };
    }

    function tell(row, px = null) {
      chosen = Math.max(0, Math.min(chart.rows.length - 1, row));
      const rows = chart.parts.map((name, part) => ({ kind: partOf(name), name, value: write(chart.values[chosen]?.[part] ?? null, "percent") }))
        .filter((one) => !key.hidden.has(one.name));
      const place = outside(plot, px ?? geometry.wide / 2, (chosen + 0.5) * geometry.each);
      say(plot, place, chart.rows[chosen], rows);
    }
    interact(plot, {
      move(px, py) {
        const row = Math.floor(py / geometry.each);
        if (row >= 0 && row < chart.rows.length) tell(row, px);
        else hush(plot);
      },
      leave: () => hush(plot),
      step: (direction) => tell(chosen + direction),
    });
    draw();
    return draw;
  }

  // --- the page around the charts ---------------------------------------------------------------------------------

  const kinds = { line: lineChart, bar: barChart, share: shareChart }; // timeline.js adds its own

  function drawOnce(figure) {
    if (drawn.has(figure)) return;
    const chart = data[Number(figure.dataset.chart)];
    drawn.set(figure, () => {}); // one that fails is not tried again, and does not keep the others from being drawn
    try {
      drawn.set(figure, kinds[chart.kind](figure, chart));
      figure.dataset.drawn = "yes";
    } catch (error) {
      figure.querySelector(".plot").replaceChildren(make("p", { class: "empty" }, `this chart could not be drawn (${error})`));
      console.error(error);
    }
    performance.mark(`chart ${figure.id}`);
  }
  const drawAgain = () => drawn.forEach((draw) => draw());

  /* Charts near the window first, the others one by one when there is time. */
  function drawAll(figures) {
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); drawOnce(entry.target); }
    }, { rootMargin: "400px" });
    const wide = new Map();
    const size = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) {
        const before = wide.get(target);
        wide.set(target, contentRect.width);
        if (before !== undefined && before !== contentRect.width) drawn.get(target.parentElement)?.();
      }
    });
    for (const figure of figures) { near.observe(figure); size.observe(figure.querySelector(".plot")); }
    const rest = [...figures];
    const idle = window.requestIdleCallback || ((act) => setTimeout(act, 30));
    (function next() {
      const figure = rest.shift();
      if (figure) { drawOnce(figure); return idle(next); }
      document.documentElement.dataset.drawn = "all";
      return performance.mark("all charts drawn");
    })();
  }

  /* The style for the dark holds by itself as the reader's system says, or as the button says; never on paper. */
  function themes() {
    const dark = document.getElementById("dark");
    const media = { auto: dark.media, light: "not all", dark: "screen" };
    const names = Object.keys(media);
    let chosen = "auto";
    const node = button("theme: auto", "as the system says, light or dark", () => {
      chosen = names[(names.indexOf(chosen) + 1) % names.length];
      node.textContent = `theme: ${chosen}`;
      dark.media = media[chosen];
      drawAgain();
    });
    document.getElementById("buttons").append(node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
    let unfolded = []; // for paper
    const paper = (printing) => {
      dark.media = printing ? "not all" : media[chosen];
      if (printing) document.querySelectorAll("[data-chart]").forEach(drawOnce);
      if (printing && !unfolded.length) unfolded = [...document.querySelectorAll("main details:not([open])")];
      unfolded.forEach((details) => { details.open = printing; });
      if (!printing) unfolded = [];
      drawAgain();
    };
    addEventListener("beforeprint", () => paper(true));
    addEventListener("afterprint", () => paper(false));
    matchMedia("print").addEventListener("change", (event) => paper(event.matches));
  }

  /* Contents: open beside the page, folded above it where it is narrow; the section that is read is marked. */
  function contents() {
    const folder = document.querySelector(".contents details");
    if (!folder) return;
    const narrow = matchMedia("(max-width: 999px)");
    const folded = () => { folder.open = !narrow.matches; };
    narrow.addEventListener("change", folded);
    folded();
    const links = new Map([...folder.querySelectorAll("a")].map((link) => [link.hash.slice(1), link]));
    folder.addEventListener("click", (event) => { if (event.target.closest("a") && narrow.matches) folder.open = false; });
    const seen = new Set();
    const reader = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting) seen.add(target.id); else seen.delete(target.id);
      const current = [...links.keys()].find((id) => seen.has(id));
      links.forEach((link, id) => (id === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
    }, { rootMargin: "-10% 0px -60% 0px" });
    for (const id of links.keys()) reader.observe(document.getElementById(id));
  }

  function start() {
    document.documentElement.classList.add("js");
    contents();
    themes();
    drawAll(document.querySelectorAll("[data-chart]"));
  }

  // What timeline.js builds on.
  return { axis, button, colourOf, cut, empty, exponent, fit, fixed, hush, isDark, kinds, legend, make, outside, partOf, say, search, shape, start, timelines, write, FONT, PARTS };
})();
