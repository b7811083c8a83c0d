"""Tokens and random bits, from integers only: the same on every platform, for ever.

torch's generators are no good for a golden curve: the bits of `torch.randn` on a CPU depend on the vector width that
the dispatcher picked, those of a GPU on its launch grid. Everything random in the trainer (tokens, initial weights,
nudges, the signs of gradient digests) comes from `random_bits` below instead: a counter-based hash, computed in int64
without overflow, so any element can be had without the ones before it. Resuming a stream is passing another start.

The synthetic language
----------------------
A sequence is a random walk on a ring of R = 256 symbols, relabelled by a fixed permutation of the
vocabulary. Each step adds one of five offsets with probabilities 8/16, 4/16, 2/16, 1/16, 1/16. Which five is decided
once a sequence: there are four dialects, drawn uniformly. So a model learns, in this order, which symbols are in use
(ln V -> ln R), which offsets exist (20 successors a symbol: no attention needed), and which dialect it is reading
(needs the context). Within a dialect the five offsets are distinct, so the entropy of the next token given everything
that the generator knows is exactly

    H = 8/16 log 2 + 4/16 log 4 + 2/16 log 8 + 2 * 1/16 log 16 = 1.875 ln 2 = 1.2997 nats,

and no model's expected loss can be below it: `SyntheticTokens.entropy_floor_nats`. A mean below the floor by more
than sampling noise is a bug (a label leak), not a good model.

Token files
-----------
`TokenFile` maps a file of raw little-endian uint16 or uint32 ids. Sample i is tokens i*S ... i*S + S: windows that
share one token, so that every token but the first is a label once an epoch. Each epoch has an order of its own: a
permutation that is computed, not stored (four rounds of a Feistel network on the next power of four, applied again
where it leaves the range), so a file of any length costs no memory and any place in the order can be had directly.

Sharding and resuming
---------------------
Either way sample n is a pure function of (seed, n), and step s (from 0) of rank r reads samples s*B + r*b ... s*B + r*b
+ b - 1, where B is the batch of all ranks and b a rank's share: shards neither overlap nor leave gaps, and resuming
after step s is asking for step s. `batches` reads ahead in worker processes, which are asked for steps in order and
answer in order: their number changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

# Part of the configuration hash: raise it with any change that alters a token or an initial weight.
GENERATOR_VERSION = 1

_MASK32 = 0xFFFFFFFF
_FNV_OFFSET, _FNV_PRIME = 0x811C9DC5, 0x01000193

# Offsets of the walk by dialect. Sidon-like sets (no small common differences), so that two steps do not look like one.
DIALECTS: tuple[tuple[int, ...], ...] = (
    (1, 23, 71, 112, 199),
    (5, 34, 90, 151, 230),
    (11, 47, 103, 176, 241),
    (17, 62, 127, 187, 214),
)
# The probabilities in sixteenths, as the table that four random bits index.
_CHOICE_OF_NIBBLE = (0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4)
RING = 256

# The name of this language among the values of --data, and the bytes of a token id in a file.
SYNTHETIC = "synthetic"
TOKEN_BYTES = {"uint16": 2, "uint32": 4}


def key_of(text: str) -> int:
    """32-bit FNV-1a hash of `text` (UTF-8): how a name becomes the key of a random stream."""
    value = _FNV_OFFSET
    for byte in text.encode():
        value = ((value ^ byte) * _FNV_PRIME) & _MASK32
    return value


def _mix(x: torch.Tensor) -> torch.Tensor:
    """One round of a 32-bit avalanche hash on int64 values in [0, 2^32).

    Both multipliers are below 2^31, so no product reaches 2^63: exact without relying on wrap-around.
    Source of the constants: the low-bias search of the hash-prospector project.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK32
    return x ^ (x >> 15)


def random_bits(seed: int, stream: str, index: torch.Tensor) -> torch.Tensor:
    """32 random bits for each index.

    Args:
        seed: any integer in [0, 2^32).
        stream: name of the stream; different names are independent.
        index: int64, any shape, values in [0, 2^62).

    Returns:
        int64 tensor of `index`'s shape and device, values in [0, 2^32).

    Raises:
        ValueError: another dtype of index, which would overflow silently.
    """
    if index.dtype != torch.int64:
        raise ValueError(f"index has dtype {index.dtype}; random_bits takes int64; convert it with .long()")
    key = key_of(f"{seed & _MASK32}/{stream}")
    low = _mix((index & _MASK32) ^ key)
    return _mix((low + (index >> 32) * 0x1E3779B9 + 0x3C6EF372) & _MASK32)


def random_signs(stream: str, index: torch.Tensor) -> torch.Tensor:
    """Elements `index` (int64 (n,)) of two vectors of +1 and -1, those of the name `stream` in every run.

    Returns:
        int8 (2, n) on `index`'s device.
    """
    bits = random_bits(0, f"signs/{stream}", index)
    return torch.stack([((bits >> 31) & 1) * 2 - 1, ((bits >> 30) & 1) * 2 - 1]).to(torch.int8)


@dataclass(frozen=True)
class Batch:
    """Inputs and next-token labels. Both int64 (B, S)."""

    tokens: torch.Tensor
    labels: torch.Tensor


class Text:
    """Numbered samples. `samples(first, count)` is all that a text must have."""

    def samples(self, first: int, count: int) -> Batch:
        """Samples `first` ... `first + count - 1`, on the CPU. Both tensors int64 (count, seq)."""
        raise NotImplementedError

    def check(self, batch: Batch) -> None:
        """Raise DataError for what no model of this vocabulary can read."""

    def batch(self, step: int, batch: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The share of `rank` in the global batch of `step` (counted from 0); `batch` samples a rank."""
        return self.samples((step * world_size + rank) * batch, batch)


class SyntheticTokens(Text):
    """The language of this file's header.

    Args:
        vocab: vocabulary size of the model, at least RING.
        seq: tokens a sample, at least 1.
        seed: which text, in [0, 2^32).

    Raises:
        ValueError: vocab or seq is smaller.
    """

    entropy_floor_nats: float = 1.875 * math.log(2.0)

    def __init__(self, vocab: int, seq: int, seed: int) -> None:
        if vocab < RING:
            raise ValueError(f"vocabulary {vocab} is smaller than the ring of {RING} symbols; use a larger vocabulary")
        if seq < 1:
            raise ValueError(f"sequence length {seq} is not positive; give at least 1")
        self.vocab, self.seq, self.seed = vocab, seq, seed
        # A permutation of the vocabulary by sorting random keys; the index breaks ties, so the order is total.
        index = torch.arange(vocab)
        keys = (random_bits(seed, "data/symbols", index) << 20) + index
        self._symbols = torch.argsort(keys)[:RING].contiguous()
        self._offsets = torch.tensor(DIALECTS)
        self._choice = torch.tensor(_CHOICE_OF_NIBBLE)

    def samples(self, first: int, count: int) -> Batch:
        """Samples `first` ... `first + count - 1`, on the CPU. Both tensors int64 (count, seq)."""
        sample = torch.arange(first, first + count)
        start = random_bits(self.seed, "data/start", sample)
        dialect = (start >> 8) & 3
        # One hash a step of the walk; a sample owns a block of 2^24 indices, so samples never share bits.
        position = (sample[:, None] << 24) + torch.arange(self.seq)
        nibble = random_bits(self.seed, "data/steps", position) >> 28
        step = self._offsets[dialect[:, None], self._choice[nibble]]
        walk = torch.cat([(start & 0xFF)[:, None], step], dim=1).cumsum(dim=1) % RING
        text = self._symbols[walk]
        return Batch(tokens=text[:, :-1].contiguous(), labels=text[:, 1:].contiguous())


# ---------------------------------------------------------------------------------------------------------- token files
class DataError(ValueError):
    """A token file that cannot be trained on. The message is one line: what, expected, what next."""


def permuted(index: torch.Tensor, count: int, seed: int, stream: str) -> torch.Tensor:
    """A permutation of 0 ... count - 1 that belongs to (seed, stream), at `index` (int64, values below count)."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1

    def shuffled(x: torch.Tensor) -> torch.Tensor:
        left, right = x >> half, x & mask
        for turn in range(4):
            left, right = right, left ^ (random_bits(seed, f"{stream}/{turn}", right) & mask)
        return (left << half) | right

    x = shuffled(index)
    while bool((outside := x >= count).any()):  # at most three in four are, so it ends soon
        x = torch.where(outside, shuffled(x), x)
    return x


class TokenFile(Text):
    """Samples of a memory-mapped file; see the header.

    Args:
        path: raw little-endian token ids.
        dtype: of the ids, a key of TOKEN_BYTES.
        vocab: vocabulary size of the model.
        seq: tokens a sample.
        seed: which order, in [0, 2^32).
        batch: samples a step: the file must hold at least one batch.

    Raises:
        DataError: unreadable, cut in the middle of a token, shorter than a batch, or with an id beyond the vocabulary
            in its first 64 Mi tokens (later ones are found when they are read).
    """

    _SCANNED = 1 << 26

    def __init__(self, path: str, dtype: str, vocab: int, seq: int, seed: int, batch: int) -> None:
        self.path, self.dtype, self.vocab, self.seq, self.seed = path, dtype, vocab, seq, seed
        self._map: torch.Tensor | None = None
        try:
            size = Path(path).stat().st_size
            with open(path, "rb"):
                pass
        except OSError as error:
            raise DataError(
                f"'{path}' cannot be read ({error.strerror}); expected a file of token ids; correct --data"
            ) from None
        self.tokens, rest = divmod(size, TOKEN_BYTES[dtype])
        if rest:
            raise DataError(
                f"'{path}' has {size} bytes, no multiple of {TOKEN_BYTES[dtype]}; expected whole {dtype} tokens; "
                "correct --data-dtype, or make the file again"
            )
        self.count = max(0, self.tokens - 1) // seq
        if self.count < batch:
            raise DataError(
                f"'{path}' holds {self.tokens} tokens, {self.count} samples of {seq}; expected at least one batch of "
                f"{batch}; give a longer file, or lower --batch or --seq"
            )
        scanned = min(self.tokens, self._SCANNED)
        for start in range(0, scanned, 1 << 22):
            stop = min(start + (1 << 22), scanned)
            self._check_ids(self._mapped()[start:stop].to(torch.int64), f"in tokens {start} to {stop}")

    def samples(self, first: int, count: int) -> Batch:
        """Samples `first` ... of the endless sequence of epochs."""
        number = torch.arange(first, first + count)
        epoch = number // self.count
        place = torch.empty_like(number)
        for this in epoch.unique().tolist():
            chosen = epoch == this
            place[chosen] = permuted(number[chosen] % self.count, self.count, self.seed, f"data/epoch{this}")
        rows = [self._mapped()[i * self.seq : i * self.seq + self.seq + 1] for i in place.tolist()]
        text = torch.stack(rows).to(torch.int64) if rows else torch.empty(0, self.seq + 1, dtype=torch.int64)
        return Batch(tokens=text[:, :-1].contiguous(), labels=text[:, 1:].contiguous())

    def check(self, batch: Batch) -> None:
        """Refuse ids beyond the vocabulary: an embedding of a GPU would read beyond its end."""
        self._check_ids(batch.labels, "in a batch")
        self._check_ids(batch.tokens, "in a batch")

    def _check_ids(self, ids: torch.Tensor, where: str) -> None:
        if ids.numel() and (largest := int(ids.max())) >= self.vocab:
            raise DataError(
                f"'{self.path}' holds token id {largest} ({where}); the model's vocabulary is {self.vocab}; choose the "
                "model that the tokeniser belongs to, or correct --data-dtype"
            )

    def _mapped(self) -> torch.Tensor:
        if self._map is None:
            self._map = torch.from_file(self.path, shared=False, size=self.tokens, dtype=getattr(torch, self.dtype))
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        """Without the map: a worker makes its own."""
        return {**self.__dict__, "_map": None}


# -------------------------------------------------------------------------------------------------------------- batches
class _Shares(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The share of one rank, by step."""

    def __init__(self, text: Text, batch: int, rank: int, world_size: int) -> None:
        self._text, self._place = text, (batch, rank, world_size)

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self._text.batch(step, *self._place)
        return batch.tokens, batch.labels


def batches(text: Text, steps: range, batch: int, rank: int, world_size: int, workers: int) -> Iterator[Batch]:
    """The share of `rank` of each of `steps` (from 0), in order; read ahead by `workers` processes, or here if 0."""
    shares = _Shares(text, batch, rank, world_size)
    loader = DataLoader(shares, batch_size=None, sampler=steps, num_workers=workers)
    for tokens, labels in loader:
        found = Batch(tokens, labels)
        text.check(found)
        yield found
