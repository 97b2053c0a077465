"""The model card, and the public methods that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import toy

from hf_compat import Trainer
from hf_compat.errors import UnsupportedArgument


def test_a_card_holds_what_is_known_and_is_written_once(make_args):
    args = make_args(max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset=toy.rows(6))
    trainer.train()
    trainer.create_model_card(language="en", tags="toy", tasks=["text-classification"], dataset_args="part: all")
    path = Path(args.output_dir) / "README.md"
    card = path.read_text()
    assert card.startswith(
        "---\nlanguage: en\ntags: ['toy', 'hf_compat']\npipeline_tag: ['text-classification']\n---\n"
    )
    for line in ("# out", "Data: part: all.", "- learning_rate: 0.01", "- optimizer: adamw_torch_fused"):
        assert f"\n{line}\n" in card
    table = card.split("## Evaluations\n\n")[1].splitlines()
    assert table[0] == "| eval_loss | epoch | step |" and len(table) == 4
    trainer.create_model_card(language="de")
    assert path.read_text() == card


@pytest.mark.parametrize("method", ["push_to_hub", "init_hf_repo", "hyperparameter_search"])
def test_what_is_not_supported_says_so(make_args, method):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8))
    with pytest.raises(UnsupportedArgument, match=rf"`Trainer\.{method}` is not supported yet\.\n\nHint: "):
        getattr(trainer, method)("anything", at="all")
