"""Small random models of every kind that can be read, and a way to listen to them without the package's help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

D, HEADS, WORDS = 32, 4, 97
_TEXT = {
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 16, "attention_bias": True}
_IMAGE = {
    **{key: _TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    "image_size": 16,
    "patch_size": 4,
}
_GPT2 = {"n_embd": D, "n_layer": 2, "n_head": HEADS, "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
_OPT = {**{key: value for key, value in _TEXT.items() if key != "intermediate_size"}, "ffn_dim": 48}
_FRAMES = 12
_T5 = {"d_model": D, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS, "vocab_size": WORDS}
_WAV2VEC2 = {
    **{key: _TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
_WHISPER = {
    "d_model": D,
    "encoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_dim": 48,
    "max_source_positions": _FRAMES,
    "decoder_start_token_id": 1,
    **{key: _TEXT[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_LATENT = {
    **_TEXT,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
_BOTH = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Tiny:
    """A model class with its configuration, and where layer {} has its attention block and output projection."""

    kind: str
    options: dict[str, Any]
    block: str
    output: str
    tolerance: float = 1e-10
    """Relative accuracy in float64; 1e-6 where the model itself computes a part in float32."""
    layers: tuple[int, ...] = (0, 1)
    """The layers that have softmax attention."""

    def build(self, randomise: bool = True, **more: Any) -> Any:
        """A model in float64; with ``randomise`` every parameter is drawn, biases and norms too (seed 0)."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(**{**self.options, **more})
        model = getattr(transformers, _CLASSES.get(self.kind, f"{self.kind}Model"))(config).double().eval()
        model.config._experts_implementation = "eager"  # others know no double precision
        model = model.get_encoder() if self.kind == "Whisper" else model
        if randomise:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.3)
        return model

    def listen(self, model: Any, layer: int, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any], tuple]:
        """Tokens into the attention block, output of its output projection, and the other arguments of the block."""
        heard: dict[str, Any] = {}

        def before(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            kwargs = dict(kwargs)
            heard["x"], *rest = args if args else (kwargs.pop("hidden_states"),)
            heard["rest"], heard["kwargs"] = tuple(rest), kwargs

        block, output = (model.get_submodule(path.format(layer)) for path in (self.block, self.output))
        hooks = [
            block.register_forward_pre_hook(before, with_kwargs=True),
            output.register_forward_hook(lambda module, args, y: heard.update(y=y)),
        ]
        try:
            with torch.no_grad():
                model(**inputs)
        finally:
            for hook in hooks:
                hook.remove()
        heard["kwargs"] = {k: v for k, v in heard["kwargs"].items() if k not in ("past_key_values", "layer_past")}
        return heard["x"], heard["y"], heard["kwargs"], heard["rest"]

    def function(self, model: Any, layer: int, inputs: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """The model's own attention of a layer as a function of tokens (n, d), all else as in a run on ``inputs``."""
        _, _, kwargs, rest = self.listen(model, layer, inputs)
        block, output = (model.get_submodule(path.format(layer)) for path in (self.block, self.output))

        def attention(x: Tensor) -> Tensor:
            outputs: list[Tensor] = []
            hook = output.register_forward_hook(lambda module, args, y: outputs.append(y))
            try:
                block(x[None], *rest, **kwargs)
            finally:
                hook.remove()
            return outputs[0][0]

        return attention

    def inputs(self, n: int = 19) -> dict[str, Tensor]:
        """Inputs that the package's own check does not use (seed 7)."""
        generator = torch.Generator().manual_seed(7)
        if self.kind == "Wav2Vec2":
            return {"input_values": torch.randn(1, 10 + 5 * (2 * n), generator=generator, dtype=torch.float64)}
        if self.kind == "Whisper":
            return {"input_features": torch.randn(1, 80, 2 * _FRAMES, generator=generator, dtype=torch.float64)}
        if "image_size" in self.options:
            return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator, dtype=torch.float64)}
        return {"input_ids": torch.randint(3, WORDS, (1, n), generator=generator)}


_CLASSES = {"Llama4Text": "Llama4TextModel", "Gemma3Text": "Gemma3TextModel", "T5": "T5EncoderModel"}
_BERT = ("encoder.layer.{}.attention", "encoder.layer.{}.attention.output.dense")
_LLAMA = ("layers.{}.self_attn", "layers.{}.self_attn.o_proj")
_VIT = ("layers.{}.attention", "layers.{}.attention.o_proj")

TINY: dict[str, Tiny] = {
    "bert": Tiny("Bert", _TEXT, *_BERT),
    "camembert": Tiny("Camembert", _TEXT, *_BERT),
    "deit": Tiny("DeiT", _IMAGE, *_VIT),
    "dinov2": Tiny("Dinov2", _IMAGE, "encoder.layer.{}.attention", "encoder.layer.{}.attention.o_proj"),
    "cohere": Tiny("Cohere", {**_GROUPED, "use_qk_norm": True}, *_LLAMA, tolerance=1e-6),
    "deepseek_v2": Tiny("DeepseekV2", {**_LATENT, "head_dim": 4}, *_LLAMA, tolerance=1e-6),
    "deepseek_v3": Tiny("DeepseekV3", _LATENT, *_LLAMA, tolerance=1e-6),
    "exaone4": Tiny("Exaone4", {**_GROUPED, **_BOTH}, *_LLAMA, tolerance=1e-6),
    "gpt_oss": Tiny(
        "GptOss", {**_GROUPED, **_BOTH, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, *_LLAMA
    ),
    "llama4_text": Tiny(
        "Llama4Text",
        {
            **{key: value for key, value in _GROUPED.items() if key != "intermediate_size"},
            "head_dim": 8,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 5,
            "floor_scale": 4,
        },
        *_LLAMA,
        tolerance=1e-6,
    ),
    "olmo2": Tiny("Olmo2", {**_GROUPED, "attention_bias": True}, *_LLAMA, tolerance=1e-6),
    "olmo3": Tiny("Olmo3", {**_GROUPED, **_BOTH}, *_LLAMA, tolerance=1e-6),
    "qwen3_moe": Tiny("Qwen3Moe", {**_GEMMA, **_EXPERTS}, *_LLAMA, tolerance=1e-6),
    "qwen3_next": Tiny(
        "Qwen3Next",
        {
            **_GEMMA,
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        *_LLAMA,
        tolerance=1e-6,
        layers=(1,),
    ),
    "distilbert": Tiny(
        "DistilBert",
        {"dim": D, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 48, "vocab_size": WORDS},
        "transformer.layer.{}.attention",
        "transformer.layer.{}.attention.out_lin",
    ),
    "electra": Tiny("Electra", {**_TEXT, "embedding_size": 16}, *_BERT),
    "gemma": Tiny("Gemma", _GEMMA, *_LLAMA),
    # Gemma 2 has its soft-cap in eager attention only, which takes softmax in float32.
    "gemma2": Tiny("Gemma2", {**_GEMMA, **_BOTH, "attn_logit_softcapping": 3.0}, *_LLAMA, tolerance=1e-6),
    # Query and key norms run in float32 in these models.
    "gemma3_text": Tiny("Gemma3Text", {**_GEMMA, **_BOTH}, *_LLAMA, tolerance=1e-6),
    "qwen3": Tiny("Qwen3", {**_GEMMA, **_BOTH, "use_sliding_window": True}, *_LLAMA, tolerance=1e-6),
    "gpt2": Tiny("GPT2", _GPT2, "h.{}.attn", "h.{}.attn.c_proj"),
    "gpt_neox": Tiny("GPTNeoX", {**_TEXT, "rotary_pct": 0.5}, "layers.{}.attention", "layers.{}.attention.dense"),
    "granite": Tiny("Granite", {**_GROUPED, "attention_multiplier": 0.2}, *_LLAMA),
    "llama": Tiny("Llama", {**_GROUPED, "attention_bias": True}, *_LLAMA),
    "mistral": Tiny("Mistral", {**_GROUPED, "sliding_window": 5}, *_LLAMA),
    "mpnet": Tiny("MPNet", _TEXT, "encoder.layer.{}.attention.attn", "encoder.layer.{}.attention.attn.o"),
    "opt": Tiny(
        "OPT", {**_OPT, "word_embed_proj_dim": D}, "decoder.layers.{}.self_attn", "decoder.layers.{}.self_attn.out_proj"
    ),
    "phi": Tiny("Phi", _GROUPED, "layers.{}.self_attn", "layers.{}.self_attn.dense"),
    "phi3": Tiny("Phi3", _GROUPED, *_LLAMA),
    "qwen2": Tiny("Qwen2", {**_GROUPED, **_BOTH, "use_sliding_window": True}, *_LLAMA),
    "roberta": Tiny("Roberta", _TEXT, *_BERT),
    "smollm3": Tiny("SmolLM3", {**_GROUPED, "no_rope_layers": [1, 0]}, *_LLAMA),
    "starcoder2": Tiny("Starcoder2", {**_GROUPED, "sliding_window": 5}, *_LLAMA),
    "t5": Tiny("T5", _T5, *(f"encoder.block.{{}}.layer.0.SelfAttention{end}" for end in ("", ".o"))),
    "vit": Tiny("ViT", _IMAGE, *_VIT),
    "wav2vec2": Tiny("Wav2Vec2", _WAV2VEC2, *(f"encoder.layers.{{}}.attention{end}" for end in ("", ".out_proj"))),
    "whisper": Tiny("Whisper", _WHISPER, *(f"layers.{{}}.self_attn{end}" for end in ("", ".out_proj"))),
    "xlm-roberta": Tiny("XLMRoberta", _TEXT, *_BERT),
}
