"""All cases, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.network.handwritten.attention_variants import (
    BucketBiasAttention,
    CosineAttention,
    DifferentialAttention,
    DistanceAttention,
    GatedAttention,
    LinearAttention,
    LinearBiasAttention,
    MixedUpHeads,
    MultiQueryAttention,
    ShawAttention,
    SigmoidAttention,
    SinkAttention,
    SlidingWindowAttention,
    SlotAttention,
    SoftCappedAttention,
    SoftmaxOverQueries,
    SoftmaxPlusOneAttention,
    TalkingHeadsAttention,
    TiedDistanceAttention,
    TopAttention,
    WrittenSoftmaxAttention,
    WrongAxisBatch,
)
from tests.network.handwritten.by_hand import AnnotatedEncoder, EinsumBlock, SharedHeadMapsBlock
from tests.network.handwritten.drawing import Case, Expect, built, draw
from tests.network.handwritten.language import FirstGPT2Block, FoldedHeadsBlock, LectureBlock, NanoGPT
from tests.network.handwritten.llamas import (
    HandLlama,
    LowRankAttention,
    OneNormParallelBlock,
    RMSNorm,
    SpeedrunGPT,
    TwoNormParallelBlock,
)
from tests.network.handwritten.memories import (
    CrossDecoder,
    LatentQueries,
    LearnedMemory,
    PrefixAttention,
    SentenceEmbedder,
    SetTransformer,
    SharedLayers,
)
from tests.network.handwritten.mixing import (
    AdaptedWeights,
    ConvolutionalPositions,
    ExpertsBlock,
    MixerBlock,
    SpatialGateBlock,
    UnusedParts,
)
from tests.network.handwritten.plain import PlainAttention, Stack
from tests.network.handwritten.programs import (
    AlwaysDropout,
    Checkpointed,
    ControlFlow,
    Counting,
    CustomHonest,
    CustomRounding,
    DataResidual,
    DetachedRounding,
    DetachedScaleNorm,
    EmptyBuffer,
    HeadLoop,
    InPlace,
    NoBatch,
    Noise,
    NumberFromData,
    Scriptable,
    StructuredOutput,
    recorded,
    steered,
)
from tests.network.handwritten.torch_modules import OwnMultiheadBlock, SequenceFirst, TorchDecoder, TorchEncoder
from tests.network.handwritten.vision import (
    BatchNormViT,
    ContrastiveViT,
    ImageModelBlock,
    PooledViT,
    ReshapeViT,
    ShiftedWindowBlock,
)


def _blocks(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(block(), block())


def _stack(attention: Callable[..., nn.Module], d: int = 24, *sizes: int) -> Callable[[], nn.Module]:
    return partial(Stack, partial(attention, d, *(sizes or (3,))), d)


def _plain(kind: Callable[..., nn.Module], d: int = 16, heads: int = 2) -> Callable[[], nn.Module]:
    return partial(kind, partial(PlainAttention, d, heads), d)


def _case(
    name: str,
    factory: Callable[[], nn.Module],
    shape: tuple[int, ...],
    expect: Expect,
    why: str = "",
    others: tuple[Tensor, ...] = (),
) -> Case:
    return Case(name, partial(built, factory), partial(draw, *shape), expect, why, others)


PIXELS = (1, 3, 8, 12)
PADDED = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]])
"""A mask of seven tokens, the last two of which are padding."""
RANDOM = frozenset({"always_dropout", "noise"})
"""The cases whose output is another in every call."""

CASES: tuple[Case, ...] = (
    # GPT-2 and its children
    _case("nanogpt_kernel", partial(NanoGPT, True), (1, 8, 24), "read"),
    _case("nanogpt_triangle", partial(NanoGPT, False), (1, 8, 24), "read", "the logits of the last token alone"),
    _case("first_gpt2", _blocks(partial(FirstGPT2Block, 24, 3, 16)), (1, 7, 24), "read", "masked logits become -10^4"),
    _case("list_of_heads", _blocks(partial(LectureBlock, 24, 3)), (1, 8, 24), "read", "the scale is not 1/√head size"),
    _case("folded_heads", _blocks(partial(FoldedHeadsBlock, 16, 2)), (1, 6, 16), "read"),
    # vision transformers
    _case("vit_class_token", partial(PooledViT, "cls"), PIXELS, "read"),
    _case("vit_mean", partial(PooledViT, "mean"), PIXELS, "read"),
    _case("vit_unfold_batchnorm", BatchNormViT, PIXELS, "read"),
    _case("vit_reshape_loops", ReshapeViT, PIXELS, "partly", "the softmax of the classes behind all"),
    _case("timm_qk_norm", _blocks(partial(ImageModelBlock, 24, 3, True, False)), (1, 7, 24), "read"),
    _case("timm_kernel", _blocks(partial(ImageModelBlock, 24, 3, False, True)), (1, 7, 24), "read"),
    _case("contrastive_vit", ContrastiveViT, PIXELS, "read"),
    _case(
        "shifted_windows",
        lambda: nn.Sequential(ShiftedWindowBlock(16, 2, 4, 2, 0), ShiftedWindowBlock(16, 2, 4, 2, 1)),
        (1, 16, 16),
        "either",
        "windows stand in the batch dimension: attention under a block mask, if it is read",
    ),
    # the layers of torch itself
    _case("torch_encoder_pre_gelu", partial(TorchEncoder, True, True, "gelu"), (1, 7, 12), "read"),
    _case("torch_encoder_post_relu", partial(TorchEncoder, False, True, "relu"), (1, 7, 12), "read", "has a fast path"),
    _case("torch_encoder_pre_relu_sequence_first", partial(TorchEncoder, True, False, "relu"), (1, 7, 12), "read"),
    _case(
        "torch_encoder_post_gelu_causal",
        partial(TorchEncoder, False, False, "gelu", causal=True),
        (1, 7, 12),
        "read",
        "torch asks whether the mask is the causal one: a branch on a constant, not on the data",
    ),
    _case(
        "torch_decoder",
        TorchDecoder,
        (1, 6, 16),
        "read",
        "the memory is fixed; a branch on the mask",
        (draw(1, 9, 16, seed=2),),
    ),
    _case(
        "multihead_weights_bool_mask",
        _blocks(partial(OwnMultiheadBlock, 16, 2, True, True, "bool")),
        (1, 7, 16),
        "read",
    ),
    _case(
        "multihead_sequence_first_float_mask",
        lambda: SequenceFirst(*(OwnMultiheadBlock(16, 2, False, False, "float") for _ in range(2))),
        (1, 7, 16),
        "read",
    ),
    _case("multihead_without_batch", _blocks(partial(OwnMultiheadBlock, 16, 2, False, True, "none")), (7, 16), "read"),
    _case(
        "multihead_extra_keys",
        _blocks(partial(OwnMultiheadBlock, 16, 2, True, False, "none", extra=True)),
        (1, 7, 16),
        "either",
        "a learned key and a zero one stand among those of the tokens",
    ),
    # encoders, memories and latents
    _case("albert_shared", SharedLayers, (1, 7, 12), "read", "one layer three times, two tokens masked", (PADDED,)),
    _case("latent_queries", LatentQueries, (1, 9, 24), "read"),
    _case("learned_memory", LearnedMemory, (1, 7, 24), "read", "keys and values are constant"),
    _case("cross_decoder", CrossDecoder, (1, 6, 24), "read", "the memory is fixed", (draw(1, 9, 16, seed=3),)),
    _case("set_transformer", SetTransformer, (1, 8, 16), "read", "residuals of projected queries, scale of the width"),
    _case(
        "prefix_keys", _stack(PrefixAttention), (1, 6, 24), "either", "learned keys stand before those of the tokens"
    ),
    _case("sentence_embedder", SentenceEmbedder, (1, 7, 16), "partly", "F.normalize of the mean", (PADDED,)),
    # Llama and its relatives
    _case("llama_rotary", partial(HandLlama, "real"), (1, 8, 32), "read"),
    _case("llama_complex", partial(HandLlama, "complex"), (1, 8, 32), "read", "rotary as complex multiplication"),
    _case("llama_casts", partial(HandLlama, "cast"), (1, 8, 32), "either", "rounds to float32 in the midst of float64"),
    _case("parallel_one_norm", _blocks(partial(OneNormParallelBlock, 16, 2)), (1, 7, 16), "read"),
    _case(
        "parallel_two_norms",
        _blocks(partial(TwoNormParallelBlock, 24, 3, 4)),
        (1, 7, 24),
        "read",
        "keeps cosines between calls, which a trace must not leave behind",
    ),
    _case("speedrun", SpeedrunGPT, (1, 8, 32), "read", "squared ReLU, norms without gains, tanh of the logits"),
    _case("low_rank_keys", partial(Stack, partial(LowRankAttention, 24, 3), 24, RMSNorm), (1, 7, 24), "read"),
    # everything by hand
    _case("einsum_heads", _blocks(partial(EinsumBlock, 24, 3, 8)), (1, 7, 24), "read"),
    _case("shared_head_maps", _blocks(partial(SharedHeadMapsBlock, 24, 3)), (1, 7, 24), "read"),
    _case(
        "annotated", AnnotatedEncoder, (1, 7, 24), "partly", "divides by the unbiased deviation plus eps: no LayerNorm"
    ),
    # variants of the logits
    _case("alibi", _stack(LinearBiasAttention, 32, 4), (1, 8, 32), "read"),
    _case("relative_buckets", partial(Stack, partial(BucketBiasAttention, 24, 3), 24, RMSNorm), (1, 9, 24), "read"),
    _case("soft_capped", _stack(SoftCappedAttention), (1, 7, 24), "read", "tanh of the logits"),
    _case("sliding_window", _stack(SlidingWindowAttention, 32, 4, 2, 3), (1, 9, 32), "read"),
    _case("multi_query", _stack(MultiQueryAttention), (1, 7, 24), "read"),
    _case("shaw_positions", _stack(ShawAttention), (1, 8, 24), "partly", "the bias depends on the query"),
    # variants of the weights
    _case(
        "talking_heads", _stack(TalkingHeadsAttention), (1, 7, 24), "partly", "heads mix before and after the softmax"
    ),
    _case("gated_attention", _stack(GatedAttention), (1, 7, 24), "read"),
    _case(
        "sink",
        _stack(SinkAttention),
        (1, 7, 24),
        "either",
        "softmax with a constant logit that is dropped: rows sum below 1",
    ),
    _case("written_softmax", _stack(WrittenSoftmaxAttention), (1, 7, 24), "either", "softmax as exp, sum and division"),
    _case("softmax_plus_one", _stack(SoftmaxPlusOneAttention), (1, 7, 24), "either", "rows sum below 1: no softmax"),
    _case("differential", _stack(DifferentialAttention), (1, 7, 24), "either", "the difference of two softmaxes"),
    _case("top_three", _stack(TopAttention), (1, 7, 24), "either", "the mask depends on the data and jumps with them"),
    # not softmax attention
    _case("l2", _stack(DistanceAttention), (1, 7, 24), "either", "squared distances as logits"),
    _case("l2_tied", _stack(TiedDistanceAttention), (1, 7, 24), "either", "squared distances, queries and keys tied"),
    _case("cosine", _stack(CosineAttention), (1, 7, 24), "either", "queries and keys of length one"),
    _case("sigmoid", _stack(SigmoidAttention), (1, 7, 24), "either", "sigmoid in place of softmax"),
    _case("linear", _stack(LinearAttention), (1, 7, 24), "either", "no softmax"),
    _case("softmax_over_queries", _stack(SoftmaxOverQueries), (1, 7, 24), "either", "columns sum to 1, rows do not"),
    _case("slots", _stack(SlotAttention), (1, 7, 24), "either", "softmax over queries, normalised over keys"),
    _case("mixed_up_heads", _stack(MixedUpHeads), (1, 6, 24), "either", "heads hold parts of the sequence"),
    _case("wrong_axis", _stack(WrongAxisBatch), (1, 7, 24), "either", "attention over the batch of one: affine"),
    # other ways to mix tokens
    _case("mixer", _blocks(partial(MixerBlock, 7, 16)), (1, 7, 16), "read"),
    _case("spatial_gate", _blocks(partial(SpatialGateBlock, 7, 16, 24)), (1, 7, 16), "read"),
    _case("convolutional_positions", partial(ConvolutionalPositions, "mean"), (1, 8, 16), "read"),
    _case("max_pooling", partial(ConvolutionalPositions, "max"), (1, 8, 16), "partly", "the largest over tokens"),
    _case(
        "experts",
        lambda: nn.Sequential(Stack(partial(PlainAttention, 16, 2), 16), ExpertsBlock(16)),
        (1, 7, 16),
        "refused",
        "which expert runs depends on the data, and a trace freezes the choice",
    ),
    # adapted and unused weights
    _case("adapted_weights", AdaptedWeights, (1, 7, 16), "read", "weights are computed from parameters"),
    _case("unused_modules", UnusedParts, (1, 7, 16), "read", "half of the modules do not matter"),
    # programs that a reader may trip over
    _case("control_flow", _plain(ControlFlow), (1, 7, 16), "refused", "a branch on the data"),
    _case("number_from_data", _plain(NumberFromData), (1, 7, 16), "refused", "a trace freezes .item()"),
    _case("in_place", _blocks(partial(InPlace, 16, 2)), (1, 7, 16), "read"),
    _case("returns_tuple", partial(StructuredOutput, "tuple"), (1, 7, 16), "read", "a tensor and None"),
    _case("returns_dict", partial(StructuredOutput, "dict"), (1, 7, 16), "read", "a dictionary of one tensor"),
    _case("returns_object", partial(StructuredOutput, "object"), (1, 7, 16), "either", "two tensors: which is meant?"),
    _case("without_batch", _blocks(partial(NoBatch, 16, 0.25)), (7, 16), "read"),
    _case("batch_of_one", _plain(Stack), (1, 7, 16), "read"),
    _case("head_loop", _stack(HeadLoop), (1, 7, 24), "read"),
    _case("empty_buffer", _stack(EmptyBuffer), (1, 7, 24), "read"),
    _case(
        "detached_norm",
        partial(Stack, partial(PlainAttention, 16, 2), 16, DetachedScaleNorm),
        (1, 7, 16),
        "either",
        "autograd's gradient is not the derivative of the value: say which is meant, or refuse",
    ),
    _case(
        "data_residual",
        _plain(DataResidual),
        (1, 7, 16),
        "either",
        "autograd's gradient is not the derivative of the value: say which is meant, or refuse",
    ),
    _case("always_dropout", _plain(AlwaysDropout), (1, 7, 16), "refused", "random in evaluation mode"),
    _case("noise", _plain(Noise), (1, 7, 16), "refused", "random in evaluation mode"),
    _case(
        "hooks_that_change", partial(steered, _plain(Stack), 16), (1, 7, 16), "read", "hooks are part of the function"
    ),
    _case("hooks_that_record", partial(recorded, _plain(Stack)), (1, 7, 16), "read"),
    _case("checkpointed", Checkpointed, (1, 7, 16), "read"),
    _case(
        "scripted",
        lambda: torch.jit.script(Scriptable()),
        (1, 7, 16),
        "either",
        "TorchScript: its operations can be seen, its Python cannot",
    ),
    _case("custom_rounding", _plain(CustomRounding), (1, 7, 16), "refused", "a gradient that is no derivative"),
    _case("detached_rounding", _plain(DetachedRounding), (1, 7, 16), "refused", "a gradient that is no derivative"),
    _case(
        "custom_function",
        _plain(CustomHonest),
        (1, 7, 16),
        "either",
        "an autograd.Function may say anything, this is right",
    ),
    _case("counting", Counting, (1, 7, 16), "either", "writes to a buffer that its output does not depend on"),
)
