// What a page does for a reader who points at its pictures: values, a closer look, and a page that goes on with its run.
// Without it the page is whole. Nothing is loaded, and texts of the run are only ever set as text.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MOST = 12; // rows of values beside the pointer
  const KEPT = "autoaccum " + location.pathname;
  const pictures = [];

  function element(name, attributes, parent) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return parent.appendChild(made);
  }

  // Numbers as the ticks of the pictures have them, and as people read values.
  function tick(value, span) {
    const [unit, name] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => span >= size) || [1, ""];
    return Number((value / unit).toPrecision(6)) + name;
  }
  function shown(value) {
    return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
  }

  class Picture {
    constructor(figure) {
      this.figure = figure;
      this.svg = figure.querySelector("svg");
      this.about = JSON.parse(figure.dataset.picture);
      [this.left, this.top, this.right, this.bottom] = this.about.box;
      this.view = this.whole = [this.about.x.from, this.about.x.to];
      // What moves, with the places where it was drawn: paths of lines and bands, and the marks of points.
      this.paths = [...this.svg.querySelectorAll(".curve path, .band path")]
        .filter((path) => path.closest(".band") || !path.closest("defs"))
        .map((path) => [path, path.getAttribute("d")]);
      this.marks = [...this.svg.querySelectorAll(".curve use")].map((mark) => [mark, Number(mark.getAttribute("x"))]);
      this.line = element("path", { class: "pointer" }, this.svg);
      this.chosen = element("rect", { class: "chosen", y: this.top, height: this.bottom - this.top }, this.svg);
      this.ticks = element("g", { class: "ticks" }, this.svg);
      this.values = figure.appendChild(document.createElement("div"));
      this.values.className = "values";
      this.values.hidden = true;
      this.clicked = -Infinity; // when it was last clicked
      this.svg.addEventListener("pointermove", (event) => this.moved(event));
      this.svg.addEventListener("pointerleave", () => this.left_alone());
      if (!this.about.zooms) return;
      this.svg.classList.add("zooms");
      this.svg.addEventListener("pointerdown", (event) => this.pressed(event));
      this.svg.addEventListener("pointerup", (event) => this.released(event));
      this.svg.addEventListener("pointercancel", () => this.left_alone());
    }

    // Places in the picture of values, and values of places.
    at(value, axis, low, high, [from, to]) {
      const scale = axis.log ? Math.log : Number;
      return low + ((high - low) * (scale(value) - scale(from))) / (scale(to) - scale(from));
    }
    x(value) {
      return this.at(value, this.about.x, this.left, this.right, this.view);
    }
    y(value) {
      return this.at(value, this.about.y, this.bottom, this.top, [this.about.y.from, this.about.y.to]);
    }
    value(x) {
      const [from, to] = this.view;
      return from + ((to - from) * (x - this.left)) / (this.right - this.left);
    }
    place(event) {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
      return [Math.min(Math.max(point.x, this.left), this.right), point.y];
    }

    moved(event) {
      const [x, y] = this.place(event);
      if (this.start !== undefined) {
        this.chosen.setAttribute("x", Math.min(x, this.start));
        this.chosen.setAttribute("width", Math.abs(x - this.start));
      }
      const rows = this.about.nearest ? this.nearest(x, y) : this.above(x);
      this.values.hidden = !rows.length;
      this.values.replaceChildren(...rows.slice(0, MOST).map(row));
      // Beside the pointer, on the side where there is room.
      const box = this.figure.getBoundingClientRect();
      const at = event.clientX - box.left;
      const is_left = at > box.width / 2;
      this.values.style.left = is_left ? "" : `${at + 14}px`;
      this.values.style.right = is_left ? `${box.width - at + 14}px` : "";
      this.values.style.top = `${event.clientY - box.top + 14}px`;
    }

    // Return what each curve is at the place nearest to the pointer.
    above(x) {
      const rows = [];
      let nearest = null;
      for (const curve of this.about.curves) {
        const index = closest(curve.x, this.value(x));
        if (index < 0) continue;
        const distance = Math.abs(this.x(curve.x[index]) - x);
        // Points and marks are of their places alone, and no curve is known beyond its ends.
        const is_between = curve.is_line && curve.x[0] <= this.value(x) && this.value(x) <= curve.x[curve.x.length - 1];
        if (distance > 6 && !is_between) continue;
        if (!nearest || distance < nearest.distance) nearest = { distance, value: curve.x[index] };
        const value = curve.y && curve.y[index];
        if (curve.y && value === null) continue;
        rows.push([curve.colour, curve.name, curve.y ? `${shown(value)} ${this.about.y.name}` : ""]);
      }
      this.point(nearest ? `M ${this.x(nearest.value)} ${this.top} V ${this.bottom}` : "");
      return nearest ? [[null, this.about.x.name, shown(nearest.value)], ...rows] : [];
    }

    // Return what the nearest point is.
    nearest(x, y) {
      let best = null;
      for (const curve of this.about.curves) {
        if (!curve.y) continue;
        for (let index = 0; index < curve.x.length; index++) {
          if (curve.y[index] === null || curve.x[index] < this.view[0] || curve.x[index] > this.view[1]) continue;
          const distance = Math.hypot(this.x(curve.x[index]) - x, this.y(curve.y[index]) - y);
          if (distance < 25 && (!best || distance < best.distance)) best = { distance, curve, index };
        }
      }
      if (!best) {
        this.point("");
        return [];
      }
      const { curve, index } = best;
      const [at, value] = [curve.x[index], curve.y[index]];
      this.point(`M ${this.x(at) - 7} ${this.y(value)} a 7 7 0 1 0 14 0 a 7 7 0 1 0 -14 0`);
      return [
        [curve.colour, curve.names ? curve.names[index] : curve.name, ""],
        [null, this.about.x.name, shown(at)],
        [null, this.about.y.name, shown(value)],
      ];
    }
    point(path) {
      this.line.setAttribute("d", path);
    }

    pressed(event) {
      const [x, y] = this.place(event);
      if (event.button || y < this.top || y > this.bottom) return;
      this.start = x;
      this.svg.setPointerCapture(event.pointerId);
      event.preventDefault(); // no text is selected meanwhile
    }
    released(event) {
      const [x, width] = ["x", "width"].map((name) => Number(this.chosen.getAttribute(name)));
      const is_drag = this.start !== undefined && width > 4;
      this.start = undefined;
      this.chosen.setAttribute("width", 0);
      if (is_drag) zoom(this, [this.value(x), this.value(x + width)]);
      // Counted here, for a finger that taps twice is no double click in every browser.
      else if (event.timeStamp - this.clicked < 500) zoom(this, null);
      this.clicked = is_drag ? -Infinity : event.timeStamp;
    }
    left_alone() {
      this.start = undefined;
      this.chosen.setAttribute("width", 0);
      this.values.hidden = true;
      this.point("");
    }

    // Draw only what lies between these values; all of it for null.
    show(view) {
      const before = this.whole;
      this.view = view || this.whole;
      const moved = (x) => {
        const value = before[0] + ((before[1] - before[0]) * (x - this.left)) / (this.right - this.left);
        return this.x(value).toFixed(2);
      };
      for (const [path, drawn] of this.paths)
        path.setAttribute("d", view ? drawn.replace(/(-?[\d.]+) (-?[\d.]+)/g, (_, x, y) => `${moved(x)} ${y}`) : drawn);
      for (const [mark, drawn] of this.marks) {
        const x = Number(moved(drawn));
        mark.setAttribute("x", x);
        // Marks of events stand above the axes, where nothing is cut off.
        mark.setAttribute("visibility", view && (x < this.left - 1 || x > this.right + 1) ? "hidden" : "visible");
      }
      this.svg.classList.toggle("zoomed", Boolean(view));
      this.ticks.replaceChildren();
      if (!view) return;
      const span = this.view[1] - this.view[0];
      const power = 10 ** Math.floor(Math.log10(span / 5));
      const step = power * [1, 2, 5, 10].find((times) => span / (power * times) <= 6);
      for (let value = Math.ceil(this.view[0] / step) * step; value <= this.view[1]; value += step) {
        const x = this.x(value);
        element("path", { d: `M ${x} ${this.top} V ${this.bottom}` }, this.ticks);
        element("text", { x, y: this.bottom + 12 }, this.ticks).textContent = tick(value, Math.abs(this.view[1]));
      }
    }
  }

  function row([colour, name, value]) {
    const line = document.createElement("div");
    const swatch = line.appendChild(document.createElement("i"));
    if (colour) swatch.style.background = colour;
    line.appendChild(document.createElement("span")).textContent = name;
    line.appendChild(document.createElement("b")).textContent = value;
    return line;
  }

  // Return the index of the value nearest to x in values that rise; -1 without one.
  function closest(values, x) {
    let [low, high] = [0, values.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low > 0 && x - values[low - 1] < values[low] - x ? low - 1 : low < values.length ? low : -1;
  }

  // All pictures over the same axis look at the same part of it.
  function zoom(picture, view) {
    for (const one of pictures) if (one.about.zooms && one.about.x.name === picture.about.x.name) one.show(view);
  }

  for (const figure of document.querySelectorAll("figure[data-picture]")) pictures.push(new Picture(figure));
  if (pictures.length) document.documentElement.classList.add("scripted");

  // A page whose run goes on is loaded again, and stays where its reader was.
  const details = [...document.querySelectorAll("details")];
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT));
    sessionStorage.removeItem(KEPT);
    if (kept) {
      kept.open.forEach((is_open, index) => details[index] && (details[index].open = is_open));
      for (const one of pictures) if (one.about.zooms && kept.views[one.about.x.name]) one.show(kept.views[one.about.x.name]);
      scrollTo(0, kept.top);
    }
  } catch {} // without storage the page begins at its top
  const seconds = Number(document.body.dataset.live);
  if (seconds)
    setTimeout(() => {
      const views = {};
      for (const one of pictures) if (one.view !== one.whole) views[one.about.x.name] = one.view;
      try {
        sessionStorage.setItem(KEPT, JSON.stringify({ top: scrollY, open: details.map((one) => one.open), views }));
      } catch {}
      location.reload();
    }, 1000 * seconds);
})();
