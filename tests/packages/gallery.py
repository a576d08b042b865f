"""Models of packages by their SPEC, with the arguments that make them small enough to be tried."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Packaged:
    """A model of a package.

    Attributes:
        title: names it in the table.
        spec: as `shoal export --model` takes it; ``FOLDER`` stands for a folder with `config`.
        arguments: as `--set` gives them.
        config: class of a configuration of transformers, class of the model, and its fields.
    """

    title: str
    spec: str
    arguments: Mapping[str, Any]
    config: tuple[str, str, Mapping[str, Any]] | None = field(default=None)

    @property
    def package(self) -> str:
        """The package that defines it, as it is imported."""
        return self.spec.partition(":")[0].partition(".")[0]

    def in_folder(self, folder: Path) -> str:
        """Return the SPEC; a configuration is written to a folder first."""
        if self.config is None:
            return self.spec
        import transformers  # noqa: PLC0415  (only where it is installed)

        config, model, fields = self.config
        made = getattr(transformers, config)(**fields, architectures=[model])
        made.save_pretrained(folder)
        return f"transformers:{folder}"


def _text(title: str, config: str, model: str, **fields: Any) -> Packaged:
    """A model of transformers for sentences of 16 tokens."""
    fields = {"vocab_size": 600, **fields}
    return Packaged(title, "transformers:FOLDER", {"input_shape": (16,)}, (config, model, fields))


def _photo(title: str, config: str, model: str, **fields: Any) -> Packaged:
    """A model of transformers for pictures with ten labels."""
    return Packaged(title, "transformers:FOLDER", {"num_labels": 10}, (config, model, fields))


def _picture(title: str, spec: str, side: int = 64, **arguments: Any) -> Packaged:
    """A model of pictures with ten labels."""
    return Packaged(title, spec, {"input_shape": (3, side, side), "num_classes": 10, **arguments})


def _patches(title: str, spec: str, **arguments: Any) -> Packaged:
    """A model of patches of small pictures with ten labels."""
    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 64, "depth": 2}
    return Packaged(title, spec, {**sizes, **arguments})


def _rows(title: str, spec: str, shape: tuple[int, ...], **arguments: Any) -> Packaged:
    """A model of rows of numbers, or of other samples of a shape."""
    return Packaged(title, spec, {"input_shape": shape, **arguments})


def _tokens(title: str, spec: str, **arguments: Any) -> Packaged:
    """A model of texts of 16 tokens that has no configuration."""
    return Packaged(title, spec, {"input_shape": (16,), "input_dtype": "int64", **arguments})


_BERT = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}
_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    **_TOKEN_IDS,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}  # two query heads for each key head
_LATENT = {
    **_DECODER,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_VIT = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "image_size": 32,
    "patch_size": 8,
}
_T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    **_TOKEN_IDS,
}
_BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 2,
    **_TOKEN_IDS,
}
_PATCHES = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "d_model": 32,
    "num_attention_heads": 2,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_targets": 4,
    "use_cls_token": True,
}
_WHISPER = {
    "vocab_size": 100,
    "num_mel_bins": 20,
    "max_source_positions": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_labels": 4,
    "classifier_proj_size": 32,
    **_TOKEN_IDS,
}
_SPECTROGRAM = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_length": 32,
    "num_mel_bins": 16,
    "patch_size": 8,
    "frequency_stride": 8,
    "time_stride": 8,
    "num_labels": 4,
}
_CHARACTERS = {
    **_BERT,
    "num_hash_functions": 4,
    "num_hash_buckets": 64,
    "local_transformer_stride": 16,
    "max_position_embeddings": 64,
}
_HUBERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "num_labels": 4,
    "classifier_proj_size": 32,
}
_HEADS = {"heads": 4, "dim_head": 16, "mlp_dim": 128}

_TRANSFORMERS = (
    _text("BERT", "BertConfig", "BertForSequenceClassification", **_BERT),
    _text("RoBERTa", "RobertaConfig", "RobertaForSequenceClassification", **_BERT),
    _text("XLM-RoBERTa", "XLMRobertaConfig", "XLMRobertaForSequenceClassification", **_BERT),
    _text("ELECTRA", "ElectraConfig", "ElectraForSequenceClassification", **_BERT),
    _text(
        "DistilBERT",
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        dim=128,
        n_heads=2,
        hidden_dim=256,
        n_layers=2,
    ),
    _text("GPT-2", "GPT2Config", "GPT2LMHeadModel", n_embd=64, n_head=2, n_layer=2, **_TOKEN_IDS),
    _text("Llama", "LlamaConfig", "LlamaForCausalLM", **_GROUPED),
    _text("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", **_GROUPED),
    _text("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", **_GROUPED, head_dim=16),
    _text("Mistral", "MistralConfig", "MistralForCausalLM", **_GROUPED),
    _text(
        "Mistral with a window",
        "MistralConfig",
        "MistralForCausalLM",
        **_GROUPED,
        sliding_window=12,
    ),
    _text("Phi", "PhiConfig", "PhiForCausalLM", **_DECODER),
    _text("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", **_DECODER),
    _text(
        "GPT-J",
        "GPTJConfig",
        "GPTJForCausalLM",
        n_embd=64,
        n_layer=2,
        n_head=4,
        rotary_dim=8,
        **_TOKEN_IDS,
    ),
    _text("BLOOM", "BloomConfig", "BloomForCausalLM", hidden_size=64, n_layer=2, n_head=4),
    _text(
        "Falcon",
        "FalconConfig",
        "FalconForCausalLM",
        **_TOKEN_IDS,
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
    ),
    _text(
        "MPT",
        "MptConfig",
        "MptForCausalLM",
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
    ),
    _text("Gemma", "GemmaConfig", "GemmaForCausalLM", **_GROUPED, head_dim=16),
    _text("Gemma 2", "Gemma2Config", "Gemma2ForCausalLM", **_GROUPED, head_dim=16),
    _text("OLMo 2", "Olmo2Config", "Olmo2ForCausalLM", **_GROUPED),
    _text("StableLM", "StableLmConfig", "StableLmForCausalLM", **_GROUPED),
    _text("DeepSeek V3", "DeepseekV3Config", "DeepseekV3ForCausalLM", **_LATENT),
    _text(
        "ModernBERT",
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        **_BERT,
        **_TOKEN_IDS,
        cls_token_id=1,
        sep_token_id=2,
    ),
    _text("DeBERTa-v2", "DebertaV2Config", "DebertaV2ForSequenceClassification", **_BERT),
    _text(
        "ALBERT",
        "AlbertConfig",
        "AlbertForSequenceClassification",
        **_BERT,
        embedding_size=64,
    ),
    _text(
        "MobileBERT",
        "MobileBertConfig",
        "MobileBertForSequenceClassification",
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=64,
        intra_bottleneck_size=32,
        embedding_size=32,
        num_hidden_layers=2,
    ),
    _text(
        "Funnel",
        "FunnelConfig",
        "FunnelForSequenceClassification",
        d_model=64,
        n_head=4,
        d_head=16,
        d_inner=96,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        hidden_dropout=0.0,  # that of a table of positions, which all samples share
    ),
    _text("T5 with token labels", "T5Config", "T5ForTokenClassification", **_T5),
    _text("BART", "BartConfig", "BartForConditionalGeneration", **_BART),
    _text(
        "OPT",
        "OPTConfig",
        "OPTForCausalLM",
        **_TOKEN_IDS,
        hidden_size=64,
        num_attention_heads=4,
        ffn_dim=96,
        num_hidden_layers=2,
        word_embed_proj_dim=64,
    ),
    _text(
        "Mamba of transformers",
        "MambaConfig",
        "MambaForCausalLM",
        **_TOKEN_IDS,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
    ),
    _photo("DeiT", "DeiTConfig", "DeiTForImageClassification", **_VIT),
    _photo("ViT", "ViTConfig", "ViTForImageClassification", **_VIT),
    _photo(
        "SegFormer",
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        image_size=32,
    ),
    _photo(
        "Swin V2",
        "Swinv2Config",
        "Swinv2ForImageClassification",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
    _photo(
        "ConvNeXt V2",
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        image_size=32,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 1],
    ),
    _photo(
        "PVT",
        "PvtConfig",
        "PvtForImageClassification",
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        image_size=32,
    ),
    Packaged(
        "PatchTST",
        "transformers:FOLDER",
        {"input_shape": (32, 3)},
        ("PatchTSTConfig", "PatchTSTForClassification", _PATCHES),
    ),
    Packaged(
        "Whisper's encoder",
        "transformers:FOLDER",
        {"input_shape": (20, 32)},
        ("WhisperConfig", "WhisperForAudioClassification", _WHISPER),
    ),
    Packaged(
        "Spectrogram transformer",
        "transformers:FOLDER",
        {"input_shape": (32, 16)},
        ("ASTConfig", "ASTForAudioClassification", _SPECTROGRAM),
    ),
    Packaged(
        "CANINE",
        "transformers:FOLDER",
        {"input_shape": (64,)},  # characters
        ("CanineConfig", "CanineForSequenceClassification", _CHARACTERS),
    ),
    Packaged(
        "HuBERT",
        "transformers:FOLDER",
        {"input_shape": (800,)},
        ("HubertConfig", "HubertForSequenceClassification", _HUBERT),
    ),
)

_TIMM = (
    _picture("ViT-tiny", "timm:vit_tiny_patch16_224", img_size=64),
    _picture("ConvNeXt-atto", "timm:convnext_atto"),
    _picture("MobileNetV3-small", "timm:mobilenetv3_small_050"),
    _picture("RegNet", "timm:regnetx_002"),
    _picture("XCiT", "timm:xcit_nano_12_p16_224", img_size=64, depth=2),
    _picture("MambaOut", "timm:mambaout_femto", depths=(1, 1, 1, 1)),
    _picture("Sequencer", "timm:sequencer2d_s", img_size=64, layers=(1, 1, 1, 1)),
)

_TORCHVISION = (
    _picture(
        "Vision Transformer",
        "torchvision.models:VisionTransformer",
        side=32,
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
    ),
    _picture(
        "Swin",
        "torchvision.models:SwinTransformer",
        side=32,
        patch_size=(4, 4),
        embed_dim=32,
        depths=(2, 2),
        num_heads=(2, 4),
        window_size=(4, 4),
    ),
    _picture("ResNet-18", "torchvision.models:resnet18"),
    _picture("ShuffleNetV2", "torchvision.models:shufflenet_v2_x0_5"),
    _picture("SqueezeNet", "torchvision.models:squeezenet1_1"),
    _picture(
        "DenseNet",
        "torchvision.models:DenseNet",
        block_config=(2, 2),
        growth_rate=16,
        num_init_features=32,
        bn_size=2,
    ),
)

_VIT_PYTORCH = (
    _patches("Simple ViT", "vit_pytorch:SimpleViT", **_HEADS),
    _patches("ViT with a class token", "vit_pytorch:ViT", **_HEADS),
    _rows(
        "ViT of volumes",
        "vit_pytorch.vit_3d:ViT",
        (1, 8, 16, 16),
        channels=1,
        image_size=16,
        image_patch_size=8,
        frames=8,
        frame_patch_size=4,
        num_classes=4,
        dim=64,
        depth=2,
        **_HEADS,
    ),
)

_SEGMENTATION = (
    _rows(
        "U-Net on ResNet-18",
        "segmentation_models_pytorch:Unet",
        (3, 64, 64),
        encoder_name="resnet18",
        encoder_weights=None,
        classes=3,
    ),
)

_MONAI = (
    _rows(
        "U-Net",
        "monai.networks.nets:UNet",
        (1, 32, 32),
        spatial_dims=2,
        in_channels=1,
        out_channels=3,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
    ),
    _rows(
        "Basic U-Net",
        "monai.networks.nets:BasicUNet",
        (1, 32, 32),
        spatial_dims=2,
        in_channels=1,
        out_channels=3,
        features=(8, 8, 16, 32, 64, 8),
    ),
    _rows(
        "SegResNet",
        "monai.networks.nets:SegResNet",
        (1, 32, 32),
        spatial_dims=2,
        in_channels=1,
        out_channels=3,
        init_filters=32,
        blocks_down=(1, 1),
        blocks_up=(1,),
    ),
    _rows(
        "Autoencoder",
        "monai.networks.nets:AutoEncoder",
        (1, 32, 32),
        spatial_dims=2,
        in_channels=1,
        out_channels=3,
        channels=(8, 16),
        strides=(2, 2),
    ),
    _rows(
        "Fully connected",
        "monai.networks.nets:FullyConnectedNet",
        (12,),
        in_channels=12,
        out_channels=3,
        hidden_channels=(32, 64, 32),
    ),
)

_TABLES = (
    _rows(
        "MLP for tables",
        "rtdl_revisiting_models:MLP",
        (12,),
        d_in=12,
        d_out=3,
        n_blocks=3,
        d_block=64,
        dropout=0.1,
    ),
    _rows(
        "ResNet for tables",
        "rtdl_revisiting_models:ResNet",
        (12,),
        d_in=12,
        d_out=3,
        n_blocks=2,
        d_block=48,
        d_hidden=96,
        d_hidden_multiplier=None,
        dropout1=0.1,
        dropout2=0.0,
    ),
    _rows(
        "FT-Transformer's backbone",
        "rtdl_revisiting_models:FTTransformerBackbone",
        (6, 32),
        d_out=3,
        n_blocks=2,
        d_block=32,
        attention_n_heads=4,
        attention_dropout=0.0,
        ffn_d_hidden=48,
        ffn_d_hidden_multiplier=None,
        ffn_dropout=0.0,
        residual_dropout=0.0,
    ),
)

_OTHERS = (
    _rows(
        "Mamba",
        "mambapy.mamba:Mamba",
        (8, 32),
        **{"config.d_model": 32, "config.n_layers": 2},
    ),
    Packaged(
        "gMLP",
        "g_mlp_pytorch:gMLPVision",
        {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 64, "depth": 2},
    ),
    _patches("MLP-Mixer", "mlp_mixer_pytorch:MLPMixer", channels=3),
    _rows(
        "Encoder of x-transformers",
        "x_transformers:Encoder",
        (8, 32),
        dim=32,
        depth=2,
        heads=4,
        attn_dim_head=16,
    ),
    _tokens(
        "Linformer",
        "linformer:LinformerLM",
        num_tokens=200,
        dim=64,
        seq_len=16,
        depth=2,
        k=8,
        heads=4,
    ),
    _rows(
        "Perceiver",
        "perceiver_pytorch:Perceiver",
        (32, 32, 3),
        num_freq_bands=4,
        depth=2,
        max_freq=8,
        num_latents=16,
        latent_dim=32,
        latent_heads=4,
        cross_dim_head=16,
        latent_dim_head=16,
        num_classes=10,
    ),
    _rows("Conformer", "conformer:Conformer", (16, 32), dim=32, depth=2, heads=4, dim_head=16),
    _rows(
        "Temporal convolutions",
        "pytorch_tcn:TCN",
        (6, 24),
        num_inputs=6,
        num_channels=(16, 16, 32),
        dropout=0.0,
    ),
    _rows(
        "SIREN",
        "siren_pytorch:SirenNet",
        (2,),
        dim_in=2,
        dim_hidden=64,
        dim_out=3,
        num_layers=3,
    ),
)

GALLERY = (
    *_TRANSFORMERS,
    *_TIMM,
    *_TORCHVISION,
    *_VIT_PYTORCH,
    *_SEGMENTATION,
    *_MONAI,
    *_TABLES,
    *_OTHERS,
)
"""Every model of the gallery."""
