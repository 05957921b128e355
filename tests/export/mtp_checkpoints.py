"""Tiny random checkpoints with a head for multi-token prediction, in every published layout."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.family_checkpoints import write_family_checkpoint

FILE = "model.safetensors"
_DEEPSEEK = {"norm": "shared_head.norm"}
_QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
_MIMO = {"norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
LAYOUTS = {  # by family: beginning of the names, of those of the layer, a layer like it, names
    "qwen3_5": ("mtp.", "mtp.layers.0.", 1, _QWEN),
    "qwen3_5-wrapper": ("mtp.", "mtp.layers.0.", 1, _QWEN),
    "qwen3_next": ("mtp.", "mtp.layers.0.", 1, _QWEN),
    "deepseek_v3": ("model.layers.2.", "model.layers.2.", 1, _DEEPSEEK),
    "glm4_moe_lite": ("model.layers.2.", "model.layers.2.", 1, _DEEPSEEK),
    "mimo_v2_flash": ("model.mtp.layers.0.", "model.mtp.layers.0.", 0, _MIMO),
}


def head_tensors(family, stored):
    """Return the tensors of a head by its own names, with the numbers of others in other order."""
    rng = torch.Generator().manual_seed(7)

    def shuffled(tensor):
        order = torch.randperm(tensor.numel(), generator=rng)
        return tensor.flatten()[order].reshape(tensor.shape)

    like = f".layers.{LAYOUTS[family][2]}."
    layer = {
        name.split(like)[1]: shuffled(value)
        for name, value in stored.items()
        if like in name and not name.startswith(("mtp.", "model.visual."))
    }
    [norm] = (
        value
        for name, value in stored.items()
        if name.endswith(("model.norm.weight", "language_model.norm.weight"))
    )
    size = len(norm)
    projection = torch.randn(size, 2 * size, generator=rng) * 0.12
    own = {"eh_proj.weight": projection.to(norm.dtype)}
    own |= {f"{name}.weight": shuffled(norm) for name in ("enorm", "hnorm", "norm")}
    return own, layer


def with_head(family, folder: Path, num_files=1, *, is_tied=False):
    """Write the checkpoint of a family with a head; return its folder."""
    write_family_checkpoint(family, folder)
    stored = load_file(folder / FILE)
    start, layer_start, _, names = LAYOUTS[family]
    own, layer = head_tensors(family, stored)
    for prefix, tensors in ((start, own), (layer_start, layer)):
        for name, value in tensors.items():
            part, _, rest = name.rpartition(".")
            stored[f"{prefix}{names.get(part, part)}.{rest}"] = value
    if start.startswith("model.layers."):  # copies, as such checkpoints have them
        stored[f"{start}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored[f"{start}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    if is_tied:
        del stored["lm_head.weight"]
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": True}))
    write_files(folder, stored, num_files)
    return folder


def write_files(folder: Path, stored, num_files=1):
    """Write tensors to one file, or to several with an index."""
    (folder / FILE).unlink(missing_ok=True)
    if num_files == 1:
        save_file(stored, folder / FILE, metadata={"format": "pt"})
        return
    names = sorted(stored)
    places = {name: f"model-{names.index(name) % num_files}.safetensors" for name in names}
    for file in set(places.values()):
        part = {name: stored[name] for name in names if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
