"""Reads the golden tables and refuses any that was touched by hand.

A table that lost a row still passes every comparison, so each file is held to its row count and SHA-256 in INDEX.json,
and to the floors below that INDEX.json cannot lower: 256 decodes, every midpoint, 60 rows an op and format.
Not here: making them (generate.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
FORMATS = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
OPS = ("rowwise", "tensorwise")
MX_FORMATS = ("e4m3fn", "e5m2")
# Part of a file's name -> the fewest rows that it may have, whatever the index says.
# Casts: at least 124 midpoints (e5m2), three float32 each, two signs, and the cast rows.
FLOORS = {".decode.": 256, ".encode.": 6 * 124 + 30, "rowwise.": 60, "tensorwise.": 60, "mxfp8.": 60}
ADVICE = "restore it with: python suites/numerics/golden/generate.py"


class GoldenError(ValueError):
    """A golden table is missing, shortened or edited."""


@dataclass(frozen=True)
class Encode:
    """One bare cast: float32 bits to a code."""

    name: str
    bits: int
    code: int


@dataclass(frozen=True)
class Unit:
    """One scaling unit: rows of input bits (of ``dtype``) to codes, scale and inverse scale (float32 bits)."""

    name: str
    dtype: str
    pow2: bool
    x: tuple[tuple[int, ...], ...]
    codes: tuple[tuple[int, ...], ...]
    scale: int
    inverse_scale: int


@dataclass(frozen=True)
class Block:
    """One MXFP8 block: input bits (of ``dtype``) to codes and E8M0 byte, the scale rounded by ``mode``."""

    name: str
    dtype: str
    mode: str
    x: tuple[int, ...]
    codes: tuple[int, ...]
    byte: int


def read_rows(name: str, folder: Path = HERE) -> list[list[str]]:
    """Rows of one table without its header; raises GoldenError where the file is not the one that was generated."""
    index = json.loads((folder / "INDEX.json").read_text(encoding="ascii"))
    if name not in index:
        raise GoldenError(f"{name} is not in INDEX.json; expected one of {', '.join(sorted(index))}; {ADVICE}")
    path = folder / name
    if not path.is_file():
        raise GoldenError(f"{name} is missing; expected {index[name]['rows']} rows; {ADVICE}")
    data = path.read_bytes()
    rows = [line.split(",") for line in data.decode("ascii").splitlines()][1:]
    if len(rows) != index[name]["rows"]:
        raise GoldenError(f"{name} has {len(rows)} rows; expected {index[name]['rows']}; {ADVICE}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != index[name]["sha256"]:
        raise GoldenError(f"{name} has SHA-256 {digest}; expected {index[name]['sha256']}; {ADVICE}")
    floor = next(least for part, least in FLOORS.items() if part in name)
    if len(rows) < floor:
        raise GoldenError(f"{name} has {len(rows)} rows; expected at least {floor}; generate.py must make more")
    return rows


@cache
def decodes(fmt: str) -> tuple[int, ...]:
    """Float32 bits of the 256 codes of a format (also ``e8m0fnu``), by code."""
    rows = read_rows(f"{fmt}.decode.csv")
    codes = [int(code, 16) for code, _ in rows]
    if codes != list(range(256)):
        raise GoldenError(f"{fmt}.decode.csv lists its codes out of order; expected 00 to ff; {ADVICE}")
    return tuple(int(bits, 16) for _, bits in rows)


@cache
def encodes(fmt: str) -> tuple[Encode, ...]:
    """Bare casts of a format: midpoints, their neighbours, and the named cast rows."""
    return tuple(Encode(name, int(bits, 16), int(code, 16)) for name, bits, code in read_rows(f"{fmt}.encode.csv"))


@cache
def units(op: str, fmt: str) -> tuple[Unit, ...]:
    """Scaling units of an op and a format."""
    return tuple(
        Unit(
            name,
            dtype,
            pow2 == "1",
            tuple(tuple(int(bits, 16) for bits in line.split()) for line in x.split("/")),
            tuple(tuple(bytes.fromhex(line)) for line in codes.split("/")),
            int(scale, 16),
            int(inverse, 16),
        )
        for name, dtype, pow2, x, codes, scale, inverse in read_rows(f"{op}.{fmt}.csv")
    )


@cache
def blocks(fmt: str) -> tuple[Block, ...]:
    """MXFP8 blocks of an OCP format, in all rounding modes."""
    return tuple(
        Block(name, dtype, mode, tuple(int(bits, 16) for bits in x.split()), tuple(bytes.fromhex(codes)), int(byte, 16))
        for name, dtype, mode, x, codes, byte in read_rows(f"mxfp8.{fmt}.csv")
    )
