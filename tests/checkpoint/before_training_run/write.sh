#!/usr/bin/env bash
# Writes the checkpoints of this folder again: write.sh PYTHON OLD NEW, with a checkout of 9c7ad71 and one of today.
set -eu
python=$1 old=$2 new=$3
script=$new/tests/checkpoint/old_runs.py here=$new/tests/checkpoint/before_training_run
runs=$(mktemp -d)
cd "$old"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 PYTHONPATH=$old
for form in plain epoch_end stream native adapter; do
  "$python" "$script" hf_compat $form "$runs/$form"
done
"$python" "$script" hf_compat stopped "$runs/stopped" stop
for form in ddp fsdp fsdp_sharded; do
  "$python" -m hf_compat.doors.cli run --devices 2 "$script" hf_compat $form "$runs/$form"
done
# What transformers gives without an interruption, and what the Lightning forms gave.
for form in plain epoch_end stopped stream; do
  "$python" "$script" transformers $form "$runs/of_transformers/$form"
done
"$python" -m torch.distributed.run --standalone --nproc_per_node 2 "$script" transformers ddp "$runs/of_transformers/ddp"
PYTHONPATH=$new "$python" "$here/collect.py" "$runs"
