"""What names of metrics are taken for: an error, which falls, a score, which rises, or a negated one."""

from __future__ import annotations

import pytest

from hf_compat.hf.metric_names import is_error, is_score

ERRORS = [
    "wer", "cer", "eer", "fpr", "fnr", "error", "errors", "nll", "bpc", "bpb", "bits", "perplexity", "ppl", "mse",
    "rmse", "mae", "mape", "smape", "msle", "rmsle", "nmse", "nrmse", "wape", "mase", "crps", "deviance", "loss",
    "losses", "logloss", "crossentropy", "entropy", "divergence", "hinge", "regret", "ece", "brier", "false",
    "distance", "hausdorff", "chamfer", "lpips", "latency", "runtime", "wasserstein", "niqe", "brisque", "miss",
    "failure", "failures", "mistakes", "misclassification", "misclassified", "hallucination", "pinball", "hter",
    "jer", "acer", "dcf", "mindcf", "mcd", "medae", "sse", "rss", "rmsd", "mpjpe", "epe", "kld",
]  # fmt: skip
ERRORS_AT_END = [
    "ter", "mer", "wil", "der", "fer", "per", "err", "fid", "kid", "kl", "emd", "fad", "mmd", "hamming",
    "levenshtein", "residual", "residuals", "cost", "penalty", "wrong", "toxicity",
]  # fmt: skip
SCORES = ["bleu", "sacrebleu", "rouge", "meteor", "iou", "dice", "ndcg", "mrr", "spearman", "pearson"]
SCORES_AT_END = [
    "accuracy", "acc", "f1", "precision", "recall", "auc", "auroc", "correlation", "r2", "gain", "similarity",
    "reduction", "improvement", "bonus",
]  # fmt: skip


def judged(*names: str) -> set[str]:
    return {"error" if is_error(name) else "score" if is_score(name) else "open" for name in names}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_one_wherever_it_stands(name):
    assert judged(name, f"eval_{name}", f"{name}_of_words", f"Mean{name.capitalize()}Value") == {"error"}
    assert judged(f"{name}_accuracy") == {"score"}
    for negated in ("neg", "negative", "minus", "inverse", "inv"):
        assert judged(f"{negated}_{name}") == {"open"}


@pytest.mark.parametrize("name", ERRORS_AT_END)
def test_a_short_error_is_one_at_the_end_alone(name):
    assert judged(name, f"eval_{name}") == {"error"} and not is_error(f"{name}_words")


@pytest.mark.parametrize("name", [*SCORES, *SCORES_AT_END])
def test_a_score_rises_wherever_it_stands(name):
    assert judged(name, f"eval_{name}", f"eval_{name}_macro", f"{name}@1") == {"score"}
    assert judged(f"neg_{name}") == {"open"}


def test_a_number_before_a_name_turns_it_round():
    assert judged("1-wer", "eval_1_minus_wer", "1-f1") == {"open"} and judged("wer_1", "wer_2") == {"error"}
    assert judged("step", "layer_norm", "answer") == {"open"} and judged("eval_1_wer") == {
        "error"
    }  # a data set named 1
