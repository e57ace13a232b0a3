"""Attention kernels and their plain torch twins. Import the modules, not this package."""
