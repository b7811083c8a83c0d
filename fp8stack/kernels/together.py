"""All quantisations that one product of experts needs, in one launch: rows, columns of groups, weights both ways.

    rows       a scale a row: what a GEMM contracts along the row        tensors of one width, tokens or weights
    columns    a scale a column of each group, padded, column-major      tokens
    weights    a scale a column of each expert, transposed               weights of one shape

An expert layer y = x W^T wants, before its products: forward, the rows of x and of each W, and the columns of x if they
are kept for the backward pass; backward, rows and columns of each dY, each W transposed, and the columns of x if they
were not kept. These are independent of each other, so one launch takes them all: programs of one kind after those of
another, and where the last programs of one leave the GPU half empty the next ones start. A layer of SwiGLU experts is
two such products, hence two launches forward and two backward, where one an op would be nine and twelve.

The results are those of quantize_rowwise (quantize_experts), quantize_colwise_grouped and quantize_experts_transposed,
bit by bit, and so is the work of a program: rowwise.quantize_rows, colwise.quantize_columns. A column of an expert is a
column of a group of N rows, whose codes lie N apart and not M_pad.

Traffic (bf16 in): rows read 2 and write 1 byte an element; columns and weights read 2, or 4 where a group is not held
in registers, and write 1. rowwise_and_colwise.py and experts.py, which quantise both ways from one read and a half,
move less. On an H200 this launch took 1.05 to 1.94 times as long as the kernels of each tensor (baselines/LOG.md), its
configurations unswept: moe.py's table chooses.

One launch has one number of warps and one register limit for all kinds. A column program needs many registers, which
leaves fewer programs for rows to hide behind; the configuration is a compromise, not the sum of the best.

Columns and weights go first: their programs are the long ones, and rows fill what they leave.

Not here: the separate ops, which other callers use, and their layouts' reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8stack import device, formats
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, colwise, experts, groups, launch, rowwise, unfused

Codes = tuple[torch.Tensor, torch.Tensor]  # and their inverse scales

MOST_ROWS, MOST_COLUMNS, MOST_WEIGHTS = 3, 3, 2
"""Tensors of each kind that one launch takes: x and two weights; two gradients and x; two weights."""


@dataclass(frozen=True)
class TogetherConfig:
    """How to launch. row_rows, row_block: rows of a program and elements of a chunk of a row (rowwise.py). columns,
    rows, parts, held, num_warps, programs: of a program for columns (colwise.py), and of all. measured: what says so.
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
    def as_columns(self) -> colwise.ColwiseConfig:
        """What a program for columns is of this."""
        return colwise.ColwiseConfig(
            self.columns, self.rows, self.parts, self.held, self.num_warps, self.programs, self.measured
        )


_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"


def _rows_of(targets: tuple[str, ...], *configs: TogetherConfig) -> dict[tuple[str, str], TogetherConfig]:
    classes = [colwise.size_class(e) for e in (32, 33)]
    return {(target, name): row for target in targets for name, row in zip(classes, configs, strict=True)}


# (target, colwise.size_class) -> configuration. Columns: one 16-byte load a part, columns * rows = 8 * parts * threads.
TOGETHER_CONFIGS: dict[tuple[str, str], TogetherConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        TogetherConfig(1, 2048, 64, 256, 16, 1, 4, 3, _UNMEASURED),
        TogetherConfig(1, 2048, 64, 256, 16, 1, 4, 3, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        TogetherConfig(1, 4096, 32, 1024, 16, 1, 4, 2, _UNMEASURED),
        TogetherConfig(1, 4096, 32, 1024, 16, 1, 4, 2, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        TogetherConfig(1, 2048, 32, 512, 16, 1, 4, 0, _UNMEASURED),
        TogetherConfig(1, 2048, 32, 512, 16, 1, 4, 0, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: few programs; but more than one chunk of each kind.
    **_rows_of(
        ("cpu",),
        TogetherConfig(64, 128, 128, 64, 2, 1, 1, 0, _INTERPRETER),
        TogetherConfig(64, 128, 128, 32, 2, 1, 1, 0, _INTERPRETER),
    ),
}


@dataclass(frozen=True)
class Together:
    """What one call quantised, each in the order given. padded_offs: where padded groups of columns end."""

    rows: tuple[Codes, ...]
    columns: tuple[Codes, ...]
    weights: tuple[Codes, ...]
    padded_offs: torch.Tensor


def _quantize_together_parts_reference(rows, columns, weights, offs, fmt, pow2, alignment):
    """The results as the op returns them: codes and inverse scale of each, then padded offs."""
    flat = []
    for x in rows:
        quantise = rowwise.quantize_rowwise_reference if x.dim() == 2 else experts.quantize_experts_reference
        flat += quantise(x, fmt, pow2)
    for x in columns:
        flat += colwise.quantize_colwise_grouped_reference(x, offs, fmt, pow2, alignment)[:2]
    for w in weights:
        flat += experts.quantize_experts_transposed_reference(w, fmt, pow2)
    m = columns[0].shape[0] if columns else 0
    return [*flat, groups.bounds_reference(offs, m, alignment)[2]]


def quantize_together_reference(
    rows: Sequence[torch.Tensor],
    columns: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> Together:
    """The specification, in plain torch; arguments and results as quantize_together."""
    return _named(rows, columns, _quantize_together_parts_reference(rows, columns, weights, offs, fmt, pow2, alignment))


def _named(rows, columns, flat):
    pairs = list(zip(flat[:-1:2], flat[1:-1:2], strict=True))
    r, c = len(rows), len(columns)
    return Together(tuple(pairs[:r]), tuple(pairs[r : r + c]), tuple(pairs[r + c :]), flat[-1])


@jit
def _chosen(part, a, b, c, d, e):
    """The one of five pointers or sizes that belongs to a part; what the compiler knows of all of them it still knows.

    So one copy of the work of a program is compiled, for whatever part the program has.
    """
    return tl.where(part >= 3, tl.where(part == 3, d, e), tl.where(part == 0, a, tl.where(part == 1, b, c)))


# Numbers of tokens are not specialised, or each divisibility by 16 would compile anew.
@jit(do_not_specialize=["rows0", "rows1", "rows2", "M", "m_pad_blocks", "E", "weights"])
def _quantize_together_kernel(
    r0, r0_q, r0_inverse, r1, r1_q, r1_inverse, r2, r2_q, r2_inverse,
    c0, c0_q, c0_inverse, c1, c1_q, c1_inverse, c2, c2_q, c2_inverse,
    w0, w0_q, w0_inverse, w1, w1_q, w1_inverse,
    offs,
    padded_offs,
    rows0, rows1, rows2, row_stride0, row_stride1, row_stride2, row_width,
    M,
    width0, width1, width2, stride0, stride1, stride2,
    E,
    m_pad_blocks,
    weights,
    W_N,
    W_K,
    ROW_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    ROW_HELD: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    C: tl.constexpr,
    LANES_LAST: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):  # fmt: skip
    """Parts 0 to 2: columns of tokens; 3 and 4: of weights; then rows. A tensor that is not there has no programs."""
    at = tl.program_id(0)
    first1 = tl.cdiv(width0, COLUMNS) * E
    first2 = first1 + tl.cdiv(width1, COLUMNS) * E
    first3 = first2 + tl.cdiv(width2, COLUMNS) * E
    of_weight = tl.cdiv(W_K, COLUMNS) * E
    first_row = first3 + of_weight * weights
    if at < first_row:
        part = (at >= first1).to(tl.int32) + (at >= first2).to(tl.int32) + (at >= first3).to(tl.int32)
        part += (at >= first3 + of_weight).to(tl.int32)
        at -= _chosen(part, 0, first1, first2, first3, first3 + of_weight)
        x = _chosen(part, c0, c1, c2, w0, w1)
        q = _chosen(part, c0_q, c1_q, c2_q, w0_q, w1_q)
        inverse_scale = _chosen(part, c0_inverse, c1_inverse, c2_inverse, w0_inverse, w1_inverse)
        width = _chosen(part, width0, width1, width2, W_K, W_K)
        row_stride = _chosen(part, stride0, stride1, stride2, W_K, W_K)
        # Neighbouring programs take neighbouring columns of one group: whole rows are read at about the same time.
        blocks = tl.cdiv(width, COLUMNS)
        block, group = at % blocks, at // blocks
        start, size, padded_start, padded_size, total = groups.bounds(offs, group, M, E, LANES, ALIGNMENT)
        if (part == 0) & (block == 0):
            tl.store(padded_offs + group, padded_start + padded_size)
        tail, tail_end = groups.share_of_tail(group, total, m_pad_blocks * 16, E)
        weight = part >= 3
        matrix = tl.where(weight, group, 0).to(tl.int64) * W_N * W_K
        # An expert is a group of W_N rows without gap or tail. Multiples of 16 are to be that to the compiler too: it
        # stores 16 codes of a column at once.
        padded_start = tl.where(weight, 0, padded_start) // 16 * 16
        tail = tl.where(weight, 0, tail - padded_start) // 16 * 16
        tail_end = tl.where(weight, 0, tail_end - padded_start) // 16 * 16
        pitch = tl.where(weight, W_N, m_pad_blocks * 16) // 16 * 16
        colwise.quantize_columns(
            x + matrix, q + matrix // 16 * 16, inverse_scale, group, block, tl.where(weight, 0, start),
            tl.where(weight, W_N, size), padded_start, tl.where(weight, W_N, padded_size) // 16 * 16, tail, tail_end,
            width, pitch, row_stride, 1, COLUMNS, ROWS, PARTS, HELD, C, True, LANES_LAST, POW2,
            MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip
    else:
        at -= first_row
        second = tl.cdiv(rows0, ROW_ROWS)
        third = second + tl.cdiv(rows1, ROW_ROWS)
        part = (at >= second).to(tl.int32) + (at >= third).to(tl.int32)
        at -= tl.where(part == 0, 0, tl.where(part == 1, second, third))
        rowwise.quantize_rows(
            at.to(tl.int64) * ROW_ROWS,
            _chosen(part, r0, r1, r2, r2, r2),
            _chosen(part, r0_q, r1_q, r2_q, r2_q, r2_q),
            _chosen(part, r0_inverse, r1_inverse, r2_inverse, r2_inverse, r2_inverse),
            _chosen(part, rows0, rows1, rows2, 0, 0),
            row_width,
            _chosen(part, row_stride0, row_stride1, row_stride2, row_stride2, row_stride2),
            1, ROW_ROWS, BLOCK, ROW_CHUNKS, ROW_HELD, True, POW2,
            MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip


_HELD = 16384  # elements of a row that stay in registers beside what a program for columns needs
_ROWS, _COLUMNS, _WEIGHTS = ("r0", "r1", "r2"), ("c0", "c1", "c2"), ("w0", "w1")


def launch_together(
    rows: Sequence[torch.Tensor],
    columns: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    offs: torch.Tensor,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: TogetherConfig,
    target: str,
) -> list[torch.Tensor]:
    """Launch the kernel with a given configuration. Results: see _quantize_together_parts_reference."""
    where, dtype, e = offs.device, (*rows, *columns, *weights)[0].dtype, offs.shape[0]
    m = columns[0].shape[0] if columns else 0
    m_pad = groups.padded_rows(m, e, alignment)
    padded_offs = torch.empty_like(offs) if columns else torch.zeros_like(offs)
    unused = torch.empty((0,), dtype=torch.uint8, device=where)
    unused_elements, unused_scale = unused.view(cast.INPUTS[dtype]), unused.view(torch.float32)
    arguments: dict[str, object] = {}
    flat: list[torch.Tensor] = []

    def take(name: str, x: torch.Tensor | None, codes: tuple[int, ...], scales: tuple[int, ...]) -> None:
        """The pointers of one tensor, its codes and its inverse scale."""
        if x is None:
            arguments.update({name: unused_elements, f"{name}_q": unused, f"{name}_inverse": unused_scale})
            return
        flat.append(torch.empty(codes, dtype=torch.uint8, device=where))
        flat.append(torch.empty(scales, dtype=torch.float32, device=where))
        arguments.update({name: x.view(cast.INPUTS[dtype]), f"{name}_q": flat[-2], f"{name}_inverse": flat[-1]})

    programs = 0
    for place, name in enumerate(_ROWS):
        x = rows[place] if place < len(rows) else None
        flattened = None if x is None else _unit(x.reshape(-1, x.shape[-1]))
        take(name, flattened, () if x is None else tuple(x.shape), () if x is None else tuple(x.shape[:-1]))
        arguments[f"rows{place}"] = 0 if flattened is None else flattened.shape[0]
        arguments[f"row_stride{place}"] = 0 if flattened is None else flattened.stride(0)
        programs += 0 if flattened is None else -(-flattened.shape[0] // row.row_rows)
    for place, name in enumerate(_COLUMNS):
        x = _unit(columns[place]) if place < len(columns) else None
        n = 0 if x is None else x.shape[1]
        take(name, x, (n, m_pad), (e, n))
        arguments[f"width{place}"], arguments[f"stride{place}"] = n, 0 if x is None else x.stride(0)
        programs += -(-n // row.columns) * e
    for place, name in enumerate(_WEIGHTS):
        w = weights[place].contiguous() if place < len(weights) else None
        _, n, k = (0, 0, 0) if w is None else w.shape
        take(name, w, (e, k, n), (e, k))
        programs += -(-k // row.columns) * e
    _, w_n, w_k = weights[0].shape if weights else (0, 0, 0)
    width = rows[0].shape[-1] if rows else 0
    if programs:
        with launch.on_device(offs):
            _quantize_together_kernel[(programs,)](
                **arguments,
                offs=offs.contiguous(),
                padded_offs=padded_offs,
                row_width=width,
                M=m,
                E=e,
                m_pad_blocks=m_pad // 16,
                weights=len(weights),
                W_N=w_n,
                W_K=w_k,
                **_constexprs(width, dtype, e, fmt, pow2, alignment, row, target),
                **colwise.options(fmt, row.as_columns, target),
                **LAUNCH_OPTIONS,
            )
    r = 2 * len(rows)
    c = r + 2 * len(columns)
    results = [x.view(fmt.dtype) if place % 2 == 0 else x for place, x in enumerate(flat)]
    return [*results[:r], *(x.t() if place % 2 == 0 else x for place, x in enumerate(results[r:c])), *results[c:],
            padded_offs]  # fmt: skip


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x (M,K), copied where its rows are not contiguous."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _constexprs(
    width: int,
    dtype: torch.dtype,
    e: int,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: TogetherConfig,
    target: str,
) -> dict[str, object]:
    return {
        "ROW_ROWS": row.row_rows,
        "BLOCK": row.row_block,
        "ROW_CHUNKS": -(-width // row.row_block),
        "ROW_HELD": width <= _HELD,
        **colwise.constexprs(dtype, e, fmt, pow2, alignment, row.as_columns, target),
    }


@torch.library.custom_op(
    "fp8stack::quantize_together",
    mutates_args=(),
    schema=(
        "(Tensor[] rows, Tensor[] columns, Tensor[] weights, Tensor offs, str fmt, bool pow2, int alignment) "
        "-> Tensor[]"
    ),
)
def _quantize_together(rows, columns, weights, offs, fmt, pow2, alignment):
    which = launch.implementation(offs, chain=True)
    launch.record("quantize_together", which)
    if which == "unfused":
        return unfused.together(rows, columns, weights, offs, fmt, pow2, alignment)
    if which == "reference":
        return _quantize_together_parts_reference(rows, columns, weights, offs, fmt, pow2, alignment)
    target = device.detect(offs.device).target.name
    row = launch.config(TOGETHER_CONFIGS, target, colwise.size_class(offs.shape[0]))
    return launch_together(rows, columns, weights, offs, formats.get(fmt), pow2, alignment, row, target)


@_quantize_together.register_fake
def _(rows, columns, weights, offs, fmt, pow2, alignment):
    dtype, e, flat = formats.get(fmt).dtype, offs.shape[0], []

    def empty(*shape):
        return torch.empty(shape, dtype=dtype, device=offs.device)

    def scales(*shape):
        return torch.empty(shape, dtype=torch.float32, device=offs.device)

    for x in rows:
        flat += (empty(*x.shape), scales(*x.shape[:-1]))
    for x in columns:
        m, n = x.shape
        flat += (empty(n, groups.padded_rows(m, e, alignment)).t(), scales(e, n))
    for w in weights:
        _, n, k = w.shape
        flat += (empty(e, k, n), scales(e, k))
    return [*flat, offs.new_empty((e,))]


def quantize_together(
    rows: Sequence[torch.Tensor],
    columns: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> Together:
    """quantize_rowwise of `rows`, quantize_colwise_grouped of `columns`, quantize_experts_transposed of `weights`.

    rows: up to MOST_ROWS tensors (M_i, K) or (E_i, N_i, K) of one width K. columns: up to MOST_COLUMNS tensors
    (M, N_i) of the same rows, in groups by offs. weights: up to MOST_WEIGHTS tensors (E, N, K) of one shape, E groups,
    N a multiple of 16. All bfloat16 or all float32; fastest where rows are contiguous, else copied first.
    offs: int32 (E,), as quantize_colwise_grouped; the rest as there.

    Returns codes and inverse scales in the layouts of these ops, and padded offs (zeros without columns).
    Raises UnsupportedDtype for other dtypes, ValueError for numbers, shapes, offs or alignments that do not fit.
    """
    given = (*rows, *columns, *weights)
    for x in given:
        cast.require_input(x, "quantize_together")
    counts, most = (len(rows), len(columns), len(weights)), (MOST_ROWS, MOST_COLUMNS, MOST_WEIGHTS)
    if not given or any(count > limit for count, limit in zip(counts, most, strict=True)):
        raise ValueError(
            f"{counts} tensors for rows, columns and weights; expected some, and at most {most}; make another call"
        )
    if len({(x.dtype, x.device) for x in given}) > 1:
        kinds = ", ".join(sorted({f"{x.dtype} on {x.device}" for x in given}))
        raise ValueError(f"tensors are {kinds}; expected one dtype and device; convert them")
    fits = (
        all(x.dim() in (2, 3) for x in rows)
        and len({x.shape[-1] for x in rows}) <= 1
        and all(x.dim() == 2 for x in columns)
        and len({x.shape[0] for x in columns}) <= 1
        and len({tuple(w.shape) for w in weights}) <= 1
        and all(w.dim() == 3 and w.shape[0] == len(offs) and w.shape[1] % groups.MULTIPLE == 0 for w in weights)
        and all(x.shape[-1] for x in given)
    )
    if not fits:
        shapes = [[tuple(x.shape) for x in kind] for kind in (rows, columns, weights)]
        raise ValueError(
            f"shapes are {shapes[0]} for rows, {shapes[1]} for columns, {shapes[2]} for {len(offs)} experts; "
            "expected rows of one width, columns (M, N) of the same rows, weights (E, N, K) of one shape with N a "
            "multiple of 16, and no width of 0; quantise what differs by itself"
        )
    groups.require_offs(offs, given[0], alignment)
    flat = _quantize_together(list(rows), list(columns), list(weights), offs, formats.get(fmt).name, pow2, alignment)
    return _named(rows, columns, flat)


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernel on an arch, for the codegen suite: both products of DeepSeek 671B.

    The kernel is the same for any number of tensors of each kind; rows of 7168 (gate and up, forward) and 2048.
    """
    row = device.lookup(arch)
    return [_spec(width, formats.get(row.e4m3), 32, row.name) for width in (7168, 2048)]


def _spec(width: int, fmt: formats.Format, e: int, target: str) -> CompileSpec:
    row = launch.config(TOGETHER_CONFIGS, target, colwise.size_class(e))
    launched = colwise.options(fmt, row.as_columns, target)
    pointers: dict[str, str] = {}
    for tensor in (*_ROWS, *_COLUMNS, *_WEIGHTS):
        pointers |= {tensor: "*i16", f"{tensor}_q": "*u8", f"{tensor}_inverse": "*fp32"}
    pointers |= {"offs": "*i32", "padded_offs": "*i32"}
    sizes = (
        *(f"row_stride{n}" for n in range(MOST_ROWS)),
        "row_width",
        *(f"{what}{n}" for what in ("width", "stride") for n in range(MOST_COLUMNS)),
        "W_N",
        "W_K",
    )
    counted = (*(f"rows{n}" for n in range(MOST_ROWS)), "M", "E", "m_pad_blocks", "weights")
    return CompileSpec(
        kernel=_quantize_together_kernel,
        case=f"together-{fmt.name}-bf16-e{e}-k{width}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys((*sizes, *counted), "i32")},
        constexprs=_constexprs(width, torch.bfloat16, e, fmt, True, groups.MULTIPLE, row, target),
        num_warps=launched.pop("num_warps"),
        divisible=(*pointers, *sizes),
        within_2gb=tuple(pointers),
        native=cast.constants(fmt, target)["NATIVE"] is not None,
        options=launched,
    )
