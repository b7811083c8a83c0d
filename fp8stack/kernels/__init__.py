"""Quantisation and GEMM kernels, one family a file.

A family's file holds, in this order and under one name: the plain-torch reference (the specification), the Triton
kernel, and the launcher, registered with torch as a custom op. Which of them ran is on record: see launch.py.

    launch.py         reference or kernel: the decision, and the record of it
    cast.py           the shared pieces of all kernels: load, encode, decode; and the bare saturating cast
    tile.py           tiles that are read along rows and written along columns, and blocks of a tile
    groups.py         where groups of rows start and end
    rowwise.py        one scale a row
    column_maxima.py  rows, and on the way the maxima of their columns: for ops that quantise a tensor both ways
    tensorwise.py     one scale a tensor, in either layout or both
    colwise.py        one scale a column of each group of rows
    rowwise_grouped.py      one scale a row of each group of columns
    rowwise_and_colwise.py  both of a tensor of tokens
    experts.py        expert weights: one scale a row, a column, or both
    blockwise.py      one scale a block of 1x128, 128x1 or 128x128
    mxfp8.py          one power-of-two scale for 32 elements
    scaled_mm.py      the product of two FP8 matrices; the kernel behind it: scaled_kernel.py
    grouped_gemm.py   products in groups, for experts; the kernel behind them: grouped_kernel.py
"""
