"""The page's style sheet: light, one column on a phone; on a desk two figures, or two samples,
or three tables abreast."""

CSS = """
:root { --ink: #1d2430; --soft: #5b6770; --line: #e3e6ea; --paper: #ffffff; --tint: #f6f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .8rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 75ch; }
.soft, figcaption, caption { color: var(--soft); font-size: .9rem; }
.run { padding: .5rem 0; max-width: none; overflow-wrap: anywhere; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }
.badge { display: inline-block; padding: 0 .5em; border-radius: .6em; font-size: .8rem;
  background: #e8eef7; color: #23477a; }
.badge.finished { background: #e3f2e8; color: #1f5b35; }
.badge.diverged { background: #fbe4e1; color: #8c1d14; }
.badge.interrupted { background: #fdf1d6; color: #6b4e00; }
.note { background: #fdf1d6; border-left: 4px solid #c9a227; padding: .6rem .9rem; margin: .6rem 0;
  overflow-wrap: anywhere; white-space: pre-wrap; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid #3b6fb6; }
table { width: 100%; border-collapse: collapse; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
th:last-child, td:last-child { padding-right: 0; }
thead th { white-space: nowrap; }
tbody th { font-weight: 500; color: var(--soft); position: sticky; left: 0;
  background: var(--paper); }
table.compared th:first-child { width: 30%; }
table.text th, table.text td { text-align: left; }
table.text td:last-child { overflow-wrap: anywhere; }
.tables { display: grid; gap: 24px 44px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
.figures, .samples { display: grid; gap: 20px 28px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
.samples { gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; max-width: 660px; }
figure img { width: 100%; height: auto; display: block; }
.sample { background: var(--tint); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem .9rem; }
.sample pre { margin: .3rem 0 0; }
pre { font: .85rem/1.45 ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
details { border: 1px solid var(--line); border-radius: 8px; padding: .5rem .9rem;
  margin: .6rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
@media print { details { border: none; } figure, .sample { break-inside: avoid; } }
"""
