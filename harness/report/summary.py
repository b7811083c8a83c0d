"""summary.md: what a person reads first, on a terminal, in a log or on a CI's summary page.

Plain text that is also Markdown: readable without colour, worst first. The first line carries the whole answer:
verdict, exit code, the worst finding with its suite, test and message, and counts. Then the findings, the tables behind
them (curves by window, machine code beside the baseline's), and everything that was not judged, which is listed and
never called a pass.

A CI drops a step summary over 1 MiB (near the limit without a word) and counts bytes, not characters. So the text is
cut by bytes, from the end, and what matters stands at the beginning. The verdict comes from the totals, never from what
the text could hold.

Not here: verdicts (gate.py), curves and rooflines as pictures (losschart.py, roofline.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.errors import EXIT_MEANINGS, VERDICTS, Verdict
from harness.junit import clean_line
from harness.manifest import TestId
from harness.manifest import parse as parse_id
from harness.result import Judgement, Result, suite_rank

BYTE_LIMIT = 1_048_000
FINDINGS_SHOWN = 15
LISTED_SHOWN = 8
#: Kernels of which the summary shows every fact, and of which it shows a line each.
FULL_TABLES = 3
KERNELS_SHOWN = 60
#: Facts that decide a memory-bound kernel's speed, and the words for a narrow column.
KEY_FACTS: dict[str, str] = {
    "widest_load_bytes": "load B",
    "widest_store_bytes": "store B",
    "narrow_memory_instructions": "narrow",
    "fp8_encode": "encode",
    "vgpr_spills": "spills",
    "vgprs": "vgprs",
    "lds_bytes": "lds B",
    "waves_per_simd": "waves",
    "code_bytes": "code B",
}
#: How the message of a test begins that a dead process never started.
NOT_RUN = "not run: "
LATE_DIVERGENCE = "100 steps cannot show late divergence: a curve that holds here may still diverge after thousands."

NOT_JUDGED = (
    Verdict.SKIP,
    Verdict.WAIVED,
    Verdict.UNCALIBRATED,
    Verdict.UNMEASURABLE,
    Verdict.INCONCLUSIVE,
)


def headline(judgement: Judgement) -> str:
    """The first line: `PASS exit 0: ...` or the worst finding with its suite and test."""
    counts = count_line(judgement)
    worst = judgement.red[0] if judgement.red else None
    if worst is None:
        # The first of these that was given at all: what nobody judged (SKIP, UNCALIBRATED) is never called a pass.
        given = (Verdict.IMPROVED, Verdict.PASS, *NOT_JUDGED)
        word = next((verdict for verdict in given if judgement.counts.get(str(verdict))), Verdict.MISSING)
        return f"{word} exit {judgement.exit_code}: {counts}"
    return f"{worst.verdict} exit {judgement.exit_code}: {told(worst)} [{counts}]"


def told(result: Result) -> str:
    """`numerics test_formats::test_golden[...] - message`: one finding in one line."""
    name = result.id.partition("/")[2] or result.id
    message = clean_line(result.message, 400) or VERDICTS[result.verdict].meaning
    return f"{result.suite} {clean_line(name, 200)} - {message}"


def count_line(judgement: Judgement) -> str:
    """`214 checks: 212 PASS, 1 FAIL, 1 SKIP`, worst first."""
    ordered = sorted(judgement.counts.items(), key=lambda item: VERDICTS[Verdict(item[0])].rank)
    listed = ", ".join(f"{count} {verdict}" for verdict, count in ordered)
    return f"{len(judgement.results)} checks: {listed or 'none'}"


def render(judgement: Judgement, run: Mapping[str, Any]) -> str:
    """The summary of a judged run.

    Args:
        run: run.json as a dict.

    Returns:
        At most BYTE_LIMIT bytes of UTF-8, ending in a newline.
    """
    blocks = [
        [headline(judgement), EXIT_MEANINGS[judgement.exit_code]],
        _about(judgement, run),
        _findings(judgement),
        _improved(judgement),
        _suites(judgement),
        _curves(judgement),
        _facts(judgement, run),
        _speeds(judgement),
        _not_judged(judgement),
        _notes(judgement),
    ]
    text = "\n\n".join("\n".join(lines) for lines in blocks if lines)
    return cut(text + "\n")


def render_several(judgement: Judgement, pieces: Sequence[tuple[str, str, Judgement]]) -> str:
    """The summary of several pieces of evidence: the worst of all first, then a line a piece, then all findings.

    Args:
        pieces: (path, label, its own judgement) of each.
    """
    rows = [
        (clean_line(label, 60), f"exit {one.exit_code}", count_line(one), clean_line(path, 200))
        for path, label, one in pieces
    ]
    blocks = [
        [headline(judgement), EXIT_MEANINGS[judgement.exit_code]],
        ["## Evidence", "", *table(("of", "exit", "checks", "where"), rows)] if rows else [],
        _findings(judgement),
        _suites(judgement),
        _not_judged(judgement),
        _notes(judgement),
    ]
    return cut("\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n")


def cut(text: str, limit: int = BYTE_LIMIT) -> str:
    """`text` in at most `limit` bytes of UTF-8, cut at the end of a line, saying so."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) <= limit:
        return raw.decode("utf-8")
    ending = "\n\n(cut here: the rest is in junit.xml and journal.jsonl)\n"
    kept = raw[: limit - len(ending.encode())].decode("utf-8", "ignore")
    return kept[: kept.rfind("\n")] + ending if "\n" in kept else kept + ending


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns line up in a terminal too. Pipes in cells would end them: shown as `/`."""
    cells = [[cell.replace("|", "/").replace("`", "'") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def _few(names: Sequence[str]) -> str:
    """Three names at most; run.json has them all."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _about(judgement: Judgement, run: Mapping[str, Any]) -> list[str]:
    versions = run.get("versions") if isinstance(run.get("versions"), Mapping) else {}
    assert isinstance(versions, Mapping)
    known = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "python") if versions.get(name))
    commit = str(run.get("commit") or "unknown")[:12] + (" with local changes" if run.get("dirty") else "")
    chosen = f" ({run['platform_reason']})" if run.get("platform_reason") else ""
    selected = f", cases {_few(str(run['case']).split(','))}" if run.get("case") else ""
    return [
        f"platform {run.get('platform')}{chosen}; suites {', '.join(map(str, run.get('suites', [])))}{selected}",
        f"commit {commit}; {known or 'versions unknown'}; policy {judgement.policy}; run {run.get('run_id')}",
    ]


def _findings(judgement: Judgement) -> list[str]:
    red = judgement.red
    if not red:
        return []
    rows = list(_finding_rows(red))
    lines = ["## Findings, worst first", "", *rows[:FINDINGS_SHOWN]]
    if len(rows) > FINDINGS_SHOWN:
        lines.append(f"- ... and {len(rows) - FINDINGS_SHOWN} more, all in junit.xml")
    lines.append("")
    shown = dict.fromkeys(result.verdict for result in red)
    lines.extend(f"{verdict}: {VERDICTS[verdict].meaning}. Next: {VERDICTS[verdict].advice}." for verdict in shown)
    return lines


def _finding_rows(red: Sequence[Result]) -> Iterator[str]:
    """A line a finding. The tests that a dead process never started are one line: they have one cause."""
    never: dict[tuple[str, str], list[Result]] = {}
    for result in red:
        if result.message.startswith(NOT_RUN):
            never.setdefault((result.suite, result.message), []).append(result)
    for result in red:
        same = never.get((result.suite, result.message), []) if result.message.startswith(NOT_RUN) else [result]
        if result is not same[0]:
            continue
        if len(same) == 1:
            yield f"- {result.verdict}: {told(result)}"
        else:
            first = clean_line(result.id.partition("/")[2], 200)
            message = clean_line(result.message, 400)
            yield f"- {result.verdict}: {len(same)} tests of {result.suite} - {message} (first {first})"


def _improved(judgement: Judgement) -> list[str]:
    better = [result for result in judgement.worst_first if result.verdict is Verdict.IMPROVED]
    if not better:
        return []
    lines = ["## Improved: commit the patch to keep the gain", ""]
    for result in better[:FINDINGS_SHOWN]:
        lines.append(f"- {told(result)}")
        lines.extend(f"      {line}" for line in result.detail.splitlines())
    if len(better) > FINDINGS_SHOWN:
        lines.append(f"- ... and {len(better) - FINDINGS_SHOWN} more, all in junit.xml")
    return lines


def _suites(judgement: Judgement) -> list[str]:
    """One row a suite: how many of each verdict, and its time."""
    rows: list[list[str]] = []
    for suite in sorted({result.suite for result in judgement.results}, key=suite_rank):
        mine = [result for result in judgement.results if result.suite == suite]
        counts = Counter(result.verdict for result in mine)
        told_counts = ", ".join(
            f"{counts[verdict]} {verdict}" for verdict in sorted(counts, key=lambda verdict: VERDICTS[verdict].rank)
        )
        rows.append([suite, str(len(mine)), told_counts, f"{sum(result.seconds for result in mine):.1f}"])
    return ["## Suites", "", *table(("suite", "checks", "verdicts", "test seconds"), rows)] if rows else []


def _curves(judgement: Judgement) -> list[str]:
    """Loss: one row a curve and layer, measured against allowed where it came closest to its limit."""
    judged = [result for result in judgement.results if (result.baseline or {}).get("kind") == "loss"]
    if not judged:
        return []
    lines = ["## Loss curves: measured / allowed, relative to run 0", ""]
    columns: list[str] = []
    rows: list[tuple[str, dict[str, str]]] = []
    for result in judged:
        assert result.baseline is not None
        cells: dict[str, str] = {}
        for row in result.baseline["rows"]:
            column = _column(row)
            if column is None:
                continue
            if column not in columns:
                columns.append(column)
            mark = "" if row["ok"] else " !"
            cells[column] = f"{row['measured']:.1e} / {row['allowed']:.1e}{mark}"
        rows.append((f"{_identity(result).case}: {result.verdict}", cells))
    # A long table is read in two parts: the loss itself, and the rest.
    for title, mine in (
        ("loss", [column for column in columns if column.startswith("loss")]),
        ("gradient norm", [column for column in columns if column.startswith("grad")]),
        (
            "digests, saturation, FP8 against bf16, shared curve",
            [c for c in columns if not c.startswith(("loss", "grad"))],
        ),
    ):
        if mine:
            short = [column.removeprefix("loss ").removeprefix("grad_norm ") for column in mine]
            body = [[case, *(cells.get(column, "-") for column in mine)] for case, cells in rows]
            lines += [f"{title}:", "", *table(("curve", *short), body), ""]
    marked = any(not row["ok"] for result in judged for row in (result.baseline or {})["rows"])
    lines.append(("`!` marks what exceeds its limit. " if marked else "") + LATE_DIVERGENCE)
    notes = dict.fromkeys(note for result in judged for note in (result.baseline or {})["notes"])
    return [*lines, *notes]


def _speeds(judgement: Judgement) -> list[str]:
    """Speed: a row each, with its change by each yardstick and the smallest slow-down that it can show."""
    rows = []
    for result in judgement.worst_first:
        told = result.baseline or {}
        if told.get("kind") != "perf" or told.get("median_ns") is None:
            continue
        moved = ", ".join(f"{one['percent']:+.1f} % ({one['yardstick']})" for one in told["effects"])
        shown = [f"{told[key]:.3f}" if told[key] is not None else "-" for key in ("share", "ratio")]
        smallest = "-" if told["smallest"] is None else f"{told['smallest']:.1%}"
        test = _identity(result)
        what = "compile " if test.test == "test_compile" else ""  # a row's time has the same case
        name = f"{what}{test.case}: {result.verdict}"
        rows.append([name, f"{told['median_ns'] / 1e3:.1f}", *shown, moved or "-", smallest])
    header = ("row", "us", "of probe", "of reference", "slower by (against)", "smallest seen")
    return ["## Speed", "", *table(header, rows)] if rows else []


def _column(row: Mapping[str, Any]) -> str | None:
    """Where a row of the comparison stands in the table; None for those that only a finding mentions."""
    if row["layer"] == "digests":
        return f"digest {row['window']}"
    if row["layer"] == "shared":
        return f"shared {row['metric']} {row['window']}" if not row["ok"] or "mean" in row["window"] else None
    if row["layer"] == "paired":
        return f"paired {row['window']}" if not row["ok"] or "mean" in row["window"] else None
    if row["layer"] == "saturation":
        return str(row["metric"])
    return f"{row['metric']} {row['window']}"


def _identity(result: Result) -> TestId:
    return parse_id(result.id)


def _facts(judgement: Judgement, run: Mapping[str, Any]) -> list[str]:
    """Machine code beside the baseline's. A run with --case shows every kernel, any other those that moved.

    Up to FULL_TABLES kernels: a column each, every fact. More: a line each, the facts that decide speed and what moved.
    """
    judged = [result for result in judgement.results if (result.baseline or {}).get("kind") == "codegen"]
    if not judged:
        return []
    lines = ["## Machine code: now (baseline)", ""]
    moved = [result for result in judged if _moved(result)]
    if not run.get("case"):
        lines.append(
            f"{len(judged) - len(moved)} of {len(judged)} kernels as recorded; --case shows all of their facts."
        )
        judged = moved
    else:
        lines.append(f"{len(judged) - len(moved)} of {len(judged)} kernels as recorded.")
    shown = sorted(judged, key=lambda result: result.order)[:KERNELS_SHOWN]
    if not shown:
        return lines
    left_out = [f"... and {len(judged) - len(shown)} kernels more, all in isa/"] if len(judged) > len(shown) else []
    names = list(dict.fromkeys(row["name"] for result in shown for row in (result.baseline or {})["rows"]))
    if len(shown) <= FULL_TABLES:
        header = ("fact", *(_identity(result).case for result in shown))
        verdicts = ["verdict", *(str(result.verdict) for result in shown)]
        body = [[name, *(_cell(result, name) for result in shown)] for name in names]
        return [*lines, "", *table(header, [verdicts, *body]), *left_out]
    changed = {name for result in shown for name in _moved(result)}
    columns = [name for name in names if name in KEY_FACTS or name in changed]
    header = ("kernel", "verdict", *(KEY_FACTS.get(name, name) for name in columns))
    body = [
        [_identity(result).case, str(result.verdict), *(_cell(result, name) for name in columns)] for result in shown
    ]
    return [*lines, "", *table(header, body), *left_out]


def _moved(result: Result) -> list[str]:
    rows = (result.baseline or {}).get("rows", [])
    return [row["name"] for row in rows if row["state"] in ("better", "worse", "absent", "unjudged")]


def _cell(result: Result, name: str) -> str:
    row = next((row for row in (result.baseline or {})["rows"] if row["name"] == name), None)
    if row is None:
        return "-"
    before = "none" if row["before"] is None else row["before"]
    mark = {"worse": " !", "better": " +", "absent": " !"}.get(row["state"], "")
    return f"{row['now']} ({before}){mark}"


def _not_judged(judgement: Judgement) -> list[str]:
    """Skipped, waived, uncalibrated: grouped by their reason, never called a pass."""
    lines: list[str] = []
    for verdict in NOT_JUDGED:
        mine = [result for result in judgement.results if result.verdict is verdict and not result.red]
        if not mine:
            continue
        if not lines:
            lines = ["## Not judged, and not a pass", ""]
        reasons: dict[str, list[Result]] = {}
        for result in mine:
            reasons.setdefault(clean_line(result.message, 300), []).append(result)
        lines.append(f"{verdict}: {len(mine)} ({VERDICTS[verdict].meaning})")
        for reason, same in list(reasons.items())[:LISTED_SHOWN]:
            lines.append(f"- {len(same)} x {reason or 'no reason given'}: {_some_names(same)}")
        if len(reasons) > LISTED_SHOWN:
            lines.append(f"- ... and {len(reasons) - LISTED_SHOWN} more reasons, all in junit.xml")
    return lines


def _some_names(results: Sequence[Result]) -> str:
    names = ", ".join(clean_line(result.id, 120) for result in results[:2])
    return names + (f" and {len(results) - 2} more" if len(results) > 2 else "")


def _notes(judgement: Judgement) -> list[str]:
    if not judgement.notes:
        return []
    return ["## Notes", "", *_limited(f"- {clean_line(note, 500)}" for note in judgement.notes)]


def _limited(lines: Iterable[str]) -> Iterator[str]:
    listed = list(lines)
    yield from listed[:FINDINGS_SHOWN]
    if len(listed) > FINDINGS_SHOWN:
        yield f"- ... and {len(listed) - FINDINGS_SHOWN} more"
