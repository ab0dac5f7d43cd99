"""Hugging Face models: their attention as maps, the inputs it really sees, named models and texts.

>>> from transformers import BertConfig, BertModel
>>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99)
>>> from_transformers(BertModel(config), layer=1).heads
4
"""

from howsmooth.models.conventions import MODEL_TYPES
from howsmooth.models.inputs import AttentionInputs, attention_inputs
from howsmooth.models.named import NAMED, NamedModel, load
from howsmooth.models.reading import from_transformers
from howsmooth.models.texts import alice

__all__ = [
    "MODEL_TYPES",
    "NAMED",
    "AttentionInputs",
    "NamedModel",
    "alice",
    "attention_inputs",
    "from_transformers",
    "load",
]
