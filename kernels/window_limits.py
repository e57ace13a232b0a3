"""From which sizes on a chunk attends by causal squares: plain numbers, for plans of memory too."""

MIN_QUERIES = 1024
MIN_WINDOW = 2048
"""Fewer queries, or a smaller window, are not worth the copies: one kernel does them in place."""
