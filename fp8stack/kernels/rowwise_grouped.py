"""Row-wise FP8 quantisation of groups of columns: one scale for each row of each group, each group padded.

    scale[e, m] = pow2_floor(FP8_MAX / max|x[m, columns of e]|)     q[m, columns of e] = saturate(x[...] * scale[e, m])

The exact rules are scaling.py's; where groups start is groups.py's, with columns for rows. It is what colwise.py does
to the transposed tensor: for a gradient that is already stored with its tokens contiguous.

Traffic (bf16 in): reads 2*M*K, writes M*K_pad + 4*E*M bytes, as far as groups are held in registers between the maximum
and the cast. What is not held is read twice, the second time backwards: what was read last is in the cache.
Layout: x any strides, fastest with unit stride along K; q row-major (M, K_pad) with K_pad = groups.padded_rows(K, E,
alignment); inverse scale float32 (E, M), 1 for an empty group; padded offs int32 (E,). Gaps between groups and
everything past the last one hold zero codes, also where a unit is NaN.

A program takes some rows of one group, and each thread 16 neighbouring columns: two 16-byte loads of bf16 and one
16-byte store. The store is always aligned, since groups are padded; the loads are where a group starts and ends at
multiples of 16. Which groups do is known on the device only, so both ways are compiled, and a group takes one of them:
where it is not aligned, 4-byte words are read for each element, of which the half that is wanted is kept.

A group of a row is short, some hundred elements, and a program that waits for one load after another has little else to
wait for. So the loads of all chunks that are held are issued at once; those past the group's end are masked.

Not here: rows without groups (rowwise.py).
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats, scaling
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, groups, launch


@dataclass(frozen=True)
class RowwiseGroupedConfig:
    """How to launch for one size class.

    rows: of a program. block: columns of a chunk. held: chunks of a group of bf16 that stay in registers and are read
    once; half as many of float32, at least one. programs: see launch.options; float32 takes what registers it needs.
    measured: what says so.
    """

    rows: int
    block: int
    held: int
    num_warps: int
    programs: int
    measured: str


_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"
_CLASSES = ("e<=32", "e>32")


def size_class(e: int) -> str:
    """The size class of e groups. Not of their columns: that is a token count, and must not choose a kernel."""
    return _CLASSES[0] if e <= 32 else _CLASSES[1]


def _rows_of(targets: tuple[str, ...], *configs: RowwiseGroupedConfig) -> dict[tuple[str, str], RowwiseGroupedConfig]:
    return {(target, name): row for target in targets for name, row in zip(_CLASSES, configs, strict=True)}


# (target, size class) -> configuration.
ROWWISE_GROUPED_CONFIGS: dict[tuple[str, str], RowwiseGroupedConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        RowwiseGroupedConfig(8, 1024, 1, 4, 0, _UNMEASURED),
        RowwiseGroupedConfig(16, 512, 1, 4, 0, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        RowwiseGroupedConfig(8, 1024, 1, 4, 0, _UNMEASURED),
        RowwiseGroupedConfig(16, 512, 1, 4, 0, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        RowwiseGroupedConfig(8, 1024, 1, 8, 0, _UNMEASURED),
        RowwiseGroupedConfig(16, 512, 1, 8, 0, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: few programs; but more than one chunk.
    **_rows_of(
        ("cpu",),
        RowwiseGroupedConfig(128, 64, 2, 1, 0, _INTERPRETER),
        RowwiseGroupedConfig(128, 32, 1, 1, 0, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "e<=32"): RowwiseGroupedConfig(8, 128, 1, 1, 8, "not timed: gfx942/sweep-rowwise_grouped.json"),
    ("gfx942", "e>32"): RowwiseGroupedConfig(8, 128, 1, 1, 8, "not timed: gfx942/sweep-rowwise_grouped.json"),
    ("gfx950", "e<=32"): RowwiseGroupedConfig(8, 128, 1, 1, 8, "not timed: gfx950/sweep-rowwise_grouped.json"),
    ("gfx950", "e>32"): RowwiseGroupedConfig(8, 128, 1, 1, 8, "not timed: gfx950/sweep-rowwise_grouped.json"),
    ("sm_90", "e<=32"): RowwiseGroupedConfig(1, 512, 4, 1, 24, "0.87 of a copy: h200/sweep-rowwise_grouped.json"),
    ("sm_90", "e>32"): RowwiseGroupedConfig(
        16, 128, 2, 2, 8, "0.61 to 0.73 of a copy: h200/sweep-rowwise_grouped.json"
    ),
    # End of the swept rows.
}


def quantize_rowwise_grouped_reference(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_rowwise_grouped. Reads offs on the host."""
    (m, k), e = x.shape, offs.shape[0]
    starts, ends, padded_offs = groups.bounds_reference(offs, k, alignment)
    q = torch.zeros((m, groups.padded_rows(k, e, alignment)), dtype=torch.uint8, device=x.device)
    inverse_scale = torch.empty((e, m), dtype=torch.float32, device=x.device)
    to = 0
    for group, (start, end, padded_end) in enumerate(
        zip(starts.tolist(), ends.tolist(), padded_offs.tolist(), strict=True)
    ):
        codes, inverse_scale[group] = scaling.quantize_reference(x[:, start:end], fmt, dim=1, pow2=pow2)
        q[:, to : to + end - start] = codes.view(torch.uint8)
        to = padded_end
    return q.view(formats.get(fmt).dtype), inverse_scale, padded_offs


@jit
def _load_elements(
    x_rows,
    start,
    at,
    size,
    in_rows,
    column_stride,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The BLOCK elements from `at` of a group of each row, as loaded; masked lanes, and those from size on, read 0.

    ALIGNED: start and size are multiples of 16. WORDS: rows consist of aligned words, each of two elements.
    """
    columns = at + tl.arange(0, BLOCK)
    mask = in_rows & (columns < size)[None, :]
    if not UNIT_STRIDE:
        return tl.load(x_rows + (start + columns)[None, :].to(tl.int64) * column_stride, mask=mask, other=0)
    elif ALIGNED:
        # The same numbers, as multiples of 16 to the compiler too.
        whole = in_rows & (columns < size // 16 * 16)[None, :]
        return tl.load(x_rows + (start // 16 * 16 + columns)[None, :], mask=whole, other=0)
    elif WORDS:
        # Two neighbours lie in one word, or in the halves of two that meet.
        odd = start % 2
        pairs = at + 2 * tl.arange(0, BLOCK // 2)
        words = x_rows.to(tl.pointer_type(tl.int32)) + (start // 2) + (pairs // 2)[None, :]
        here = tl.load(words, mask=in_rows & (pairs < size)[None, :], other=0)
        following = tl.load(words + 1, mask=in_rows & (pairs < (size - 1) * odd)[None, :], other=0)
        first = (here >> (16 * odd)).to(tl.int16)
        second = tl.where(odd == 1, following, here >> 16).to(tl.int16)
        second = tl.where((pairs + 1 < size)[None, :], second, 0)
        return tl.reshape(tl.join(first, second), (first.shape[0], BLOCK))
    else:
        return tl.load(x_rows + (start + columns)[None, :], mask=mask, other=0)


@jit
def _largest_of(elements):
    """Largest absolute float32 bits of each row."""
    if elements.dtype == tl.int16:
        return tl.max(elements & 0x7FFF, axis=1).to(tl.int32) << 16
    else:
        return tl.max(elements & 0x7FFFFFFF, axis=1)


@jit
def _store_codes(
    q_rows,
    elements,
    scale,
    at,
    size,
    padded_size,
    in_rows,
    BLOCK: tl.constexpr,
    POISONED: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    """Codes of a chunk to q_rows, which are at the group's first padded column. POISONED: as in colwise.store_parts."""
    columns = at + tl.arange(0, BLOCK)
    y = cast.float_bits(elements).to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)[:, None]
    if POISONED:
        y = tl.where((columns < size)[None, :], y, 0.0)
    codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, POISONED)
    tl.store(q_rows + columns[None, :], codes, mask=in_rows & (columns < padded_size)[None, :])


@jit
def _quantize_columns_of_rows(
    x_rows,
    q_rows,
    inverse_scale,
    in_rows,
    start,
    size,
    padded_size,
    column_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    """One group of some rows. x_rows: rows; q_rows: their first code of the group; inverse_scale: where theirs go."""
    # All loads of the held columns are issued before the first is waited for.
    held = ()
    for chunk in tl.static_range(HELD):
        elements = _load_elements(
            x_rows, start, chunk * BLOCK, size, in_rows, column_stride, BLOCK, ALIGNED, UNIT_STRIDE, WORDS
        )
        held = held + (elements,)  # noqa: RUF005 - Triton compiles no starred expression
    largest = tl.zeros((ROWS,), tl.int32)
    for chunk in tl.static_range(HELD):
        largest = tl.maximum(largest, _largest_of(held[chunk]))
    for at in range(HELD * BLOCK, size, BLOCK):
        more = _load_elements(x_rows, start, at, size, in_rows, column_stride, BLOCK, ALIGNED, UNIT_STRIDE, WORDS)
        largest = tl.maximum(largest, _largest_of(more))
    scale = cast.scale_bits(largest, MAX, POW2)
    inverse = cast.inverse_bits(scale).to(tl.float32, bitcast=True)
    tl.store(inverse_scale[:, None], inverse[:, None], mask=in_rows)

    for chunk in tl.static_range(HELD):
        # Not a mask alone: most groups are shorter than what is held, and casting nothing costs as much as casting.
        if chunk * BLOCK < padded_size:
            _store_codes(
                q_rows, held[chunk], scale, chunk * BLOCK, size, padded_size, in_rows, BLOCK, False,
                MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
            )  # fmt: skip
    chunks = tl.cdiv(padded_size, BLOCK)
    for back in range(1, chunks - HELD + 1):
        far = (chunks - back) * BLOCK
        again = _load_elements(x_rows, start, far, size, in_rows, column_stride, BLOCK, ALIGNED, UNIT_STRIDE, WORDS)
        _store_codes(
            q_rows, again, scale, far, size, padded_size, in_rows, BLOCK, False,
            MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip
    if (tl.max(largest, axis=0) >= 0x7F800000) & (size > 0):
        # Once more, as in colwise.py: NaN codes, and zero codes in the gap.
        tl.debug_barrier()
        for at in range(0, padded_size, BLOCK):
            last = _load_elements(x_rows, start, at, size, in_rows, column_stride, BLOCK, ALIGNED, UNIT_STRIDE, WORDS)
            _store_codes(
                q_rows, last, scale, at, size, padded_size, in_rows, BLOCK, True,
                MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
            )  # fmt: skip


# K and k_pad are token counts: not specialised, or each divisibility by 16 would compile anew.
@jit(do_not_specialize=["M", "K", "k_pad_blocks", "E", "column_stride"])
def _quantize_rowwise_grouped_kernel(
    x,
    q,
    inverse_scale,
    offs,
    padded_offs,
    M,
    K,
    E,
    k_pad_blocks,
    row_stride,
    column_stride,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    # Neighbouring programs take neighbouring groups of the same rows: their memory is contiguous. One dimension of the
    # grid, as CUDA's others end at 65,535.
    group, row_block = tl.program_id(0) % E, tl.program_id(0) // E
    start, size, padded_start, padded_size, total = groups.bounds(offs, group, K, E, LANES, ALIGNMENT)
    if row_block == 0:
        tl.store(padded_offs + group, padded_start + padded_size)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    in_rows = (rows < M)[:, None]
    # 64 bits: rows * stride passes 2^31 from 2 GiB of codes on.
    x_rows = x + rows.to(tl.int64)[:, None] * row_stride
    q_row = q + rows.to(tl.int64)[:, None] * (k_pad_blocks * 16)
    inverse_row = inverse_scale + group.to(tl.int64) * M + rows
    # Neither gathered elements nor halves of words are held, and of these few are taken at a time: their addresses
    # alone fill the registers.
    if (start % 16 == 0) & (size % 16 == 0):
        _quantize_columns_of_rows(
            x_rows, q_row + padded_start, inverse_row, in_rows, start, size, padded_size, column_stride, ROWS, BLOCK,
            HELD if UNIT_STRIDE else 0, True, UNIT_STRIDE, WORDS,
            POW2, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip
    else:
        _quantize_columns_of_rows(
            x_rows, q_row + padded_start, inverse_row, in_rows, start, size, padded_size, column_stride, ROWS,
            BLOCK // 2, 0, False, UNIT_STRIDE, WORDS,
            POW2, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip

    first, end = groups.share_of_tail(group, total, k_pad_blocks * 16, E)
    for at in range(first, end, BLOCK):
        tail = at + tl.arange(0, BLOCK)
        zeros = tl.zeros((ROWS, BLOCK), tl.uint8)
        tl.store(q_row + tail[None, :], zeros, mask=in_rows & (tail < end)[None, :])


def launch_rowwise_grouped(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: RowwiseGroupedConfig,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel with a given configuration. For the op, and for timing one row against another."""
    (m, k), e = x.shape, offs.shape[0]
    k_pad = groups.padded_rows(k, e, alignment)
    q = torch.empty((m, k_pad), dtype=torch.uint8, device=x.device)
    inverse_scale = torch.empty((e, m), dtype=torch.float32, device=x.device)
    padded_offs = torch.empty_like(offs)
    words = x.itemsize == 2 and k % 2 == 0 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    with launch.on_device(x):
        _quantize_rowwise_grouped_kernel[(e * max(-(-m // row.rows), 1),)](
            x.view(cast.INPUTS[x.dtype]),
            q,
            inverse_scale,
            offs.contiguous(),
            padded_offs,
            m,
            k,
            e,
            k_pad // 16,
            *x.stride(),
            **_constexprs(x.dtype, e, fmt, pow2, alignment, row, x.stride(1) == 1, words, target),
            **_options(x.dtype, fmt, row, target),
            **LAUNCH_OPTIONS,
        )
    return q.view(fmt.dtype), inverse_scale, padded_offs


def _constexprs(
    dtype: torch.dtype,
    e: int,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: RowwiseGroupedConfig,
    unit_stride: bool,
    words: bool,
    target: str,
) -> dict[str, object]:
    return {
        "LANES": groups.lanes(e),
        "ALIGNMENT": alignment,
        "ROWS": row.rows,
        "BLOCK": row.block,
        "HELD": max(row.held * 2 // dtype.itemsize, 1),
        "UNIT_STRIDE": unit_stride,
        "WORDS": words,
        "POW2": pow2,
        **cast.constants(fmt, target),
    }


def _options(dtype: torch.dtype, fmt: formats.Format, row: RowwiseGroupedConfig, target: str) -> dict[str, int]:
    """Launch options. A limit on NVIDIA's registers is for the native cast: the integer encoder needs more of them."""
    native = cast.constants(fmt, target)["NATIVE"] is not None
    limited = (native and dtype.itemsize == 2) or device.lookup(target).vendor != "nvidia"
    return launch.options(row.num_warps, row.programs if limited else 0, target)


@torch.library.custom_op(
    "fp8stack::quantize_rowwise_grouped",
    mutates_args=(),
    schema="(Tensor x, Tensor offs, str fmt, bool pow2, int alignment) -> (Tensor, Tensor, Tensor)",
)
def _quantize_rowwise_grouped(x, offs, fmt, pow2, alignment):
    which = launch.implementation(x)
    launch.record("quantize_rowwise_grouped", which)
    if which == "reference":
        return quantize_rowwise_grouped_reference(x, offs, fmt, pow2, alignment)
    target = device.detect(x.device).target.name
    row = launch.config(ROWWISE_GROUPED_CONFIGS, target, size_class(offs.shape[0]))
    return launch_rowwise_grouped(x, offs, formats.get(fmt), pow2, alignment, row, target)


@_quantize_rowwise_grouped.register_fake
def _(x, offs, fmt, pow2, alignment):
    (m, k), e = x.shape, offs.shape[0]
    q = torch.empty((m, groups.padded_rows(k, e, alignment)), dtype=formats.get(fmt).dtype, device=x.device)
    return q, torch.empty((e, m), dtype=torch.float32, device=x.device), offs.new_empty((e,))


def quantize_rowwise_grouped(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise each row of each group of columns with its own scale; groups padded, codes row-major.

    x: (M, K), bfloat16 or float32, any strides. offs: int32 (E,), cumulative end column of each group, read on the
    device; bad ones are clamped (groups.py). pow2: round scales down to powers of two. alignment: groups start at
    multiples.
    Returns codes (M, K_pad) of fmt.dtype, row-major, zero in gaps and tail; the inverse scale (E, M), float32, 1 for an
    empty group; padded offs, int32 (E,).
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks, offs or alignments.
    """
    cast.require_input(x, "quantize_rowwise_grouped")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected two dimensions (M, K); flatten the leading ones")
    groups.require_offs(offs, x, alignment)
    return _quantize_rowwise_grouped(x, offs, formats.get(fmt).name, pow2, alignment)


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernel on an arch, for the codegen suite.

    The arch's own formats for 32 and 128 groups, float32 input, and one format that the arch lacks.
    """
    row = device.lookup(arch)
    foreign = "e4m3fn" if row.e4m3 == "e4m3fnuz" else "e4m3fnuz"
    cases = [
        (row.e4m3, torch.bfloat16, 32),
        (row.e4m3, torch.bfloat16, 128),
        (row.e4m3, torch.float32, 32),
        (row.e5m2, torch.bfloat16, 32),
        (foreign, torch.bfloat16, 32),
    ]
    return [_compile_spec(formats.get(fmt), dtype, e, row.name) for fmt, dtype, e in cases]


def _compile_spec(fmt: formats.Format, dtype: torch.dtype, e: int, target: str) -> CompileSpec:
    row = launch.config(ROWWISE_GROUPED_CONFIGS, target, size_class(e))
    words = dtype.itemsize == 2
    launched = _options(dtype, fmt, row, target)
    pointers = {"x": _POINTERS[dtype], "q": "*u8", "inverse_scale": "*fp32", "offs": "*i32", "padded_offs": "*i32"}
    return CompileSpec(
        kernel=_quantize_rowwise_grouped_kernel,
        case=f"rowwise-grouped-{fmt.name}-{_INPUT_NAMES[dtype]}-e{e}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys(("M", "K", "E", "k_pad_blocks", "row_stride"), "i32")},
        constexprs={
            "column_stride": 1,
            **_constexprs(dtype, e, fmt, True, groups.MULTIPLE, row, True, words, target),
        },
        num_warps=launched.pop("num_warps"),
        divisible=(*pointers, "row_stride"),
        within_2gb=tuple(pointers),
        native=cast.constants(fmt, target)["NATIVE"] is not None,
        options=launched,
    )
