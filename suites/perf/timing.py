"""Device time of one operation, in nanoseconds, on a GPU that caches, ramps its clocks and launches late.

How a sample is taken. The calls of one block are captured into a graph and replayed between two device events, so
that neither Python nor the launch queue is timed. (The copy is not: as a node of a graph it ran at 2.7 TB/s on an H200
against 4.3 TB/s launched plainly, and at half a millisecond a call its launch does not show.) Inputs and outputs rotate
over enough buffers that a block touches at least `ROTATE_BYTES`: nothing is read from a cache that a training step
would not have filled. A sample is the time of a block over its number of calls.

How samples are arranged. Candidates and the copy probe take turns in every round, so that a drifting clock moves all
of them; a row is judged by its share of the copy *of the same round*. The share that is reported is the median of
these ratios, and the times are medians too: a mean would let one interrupt decide.

Not here: verdicts and thresholds (a later gate decides from raw samples), and anything that needs a launch of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROTATE_BYTES = 768 << 20  # over twice the 256 MiB Infinity Cache of gfx942/gfx950, 12 times the L2 of an H200
COPY_BYTES = 1 << 30  # read once and written once: long past launch overhead, eight times the largest cache
WARM_UP_SECONDS = 1.0  # AMD's clocks ramp for 400 ms
WARM_UP_AGAIN = 0.2  # of a later row of a process, on NVIDIA: its clocks ramp within milliseconds
TARGET_BLOCK_NS = 2_000_000


@dataclass(frozen=True)
class Timed:
    """Samples of one candidate: `ns` a call, one value a round, in the order measured."""

    name: str
    ns: tuple[float, ...]

    @property
    def median_ns(self) -> float:
        return statistics.median(self.ns)

    @property
    def p20_ns(self) -> float:
        return sorted(self.ns)[len(self.ns) // 5]


@dataclass(frozen=True)
class Candidate:
    """What is timed: `calls` are equivalent calls on different buffers; `bytes_moved` is what one call must move.

    captured: replay a graph of the calls; False launches them plainly.
    """

    name: str
    calls: Sequence[Callable[[], object]]
    bytes_moved: int
    captured: bool = True


def rotations(bytes_moved: int) -> int:
    """How many sets of buffers make one pass over all of them exceed every cache."""
    return max(2, -(-ROTATE_BYTES // max(bytes_moved, 1)))


def copy_probe(device: torch.device) -> Candidate:
    """A device-to-device copy of `COPY_BYTES` of random bytes; moves twice that."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Candidate("copy", [lambda: target.copy_(source)], 2 * COPY_BYTES, captured=False)


def captured(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], int]:
    """A block of equivalent calls, compiled and captured now, and how many calls it holds."""
    return _block(Candidate("captured", calls, 0))


def _block(candidate: Candidate) -> tuple[Callable[[], object], int]:
    """Warm the candidate up, then make a block: whole rotations, enough of them to time. Returns it and its calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in candidate.calls:
            call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in candidate.calls:
            call()
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    estimate_ns = max(start.elapsed_time(end) * 1e6, 1.0)
    passes = max(1, min(64, round(TARGET_BLOCK_NS / estimate_ns)))

    def block() -> None:
        for _ in range(passes):
            for call in candidate.calls:
                call()

    if not candidate.captured:
        return block, passes * len(candidate.calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block()
    return graph.replay, passes * len(candidate.calls)


def measure(candidates: Sequence[Candidate], rounds: int = 30) -> dict[str, Timed]:
    """Time `candidates` in turns for `rounds` rounds; every candidate is warmed up and captured first.

    Raises RuntimeError where an interval came out as zero or negative: such a clock can prove nothing.
    """
    return _in_turns({c.name: _block(c) for c in candidates}, rounds)


def replayed(blocks: dict[str, tuple[Callable[[], object], int]], rounds: int = 30) -> dict[str, float]:
    """Median ns a call of blocks that were captured before, in turns."""
    return {name: timed.median_ns for name, timed in _in_turns(blocks, rounds).items()}


def _in_turns(blocks: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, Timed]:
    _busy([block for block, _ in blocks.values()])
    samples: dict[str, list[float]] = {name: [] for name in blocks}
    for turn in range(rounds):
        order = list(blocks) if turn % 2 == 0 else list(reversed(blocks))
        events = {}
        for name in order:
            block, calls = blocks[name]
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            block()
            last.record()
            events[name] = (first, last, calls)
        torch.cuda.synchronize()
        for name, (first, last, calls) in events.items():
            samples[name].append(_sample_ns(name, first, last, calls))
    return {name: Timed(name, tuple(values)) for name, values in samples.items()}


def warm_up_again() -> float:
    """Seconds of busy warm-up of a row that is not the first of its process."""
    return WARM_UP_SECONDS if torch.version.hip is not None else WARM_UP_AGAIN


def interleaved(
    candidate: Candidate,
    reference: Candidate | None,
    probe: Candidate,
    blocks: int,
    warm_up: float = WARM_UP_SECONDS,
    after_block: Callable[[], None] = lambda: None,
    lap: Callable[[str], None] = lambda name: None,
) -> dict[str, Timed]:
    """Samples of a speed row: `blocks` times probe, reference, candidate, candidate, reference, probe.

    Two samples a block and role, in the order measured; without a reference, its list is empty. The mirror image takes
    out what drifts linearly within a block. `after_block` is called once a block, while it runs, and `lap` at the end
    of each part: load (all is called and captured), warm, samples. RuntimeError as `measure`.
    """
    roles = {"probe": probe, **({"reference": reference} if reference is not None else {}), "candidate": candidate}
    made = {name: _block(one) for name, one in roles.items()}
    lap("load")
    _busy([block for block, _ in made.values()], warm_up)
    lap("warm")
    samples: dict[str, list[float]] = {"probe": [], "reference": [], "candidate": []}
    for _ in range(blocks):
        events = []
        for name in (*made, *reversed(made)):
            block, calls = made[name]
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            block()
            last.record()
            events.append((name, first, last, calls))
        after_block()  # while the device still runs it: a clock that is asked at rest says nothing
        torch.cuda.synchronize()
        for name, first, last, calls in events:
            samples[name].append(_sample_ns(name, first, last, calls))
    lap("samples")
    return {name: Timed(name, tuple(values)) for name, values in samples.items()}


def _busy(blocks: Sequence[Callable[[], object]], seconds: float = WARM_UP_SECONDS) -> None:
    """Run blocks in turns until the clocks have ramped."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    while True:
        for block in blocks:
            block()
        end.record()
        end.synchronize()
        if start.elapsed_time(end) > 1e3 * seconds:
            break


def _sample_ns(name: str, first: torch.cuda.Event, last: torch.cuda.Event, calls: int) -> float:
    ns = first.elapsed_time(last) * 1e6 / calls
    if not ns > 0:
        raise RuntimeError(
            f"{name} took {ns} ns; a positive time was expected; the device's event timer cannot be used"
        )
    return ns


def calls_of(candidate: Candidate) -> int:
    """How many calls one sample of it holds, at least: one pass over its buffers."""
    return len(candidate.calls)


def share_of_copy(timed: Timed, bytes_moved: int, copy: Timed, copy_bytes: int) -> float:
    """Median over rounds of (bytes/s of the candidate) / (bytes/s of the copy in the same round)."""
    return statistics.median(
        (bytes_moved / ns) / (copy_bytes / copy_ns) for ns, copy_ns in zip(timed.ns, copy.ns, strict=True)
    )
