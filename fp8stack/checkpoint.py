"""Checkpoints: written while training goes on, complete or not there, read back bit by bit on any number of ranks.

    OUT/checkpoints/step-00000100/           complete: it has this name
        facts.json                           step, configuration, versions: for people and for the check before a resume
        .metadata, __0_0.distcp, ...         torch.distributed.checkpoint: each rank writes the rows that it holds
    OUT/checkpoints/step-00000200.partial/   being written, or left by a kill: never read, removed before the next save

Only plain float32 tensors are inside, by name: `model/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME` of the optimiser, and
`adam_step`. FP8 needs no state of its own: scales are computed afresh in every step. Nothing of this package is needed
to read them: `torch.distributed.checkpoint.format_utils.dcp_to_torch_save` makes one file of them that torch.load takes
with weights_only=True.

A save copies the tensors, then writes in a thread over a process group of its own; a second save waits for the first.
The folder gets its final name by one rename, after every rank has written and flushed: at whatever moment a run is
killed, a folder without `.partial` is whole.

Before loading, names, shapes and dtypes are compared: torch would cast silently to the dtype of the tensor it loads
into (pytorch/pytorch#187138).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

PARTIAL = ".partial"
FACTS = "facts.json"
_COMPLETE = re.compile(r"step-(\d{8})")
# How long a rank that stops alone leaves it to rank 0 to complete what all have written.
_SECONDS_TO_COMPLETE = 10.0


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read. The message is one line: what, expected, what next."""


class Checkpoints:
    """The checkpoints of one run. Every rank makes one, at the same time; all methods but `newest`, `abandon` and
    `settle` of a rank that stops alone are collective.

    Args:
        folder: where they are; made if absent.
        keep: how many complete ones stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._group = dist.new_group(backend="gloo")
        self._first = dist.get_rank() == 0
        self._writing: tuple[int, Future[Any]] | None = None
        self._cleared = False
        if self._first:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier(self._group)
        self.ignored = incomplete(folder)

    def newest(self) -> Path | None:
        """The complete checkpoint of the latest step, or None."""
        found = self._complete()
        return found[-1] if found else None

    def _complete(self) -> list[Path]:
        return complete(self.folder)

    def save(self, step: int, state: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        """Copy `state` and begin to write it; returns as soon as `state` may change. Raises as `wait` does."""
        self.wait()
        self._clear()
        final = self._final(step)
        partial = final.with_name(final.name + PARTIAL)
        future = dcp.async_save(state, checkpoint_id=str(partial), process_group=self._group)
        finished: Future[None] = Future()

        def finish(written: Future[Any]) -> None:
            try:
                if (problem := written.exception()) is not None:
                    raise problem
                if self._first:
                    self._complete_one(partial, final, facts)
                finished.set_result(None)
            except BaseException as problem:  # handed on by `wait`; a callback must not raise
                finished.set_exception(problem)

        future.add_done_callback(finish)
        self._writing = (step, finished)

    def free_bytes(self) -> int:
        """Room for the next save, for which what was cut off before makes way."""
        cut = (path for name in self.ignored for path in (self.folder / name).rglob("*"))
        return shutil.disk_usage(self.folder).free + sum(path.stat().st_size for path in cut if path.is_file())

    def _clear(self) -> None:
        """Once, remove what was cut off before: not at the start, where a run may yet be refused and change nothing."""
        if self._cleared:
            return
        if self._first:
            for name in self.ignored:
                shutil.rmtree(self.folder / name)
        dist.barrier(self._group)
        self._cleared = True

    def wait(self) -> None:
        """Until the last save is complete. Raises CheckpointError, on every rank, if it could not be written."""
        if self._writing is None:
            return
        step, finished = self._writing
        problem = finished.exception()
        self._writing = None
        problems: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(problems, None if problem is None else _reason(problem), group=self._group)
        if any(problems):
            raise CheckpointError(self._not_written(step, next(filter(None, problems))))

    def _not_written(self, step: int, reason: str) -> str:
        return (
            f"the checkpoint of step {step} could not be written to {self.folder} ({reason}); expected room and "
            "permission there; free space and use --resume"
        )

    def settle(self, together: bool) -> str | None:
        """For a run that stops on an error: until the last save is complete. Returns one line where it is given up.

        together: every rank stops, and calls this (collective). Otherwise the others go on writing, as their threads
        do while they wait for this rank in a step.
        """
        if together:
            try:
                self.wait()
            except CheckpointError as error:
                return str(error)
            return None
        if self._writing is None:
            return None
        step, finished = self._writing
        problem = finished.exception()
        self._writing = None
        if problem is not None:
            return self._not_written(step, _reason(problem))
        final, limit = self._final(step), time.monotonic() + _SECONDS_TO_COMPLETE
        while not final.exists():
            if time.monotonic() > limit:
                return _given_up(step, f"rank 0 has not completed it within {_SECONDS_TO_COMPLETE:g} s")
            time.sleep(0.05)
        return None

    def abandon(self) -> str | None:
        """For a run that ends at once: one line where a save is still being written, which goes with its group."""
        if self._writing is None or self._writing[1].done():
            return None
        return _given_up(self._writing[0], "it was still being written")

    def _final(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _complete_one(self, partial: Path, final: Path, facts: dict[str, Any]) -> None:
        """Runs in the writing thread of rank 0, when all ranks have written."""
        with (partial / FACTS).open("w", encoding="utf-8") as stream:
            json.dump(facts, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(final)
        _flush_folder(self.folder)
        for old in self._complete()[: -self.keep]:
            doomed = old.with_name(old.name + PARTIAL)  # a kill in mid-removal must not leave half of one
            old.rename(doomed)
            shutil.rmtree(doomed)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, the latest last; none where it is not there. Changes nothing."""
    return sorted(path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)) if folder.is_dir() else []


def incomplete(folder: Path) -> list[str]:
    """The names of saves in `folder` that a kill cut off. Changes nothing."""
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(PARTIAL)) if folder.is_dir() else []


def _given_up(step: int, why: str) -> str:
    return (
        f"the checkpoint of step {step} is given up ({why}); expected it complete before the run ends; --resume takes "
        "the one before it, if there is one"
    )


def _reason(problem: BaseException) -> str:
    """The innermost cause in one line: torch wraps what ranks raised."""
    failures = getattr(problem, "failures", None)
    if failures:
        problem = next(iter(failures.values()))
        problem = problem[0] if isinstance(problem, tuple) else problem
    return " ".join(str(problem).split())[:300] or type(problem).__name__


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What `save` was told. Raises CheckpointError where it cannot be read."""
    try:
        facts = json.loads((checkpoint / FACTS).read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it holds no object")
        for name, kind in (("step", int), ("config_hash", str), ("config", dict), ("arch", str)):
            if not isinstance(facts.get(name), kind):
                raise ValueError(f"'{name}' is {facts.get(name)!r}")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} has no readable {FACTS} ({error}); expected a complete checkpoint; remove the folder, and "
            "an older one will be used"
        ) from None
    return facts


def load(checkpoint: Path, state: dict[str, torch.Tensor]) -> None:
    """Fill `state`, in place, from a complete checkpoint, each rank its own rows, however many ranks wrote it.

    Raises CheckpointError, naming the tensor, where names, shapes or dtypes differ, and where a file of it is damaged:
    what `state` holds is then worth nothing. Collective.
    """
    try:
        stored = dcp.FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle: anything can come out of a damaged one
        raise _damaged(checkpoint, error) from None
    for name in sorted(stored.keys() | state.keys()):
        found, wanted = stored.get(name), state.get(name)
        if not isinstance(found, TensorStorageMetadata) or wanted is None:
            raise CheckpointError(
                f"{checkpoint} {'lacks' if found is None else 'has'} '{name}', which the model "
                f"{'lacks' if wanted is None else 'has'}; expected the same tensors; resume with the options it was "
                "written with"
            )
        have = (tuple(found.size), found.properties.dtype)
        want = (tuple(wanted.shape), wanted.dtype)
        if have != want:
            raise CheckpointError(
                f"'{name}' is {have[1]} {have[0]} in {checkpoint}; expected {want[1]} {want[0]}; resume with the "
                "options it was written with"
            )
    try:
        dcp.load(state, checkpoint_id=str(checkpoint))
    except (Exception, CheckpointException) as error:  # torch's is no Exception; every rank gets it
        raise _damaged(checkpoint, error) from None


def _damaged(checkpoint: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} cannot be read ({_reason(error)}); expected a complete checkpoint; remove the folder, and "
        "an older one will be used"
    )


def needed_bytes(state: dict[str, torch.Tensor]) -> int:
    """What one checkpoint of `state` takes on disk, all ranks together, about."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
