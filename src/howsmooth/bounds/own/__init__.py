"""This project's own theorems, one module each; what they are made of (`paths`, `rounding`, `spreads`) is beside."""
