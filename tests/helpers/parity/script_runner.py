"""Run scripts one after another, unchanged, under one engine, each in a process of its own.

    python script_runner.py python|hf-compat FOLDER

As in runner.py, everything is imported once; each script gets a fork of that process. `hf-compat` runs what the command
`hf-compat run script.py` runs.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import traceback
from pathlib import Path

import datasets  # noqa: F401 - loaded before forking
import torch
import transformers

SCRIPTS = Path(__file__).resolve().parents[2] / "parity" / "scripts"
COMMON = (
    "--use_cpu --disable_tqdm true --report_to none --logging_steps 1 --learning_rate 3e-3 "
    "--per_device_train_batch_size 4 --per_device_eval_batch_size 3"
)
GENERATE = "--predict_with_generate --eval_strategy steps --eval_steps 2 --gradient_accumulation_steps 2"
SUMMARISE = (
    f"summarise.py --model_name_or_path t5 --data . --do_train --do_eval --do_predict {GENERATE} --save_steps 2 "
    "--num_beams 2"
)
BEST = "--load_best_model_at_end --save_strategy epoch --eval_strategy epoch --save_total_limit 1"
# The folder that a run writes into → its words; a run may go on from a checkpoint of one before it.
RUNS = {
    "summary": f"{SUMMARISE} --num_train_epochs 2",
    "resumed": f"{SUMMARISE} --num_train_epochs 2 --resume_from_checkpoint summary/checkpoint-2",
    "translation": "translate.py --model marian --pairs pairs.jsonl --predict_with_generate --generation_max_length 8 "
    f"--generation_num_beams 2 --label_smoothing_factor 0.1 --num_train_epochs 2 --metric_for_best_model sum {BEST}",
    "translation_of_one_length": "translate.py --model marian --pairs pairs.jsonl --pad_to_max_length "
    f"--predict_with_generate --num_train_epochs 1 --metric_for_best_model exact {BEST}",
    "answers": f"answer.py t5 --max_steps 3 --generation_max_length 6 --save_strategy no {GENERATE}",
    "images": "classify_images.py vit --num_train_epochs 2 --remove_unused_columns false --metric_for_best_model "
    f"accuracy {BEST}",
    "images_resumed": "classify_images.py vit --num_train_epochs 2 --remove_unused_columns false "
    "--resume_from_checkpoint images/checkpoint-6",
    "masked_images": "mask_images.py vit --num_train_epochs 2 --eval_strategy epoch --remove_unused_columns false "
    "--label_names bool_masked_pos --save_strategy no --warmup_steps 2 --weight_decay 0.05",
}


def words_of(name: str) -> list[str]:
    script, *words = RUNS[name].split()
    return [str(SCRIPTS / script), *words, "--output_dir", name, *COMMON.split()]


def read_files_by_their_own_names() -> None:
    """Let transformers' Trainer read weights as `from_pretrained` does: by itself it leaves a ViT's encoder as it is.

    docs/differences.md has it: files of some models have other names than the model.
    """

    def load(model, weights, strict=True, **options):
        if not strict and not set(weights) <= set(model.state_dict()):
            with torch.random.fork_rng(devices=[]):
                read = type(model).from_pretrained(None, config=model.config, state_dict=dict(weights))
            weights = read.state_dict()
        return torch.nn.Module.load_state_dict(model, weights, strict, **options)

    transformers.PreTrainedModel.load_state_dict = load


def run_under_python(script: str, *words: str) -> None:
    read_files_by_their_own_names()
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def run_under_hf_compat(*words: str) -> None:
    from hf_compat.cli.run import main

    assert main(words) == 0


ENGINES = {"python": run_under_python, "hf-compat": run_under_hf_compat}


def run_in_this_process(engine: str, name: str) -> None:
    status = 1
    try:
        ENGINES[engine](*words_of(name))
        status = 0
    except BaseException:
        Path(f"{name}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    engine, folder = sys.argv[1:]
    os.chdir(folder)
    torch.set_num_threads(1)
    if engine == "hf-compat":
        import hf_compat

        _ = (hf_compat.Seq2SeqTrainer, hf_compat.HfArgumentParser)
    else:
        _ = (transformers.Seq2SeqTrainer, transformers.HfArgumentParser)
    for name in RUNS:
        shutil.rmtree(name, ignore_errors=True)
        child = os.fork()
        if child == 0:
            run_in_this_process(engine, name)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
