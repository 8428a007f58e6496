"use strict";
// Draws the charts of the data in #data. Each series has lists: step, tokens, seconds, y, perhaps error.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const box = document.getElementById("charts");
  const words = location.hash.slice(1).split(",");
  const state = {
    axis: ["step", "tokens", "seconds"].find((name) => words.includes(name)) || "step",
    log: words.includes("log"),
  };
  const LEFT = 58, RIGHT = 14, TOP = 8, BOTTOM = 38;

  function svg(parent, name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }
  function html(parent, name, classes, text) {
    const made = document.createElement(name);
    made.className = classes;
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }

  const plain = (value, digits) => String(Number(value.toPrecision(digits)));
  function scaled(value, base, units, digits) {
    let power = 0;
    while (Math.abs(value) >= base * 0.9995 && power < units.length - 1) { value /= base; power += 1; }
    return (plain(value, Math.max(4, digits)) + " " + units[power]).trim();
  }
  // At least so many digits.
  function told(value, unit, digits = 0) {
    if (unit === "whole") return String(Math.round(value));
    if (unit === "si") return scaled(value, 1000, ["", "k", "M", "G", "T", "P"], digits);
    if (unit === "bytes") return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], digits);
    if (unit === "percent") return plain(100 * value, Math.max(3, digits)) + " %";
    if (unit === "time") {
      if (value < 120) return plain(value, Math.max(3, digits)) + " s";
      if (value < 7200) return plain(value / 60, Math.max(3, digits)) + " min";
      return plain(value / 3600, Math.max(4, digits)) + " h";
    }
    const size = Math.abs(value), isPlain = !size || (size >= 1e-3 && size < 1e6);
    return isPlain ? plain(value, Math.max(5, digits)) : value.toExponential(Math.max(2, digits - 1));
  }
  // Of ticks, with the digits that tell each from the next.
  function labels(marks, unit) {
    const apart = Math.min(...marks.slice(1).map((value, i) => value - marks[i]));
    const digits = Math.ceil(Math.log10(Math.max(...marks.map(Math.abs)) / apart)) + 2;
    return marks.map((value) => told(value, unit, Math.min(digits, 15)));
  }
  const axisUnit = () => ({ step: "si", tokens: "si", seconds: "time" })[state.axis];
  const axisName = () => ({ step: "step", tokens: "tokens", seconds: "time" })[state.axis];

  function ticks(low, high, count, unit) {
    const rough = (high - low) / count || 1;
    let step;
    if (unit === "time" && rough > 1) {
      const spans = [2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
      step = spans.find((span) => span >= rough) || Math.ceil(rough / 86400) * 86400;
    } else {
      let power = 10 ** Math.floor(Math.log10(rough));
      if (unit === "bytes" && rough > 1) power = 2 ** (10 * Math.floor(Math.log2(rough) / 10)) *
        10 ** Math.floor(Math.log10(rough / 2 ** (10 * Math.floor(Math.log2(rough) / 10))));
      step = [1, 2, 2.5, 5, 10].map((times) => times * power).find((size) => size >= rough * 0.999);
    }
    const found = [];
    for (let n = Math.ceil(low / step); n * step <= high * (1 + 1e-9) + 1e-300; n += 1) found.push(n * step);
    return found;
  }
  function logTicks(low, high) {
    if (high / low < 8) return ticks(low, high, 5, "number").filter((value) => value > 0);
    const found = [], every = Math.ceil(Math.log10(high / low) / 6);
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every)
      for (const times of high / low < 200 ? [1, 2, 5] : [1])
        if (times * 10 ** power >= low && times * 10 ** power <= high) found.push(times * 10 ** power);
    return found;
  }

  // One for all charts: what lies below each other happened at the same step.
  function across() {
    const x = [Infinity, -Infinity];
    for (const chart of charts)
      for (const series of chart.series) {
        x[0] = Math.min(x[0], series[state.axis][0]); x[1] = Math.max(x[1], series[state.axis].at(-1));
      }
    if (x[0] === x[1]) x[1] = x[0] + 1;
    return x;
  }
  function extent(chart) {
    const x = across(), y = [Infinity, -Infinity];
    for (const series of chart.series)
      series.y.forEach((value, i) => {
        if (state.log && value <= 0) return;
        const error = series.error ? series.error[i] : 0;
        y[0] = Math.min(y[0], state.log ? value : value - error); y[1] = Math.max(y[1], value + error);
      });
    if (y[0] > y[1]) return null;
    if (y[0] === y[1]) { const some = Math.abs(y[0]) * 0.05 || 1; y[0] -= some; y[1] += some; }
    else if (!state.log) { const some = (y[1] - y[0]) * 0.04; y[0] = y[0] >= 0 && y[0] < some ? 0 : y[0] - some; y[1] += some; }
    return { x, y };
  }

  function draw(place) {
    const { chart, picture } = place;
    picture.replaceChildren();
    const width = picture.clientWidth, height = place.isFirst ? 320 : 210;
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("height", height);
    const range = extent(chart);
    if (!range || width < 80) return;
    const wide = width - LEFT - RIGHT, down = height - TOP - BOTTOM;
    const px = (value) => LEFT + (value - range.x[0]) / (range.x[1] - range.x[0]) * wide;
    const of = state.log ? Math.log : (value) => value;
    const py = (value) => TOP + (1 - (of(value) - of(range.y[0])) / (of(range.y[1]) - of(range.y[0]))) * down;
    const marks = state.log ? logTicks(...range.y) : ticks(...range.y, 5, chart.unit);
    const names = labels(marks, chart.unit);
    marks.forEach((value, i) => {
      svg(picture, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(value), y2: py(value) });
      svg(picture, "text", { class: "tick", x: LEFT - 6, y: py(value) + 4, "text-anchor": "end" }, names[i]);
    });
    const columns = ticks(...range.x, Math.max(3, Math.floor(wide / 80)), axisUnit());
    const below = labels(columns, axisUnit());
    columns.forEach((value, i) => {
      svg(picture, "line", { class: "grid", x1: px(value), x2: px(value), y1: TOP, y2: TOP + down });
      svg(picture, "text", { class: "tick", x: px(value), y: height - BOTTOM + 16, "text-anchor": "middle" }, below[i]);
    });
    svg(picture, "text", { class: "tick axis", x: LEFT + wide / 2, y: height - 4, "text-anchor": "middle" }, axisName());
    for (const series of chart.series) curve(picture, series, px, py);
    const cross = svg(picture, "g", {});
    place.show = (event) => show(place, cross, event, { px, py, width, down });
    place.hide = () => { cross.replaceChildren(); place.tip.hidden = true; };
  }
  const look = (series) => series.kind + " dash" + series.dash;
  function curve(picture, series, px, py) {
    const parts = [], group = svg(picture, "g", { class: "s" + series.colour });
    let pen = "M";
    series.y.forEach((value, i) => {
      if (state.log && value <= 0) { pen = "M"; return; }
      const x = px(series[state.axis][i]), y = py(value);
      parts.push(pen + x.toFixed(1) + " " + y.toFixed(1));
      pen = "L";
      if (series.kind !== "dots" || series.y.length > 200) return;
      svg(group, "circle", { class: "dot", cx: x, cy: y, r: 2.6 });
      if (!series.error || !series.error[i] || state.log && value <= series.error[i]) return;
      svg(group, "line", { class: "error", x1: x, x2: x, y1: py(value - series.error[i]), y2: py(value + series.error[i]) });
    });
    svg(group, "path", { class: "curve " + look(series), d: parts.join("") });
  }

  function nearest(values, wanted) {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
  }
  function show(place, cross, event, at) {
    const picture = place.picture.getBoundingClientRect(), mouse = event.clientX - picture.left;
    const { chart, tip } = place;
    cross.replaceChildren();
    tip.replaceChildren();
    const low = Math.min(...chart.series.map((s) => s[state.axis][0]));
    const high = Math.max(...chart.series.map((s) => s[state.axis].at(-1)));
    const span = at.px(high) - at.px(low) || 1;
    const wanted = low + (mouse - at.px(low)) / span * (high - low);
    const found = chart.series.map((series) => ({ series, i: nearest(series[state.axis], wanted) }));
    const distance = ({ series, i }) => Math.abs(series[state.axis][i] - wanted);
    const first = found.reduce((best, each) => (distance(each) < distance(best) ? each : best));
    const x = at.px(first.series[state.axis][first.i]);
    svg(cross, "line", { class: "cross", x1: x, x2: x, y1: TOP, y2: TOP + at.down });
    const unit = state.axis === "step" ? "whole" : axisUnit();
    html(tip, "div", "quiet", axisName() + " " + told(first.series[state.axis][first.i], unit));
    for (const { series, i } of found) {
      const value = series.y[i];
      let text = series.name + " " + told(value, chart.unit);
      if (series.error && series.error[i]) text += " ±" + told(series.error[i], chart.unit);
      html(tip, "div", "key s" + series.colour + " " + look(series), text);
      if (!state.log || value > 0)
        svg(svg(cross, "g", { class: "s" + series.colour }), "circle",
          { class: "dot", cx: at.px(series[state.axis][i]), cy: at.py(value), r: 3.5 });
    }
    tip.hidden = false;
    const card = tip.parentNode.getBoundingClientRect(), isLeft = x < at.width / 2;
    const beside = picture.left - card.left + x;
    tip.style.top = picture.top - card.top + "px";
    tip.style.left = isLeft ? beside + 12 + "px" : "auto";
    tip.style.right = isLeft ? "auto" : card.width - beside + 12 + "px";
  }

  const places = charts.map((chart, number) => {
    const card = html(box, "div", "card");
    html(card, "h3", "", chart.title);
    const legend = html(card, "div", "legend");
    if (chart.has_legend)
      for (const series of chart.series) html(legend, "span", "key s" + series.colour + " " + look(series), series.name);
    const picture = svg(card, "svg", { role: "img", "aria-label": chart.title });
    const tip = html(card, "div", "tip");
    tip.hidden = true;
    const place = { chart, picture, tip, isFirst: number === 0, show: () => {}, hide: () => {} };
    for (const name of ["pointermove", "pointerdown"]) picture.addEventListener(name, (event) => place.show(event));
    picture.addEventListener("pointerleave", () => place.hide());
    return place;
  });
  const drawAll = () => places.forEach(draw);

  for (const input of document.querySelectorAll(".controls input")) {
    input.checked = input.type === "radio" ? input.value === state.axis : state.log;
    input.addEventListener("change", () => {
      if (input.type === "radio") state.axis = input.value; else state.log = input.checked;
      history.replaceState(null, "", "#" + state.axis + (state.log ? ",log" : ""));
      drawAll();
    });
  }
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth === width) return;
    width = box.clientWidth;
    drawAll();
  }).observe(box);
})();
