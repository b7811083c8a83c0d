"""The reader of machine code on small listings written by hand: loops, widths, counts, resources, hash, bad text."""

from __future__ import annotations

import pytest

from harness import isa
from harness.isa import FACTS, ListingError, facts, occupancy, offenders, read_amdgcn, read_ptx, read_sass, region

AMD_LOOP = """
    s_load_dwordx4 s[0:3], s[4:5], 0x0
    s_mov_b32 s6, 0
    s_branch .LBB0_1
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
    buffer_load_dwordx4 v[0:3], v9, s[20:23], 0 offen
    s_waitcnt vmcnt(0)
    v_cvt_pk_fp8_f32 v4, v0, v1
    v_cvt_pk_fp8_f32 v4, v2, v3 op_sel:[0,0,1]
    buffer_store_dword v4, v9, s[24:27], 0 offen
    s_cmp_lt_i32 s6, s7
    s_cbranch_scc1 .LBB0_1
; %bb.2:
    global_store_short v8, v4, s[0:1]
    s_endpgm
"""


def amd(body: str, arch: str = "gfx942", kernel: str = "kernel", **records: int) -> str:
    """A listing in LLVM's layout around `body`; `records` replace those of the metadata."""
    values = {
        "agpr_count": 0,
        "group_segment_fixed_size": 0,
        "max_flat_workgroup_size": 256,
        "private_segment_fixed_size": 0,
        "sgpr_count": 30,
        "sgpr_spill_count": 0,
        "vgpr_count": 40,
        "vgpr_spill_count": 0,
        "wavefront_size": 64,
        **records,
    }
    metadata = "\n".join(f"    .{name}:  {value}" for name, value in values.items())
    return "\n".join(
        [
            f'\t.amdgcn_target "amdgcn-amd-amdhsa-unknown-{arch}"',
            "\t.text",
            f"\t.globl\t{kernel}                  ; -- Begin function {kernel}",
            f"{kernel}:                           ; @{kernel}",
            '\t.file\t1 "/somewhere" "kernel.py"',
            body,
            f"\t.size\t{kernel}, .Lfunc_end0-{kernel}",
            '\t.section\t.rodata,"a",@progbits',
            f"\t.amdhsa_kernel {kernel}",
            "\t.end_amdhsa_kernel",
            "\t.text",
            "; codeLenInByte = 132",
            "; Occupancy: 8",
            '\t.section\t.debug_str,"MS",@progbits,1',
            '\t.asciz\t"kernel.py"',
            "\t.amdgpu_metadata",
            "amdhsa.kernels:",
            "  - .args:",
            "      - .size:           8",
            metadata,
        ]
    )


SASS_LOOP = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P2 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/              @!P3 LDG.E.128 R12, desc[UR12][R40.64+0x10] ;
        /*0030*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R5, R4, RZ ;
        /*0040*/                   STG.E desc[UR12][R14.64], R4 ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0060*/                   STG.E.U16 desc[UR12][R2.64], R5 ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_2);
        /*0090*/                   NOP;
.L_x_3:
"""


def sass(body: str, arch: str = "sm_90a") -> str:
    """Output of `nvdisasm -c` around `body`."""
    return f"""
\t.target\t{arch}
//--------------------- .text.kernel                --------------------------
\t.section\t.text.kernel,"ax",@progbits
\t.sectioninfo\t@"SHI_REGISTERS=32"
\t.align\t128
        .global         kernel
kernel:
.text.kernel:
{body}
//--------------------- SYMBOLS --------------------------
\t.type\t\t.nv.reservedSmem.offset0,@object
"""


USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function kernel:
  REG:46 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:584 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

PTX = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(
\t.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 128
{
\t.reg .pred \t%p<3>;
\t.loc\t1 8 0
// %bb.0:
\tld.param.b64 \t%rd1, [kernel_param_0];
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
\t// begin inline asm
\t{ .reg .b16 low; cvt.rn.satfinite.e4m3x2.f32  %rs1, %r2, %r3; }
\t// end inline asm
\t@%p2 ld.global.v4.b32 { %r7, %r8, %r9, %r10 }, [ %rd1 + 0 ];
\tst.global.v2.b16 [ %rd1 + 0 ], { %rs1, %rs2 };
\t@%p1 bra \t$L__BB0_1;
\tfence.acq_rel.gpu;
\tst.global.b8 [ %rd1 ], %rs1;
\tret;
}
\t.section\t.debug_abbrev
\t{
.b8 1
\t}
"""


def test_amd_loop_is_the_counted_region() -> None:
    """Accesses count inside the loop; the short store after it shows in the kernel's count alone."""
    listing = read_amdgcn(amd(AMD_LOOP))
    found = facts(listing, shared_bytes=16)
    assert list(found) == list(FACTS)
    assert (found["region"], found["loops"]) == ("loops", 1)
    assert (found["widest_load_bytes"], found["widest_store_bytes"]) == (16, 4)
    assert (found["narrow_memory_instructions"], found["narrow_memory_instructions_kernel"]) == (0, 1)
    assert (found["fp8_encode"], found["fp8_encode_instructions"]) == ("native-f32", 2)
    assert (found["vgprs"], found["sgprs"], found["lds_bytes"], found["code_bytes"]) == (40, 30, 16, 132)
    assert found["waves_per_simd"] == listing.resources["llvm_occupancy"] == 8


def test_offenders_are_shown_by_line() -> None:
    """The instructions behind a count carry their line and text."""
    text = amd(AMD_LOOP)
    (narrow,) = offenders(read_amdgcn(text), "narrow_memory_instructions_kernel")
    assert narrow.text == "global_store_short v8, v4, s[0:1]"
    assert text.splitlines()[narrow.line - 1].strip() == narrow.text
    assert narrow.operands == ("v8", "v4", "s[0:1]")


def test_kernel_without_a_loop_is_counted_whole() -> None:
    """No loop that touches device memory: the region is the kernel, and the report says so."""
    listing = read_amdgcn(amd("\tglobal_load_dword v0, v1, s[0:1]\n\tglobal_store_byte v1, v0, s[0:1]\n\ts_endpgm"))
    found = facts(listing)
    assert (found["region"], found["loops"]) == ("kernel", 0)
    assert (found["narrow_memory_instructions"], found["widest_store_bytes"]) == (1, 1)


def test_loop_without_device_memory_is_no_region() -> None:
    """A loop that only computes (or spins) does not hide the accesses outside it."""
    body = "\tglobal_load_dwordx4 v[0:3], v4, s[0:1]\n.LBB0_1:\n\ts_sleep 1\n\ts_cbranch_scc1 .LBB0_1\n\ts_endpgm"
    found = facts(read_amdgcn(amd(body)))
    assert (found["region"], found["loops"], found["widest_load_bytes"]) == ("kernel", 1, 16)


def test_nested_and_separate_loops() -> None:
    """An inner loop belongs to its outer one; two loops in a row are two."""
    nested = ".LA:\n\ts_nop 0\n.LB:\n\ts_nop 0\n\ts_cbranch_scc1 .LB\n\ts_cbranch_scc0 .LA\n"
    single = ".LC:\n\ts_nop 0\n\ts_cbranch_vccnz .LC\n\ts_endpgm"
    assert len(read_amdgcn(amd(nested + single)).loops) == 2


@pytest.mark.parametrize(
    ("opcode", "space", "kind", "width"),
    [
        pytest.param("global_load_dwordx4 v[0:3], v4, s[0:1]", "global", "load", 16, id="global-dwordx4"),
        pytest.param("global_load_b128 v[0:3], v4, s[0:1]", "global", "load", 16, id="global-b128"),
        pytest.param("buffer_load_ubyte v0, v1, s[0:3], 0 offen", "global", "load", 1, id="buffer-ubyte"),
        pytest.param("buffer_load_dwordx4 v0, s[0:3], 0 offen lds", "global", "copy", 16, id="buffer-to-lds"),
        pytest.param("global_load_lds_dword v[0:1], off", "global", "copy", 4, id="global-to-lds"),
        pytest.param("global_store_byte_d16_hi v0, v1, s[0:1]", "global", "store", 1, id="byte-d16-hi"),
        pytest.param("flat_store_short v[0:1], v2", "global", "store", 2, id="flat-short"),
        pytest.param("buffer_atomic_add_f32 v0, v1, s[0:3], 0 offen", "global", "atomic", 4, id="buffer-atomic"),
        pytest.param("scratch_store_dwordx2 off, v[0:1], s0", "scratch", "store", 8, id="scratch"),
        pytest.param("ds_write_b8 v0, v1", "lds", "store", 1, id="lds-byte"),
        pytest.param("ds_read2st64_b64 v[0:3], v4 offset1:1", "lds", "load", 16, id="lds-pair"),
        pytest.param("ds_read_b64_tr_b8 v[0:1], v2", "lds", "load", 8, id="lds-transposed"),
        pytest.param("s_load_dwordx8 s[0:7], s[8:9], 0x0", "constant", "load", 32, id="scalar"),
    ],
)
def test_amd_widths(opcode: str, space: str, kind: str, width: int) -> None:
    """Width, space and kind of each way to touch memory."""
    from harness.isa import amdgcn

    (instruction,) = read_amdgcn(amd(f"\t{opcode}")).instructions
    assert amdgcn.access(instruction) == isa.Access(space, kind, width)


@pytest.mark.parametrize(
    ("opcode", "fact"),
    [
        pytest.param("v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, 1.0", "fp8_encode_instructions", id="gfx950-encode"),
        pytest.param("v_cvt_scalef32_pk_bf8_f32 v0, v1, v2, 1.0", "fp8_encode_instructions", id="gfx950-encode-e5m2"),
        pytest.param("v_cvt_sr_bf8_f32 v0, v1, v2", "fp8_encode_instructions", id="stochastic"),
        pytest.param("v_cvt_pk_f32_fp8_e32 v[0:1], v2", "fp8_decode_instructions", id="decode"),
        pytest.param("v_cvt_f32_bf8_sdwa v0, v1 src0_sel:BYTE_1", "fp8_decode_instructions", id="decode-byte"),
        pytest.param("v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[0:1], v[2:3], 0", "fp8_matrix_instructions", id="mfma"),
        pytest.param(
            "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0", "fp8_matrix_instructions", id="f8f6f4"
        ),
        pytest.param("buffer_wbl2 sc1", "fence_instructions", id="write-back"),
        pytest.param("buffer_inv sc1", "fence_instructions", id="invalidate"),
        pytest.param("s_swappc_b64 s[30:31], s[2:3]", "call_instructions", id="call"),
        pytest.param("s_mov_b32 s4, 0x7ffff", "software_rounding_instructions", id="rounding"),
        pytest.param("v_add3_u32 v0, v1, v2, 0xc407ffff", "software_rounding_instructions", id="rounding-and-rebias"),
    ],
)
def test_amd_opcodes(opcode: str, fact: str) -> None:
    """Each opcode counts under its fact and under no other instruction count."""
    listing = read_amdgcn(amd(f"\t{opcode}", arch="gfx950"))
    counted = {name for name in isa.facts(listing) if name.endswith("_instructions") and offenders(listing, name)}
    assert counted - {"matrix_instructions"} == {fact}


def test_amd_bf16_conversion_is_no_fp8() -> None:
    """Conversions that only share letters with FP8 are not counted."""
    listing = read_amdgcn(
        amd("\tv_cvt_pk_bf16_f32 v0, v1, v2\n\tv_cvt_f32_f16_e32 v0, v1\n\tv_mov_b32_e32 v1, 0x7fffff")
    )
    assert isa.fp8_encode(listing) == "none"
    assert facts(listing)["matrix_opcodes"] == "none"


def test_mixed_conversion_is_named() -> None:
    """Native and software conversions in one kernel: both are said."""
    listing = read_amdgcn(amd("\tv_cvt_pk_fp8_f32 v4, v0, v1\n\tv_add3_u32 v0, v1, v2, 0x7ffff"))
    assert isa.fp8_encode(listing) == "native-f32+software"


def test_sass() -> None:
    """Loops, widths and registers of SASS; the endless branch after the code is no loop and no code."""
    listing = read_sass(sass(SASS_LOOP), USAGE)
    found = facts(listing, num_warps=4, shared_bytes=64)
    assert listing.arch == "sm_90"
    assert (found["region"], found["loops"]) == ("loops", 1)
    assert (found["widest_load_bytes"], found["widest_store_bytes"]) == (16, 4)
    assert (found["narrow_memory_instructions"], found["narrow_memory_instructions_kernel"]) == (0, 1)
    assert (found["fp8_encode"], found["fp8_encode_instructions"]) == ("native-f32", 1)
    assert (found["vgprs"], found["lds_bytes"], found["code_bytes"]) == (46, 64, 0x80)
    assert found["instructions"] == 8
    load = offenders(listing, "load_instructions")[0]
    assert (load.predicate, load.address, load.opcode) == ("@!P3", 0x20, "LDG.E.128")
    assert load.operands == ("R12", "desc[UR12][R40.64+0x10]")


def test_sass_target_of_an_older_cubin() -> None:
    """Up to sm_89 the target stands among the header flags."""
    text = sass(SASS_LOOP).replace("\t.target\tsm_90a", '\t.headerflags\t@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_SM89"')
    assert read_sass(text, USAGE).arch == "sm_89"


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        pytest.param("LDL.LU R4, [R1+0x8]", "scratch_instructions", id="reload"),
        pytest.param("STL [R1+0x8], R4", "scratch_instructions", id="spill"),
        pytest.param("MEMBAR.SC.GPU", "fence_instructions", id="membar"),
        pytest.param("CCTL.IVALL", "fence_instructions", id="invalidate"),
        pytest.param(
            "ATOMG.E.ADD.F32.FTZ.RN.STRONG.GPU PT, R3, desc[UR4][R2.64], R5", "atomic_instructions", id="atomic"
        ),
        pytest.param("F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C R4, R5, RZ", "fp8_encode_instructions", id="from-f16"),
        pytest.param("F2FP.F16.E4M3.UNPACK_B R4, R5", "fp8_decode_instructions", id="decode"),
        pytest.param("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", "fp8_matrix_instructions", id="wgmma"),
        pytest.param("IADD3 R4, R5, 0x7ffff, R6", "software_rounding_instructions", id="rounding"),
    ],
)
def test_sass_opcodes(line: str, fact: str) -> None:
    """Each opcode counts under its fact and under no other instruction count."""
    listing = read_sass(sass(f"        /*0000*/                   {line} ;"), USAGE)
    found = isa.facts(listing, num_warps=1)
    counted = {name for name in found if name.endswith("_instructions") and offenders(listing, name)}
    assert counted - {"matrix_instructions"} == {fact}


def test_sass_barrier_of_a_block_is_no_fence() -> None:
    """A barrier that orders memory within the block only (a tensor descriptor is made behind one) is not counted."""
    listing = read_sass(sass("        /*0000*/                   MEMBAR.ALL.CTA ;"), USAGE)
    assert offenders(listing, "fence_instructions") == []


def test_sass_call_and_barrier_flow() -> None:
    """A slow path is reached through its call and BSSY keeps its continuation reachable; neither makes a loop."""
    body = """
        /*0000*/                   BSSY B0, `(.L_x_1) ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   CALL.REL.NOINC `($__internal_0_$slowpath) ;
.L_x_0:
        /*0030*/                   BSYNC B0 ;
.L_x_1:
        /*0040*/                   EXIT ;
$__internal_0_$slowpath:
        /*0050*/                   RET.REL.NODEC R4 `(kernel) ;
"""
    listing = read_sass(sass(body), USAGE)
    assert listing.loops == ()
    assert [i.function for i in listing.within(listing.reachable)][-1] == "$__internal_0_$slowpath"
    assert facts(listing, num_warps=1)["call_instructions"] == 1


def test_ptx() -> None:
    """Loops, widths and conversions of PTX, inside inline assembly and scopes too; debug sections are not code."""
    listing = read_ptx(PTX)
    assert (listing.kernel, listing.arch, listing.resources["threads"]) == ("kernel", "sm_90", 128)
    assert region(listing)[0] == "loops"
    assert isa.fp8_encode(listing) == "native-f32"
    assert [i.opcode for i in offenders(listing, "load_instructions")] == ["ld.global.v4.b32"]
    assert [i.opcode for i in offenders(listing, "narrow_memory_instructions_kernel")] == ["st.global.b8"]
    assert [i.opcode for i in offenders(listing, "fence_instructions")] == ["fence.acq_rel.gpu"]
    assert offenders(listing, "load_instructions")[0].operands == ("{ %r7, %r8, %r9, %r10 }", "[ %rd1 + 0 ]")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        pytest.param(("the_kernel", "renamed"), True, id="kernel-name"),
        pytest.param(("/somewhere", "/elsewhere"), True, id="path"),
        pytest.param((".LBB0_1", ".LBB7_3"), True, id="label"),
        pytest.param(("; %bb.2:", "; another comment"), True, id="comment"),
        pytest.param(("\n    s_mov_b32", "\n    .loc 1 2 3\n\n  s_mov_b32"), True, id="debug-line"),
        pytest.param(("v_cvt_pk_fp8_f32 v4, v0, v1", "v_cvt_pk_fp8_f32 v5, v0, v1"), False, id="register"),
        pytest.param(("buffer_store_dword v4", "buffer_store_byte v4"), False, id="opcode"),
        pytest.param(("0 offen", "4 offen"), False, id="modifier"),
    ],
)
def test_hash(change: tuple[str, str], same: bool) -> None:
    """The hash moves with the instructions and with nothing else."""
    text = amd(AMD_LOOP, kernel="the_kernel")
    changed = text.replace(*change)
    assert changed != text
    assert (read_amdgcn(text).digest == read_amdgcn(changed).digest) is same


@pytest.mark.parametrize(
    ("text", "what"),
    [
        pytest.param("", "found 0 kernels", id="empty"),
        pytest.param("hello\nworld", "found 0 kernels", id="prose"),
        pytest.param(amd(AMD_LOOP).split("\t.amdgpu_metadata")[0], r"no \.agpr_count", id="cut-before-metadata"),
        pytest.param(
            amd(AMD_LOOP.replace("s_cbranch_scc1 .LBB0_1", "s_cbranch_scc1 .LBB0_9")), "no label", id="lost-label"
        ),
        pytest.param(amd("\t%garbage here"), "is no AMD instruction", id="garbage"),
        pytest.param(amd(""), "holds no instruction", id="no-body"),
        pytest.param(amd(AMD_LOOP) + amd(AMD_LOOP), "found 2 kernels", id="two-kernels"),
        pytest.param(PTX, "found 0 kernels", id="ptx-as-amdgcn"),
    ],
)
def test_bad_amdgcn(text: str, what: str) -> None:
    """Text that is no listing is an error that says what was expected."""
    with pytest.raises(ListingError, match=what) as caught:
        read_amdgcn(text)
    assert "; expected" in str(caught.value)


def test_unknown_width_is_an_error() -> None:
    """A memory opcode that the table does not know must not pass for a wide one."""
    listing = read_amdgcn(amd("\tglobal_load_dwordx64 v[0:63], v64, s[0:1]"))
    with pytest.raises(ListingError, match="unknown width"):
        facts(listing)
    listing = read_sass(sass("        /*0000*/                   LDGNEW.E.128 R4, [R2] ;"), USAGE)
    with pytest.raises(ListingError, match="LDGNEW is not in the table"):
        facts(listing, num_warps=1)


@pytest.mark.parametrize(
    ("text", "usage", "what"),
    [
        pytest.param("", USAGE, "found 0 kernels", id="empty"),
        pytest.param(sass(SASS_LOOP), "", "no function", id="no-usage"),
        pytest.param(sass(SASS_LOOP), USAGE.replace("kernel", "other"), "the code is of kernel", id="other-kernel"),
        pytest.param(sass(SASS_LOOP), USAGE.replace("STACK:0 ", ""), "lacks STACK", id="no-stack"),
        pytest.param(sass(SASS_LOOP.replace("`(.L_x_1)", "0x20")), USAGE, "jumps to no label", id="cuobjdump-text"),
    ],
)
def test_bad_sass(text: str, usage: str, what: str) -> None:
    """Text that is no disassembly, or of another kernel, is an error that says what was expected."""
    with pytest.raises(ListingError, match=what) as caught:
        read_sass(text, usage)
    assert "; expected" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        pytest.param("", "found 0 kernels", id="empty"),
        pytest.param(PTX.split("fence")[0], "found 1 kernels", id="cut-off"),
        pytest.param(PTX.replace("fence.acq_rel.gpu;", "%%% what;"), "is no PTX statement", id="garbage"),
    ],
)
def test_bad_ptx(text: str, what: str) -> None:
    """Text that is no PTX is an error that says what was expected."""
    with pytest.raises(ListingError, match=what):
        read_ptx(text)


def test_facts_need_machine_code() -> None:
    """PTX has virtual registers: facts of it are refused; SASS needs the number of warps."""
    with pytest.raises(ListingError, match="virtual registers"):
        facts(read_ptx(PTX))
    with pytest.raises(ListingError, match="num_warps=None"):
        facts(read_sass(sass(SASS_LOOP), USAGE))


def test_table_of_facts() -> None:
    """Every fact has a meaning and one of four directions."""
    assert {fact.direction for fact in FACTS.values()} == {"lower", "higher", "equal", "informational"}
    assert all(fact.meaning for fact in FACTS.values())


@pytest.mark.parametrize(
    ("arch", "vgprs", "sgprs", "warps", "lds", "waves"),
    [
        pytest.param("gfx942", 40, 30, 4, 0, 8, id="gfx942-free"),
        pytest.param("gfx942", 64, 30, 4, 0, 8, id="gfx942-64-registers"),
        pytest.param("gfx942", 65, 30, 4, 0, 7, id="gfx942-65-registers"),
        pytest.param("gfx942", 128, 30, 4, 0, 4, id="gfx942-128-registers"),
        pytest.param("gfx942", 512, 30, 4, 0, 1, id="gfx942-512-registers"),
        pytest.param("gfx942", 40, 106, 4, 0, 7, id="gfx942-106-scalar"),
        pytest.param("gfx942", 40, 30, 4, 32 * 1024, 2, id="gfx942-half-the-lds"),
        pytest.param("gfx942", 40, 30, 4, 33 * 1024, 1, id="gfx942-over-half-the-lds"),
        pytest.param("gfx950", 40, 30, 4, 33 * 1024, 4, id="gfx950-33-kib"),
        pytest.param("gfx942", 40, 30, 2, 0, 8, id="gfx942-two-waves-a-group"),
    ],
)
def test_occupancy_amd(arch: str, vgprs: int, sgprs: int, warps: int, lds: int, waves: float) -> None:
    """Waves a SIMD from the arch's table: registers in granules of 8, LDS by whole groups."""
    text = amd("\ts_endpgm", arch=arch, vgpr_count=vgprs, sgpr_count=sgprs, max_flat_workgroup_size=64 * warps)
    assert facts(read_amdgcn(text), shared_bytes=lds)["waves_per_simd"] == waves


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "waves"),
    [
        pytest.param(32, 4, 0, 16, id="32-registers"),
        pytest.param(33, 4, 0, 12, id="33-registers"),
        pytest.param(64, 4, 0, 8, id="64-registers"),
        pytest.param(255, 8, 0, 2, id="255-registers"),
        pytest.param(32, 4, 100 * 1024, 2, id="100-kib"),
        pytest.param(32, 1, 0, 8, id="one-warp-blocks"),
    ],
)
def test_occupancy_sm_90(registers: int, warps: int, shared: int, waves: float) -> None:
    """Warps a scheduler: 65,536 registers in granules of 256 a warp, 228 KiB less 1 KiB a block, 32 blocks."""
    assert occupancy.waves_nvidia("sm_90", registers, warps, shared) == waves


def test_occupancy_of_an_unknown_arch() -> None:
    """An arch without a row is an error, never a default."""
    with pytest.raises(ValueError, match="no occupancy figures for 'gfx1201'"):
        occupancy.unit("gfx1201")
