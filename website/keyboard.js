// Code blocks and tables that are wider than the page scroll; a reader without a mouse reaches them with the Tab key.
document$.subscribe(() => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
  }
});
