"""Trainable attention layers, one module per kind; `named` has them all by name, the others what they share."""
