#!/usr/bin/env bash
# Writes the checkpoints of this folder again: write.sh PYTHON CHECKOUT, with a checkout of the version that writes them.
set -eu
python=$1 checkout=$2
here=$(cd "$(dirname "$0")" && pwd) && script=$here/../old_runs.py
runs=$(mktemp -d)
cd "$checkout"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 PYTHONPATH=$checkout
for form in plain epoch_end stream native adapter; do
  "$python" "$script" hf_compat $form "$runs/$form"
done
"$python" "$script" hf_compat stopped "$runs/stopped" stop
for form in ddp fsdp fsdp_sharded; do
  "$python" -m hf_compat.cli.main run --devices 2 "$script" hf_compat $form "$runs/$form"
done
# What transformers gives without an interruption, and what the Lightning forms gave.
for form in plain epoch_end stopped stream; do
  "$python" "$script" transformers $form "$runs/of_transformers/$form"
done
"$python" -m torch.distributed.run --standalone --nproc_per_node 2 "$script" transformers ddp "$runs/of_transformers/ddp"
"$python" "$here/collect.py" "$runs"
