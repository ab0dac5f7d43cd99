"""Heavy evidence: what the documentation claims, computed and written into its tables by `make verify`.

The tests run smaller samples of the same code.
"""
