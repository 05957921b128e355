"""Checkpoints that cannot come out right are refused with the reason."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BartConfig, BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

from dsbd_export.checkpoints.families import FAMILIES
from dsbd_export.checkpoints.model_config import refusal_of
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.checkpoints.other_tasks import refusal_of_task
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_export.texts import readable_files
from scripts.family_checkpoints import tiny_tokenizer
from tests.export.conftest import SIZES, edit_json
from tests.export.gguf_vocabularies import byte_level, write_vocabulary

REFUSED = [  # (config class, its arguments, words of the reason)
    ("Speech2TextConfig", {}, "reads neither text nor"),
    ("LEDConfig", {}, "within windows"),
    ("LongT5Config", {}, "within windows"),
    ("BigBirdPegasusConfig", {}, "within windows"),
    ("NllbMoeConfig", {}, "route by rules of their own"),
    ("SwitchTransformersConfig", {}, "route by rules of their own"),
    ("PaliGemmaConfig", {}, "builds a mask of its own"),
    ("Qwen2_5OmniConfig", {}, "writes sound too"),
    ("Qwen3OmniMoeConfig", {}, "writes sound too"),
    ("MambaConfig", {}, "recurrent state"),
    ("RwkvConfig", {}, "recurrent state"),
    ("RecurrentGemmaConfig", {}, "recurrent state"),
    ("JambaConfig", {}, "recurrent state"),
    ("DeepseekV4Config", {}, "not known; conv, full_attention, hybrid, linear_attention, mlp, moe"),
    ("Llama4TextConfig", {}, "scaled by the length of a cache"),
    ("Llama4Config", {}, "scaled by the length of a cache"),
    ("BloomConfig", {}, "ALiBi"),
    ("MptConfig", {}, "ALiBi"),
    ("FalconConfig", {"alibi": True}, "ALiBi"),
    ("GPTNeoConfig", {}, "counts cache rows"),
    ("DogeConfig", {}, "rows of largest weight"),
    ("LongcatFlashConfig", {}, "return a row unchanged"),
    ("ModernBertConfig", {}, "no model class that continues text for ModernBertConfig"),
]


@pytest.mark.parametrize(("name", "arguments", "words"), REFUSED)
def test_refused_configs(name, arguments, words):
    assert words in str(refusal_of(getattr(transformers, name)(**arguments)))


def test_every_refusal_of_the_table_is_tried():
    tried = {getattr(transformers, name)().model_type for name, arguments, _ in REFUSED}
    assert {name for name, family in FAMILIES.items() if family.refusal is not None} <= tried


def test_a_config_without_the_sizes_of_a_decoder():
    config = PreTrainedConfig(vocab_size=8, hidden_size=8)
    assert refusal_of(config) == "its config has no num_layers under any known name"


@pytest.fixture
def folder(small_llama_folder, tmp_path):
    return Path(shutil.copytree(small_llama_folder, tmp_path / "checkpoint"))


def opened(target: Path, draft: Path | None = None) -> None:
    open_pair(ExportConfig(target=str(target), draft=draft and str(draft), output=Path("out")))


def add_adapter(folder, config='{"peft_type": "LORA", "base_model_name_or_path": "someone/base"}'):
    if config:
        (folder / "adapter_config.json").write_text(config)
    save_file({"a.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")


def quantized(ending, file=None, content="", own_name="model.safetensors"):
    """Return a change: one weight gets the name that quantized ones have, a config is added."""

    def change(folder):
        weights = load_file(folder / "model.safetensors")
        name = "model.layers.0.mlp.up_proj"
        weights[f"{name}{ending}"] = weights.pop(f"{name}.weight")
        (folder / "model.safetensors").unlink()
        save_file(weights, folder / own_name, metadata={"format": "pt"})
        if file:
            (folder / file).write_text(content)

    return change


GPTQ = (".qweight", "quantize_config.json", '{"bits": 4, "group_size": 128}')
GPTQ_FILE = "gptq_model-4bit-128g.safetensors"
AWQ = (".qweight", "quant_config.json", '{"w_bit": 4, "q_group_size": 128}')
QUANTIZED = [  # (change, words)
    (quantized(*GPTQ), r"GPTQ, 4 bits: quantize_config\.json"),
    (quantized(*GPTQ, GPTQ_FILE), r"GPTQ, 4 bits: quantize_config\.json"),
    (quantized(".qweight", own_name=GPTQ_FILE), r"GPTQ: gptq_model-4bit-128g\.safetensors"),
    (quantized(*AWQ), r"AWQ, 4 bits: quant_config\.json"),
    (quantized(".qweight"), r"GPTQ or AWQ: model.layers.0.mlp.up_proj.qweight"),
    (quantized(".weight.absmax"), r"bitsandbytes: .*absmax"),
    (quantized(".weight_scale"), r"FP8 or 8 bits: .*weight_scale"),
]
WITHOUT_CONFIG = partial(add_adapter, config=None)
OTHER_WEIGHTS = [
    (add_adapter, r"next to its own weights \(adapter_config\.json, LORA\); .* folder and give .*"),
    (WITHOUT_CONFIG, r"next to its own weights \(adapter_model\.safetensors\); .*"),
    *((change, rf"already quantized \({words}\)") for change, words in QUANTIZED),
]


@pytest.mark.parametrize(("change", "words"), OTHER_WEIGHTS)
def test_what_the_weights_are_is_said(folder, small_llama_folder, change, words):
    change(folder)
    with pytest.raises(ExportError, match=f"the target at .*{words}"):
        opened(folder)
    with pytest.raises(ExportError, match=f"the draft at .*{words}"):
        opened(small_llama_folder, folder)


def test_an_adapter_alone_says_the_command_that_merges_it(folder, small_llama_folder):
    add_adapter(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    words = r"is an adapter alone \(adapter_config\.json, LORA\); .*: dsbd-export"
    command = f"--target someone/base --adapter {folder}"
    with pytest.raises(ExportError, match=f"the target at .* {words} {command}"):
        opened(folder)
    command = f"--draft someone/base --draft-adapter {folder}"
    with pytest.raises(ExportError, match=f"the draft at .* {words} {command}"):
        opened(small_llama_folder, folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ExportError, match="--target BASE_MODEL --adapter"):
        opened(folder)


def test_a_config_with_restored_weights_is_no_reason(folder):
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    opened(folder)


OWN_CODE = (
    *("Qwen2ForRewardModel", "LlamaForRewardModelWithGating", "Qwen2ForProcessRewardModel"),
    *("LlamaForScore", "LlamaEncoderModel", "NVEmbedModel", "JinaForRanking", "MiniCPMReranker"),
)
OTHERS = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MASKED_LM")
WRITERS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM")


def class_names(tasks: tuple[str, ...]) -> set[str]:
    """Return all classes of transformers for some tasks."""
    found = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values() for task in tasks]
    several = [[each] if isinstance(each, str) else each for names in found for each in names]
    return {name for names in several for name in names}


def test_every_class_of_another_task_is_refused_by_its_name(tmp_path):
    def refusal(name: str) -> str | None:
        return refusal_of_task(SimpleNamespace(architectures=[name]), tmp_path)

    writers = class_names(WRITERS)
    others = {*(class_names(OTHERS) - writers), *OWN_CODE} - {"FlaubertWithLMHeadModel"}
    assert {name for name in writers if refusal(name)} == set()
    assert all(f"config.json names {name}, " in str(refusal(name)) for name in others)


SMALL = {**SIZES, "num_hidden_layers": 1}
BART = {
    **{"vocab_size": SIZES["vocab_size"], "d_model": 16, "max_position_embeddings": 64},
    **{f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "ffn_dim")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
}
TIED = LlamaConfig(**SMALL, tie_word_embeddings=True)
GPT2 = GPT2Config(vocab_size=SIZES["vocab_size"], n_embd=16, n_layer=1, n_head=2, pad_token_id=0)
DENSE, QA = "classification_head.dense.bias", "a model that marks the answer in a text"
HEADS = [  # (class, config, kind, the name of a weight of its head)
    ("LlamaForSequenceClassification", LlamaConfig(**SMALL), "a classifier", "score.weight"),
    ("LlamaForTokenClassification", LlamaConfig(**SMALL), "a token classifier", "score.bias"),
    ("LlamaForQuestionAnswering", TIED, QA, "qa_outputs.bias"),
    ("GPT2ForSequenceClassification", GPT2, "a classifier", "score.weight"),
    ("BartForSequenceClassification", BartConfig(**BART), "a classifier", DENSE),
    ("BartForQuestionAnswering", BartConfig(**BART), QA, "qa_outputs.bias"),
]


def written(folder: Path, name: str, config: PreTrainedConfig) -> Path:
    getattr(transformers, name)(config).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("name", "config", "kind", "weight"), HEADS)
def test_a_model_of_another_task_is_refused_by_its_class_or_its_head(
    tmp_path, name, config, kind, weight
):
    folder = written(tmp_path, name, config)
    words = f"config.json names {name}, {kind}: it writes no text"
    with pytest.raises(ExportError, match=words):
        opened(folder)
    edit_json(folder / "config.json", architectures=None)
    checkpoint, _ = open_pair(ExportConfig(target=str(folder), output=Path("out")))
    with pytest.raises(ExportError, match=f"has {weight}, the head of a classifier"):
        load_model(checkpoint)


def test_a_decoder_without_a_head_is_refused_with_the_way_to_export_it(tmp_path):
    folder = written(tmp_path, "LlamaModel", TIED)
    with pytest.raises(ExportError, match="names LlamaModel, and the weights have no head for tex"):
        opened(folder)
    edit_json(folder / "config.json", architectures=["LlamaForCausalLM"])
    opened(folder)


def test_an_encoder_is_refused_with_or_without_its_class():
    for config in (BertConfig(), BertConfig(architectures=["BertLMHeadModel"])):
        assert "BertConfig with is_decoder false" in str(refusal_of_task(config, Path("none")))
    assert refusal_of_task(BertConfig(is_decoder=True), Path("none")) is None


def test_a_folder_of_sentence_transformers_is_refused(folder):
    modules = [
        {"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling")
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ExportError, match=r"an embedding model of sentence-transformers"):
        opened(folder)


GGUF_TASKS = [
    ({"llama.pooling_type": 3}, r"it is an embedding model \(pooling_type last\)"),
    ({"llama.pooling_type": 4}, r"it is a classifier \(pooling_type rank\)"),
    ({"llama.attention.causal": False}, r"it is an encoder \(attention.causal is false\)"),
    ({"llama.pooling_type": 0, "llama.attention.causal": True}, ""),
]


@pytest.mark.parametrize(("fields", "words"), GGUF_TASKS)
def test_a_file_of_gguf_of_another_task_is_refused(tmp_path, fields, words):
    vocabulary = byte_level(pre="qwen2")
    vocabulary.fields.update(fields)
    file = write_vocabulary(tmp_path / "m.gguf", vocabulary)
    (tmp_path / "modules.json").write_text('"Pooling"')  # of another model
    if not words:
        opened(file)
        return
    with pytest.raises(ExportError, match=words):
        opened(file)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
READ = [  # files that a checkpoint has otherwise, and pointers in the place of others
    *([name] for name in ("config.json", "tokenizer.json", "generation_config.json")),
    *([name] for name in ("model.safetensors", "chat_template.jinja", "tokenizer_config.json")),
    ["pytorch_model.bin", "-model.safetensors"],
    ["model.safetensors.index.json", "-model.safetensors"],
    ["tokenizer.model", "-tokenizer.json"],
    ["model.bin", "-model.safetensors", "-config.json"],
]
UNREAD = ["pytorch_model.bin", "consolidated.safetensors", "tokenizer.model", "m.gguf", "README.md"]


@pytest.mark.parametrize("names", READ, ids=str)
def test_a_pointer_of_git_lfs_is_named(folder, small_llama_folder, names):
    pointer, *missing = names
    for name in missing:
        (folder / name.removeprefix("-")).unlink()
    (folder / pointer).write_text(POINTER)
    words = f"{folder / pointer} is a pointer of git LFS.* run 'git lfs pull' in {folder}"
    with pytest.raises(ExportError, match=f"the target at .* cannot be read: {words}"):
        opened(folder)
    with pytest.raises(ExportError, match=f"the draft at .*{words}"):
        opened(small_llama_folder, folder)


def test_a_pointer_that_is_not_read_is_no_reason(folder):
    for name in UNREAD:
        (folder / name).write_text(POINTER)
    opened(folder)


def test_a_pointer_in_the_place_of_a_file_of_gguf_an_adapter_or_texts(folder, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_text(POINTER)
    with pytest.raises(ExportError, match=r"m\.gguf is not a GGUF file: .*m\.gguf is a pointer of"):
        opened(file)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_text(POINTER)
    config = ExportConfig(target=str(folder), adapter=str(adapter), output=tmp_path / "out")
    with pytest.raises(ExportError, match=r"adapter_model\.safetensors is a pointer of git LFS"):
        open_pair(config)
    (tmp_path / "texts.txt").write_text(POINTER)
    with pytest.raises(ExportError, match=r"draft_texts: .*texts\.txt is a pointer of git LFS"):
        readable_files("draft_texts", [str(tmp_path / "texts.txt")])
