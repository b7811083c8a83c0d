"""Reads machine code: a listing's text -> facts that can be gated.

    listing = read_amdgcn(asm["amdgcn"])            # or read_sass(nvdisasm_text, resource_usage_text), read_ptx(...)
    facts(listing, shared_bytes=metadata["shared"])  # {"widest_store_bytes": 16, "fp8_encode": "native-f32", ...}
    offenders(listing, "narrow_memory_instructions") # the instructions behind a count, with their lines
    listing.digest                                   # hash of the normalised listing: says "changed", never gated

Text in, plain data out: no torch, no triton, no tool is started here. listing.py has the control-flow graph, amdgcn.py,
sass.py and ptx.py the dialects, facts.py the table of facts, hot.py the loops for a person to read, occupancy.py the
limits of each arch.
"""

from harness.isa.access import Access
from harness.isa.amdgcn import read_amdgcn
from harness.isa.facts import FACTS, Fact, facts, fp8_encode, hot_loops, offenders, region
from harness.isa.hot import Kernel, Line, Part, hot
from harness.isa.listing import Block, Instruction, Listing, ListingError
from harness.isa.ptx import read_ptx
from harness.isa.sass import read_resource_usage, read_sass

__all__ = [
    "FACTS",
    "Access",
    "Block",
    "Fact",
    "Instruction",
    "Kernel",
    "Line",
    "Listing",
    "ListingError",
    "Part",
    "facts",
    "fp8_encode",
    "hot",
    "hot_loops",
    "offenders",
    "read_amdgcn",
    "read_ptx",
    "read_resource_usage",
    "read_sass",
    "region",
]
