// What a screen reader and a reader without a mouse need beyond the theme.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  // Code, tables and equations that are wider than the page scroll; the Tab key reaches them.
  const wide = ".md-typeset__scrollwrap, .md-typeset pre > code, .md-typeset table.dataframe, .equation";
  for (const region of document.querySelectorAll(wide)) {
    if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
  }
});
