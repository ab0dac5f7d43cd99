"""Inside other people's models: our layers in the place of their attention, and listening to either."""

from howsmooth.nn.hosting.replacement import load_replaced, replace_attention, replaced_layers

__all__ = ["load_replaced", "replace_attention", "replaced_layers"]
