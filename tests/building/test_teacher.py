"""Two loads of one teacher measure the same; anything that changes a state measures differently, and is named."""

from __future__ import annotations

import io

import pytest
import teachers
import torch
from torch import nn
from transformers import LlamaForCausalLM

from zgstore.building import teacher
from zgstore.building.teacher import Measured, differences, measure
from zgstore.errors import Invalid
from zgstore.format import canonical

torch.set_num_threads(1)


def changed(old, change):
    new = teachers.llama()
    new.load_state_dict(old.state_dict())
    change(new)
    return differences(measure(old), measure(new))


def test_a_teacher_measures_the_same_from_another_path(tmp_path):
    model = teachers.llama()
    loaded = []
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
        loaded.append(LlamaForCausalLM.from_pretrained(tmp_path / name))
    assert loaded[0].name_or_path != loaded[1].name_or_path
    one, two = map(measure, loaded)
    assert one == two
    assert one.digest == two.digest


def test_use_and_mode_change_no_measurement():
    model = teachers.llama()
    before = measure(model)
    model.eval()
    with torch.no_grad():
        model(**teachers.tokens())
    model.train().requires_grad_(requires_grad=False)
    assert measure(model) == before


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_adapts_measures_as_it_began(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    model = teachers.llama(rope_parameters=rope, max_position_embeddings=16)
    before = measure(model)
    with torch.no_grad():
        model.eval()(input_ids=torch.ones(1, 40, dtype=torch.int64))
    assert differences(before, measure(model)) == []


def test_another_rope_theta_is_seen_though_no_weight_changed():
    old, new = teachers.llama(), teachers.llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    new.load_state_dict(old.state_dict())
    found = differences(measure(old), measure(new))
    assert found[0] == "config.rope_parameters.rope_theta 10000.0 → 500000.0"
    assert "buffer model.rotary_emb.inv_freq" in found
    assert not [line for line in found if line.startswith("weights")]


def test_another_epsilon_is_seen_in_configuration_and_modules():
    old, new = teachers.llama(), teachers.llama(rms_norm_eps=1e-5)
    new.load_state_dict(old.state_dict())
    found = differences(measure(old), measure(new))
    assert "config.rms_norm_eps 1e-06 → 1e-05" in found
    assert any(line.startswith("module model.norm ") and "variance_epsilon = 1e-05" in line for line in found)


def test_a_changed_weight_is_named():
    def change(model):
        model.model.layers[2].mlp.up_proj.weight.data[3, 4] += 1e-3

    assert changed(teachers.llama(), change) == ["weights model.layers.2.mlp.up_proj.weight"]


def test_a_changed_buffer_that_no_state_dict_holds_is_named():
    def change(model):
        model.model.rotary_emb.inv_freq.mul_(2)

    assert changed(teachers.llama(), change) == ["buffer model.rotary_emb.inv_freq"]


def test_a_changed_attribute_is_named():
    def change(model):
        model.model.layers[1].self_attn.scaling = 0.5

    (line,) = changed(teachers.llama(), change)
    assert line.startswith("module model.layers.1.self_attn scaling = 0.35")
    assert line.endswith("→ scaling = 0.5")


def test_another_class_or_module_is_named():
    def swap(model):
        model.model.layers[0].mlp.act_fn = nn.ReLU()

    def add(model):
        model.model.extra = nn.Dropout(0.1)

    assert any("ReLU" in line and "model.layers.0.mlp.act_fn" in line for line in changed(teachers.llama(), swap))
    assert changed(teachers.llama(), add) == ["module model.extra added"]


def test_the_sign_of_zero_and_the_bits_of_nan_are_weights():
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    for model, value in ((one, 0.0), (two, -0.0)):
        nn.init.constant_(model.weight, value)
        nn.init.zeros_(model.bias)
    assert differences(measure(one), measure(two)) == ["weights weight"]


def test_dtype_is_measured_in_the_weights_alone():
    found = differences(measure(teachers.llama()), measure(teachers.llama().bfloat16()))
    assert found
    assert all(line.startswith(("weights", "buffer")) for line in found)


def test_a_tied_weight_is_measured_under_both_names():
    model = teachers.gpt2()
    found = measure(model).weights
    assert found["lm_head.weight"] == found["transformer.wte.weight"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.int8, torch.bool])
def test_weights_of_any_dtype_are_measured(dtype):
    model = nn.Module()
    model.register_buffer("w", torch.ones(3, 4).to(dtype))
    before = measure(model)
    model.w = torch.zeros(3, 4).to(dtype)
    assert differences(before, measure(model)) == ["weights w"]


def test_equal_bytes_of_another_shape_or_dtype_are_another_weight():
    found = set()
    for tensor in (torch.zeros(4, 2), torch.zeros(2, 4), torch.zeros(4, 2, dtype=torch.int32)):
        model = nn.Module()
        model.register_buffer("w", tensor)
        found.add(measure(model).digest)
    assert len(found) == 3


def test_large_tensors_measure_as_their_bytes_do_on_any_number_of_threads(monkeypatch):
    model = nn.Module()
    model.register_buffer("w", torch.arange(1 << 19, dtype=torch.float32))
    before = measure(model)
    monkeypatch.setattr(teacher, "_MANY_THREADS_BYTES", 1 << 40)
    assert measure(model) == before


def test_weights_without_values_are_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(Invalid, match=r"'bias'.*meta"):
        measure(model)


class Extra(nn.Module):
    def __init__(self, state):
        super().__init__()
        self._state = state

    def get_extra_state(self):
        return self._state

    def set_extra_state(self, state):
        self._state = state


def test_extra_state_is_measured_or_refused():
    found = {
        measure(Extra(state)).digest for state in ({"a": 1}, {"a": 2}, b"a", io.BytesIO(b"b"), torch.zeros(2), None)
    }
    assert len(found) == 6
    with pytest.raises(Invalid, match="_extra_state"):
        measure(Extra(object()))


class Settings:
    def __init__(self, **fields):
        vars(self).update(fields)


@pytest.mark.parametrize("make", [dict, Settings])
def test_configurations_of_any_form_are_measured(make):
    def model(**fields):
        module = nn.Module()
        module.inner = nn.Linear(1, 1)
        nn.init.zeros_(module.inner.weight), nn.init.zeros_(module.inner.bias)
        module.config = make(**fields)
        return module

    base = {"depth": 3, "nested": {"eps": 1e-5, "_private": 1}, "_name_or_path": "/a", "transformers_version": "5"}
    old = measure(model(**base))
    assert set(old.config) == {"config.depth", "config.nested.eps"}
    assert differences(old, measure(model(**base | {"_name_or_path": "/b", "transformers_version": "6"}))) == []
    assert differences(old, measure(model(**base | {"nested": {"eps": 1e-6}}))) == ["config.nested.eps 1e-05 → 1e-06"]


def test_a_configuration_below_a_wrapper_is_measured():
    wrapper = nn.Module()
    wrapper.inner = teachers.llama()
    names = measure(wrapper).config
    assert "inner.config.rms_norm_eps" in names
    assert len([name for name in names if name.endswith("rms_norm_eps")]) == 1


def test_objects_in_a_configuration_are_measured_without_their_address():
    def model():
        module = nn.Module()
        module.config = Settings(thing=object(), dtype_like=[torch.float32], names={"b", "a"})
        return module

    assert measure(model()) == measure(model())


def test_a_measurement_is_a_canonical_value_that_is_read_back():
    for model in (teachers.llama(), nn.Module(), nn.Linear(2, 2)):
        found = measure(model)
        value = canonical.decode(canonical.encode(found.as_value()))
        assert Measured.from_value(value) == found
        assert Measured.from_value(value).digest == found.digest


def test_many_modules_of_a_kind_are_described_once():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(300)])
    value = measure(model).as_value()
    assert value["modules"]["kinds"].count("Linear") == 1
    assert len(value["weights"]["digests"]) == 600 * 32


def test_sources_are_the_files_of_the_classes_but_torchs():
    found = teacher.sources(teachers.llama(), teachers.llama)
    assert "transformers.models.llama.modeling_llama" in found.classes
    assert not [name for name in found.classes if name.startswith("torch")]
    assert list(found.factory) == ["teachers"]
    assert all(found.classes.values())
    assert teacher.sources(nn.Linear(1, 1)).classes == {}
    assert found.from_value(canonical.decode(canonical.encode(found.as_value()))) == found


def test_bases_of_a_class_are_sources_too():
    found = teacher.sources(teachers.Powers())
    assert list(found.classes) == ["teachers"]


def test_arithmetic_says_what_changes_bits():
    model = teachers.llama()
    found = teacher.arithmetic(model)
    assert found["compute"] == ["float32"]
    assert found["attention"] == "sdpa"
    assert found["autocast"] is None
    canonical.encode(found)
    with torch.autocast("cpu", torch.bfloat16):
        assert teacher.arithmetic(model)["autocast"] == "bfloat16"
    assert teacher.arithmetic(model.half())["compute"] == ["float16"]
    eager = teachers.llama(attn_implementation="eager")
    assert teacher.arithmetic(eager)["attention"] == "eager"
    assert measure(eager) == measure(teachers.llama())
    assert teacher.arithmetic(nn.ReLU()) == found | {"compute": [], "attention": None}


def test_the_platform_counts_no_threads():
    before = teacher.platform("cpu")
    assert before["device"] == "cpu"
    assert all(isinstance(value, str) for value in before.values())
    torch.set_num_threads(2)
    try:
        assert teacher.platform() == before
    finally:
        torch.set_num_threads(1)
