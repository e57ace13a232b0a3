"""Limits of recall that plans of memory know, too. No torch."""

SCRATCH_BYTES = 128 << 20
"""Scores that are made at once, by all queries with all blocks, if more than one head's."""
