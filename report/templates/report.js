"use strict";
// The page is whole without this script, which adds sorting, filtering, a theme switch and copying.
(() => {
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  const UNITS = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };

  /** The first number of a cell such as "1,234 [1,200, 1,300] images/s"; NaN for a blank. */
  const numeric = (text) => {
    const digits = /^-?[\d,]*\.?\d+(e-\d+)?/.exec(text);
    const unit = /\b[KMG]iB\b/.exec(text);
    return digits ? parseFloat(digits[0].replaceAll(",", "")) * (unit ? UNITS[unit[0]] : 1) : NaN;
  };

  /** Orders cells; blanks stay last whichever way the column is sorted. */
  const comparison = (isNumber, sign) => {
    const collator = new Intl.Collator("en", { numeric: true });
    return ({ text: a }, { text: b }) => {
      if (!a || !b) return Number(!a) - Number(!b);
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

  /** One box for all tables of cases and all marks of a run; what does not match goes, or fades. */
  const filterable = (article) => {
    const ofCases = [...article.querySelectorAll("[data-grid] table")].filter(
      (table) => table.tHead.rows[0].cells[0].textContent === "Case",
    );
    const [first] = ofCases.map((table) => table.tBodies[0].rows.length);
    if (!(first > 1)) return;
    const lower = (element) => [...(element.cells ?? [element])].map((part) => part.textContent).join(" ").toLowerCase();
    const textsOf = (elements) => elements.map((element) => ({ element, text: lower(element) }));
    const rows = ofCases.map((table) => textsOf([...table.tBodies[0].rows]));
    const marks = [...article.querySelectorAll(".tip")].map((element) => ({
      element,
      text: element.querySelector("title").textContent.toLowerCase(),
    }));
    const title = article.querySelector("h1").textContent;
    const box = make("input", { type: "search", placeholder: "Filter cases", autocomplete: "off" });
    box.setAttribute("aria-label", `Filter cases of ${title}`);
    const status = make("span", { className: "status" });
    status.setAttribute("role", "status");
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      const matches = ({ text }) => words.every((word) => text.includes(word));
      for (const row of rows.flat()) row.element.hidden = !matches(row);
      for (const mark of marks) mark.element.classList.toggle("faded", !matches(mark));
      status.textContent = words.length ? `${rows[0].filter(matches).length} of ${first} cases` : "";
    });
    article.querySelector(".contents").append(make("span", { className: "filter" }, status, box));
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
  for (const article of document.querySelectorAll("article")) filterable(article);
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
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll(".fold")) fold.open = true;
  });
  document.body.prepend(themeSwitch());
})();
