"""Third-party models, small and with random weights, called as their documentation calls them; nothing is downloaded.

Each entry makes a model, a batch for it, and the loss of a step. Dropout is set to 0, as a run in a pipeline draws
other random numbers than a plain one (law L7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Any]
CLASSES, WORDS = 5, 99


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        library: Where it comes from.
        name: As people ask for it there.
        make: Makes it.
        batch: Makes a batch.
        loss: Its loss for a batch.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def names(text: str) -> list[str]:
    return text.split()


def still(model: nn.Module) -> nn.Module:
    """``model`` without dropout and stochastic depth."""
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "drop_path_rate", "dropout"):
            if isinstance(getattr(module, name, None), float) and "Drop" in type(module).__name__ + name.title():
                setattr(module, name, 0.0)
        if "StochasticDepth" in type(module).__name__:
            module.p = 0.0  # type: ignore[assignment]
    return model


# Images: `model(x)` gives logits.


def images(size: int) -> Batch:
    return {"x": torch.randn(2, 3, size, size), "y": torch.randint(CLASSES, (2,))}


def classified(model: nn.Module, batch: Batch) -> Tensor:
    given = model(batch["x"])
    logits = [each for each in (given if isinstance(given, tuple) else [given]) if each is not None]
    return torch.stack([F.cross_entropy(each, batch["y"]) for each in logits]).sum()


TIMM_64 = names("""
resnet10t resnet14t resnet18 resnet26 resnet34 resnet50 resnext26ts seresnext26t_32x4d resnetv2_50 ecaresnet26t
gcresnext26ts skresnet18 selecsls42 densenet121 dla34 dla46_c res2net50_14w_8s res2next50 vovnet39a ese_vovnet19b_slim
darknet17 cspresnet50 cspdarknet53 regnetx_002 regnety_002 regnetz_005 nf_regnet_b0 nfnet_l0 mobilenetv2_050
mobilenetv3_small_050 mobilenetv4_conv_small_050 mnasnet_050 fbnetc_100 efficientnet_lite0 efficientnet_b0
tinynet_e mixnet_s ghostnet_050 ghostnetv2_100 lcnet_035 semnasnet_050 spnasnet_100 hardcorenas_a rexnet_100
convnext_atto convnext_femto convnextv2_atto edgenext_xx_small hgnet_tiny hgnetv2_b0 inception_next_atto
mobileone_s0 repvgg_a0 fasternet_t0 starnet_s1 repghostnet_050 poolformer_s12 poolformerv2_s12 caformer_s18
convformer_s18 pvt_v2_b0 mobilevit_xxs mobilevitv2_050 fastvit_t8 repvit_m0_9 vgg11
""")
"""Convolutional and hierarchical models, which take images of any size."""
TIMM_SIZED = names("""
vit_tiny_patch16_224 vit_small_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 cait_xxs24_224
beit_base_patch16_224 eva02_tiny_patch14_224 xcit_nano_12_p16_224 mixer_s16_224 gmlp_ti16_224 resmlp_12_224
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 convit_tiny volo_d1_224 tnt_s_patch16_224
""")
"""Transformers and mixers, made for images of 64 x 64 by ``img_size``."""
TIMM_FIXED = {
    "levit_128s": 224,
    "coat_tiny": 224,
    "inception_v3": 299,
    "efficientformer_l1": 224,
    "crossvit_tiny_240": 240,
}
"""Models that take images of one size."""


def timm_model(name: str, **settings: Any) -> nn.Module:
    import timm

    made: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
    return made


def timm_models() -> list[Model]:
    def entry(name: str, size: int = 64, **settings: Any) -> Model:
        return Model("timm", name, lambda: timm_model(name, **settings), lambda: images(size), classified)

    return [
        *(entry(name) for name in TIMM_64),
        *(
            entry(name, 70 if "patch14" in name else 64, img_size=70 if "patch14" in name else 64)
            for name in TIMM_SIZED
        ),
        *(entry(name, size) for name, size in TIMM_FIXED.items()),
    ]


TORCHVISION = {
    **dict.fromkeys(names("resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 mobilenet_v2"), 64),
    **dict.fromkeys(names("mobilenet_v3_small efficientnet_b0 regnet_y_400mf shufflenet_v2_x0_5 mnasnet0_5"), 64),
    **dict.fromkeys(names("squeezenet1_1 convnext_tiny swin_t vgg11 alexnet googlenet"), 96),
    "inception_v3": 299,
    "vit_b_16": 224,
    "maxvit_t": 224,
}
SEGMENTATION = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")


def masks() -> Batch:
    return {"x": torch.randn(2, 3, 64, 64), "y": torch.randint(CLASSES, (2, 64, 64))}


def segmented(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"])["out"], batch["y"])


DETECTION = {
    "retinanet_resnet50_fpn": {"min_size": 64, "max_size": 64},
    "fcos_resnet50_fpn": {"min_size": 64, "max_size": 64},
    "ssdlite320_mobilenet_v3_large": {},
}


def boxes() -> Batch:
    def target() -> dict[str, Tensor]:
        corners = torch.rand(2, 2) * 30
        return {"boxes": torch.cat([corners, corners + 20], dim=1), "labels": torch.randint(1, CLASSES, (2,))}

    return {"images": [torch.rand(3, 64, 64) for _ in range(2)], "targets": [target() for _ in range(2)]}


def detected(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["images"], batch["targets"])
    return sum(found.values()) if model.training else torch.cat([each["scores"] for each in found]).sum()


def torchvision_model(name: str, **settings: Any) -> nn.Module:
    from torchvision.models import get_model

    made: nn.Module = get_model(name, weights=None, num_classes=CLASSES, **settings)
    return made


def torchvision_models() -> list[Model]:
    def entry(name: str, batch: Callable[[], Batch], loss: Callable[[nn.Module, Batch], Tensor], **more: Any) -> Model:
        return Model("torchvision", name, lambda: torchvision_model(name, **more), batch, loss)

    sizes = TORCHVISION.items()
    return [
        *(entry(name, lambda size=size: images(size), classified) for name, size in sizes),  # type: ignore[misc]
        *(entry(name, masks, segmented, weights_backbone=None) for name in SEGMENTATION),
        *(entry(name, boxes, detected, weights_backbone=None, **more) for name, more in DETECTION.items()),
    ]


# transformers: `model(**batch).loss`, with labels among the inputs.

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OLDER: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": WORDS, "n_positions": 64}
OLDER |= {"bos_token_id": 1, "eos_token_id": 2}
PAIRS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
T5 |= {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}
STAGED: dict[str, Any] = {"image_size": 64, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}
EMBEDDED = {**STAGED, "embedding_size": 8}
SWIN: dict[str, Any] = {"image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
SWIN |= {"window_size": 4}
SOUND: dict[str, Any] = {
    **SIZES,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}

CAUSAL = {
    **dict.fromkeys(names("llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 olmo olmo2 granite"), GROUPED),
    **dict.fromkeys(names("cohere stablelm starcoder2 glm nemotron smollm3 helium persimmon"), GROUPED),
    **dict.fromkeys(names("qwen2_moe qwen3_moe olmoe"), EXPERTS),
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "gpt_neox": SIZES,
    "gpt2": OLDER,
    "gptj": {**OLDER, "rotary_dim": 4},
    "codegen": {**OLDER, "rotary_dim": 4, "n_ctx": 64},
    "gpt_bigcode": OLDER,
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": WORDS},
    "falcon": SIZES,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": WORDS, "max_seq_len": 64},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {**SIZES, "d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48},
    "biogpt": SIZES,
    "mamba": {**SIZES, "state_size": 8},
}
MASKED = {
    **dict.fromkeys(
        names("bert roberta camembert xlm-roberta mpnet roformer data2vec-text ernie nystromformer"), SIZES
    ),
    **dict.fromkeys(names("deberta deberta-v2 megatron-bert layoutlm squeezebert fnet modernbert mobilebert"), SIZES),
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": WORDS},
    "albert": {**SIZES, "embedding_size": 16},
    "electra": {**SIZES, "embedding_size": 16},
    "longformer": {**SIZES, "attention_window": 4},
    "squeezebert": {**SIZES, "embedding_size": 32},
    "mobilebert": {**SIZES, "intra_bottleneck_size": 32, "embedding_size": 16},
    "xlm": {"emb_dim": 32, "n_layers": 3, "n_heads": 4, "vocab_size": WORDS, "n_words": WORDS},
}
TRANSLATED = {
    **dict.fromkeys(names("bart mbart pegasus blenderbot blenderbot-small marian m2m_100 plbart"), PAIRS),
    **dict.fromkeys(names("t5 mt5"), T5),
}
SEEN = {
    **dict.fromkeys(names("vit beit dinov2 vit_msn ijepa"), VISION),
    "deit": {**VISION, "architectures": ["DeiTForImageClassification"]},
    **dict.fromkeys(names("convnext convnextv2 resnet regnet"), EMBEDDED),
    "swin": SWIN,
    "swinv2": SWIN,
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevit": {"image_size": 64, "hidden_sizes": [16, 16, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]},
    "poolformer": STAGED,
}
HEARD_AND_WRITTEN = {"whisper": {**PAIRS, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}}
TOWERS = {
    "clip": {
        "text_config": {**SIZES, "max_position_embeddings": 16},
        "vision_config": VISION,
        "projection_dim": 16,
    }
}
HEARD = {"wav2vec2": SOUND, "hubert": SOUND, "wavlm": SOUND, "unispeech-sat": SOUND}


def words(length: int = 9) -> Tensor:
    return torch.randint(3, WORDS, (2, length))


def next_words() -> Batch:
    ids = words()
    return {"input_ids": ids, "labels": ids}


def masked_words() -> Batch:
    ids = words(8)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def translation() -> Batch:
    return {"input_ids": words(), "labels": words(7)}


def pixels(size: int) -> Batch:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(CLASSES, (2,))}


def sound() -> Batch:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(CLASSES, (2,))}


def speech() -> Batch:
    return {"input_features": torch.randn(2, 8, 40), "labels": words(7)}


def captions() -> Batch:
    return {"input_ids": words(), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def spoken() -> Batch:
    return {"input_values": torch.randn(2, 400), "labels": words(5)}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def transformers_model(kind: str, model_type: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **settings)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    made: nn.Module = getattr(transformers, f"AutoModel{kind}").from_config(config)
    return made


def transformers_models() -> list[Model]:
    labels = {"num_labels": CLASSES}

    def entries(kind: str, types: dict[str, dict[str, Any]], batch: Callable[..., Batch], **more: Any) -> list[Model]:
        def entry(name: str, settings: dict[str, Any]) -> Model:
            size = [settings.get("image_size", 64)] if batch is pixels else []
            given = {**settings, **more}
            return Model(
                "transformers",
                f"{name} {kind}".replace("For", "for ").rstrip(),
                lambda: transformers_model(kind, name, given),
                lambda: batch(*size),
                own_loss,
            )

        return [entry(name, settings) for name, settings in types.items()]

    return [
        *entries("ForCausalLM", CAUSAL, next_words),
        *entries("ForMaskedLM", MASKED, masked_words),
        *entries("ForSeq2SeqLM", TRANSLATED, translation),
        *entries("ForSpeechSeq2Seq", HEARD_AND_WRITTEN, speech),
        *entries("ForImageClassification", SEEN, pixels, **labels),
        *entries("ForAudioClassification", HEARD, sound, **labels),
        *entries("ForCTC", {"wav2vec2": SOUND, "hubert": SOUND}, spoken),
        *entries("", TOWERS, captions),
        *entries("ForSequenceClassification", {"bert": SIZES, "roberta": SIZES}, labelled_words, **labels),
    ]


def labelled_words() -> Batch:
    return {"input_ids": words(), "labels": torch.randint(CLASSES, (2,))}


# Libraries around these models.

ADAPTED = {"gpt2": "CausalLM", "llama": "CausalLM", "qwen2": "CausalLM", "bert": "MaskedLM", "t5": "Seq2SeqLM"}


def peft_model(kind: str, name: str, settings: dict[str, Any]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    made: Any = transformers_model(f"For{kind}", name, settings)
    return get_peft_model(made, LoraConfig(r=4, lora_dropout=0.0))


def peft_models() -> list[Model]:
    settings, batches = {**CAUSAL, **MASKED, **TRANSLATED}, {"CausalLM": next_words, "MaskedLM": masked_words}
    return [
        Model(
            "peft",
            f"{name} for {kind} with LoRA",
            lambda name=name, kind=kind: peft_model(kind, name, settings[name]),  # type: ignore[misc]
            batches.get(kind, translation),
            own_loss,
        )
        for name, kind in ADAPTED.items()
    ]


SEGMENTED = names("Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3Plus")


def smp_model(name: str) -> nn.Module:
    import segmentation_models_pytorch as smp

    made: nn.Module = getattr(smp, name)("resnet18", encoder_weights=None, classes=CLASSES)
    return made


def smp_models() -> list[Model]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return [
        Model("segmentation_models_pytorch", name, lambda name=name: smp_model(name), masks, loss)  # type: ignore[misc]
        for name in SEGMENTED
    ]


def models() -> dict[str, Model]:
    """All of them, by library and name."""
    every = [*timm_models(), *torchvision_models(), *transformers_models(), *peft_models(), *smp_models()]
    return {f"{model.library}/{model.name}": model for model in every}
