"""report.html: the evidence of a run as one page: the summary, the charts, what every red test said, and all checks.

One file that needs nothing else: no script, style or picture of another host, the charts inside it. A CI's artefact
viewer opens it, and it can be sent to somebody. Only its links to the logs want the folder beside it.

What tests print is text here, whatever it looks like: it is escaped, and of Markdown only headings, lists and tables of
the summary are read, so that neither `<script>` nor `![](...)` in a message becomes more than its characters.

Not here: what stands in the summary (summary.py), the charts (losschart.py, roofline.py), verdicts (gate.py).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from harness import baselines, files
from harness.errors import VERDICTS, Verdict
from harness.junit import clean, clean_line
from harness.result import Judgement, Result, suite_rank

FILE_NAME = "report.html"

RED_SHOWN = 200
"""Red tests whose output is on the page; all of them are in the list of checks and in junit.xml."""

LINKED = ("summary.md", "junit.xml", "run.json", "journal.jsonl", "roofline.md")

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #f4f6f8; --red: #b3121d; --green: #1a7f37; --grey: #5b6472 }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #1c2128; --red: #ff7b72; --green: #56d364; --grey: #9aa3b0 }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 1rem 1.5rem 4rem }
h1 { border-left: .5rem solid; padding-left: .8rem; font-size: 1.25rem; overflow-wrap: anywhere }
h2 { border-top: 1px solid var(--line); font-size: 1.1rem; margin-top: 2rem; padding-top: 1rem }
.red { color: var(--red) } .green { color: var(--green) } .grey { color: var(--grey) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left; vertical-align: top }
th { background: var(--soft) }
th, td { white-space: nowrap } #checks td { white-space: normal }
pre { background: var(--soft); font-size: .8rem; max-height: 40rem; overflow: auto; padding: .8rem }
summary { cursor: pointer; overflow-wrap: anywhere }
img { background: white; max-width: 100%; margin: .5rem 0 }
input { font: inherit; margin: .5rem 0; max-width: 100%; padding: .2rem .5rem; width: 40rem }
.id { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
"""

_SCRIPT = """
const rows = [...document.querySelectorAll("#checks tbody tr")];
const input = document.getElementById("part"), count = document.getElementById("count");
input.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\\s+/);
  let shown = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
    shown += !row.hidden;
  }
  count.textContent = `${shown} of ${rows.length}`;
});
"""


def write(evidence: Path, judgement: Judgement, run: Mapping[str, Any], text: str, charts: Sequence[str]) -> None:
    """Write report.html into an evidence folder.

    Args:
        run: run.json as a dict.
        text: the summary, as summary.render gives it.
        charts: names of files in the folder, of which the SVG ones are shown.

    Raises:
        OSError: a chart cannot be read, or the page not be written.
    """
    pictures = [(name, files.read_bytes(evidence / name)) for name in charts if name.endswith(".svg")]
    logs = [f"logs/{suite}.log" for suite in map(str, run.get("suites", []))]
    links = [name for name in (*LINKED, *logs) if (evidence / name).is_file()]
    baselines.write_atomic(evidence / FILE_NAME, render(judgement, text, pictures, links))


def render(
    judgement: Judgement, text: str, pictures: Sequence[tuple[str, bytes]] = (), links: Sequence[str] = ()
) -> str:
    """The page. pictures: (name, SVG) of each chart; links: files that lie beside the page."""
    headline, _, rest = text.partition("\n")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        # Nothing is fetched, whatever slipped through: styles, the script and pictures are in the file.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(headline[:120])}</title><style>{_STYLE}</style></head><body>",
        f'<h1 class="{_colour(judgement)}">{_text(headline)}</h1>',
        _markdown(rest),
        *_links(links),
        *_charts(pictures),
        *_red(judgement.red),
        *_checks(judgement.results),
        f"<script>{_SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    """Any text as characters of a page: escaped, and what HTML or UTF-8 cannot hold made visible."""
    return escape(clean(text))


def _markdown(text: str) -> str:
    """The summary's Markdown, of which headings, lists and tables are all that is read."""
    from markdown_it import MarkdownIt

    reader = MarkdownIt("zero", {"breaks": True}).enable(["heading", "list", "table", "newline"])
    page = str(reader.render(clean(text)))
    return page.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def _colour(judgement: Judgement) -> str:
    if judgement.exit_code:
        return "red"
    return "green" if {Verdict.PASS, Verdict.IMPROVED} & judgement.counts.keys() else "grey"


def _links(links: Sequence[str]) -> Iterator[str]:
    if links:
        listed = ", ".join(f'<a href="{_text(name)}">{_text(name)}</a>' for name in links)
        yield f"<h2>Files beside this page</h2><p>{listed}</p>"


def _charts(pictures: Sequence[tuple[str, bytes]]) -> Iterator[str]:
    if pictures:
        yield "<h2>Charts</h2>"
    for name, picture in pictures:
        # As a picture and not as elements of the page: then nothing in it can act, and no two have an id in common.
        data = base64.b64encode(picture).decode("ascii")
        yield f'<p><img alt="{_text(name)}" src="data:image/svg+xml;base64,{data}"></p>'


def _red(red: Sequence[Result]) -> Iterator[str]:
    if red:
        yield "<h2>What the red tests said</h2>"
    for number, result in enumerate(red[:RED_SHOWN]):
        state = " open" if number == 0 else ""
        said = result.detail or result.message or VERDICTS[result.verdict].meaning
        yield f'<details{state}><summary><b class="red">{result.verdict}</b> <span class="id">{_text(result.id)}</span>'
        yield f" {_text(clean_line(result.message))}</summary><pre>{_text(said)}</pre></details>"
    if len(red) > RED_SHOWN:
        yield f"<p>... and {len(red) - RED_SHOWN} more, in the list below and in junit.xml</p>"


def _checks(results: Iterable[Result]) -> Iterator[str]:
    """Every check, worst first within its suite; the field above leaves those that hold all of its words."""
    listed = sorted(results, key=lambda result: (*suite_rank(result.suite), result.order))
    yield '<h2>All checks</h2><p><input id="part" placeholder="words of an id, a verdict or a message" '
    yield f'aria-label="filter"> <span id="count">{len(listed)} of {len(listed)}</span></p>'
    yield '<div class="wide"><table id="checks"><thead>'
    yield "<tr><th>verdict</th><th>check</th><th>seconds</th><th>message</th></tr></thead><tbody>"
    for result in listed:
        colour = "red" if result.red else "green" if result.verdict is Verdict.PASS else "grey"
        yield (
            f'<tr><td class="{colour}">{result.verdict}</td><td class="id">{_text(result.id)}</td>'
            f"<td>{result.seconds:.2f}</td><td>{_text(clean_line(result.message))}</td></tr>"
        )
    yield "</tbody></table></div>"
