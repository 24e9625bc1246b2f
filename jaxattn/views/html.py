"""report.md as one page for a browser, with everything in it."""

import base64
import html
import itertools
import re
from pathlib import Path

import markdown

from jaxattn.runs import RunError

_KINDS = {".png": "image/png", ".gif": "image/gif"}

_LINE = 40  # characters of a table's cell, above which its column wraps
_CELL = re.compile(r"<(t[hd])([^>]*)>(.*?)</\1>", re.DOTALL)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }}
h1, h2 {{ line-height: 1.2; margin-top: 2.2rem; }}
nav {{ font-size: .9rem; }}
nav ul, nav li {{ display: inline; padding: 0; margin-right: 1rem; }}
a {{ color: #0060a0; }}
img {{ max-width: 100%; height: auto; display: block; margin: 1.6rem 0 .3rem; }}
/* A wide table scrolls inside, its first column stays; a shadow says that there is
   more. Cells of numbers stay on one line, those of words wrap. */
.table {{ overflow-x: auto; margin: 1rem 0; background:
         linear-gradient(to left, #fff 50%, #fff0) right / 2rem 100% no-repeat local,
         linear-gradient(to left, #0003, #0000) right / .8rem 100% no-repeat; }}
table {{ border-collapse: separate; border-spacing: 0; font-size: .88rem;
        font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .55rem; border-bottom: 1px solid #ddd; white-space: nowrap; }}
.words {{ text-align: left !important; }}
td.words {{ white-space: normal; min-width: 15rem; max-width: 26rem; }}
th:first-child, td:first-child {{ position: sticky; left: 0; z-index: 1;
                                 background: #fff; }}
td:first-child {{ text-align: left; }}
@media (max-width: 45rem) {{
  td:first-child {{ white-space: normal; min-width: 6rem; max-width: 9rem;
                   overflow-wrap: break-word; }}
  td.words {{ min-width: 11rem; }}
}}
th {{ border-bottom: 2px solid #888; vertical-align: bottom; }}
th button {{ all: unset; cursor: pointer; font-weight: 600; }}
th button:hover, th button:focus-visible {{ text-decoration: underline; }}
th button::after {{ content: " \\2195"; color: #aaa; }}
th[aria-sort=ascending] button::after {{ content: " \\2191"; color: #000; }}
th[aria-sort=descending] button::after {{ content: " \\2193"; color: #000; }}
tbody tr:hover, tbody tr:hover td:first-child {{ background: #f3f6fa; }}
</style>
</head>
<body>
<nav>{contents}</nav>
{body}
<script>
// A click on a head sorts by that column: by the number that a cell begins with, or by
// name.
function key(cell) {{
  const text = cell.textContent.trim().replace(/(\\d),(?=\\d{{3}})/g, "$1");
  const found = text.match(/^[<>≤≥]?([-+]?\\d+(\\.\\d+)?(e[-+]?\\d+)?)/i);
  const beyond = {{">": 1e-9, "≥": 1e-9, "<": -1e-9, "≤": -1e-9}}[text[0]] ?? 0;
  return found ? parseFloat(found[1]) * (1 + beyond) : NaN;
}}
function compare(a, b, column) {{
  const [x, y] = [a.cells[column], b.cells[column]];
  const named = column === 0 || (isNaN(key(x)) && isNaN(key(y)));
  return named ? x.textContent.localeCompare(y.textContent) : key(x) - key(y);
}}
for (const head of document.querySelectorAll("th")) {{
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {{
    const table = head.closest("table"), column = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    const heads = table.querySelectorAll("th");
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const unknown = row => column > 0 && isNaN(key(row.cells[column]));
    const rows = [...table.tBodies[0].rows].sort((a, b) =>
      unknown(a) - unknown(b) || (down ? -1 : 1) * compare(a, b, column));
    table.tBodies[0].append(...rows);
  }});
}}
</script>
</body>
</html>
"""


def _marked(table: re.Match) -> str:
    """A table whose columns of words are marked, and whose intervals do not break."""
    rows = table[0].split("</tr>")
    wide = {
        column
        for row in rows
        for column, cell in enumerate(_CELL.finditer(row))
        if len(html.unescape(re.sub(r"<.*?>", "", cell[3]))) > _LINE
    }

    def marked(row: str) -> str:
        columns = itertools.count()

        def one(cell: re.Match) -> str:
            kind, attributes, content = cell.groups()
            if next(columns) in wide:
                attributes += ' class="words"'
            content = re.sub(
                r"\[[^][<>]*\]", lambda m: m[0].replace(" ", "&nbsp;"), content
            )
            return f"<{kind}{attributes}>{content}</{kind}>"

        return _CELL.sub(one, row)

    return "</tr>".join(map(marked, rows))


def page(text: str, folder: Path) -> str:
    """A report as one HTML page that needs nothing else, and no network.

    Args:
      text: of report.md.
      folder: that the paths of its pictures start from.

    Returns:
      HTML, with the pictures in it and tables that a click on a head sorts.

    Raises:
      RunError: a picture is not there.
    """
    converter = markdown.Markdown(extensions=["tables", "toc"])
    body = converter.convert(text)

    def embedded(found: re.Match) -> str:
        path = folder / found[2]
        try:
            content = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            raise RunError(
                f"picture={str(path)!r}: {error.strerror}; draw it with"
                " scripts/figures.py"
            ) from None
        return f'{found[1]}src="data:{_KINDS[path.suffix]};base64,{content}"'

    body = re.sub(r'(?<=<img alt=)("[^"]*" )src="([^"]+)"', embedded, body)
    body = re.sub(r"<table>.*?</table>", _marked, body, flags=re.DOTALL)
    # A region that the keyboard reaches, to scroll in it.
    body = body.replace(
        "<table>", '<div class="table" tabindex="0" role="region"><table>'
    )
    body = body.replace("</table>", "</table></div>")
    title = html.escape(text.partition("\n")[0].lstrip("# "))
    return _PAGE.format(title=title, contents=converter.toc, body=body)
