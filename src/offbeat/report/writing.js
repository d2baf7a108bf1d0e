/* Numbers, ticks and text as number_format.py and charts/axes.py write them, for what a script must write by itself:
   values at the pointer, and the axes of what is zoomed. */
const writing = (() => {
  "use strict";

  const LETTERS = 300; // of a name at most, wherever it is shown whole
  const FONT = '12.5px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif';

  // --- numbers ----------------------------------------------------------------------------------------------------

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

  // --- text ------------------------------------------------------------------------------------------------------

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

  // --- ticks ------------------------------------------------------------------------------------------------------

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

  /* The first index whose value is not less. */
  function search(values, value, low = 0, high = values.length) {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  return { axis, cut, exponent, fit, fixed, logAxis, search, write, FONT };
})();
