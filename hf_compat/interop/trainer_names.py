"""Names of upstream's Trainer whose overrides nothing calls here, or without machinery here: what to do instead."""

from __future__ import annotations

_LIGHTNINGS_LOOP = (
    "Lightning runs the epochs and updates; override `training_step`, `get_batch_samples`, `_inner_training_loop` as a "
    "whole, or use a callback's events"
)
_ONE_MODEL_A_DEVICE = "a tensor, a sequence or a context is never shared between devices here"

# Overrides that nothing would call: upstream's method → why, and what to override instead.
REFUSED_OVERRIDES = {
    "_run_epoch": _LIGHTNINGS_LOOP,
    "_prepare_for_training": _LIGHTNINGS_LOOP,
    "_build_accelerator_args": "there is no Accelerator; override `create_accelerator_and_postprocess`, or set the "
    "training arguments",
    "_defer_fsdp_gradient_reduction": "Lightning's strategy reduces gradients at the end of an update",
    "_sync_replicated_trainable_parameters": _ONE_MODEL_A_DEVICE,
    "_has_mixed_mesh_grads": _ONE_MODEL_A_DEVICE,
    "_mixed_mesh_grad_norm": _ONE_MODEL_A_DEVICE + "; set `max_grad_norm`, or clip in `on_pre_optimizer_step`",
}

# Methods that a release of upstream called, and neither 5.23 nor this Trainer calls → what does their work today.
FORMER_METHODS = {
    "_training_step": "override `training_step`",
    "_prediction_loop": "override `evaluation_loop`",
    "_log": "override `log`",
    "get_optimizers": "override `create_optimizer_and_scheduler`",
    "prediction_loop": "override `evaluation_loop`",
    "_gather_and_numpify": "override `evaluation_loop`, or use `preprocess_logits_for_metrics`",
    "_align_special_tokens": "set the model's tokens before it is given to the Trainer",
    "_activate_neftune": "leave `neftune_noise_alpha` out, and put a hook on the embeddings in `on_train_begin`",
    "_deactivate_neftune": "leave `neftune_noise_alpha` out, and take the hook off in `on_train_end`",
    "compare_trainer_and_checkpoint_args": "compare them in `on_train_begin`",
    "propagate_args_to_deepspeed": "set the arguments `deepspeed` and `per_device_train_batch_size`",
    "_fsdp_qlora_plugin_updates": "set the argument `fsdp_config`",
    "ipex_optimize_model": "prepare the model before it is given to the Trainer",
    "torch_jit_model_eval": "prepare the model before it is given to the Trainer",
}

# Names of upstream's Trainer that a release has and nobody overrides, without machinery here → what to do.
ABSENT = {
    "_add_sm_patterns_to_gitignore": "leave it out: `push_to_hub` pushes checkpoints and the model alone",
    "_deepspeed_sp_compute_loss": _ONE_MODEL_A_DEVICE + "; call `compute_loss`",
    "_is_attention_mask_causal": _ONE_MODEL_A_DEVICE + ", so that no mask has to be looked at",
    "_save_tpu": "call `save_model`, or override `_save`",
}
