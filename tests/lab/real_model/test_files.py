"""GGUF files for llama.cpp, and questions to distil from, for the real model."""

import json

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dsbd_runtime.text.chat_template import ChatTemplate
from lab.real_model.chats import write_chats, write_prompts
from lab.real_model.gguf_files import _paired, draft_file, requantized
from tests.export.gguf_files import close

CONFIG = LlamaConfig(
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)


def write_target(file):
    """A file of the target's kind: what is read of it are fields and a tensor."""
    writer = GGUFWriter(file, "llama")
    writer.add_uint32("llama.block_count", 7)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(96)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 96)
    writer.add_array("tokenizer.ggml.merges", ["t 0"])
    embedding = np.linspace(-1, 1, 64 * 96, dtype=np.float32).reshape(96, 64)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    close(writer)


def test_a_draft_is_the_same_model(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    model.save_pretrained(tmp_path / "draft")
    write_target(tmp_path / "target.gguf")
    draft_file(tmp_path / "target.gguf", tmp_path / "draft", tmp_path / "draft.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="draft.gguf")
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        found, wanted = (each(input_ids=tokens).logits for each in (read, model))
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert read.config.num_hidden_layers == 2
    fields = GGUFReader(tmp_path / "draft.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents() == [f"t{i}" for i in range(96)]


def test_a_requantized_file_has_the_same_numbers(tmp_path):
    write_target(tmp_path / "target.gguf")
    requantized(tmp_path / "target.gguf", tmp_path / "q8.gguf")
    reader = GGUFReader(tmp_path / "q8.gguf")
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"Q8_0", "F32"}
    assert reader.fields["llama.block_count"].contents() == 7


def test_rows_of_a_head_are_paired():
    weight = np.arange(8, dtype=np.float32)[:, None]  # two heads of 4 rows
    found = _paired("model.layers.0.self_attn.q_proj.weight", weight, 2)
    assert found[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert (_paired("model.layers.0.self_attn.v_proj.weight", weight, 2) == weight).all()


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def test_prompts_are_the_beginning_of_a_turn_with_seeds_of_their_own(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    write_prompts(tmp_path / "prompts.jsonl", ChatTemplate.from_folder(tmp_path), 3, seed=5)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["<|user|>"] * 3
    assert [line["seed"] for line in lines] == [5, 6, 7]
    assert {line["strategy"] for line in lines} == {"sample"}


def test_questions_that_ended_are_chats_once_each(tmp_path):
    answers = [
        ("What is gravity?", "eos"),
        ("And then I was cut off in the", "length"),
        (" what is Gravity? ", "eos"),
        ("Hi", "eos"),
        ("Name three rivers of Europe.", "eos"),
    ]
    lines = [
        json.dumps({"sequences": [{"text": text, "finish_reason": reason}]})
        for text, reason in answers
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    assert write_chats(tmp_path / "answers.jsonl", tmp_path / "chats.jsonl") == 2
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    assert [chat[-1]["content"] for chat in chats] == [answers[0][0], answers[4][0]]
    assert all(chat[0]["role"] == "user" for chat in chats)
