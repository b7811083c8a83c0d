"""Both FP8 quantisations of a tensor with grouped rows: row codes for one GEMM, padded column codes for another.

The results are those of quantize_rowwise and of quantize_colwise_grouped; see rowwise.py and colwise.py. A grouped
linear wants both of its input: rows in the forward, columns of each expert's rows for the weight gradient.

Traffic (bf16 in): reads 2*M*K, writes M*K + K*M_pad bytes and the scales, if the second read of x comes from the cache;
with both reads from memory 2*M*K more, which is what two launches move.

The second read hits the cache because of the order of work: programs start in the order of their number, and for each
group in turn come those for its rows, then those for its columns. How many rows a group has is known on the device
only, so a program finds its group by counting the programs of the groups before. A launch has as many programs as the
worst offs need; those that are left over quantise the rows that belong to no group, or stop.

Layout: x any strides, fastest with unit stride along K; row codes (M, K) row-major and inverse scale (M,); column codes
(M_pad, K) column-major and inverse scale (E, K); padded offs (E,).
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, colwise, groups, launch, rowwise


@dataclass(frozen=True)
class RowwiseAndColwiseConfig:
    """How to launch for one size class.

    row_rows: rows of a program for rows. row_block: elements of a chunk of a row. The rest as colwise.ColwiseConfig.
    """

    row_rows: int
    row_block: int
    columns: int
    rows: int
    parts: int
    held: int
    num_warps: int
    programs: int
    measured: str

    @property
    def colwise(self) -> colwise.ColwiseConfig:
        """The part for columns."""
        return colwise.ColwiseConfig(
            self.columns, self.rows, self.parts, self.held, self.num_warps, self.programs, self.measured
        )


_HELD = 8192  # of a row; colwise's tile and a longer one would not both fit in the registers of a program
_WIDTHS = (2048, _HELD)


def size_class(e: int, k: int) -> str:
    """The size class of e groups of rows of k elements, such as "e<=32 k<=8192"."""
    width = next((f"k<={limit}" for limit in _WIDTHS if k <= limit), f"k>{_HELD}")
    return f"{colwise.size_class(e)} {width}"


_CLASSES = tuple(size_class(e, k) for e in (32, 33) for k in (*_WIDTHS, _HELD + 1))
_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"


def _rows_of(
    targets: tuple[str, ...], *configs: RowwiseAndColwiseConfig
) -> dict[tuple[str, str], RowwiseAndColwiseConfig]:
    return {(target, name): row for target in targets for name, row in zip(_CLASSES, configs, strict=True)}


# (target, size class) -> configuration.
ROWWISE_AND_COLWISE_CONFIGS: dict[tuple[str, str], RowwiseAndColwiseConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        RowwiseAndColwiseConfig(4, 2048, 32, 1024, 16, 1, 8, 2, _UNMEASURED),
        RowwiseAndColwiseConfig(1, 4096, 32, 1024, 16, 1, 8, 2, _UNMEASURED),
        RowwiseAndColwiseConfig(1, 4096, 32, 1024, 16, 1, 8, 2, _UNMEASURED),
        RowwiseAndColwiseConfig(4, 2048, 64, 256, 16, 1, 4, 3, _UNMEASURED),
        RowwiseAndColwiseConfig(1, 2048, 64, 256, 16, 1, 4, 3, _UNMEASURED),
        RowwiseAndColwiseConfig(1, 2048, 64, 256, 16, 1, 4, 3, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        RowwiseAndColwiseConfig(2, 2048, 32, 1024, 16, 1, 4, 2, _UNMEASURED),
        RowwiseAndColwiseConfig(1, 4096, 32, 1024, 16, 1, 4, 2, _UNMEASURED),
        RowwiseAndColwiseConfig(1, 4096, 32, 1024, 16, 1, 4, 2, _UNMEASURED),
        RowwiseAndColwiseConfig(2, 2048, 32, 1024, 16, 1, 4, 2, _UNMEASURED),
        RowwiseAndColwiseConfig(1, 4096, 32, 1024, 16, 1, 4, 2, _UNMEASURED),
        RowwiseAndColwiseConfig(1, 4096, 32, 1024, 16, 1, 4, 2, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        *(RowwiseAndColwiseConfig(1, 2048, 32, 512, 16, 1, 4, 0, _UNMEASURED) for _ in _CLASSES),
    ),
    # The interpreter runs program after program in Python: few programs; but more than one chunk.
    **_rows_of(
        ("cpu",),
        *(RowwiseAndColwiseConfig(32, 256, 128, 64, 2, 1, 1, 0, _INTERPRETER) for _ in _CLASSES),
    ),
}


def quantize_rowwise_and_colwise_reference(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_rowwise_and_colwise."""
    return (
        *rowwise.quantize_rowwise_reference(x, fmt, pow2),
        *colwise.quantize_colwise_grouped_reference(x, offs, fmt, pow2, alignment),
    )


@jit
def _place(starts, sizes, program, blocks, E, ROW_ROWS: tl.constexpr, LANES: tl.constexpr):
    """Group of a program, its place among that group's, and how many of these are for rows.

    Groups have their row programs first, then `blocks` for columns. E: no group, its rows are those past the last end.
    """
    lanes = tl.arange(0, LANES)
    row_programs = (sizes + (ROW_ROWS - 1)) // ROW_ROWS
    programs = tl.where(lanes < E, row_programs + blocks, 0)
    group = tl.minimum(tl.sum((tl.cumsum(programs, 0) <= program).to(tl.int32), 0), E)
    place = program - tl.sum(tl.where(lanes < group, programs, 0), 0)
    return group, place, tl.sum(tl.where(lanes == group, row_programs, 0), 0)


# M and m_pad are token counts: not specialised, or each divisibility by 16 would compile anew.
@jit(do_not_specialize=["M", "m_pad_blocks", "E", "column_stride"])
def _quantize_rowwise_and_colwise_kernel(
    x,
    row_q,
    row_inverse_scale,
    column_q,
    column_inverse_scale,
    offs,
    padded_offs,
    M,
    K,
    E,
    m_pad_blocks,
    row_stride,
    column_stride,
    ROW_ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    ROW_HELD: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    C: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    LANES_LAST: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    starts, sizes = groups.extents(offs, M, E, LANES)
    group, place, row_programs = _place(
        starts, sizes, tl.program_id(0), tl.cdiv(K, COLUMNS), E, ROW_ROWS, LANES
    )  # fmt: skip
    start, size, padded_start, padded_size, total = groups.bounds_of(starts, sizes, group, LANES, ALIGNMENT)
    if group == E:
        start = tl.max(starts + sizes, 0)
        size = M - start
        row_programs = tl.cdiv(size, ROW_ROWS)
    if place < row_programs:
        rowwise.quantize_rows(
            (start + place * ROW_ROWS).to(tl.int64), x, row_q, row_inverse_scale, start + size, K, row_stride,
            column_stride, ROW_ROWS, ROW_BLOCK, ROW_CHUNKS, ROW_HELD, UNIT_STRIDE,
            POW2, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip
    elif group < E:
        block = place - row_programs
        if block == 0:
            tl.store(padded_offs + group, padded_start + padded_size)
        tail, tail_end = groups.share_of_tail(group, total, m_pad_blocks * 16, E)
        colwise.quantize_columns(
            x, column_q, column_inverse_scale, group, block, start, size, padded_start, padded_size,
            tail - padded_start, tail_end - padded_start, K, m_pad_blocks * 16, row_stride, column_stride, COLUMNS,
            ROWS, PARTS, HELD, C, UNIT_STRIDE, LANES_LAST,
            POW2, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip


def launch_rowwise_and_colwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: RowwiseAndColwiseConfig,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel with a given configuration. For the op, and for timing one row against another."""
    (m, k), e = x.shape, offs.shape[0]
    row_q = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    row_inverse_scale = torch.empty((m,), dtype=torch.float32, device=x.device)
    if k == 0:
        row_inverse_scale.fill_(1.0)  # the amax of nothing is 0
        columns = colwise.launch_colwise_grouped(x, offs, fmt, pow2, alignment, row.colwise, target)
        return row_q.view(fmt.dtype), row_inverse_scale, *columns
    m_pad = groups.padded_rows(m, e, alignment)
    column_q = torch.empty((k, m_pad), dtype=torch.uint8, device=x.device)
    column_inverse_scale = torch.empty((e, k), dtype=torch.float32, device=x.device)
    padded_offs = torch.empty_like(offs)
    # Each group, and the rows past the last one, can end in a program with few rows.
    programs = e * -(-k // row.columns) + -(-m // row.row_rows) + e
    with launch.on_device(x):
        _quantize_rowwise_and_colwise_kernel[(programs,)](
            x.view(cast.INPUTS[x.dtype]),
            row_q,
            row_inverse_scale,
            column_q,
            column_inverse_scale,
            offs.contiguous(),
            padded_offs,
            m,
            k,
            e,
            m_pad // 16,
            *x.stride(),
            UNIT_STRIDE=x.stride(1) == 1,
            **_constexprs(x.dtype, e, k, fmt, pow2, alignment, row, target),
            **colwise.options(fmt, row.colwise, target),
            **LAUNCH_OPTIONS,
        )
    return row_q.view(fmt.dtype), row_inverse_scale, column_q.view(fmt.dtype).t(), column_inverse_scale, padded_offs


def _constexprs(
    dtype: torch.dtype,
    e: int,
    k: int,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: RowwiseAndColwiseConfig,
    target: str,
) -> dict[str, object]:
    return {
        "ROW_ROWS": row.row_rows,
        "ROW_BLOCK": row.row_block,
        "ROW_CHUNKS": -(-k // row.row_block),
        "ROW_HELD": k <= _HELD,
        **colwise.constexprs(dtype, e, fmt, pow2, alignment, row.colwise, target),
    }


@torch.library.custom_op(
    "fp8stack::quantize_rowwise_and_colwise",
    mutates_args=(),
    schema=("(Tensor x, Tensor offs, str fmt, bool pow2, int alignment) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"),
)
def _quantize_rowwise_and_colwise(x, offs, fmt, pow2, alignment):
    which = launch.implementation(x)
    launch.record("quantize_rowwise_and_colwise", which)
    if which == "reference":
        return quantize_rowwise_and_colwise_reference(x, offs, fmt, pow2, alignment)
    target = device.detect(x.device).target.name
    row = launch.config(ROWWISE_AND_COLWISE_CONFIGS, target, size_class(offs.shape[0], x.shape[1]))
    return launch_rowwise_and_colwise(x, offs, formats.get(fmt), pow2, alignment, row, target)


@_quantize_rowwise_and_colwise.register_fake
def _(x, offs, fmt, pow2, alignment):
    (m, k), e = x.shape, offs.shape[0]
    dtype = formats.get(fmt).dtype
    return (
        torch.empty((m, k), dtype=dtype, device=x.device),
        torch.empty((m,), dtype=torch.float32, device=x.device),
        torch.empty((k, groups.padded_rows(m, e, alignment)), dtype=dtype, device=x.device).t(),
        torch.empty((e, k), dtype=torch.float32, device=x.device),
        offs.new_empty((e,)),
    )


def quantize_rowwise_and_colwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What quantize_rowwise(x) and quantize_colwise_grouped(x, offs) return, in this order, from one launch.

    x: (M, K), bfloat16 or float32, any strides. The rest as quantize_colwise_grouped.
    Returns row codes (M, K) and their inverse scale (M,); column codes (M_pad, K), their inverse scale (E, K), and
    padded offs (E,). Rows past the last group have row codes only.
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks, offs or alignments.
    """
    cast.require_input(x, "quantize_rowwise_and_colwise")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected two dimensions (M, K); flatten the leading ones")
    groups.require_offs(offs, x, alignment)
    return _quantize_rowwise_and_colwise(x, offs, formats.get(fmt).name, pow2, alignment)


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernel on an arch, for the codegen suite: (groups, width) of the models."""
    row = device.lookup(arch)
    cases = [
        (row.e4m3, torch.bfloat16, 64, 2048),
        (row.e4m3, torch.bfloat16, 128, 5120),
        (row.e4m3, torch.bfloat16, 32, 7168),
        (row.e4m3, torch.float32, 32, 2048),
    ]
    return [_compile_spec(formats.get(fmt), dtype, e, k, row.name) for fmt, dtype, e, k in cases]


def _compile_spec(fmt: formats.Format, dtype: torch.dtype, e: int, k: int, target: str) -> CompileSpec:
    row = launch.config(ROWWISE_AND_COLWISE_CONFIGS, target, size_class(e, k))
    launched = colwise.options(fmt, row.colwise, target)
    pointers = {
        "x": _POINTERS[dtype],
        "row_q": "*u8",
        "row_inverse_scale": "*fp32",
        "column_q": "*u8",
        "column_inverse_scale": "*fp32",
        "offs": "*i32",
        "padded_offs": "*i32",
    }
    return CompileSpec(
        kernel=_quantize_rowwise_and_colwise_kernel,
        case=f"rowwise-and-colwise-{fmt.name}-{_INPUT_NAMES[dtype]}-e{e}-k{k}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys(("M", "K", "E", "m_pad_blocks", "row_stride"), "i32")},
        constexprs={
            "column_stride": 1,
            "UNIT_STRIDE": True,
            **_constexprs(dtype, e, k, fmt, True, groups.MULTIPLE, row, target),
        },
        num_warps=launched.pop("num_warps"),
        divisible=(*pointers, "K", "row_stride"),
        within_2gb=tuple(pointers),
        native=cast.constants(fmt, target)["NATIVE"] is not None,
        options=launched,
    )
