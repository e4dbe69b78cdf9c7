"""Hugging Face's architectures, small and with random weights, and a batch for each; without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

Batch = dict[str, Any]

WORDS = 99
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = {**SIZES, **STILL, "image_size": 32, "patch_size": 8, "num_labels": 3}
SEQUENCES: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": WORDS,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}


def words(length: int = 9) -> Tensor:
    return torch.randint(3, WORDS, (4, length))


def next_words() -> Batch:
    ids = words()
    return {"input_ids": ids, "labels": ids}


def masked_words() -> Batch:
    ids = words()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def translation() -> Batch:
    return {"input_ids": words(), "labels": words(7)}


def images() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(3, (4,))}


def speech() -> Batch:
    return {"input_features": torch.randn(4, 8, 40), "labels": words(7)}


def sound() -> Batch:
    return {"input_values": torch.randn(4, 400), "labels": torch.randint(3, (4,))}


def captions() -> Batch:
    return {"input_ids": words(), "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


def clip() -> nn.Module:
    small = {**SIZES, "num_hidden_layers": 2}
    text = {**small, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**small, "image_size": 32, "patch_size": 8}
    return made(hf.CLIPModel, hf.CLIPConfig, text_config=text, vision_config=vision, projection_dim=16)


def made(model: Any, config: Any, **settings: Any) -> nn.Module:
    built: nn.Module = model(config(**settings))
    return built


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "GPT2": (
        lambda: made(
            hf.GPT2LMHeadModel,
            hf.GPT2Config,
            n_embd=32,
            n_layer=3,
            n_head=4,
            vocab_size=WORDS,
            n_positions=64,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        ),
        next_words,
    ),
    "Llama": (lambda: made(hf.LlamaForCausalLM, hf.LlamaConfig, **GROUPED), next_words),
    "Mistral": (lambda: made(hf.MistralForCausalLM, hf.MistralConfig, **GROUPED), next_words),
    "Qwen2": (lambda: made(hf.Qwen2ForCausalLM, hf.Qwen2Config, **GROUPED), next_words),
    "Gemma": (lambda: made(hf.GemmaForCausalLM, hf.GemmaConfig, head_dim=8, **GROUPED), next_words),
    "Phi": (lambda: made(hf.PhiForCausalLM, hf.PhiConfig, **TEXT, resid_pdrop=0, embd_pdrop=0), next_words),
    "OPT": (
        lambda: made(
            hf.OPTForCausalLM,
            hf.OPTConfig,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=48,
            vocab_size=WORDS,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            dropout=0,
            attention_dropout=0,
        ),
        next_words,
    ),
    "GPTNeoX": (
        lambda: made(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, **TEXT, hidden_dropout=0, attention_dropout=0),
        next_words,
    ),
    "Bloom": (
        lambda: made(
            hf.BloomForCausalLM,
            hf.BloomConfig,
            hidden_size=32,
            n_layer=3,
            n_head=4,
            vocab_size=WORDS,
            hidden_dropout=0,
            attention_dropout=0,
        ),
        next_words,
    ),
    "Falcon": (
        lambda: made(
            hf.FalconForCausalLM,
            hf.FalconConfig,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            vocab_size=WORDS,
        ),
        next_words,
    ),
    "Mixtral": (lambda: made(hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4, **GROUPED), next_words),
    "BERT": (lambda: made(hf.BertForMaskedLM, hf.BertConfig, **TEXT, **STILL), masked_words),
    "RoBERTa": (lambda: made(hf.RobertaForMaskedLM, hf.RobertaConfig, **TEXT, **STILL), masked_words),
    "DistilBERT": (
        lambda: made(
            hf.DistilBertForMaskedLM,
            hf.DistilBertConfig,
            dim=32,
            n_layers=3,
            n_heads=4,
            hidden_dim=48,
            vocab_size=WORDS,
            max_position_embeddings=64,
            dropout=0,
            attention_dropout=0,
        ),
        masked_words,
    ),
    "ALBERT": (lambda: made(hf.AlbertForMaskedLM, hf.AlbertConfig, embedding_size=16, **TEXT, **STILL), masked_words),
    "ELECTRA": (
        lambda: made(hf.ElectraForMaskedLM, hf.ElectraConfig, embedding_size=16, **TEXT, **STILL),
        masked_words,
    ),
    "DeBERTa-v2": (lambda: made(hf.DebertaV2ForMaskedLM, hf.DebertaV2Config, **TEXT, **STILL), masked_words),
    "T5": (
        lambda: made(
            hf.T5ForConditionalGeneration,
            hf.T5Config,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=WORDS,
            dropout_rate=0,
            decoder_start_token_id=0,
        ),
        translation,
    ),
    "BART": (
        lambda: made(hf.BartForConditionalGeneration, hf.BartConfig, max_position_embeddings=64, **SEQUENCES),
        translation,
    ),
    "Whisper": (
        lambda: made(
            hf.WhisperForConditionalGeneration,
            hf.WhisperConfig,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            **SEQUENCES,
        ),
        speech,
    ),
    "ViT": (lambda: made(hf.ViTForImageClassification, hf.ViTConfig, **VISION), images),
    "DeiT": (lambda: made(hf.DeiTForImageClassification, hf.DeiTConfig, **VISION), images),
    "ResNet": (
        lambda: made(
            hf.ResNetForImageClassification,
            hf.ResNetConfig,
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            layer_type="basic",
            num_labels=3,
        ),
        images,
    ),
    "ConvNext": (
        lambda: made(
            hf.ConvNextForImageClassification,
            hf.ConvNextConfig,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_stages=2,
            num_labels=3,
        ),
        images,
    ),
    "Swin": (
        lambda: made(
            hf.SwinForImageClassification,
            hf.SwinConfig,
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
            num_labels=3,
            drop_path_rate=0.0,
            **STILL,
        ),
        images,
    ),
    "Wav2Vec2": (
        lambda: made(
            hf.Wav2Vec2ForSequenceClassification,
            hf.Wav2Vec2Config,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            conv_dim=(8, 8),
            conv_stride=(4, 4),
            conv_kernel=(8, 8),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            hidden_dropout=0,
            attention_dropout=0,
            activation_dropout=0,
            feat_proj_dropout=0,
            final_dropout=0,
            layerdrop=0,
            apply_spec_augment=False,
            num_labels=3,
        ),
        sound,
    ),
    "CLIP": (clip, captions),
}
