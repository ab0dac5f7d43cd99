"""Layers inside models of transformers and torch: replacement of attention, and recording of its calls."""
