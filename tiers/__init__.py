"""Where blocks live: gpu pool, cpu pool and ssd store, and what moves between them."""
