"""Limits of recall that plans of memory know, too. No torch."""

SCRATCH_BYTES = 128 << 20
"""Of the keys and scores of a piece; the next piece is made while the one before is still there."""
