// Before anything is drawn: the reader's choice, else the system's. `?theme=dark` is for pictures of the page.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let asked = new URLSearchParams(location.search).get("theme");
  const chosen = () => asked ?? localStorage.getItem("kendall-theme");
  const put = () => {
    document.documentElement.dataset.theme = chosen() ?? (system.matches ? "dark" : "light");
    const button = document.getElementById("theme");
    if (button) button.textContent = document.documentElement.dataset.theme === "dark" ? "Light" : "Dark";
    dispatchEvent(new Event("themechange"));
  };
  put();
  system.addEventListener("change", put);
  addEventListener("DOMContentLoaded", () => {
    put();
    document.getElementById("theme").addEventListener("click", () => {
      asked = null;
      localStorage.setItem("kendall-theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
      put();
    });
  });
})();
