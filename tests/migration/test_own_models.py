"""Models that a script defines: each finding is beside what transformers does with such a model."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers

from helpers.migrated import today
from hf_compat.tools.migration.gone_names import account_of
from hf_compat.tools.migration.names import is_beside_older
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Target

HEAD = "from torch import nn\nfrom transformers import BertModel, BertPreTrainedModel, BertForSequenceClassification\n"
MODEL = """
class M({base}):
    {body}

    def __init__(self, config):
        super().__init__(config)
        self.head = nn.Linear(config.hidden_size, 2)
        {end}
"""
IS_4 = transformers.__version__.startswith("4.")
TIED = "_tied_weights_keys = ['head.weight']"


def model(end, base="BertPreTrainedModel", body="x = 1"):
    return HEAD + MODEL.format(base=base, body=body, end=end)


def told(source):
    found = rewrite_python(source, Target.TRANSFORMERS_5)
    return [(one.what, one.effect.value) for one in (*found.findings, *found.mended)]


def outcome(source, folder):
    """What transformers does: makes the model, saves it and loads it."""
    names: dict[str, type[transformers.PreTrainedModel]] = {}
    exec(source, names)
    sizes = {
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
        "vocab_size": 8,
    }
    made = names["M"](transformers.BertConfig(**sizes))
    made.save_pretrained(folder)
    names["M"].from_pretrained(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (model("self.init_weights()"), ("self.init_weights", "fails")),
        (model("self.init_weights(); self.post_init()"), ("self.init_weights", "fails")),
        (model("pass"), ("M.__init__", "to look at")),
        (model("pass") + "def load(): return M.from_pretrained('x')\n", ("M.__init__", "fails")),
        (model("self.post_init()", body=TIED), ("M._tied_weights_keys", "fails")),
        (model("self.post_init()"), None),
        (model("self.post_init(); self.init_weights()"), None),
        (model("self.init_weights()", "BertForSequenceClassification"), None),
        (model("self.post_init()", body="_tied_weights_keys = []"), ("M._tied_weights_keys", "fails")),
        (model("self.post_init()", body="_tied_weights_keys = {}"), None),
    ],
)
def test_what_a_model_of_ones_own_needs_in_5(source, expected, tmp_path):
    """`PreTrainedModel.post_init` and `get_expanded_tied_weights_keys` of 5.0; 4.x needs neither."""
    assert told(source) == ([] if expected is None else [expected])
    trains = expected is None or IS_4
    with contextlib.nullcontext() if trains else pytest.raises(AttributeError) as raised:
        outcome(source, tmp_path)
    assert trains or "_tied" in source or "post_init" in (account_of(raised.value) or "")


def test_init_weights_becomes_post_init(tmp_path):
    old, new = model("self.init_weights()"), model("self.post_init()")
    if is_beside_older(Target.HF_COMPAT):
        assert today(old) == old
    else:
        assert today(old) == new
        torch.manual_seed(0)
        outcome(new, tmp_path)


@pytest.mark.parametrize(
    ("forward", "setting", "is_told"),
    [
        ("self, **inputs", "", True),
        ("self, **inputs", "remove_unused_columns=False, ", False),
        ("self, input_ids, **inputs", "", False),
        ("self, *, input_ids=None, **inputs", "", False),
        ("self, inputs", "", False),
    ],
)
def test_a_forward_that_names_no_column_is_told(forward, setting, is_told):
    """`Trainer._set_signature_columns_if_needed` reads the names: nothing of a batch is left for such a model."""
    source = (
        f"from torch import nn\nfrom transformers import Trainer, TrainingArguments\n"
        f"class M(nn.Module):\n    def forward({forward}): ...\n"
        f"Trainer(model=M(), args=TrainingArguments({setting}output_dir='o'))\n"
    )
    assert [one.what for one in rewrite_python(source, Target.HF_COMPAT).findings] == (["M.forward"] if is_told else [])


def test_a_forward_that_names_no_column_is_not_told_without_a_trainer():
    source = "from torch import nn\nclass M(nn.Module):\n    def forward(self, **inputs): ...\n"
    assert not rewrite_python(source, Target.HF_COMPAT).findings
