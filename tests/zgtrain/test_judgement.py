"""Students judged: held-out tokens, contexts that are another's, blocks in a row, the α sweep and its invariants."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zgstore
from zgtrain import causal_lm
from zgtrain.alpha import ALPHAS, Boundaries, mixed
from zgtrain.judgement import judge
from zgtrain.measures import Scored, continuation_ce, greedy, labels_of, logits_of, swapped
from zgtrain.texts import IGNORED

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

VOCABULARY, NAMES = 37, ["model.layers.0:in", "model.layers.1:in", "model.norm:in"]
ARGS = {"layers": [[0, 1], [1, 3]]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return str(folder)


def batches(count=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (3, 8), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        mask[1, :2] = 0
        yield {
            "input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "labels": torch.where(mask == 1, ids, IGNORED),
        }  # fmt: skip


def prompts():
    generator = torch.Generator().manual_seed(2)
    return [{"input_ids": torch.randint(3, VOCABULARY, (5,), generator=generator)} for _ in range(4)]


def report(number, first=1.0, last=0.5):
    return SimpleNamespace(
        job="j", snapshot="s", state_digest=f"d{number}", first_window_mean_loss=first, last_window_mean_loss=last
    )


def judged(llama, *, blocks=None, **more):
    teacher = causal_lm.teacher(llama)
    blocks = blocks or [causal_lm.block(b, llama, **ARGS).eval() for b in range(2)]
    return judge(
        student=causal_lm.assemble(blocks, llama, **ARGS), teacher=teacher, blocks=blocks, call=causal_lm.forward,
        interface=causal_lm.interface(llama), boundaries=NAMES, capturer=zgstore.capture.Capture(teacher, NAMES),
        **{"data": list(batches()), "prompts": prompts(), "reports": [report(0), report(1)], **more},
    )  # fmt: skip


# ---- what is scored ----


def test_cross_entropy_counts_labelled_tokens_alone():
    logits, labels = torch.randn(2, 4, 5), torch.tensor([[1, 2, IGNORED, 3], [IGNORED, IGNORED, 4, 0]])
    scored = Scored()
    scored.add(logits, labels)
    log = logits.log_softmax(-1)
    wanted = [log[0, 0, 2], log[0, 2, 3], log[1, 1, 4], log[1, 2, 0]]
    assert scored.tokens == 4
    assert scored.ce == pytest.approx(-float(torch.stack(wanted).mean()))


def test_padding_is_never_scored():
    ids = torch.tensor([[5, 6, 7]])
    mask = torch.tensor([[0, 1, 1]])
    assert labels_of({"input_ids": ids, "attention_mask": mask}).tolist() == [[IGNORED, 6, 7]]
    assert labels_of({"input_ids": ids, "labels": ids, "attention_mask": mask}).tolist() == [[IGNORED, 6, 7]]


def test_a_model_without_logits_is_named():
    with pytest.raises(zgstore.Invalid, match="Linear gave a Tensor"):
        logits_of(nn.Linear(3, 3), {"input_ids": torch.zeros(2, 3)})


# ---- another's context ----


def test_only_the_content_of_a_prompt_is_replaced_and_only_its_continuation_is_scored():
    ids = torch.arange(12).reshape(2, 6) + 10
    content = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    found = swapped({"input_ids": ids, "content": content})
    assert found.batch["input_ids"].tolist() == [[10, 17, 18, 13, 14, 15], [16, 11, 12, 19, 20, 21]]
    assert found.labels.tolist() == [[IGNORED] * 3 + [13, 14, 15], [IGNORED] * 3 + [19, 20, 21]]


def test_a_prompt_ends_at_the_first_label_where_there_is_one():
    ids = torch.arange(10).reshape(2, 5) + 10
    labels = ids.clone()
    labels[0, :4] = IGNORED
    labels[1, :2] = IGNORED
    found = swapped({"input_ids": ids, "labels": labels})
    assert found.batch["input_ids"].tolist() == [[15, 16, 15, 16, 14], [10, 11, 17, 18, 19]]
    assert (found.labels != IGNORED).sum(1).tolist() == [1, 3]


def test_rows_keep_their_length_and_padding_where_the_other_is_longer_or_shorter():
    ids = torch.arange(16).reshape(2, 8) + 10
    mask = torch.tensor([[1] * 8, [0, 0, 0, 0, 1, 1, 1, 1]])
    found = swapped({"input_ids": ids, "attention_mask": mask})
    assert found.batch["input_ids"].tolist() == [[22, 23, 22, 23, 14, 15, 16, 17], [18, 19, 20, 21, 10, 11, 24, 25]]
    assert found.batch["attention_mask"] is mask


def test_a_batch_of_one_row_takes_the_content_of_the_row_before():
    found = swapped({"input_ids": torch.tensor([[10, 11, 12, 13]])}, torch.tensor([7, 8]))
    assert found.batch["input_ids"].tolist() == [[7, 8, 12, 13]]


# ---- generation ----


class Counter(nn.Module):
    """The next token is the last one plus one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))

    def forward(self, input_ids):
        return nn.functional.one_hot((input_ids + 1) % VOCABULARY, VOCABULARY) * self.scale


def test_greedy_generation_takes_the_likeliest_and_never_ends_early(llama):
    asked = [torch.tensor([3, 4]), torch.tensor([9, 8, 7, 6, 5])]
    assert greedy(Counter(), asked, tokens=3) == [[5, 6, 7], [6, 7, 8]]
    teacher = causal_lm.teacher(llama)
    said, _ = greedy(teacher, asked, tokens=12)
    assert len(said) == 12
    assert teacher.config.eos_token_id not in said
    with torch.no_grad():
        logits = teacher(input_ids=torch.tensor([[3, 4, *said[:-1]]])).logits[0, 1:].clone()
    logits[:, teacher.config.eos_token_id] = -torch.inf
    assert said == logits.argmax(-1).tolist()


def test_a_continuation_is_scored_without_its_prompt():
    scored = continuation_ce(Counter(), torch.tensor([3, 4]), [5, 6])
    assert scored.tokens == 2
    assert scored.ce == pytest.approx(0.0, abs=1e-6)


# ---- blocks in a row ----


class Add(nn.Module):
    def __init__(self, much):
        super().__init__()
        self.much = much

    def forward(self, x):
        return x + self.much * torch.tanh(x.flip(-1))


def swept_labels(mask):
    return torch.randint(0, 6, (2, 5), generator=torch.Generator().manual_seed(4)).masked_fill(~mask, IGNORED)


def swept(count=4, interface=None):
    generator = torch.Generator().manual_seed(3)
    truths = [torch.randn(2, 5, 8, generator=generator) for _ in range(count + 1)]
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    found = Boundaries([Add(0.1 * (b + 1)) for b in range(count)], lambda f, x, _: f(x), interface)
    found.add(truths, {"mask": mask}, swept_labels(mask))
    return found, truths, mask


def test_the_first_block_is_constant_in_alpha_and_at_alpha_0_every_block_ends_the_same():
    torch.manual_seed(0)
    found, _, _ = swept(interface=nn.Linear(8, 6))
    rows = found.sweep_values()
    assert len(rows) == 4 * len(ALPHAS)
    first = [{**row, "alpha": 0} for row in rows if row["block"] == 0]
    assert all(row == first[0] for row in first)
    assert len({row["ce"] for row in rows if row["alpha"] == 0.0}) == 1
    assert len({row["ce"] for row in rows}) > len(ALPHAS)


def test_the_sweep_is_what_running_every_block_anew_gives():
    torch.manual_seed(0)
    head = nn.Linear(8, 6)
    found, truths, mask = swept(interface=head)
    hat = truths[0]
    for b in range(4):
        for alpha in ALPHAS:
            state = alpha * truths[b] + (1 - alpha) * hat
            for block in found.blocks[b:]:
                state = block(state)
            ce = Scored()
            ce.add(head(state), swept_labels(mask))
            assert found.sweep[b, alpha][1].ce == pytest.approx(ce.ce, abs=1e-5)
        hat = found.blocks[b](hat)


def test_at_alpha_1_the_sweep_is_the_fit_and_at_0_the_assembled_output():
    found, _, _ = swept()
    fits, rows = found.boundary_values([f"h.{b}" for b in range(5)]), found.sweep_values()
    for b, fit in enumerate(fits):
        at = {row["alpha"]: row for row in rows if row["block"] == b}
        assert at[1.0]["mse"] == fit["teacher_input_fit"]["mse"]
        assert at[0.0]["mse"] == fit["assembled_output_error"]["mse"]
        assert fit["assembled_predecessor_error"]["mse"] == (
            0 if b == 0 else fits[b - 1]["assembled_output_error"]["mse"]
        )


def test_errors_are_means_over_real_tokens():
    found, truths, mask = swept(1)
    fit = found.boundary_values(["a", "b"])[0]["teacher_input_fit"]
    out = Add(0.1)(truths[0])
    assert fit["mse"] == pytest.approx(float((out - truths[1])[mask].square().mean()))
    moved = (truths[1] - truths[0])[mask].square().sum()
    assert fit["residual_error"] == pytest.approx(float((out - truths[1])[mask].square().sum() / moved))
    cosines = nn.functional.cosine_similarity(out, truths[1], dim=-1)[mask]
    assert fit["cosine"] == pytest.approx(float(cosines.mean()))


def test_a_mixture_is_exact_at_its_ends_and_where_nothing_differs():
    h, hat = torch.randn(50), torch.randn(50)
    assert torch.equal(mixed(h, hat, 1.0), h)
    assert torch.equal(mixed(h, hat, 0.0), hat)
    assert all(torch.equal(mixed(h, h.clone(), alpha), h) for alpha in ALPHAS)


# ---- everything together ----


def test_an_untrained_copy_of_the_teacher_is_as_good_as_the_teacher(llama):
    found = judged(llama)
    assert found.ok, [gate.as_value() for gate in found.gates if not gate.passes]
    assert [gate.name for gate in found.gates] == [
        "finite", "local learning", "quality", "context use", "coherence", "teacher-scored generation",
    ]  # fmt: skip
    assert found.student == found.teacher
    assert (found.rows, found.tokens) == (6, 2 * (5 + 6 + 7))
    assert all(each["teacher_input_fit"]["mse"] < 1e-10 for each in found.boundaries)
    assert all(row["ce"] == pytest.approx(found.teacher["ce"], abs=1e-5) for row in found.sweep)
    assert all(each["student"] == each["teacher"] for each in found.generations)


def test_a_broken_student_fails_and_every_gate_still_speaks(llama):
    blocks = [causal_lm.block(b, llama, **ARGS).eval() for b in range(2)]
    with torch.no_grad():
        blocks[1].decoder.layers[0].mlp.down_proj.weight.fill_(torch.nan)
    found = judged(llama, blocks=blocks, losses=1)
    assert not found.ok
    value = json.loads(json.dumps(found.as_value(), allow_nan=False))
    failed = {gate["name"] for gate in value["gates"] if not gate["passes"]}
    assert {"finite", "quality", "context use"} <= failed
    assert len(value["gates"]) == 6
    counts = {each["name"]: each["number"] for each in value["gates"][0]["measures"]}
    assert counts["not finite in parameters"] == 24 * 16
    assert counts["not finite in logits"] > 0
    assert value["student"]["ce"] is None


def test_the_sweep_is_measured_on_the_first_rows(llama):
    assert judged(llama, sweep_rows=1).sweep_rows == 3


def test_a_prompt_may_be_a_batch_of_one_row_as_tokenizers_give_it(llama):
    rows = [{**each, "content": each["input_ids"] > 9, "continuation": each["input_ids"][:2]} for each in prompts()]
    batched = [{name: value[None] for name, value in each.items()} for each in rows]
    ours, theirs = (judged(llama, prompts=each).as_value() for each in (rows, batched))
    assert ours | {"seconds": 0} == theirs | {"seconds": 0}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_ids": torch.zeros(2, 5, dtype=torch.int64)}, r"input_ids of prompt 0 is \[2, 5\] of torch.int64"),
        ({"input_ids": torch.zeros(0, dtype=torch.int64)}, r"input_ids of prompt 0 is \[0\]"),
        ({"input_ids": torch.zeros(5)}, r"\[5\] of torch.float32"),
        ({"text": "hello"}, "input_ids of prompt 0 is a NoneType"),
        ({"input_ids": torch.ones(1, 5).long(), "content": torch.ones(4).bool()}, r"\[4\] of torch.bool, beside 5 ids"),
        ("hello", "prompt 0 is a str"),
    ],
)
def test_a_prompt_of_another_shape_is_refused_by_what_it_is_and_what_is_wanted(llama, given, said):
    with pytest.raises(zgstore.Invalid, match=said) as caught:
        judged(llama, prompts=[given])
    assert "[T]" in caught.value.hint


def test_neither_rows_nor_prompts_may_be_missing(llama):
    teacher = causal_lm.teacher(llama)
    common = {
        "student": teacher, "teacher": teacher, "blocks": [], "call": causal_lm.forward, "interface": None,
        "boundaries": NAMES[:1], "capturer": zgstore.capture.Capture(teacher, NAMES[:1]), "reports": [],
    }  # fmt: skip
    with pytest.raises(zgstore.Invalid, match="no held-out rows"):
        judge(**common, data=[], prompts=prompts())
    with pytest.raises(zgstore.Invalid, match="no prompts"):
        judge(**common, data=batches(), prompts=[])
