"""Model families: how each is exported, or why not. Other families are tried; the gate decides."""

from dataclasses import dataclass
from enum import Enum


class AttentionForm(Enum):
    """Form of attention in the graph; the value is its name in tables.

    NODE: one Attention node per layer.
    CAPPED: MatMul, Tanh, Where, Softmax, MatMul; TensorRT's Attention takes no softcap.
    OWN: the model's own arithmetic with an additive mask, without a replaceable function.
    """

    NODE = "Attention node"
    CAPPED = "decomposed"
    OWN = "the model's own"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the table ``FAMILIES``."""

    # form of attention in the graph; meaningless for a refused family
    attention: AttentionForm = AttentionForm.NODE
    reads_source: bool = False
    # whether layers route to experts; all experts are computed for every row
    has_experts: bool = False
    note: str = ""
    refusal: str | None = None  # why the family cannot be exported; None if it can


_ALIBI = "its attention adds a bias by distance (ALiBi), but the graph has no positions of keys"
_RECURRENT = "it keeps a recurrent state of another kind than the gated delta rule and Mamba2"
_LOCAL_ENCODER = "its encoder attends within windows or by hashes, which is not supported"
_ROUTED = "its layers route by rules of their own, but all experts are computed for every row"
_ZERO_EXPERTS = (
    "some of its experts return a row unchanged, but all experts are computed as products"
)
_OMNI = "it writes sound too, by several models of which a graph has one"
_BY_WEIGHT = (
    "its attention sees the keep_window_size rows of largest weight, chosen among all rows of the "
    "cache, which the forest mask cannot say"
)
_BY_LENGTH = "its queries are scaled by the length of a cache that the graph does not count"
_OWN_MASK = "its wrapper builds a mask of its own, which the forest mask cannot replace"
_BY_ROW = "its local attention counts cache rows (GPTNeoSelfAttention.bias), not positions"

DEFAULT_FAMILY = Family()
FAMILIES: dict[str, Family] = {
    "bamba": Family(note="Mamba2 layers"),
    "bart": Family(reads_source=True, note="BART: learned positions"),
    "bigbird_pegasus": Family(refusal=_LOCAL_ENCODER),
    "bloom": Family(refusal=_ALIBI),
    "codegen": Family(note="rotary angles from a table"),
    "cohere": Family(note="scaled logits"),
    "cohere2": Family(note="window, layers without rotary positions"),
    "cohere2_vision": Family(note="Command A Vision: text part; window, scaled logits"),
    "deepseek_v2": Family(has_experts=True, note="latent attention, shared expert"),
    "deepseek_v3": Family(has_experts=True, note="latent attention, shared expert"),
    "diffllama": Family(note="a difference of two attentions"),
    "doge": Family(refusal=_BY_WEIGHT),
    "exaone4": Family(note="window, normalised queries and keys"),
    "falcon": Family(note="with ALiBi (alibi=true) refused"),
    "falcon_h1": Family(note="Falcon-H1: Mamba2 and attention in each layer"),
    "gemma": Family(note="scaled embeddings"),
    "gemma2": Family(attention=AttentionForm.CAPPED, note="softcap, alternating window"),
    "gemma3": Family(note="Gemma 3 4b to 27b: text part; window"),
    "gemma3_text": Family(note="window and rotary base by layer"),
    "gemma3n_text": Family(note="Gemma 3n: window; layers share rows, embeddings by layer"),
    "gemma4": Family(note="Gemma 4: text part; window, layers share rows"),
    "gemma4_text": Family(note="window; head width by layer, layers share rows"),
    "gemma4_unified": Family(note="Gemma 4 12B: text part; window, head width by layer"),
    "glm4": Family(note="partial rotary positions"),
    "glm46v": Family(note="GLM-4.6V: text part"),
    "glm4_moe_lite": Family(has_experts=True, note="latent attention, shared expert"),
    "glmasr": Family(note="GLM-ASR: sound in its prompts"),
    "gpt2": Family(note="learned positions"),
    "gpt_bigcode": Family(note="learned positions, one key head"),
    "gpt_neo": Family(refusal=_BY_ROW),
    "gpt_neox": Family(note="Pythia; partial rotary positions"),
    "gpt_oss": Family(
        attention=AttentionForm.CAPPED, has_experts=True, note="window, attention sinks"
    ),
    "gptj": Family(note="rotary angles from a table"),
    "granite": Family(note="scaled residuals and logits"),
    "granite_docling": Family(note="Granite-Docling 500m: pictures in its prompts"),
    "granite_speech": Family(note="Granite Speech: sound in its prompts"),
    "granite_speech_plus": Family(note="Granite Speech Plus: sound in its prompts"),
    "granite_swa": Family(attention=AttentionForm.CAPPED, note="window, attention sinks"),
    "granitemoe": Family(has_experts=True, note="scaled residuals and logits"),
    "granitemoehybrid": Family(note="Granite 4 hybrid: Mamba2 layers"),
    "idefics3": Family(note="Idefics3, Granite-Docling 258M: pictures in its prompts"),
    "internvl": Family(note="InternVL: text part"),
    "jamba": Family(refusal=_RECURRENT),
    "led": Family(refusal=_LOCAL_ENCODER),
    "lfm2": Family(note="LFM2: convolutions"),
    "lfm2_moe": Family(has_experts=True, note="LFM2-MoE: convolutions"),
    "lfm2_vl": Family(note="LFM2-VL: text part; convolutions"),
    "lfm3": Family(note="LFM3: window, convolutions"),
    "lighton_ocr": Family(note="LightOnOCR: text part"),
    "llama": Family(note="also rope linear, dynamic, llama3, yarn"),
    "llama4_text": Family(refusal=_BY_LENGTH),
    "llava": Family(note="LLaVA: text part"),
    "llava_onevision": Family(note="LLaVA-OneVision: text part"),
    "longcat_flash": Family(refusal=_ZERO_EXPERTS),
    "longt5": Family(refusal=_LOCAL_ENCODER),
    "m2m_100": Family(reads_source=True, note="M2M100 and NLLB: positions count no padding"),
    "mamba": Family(refusal=_RECURRENT),
    "mamba2": Family(note="Mamba2 alone"),
    "marian": Family(reads_source=True, note="OPUS-MT: a bias of the logits"),
    "mbart": Family(reads_source=True, note="mBART: learned positions"),
    "mimo_v2_flash": Family(
        attention=AttentionForm.CAPPED, has_experts=True, note="window, sinks in its layers"
    ),
    "minicpm3": Family(note="latent attention"),
    "mistral": Family(note="window"),
    "mistral3": Family(note="Ministral-3 and Mistral Small 3: text part"),
    "mixtral": Family(has_experts=True, note="window"),
    "mpt": Family(refusal=_ALIBI),
    "mt5": Family(reads_source=True, note="bias by distance"),
    "nemotron": Family(note="partial rotary positions, shifted norms"),
    "nemotron_h": Family(note="Nemotron-H: Mamba2 layers"),
    "nllb-moe": Family(refusal=_ROUTED),
    "olmo2": Family(note="norms after the blocks"),
    "olmo3": Family(note="window, norms after the blocks"),
    "olmo_hybrid": Family(note="OLMo hybrid: gated delta rule"),
    "olmoe": Family(has_experts=True, note="normalised queries and keys"),
    "opt": Family(note="learned positions"),
    "paddleocr_vl": Family(note="PaddleOCR-VL: pictures in its prompts"),
    "paligemma": Family(refusal=_OWN_MASK),
    "pegasus": Family(reads_source=True, note="Pegasus"),
    "phi": Family(note="partial rotary positions"),
    "phi3": Family(note="window; rope longrope by the exported context"),
    "qwen2": Family(note="window on some layers"),
    "qwen2_5_omni": Family(refusal=_OMNI),
    "qwen2_5_vl": Family(note="Qwen2.5-VL: text part"),
    "qwen2_audio": Family(note="Qwen2-Audio: sound in its prompts"),
    "qwen2_moe": Family(has_experts=True, note="shared expert"),
    "qwen3": Family(note="normalised queries and keys"),
    "qwen3_5": Family(note="Qwen3.5: text part; gated delta rule"),
    "qwen3_5_text": Family(note="Qwen3.5: gated delta rule"),
    "qwen3_asr": Family(note="Qwen3-ASR: sound in its prompts"),
    "qwen3_moe": Family(has_experts=True, note="normalised queries and keys"),
    "qwen3_next": Family(has_experts=True, note="Qwen3-Next: gated delta rule"),
    "qwen3_omni_moe": Family(refusal=_OMNI),
    "qwen3_vl": Family(note="Qwen3-VL: pictures in its prompts"),
    "recurrent_gemma": Family(refusal=_RECURRENT),
    "rwkv": Family(refusal=_RECURRENT),
    "smollm3": Family(note="layers without rotary positions"),
    "smolvlm": Family(note="SmolVLM: pictures in its prompts"),
    "stablelm": Family(note="partial rotary positions"),
    "starcoder2": Family(note="window"),
    "switch_transformers": Family(refusal=_ROUTED),
    "t5": Family(reads_source=True, note="T5 and Flan-T5: bias by distance"),
    "umt5": Family(reads_source=True, note="bias by distance in each layer"),
    "vision-encoder-decoder": Family(
        reads_source=True, note="TrOCR, manga-ocr: its source is a picture"
    ),
    "voxtral": Family(note="Voxtral: text part"),
    "whisper": Family(reads_source=True, note="Whisper: its source is sound"),
    "youtu": Family(note="latent attention"),
    "zamba2": Family(note="Zamba2: Mamba2 layers, shared attention"),
}
