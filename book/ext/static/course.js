// Boxes that scroll sideways must be reachable by keyboard, and a formula wider than the column becomes such a box.
(() => {
  const boxes = ".cell_output .output, .highlight pre, div.math, mjx-container, .pst-scrollable-table-container";
  const mark = () => {
    const column = document.querySelector("article section")?.clientWidth ?? innerWidth;
    document.querySelectorAll("mjx-container:not([display])").forEach((formula) => {
      formula.classList.toggle("course-wide", formula.firstElementChild.getBoundingClientRect().width > column);
    });
    document.querySelectorAll(boxes).forEach((box) => {
      if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    });
  };
  window.addEventListener("load", () => (window.MathJax?.startup?.promise ?? Promise.resolve()).then(mark));
  window.addEventListener("resize", mark);
})();
