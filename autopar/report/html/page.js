"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const whole = [0, Math.max(1, data.end + Math.round(data.optimizer_seconds * 1e9))];
  let range = [...whole];
  const KINDS = {
    compute: "#7d8da1", all_reduce: "#d1495b", all_gather: "#3b7dd8", reduce_scatter: "#e0912f",
    all_to_all: "#3c9d6d", shift: "#8e63b8", exchange: "#52796f", rotate: "#8e63b8", waits: "#e8b4bc",
  };
  const ROW = 34, LABEL = 76, TOP = 4, AXIS = 18;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // ---- figures as the page writes them
  const digits = v => v >= 1000 ? Math.round(v).toLocaleString("en-US") : v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2);
  const time = ns => ns <= 0 ? "0" : ns >= 1e9 ? digits(ns / 1e9) + " s" : ns >= 1e6 ? digits(ns / 1e6) + " ms" : digits(ns / 1e3) + " us";
  const size = b => {
    for (const [unit, of] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (b >= of) return digits(b / of) + " " + unit;
    return Math.round(b) + " B";
  };
  const kindOf = op => op.startsWith("collective.") ? op.slice(11) : "compute";

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
  const top = data.limit && data.limit < 4 * most ? Math.max(data.limit, most) : most;

  const begin = canvas => {
    const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
    canvas.width = Math.max(1, Math.round(box.width * ratio));
    canvas.height = Math.max(1, Math.round(box.height * ratio));
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, box.width, box.height);
    g.font = "12px system-ui, sans-serif";
    return [g, box.width, box.height];
  };
  const ink = () => dark.matches ? "#d7dde6" : "#1c2430";
  const scale = width => ns => LABEL + (ns - range[0]) / (range[1] - range[0]) * (width - LABEL - 4);
  const first = (rows, at, end) => { // the first row that ends after a time
    let low = 0, high = rows.length;
    while (low < high) { const mid = (low + high) >> 1; if (end(rows[mid]) <= at) low = mid + 1; else high = mid; }
    return low;
  };
  const ticks = (g, x, width, y) => {
    const step = 10 ** Math.floor(Math.log10((range[1] - range[0]) / 4)), span = range[1] - range[0];
    const each = [1, 2, 5, 10].map(k => k * step).find(k => span / k <= 8) || step * 10;
    g.fillStyle = ink(); g.textAlign = "center"; g.textBaseline = "top";
    for (let at = Math.ceil(range[0] / each) * each; at <= range[1]; at += each) {
      const px = x(at);
      if (px > LABEL + 20 && px < width - 20) { g.fillRect(px, y, 1, 3); g.fillText(time(at), px, y + 4); }
    }
  };

  const drawStreams = () => {
    const [g, width, height] = begin(streams), x = scale(width);
    data.streams.forEach((name, row) => {
      const y = TOP + row * ROW;
      g.fillStyle = ink(); g.textAlign = "left"; g.textBaseline = "middle";
      g.fillText(name, 4, y + ROW / 2, LABEL - 8);
      const rows = byStream[row];
      for (let k = first(rows, range[0], e => e[1] + e[2]); k < rows.length && rows[k][1] < range[1]; k++) {
        const e = rows[k], left = Math.max(LABEL, x(e[1])), right = x(e[1] + e[2]);
        g.fillStyle = KINDS[row === 0 ? "compute" : kindOf(data.words[e[3]])] || "#52796f";
        g.fillRect(left, y + 4, Math.max(right - left - (right - left > 3 ? .6 : 0), .4), ROW - 8);
      }
    });
    for (let k = first(stalls, range[0], s => s[0] + s[1]); k < stalls.length && stalls[k][0] < range[1]; k++) {
      const left = Math.max(LABEL, x(stalls[k][0]));
      g.fillStyle = KINDS.waits;
      g.fillRect(left, TOP + ROW / 2 - 3, Math.max(x(stalls[k][0] + stalls[k][1]) - left, .4), 6);
    }
    const optimizer = x(data.end);
    if (optimizer < width) {
      g.fillStyle = "#8e63b8"; g.globalAlpha = .6;
      g.fillRect(Math.max(LABEL, optimizer), TOP + 4, Math.max(0, x(whole[1]) - Math.max(LABEL, optimizer)), ROW - 8);
      g.globalAlpha = 1;
    }
    const middle = x(data.backward);
    if (middle > LABEL && middle < width) { g.fillStyle = ink(); g.globalAlpha = .5; g.fillRect(middle, 0, 1, height - AXIS); g.globalAlpha = 1; }
    ticks(g, x, width, height - AXIS);
    document.getElementById("range").textContent = `${time(range[0])} to ${time(range[1])} of ${time(whole[1])}`;
  };

  const drawMemory = () => {
    const [g, width, height] = begin(memory), x = scale(width), floor = height - AXIS;
    const y = bytes => floor - bytes / top * (floor - 8);
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
    g.fillStyle = ink(); g.textAlign = "left"; g.textBaseline = "middle";
    g.fillText(size(most), 4, Math.max(8, y(most)), LABEL - 8);
    if (data.limit && data.limit <= top) {
      g.fillStyle = "#c0392b"; g.fillRect(LABEL, y(data.limit), width - LABEL, 1);
      if (Math.abs(y(data.limit) - y(most)) > 12) g.fillText(size(data.limit), 4, Math.max(8, y(data.limit)), LABEL - 8);
    }
    ticks(g, x, width, floor);
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
  const used = new Set(data.events.filter(e => e[0]).map(e => kindOf(data.words[e[3]])));
  key("streams-key", [["#7d8da1", "operators"], ...[...used].map(k => [KINDS[k] || "#52796f", k]), [KINDS.waits, "waits"], ["#8e63b8", "optimizer"]]);
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
