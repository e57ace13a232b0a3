"""How often a needle is found: `streamkv bench recall`.

haystack (text) -> question (stream with a needle) -> asking (one answer) -> answers (their file)
-> statistics -> report and heatmap; `run` puts them in order, `modes` knows what a build can do.
"""
