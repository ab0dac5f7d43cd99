"""Speed of howsmooth beside other ways to compute the same number: ``python -m benchmarks``.

Every section runs its contestants side by side, in turns, and prints how far each one's number is from a reference, so
that only right answers are compared. Nothing here asserts on time.
"""
