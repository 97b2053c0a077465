"""Model cards, and public methods that are refused so far. HF's method names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hf_compat.errors import UnsupportedArgument
from hf_compat.hf.enums import OptimizerNames, SchedulerType
from hf_compat.trainer_methods.base import TrainerBase


class HubMethods(TrainerBase):
    """The public methods around the Hub and hyperparameter search."""

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write a model card, `README.md` in the output folder, from what is known; a card that is there stays.

        Mirrors:
            `transformers.Trainer.create_model_card`, 5.23.
        """
        output_dir = str(self.args.output_dir)
        path = os.path.join(output_dir, "README.md")
        if not self.args.should_save or os.path.exists(path):
            return
        os.makedirs(output_dir, exist_ok=True)
        facts = {
            "language": language,
            "license": license,
            "base_model": finetuned_from,
            "tags": [*_listed(tags), "hf_compat"],
            "pipeline_tag": _listed(tasks)[:1],
            "datasets": _listed(dataset_tags) or _listed(dataset),
        }
        name = model_name or os.path.basename(os.path.abspath(output_dir))
        card = _card(facts, name, _listed(dataset_args), self._shown_arguments(), self.state.log_history)
        with open(path, "w", encoding="utf-8") as file:
            file.write(card)

    def _shown_arguments(self) -> dict[str, object]:
        args = self.args
        shown = ("learning_rate", "train_batch_size", "eval_batch_size", "gradient_accumulation_steps", "seed")
        values = {name: getattr(args, name) for name in shown}
        return values | {
            "optimizer": OptimizerNames(args.optim).value,
            "schedule": SchedulerType(args.lr_scheduler_type).value,
        }

    def end(self) -> None:
        """Do nothing: every call of `train`, `evaluate` or `predict` has ended its own Lightning trainer."""

    def push_to_hub(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: pushing is not supported yet."""
        raise _unsupported("push_to_hub", "save_model() and push the folder with huggingface_hub")

    def init_hf_repo(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: pushing is not supported yet."""
        raise _unsupported("init_hf_repo", "create the repository with huggingface_hub")

    def hyperparameter_search(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: searching is not supported yet."""
        raise _unsupported("hyperparameter_search", "call a search library around train()")


def _unsupported(method: str, hint: str) -> UnsupportedArgument:
    return UnsupportedArgument(f"`Trainer.{method}` is not supported yet.\n\nHint: {hint}.")


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _card(
    facts: Mapping[str, object],
    name: str,
    about_data: list[str],
    arguments: Mapping[str, object],
    history: Sequence[Mapping[str, object]],
) -> str:
    front = [f"{key}: {value}" for key, value in facts.items() if value]
    lines = ["---", *front, "---", "", f"# {name}", "", "Trained by `hf_compat.Trainer` on Lightning."]
    if about_data:
        lines += ["", f"Data: {', '.join(about_data)}."]
    lines += ["", "## Arguments", "", *(f"- {key}: {value}" for key, value in arguments.items())]
    return "\n".join([*lines, *_table_of_evaluations(history)]) + "\n"


def _table_of_evaluations(history: Sequence[Mapping[str, object]]) -> list[str]:
    evaluations = [log for log in history if any(key.startswith("eval_") for key in log)]
    if not evaluations:
        return []
    kept = [key for key in evaluations[-1] if not key.endswith(("_runtime", "_per_second", "_time"))]
    rows = (f"| {' | '.join(_short(log.get(key, '')) for key in kept)} |" for log in evaluations)
    return ["", "## Evaluations", "", f"| {' | '.join(kept)} |", "|---" * len(kept) + "|", *rows]


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
