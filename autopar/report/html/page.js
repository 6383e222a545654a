"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const whole = [0, Math.max(1, data.end + Math.round(data.optimizer_seconds * 1e9))];
  let range = [...whole];
  const OPERATORS = ["#3b6fb6", "#14a3a0", "#a8b1bd"]; // of data.operators
  const OPTIMIZER = "#8e63b8", WAITS = "#f2b8bd", OTHER = "#52796f";
  const KINDS = {
    all_reduce: "#d1495b", all_gather: "#e0912f", reduce_scatter: "#3c9d6d", all_to_all: "#d670a8", shift: "#6b5bd2",
    exchange: OTHER, rotate: "#6b5bd2",
  };
  const ROW = 50, TOP = 4, AXIS = 24, GAP = 16;
  const FINE = 4, WINDOW = 24; // pixels: narrower events than FINE at the mean are drawn as shares of a WINDOW
  let LABEL = 76;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // ---- figures as the page writes them
  const digits = v => v >= 1000 ? Math.round(v).toLocaleString("en-US") : v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2);
  const time = ns => ns <= 0 ? "0" : ns >= 1e9 ? digits(ns / 1e9) + " s" : ns >= 1e6 ? digits(ns / 1e6) + " ms" : digits(ns / 1e3) + " us";
  const size = b => {
    for (const [unit, of] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (b >= of) return digits(b / of) + " " + unit;
    return Math.round(b) + " B";
  };
  const colourOf = e => {
    const op = data.words[e[3]];
    return e[0] === 0 && e.length > 7 ? OPERATORS[e[7]] : KINDS[op.startsWith("collective.") ? op.slice(11) : op] || OTHER;
  };

  // ---- canvases
  const streams = document.getElementById("streams"), memory = document.getElementById("memory");
  streams.style.height = TOP + ROW * data.streams.length + AXIS + "px";
  const byStream = data.streams.map((_, k) => data.events.filter(e => e[0] === k).sort((a, b) => a[1] - b[1]));
  const stalls = data.stalls.slice().sort((a, b) => a[0] - b[0]);
  const before = [0, ...data.kinds.map(() => 0)]; // each row says what it has more than the one before
  const moments = data.moments.map(row => {
    before[0] += row[0];
    data.kinds.forEach((_, i) => { before[1 + i] += row[4 + i] || 0; });
    return [before[0], row[1], row[2], row[3], ...before.slice(1)];
  });
  const heldAt = m => m.slice(4).reduce((a, b) => a + b, 0);
  const most = Math.max(...moments.map(heldAt), 1);
  const peak = moments.find(m => heldAt(m) === most);
  const limited = data.limit && data.limit < 4 * most;
  const top = 1.08 * (limited ? Math.max(data.limit, most) : most);

  const begin = canvas => {
    const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
    canvas.width = Math.max(1, Math.round(box.width * ratio));
    canvas.height = Math.max(1, Math.round(box.height * ratio));
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, box.width, box.height);
    g.font = "13px system-ui, sans-serif";
    LABEL = box.width < 600 ? 60 : 76;
    return [g, box.width, box.height];
  };
  const ink = () => dark.matches ? "#d7dde6" : "#1c2430";
  const scale = width => ns => LABEL + (ns - range[0]) / (range[1] - range[0]) * (width - LABEL - 4);
  const first = (rows, at, end) => { // the first row that ends after a time
    let low = 0, high = rows.length;
    while (low < high) { const mid = (low + high) >> 1; if (end(rows[mid]) <= at) low = mid + 1; else high = mid; }
    return low;
  };
  const nice = (span, most) => { // the smallest round step of which a span has at most so many
    const power = 10 ** Math.floor(Math.log10(span / most));
    return [1, 2, 5, 10].map(k => k * power).find(step => span / step <= most) || 10 * power;
  };
  const line = (g, colour, alpha, ...box) => { g.fillStyle = colour; g.globalAlpha = alpha; g.fillRect(...box); g.globalAlpha = 1; };
  const ticks = (g, x, width, y) => { // as many labels as stand apart
    const span = range[1] - range[0];
    const [unit, ns] = [["s", 1e9], ["ms", 1e6], ["us", 1e3]].find(([, ns]) => range[1] >= ns) || ["ns", 1];
    let label = "", each = 0, wide = 0;
    for (let most = Math.floor((width - LABEL) / 90); ; most--) {
      each = nice(span, Math.max(most, 1));
      const places = Math.max(0, Math.ceil(-Math.log10(each / ns) - 1e-9));
      label = at => at ? (at / ns).toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places }) + " " + unit : "0";
      wide = g.measureText(label(range[1])).width;
      if (most <= 1 || each / span * (width - LABEL) >= wide + GAP) break;
    }
    g.textAlign = "center"; g.textBaseline = "top";
    for (let at = Math.ceil(range[0] / each) * each; at <= range[1]; at += each) {
      const px = x(at), half = g.measureText(label(at)).width / 2;
      line(g, ink(), .12, px, 0, 1, y);
      if (px - half >= LABEL - 8 && px + half <= width) { g.fillStyle = ink(); g.fillText(label(at), px, y + 7); }
    }
  };

  // Colours -> their share of the time in each column of pixels, around it.
  const shares = (spans, x, width) => {
    const columns = Math.max(1, Math.floor(width - LABEL)), found = new Map(), last = Math.min(columns - 1, Math.ceil(x(whole[1]) - LABEL) - 1);
    for (const [from, to, colour] of spans) {
      const left = Math.max(0, x(from) - LABEL), right = Math.min(columns, x(to) - LABEL);
      if (!found.has(colour)) found.set(colour, new Float64Array(columns));
      const row = found.get(colour);
      for (let c = Math.floor(left); c < right; c++) row[c] += Math.min(right, c + 1) - Math.max(left, c);
    }
    for (const [colour, row] of found) {
      const sums = new Float64Array(columns + 1);
      row.forEach((v, c) => { sums[c + 1] = sums[c] + v; });
      found.set(colour, row.map((_, c) => {
        const low = Math.max(0, c - WINDOW / 2), high = Math.min(last, c + WINDOW / 2);
        return c > last ? 0 : (sums[high + 1] - sums[low]) / (high + 1 - low);
      }));
    }
    return found;
  };
  const within = (rows, start, end) => {
    const found = [];
    for (let k = first(rows, range[0], end); k < rows.length && start(rows[k]) < range[1]; k++) found.push(rows[k]);
    return found;
  };

  const drawStreams = () => {
    const [g, width, height] = begin(streams), x = scale(width);
    let isShared = false;
    ticks(g, x, width, height - AXIS);
    data.streams.forEach((name, row) => {
      const y = TOP + row * ROW, tall = ROW - 8, left = LABEL;
      line(g, ink(), .05, left, y + 4, width - left, tall);
      g.fillStyle = ink(); g.textAlign = "left"; g.textBaseline = "middle";
      g.fillText(name, 2, y + ROW / 2, LABEL - 8);
      const spans = within(byStream[row], e => e[1], e => e[1] + e[2]).map(e => [e[1], e[1] + e[2], colourOf(e)]);
      if (row === 0) {
        spans.push(...within(stalls, s => s[0], s => s[0] + s[1]).map(s => [s[0], s[0] + s[1], WAITS]));
        if (range[1] > data.end) spans.push([data.end, whole[1], OPTIMIZER]);
      }
      const busy = spans.reduce((sum, [from, to]) => sum + Math.min(to, range[1]) - Math.max(from, range[0]), 0);
      if (spans.length > 8 && busy / (range[1] - range[0]) * (width - LABEL) < FINE * spans.length) {
        isShared = true;
        const below = new Float64Array(Math.ceil(width));
        const order = [...OPERATORS, OPTIMIZER, ...Object.values(KINDS), OTHER, WAITS];
        const found = [...shares(spans, x, width)].sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
        for (const [colour, part] of found) {
          g.fillStyle = colour;
          part.forEach((v, c) => {
            const bottom = y + 4 + tall * (1 - below[c]), high = tall * Math.min(v, 1 - below[c]);
            g.fillRect(LABEL + c, bottom - high, 1, high);
            below[c] += Math.min(v, 1 - below[c]);
          });
        }
        return;
      }
      for (const [from, to, colour] of spans) {
        const start = Math.max(LABEL, x(from)), end = Math.min(width, x(to));
        g.fillStyle = colour;
        g.fillRect(start, y + 4, Math.max(end - start - (end - start > 3 ? .6 : 0), .5), tall);
      }
    });
    const middle = x(data.backward);
    if (middle > LABEL && middle < width) line(g, ink(), .7, middle, 0, 1, height - AXIS);
    document.getElementById("shares").hidden = !isShared;
    document.getElementById("range").textContent = `${time(range[0])} to ${time(range[1])} of ${time(whole[1])}`;
  };

  const drawMemory = () => {
    const [g, width, height] = begin(memory), x = scale(width), floor = height - AXIS;
    const y = bytes => floor - bytes / top * (floor - 4);
    const start = Math.max(0, first(moments, range[0], m => m[0]) - 1), columns = new Map();
    for (let k = start; k < moments.length && moments[k][0] <= range[1]; k++) { // the largest of each column of pixels
      const column = Math.max(LABEL, Math.floor(x(moments[k][0])));
      if (!columns.has(column) || heldAt(columns.get(column)) < heldAt(moments[k])) columns.set(column, moments[k]);
    }
    const shown = [...columns].sort((a, b) => a[0] - b[0]);
    shown.forEach(([column, m], k) => {
      const right = k + 1 < shown.length ? shown[k + 1][0] : x(Math.min(range[1], whole[1]));
      let below = 0;
      data.kinds.forEach((_, i) => {
        const bytes = m[4 + i];
        g.fillStyle = data.colours[i];
        g.fillRect(column, y(below + bytes), Math.max(right - column, 1), y(below) - y(below + bytes));
        below += bytes;
      });
    });
    ticks(g, x, width, floor);
    const [unit, per] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, per]) => top >= per) || ["B", 1];
    const each = nice(top / per, 5) * per;
    g.textAlign = "right"; g.textBaseline = "middle";
    for (let at = 0; at <= top; at += each) {
      line(g, ink(), .12, LABEL, y(at), width - LABEL, 1);
      g.fillStyle = ink(); g.fillText(at ? `${+(at / per).toPrecision(3)} ${unit}` : "0", LABEL - 6, Math.max(8, Math.min(y(at), floor - 4)), LABEL - 8);
    }
    g.textAlign = "left";
    const write = (text, left, middle) => { // on a ground of its own, since it may lie on a line
      const wide = g.measureText(text).width;
      line(g, getComputedStyle(document.body).getPropertyValue("--card"), .8, left - 3, middle - 9, wide + 6, 18);
      g.fillStyle = ink(); g.fillText(text, left, middle);
    };
    const wideOf = text => g.measureText(text).width;
    if (limited) {
      const text = `limit ${size(data.limit)}`, at = y(data.limit);
      line(g, "#d1495b", 1, LABEL, at, width - LABEL, 1.5);
      write(text, width - wideOf(text) - 6, at + (at > 24 ? -11 : 12));
    }
    const px = x(peak[0]), text = `peak ${size(most)}`, at = y(most);
    if (px >= LABEL && px <= width) {
      g.fillStyle = ink(); g.beginPath(); g.arc(px, at, 3, 0, 7); g.fill();
      const crowded = limited && Math.abs(y(data.limit) - at) < 40 || at < 24;
      write(text, Math.min(Math.max(px - wideOf(text) / 2, LABEL + 4), width - wideOf(text) - 6), crowded ? Math.max(at, y(data.limit || 0)) + 26 : at - 14);
    }
  };
  const draw = () => { drawStreams(); drawMemory(); };

  // ---- moving
  const zoom = (factor, at) => {
    const span = Math.min(whole[1], Math.max(1000, (range[1] - range[0]) * factor));
    const part = (at - range[0]) / (range[1] - range[0]);
    const start = Math.min(Math.max(0, at - part * span), whole[1] - span);
    range = [start, start + span];
    draw();
  };
  const timeAt = (canvas, event) => {
    const box = canvas.getBoundingClientRect();
    return range[0] + (event.clientX - box.left - LABEL) / (box.width - LABEL - 4) * (range[1] - range[0]);
  };
  const middle = () => (range[0] + range[1]) / 2;
  const views = {
    whole: () => { range = [...whole]; draw(); },
    forward: () => { range = [0, Math.max(1, data.backward)]; draw(); },
    backward: () => { range = [data.backward, whole[1]]; draw(); },
    in: () => zoom(.5, middle()), out: () => zoom(2, middle()),
  };
  document.querySelectorAll("[data-zoom]").forEach(b => b.addEventListener("click", () => views[b.dataset.zoom]()));
  const show = (event, text) => {
    tip.textContent = text; tip.hidden = !text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  };
  const overStreams = event => {
    const at = timeAt(streams, event), row = Math.floor((event.clientY - streams.getBoundingClientRect().top - TOP) / ROW);
    const rows = byStream[row] || [], e = rows[first(rows, at, r => r[1] + r[2])];
    if (!e || e[1] > at) {
      const s = row === 0 ? stalls[first(stalls, at, r => r[0] + r[1])] : null;
      if (s && s[0] <= at) return `waits for ${data.streams[s[2]]}, ${time(s[1])}`;
      return row === 0 && at >= data.end && at <= whole[1] ? `optimizer, ${time(whole[1] - data.end)}` : "";
    }
    const lines = [data.words[e[3]], data.words[e[4]], `${time(e[2])} from ${time(e[1])} on`];
    if (e[6] && Math.abs(e[6] - e[2]) > 1) lines.push(`alone ${time(e[6])}`);
    if (e[5]) lines.push(size(e[5]));
    return lines.filter(Boolean).join("\n");
  };
  const overMemory = event => {
    const m = moments[Math.max(0, first(moments, timeAt(memory, event), r => r[0]) - 1)];
    if (!m) return "";
    const parts = data.kinds.map((kind, i) => [kind, m[4 + i]]).filter(p => p[1]).map(([kind, b]) => `${kind} ${size(b)}`);
    return [`${size(heldAt(m))}, ${data.words[m[1]]}`, [data.words[m[2]], data.words[m[3]]].filter(Boolean).join(" of "), ...parts].filter(Boolean).join("\n");
  };
  [[streams, overStreams], [memory, overMemory]].forEach(([canvas, over]) => {
    let from = null;
    canvas.addEventListener("wheel", e => { e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : .8, timeAt(canvas, e)); }, { passive: false });
    canvas.addEventListener("pointerdown", e => { from = [e.clientX, ...range]; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointerup", () => { from = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("pointermove", e => {
      if (!from) { show(e, over(e)); return; }
      const span = from[2] - from[1], box = canvas.getBoundingClientRect();
      const moved = (from[0] - e.clientX) / (box.width - LABEL - 4) * span;
      const start = Math.min(Math.max(0, from[1] + moved), whole[1] - span);
      range = [start, start + span];
      draw();
    });
    canvas.addEventListener("dblclick", views.whole);
  });

  // ---- keys of colours
  const key = (where, items) => items.forEach(([colour, words]) => {
    const span = document.createElement("span"), box = document.createElement("i");
    box.className = "key"; box.style.background = colour;
    span.append(box, words); document.getElementById(where).append(span);
  });
  const used = new Map(data.events.filter(e => e[0]).map(e => [data.words[e[3]].replace("collective.", ""), colourOf(e)]));
  key("streams-key", [
    ...data.operators.map((words, k) => [OPERATORS[k], words]).filter((_, k) => data.events.some(e => e[0] === 0 && e[7] === k)),
    ...(data.optimizer_seconds ? [[OPTIMIZER, "optimizer"]] : []), ...(stalls.length ? [[WAITS, "waits"]] : []),
    ...[...used].map(([words, colour]) => [colour, words]),
  ]);
  key("memory-key", data.kinds.map((kind, i) => [data.colours[i], kind]).filter((_, i) => moments.some(m => m[4 + i])));

  // ---- searching and folding
  const details = [...document.querySelectorAll("details")];
  const asAtFirst = details.map(d => d.open);
  document.getElementById("unfold").addEventListener("click", () => details.forEach(d => { d.open = true; }));
  document.getElementById("fold").addEventListener("click", () => details.forEach(d => { d.open = false; }));
  const rows = [...document.querySelectorAll("tr.parameter, tr.site")];
  document.getElementById("search").addEventListener("input", event => {
    const wanted = event.target.value.trim().toLowerCase();
    rows.forEach(row => row.classList.toggle("hidden", Boolean(wanted) && !row.dataset.name.toLowerCase().includes(wanted)));
    details.forEach((d, k) => {
      const rowsIn = d.querySelectorAll("tr.parameter, tr.site");
      const has = [...rowsIn].some(row => !row.classList.contains("hidden"));
      d.classList.toggle("hidden", Boolean(wanted) && rowsIn.length > 0 && !has);
      d.open = wanted ? has : asAtFirst[k];
    });
  });

  new ResizeObserver(draw).observe(document.body);
  dark.addEventListener("change", draw);
  draw();
})();
