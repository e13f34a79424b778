"""Decoders cut into blocks and put together: the teacher's bits, for classes that differ in positions and masks."""

from __future__ import annotations

import pytest
import torch

import zgstore
from zgtrain import causal_lm
from zgtrain.decoder import partition
from zgtrain.independence import live_parameters

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "tied llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=2, tie_word_embeddings=True
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=37, n_positions=32, n_embd=16, n_layer=4, n_head=2, bos_token_id=1, eos_token_id=2
    ),
}
WHOLE = {"layers": [[0, 1], [1, 4]]}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    where = tmp_path_factory.mktemp("model")
    model.save_pretrained(where)
    return str(where)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    where = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(CONFIGS["llama"]()).save_pretrained(where)
    return str(where)


def padded():
    """A row padded on the left, one on the right, a whole one."""
    ids = torch.randint(1, 37, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}


def blocks_of(path, **args):
    return [causal_lm.block(number, path, **args).eval() for number in range(len(args["layers"]))]


@torch.inference_mode()
def logits(model, batch):
    return model(**batch, use_cache=False).logits


def test_untrained_blocks_assemble_to_the_bits_of_the_teacher_padding_included(folder):
    teacher, student = causal_lm.teacher(folder), causal_lm.assemble(blocks_of(folder, **WHOLE), folder, **WHOLE)
    assert torch.equal(logits(teacher, padded()), logits(student, padded()))


def test_embedding_blocks_and_interface_in_a_row_are_the_teacher(folder):
    batch = padded()
    with torch.inference_mode():
        state = causal_lm.embedding(folder)(batch["input_ids"], batch["position_ids"])
        for block in blocks_of(folder, **WHOLE):
            context = {"mask": batch["attention_mask"].bool(), "positions": batch["position_ids"]}
            state = causal_lm.forward(block, state, context)
        assert torch.equal(causal_lm.interface(folder)(state), logits(causal_lm.teacher(folder), batch))


def test_a_saved_student_is_loaded_by_transformers_alone(folder, tmp_path):
    args = {"layers": [[0, 2], [2, 4]], "keep": [[1], [2, 3]]}
    student = causal_lm.assemble(blocks_of(folder, **args), folder, **args)
    student.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.num_hidden_layers == 3
    assert torch.equal(logits(student, padded()), logits(again, padded()))


def test_each_layer_keeps_its_kind_of_mask_where_it_comes_to_stand(tmp_path):
    transformers.Qwen2ForCausalLM(CONFIGS["qwen2"]()).save_pretrained(tmp_path)
    args = {"layers": [[0, 2], [2, 4]], "keep": [[1], [3]]}
    first, last = blocks_of(str(tmp_path), **args)
    assert first.decoder.config.layer_types == ["full_attention"]
    assert last.decoder.config.layer_types == ["sliding_attention"]
    student = causal_lm.assemble([first, last], str(tmp_path), **args)
    assert student.config.layer_types == ["full_attention", "sliding_attention"]


def test_kept_layers_are_copies_of_the_teachers(llama):
    teacher = causal_lm.teacher(llama)
    block = causal_lm.block(1, llama, layers=[[0, 2], [2, 4]], keep=[[0], [3]])
    for name, tensor in teacher.model.layers[3].state_dict().items():
        assert torch.equal(tensor, block.decoder.layers[0].state_dict()[name])


def test_a_block_reads_its_own_tensors_alone(llama, tmp_path):
    tensors = safetensors.load_file(f"{llama}/model.safetensors")
    mine = {name: tensor for name, tensor in tensors.items() if ".layers.3." in name}
    safetensors.save_file(mine, tmp_path / "model.safetensors", metadata={"format": "pt"})
    CONFIGS["llama"]().save_pretrained(tmp_path)
    block = causal_lm.block(1, str(tmp_path), layers=[[0, 3], [3, 4]])
    assert sum(parameter.numel() for parameter in block.parameters()) == sum(each.numel() for each in mine.values())


@pytest.mark.parametrize("missing", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_there_are_named_and_not_made_up(llama, tmp_path, missing):
    tensors = safetensors.load_file(f"{llama}/model.safetensors")
    del tensors[missing]
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    CONFIGS["llama"]().save_pretrained(tmp_path)
    with pytest.raises(zgstore.Invalid, match=f"no weights for '{missing}'"):
        causal_lm.teacher(str(tmp_path))
    with pytest.raises(zgstore.Invalid, match=f"no weights for '{missing}'"):
        causal_lm.assemble(blocks_of(str(tmp_path), **WHOLE), str(tmp_path), **WHOLE)


def test_making_a_block_leaves_no_other_parameter_alive(llama):
    before = live_parameters()
    block = causal_lm.block(0, llama, **WHOLE)
    assert live_parameters() - before == sum(parameter.numel() for parameter in block.parameters())


def test_a_block_trains_and_its_neighbours_do_not_move(llama):
    first, last = blocks_of(llama, **WHOLE)
    first.train()(torch.randn(2, 5, 16)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in first.parameters())
    assert all(parameter.grad is None for parameter in last.parameters())


def test_the_interface_is_frozen_and_has_a_head_of_its_own_where_it_is_tied(tmp_path):
    transformers.LlamaForCausalLM(CONFIGS["tied llama"]()).save_pretrained(tmp_path)
    made = causal_lm.interface(str(tmp_path), layers=[[0, 4]], keep=None)
    assert not any(parameter.requires_grad for parameter in made.parameters())
    assert sum(parameter.numel() for parameter in made.parameters()) == 37 * 16 + 16


def test_a_block_is_rounded_as_its_teacher_is(llama):
    rounded = causal_lm.teacher(llama, round_weights_bits=8).model.layers[0].state_dict()
    block = causal_lm.block(0, llama, layers=[[0, 4]], round_weights_bits=8)
    assert all(torch.equal(rounded[name], each) for name, each in block.decoder.layers[0].state_dict().items())


def test_blocks_compute_in_the_dtype_that_is_asked_for(llama):
    args = {**WHOLE, "dtype": "bfloat16"}
    student = causal_lm.assemble(blocks_of(llama, **args), llama, **args)
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    teacher = causal_lm.teacher(llama, dtype="bfloat16")
    assert torch.equal(logits(teacher, padded()), logits(student, padded()))


def test_an_unpacked_model_is_left_alone_the_second_time(llama, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    causal_lm.unpack(llama, tmp_path)
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "{}"


@pytest.mark.parametrize(
    ("layers", "keep", "said"),
    [
        ([[0, 2], [3, 4]], None, "block 1 has the layers"),
        ([[0, 3]], None, "end at layer 3 of 4"),
        ([[0, 5]], None, "block 0 has the layers"),
        ([[0, 2], [2, 4]], [[0]], "keep is for 1 blocks of 2"),
        ([[0, 2], [2, 4]], [[0], [1]], "block 1 keeps"),
        ([[0, 2], [2, 4]], [[1, 0], [2]], "block 0 keeps"),
        ([[0, 2], [2, 4]], [[], [2]], "block 0 keeps"),
    ],
)
def test_ranges_that_leave_a_gap_or_a_layer_out_of_order_are_refused(layers, keep, said):
    with pytest.raises(zgstore.Invalid, match=said):
        partition(4, layers, keep)


def test_blocks_of_another_partition_are_not_assembled(llama):
    with pytest.raises(zgstore.Invalid, match="block 0 is not the 2 layers"):
        causal_lm.assemble(blocks_of(llama, **WHOLE), llama, layers=[[0, 2], [2, 4]])
    with pytest.raises(zgstore.Invalid, match="1 blocks for 2"):
        causal_lm.assemble(blocks_of(llama, **WHOLE)[:1], llama, **WHOLE)


def test_a_class_that_changes_states_before_its_layers_is_refused(llama, monkeypatch):
    inner = transformers.LlamaModel.forward

    def scaled(self, *args, inputs_embeds=None, **kwargs):
        return inner(self, *args, inputs_embeds=inputs_embeds * 2, **kwargs)

    monkeypatch.setattr(transformers.LlamaModel, "forward", scaled)
    with pytest.raises(zgstore.Invalid, match="changes states before or after"):
        causal_lm.block(0, llama, **WHOLE)
