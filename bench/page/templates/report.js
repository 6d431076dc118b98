"use strict";
// The page is whole without this script, which adds sorting, filtering, saving, copying and switches.
(() => {
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  const UNITS = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };

  /** The first number of a cell such as "1,234 [1,200, 1,300] images/s"; NaN for a blank. */
  const numeric = (text) => {
    const digits = /^[-+]?[\d,]*\.?\d+(e-\d+)?/.exec(text);
    const unit = /\b[KMG]iB\b/.exec(text);
    return digits ? parseFloat(digits[0].replaceAll(",", "")) * (unit ? UNITS[unit[0]] : 1) : NaN;
  };

  /** Orders cells; blanks, and words in a column of numbers, stay last whichever way it is sorted. */
  const comparison = (isNumber, sign) => {
    const collator = new Intl.Collator("en", { numeric: true });
    return ({ text: a }, { text: b }) => {
      const [first, second] = [a, b].map((text) => (isNumber ? Number.isNaN(numeric(text)) : !text));
      if (first || second) return Number(first) - Number(second);
      return sign * (isNumber ? numeric(a) - numeric(b) : collator.compare(a, b));
    };
  };

  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  const sortable = (table) => {
    const body = table.tBodies[0];
    const given = [...body.rows];
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, column) => {
      if (header.classList.contains("links")) return;
      const button = make("button", { type: "button", textContent: header.textContent });
      header.replaceChildren(button);
      button.addEventListener("click", () => {
        const order = NEXT[header.getAttribute("aria-sort") ?? "none"];
        for (const other of headers) other.removeAttribute("aria-sort");
        let rows = given;
        if (order !== "none") {
          header.setAttribute("aria-sort", order);
          const compare = comparison(header.classList.contains("number"), order === "ascending" ? 1 : -1);
          rows = given.map((row) => ({ row, text: row.cells[column].textContent.trim() }));
          rows = rows.sort(compare).map(({ row }) => row);
        }
        const fragment = document.createDocumentFragment();
        for (const row of rows) fragment.append(row);
        body.append(fragment);
      });
    });
  };

  /** The words of a name: "DDP, 2 GPUs, cap 25 MiB" as ddp, 2, gpus, cap, 25, mib. */
  const wordsOf = (text) => text.toLowerCase().split(/[\s,()·]+/).filter(Boolean);

  /** Whether a name has these words in their order: numbers whole, of others their beginning. */
  const has = (name, wanted) => {
    let place = 0;
    return wanted.every((word) => {
      const fits = /^[\d.]+$/.test(word) ? (one) => one === word : (one) => one.startsWith(word);
      while (place < name.length && !fits(name[place])) place++;
      return place++ < name.length;
    });
  };

  /** One box for all tables of cases and all marks; what does not match goes, or fades. */
  const filterable = () => {
    const ofCases = [...document.querySelectorAll("[data-grid] table")].filter(
      (table) => table.tHead.rows[0].cells[0].textContent === "Case",
    );
    const named = (element, text) => ({ element, text, name: wordsOf(text) });
    const rows = ofCases.flatMap((table) => [...table.tBodies[0].rows].map((row) => named(row, row.dataset.name ?? row.cells[0].textContent)));
    const marks = [...document.querySelectorAll(".tip")].map((mark) =>
      named(mark, mark.querySelector("title").textContent.split(" · ")[0]),
    );
    const count = (found) => new Set(found.map(({ text }) => text)).size;
    if (!(count(rows) > 1)) return;
    const box = make("input", { type: "search", placeholder: "Filter, such as: cap 25", autocomplete: "off" });
    box.setAttribute("aria-label", "Filter cases by the words of their names");
    const status = make("span", { className: "status" });
    status.setAttribute("role", "status");
    box.addEventListener("input", () => {
      const wanted = wordsOf(box.value);
      const matches = ({ name }) => has(name, wanted);
      for (const row of rows) row.element.hidden = !matches(row);
      for (const mark of marks) mark.element.classList.toggle("faded", !matches(mark));
      status.textContent = wanted.length ? `${count(rows.filter(matches))} of ${count(rows)} cases` : "";
    });
    document.getElementById("tables").after(make("p", { className: "filter" }, box, status));
  };

  /** A figure as a document of its own: its legend and marks in the colours that are seen now. */
  const standalone = (svg) => {
    const copied = svg.cloneNode(true);
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    copied.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copied.setAttribute("width", width);
    copied.setAttribute("height", height);
    const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [name, value] of Object.entries({ width, height, style: "fill: var(--paper)" })) paper.setAttribute(name, value);
    copied.prepend(paper);
    copied.style.fontFamily = "sans-serif";
    const probe = document.body.appendChild(make("i"));
    const seen = new XMLSerializer().serializeToString(copied).replace(/var\((--[a-z-]+)\)/g, (whole, name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    });
    probe.remove();
    return { text: seen, width, height };
  };

  const save = (name, blob) => {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };

  const SCALE = 4; // 4 pixels a point: 1,600 across, as for a slide

  const savable = (figure) => {
    const svg = figure.querySelector("svg");
    const saving = {
      SVG: ({ text }) => save(`${figure.id}.svg`, new Blob([text], { type: "image/svg+xml" })),
      PNG: async ({ text, width, height }) => {
        const image = make("img", { src: `data:image/svg+xml,${encodeURIComponent(text)}` });
        await image.decode();
        const canvas = make("canvas", { width: width * SCALE, height: height * SCALE });
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob((blob) => save(`${figure.id}.png`, blob));
      },
    };
    const buttons = Object.entries(saving).map(([name, saved]) => {
      const button = make("button", { type: "button", textContent: name });
      button.setAttribute("aria-label", `Save “${figure.querySelector("h3").textContent}” as ${name}`);
      button.addEventListener("click", () => saved(standalone(svg)));
      return button;
    });
    figure.querySelector(".head").append(make("span", { className: "save" }, ...buttons));
  };

  /** A button over each entry of a legend, which shows and hides its series; the drawing stays an image. */
  const switchable = (drawing) => {
    const frame = drawing.getBoundingClientRect();
    if (!frame.width || drawing.querySelector(".key")) return;
    const entries = Map.groupBy(drawing.querySelectorAll("[data-key]"), (entry) => entry.dataset.key);
    for (const [series, parts] of entries) {
      const drawn = [...drawing.querySelectorAll("[data-series]")].filter((part) => part.dataset.series === series);
      if (!drawn.length) continue;
      const boxes = parts.map((part) => part.getBoundingClientRect());
      const [left, top] = ["left", "top"].map((side) => Math.min(...boxes.map((box) => box[side])));
      const [right, bottom] = ["right", "bottom"].map((side) => Math.max(...boxes.map((box) => box[side])));
      const button = make("button", { type: "button", className: "key", title: `Show or hide ${series}` });
      button.setAttribute("aria-pressed", "true");
      button.setAttribute("aria-label", series);
      const share = (length, whole) => `${(100 * length) / whole}%`;
      Object.assign(button.style, {
        left: share(left - frame.left, frame.width),
        top: share(top - frame.top, frame.height),
        width: share(right - left, frame.width),
        height: share(bottom - top, frame.height),
      });
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", shown);
        for (const part of drawn) part.style.display = shown ? "" : "none";
        for (const part of parts) part.classList.toggle("faded", !shown);
      });
      drawing.append(button);
    }
  };

  const copy = async (pre, button) => {
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      // Some browsers keep the clipboard from a page on disk, but not from a selection.
      getSelection().selectAllChildren(pre);
      if (!document.execCommand("copy")) return;
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  };

  /** What is kept between visits; a browser that forbids it changes nothing else. */
  const remembered = (value) => {
    try {
      if (value !== undefined) localStorage.setItem("report-theme", value);
      return localStorage.getItem("report-theme") ?? "auto";
    } catch {
      return value ?? "auto";
    }
  };

  const themeSwitch = () => {
    const names = ["auto", "light", "dark"];
    const choice = make("select", {}, ...names.map((name) => new Option(name, name)));
    const apply = (name) => (document.documentElement.dataset.theme = choice.value = name);
    const before = remembered();
    apply(names.includes(before) ? before : "auto");
    choice.addEventListener("change", () => apply(remembered(choice.value)));
    return make("label", { className: "theme" }, "Theme ", choice);
  };

  for (const table of document.querySelectorAll("[data-grid] table")) {
    if (table.tBodies[0].rows.length > 1) sortable(table);
  }
  filterable();
  for (const figure of document.querySelectorAll("figure")) savable(figure);
  document.querySelectorAll(".drawing").forEach(switchable);
  for (const fold of document.querySelectorAll(".fold")) {
    fold.addEventListener("toggle", () => fold.querySelectorAll(".drawing").forEach(switchable));
  }
  for (const pre of document.querySelectorAll(".command pre")) {
    const button = make("button", { type: "button", textContent: "Copy" });
    button.addEventListener("click", () => copy(pre, button));
    pre.after(button);
  }
  // What a link leads to may lie in a fold within a fold.
  const unfold = (hash) => {
    const target = hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1)));
    for (let fold = target && target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", () => unfold(location.hash));
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    if (link) unfold(link.hash);
  });
  unfold(location.hash);
  document.body.prepend(themeSwitch());
})();
