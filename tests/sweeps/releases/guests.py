"""What a script has of the installed transformers, beside ours: checkpoints, adapters, callbacks, imports, `patch()`.

    python tests/sweeps/releases/guests.py FOLDER      # prints {check: "equal" or what went wrong}

Each check runs in a fork of this process, and says what it found in a sentence when it fails.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

import hf_compat
from helpers import toy

QUIET = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 2, "max_steps": 12, "save_steps": 6,
    "learning_rate": 1e-2,
}  # fmt: skip
IMPORTS = """
from transformers import (AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding,
    EarlyStoppingCallback, EvalPrediction, HfArgumentParser, IntervalStrategy, PreTrainedTokenizerFast,
    Seq2SeqTrainer, Seq2SeqTrainingArguments, SchedulerType, Trainer, TrainerCallback, TrainerControl, TrainerState,
    TrainingArguments, default_data_collator, get_scheduler, set_seed)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_callback import DefaultFlowCallback, ProgressCallback
from transformers.trainer_pt_utils import LabelSmoother, get_parameter_names, nested_concat, nested_detach
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, get_last_checkpoint, has_length, seed_worker
from transformers.training_args import OptimizerNames, ParallelMode
"""


def trained(package, args, **further):
    transformers.set_seed(1)
    trainer = package.Trainer(further.pop("model", None) or toy.tiny_bert(), args, **further)
    trainer.train(resume_from_checkpoint=further.pop("resume", None))
    return trainer


def same_weights(left, right) -> None:
    ours = right.state_dict()
    for name, tensor in left.state_dict().items():
        assert torch.equal(tensor, ours[name]), f"{name} differs"


def checkpoints_of_theirs_resume_here(folder: Path) -> None:
    data = {"train_dataset": toy.labelled_blocks()}
    args = transformers.TrainingArguments(str(folder / "theirs"), **QUIET)
    whole = trained(transformers, args, **data)
    ours = hf_compat.Trainer(toy.tiny_bert(), hf_compat.TrainingArguments(str(folder / "ours"), **old(args)), **data)
    ours.train(resume_from_checkpoint=str(folder / "theirs" / "checkpoint-6"))
    same_weights(whole.model, ours.model)


def checkpoints_of_ours_resume_there(folder: Path) -> None:
    data = {"train_dataset": toy.labelled_blocks()}
    args = transformers.TrainingArguments(str(folder / "theirs"), **QUIET)
    trained(transformers, args, **data)
    trained(hf_compat, hf_compat.TrainingArguments(str(folder / "ours"), **old(args)), **data)
    resumed = []
    for of_whom in ("theirs", "ours"):  # 4.57 itself goes on with other random numbers than it would have had
        theirs = transformers.Trainer(toy.tiny_bert(), args, **data)
        theirs.train(resume_from_checkpoint=str(folder / of_whom / "checkpoint-6"))
        resumed.append(theirs.model)
    same_weights(*resumed)


def old(args) -> dict:
    """Return what ours needs to be set to, to do what that release does by default."""
    return {**QUIET, "optim": getattr(args.optim, "value", args.optim)}


def adapters_of_peft_train_alike(folder: Path) -> None:
    import peft

    def model():
        transformers.set_seed(2)
        settings = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
        return peft.get_peft_model(toy.tiny_bert(), settings)

    data = {"train_dataset": toy.labelled_blocks()}
    both = {}
    for package in (transformers, hf_compat):
        args = transformers.TrainingArguments(str(folder / package.__name__), **QUIET)
        both[package] = trained(package, args, model=model(), **data)
        assert (folder / package.__name__ / "checkpoint-12" / "adapter_model.safetensors").is_file()
    same_weights(both[transformers].model, both[hf_compat].model)


def callbacks_work_in_a_lightning_trainer(folder: Path) -> None:
    import lightning.pytorch as pl

    seen = []

    class Own(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)
            control.should_training_stop = state.global_step == 3

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = toy.Classifier()

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    adapter = hf_compat.HFCallbackAdapter(Own())
    trainer = pl.Trainer(max_epochs=1, callbacks=[adapter], enable_model_summary=False, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(toy.rows(32), batch_size=4))
    assert seen == [1, 2, 3], f"the callback saw updates {seen}"


def patched_names_are_ours(folder: Path) -> None:
    _ = (transformers.Trainer, transformers.Seq2SeqTrainer)
    theirs = transformers.Trainer
    hf_compat.patch()
    found: dict = {}
    exec(IMPORTS, found)
    for name in ("Trainer", "TrainingArguments", "TrainerCallback", "HfArgumentParser", "get_last_checkpoint"):
        assert found[name].__module__.startswith("hf_compat"), f"{name} is {found[name].__module__}'s"
    trainer = trained(transformers, found["TrainingArguments"](str(folder), **QUIET), train_dataset=toy.tokenized(),
                      data_collator=found["DataCollatorWithPadding"](toy.tiny_tokenizer()))  # fmt: skip
    assert isinstance(trainer, theirs) and (folder / "checkpoint-12" / "manifest.json").is_file()
    hf_compat.unpatch()
    assert transformers.Trainer is theirs


def mirrored_modules_have_their_names(folder: Path) -> None:
    found: dict = {}
    words = IMPORTS.replace("from transformers.trainer", "from hf_compat.trainer")
    exec(words.replace("from transformers.training_args", "from hf_compat.training_args"), found)
    assert found["seed_worker"].__module__.startswith("hf_compat")


def data_of_datasets_is_read(folder: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{**row, "note": "x"} for row in toy.labelled_blocks()])
    args = transformers.TrainingArguments(str(folder), **QUIET)
    map_style = trained(hf_compat, args, train_dataset=rows)
    stream = trained(hf_compat, args, train_dataset=rows.to_iterable_dataset())
    assert map_style.state.global_step == stream.state.global_step == 12


CHECKS = (
    checkpoints_of_theirs_resume_here, checkpoints_of_ours_resume_there, adapters_of_peft_train_alike,
    callbacks_work_in_a_lightning_trainer, patched_names_are_ours, mirrored_modules_have_their_names,
    data_of_datasets_is_read,
)  # fmt: skip


def run_in_this_process(check, folder: Path) -> None:
    status = 1
    try:
        warnings.simplefilter("ignore")
        folder.mkdir(parents=True, exist_ok=True)
        check(folder)
        status = 0
    except BaseException:
        folder.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for package in (transformers, hf_compat):
        _ = (package.Trainer, package.TrainingArguments)
    found = {}
    for check in CHECKS:
        child = os.fork()
        if child == 0:
            run_in_this_process(check, folder / check.__name__)
        status = os.waitpid(child, 0)[1]
        error = (folder / check.__name__).with_suffix(".error")
        said = error.read_text().strip().splitlines()[-1] if error.is_file() else f"ended with {status}"
        found[check.__name__] = "works" if status == 0 else said
    (folder / "guests.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
