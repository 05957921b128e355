"""Twins: the trained logits, the wanted shape, and weights that look real."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_ort import Pipeline
from scripts.twin.pair import checked, compare, make_twin, streamed_logits, write_twin
from scripts.twin.weights import (
    added_token_constant,
    norm_eps,
    num_params_of,
    params_from_text,
    twin_config,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_twin"
OLD = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
OPTIONS = {"context": None, "seed": 0, "report": silent}
SHAPES = {  # what a twin changes
    "hidden size alone": {"hidden_size": 40},
    "layers alone": {"num_hidden_layers": 5},
    "MLP alone": {"intermediate_size": 32},
    "heads alone": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "width of heads alone": {"head_dim": 32},
    "everything": {
        **{"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 56},
        **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32},
    },
}


def trained(folder, is_tied=True, dtype=torch.float16):
    torch.manual_seed(0)
    config = LlamaConfig(**OLD, tie_word_embeddings=is_tied, rms_norm_eps=1e-3)
    with quiet_libraries(), torch.no_grad():
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            is_norm = parameter.ndim == 1
            parameter.add_(torch.randn_like(parameter) * (0.2 if is_norm else 0.4))
        model.to(dtype).save_pretrained(folder)
    return folder


def widened(source, folder, changes, shard_bytes=10**9):
    old = LlamaConfig.from_pretrained(source)
    eps = norm_eps(old, changes.get("hidden_size", old.hidden_size), "vocab_size" in changes)
    config = LlamaConfig(**{**old.to_dict(), **changes, "rms_norm_eps": eps, "dtype": "float32"})
    with quiet_libraries():
        write_twin(source, config, folder, 0, silent, shard_bytes)
    return folder


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_are_the_trained_ones_whatever_is_widened(tmp_path, changes, is_tied):
    source = trained(tmp_path / "source", is_tied)
    twin = widened(source, tmp_path / "twin", changes)
    assert compare(source, twin, seed=0).difference < 1e-4


MORE_TOKENS = {**SHAPES["everything"], "vocab_size": 5000}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_added_tokens_have_no_probability_and_leave_the_others_theirs(tmp_path, is_tied, dtype):
    source = trained(tmp_path / "source", is_tied, dtype)
    twin = widened(source, tmp_path / "twin", MORE_TOKENS)
    found = compare(source, twin, seed=0)  # of log-probabilities over all tokens
    assert found.difference < 3e-5 and found.added_log_prob < -190
    distribution = streamed_logits(twin, torch.arange(64)[None]).softmax(-1)  # (1, 64, 5000)
    assert (distribution[..., 64:] == 0).all()
    with quiet_libraries():
        weights = LlamaForCausalLM.from_pretrained(twin).state_dict()
    for layer in range(3):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            assert weights[f"model.layers.{layer}.{norm}.weight"][OLD["hidden_size"]] == 0


def test_the_constant_is_a_power_of_two_below_the_root_of_half_the_eps():
    sizes = {"a": (1e-3, 16), "b": (1e-5, 160), "c": (1e-6, 2048)}  # eps, hidden size
    expected = {"a": 2**-4, "b": 2**-6, "c": 2**-5}
    for name, (eps, hidden_size) in sizes.items():
        config = LlamaConfig(**{**OLD, "hidden_size": hidden_size}, rms_norm_eps=eps)
        assert added_token_constant(config) == expected[name]
        assert norm_eps(config, 4096, True) * 4096 + expected[name] ** 2 == pytest.approx(
            eps * hidden_size, rel=1e-12
        )


@pytest.mark.parametrize(("weight", "difference"), [(0.0, 0.5), (-1.0, 0.1)])
def test_added_tokens_that_are_heard_are_refused(tmp_path, weight, difference):
    """With rows of zeros, or a weight that is too small, they have a part of the probability."""
    source = trained(tmp_path / "source", is_tied=False)
    twin = widened(source, tmp_path / "twin", MORE_TOKENS)
    with quiet_libraries(), torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(twin, dtype=torch.float32)
        model.lm_head.weight[64:] = 0
        model.lm_head.weight[64:, OLD["hidden_size"]] = weight
        model.save_pretrained(twin)
    found = compare(source, twin, seed=0)
    assert found.difference > difference
    with pytest.raises(click.ClickException, match="an added token of the draft has log-prob"):
        checked("draft", found, tolerance=100)


def test_a_wrong_eps_is_noticed(tmp_path):
    source = trained(tmp_path / "source")
    twin = widened(source, tmp_path / "twin", MORE_TOKENS)
    config = LlamaConfig.from_pretrained(twin)
    config.rms_norm_eps = LlamaConfig.from_pretrained(source).rms_norm_eps / 3
    config.save_pretrained(twin)
    assert compare(source, twin, seed=0).difference > 1e-3


def test_a_larger_vocabulary_is_for_both_models(tmp_path):
    with pytest.raises(click.UsageError, match="for both models; give --draft-params"):
        make_twin(demo_pair(), tmp_path / "twin", 8_000_000, **OPTIONS, vocab_size=5000)
    config = LlamaConfig.from_pretrained(demo_pair()[0])
    words = "a vocabulary of 4,096 was wanted, the trained model has"
    with pytest.raises(click.UsageError, match=words):
        twin_config(config, 10**9, vocab_size=4096)


def test_a_draft_of_a_tenth_of_a_billion_has_room_next_to_qwens_vocabulary():
    target, draft = (LlamaConfig.from_pretrained(folder) for folder in demo_pair())
    for source, size, hidden_size in ((target, 10**9, 2048), (draft, 10**8, 512)):
        config = twin_config(source, size, vocab_size=151_936)
        assert config.vocab_size == 151_936
        assert hidden_size <= config.hidden_size < 1.1 * hidden_size
        assert num_params_of(config) == pytest.approx(size, rel=0.05)


def test_a_twin_in_shards_loads_in_transformers_with_the_logits_that_were_checked(tmp_path):
    source = trained(tmp_path / "source")
    twin = widened(source, tmp_path / "twin", SHAPES["everything"], shard_bytes=30_000)
    assert len(list(twin.glob("*.safetensors"))) > 2
    token_ids = torch.arange(12)[None]
    with quiet_libraries(), torch.no_grad():
        loaded = LlamaForCausalLM.from_pretrained(twin)(token_ids).logits
        expected = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)(token_ids).logits
    torch.testing.assert_close(loaded, streamed_logits(twin, token_ids), rtol=0, atol=1e-4)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=1e-4)


HEARD = ["model.layers.0.self_attn.o_proj", "model.layers.2.mlp.down_proj", "model.norm"]


@pytest.mark.parametrize("part", HEARD)
def test_the_check_notices_a_weight_that_is_heard(tmp_path, part):
    source = trained(tmp_path / "source")
    twin = widened(source, tmp_path / "twin", SHAPES["everything"])
    with quiet_libraries(), torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(twin, dtype=torch.float32)
        model.get_parameter(f"{part}.weight")[0].add_(0.1)
        model.save_pretrained(twin)
    assert compare(source, twin, seed=0).difference > 1e-3


def test_added_weights_are_random_and_no_larger_than_trained_ones(tmp_path):
    source = trained(tmp_path / "source")
    twin = widened(source, tmp_path / "twin", SHAPES["everything"])
    with quiet_libraries():
        old = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
        new = LlamaForCausalLM.from_pretrained(twin).state_dict()
    for kind in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        for layer in range(3):
            weights = new[f"model.layers.{layer}.{kind}.weight"]
            was = old[f"model.layers.{layer % 2}.{kind}.weight"]
            assert (weights != 0).float().mean() > 0.99
            assert weights.abs().max() <= was.abs().max() * (2 if kind.endswith("q_proj") else 1)
            added = weights[-8:]
            assert added.std() == pytest.approx(float(was.square().mean().sqrt()) / 3**0.5, rel=0.2)
    for kind in ("self_attn.o_proj", "mlp.down_proj"):
        assert not new[f"model.layers.2.{kind}.weight"].any()


def test_seeds_differ_and_repeat(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    source = trained(tmp_path / "source")
    old = LlamaConfig.from_pretrained(source)
    found = []
    config = LlamaConfig(**{**old.to_dict(), "intermediate_size": 32})
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        with quiet_libraries():
            write_twin(source, config, folder, seed, silent)
            found.append(LlamaForCausalLM.from_pretrained(folder).state_dict()[name])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


SIZES = [("8M", 320, 7), ("150M", 1024, 12), ("500M", 1280, 24), ("1B", 2048, 16), ("8B", 4096, 32)]


def test_shapes_have_the_wanted_size():
    for text, hidden_size, num_layers in SIZES:
        wanted = params_from_text(text)
        config = twin_config(LlamaConfig.from_pretrained(demo_pair()[0]), wanted)
        assert num_params_of(config) == pytest.approx(wanted, rel=0.03)
        assert (config.hidden_size, config.num_hidden_layers) == (hidden_size, num_layers)
        assert 2 <= config.intermediate_size / config.hidden_size <= 4.5
        assert config.num_attention_heads * config.head_dim == hidden_size


def test_a_size_that_is_no_number_is_refused():
    for text in ("", "lots", "-5M", "0", "5T", "infB"):
        with pytest.raises(click.BadParameter, match="not a number of parameters"):
            params_from_text(text)


def test_three_heads_a_key_give_a_shape_that_transformers_takes():
    changes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
    source = LlamaConfig(**{**OLD, **changes})
    config = twin_config(source, 10**7)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert heads == (12, 4, 32) and config.hidden_size == 384


def test_what_a_twin_cannot_be_made_of_is_refused():
    small, biased = LlamaConfig(**OLD), LlamaConfig(**OLD, attention_bias=True)
    large = LlamaConfig(**{**OLD, "hidden_size": 512})
    with pytest.raises(click.UsageError, match="attention_bias is True"):
        twin_config(biased, 10**7)
    with pytest.raises(click.UsageError, match="hidden_size 320, the trained model has 512"):
        twin_config(large, 10**7)
    with pytest.raises(click.UsageError, match="no room"):
        twin_config(small, 10**5)


def test_a_twin_whose_logits_differ_is_not_left(tmp_path):
    with pytest.raises(click.ClickException, match="off the trained target's"):
        make_twin(demo_pair(), tmp_path / "twin", 8_000_000, **OPTIONS, tolerance=0.0)
    assert not list(tmp_path.iterdir())


def make_twin_by_command(*words):
    loader = SourceFileLoader("make_twin", str(SCRIPT))
    module = module_from_spec(spec_from_loader("make_twin", loader))
    loader.exec_module(module)
    return CliRunner().invoke(module.main, [*map(str, words)])


OF_BOTH = ["--params", "10M", "--vocab", "6000", "--draft-params", "7.2M"]


@pytest.mark.parametrize(
    "wanted", [["--params", "8M"], pytest.param(OF_BOTH, marks=pytest.mark.slow)], ids=" ".join
)
def test_the_command_makes_a_pair_that_generates_what_the_demo_pair_does(
    demo_bundle, tmp_path, wanted
):
    output = tmp_path / "twin"
    done = make_twin_by_command(*wanted, "-o", output, "--context", 4096)
    assert done.exit_code == 0, done.output
    assert "7 layers" in done.stdout
    bundle = tmp_path / "bundle"
    pair = {role: str(output / role) for role in ("target", "draft")}
    # The logits of added tokens are in the hundreds, which round to steps of 3e-5.
    atol = 1e-3 if "--vocab" in wanted else 1e-4
    export_bundle(ExportConfig(output=bundle, atol=atol, **pair), report=silent)
    options = {"num_beams": 2, "max_new_tokens": 16, "seed": 3, "draft_length": 4}
    results = []
    for folder in (demo_bundle, bundle):
        with Pipeline.from_bundle(folder, num_threads=1) as pipeline:
            results.append(
                [pipeline.generate("def f(x):", top_k=top_k, **options) for top_k in (20, 0)]
            )
            contexts = {pipeline.bundle.entry(role).context_length for role in ("target", "draft")}
    assert contexts == {4096}
    for trained_one, twin in zip(*results, strict=True):
        expected, found = trained_one.sequences[0], twin.sequences[0]
        assert found.token_ids == expected.token_ids
        assert found.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-3)
        assert twin.stats.acceptance_histogram == trained_one.stats.acceptance_histogram


USER_ERRORS = [  # (arguments, words of the message)
    (["--params", "lots"], "'lots' is not a number"),
    (["--params", "8M", "-o", "."], ". exists"),
    (["--params", "8M", "--pair", "/no/such"], "/no/such"),
]


@pytest.mark.parametrize(("arguments", "words"), USER_ERRORS)
def test_user_errors_name_what_is_wrong_and_leave_nothing(tmp_path, arguments, words):
    done = make_twin_by_command("-o", tmp_path / "new", *arguments)
    assert done.exit_code == 2 and words in done.stderr
    assert not list(tmp_path.iterdir())
