/* Adds to a page what only a script can: values at the pointer and by keys, zoom, showing and hiding, themes.

   Laws. Charts are there already, as SVG: they are changed, never drawn again; only timeline.js draws, on a canvas. Text
   from the data becomes text and nothing else: textContent and createElement only. A chart is made ready when it comes near
   the window, or when there is time, or before printing.

   The order below: nodes, what is said at the pointer, legends, the charts, the page around them. */
const report = (() => {
  "use strict";

  const { axis, cut, logAxis, search, write } = writing;
  const SVG = "http://www.w3.org/2000/svg";
  const SHOWN = 14; // values at the pointer
  const data = JSON.parse(document.getElementById("data").textContent);
  const timelines = data.filter((chart) => chart.kind === "timeline");
  const drawn = new Map(); // figure -> how to draw it again

  // --- nodes ------------------------------------------------------------------------------------------------------

  function fill(node, attributes, text) {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  const make = (tag, attributes = {}, text) => fill(document.createElement(tag), attributes, text);
  const shape = (tag, attributes = {}, text) => fill(document.createElementNS(SVG, tag), attributes, text);
  const button = (text, about, act) => {
    const node = make("button", { type: "button", title: about }, text);
    node.addEventListener("click", act);
    return node;
  };
  const at = (value) => value.toFixed(1);

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

  /* Buttons that hide and show: a click one of them, a double click all others. `hidden` holds the keys of the hidden
     ones; `resetAlso` says whether there is something else to take back. */
  function toggles(figure, nodes, keys, changed, resetAlso, hidden) {
    const reset = button("reset", "show everything again", () => { hidden.clear(); resetAlso.act(); update(); });
    reset.classList.add("reset");
    nodes.forEach((node, index) => {
      const alone = () => { keys.forEach((key) => hidden.add(key)); hidden.delete(keys[index]); update(); };
      node.addEventListener("click", (event) => {
        if (event.shiftKey) return alone();
        if (!hidden.delete(keys[index])) hidden.add(keys[index]);
        return update();
      });
      node.addEventListener("dblclick", alone);
    });
    function show() {
      nodes.forEach((node, index) => node.setAttribute("aria-pressed", String(!hidden.has(keys[index]))));
      reset.hidden = !hidden.size && !resetAlso.needed();
    }
    function update() { hush(speaker); show(); changed(); }
    figure.querySelector(".legend").replaceChildren(...nodes, reset);
    show();
    return show;
  }
  const nothingElse = { needed: () => false, act() {} };

  /* The legend of a chart that is there: hides series, which stand in the order of `series`, in all its pictures. */
  function seriesLegend(figure, series, resetAlso = nothingElse) {
    const hidden = new Set();
    const keys = [...new Set(series.map((one) => one.group))];
    const update = () => {
      for (const node of figure.querySelectorAll(".plot .series")) node.toggleAttribute("hidden", hidden.has(keys[Number(node.dataset.group)]));
    };
    const show = toggles(figure, [...figure.querySelectorAll(".legend .entry")], keys, update, resetAlso, hidden);
    return { hidden, show, update };
  }

  // --- the charts -------------------------------------------------------------------------------------------------

  const picture = (plot) => [...plot.querySelectorAll(":scope > svg")].find((svg) => getComputedStyle(svg).display !== "none");
  const zoomOf = (svg) => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width; // pixels of a unit of the picture

  /* From values to places in a picture, and back, as its `data-x` or `data-y` says, or between other ends. */
  function scale(words, low = null, high = null) {
    const [a, b, first, last] = words.split(" ").map(Number);
    const log = words.endsWith("log");
    const to = log ? (value) => Math.log(Math.max(value, low ?? a)) : (value) => value;
    const [from, until] = [to(low ?? a), to(high ?? b)];
    const place = (value) => first + ((to(value) - from) / (until - from)) * (last - first);
    const back = (pixel) => { const value = from + ((pixel - first) / (last - first)) * (until - from); return log ? Math.exp(value) : value; };
    return Object.assign(place, { back, low: low ?? a, high: high ?? b, first, last, log });
  }

  function lineChart(figure, chart) {
    const plot = figure.querySelector(".plot");
    const whole = new Map([...plot.querySelectorAll(":scope > svg")].map((svg) => [svg, svg.cloneNode(true)]));
    let zoomed = null; // the x values from and to which is shown; null: all
    let chosen = null; // x of the keys
    let dragged = null; // where a drag began, in the picture
    const key = seriesLegend(figure, chart.series, { needed: () => zoomed !== null, act: () => see(null) });
    const shown = () => chart.series.filter((one) => one.x.length && !key.hidden.has(one.group));

    /* The scales of a picture as it is now; the y axis of a zoomed one holds what is seen. */
    function scales(svg) {
      if (!zoomed) return [scale(svg.dataset.x), scale(svg.dataset.y)];
      const y = scale(svg.dataset.y);
      let [low, high] = [Infinity, -Infinity];
      for (const one of chart.series) {
        for (let n = Math.max(0, search(one.x, zoomed[0]) - 1); n < one.x.length && (n < 1 || one.x[n - 1] <= zoomed[1]); n += 1) {
          if (!y.log || one.y[n] > 0) [low, high] = [Math.min(low, one.y[n]), Math.max(high, one.y[n])];
        }
      }
      for (const level of chart.levels) [low, high] = [Math.min(low, level), Math.max(high, level)];
      if (!(high > low)) [low, high] = [y.low, y.high];
      else if (y.log) [low, high] = [low / 1.08, high * 1.08];
      else [low, high] = [chart.fromZero && low >= 0 ? 0 : low - 0.06 * (high - low), high + 0.06 * (high - low)];
      return [scale(svg.dataset.x, ...zoomed), scale(svg.dataset.y, low, high)];
    }

    /* Moves what is there: the places of curves, marks and levels; new ticks. */
    function see(ends) {
      zoomed = ends;
      chosen = null;
      for (const [svg, copy] of whole) {
        svg.replaceChildren(...copy.cloneNode(true).childNodes);
        if (!zoomed) continue;
        const [x, y, oldX, oldY] = [...scales(svg), scale(svg.dataset.x), scale(svg.dataset.y)];
        const moved = (px, py) => [at(x(oldX.back(Number(px)))), at(y(oldY.back(Number(py))))];
        for (const node of svg.querySelectorAll(".curves polyline")) {
          node.setAttribute("points", node.getAttribute("points").replace(/([-\d.]+),([-\d.]+)/g, (_, px, py) => moved(px, py).join(",")));
        }
        for (const node of svg.querySelectorAll(".curves .mark")) {
          node.setAttribute("d", node.getAttribute("d").replace(/M([-\d.]+) ([-\d.]+)/g, (_, px, py) => `M${moved(px, py).join(" ")}`));
        }
        for (const node of svg.querySelectorAll(".levels > *")) {
          for (const name of ["y", "y1", "y2"]) if (node.hasAttribute(name)) node.setAttribute(name, moved(x.first, node.getAttribute(name))[1]);
        }
        ticks(svg, x, y);
      }
      key.update();
      key.show();
    }

    function ticks(svg, x, y) {
      const line = (x1, y1, x2, y2) => shape("line", { x1: at(x1), y1: at(y1), x2: at(x2), y2: at(y2) });
      const text = (px, py, words, anchor) => shape("text", { x: at(px), y: at(py), "text-anchor": anchor }, words);
      const ups = y.log ? logAxis(chart.yForm, y.low, y.high) : axis(chart.yForm, y.low, y.high, (y.first - y.last) / 48);
      const acrosses = x.log ? logAxis(chart.xForm, x.low, x.high) : axis(chart.xForm, x.low, x.high, Math.max(2, (x.last - x.first) / 75));
      const put = (name, nodes) => svg.querySelector(`.${name}`)?.replaceChildren(...nodes);
      put("y-grid", ups.map((tick) => line(x.first, y(tick.value), x.last, y(tick.value))));
      put("y-ticks", ups.map((tick) => text(x.first - 9, y(tick.value) + 4.5, tick.text, "end")));
      put("x-marks", acrosses.map((tick) => line(x(tick.value), y.first, x(tick.value), y.first + 5)));
      put("x-ticks", acrosses.map((tick) => text(x(tick.value), y.first + 21.5, tick.text, "middle")));
    }

    const nearest = (one, value) => {
      const n = search(one.x, value);
      return n > 0 && (n === one.x.length || value - one.x[n - 1] <= one.x[n] - value) ? n - 1 : n;
    };

    /* What is known at the x nearest to `value`; of many series those nearest to the pointer's height. */
    function tell(value, pointer = null) {
      const svg = picture(plot);
      const [x, y] = scales(svg);
      const seen = ({ one, n }) => x(one.x[n]) >= x.first - 1 && x(one.x[n]) <= x.last + 1;
      const points = shown().map((one) => ({ one, n: nearest(one, value) })).filter(seen);
      if (!points.length) return leave();
      const best = points.reduce((a, b) => (Math.abs(b.one.x[b.n] - value) < Math.abs(a.one.x[a.n] - value) ? b : a));
      const place = best.one.x[best.n];
      const close = shown().map((one) => ({ one, n: nearest(one, place) })).filter(({ one, n }) => Math.abs(x(one.x[n]) - x(place)) <= 16);
      const far = ({ one, n }) => (pointer === null ? 0 : Math.abs(y(one.y[n]) - pointer));
      const said = new Set([...close].sort((a, b) => far(a) - far(b)).slice(0, SHOWN));
      const cross = svg.querySelector(".cross");
      cross.replaceChildren(shape("line", { x1: at(x(place)), x2: at(x(place)), y1: y.last, y2: y.first }));
      const rows = close.filter((point) => said.has(point)).map(({ one, n }) => {
        cross.append(shape("circle", { class: `mark ${one.colour}`, cx: at(x(one.x[n])), cy: at(y(one.y[n])), r: 5 }));
        const where = one.x[n] === place ? "" : ` (at ${write(one.x[n], chart.xForm)})`;
        return { kind: one.colour, name: one.name, value: write(one.y[n], chart.yForm) + where };
      });
      const more = close.length > rows.length ? `and ${close.length - rows.length} more` : "";
      const unit = zoomOf(svg);
      const spot = outside(plot, x(place) * unit, (pointer ?? (y.first + y.last) / 2) * unit);
      say(plot, spot, `${chart.xLabel ? `${chart.xLabel}: ` : ""}${write(place, chart.xForm)}`, rows, more);
      return place;
    }

    function leave() {
      hush(plot);
      plot.querySelectorAll(".cross").forEach((cross) => cross.replaceChildren());
      return null;
    }

    const place = interact(plot, {
      move(px, py) {
        const [unit, [x]] = [zoomOf(picture(plot)), scales(picture(plot))];
        if (dragged !== null) return;
        if (px / unit < x.first - 8) leave();
        else chosen = tell(x.back(px / unit), py / unit);
      },
      leave() { if (dragged === null) leave(); },
      step(direction) {
        const [x] = scales(picture(plot));
        const places = [...new Set(shown().flatMap((one) => one.x))].filter((one) => x(one) >= x.first - 1 && x(one) <= x.last + 1).sort((a, b) => a - b);
        if (!places.length) return;
        const now = chosen === null ? -1 : search(places, chosen);
        chosen = tell(places[Math.max(0, Math.min(places.length - 1, now + direction))]);
      },
    });
    const across = (event) => {
      const [svg, [x]] = [picture(plot), scales(picture(plot))];
      return Math.max(x.first, Math.min(x.last, place(event)[0] / zoomOf(svg)));
    };
    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button !== 0) return; // a finger scrolls the page
      dragged = across(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      if (dragged === null || Math.abs(across(event) - dragged) < 5) return;
      const [svg, now] = [picture(plot), across(event)];
      const y = scale(svg.dataset.y);
      hush(plot);
      svg.querySelector(".cross").replaceChildren(shape("rect", { class: "chosen", x: at(Math.min(now, dragged)), y: y.last, width: at(Math.abs(now - dragged)), height: y.first - y.last }));
    });
    plot.addEventListener("pointerup", (event) => {
      if (dragged === null) return;
      const [x] = scales(picture(plot));
      const [first, last] = [dragged, across(event)].sort((a, b) => a - b);
      dragged = null;
      if (last - first >= 5 && x.back(last) > x.back(first)) see([x.back(first), x.back(last)]);
    });
    plot.addEventListener("pointercancel", () => { dragged = null; leave(); });
    plot.addEventListener("dblclick", () => { if (zoomed) see(null); });
  }

  /* Columns of a category, or parts of a row: the bands lie along x or along y, as `data-bands` says. */
  function bandChart(figure, chart) {
    const plot = figure.querySelector(".plot");
    let chosen = -1;
    const key = seriesLegend(figure, chart.series);

    function tell(band, [px, py] = [null, null]) {
      chosen = Math.max(0, Math.min(chart.bands.length - 1, band));
      const svg = picture(plot);
      const [along, first, each] = svg.dataset.bands.split(" ");
      const middle = (Number(first) + Number(each) * (chosen + 0.5)) * zoomOf(svg);
      const rows = chart.series.filter((one) => !key.hidden.has(one.group))
        .map((one) => ({ kind: one.colour, name: one.name, value: write(one.values[chosen] ?? null, chart.form) }));
      leave();
      const box = svg.querySelector(".chosen");
      if (box) fill(box, { x: at(Number(first) + Number(each) * chosen) }).removeAttribute("hidden");
      const more = rows.length > SHOWN ? `and ${rows.length - SHOWN} more` : "";
      const spot = along === "x" ? [middle, py ?? 100] : [px ?? plot.clientWidth / 2, middle];
      say(plot, outside(plot, ...spot), `${chart.label ? `${chart.label}: ` : ""}${cut(chart.bands[chosen], 120)}`, rows.slice(0, SHOWN), more);
    }
    function leave() {
      hush(plot);
      plot.querySelectorAll(".chosen").forEach((box) => box.setAttribute("hidden", ""));
    }
    interact(plot, {
      move(px, py) {
        const svg = picture(plot);
        const [along, first, each] = svg.dataset.bands.split(" ");
        const band = Math.floor(((along === "x" ? px : py) / zoomOf(svg) - Number(first)) / Number(each));
        if (band >= 0 && band < chart.bands.length) tell(band, [px, py]);
        else leave();
      },
      leave,
      step: (direction) => tell(chosen + direction),
    });
  }

  // --- the page around the charts ---------------------------------------------------------------------------------

  const kinds = { line: lineChart, bar: bandChart, share: bandChart }; // timeline.js adds its own

  function drawOnce(figure) {
    if (drawn.has(figure)) return;
    const chart = data[Number(figure.dataset.chart)];
    drawn.set(figure, () => {}); // one that fails is not tried again, and does not keep the others from being drawn
    try {
      if (!figure.querySelector(".empty")) drawn.set(figure, kinds[chart.kind](figure, chart) ?? (() => {}));
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
    const node = button("theme: auto", "light or dark, as set in the system", () => {
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
  return { button, hush, kinds, make, nothingElse, outside, say, shape, start, timelines, toggles };
})();
