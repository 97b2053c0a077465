"""What the name of a metric says of it: an error falls as a model gets better, and a score rises."""

from __future__ import annotations

import re

# Parts of names of metrics that fall as a model gets better. Those of `_FALLING_AT_END` are also words.
_FALLING = frozenset(
    (
        *("wer", "cer", "eer", "fpr", "fnr", "error", "errors", "nll", "bpc", "bpb", "bits", "perplexity", "ppl"),
        *("mse", "rmse", "mae", "mape", "smape", "msle", "rmsle", "nmse", "nrmse", "wape", "mase", "crps", "deviance"),
        *("loss", "losses", "logloss", "crossentropy", "entropy", "divergence", "hinge", "regret", "ece", "brier"),
        *("false", "distance", "hausdorff", "chamfer", "wasserstein", "lpips", "niqe", "brisque", "latency", "runtime"),
        *("miss", "failure", "failures", "mistakes", "misclassification", "misclassified", "hallucination", "pinball"),
        *("hter", "jer", "acer", "dcf", "mindcf", "mcd", "medae", "sse", "rss", "rmsd", "mpjpe", "epe", "kld"),
    )
)
_FALLING_AT_END = frozenset(
    (
        *("ter", "mer", "wil", "der", "fer", "per", "err", "fid", "kid", "fad", "kl", "emd", "mmd", "hamming"),
        *("levenshtein", "residual", "residuals", "cost", "penalty", "wrong", "toxicity"),
    )
)
_NEGATED = frozenset(("neg", "negative", "minus", "inverse", "inv"))
_RISING_AT_END = frozenset(
    (
        *("accuracy", "acc", "f1", "precision", "recall", "auc", "auroc", "correlation", "r2", "gain", "similarity"),
        *("reduction", "improvement", "bonus"),
    )
)
_RISING = _RISING_AT_END | {"bleu", "sacrebleu", "rouge", "meteor", "iou", "dice", "ndcg", "mrr", "spearman", "pearson"}


def is_error(name: str) -> bool:
    """Whether a name is that of an error: `wer`, `eval_mse`, `MeanSquaredError`."""
    parts, last = _parts(name)
    is_falling = not _FALLING.isdisjoint(parts) or any("error" in part for part in parts) or last in _FALLING_AT_END
    return is_falling and last not in _RISING_AT_END and not is_negated(name)


def is_negated(name: str) -> bool:
    """Whether a name is that of an error times -1, or below 1, which rises: `neg_log_loss`, `1-wer`."""
    return not _NEGATED.isdisjoint(_parts(name)[0]) or "1-" in name  # a data set of several may be named `1`


def is_score(name: str) -> bool:
    """Whether a name is that of a score: `accuracy`, `eval_f1_macro`."""
    parts, _ = _parts(name)
    return not is_negated(name) and not is_error(name) and not _RISING.isdisjoint(parts)


def _parts(name: str) -> tuple[list[str], str]:
    """The words of a name, and its last part. Parts may have digits, as `f1` does."""
    words = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    words += ["minus"] * name.removeprefix("eval_").startswith("-")
    parts = re.split(r"[^a-z0-9]+", name.lower())
    return [*words, *parts], parts[-1]
