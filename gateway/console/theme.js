// Applies the chosen theme before the page is drawn. A classic script, because modules run after the first drawing.
"use strict";
try {
  const theme = localStorage.getItem("yardstick.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // without storage, the system's theme is used
}
