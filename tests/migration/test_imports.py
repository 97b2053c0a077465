"""Where names come from after migration, and how the statements look."""

# ruff: noqa: E501 - sources within tests
from __future__ import annotations

import inspect

import pytest

from helpers.migrated import left, today
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Effect, Target


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from transformers import Trainer", "from hf_compat import Trainer"),
        ("from transformers import Trainer as T", "from hf_compat import Trainer as T"),
        (
            "from transformers import AutoModel, Trainer, set_seed",
            "from hf_compat import Trainer, set_seed\nfrom transformers import AutoModel",
        ),
        ("from transformers.trainer import Trainer", "from hf_compat import Trainer"),
        (
            "from transformers.trainer_utils import HubStrategy, is_main_process",
            "from hf_compat.trainer_utils import HubStrategy\nfrom transformers.trainer_utils import is_main_process",
        ),
        ("from transformers.integrations import WandbCallback", "from hf_compat import WandbCallback"),
        ("from transformers.deepspeed import HfDeepSpeedConfig", "from transformers.integrations.deepspeed import HfDeepSpeedConfig"),
        ("from transformers.file_utils import ModelOutput", "from transformers.utils import ModelOutput"),
        ("from transformers import EvaluationStrategy", "from hf_compat import IntervalStrategy"),
        ("import transformers.training_args as ta", "import hf_compat.training_args as ta"),
        ("from transformers import Trainer  # noqa: F401", "from hf_compat import Trainer  # noqa: F401"),
        ("from transformers import AutoModel", "from transformers import AutoModel"),
        ("import os; from transformers import AutoModel, Trainer", "import os; from hf_compat import Trainer; from transformers import AutoModel"),
        ("if x: from transformers import AutoModel, Trainer", "if x: from hf_compat import Trainer; from transformers import AutoModel"),
        ("from transformers import \\\n    Trainer, AutoModel", "from hf_compat import Trainer\nfrom transformers import AutoModel"),
    ],
)  # fmt: skip
def test_one_import(old, new):
    assert today(f"{old}\n") == f"{new}\n"


def test_what_stays_with_transformers():
    source = "from transformers import EvaluationStrategy, Trainer\nfrom transformers.deepspeed import deepspeed_init\n"
    expected = "from transformers import IntervalStrategy, Trainer\nfrom transformers.integrations.deepspeed import deepspeed_init\n"
    assert today(source, Target.TRANSFORMERS_5) == expected


def test_blocks_that_are_sorted_stay_sorted_with_their_comments():
    source = """\
    import numpy as np
    import torch
    from datasets import load_dataset
    from torch import nn
    from transformers import (
        AutoModel,  # the model
        # what trains
        Trainer,
        TrainingArguments,
    )
    from transformers.trainer_utils import get_last_checkpoint

    x = 1
    """
    assert today(source) == inspect.cleandoc("""\
    import numpy as np
    import torch
    from datasets import load_dataset
    from hf_compat import (
        # what trains
        Trainer,
        TrainingArguments,
    )
    from hf_compat.trainer_utils import get_last_checkpoint
    from torch import nn
    from transformers import (
        AutoModel,  # the model
    )

    x = 1
    """) + "\n"  # fmt: skip


def test_unsorted_blocks_keep_their_order():
    source = "from transformers import AutoModel, Trainer\nfrom datasets import load_dataset\n"
    assert today(source).splitlines() == [
        "from hf_compat import Trainer",
        "from transformers import AutoModel",
        "from datasets import load_dataset",
    ]


def test_imports_of_one_module_become_one():
    source = "from transformers import Trainer\nfrom transformers.integrations import WandbCallback\n"
    assert today(source) == "from hf_compat import Trainer, WandbCallback\n"


def test_long_imports_are_broken():
    names = ", ".join(f"TrainerCallback as callback_number_{n}" for n in range(4))
    result = today(f"from transformers import AutoModel, {names}\n")
    assert max(map(len, result.splitlines())) < 60 and result.startswith("from hf_compat import (\n    Trainer")


def test_modules_in_functions_branches_and_try():
    source = """\
    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        from transformers import AutoModel, TrainingArguments

    try:
        from transformers import Trainer
    except ImportError:
        Trainer = None

    def f():
        from transformers import Trainer as T, AutoConfig
        return T
    """
    result = today(source)
    assert "    from hf_compat import TrainingArguments\n    from transformers import AutoModel\n" in result
    assert "try:\n    from hf_compat import Trainer\nexcept" in result
    assert "    from hf_compat import Trainer as T\n    from transformers import AutoConfig\n" in result


def test_an_import_for_where_this_package_is_absent_stays():
    source = """\
    try:
        from hf_compat import Trainer
    except ImportError:
        from transformers import Trainer
    """
    assert today(source) == inspect.cleandoc(source) + "\n"


def test_names_of_an_imported_package():
    source = """\
    import os

    import torch
    import transformers

    class C(transformers.TrainerCallback):
        pass

    def f(a: transformers.TrainingArguments, m: transformers.PreTrainedModel) -> "transformers.Trainer":
        return transformers.Trainer(m, a, tokenizer=None)
    """
    result = today(source)
    assert "\nimport hf_compat\nimport torch\nimport transformers\n" in result
    assert "class C(hf_compat.TrainerCallback)" in result and "m: transformers.PreTrainedModel" in result
    assert "return hf_compat.Trainer(m, a, processing_class=None)" in result


def test_an_import_that_nothing_reads_any_longer_goes():
    assert today("import transformers as tf\n\ntf.set_seed(1)\n") == "import hf_compat\n\nhf_compat.set_seed(1)\n"
    kept = "import transformers as tf\n\ntf.set_seed(tf.__version__)\n"
    assert today(kept) == "import hf_compat\nimport transformers as tf\n\nhf_compat.set_seed(tf.__version__)\n"
    assert today("import transformers\n") == "import transformers\n"


def test_modules_by_another_name_are_put_where_isort_has_them():
    source = "import torch\nimport transformers.trainer_utils as tu  # noqa: E402\n"
    assert today(source) == "import hf_compat.trainer_utils as tu  # noqa: E402\nimport torch\n"
    assert today("import transformers as t  # noqa\n\nt.Trainer\n") == "import hf_compat  # noqa\n\nhf_compat.Trainer\n"


def test_renamed_names_and_their_uses():
    source = "from transformers import EvaluationStrategy as E\nfrom transformers import is_torch_tpu_available\nprint(E.NO, is_torch_tpu_available())\n"
    assert "import IntervalStrategy as E" in today(source) and "is_torch_xla_available())" in today(source)
    exported = 'from transformers import EvaluationStrategy\n__all__ = ["EvaluationStrategy"]\n'
    assert today(exported).startswith("from hf_compat import IntervalStrategy as EvaluationStrategy\n")


def test_adamw_is_torchs_with_the_old_defaults():
    source = "from transformers import AdamW\no = AdamW(p, 1e-3, correct_bias=True)\nq = AdamW(p, eps=1e-8, correct_bias=False)\n"
    result = today(source)
    assert result.startswith("from torch.optim import AdamW\no = AdamW(p, 1e-3, eps=1e-6, weight_decay=0.0)\n")
    assert left(source) == [(1, "AdamW"), (3, "AdamW(correct_bias=…)")]


def test_what_only_a_person_can_import():
    source = """\
    from transformers import *
    from transformers import TextDataset, AutoModelWithLMHead
    import unittest.mock

    unittest.mock.patch("transformers.Trainer")
    words = ["--evaluation_strategy", "epoch"]
    """
    assert left(source) == [
        (1, "from transformers import *"),
        (2, "from transformers import AutoModelWithLMHead"),
        (2, "from transformers import TextDataset"),
        (5, "transformers.Trainer"),
        (6, "--evaluation_strategy"),
    ]


def test_line_endings_and_form_feeds_stay():
    source = (
        "import transformers\r\nfrom transformers import (\r\n    AutoModel,\r\n    Trainer,\r\n)\r\n\x0c\r\nx = 1\r\n"
    )
    result = today(source)
    assert (
        result.count("\n") == result.count("\r\n")
        and "\x0c" in result
        and "from hf_compat import Trainer\r\n" in result
    )


STARS = {
    "below in the same block": (
        "from transformers import Trainer, TrainingArguments\nfrom transformers.trainer import *\n",
        "from transformers.trainer import *\nfrom hf_compat import Trainer, TrainingArguments\n",
    ),
    "above": (
        "from transformers.trainer import *\nfrom transformers import Trainer, TrainingArguments\n",
        "from transformers.trainer import *\nfrom hf_compat import Trainer, TrainingArguments\n",
    ),
    "alone, one name in quotes": (
        "from transformers import *\n\n\ndef f(t: 'Trainer'):\n    return AutoModel, TrainingArguments, x.TrainerState\n",
        "from transformers import *\nfrom hf_compat import Trainer, TrainingArguments\n",
    ),
    "further down": (
        "from transformers import Trainer\n\nx = 1\nfrom transformers.trainer import *\n\n\nclass Own(Trainer): pass\n",
        "from hf_compat import Trainer\n\nx = 1\nfrom transformers.trainer import *\nfrom hf_compat import Trainer\n",
    ),
    "in a try": (
        "from transformers import Trainer\n\ntry:\n    from transformers.trainer import *\nexcept ImportError:\n    pass\n",
        "    from transformers.trainer import *\n    from hf_compat import Trainer\n",
    ),
    "in the branches of an if": (
        "from transformers import Trainer\n\nif x:\n    from transformers import *\nelse:\n    from transformers.trainer import *\nTrainer()\n",
        "    from transformers import *\n    from hf_compat import Trainer\nelse:\n    from transformers.trainer import *\n    from hf_compat import Trainer\n",
    ),
    "in a handler": (
        "try:\n    from transformers import Trainer\nexcept ImportError:\n    from transformers.trainer import *\nTrainer()\n",
        "    from transformers.trainer import *\n",
    ),
    "of the top level below another": (
        "from transformers.trainer import *\nfrom transformers import *\nTrainer(args=TrainingArguments('o', no_cuda=True))\n",
        "from transformers import *\nfrom hf_compat import Trainer, TrainingArguments\nTrainer(args=TrainingArguments('o', use_cpu=True))\n",
    ),
    "on a line with others": (
        "import os; from transformers.training_args import *; x = 1\nTrainingArguments('out')\n",
        "from transformers.training_args import *; from hf_compat.training_args import TrainingArguments; x = 1\n",
    ),
    "an old name": (
        "from transformers.trainer_utils import *\nprint(EvaluationStrategy.NO, PREFIX_CHECKPOINT_DIR)\n",
        "from hf_compat.trainer_utils import (\n    PREFIX_CHECKPOINT_DIR,\n    IntervalStrategy as EvaluationStrategy,\n)\n",
    ),
    "several, and ours already there": (
        "from hf_compat import Trainer\nfrom transformers.trainer import *\nfrom transformers.trainer_utils import *\nset_seed(Trainer)\n",
        "from transformers.trainer_utils import *\nfrom hf_compat import Trainer, set_seed\nfrom hf_compat.trainer_utils import set_seed\n",
    ),
    "a module that has it from another": (
        "from transformers.trainer_callback import TrainingArguments\n", "from hf_compat import TrainingArguments\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STARS)
def test_no_star_import_binds_over_our_names(case):
    old, new = STARS[case]
    assert new in today(old)
    assert "hf_compat" not in today(old.replace("hf_compat", "mine"), Target.TRANSFORMERS_5)


def test_a_star_import_where_ours_is_not_installed_stays_and_unused_names_are_not_imported():
    fallback = "try:\n    from hf_compat import Trainer\nexcept ImportError:\n    from transformers.trainer import *\nTrainer()\n"
    unused = "from transformers.trainer import *\nx.Trainer(Trainer=1)\n"
    assert (today(fallback), today(unused)) == (fallback, unused)


def test_modules_of_3_x_are_none_today():
    """`transformers.modeling_bert` became `transformers.models.bert.modeling_bert` in 4.0."""
    source = """\
    from transformers.configuration_auto import AutoConfig
    from transformers.modeling_bert import BertModel as Model
    from transformers import Trainer
    """
    expected = "from transformers import AutoConfig\nfrom transformers import BertModel as Model\n"
    assert today(source, Target.TRANSFORMERS_5).startswith(expected)
    for target in Target:
        told = {one.what: one.effect for one in rewrite_python(inspect.cleandoc(source), target).mended}
        assert told == {
            "from transformers.configuration_auto import AutoConfig": Effect.FAILS,
            "from transformers.modeling_bert import BertModel": Effect.FAILS,
        }
