"""Rounds numbers of rows up to a few sizes, where every size costs memory for ever.

On a CPU, torch multiplies 16-bit matrices by oneDNN, which prepares code and tables for each shape
(about half a MiB for each projection of SmolLM2) and keeps up to 1,024 of them. Input that is cut
anyhow would bring hundreds of shapes: a process that reads for months would grow for weeks. Float32
goes another way, which keeps nothing.
"""

import torch

SMALLEST = 8


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """The number of rows to compute in place of `num_rows`: at most a quarter more from 512 on."""
    if dtype.itemsize > 2 or num_rows <= 1:
        return num_rows
    if num_rows <= 128:
        return max(SMALLEST, 1 << (num_rows - 1).bit_length())
    unit = max(128, (1 << (num_rows - 1).bit_length()) // 8)
    return -(-num_rows // unit) * unit
