"""Where a step's time goes: kernel time by class, from the Chrome traces that `train --profile DIR` writes.

    python -m fp8stack.profile A [B [C]] [--html PAGE]

A, B, C are traces or folders that hold one; for three the order is: bf16, FP8 unfused, FP8 fused, and the share of the
gap recovered is printed: (fused - unfused) / (bf16 - unfused) in steps a second. A trace opens in Perfetto as it is.

A GPU's time is that of its kernels, copies and fills. A trace without any (a CPU's) is read by the self time of its
operators; what runs inside a quantiser or a matrix product belongs to that one's class, and its name is marked. A name
belongs to the first class of CLASSES whose pattern it matches; kernels that a compiler fused and named itself are
elementwise. One exception: whatever a quantiser launched is quantisation, as the chain of plain operators
(kernels/unfused.py) consists of kernels that do many things; their names are marked too.

Kernels of several streams run at once, so the sum of the classes may exceed the wall clock. Of communication, which is
meant to hide behind the rest, the time is given too in which no kernel of another class ran ("of it alone"); a kernel
that waits for another rank counts as communication.
"""

from __future__ import annotations

import bisect
import collections
import functools
import gzip
import html
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from fp8stack import command
from fp8stack.command import Parser

CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (
            "communication",
            r"nccl|rccl|gloo|c10d::|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|broadcast_coalesced",
        ),
        ("attention", r"attention|flash|fmha|aten::b(add)?bmm|aten::bmm|aten::_?softmax"),
        (
            "quantisation",
            r"quantize|decode_codes|count_codes|amax|^_cast_(saturating|rows|columns|turned)_kernel|cast_saturating$|"
            r"^_(column_scales|scale)_kernel",
        ),
        (
            "GEMM",
            r"gemm|cutlass|cublas|nvjet|Cijk_|wgmma|matmul|(^|[:_])(add)?mm(_|$)|scaled_mm|grouped_mm|grouped_mxfp8_mm|"
            r"xmma|splitk|^_(grouped|grouped_mxfp8|scaled|list_tiles|mend|settle_offs)_kernel",
        ),
        (
            "memory copy",
            r"memcpy|memset|aten::copy_|aten::fill_|aten::zero_|aten::(_to_copy|to)$|split_with_sizes_copy|chunk_cat|"
            r"CatArray",
        ),
        (
            "elementwise",
            r"^aten::|elementwise|vectorized|^triton_|reduce_kernel|foreach|multi_tensor|fused_adam|index|embedding|"
            r"^prims::|softmax|nll_loss|gather|scatter|sort|topk|^void cub::|^void at_cuda_detail::cub::",
        ),
    )
)
OTHER = "other"
# What Inductor fuses it names after the operators that it took in, products beside it among them.
_FUSED = re.compile(r"^triton_(?!tem_)")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class TraceError(ValueError):
    """A file that is no usable trace. The message is one line: what, expected, what next."""


@functools.cache
def class_of(name: str) -> str:
    """The class of a kernel or operator by its name."""
    if _FUSED.match(name):
        return "elementwise"
    return next((label for label, pattern in CLASSES if pattern.search(name)), OTHER)


@dataclass
class Kernels:
    """What one trace shows, a step: microseconds and launches, by kernel name; `classes` sums them."""

    source: str
    steps: int
    step_us: float
    on_device: bool
    alone_us: float = 0.0  # in which communication ran and nothing else; on a device
    time_us: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    launches: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    kinds: dict[str, str] = field(default_factory=dict)

    def longest(self) -> list[str]:
        """Names by falling time."""
        return sorted(self.time_us, key=lambda name: -self.time_us[name])

    def classes(self) -> dict[str, tuple[float, float]]:
        """Class -> (microseconds, launches) a step, in the order of CLASSES."""
        sums = {label: [0.0, 0.0] for label in (*(name for name, _ in CLASSES), OTHER)}
        for name, time in self.time_us.items():
            sums[self.kinds[name]][0] += time
            sums[self.kinds[name]][1] += self.launches[name]
        return {label: (time, count) for label, (time, count) in sums.items()}


def read_trace(source: Path) -> Kernels:
    """Read a trace, or the one trace of a folder. Raises TraceError."""
    file = source
    try:
        if source.is_dir():
            found = sorted([*source.glob("trace*.json"), *source.glob("trace*.json.gz")])
            if not found:
                raise TraceError(f"{source} holds no trace*.json; expected what train --profile wrote; name the file")
            file = found[0]
        raw = file.read_bytes()
        return _kernels(source, file, json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)["traceEvents"])
    except TraceError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        told = getattr(error, "strerror", None) or repr(error)
        raise TraceError(
            f"{file} cannot be read ({told}); expected a Chrome trace of torch's profiler; profile again, or name one"
        ) from None


def _kernels(source: Path, file: Path, events: list[dict[str, Any]]) -> Kernels:
    """What the events of a trace show. Raises TraceError, and whatever comes of events that are none."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    marks = [e for e in spans if e.get("cat") == "user_annotation" and str(e["name"]).startswith("ProfilerStep")]
    if not marks:
        raise TraceError(f"{file} has no ProfilerStep marks; expected a trace of whole steps; profile with --profile")
    steps = len(marks)
    step_us = sum(float(e["dur"]) for e in marks) / steps
    if not 0 < step_us < math.inf:
        raise TraceError(f"{file} has steps of {step_us} us; expected steps that take time; profile again, or name one")
    kernels = Kernels(str(source), steps, step_us, False)
    device = [event for event in spans if event.get("cat") in _DEVICE]
    kernels.on_device = bool(device)
    kernels.alone_us = _alone(device, "communication") / steps
    for name, kind, time in _kernel_times(device, spans) if device else _self_times(spans):
        kernels.time_us[name] += time
        kernels.launches[name] += 1
        kernels.kinds[name] = kind
    for counted in (kernels.time_us, kernels.launches):
        for name in counted:
            counted[name] /= steps
    return kernels


def _kernel_times(device: list[dict[str, Any]], spans: list[dict[str, Any]]) -> Iterable[tuple[str, str, float]]:
    """(name, class, time) of each kernel; those that an operator inside a quantiser launched are its."""
    quantisers = [
        (e.get("tid"), float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in spans
        if e.get("cat") == "cpu_op" and class_of(str(e["name"])) == "quantisation"
    ]
    starts: dict[Any, list[float]] = collections.defaultdict(list)
    ends: dict[Any, list[float]] = collections.defaultdict(list)
    for tid, start, end in sorted(quantisers, key=lambda span: span[1]):
        if not ends[tid] or start >= ends[tid][-1]:  # one inside another adds nothing
            starts[tid].append(start)
            ends[tid].append(end)
    inside = set()
    for event in spans:
        number = (event.get("args") or {}).get("External id")
        if event.get("cat") == "cpu_op" and number is not None:
            place = bisect.bisect_right(starts[event.get("tid")], float(event["ts"])) - 1
            if place >= 0 and float(event["ts"]) < ends[event.get("tid")][place]:
                inside.add(number)
    for event in device:
        name, time = str(event["name"]), float(event["dur"])
        kind = class_of(name)
        if kind != "quantisation" and (event.get("args") or {}).get("External id") in inside:
            kind = "quantisation"
            name = f"{name} (of {_WHOLE[kind]})"
        yield name, kind, time


def _alone(device: list[dict[str, Any]], label: str) -> float:
    """Microseconds in which kernels of a class ran on a device and no other did."""
    edges = []
    for event in device:
        of_label = class_of(str(event["name"])) == label
        start = float(event["ts"])
        edges += [(start, 1, of_label), (start + float(event["dur"]), -1, of_label)]
    running, alone, last = {True: 0, False: 0}, 0.0, 0.0
    for time, change, of_label in sorted(edges):
        if running[True] and not running[False]:
            alone += time - last
        running[of_label] += change
        last = time
    return alone


# Classes that what runs inside belongs to, and how its name is marked: elsewhere the same operator is of its own class.
_WHOLE = {"quantisation": "a quantiser", "GEMM": "a product", "communication": "a collective", "attention": "attention"}


def _self_times(spans: list[dict[str, Any]]) -> Iterable[tuple[str, str, float]]:
    """(name, class, self time) of each CPU operator; inside a quantiser or a product everything is of its class."""
    ops = [e for e in spans if e.get("cat") == "cpu_op"]
    ops.sort(key=lambda e: (str(e.get("tid")), float(e["ts"]), -float(e["dur"])))
    stack: list[list[Any]] = []  # tid, end, name, class, self time
    for event in ops:
        start, length, name = float(event["ts"]), float(event["dur"]), str(event["name"])
        while stack and (stack[-1][0] != event.get("tid") or stack[-1][1] <= start):
            yield tuple(stack.pop()[2:])  # type: ignore[misc]
        kind = class_of(name)
        if stack:
            stack[-1][4] -= length
            if stack[-1][3] in _WHOLE and stack[-1][3] != kind:
                kind = stack[-1][3]
                name = f"{name} (of {_WHOLE[kind]})"
        stack.append([event.get("tid"), start + length, name, kind, length])
    while stack:
        yield tuple(stack.pop()[2:])  # type: ignore[misc]


# -------------------------------------------------------------------------------------------------------------- tracing
class Tracing:
    """torch's profiler over `steps` of a run: DIR/trace-rank0.json, and kernel time by class in DIR/kernels.txt.

    The step before the first one is the profiler's own warm-up. Raises TraceError where it did not see the GPU.
    """

    def __init__(self, folder: Path, steps: range, on_gpu: bool) -> None:
        self._folder, self._steps, self._on_gpu = folder, steps, on_gpu
        self._profile = torch.profiler.profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else []),
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=len(steps)),
        )

    def before(self, step: int) -> None:
        """To be called ahead of every step."""
        if step == self._steps[0] - 1:
            self._profile.start()

    def after(self, step: int) -> None:
        """To be called after every step; writes after the last traced one."""
        if not self._steps[0] - 1 <= step <= self._steps[-1]:
            return
        if step != self._steps[-1]:
            self._profile.step()
            return
        self._profile.stop()
        file = self._folder / "trace-rank0.json"
        self._profile.export_chrome_trace(str(file))
        found = read_trace(file)
        if self._on_gpu and not found.on_device:
            raise TraceError(
                f"{file} shows no kernel of the GPU; expected all; torch's profiler could not see it: set "
                "KINETO_LOG_LEVEL=0 to read why"
            )
        (self._folder / "kernels.txt").write_text(table([found]) + "\n", encoding="utf-8")
        print(table([found]), file=sys.stderr)


# --------------------------------------------------------------------------------------------------------------- report
def table(traces: list[Kernels]) -> str:
    """Time and launches a step by class, a column pair a trace; with two or three, what only one of them runs."""
    width = max(12, *(len(_short(t)) for t in traces)) + 2
    lines = ["a step: microseconds and launches" + ("" if traces[0].on_device else " (self time of operators: no GPU)")]
    lines.append(f"{'class':16}" + "".join(f"{_short(t):>{width + 9}}" for t in traces))
    sums = [t.classes() for t in traces]
    for label in sums[0]:
        lines.append(f"{label:16}" + "".join(f"{s[label][0]:>{width},.1f}{s[label][1]:>9,.1f}" for s in sums))
        if label == "communication" and any(t.alone_us for t in traces):
            lines.append(f"{'  of it alone':16}" + "".join(f"{t.alone_us:>{width},.1f}{'':9}" for t in traces))
    totals = [tuple(sum(column) for column in zip(*s.values(), strict=True)) for s in sums]
    lines.append(f"{'sum':16}" + "".join(f"{time:>{width},.1f}{count:>9,.1f}" for time, count in totals))
    lines.append(f"{'wall clock':16}" + "".join(f"{t.step_us:>{width},.1f}{'':9}" for t in traces))
    recovered = share_recovered(traces)
    if recovered is not None:
        lines.append(f"share of the gap recovered: {recovered:.1%}")
    for trace, names in zip(traces, only_in(traces), strict=True):
        for name in names:
            lines.append(f"only in {_short(trace)}: {trace.time_us[name]:,.1f} us, {trace.kinds[name]}: {name[:120]}")
    return "\n".join(lines)


def share_recovered(traces: list[Kernels]) -> float | None:
    """(fused - unfused) / (bf16 - unfused) in steps a second, for traces in the order bf16, unfused, fused.

    None for other numbers of traces, and where there is no gap: the second one is not slower than the first.
    """
    if len(traces) != 3:
        return None
    bf16, unfused, fused = (1 / trace.step_us for trace in traces)
    return (fused - unfused) / (bf16 - unfused) if unfused < bf16 else None


def only_in(traces: list[Kernels], most: int = 10) -> list[list[str]]:
    """For each trace the kernels that no other runs, longest first."""
    if len(traces) < 2:
        return [[] for _ in traces]
    return [
        [name for name in trace.longest() if not any(name in other.time_us for other in traces if other is not trace)][
            :most
        ]
        for trace in traces
    ]


def page(traces: list[Kernels]) -> str:
    """One HTML page of the same, with the three longest kernels of each class; opens from the disk."""

    def row(cells: Iterable[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"

    sums = [trace.classes() for trace in traces]
    heads = ["class", *(f"{html.escape(_short(t))}, us" for t in traces), *("launches" for _ in traces)]
    body = [row(heads, "th")]
    largest = max(1e-9, *(time for s in sums for time, _ in s.values()))
    for label in sums[0]:
        bars = [  # in em, not in a share of the cell: columns are not equally wide
            f'<div class=bar style="width:{s[label][0] / largest * 12:.2f}em"></div>{s[label][0]:,.1f}' for s in sums
        ]
        body.append(row([label, *bars, *(f"{s[label][1]:,.1f}" for s in sums)]))
        if label == "communication" and any(trace.alone_us for trace in traces):
            body.append(row(["of it alone", *(f"{trace.alone_us:,.1f}" for trace in traces), *("" for _ in traces)]))
    parts = [f"<table>{''.join(body)}</table>"]
    for trace, alone in zip(traces, only_in(traces), strict=True):
        listed = [row(["class", "kernel", "us", "launches"], "th")]
        for label in trace.classes():
            names = [name for name in trace.longest() if trace.kinds[name] == label][:3]
            names += [name for name in alone if trace.kinds[name] == label and name not in names]
            for name in names:
                mark = " <b>(only here)</b>" if name in alone else ""
                cells = [html.escape(name[:300]) + mark, f"{trace.time_us[name]:,.1f}", f"{trace.launches[name]:,.1f}"]
                listed.append(row([label, *cells]))
        parts.append(
            f"<h2>{html.escape(trace.source)}: {trace.step_us:,.0f} us a step</h2><table>{''.join(listed)}</table>"
        )
    recovered = share_recovered(traces)
    if recovered is not None:
        parts.insert(1, f"<p>Share of the gap recovered: {recovered:.1%}</p>")
    style = (
        "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}"
        "td,th{padding:2px 10px;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}"
        ".bar{height:6px;background:#c33;min-width:1px}"
    )
    return f"<!doctype html><meta charset=utf-8><title>Kernel time</title><style>{style}</style>{''.join(parts)}\n"


def _short(trace: Kernels) -> str:
    path = Path(trace.source)
    return path.name if path.suffix not in (".json", ".gz") else path.parent.name or path.stem


def main(argv: list[str] | None = None) -> int:
    """Parse, read, print. Returns the exit code: 2 for a trace that cannot be used."""
    parser = Parser(
        TraceError,
        prog="python -m fp8stack.profile",
        description="Kernel time by class of one to three traces that train --profile wrote.",
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="a trace, or a folder that holds one")
    parser.add_argument("--html", type=Path, help="write one HTML page too")
    try:
        arguments = parser.parse_args(argv)
        if len(arguments.traces) > 3:
            raise TraceError(f"{len(arguments.traces)} traces were given; expected one to three; drop some")
        traces = [read_trace(source) for source in arguments.traces]
        if arguments.html is not None:
            try:
                arguments.html.write_text(page(traces), encoding="utf-8")
            except OSError as error:
                raise TraceError(
                    f"--html {arguments.html} cannot be written ({error.strerror}); choose another"
                ) from None
    except TraceError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    return 0 if command.show(table(traces)) else 1


if __name__ == "__main__":
    sys.exit(command.run("profile", main))
