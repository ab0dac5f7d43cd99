"""Trainable attention layers, one module per kind; `attention_layer` is their base, `registry` lists them by name."""
