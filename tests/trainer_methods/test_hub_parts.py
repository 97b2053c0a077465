"""Parts of pushes, cards and searches that need no Hub and no training."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from concurrent.futures import Future
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.toy import Classifier
from hf_compat import TrainerState, TrainingArguments
from hf_compat.errors import ArgumentError, HubError, MissingSearchBackend, OverrideError, SearchError, UnknownArgument
from hf_compat.hub import client, model_card
from hf_compat.hub.pushes import Pushes
from hf_compat.search import trials, with_optuna
from hf_compat.search.trials import check_search, set_from_trial


class Answered(OSError):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status)


class OfflineModeIsEnabled(ConnectionError):
    pass


@pytest.mark.parametrize(
    ("error", "way_out", "hint"),
    [
        *((Answered(status), None, "log in with `hf auth login`") for status in (401, 403, 404)),
        *((Answered(status), None, "check `hub_model_id` and the connection") for status in (400, 402, 405, 500)),
        (OfflineModeIsEnabled("offline"), None, "unset HF_HUB_OFFLINE"),
        (OfflineModeIsEnabled("offline"), "push it later", "push it later"),
        (Answered(401), "push it later", "push it later"),
        (ValueError("odd"), None, "check `hub_model_id`"),
        (HubError("own"), None, "check `hub_model_id`"),
    ],
)
def test_an_error_of_the_hub_is_caught_as_theirs_and_says_the_way_out(error, way_out, hint):
    found = client.hub_error("The push has failed", error, None, way_out)
    assert isinstance(found, HubError) and isinstance(found, type(error))
    assert str(found).startswith(f"The push has failed: {error}\n\nHint: {hint}")
    assert vars(found) == vars(error)


def test_an_error_of_another_layout_is_the_packages_alone():
    class Layout(UnicodeDecodeError):
        pass

    found = client.hub_error("It failed", Layout("utf-8", b"a", 0, 1, "odd"), None)
    assert type(found) is HubError and "It failed: 'utf-8' codec" in str(found)


@pytest.mark.parametrize(
    ("error", "token", "text"),
    [
        (ValueError("a  b\nhf_secret c"), "hf_secret", "a b <HUB_TOKEN> c"),
        (ValueError("a"), "", "a"),
        (ValueError("a True"), True, "a True"),
        (ValueError(), None, "ValueError"),
    ],
)
def test_a_reason_is_one_line_without_the_token(error, token, text):
    assert client.reason_of(error, token) == text
    outer = RuntimeError("outer")
    outer.__cause__ = error
    assert client.reason_of(outer, token) == text
    other = OSError("outer")
    other.__cause__ = error
    assert client.reason_of(other, token) == "outer"


def test_pushes_are_waited_for(monkeypatch):
    jobs, waited = [Future(), Future()], []
    monkeypatch.setattr(client.concurrent.futures, "wait", waited.append)
    client.PushInProgress(jobs).wait_until_done()
    assert waited == [jobs] and client.PushInProgress().is_done()


@pytest.mark.parametrize("least", [3, 4])
def test_what_is_pushed_is_linked_or_copied(tmp_path, least):
    for name in ("fixed", "large", "small"):
        (tmp_path / name).write_text(name[:3] if name != "small" else "s")
    files = {name: str(tmp_path / name) for name in ("fixed", "large", "small", "gone")}
    stage = client.set_aside(files, str(tmp_path / "out"), {"fixed": files["fixed"]}, least)
    linked = {name for name in os.listdir(stage) if os.path.isfile(tmp_path / name)
              and os.path.samefile(os.path.join(stage, name), tmp_path / name)}  # fmt: skip
    assert linked == ({"fixed", "large"} if least == 3 else {"fixed"})
    with pytest.raises(FileNotFoundError):
        client.set_aside({"gone": files["gone"]}, str(tmp_path / "out"), {"gone": files["gone"]}, least)
    assert len([name for name in os.listdir(tmp_path / "out") if name.startswith(client.STAGE_PREFIX)]) == 1


def test_cards_of_the_user_are_kept_once_each(tmp_path, caplog):
    path = str(tmp_path / "README.md")
    model_card.keep_written_card(path)
    kept = ["_README.before.md", "_README.before-2.md", "_README.before-3.md"]
    for number, text in enumerate(("mine", "mine, too", "and this")):
        for _ in range(2):  # the second is known
            (tmp_path / "README.md").write_text(text)
            model_card.keep_written_card(path)
        assert sorted(os.listdir(tmp_path)) == sorted([*kept[: number + 1], "README.md"])
    assert [(tmp_path / name).read_text() for name in kept] == ["mine", "mine, too", "and this"]
    for text in (model_card._OWN_MARK, "---\nlibrary_name: peft\n---"):
        (tmp_path / "README.md").write_text(text)
        model_card.keep_written_card(path)
        assert (tmp_path / "README.md").read_text() == text
    assert len(caplog.records) == 3


def test_a_card_whose_licence_the_hub_does_not_give_has_none(tmp_path, monkeypatch, caplog):
    cards = importlib.import_module("transformers.modelcard")
    asked = []

    class Summary:
        def __init__(self, licence):
            self.license = licence

        @classmethod
        def from_trainer(cls, trainer, **facts):
            asked.append(facts)
            if facts["license"] is None:
                raise OSError("offline")
            return cls(facts["license"])

        def to_model_card(self):
            return f"licence: {self.license}"

    monkeypatch.setattr(cards, "TrainingSummary", Summary)
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    for licence, text in ((None, "licence: None"), ("mit", "licence: mit")):
        facts = {"license": licence, "language": "en"}
        assert model_card.card_of(Classifier(), args, [], (None, None), facts) == text
    assert asked[1] == {"license": "unknown", "language": "en"} and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("options", "ranks", "error"),
    [
        ({"n_jobs": 1, "study_name": "a", "timeout": 3, "catch": ()}, 2, None),
        ({"catch": (ValueError,)}, 1, None),
        ({"catch": (ValueError,)}, 2, "with 2 processes an error of one leaves the others waiting"),
        ({"n_jobs": 2}, 1, "they run one after the other"),
        ({"direction": "minimize"}, 1, "unknown argument"),
        ({"studyname": "a"}, 1, "did you mean `study_name`"),
        ({"n_trials": 3}, 1, "unknown argument"),
    ],
)
def test_options_of_a_search(options, ranks, error):
    found = ""
    try:
        with_optuna._check_options(options, ranks)
    except (ArgumentError, UnknownArgument) as raised:
        found = str(raised)
    assert bool(found) == (error is not None) and (error or "") in found


@pytest.mark.parametrize(
    ("count", "direction", "is_known"),
    [(None, "minimize", True), (0, "maximize", True), (2, ["minimize", "maximize"], True), (-1, "minimize", False),
     (True, "minimize", False), (1.0, "minimize", False), (1, [], False), (1, ["minimize", "up"], False),
     (1, "up", False), (1, (object(),), True)],
)  # fmt: skip
def test_trials_and_directions_of_a_search(count, direction, is_known):
    found = []
    for model_init, kind in ((Classifier, ArgumentError), (None, SearchError)):
        try:
            check_search(model_init, count, direction)
        except kind as error:
            found.append(type(error))
    assert found == [ArgumentError] * (not is_known) + [SearchError]


@pytest.mark.parametrize(
    ("name", "value", "kept", "told"),
    [
        ("seed", 17.3, 17, False),
        ("learning_rate", 1, 1.0, False),
        ("warmup_steps", "3", 3, False),
        ("bf16", "false", False, False),
        ("lr_scheduler_type", "cosine", "cosine", False),
        ("save_total_limit", None, None, False),
        ("optim_args", "a=1", "a=1", False),
        ("neither", 1, None, True),
        ("per_device_eval_batch_size", 3, 3, False),
    ],
)
def test_values_of_a_trial(tmp_path, caplog, name, value, kept, told):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    set_from_trial(args, name, value)
    found = getattr(args, name, None)
    assert found == kept and type(getattr(found, "value", found)) is type(kept)
    assert (f"{name}=1, which is not a field" in caplog.text) == told


def test_a_value_that_the_trainer_has_read_is_told_if_it_differs(tmp_path, caplog):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    set_from_trial(args, "log_level", args.log_level)
    set_from_trial(args, "seed", args.seed + 1)
    assert not caplog.text
    set_from_trial(args, "log_level", "debug")
    assert "The trial sets log_level, which the Trainer has read before the search" in caplog.text
    with pytest.raises(ArgumentError, match="The trial sets `learning_rate='fast'`, which cannot be set"):
        set_from_trial(args, "learning_rate", "fast")


def test_memory_of_a_trial_is_given_back():
    handler = SimpleNamespace(model=1, optimizer=1, lr_scheduler=1)
    cleared = []
    host = SimpleNamespace(
        callback_handler=handler, accelerator=SimpleNamespace(clear=lambda: cleared.append(1)),
        **dict.fromkeys(("model", "model_wrapped", "optimizer", "lr_scheduler", "lightning_trainer"), torch.zeros(1)),
        _fit_model_state=1, _compiled_model=1,
    )  # fmt: skip
    with_optuna.release_model(host)
    rest = {
        name: value for name, value in itertools.chain(vars(host).items(), vars(handler).items()) if value is not None
    }
    assert rest.keys() == {"callback_handler", "accelerator"} and cleared == [1]


@pytest.mark.parametrize(
    ("strategy", "folder", "epoch", "message"),
    [
        ("steps", "checkpoint-3", None, "step 3"),
        ("steps", "other", None, "step 7"),
        ("epoch", "checkpoint-3", None, "epoch 2"),
        ("epoch", "checkpoint-3", 1.0, "epoch 1"),
    ],
)
def test_a_push_within_a_training_names_its_checkpoint(tmp_path, strategy, folder, epoch, message):
    checkpoint = tmp_path / folder
    checkpoint.mkdir()
    if epoch is not None:
        TrainerState(epoch=epoch).save_to_json(str(checkpoint / "trainer_state.json"))
    host = SimpleNamespace(args=SimpleNamespace(save_strategy=strategy), state=TrainerState(global_step=7, epoch=2.5))
    assert Pushes._progress(SimpleNamespace(_host=host), str(checkpoint)) == f"Training in progress, {message}"


@pytest.mark.parametrize(
    ("outcome", "trains", "found"),
    [
        (3, False, 3),
        (3, True, 3),
        (ValueError("odd"), True, None),
        (ValueError("odd"), False, "odd"),
        (KeyboardInterrupt(), False, None),
        ("never", False, "the Hub has not taken it"),
    ],
)
def test_a_push_that_is_waited_for_fails_outside_of_a_training(tmp_path, outcome, trains, found):
    future = Future()
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    elif outcome != "never":
        future.set_result(outcome)
    host = SimpleNamespace(args=SimpleNamespace(output_dir=tmp_path), hub_model_id="a/b", is_in_train=trains)
    hub = SimpleNamespace(submit=lambda commit: future, wait=lambda: None, missing={"": "message"})
    pushes = SimpleNamespace(_host=host, client=hub, _push_later=lambda: "push it later")
    push = functools.partial(Pushes.push_folder, pushes, "message", blocking=True, token=None, revision=None)
    if isinstance(found, str):
        with pytest.raises(HubError, match=f"(?s){found}.*push it later"):
            push()
        assert not hub.missing
    else:
        assert push() == found and hub.missing


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("every_save", [""]),
        ("checkpoint", ["", "last-checkpoint"]),
        ("all_checkpoints", ["", "checkpoint-3"]),
        ("end", [""]),
    ],
)
def test_a_strategy_of_pushes_sends_checkpoints_too(tmp_path, strategy, folders):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part", "b": "absent"}}')
    (checkpoint / "part").write_text("")
    sent, tokenizers = [], []
    saving = SimpleNamespace(save_pretrained=tokenizers.append)
    for tokenizer in (None, saving):
        args = SimpleNamespace(output_dir=tmp_path, hub_strategy=strategy)
        pushes = SimpleNamespace(_host=SimpleNamespace(args=args, processing_class=tokenizer))
        pushes.client = SimpleNamespace(files_of=lambda folder, ignored=(): {folder: folder})
        pushes._progress = lambda checkpoint: "message"
        pushes._submit = lambda files, unchanging, message, folder: sent.append((folder, message, sorted(unchanging)))
        assert len(Pushes.submit_checkpoint(pushes, str(checkpoint))) == len(folders)
    assert [folder for folder, *_ in sent] == folders * 2 and tokenizers == [str(tmp_path)]
    assert sent[0][2] == ["config.json", "model.safetensors.index.json", "part"]
    assert (tmp_path / "part").exists() and all(
        message == "message, checkpoint" for folder, message, _ in sent if folder
    )


@pytest.mark.parametrize(
    ("objective", "is_one"),
    [
        (0.5, True),
        (1, True),
        ([0.5, 1], True),
        (torch.tensor(0.5), True),
        (torch.ones(2), False),
        (np.ones(2), False),
        (np.ones(1), True),
        ([torch.tensor([1.0])], True),
        ([], False),
        ("0.5", False),
        ([0.5, "x"], False),
        (1j, False),
        (None, False),
        (Fraction(1, 2), True),
        (np.float32(0.5), True),
    ],
)
def test_an_objective_is_a_number_or_several(objective, is_one):
    host = SimpleNamespace(compute_objective=lambda metrics: objective)
    try:
        assert trials.checked_objective(host, {"eval_loss": 1.0}) is objective and is_one
    except OverrideError:
        assert not is_one


@pytest.mark.parametrize(
    ("direction", "metrics", "told"),
    [
        ("minimize", {"eval_loss": 1.0}, ""),
        ("maximize", {"eval_loss": 1.0}, "direction='minimize'"),
        ("minimize", {"eval_accuracy": 1.0}, "direction='maximize'"),
        ("maximize", {"eval_accuracy": 1.0}, ""),
        (["maximize"], {"eval_loss": 1.0}, ""),
        (None, {"eval_loss": 1.0}, ""),
    ],
)
def test_a_search_in_the_wrong_direction_is_told(monkeypatch, direction, metrics, told):
    seen = []
    monkeypatch.setattr(trials, "warn_once", seen.append)
    host = SimpleNamespace(compute_objective=trials.search.default_compute_objective, _search_direction=direction)
    trials.checked_objective(host, metrics)
    assert len(seen) == bool(told) and told in "".join(seen)
    host.compute_objective = lambda metrics: 1.0  # the user's own
    trials.checked_objective(host, metrics)
    assert len(seen) == bool(told)


@pytest.mark.parametrize(
    ("backend", "named", "found"),
    [
        ("optuna", None, "run-3"),
        ("optuna", "mine", "mine"),
        ("wandb", None, "run-w"),
        ("ray", None, "run-r"),
        ("optuna", "", None),
        ("optuna", 3, None),
    ],
)
def test_a_trial_has_a_name(monkeypatch, backend, named, found):
    tune = SimpleNamespace(get_context=lambda: SimpleNamespace(get_trial_id=lambda: "r"))
    modules = {"wandb": SimpleNamespace(run=SimpleNamespace(id="w")), "ray.tune": tune}
    monkeypatch.setattr(trials.importlib, "import_module", modules.get)
    name = functools.partial(
        trials.name_of_trial,
        trials.HPSearchBackend(backend),
        SimpleNamespace(number=3),
        None if named is None else lambda trial: named,
    )
    if found is None:
        with pytest.raises(ArgumentError, match="`hp_name` has returned"):
            name()
    else:
        assert name() == found


@pytest.mark.parametrize(
    ("wanted", "installed", "found"),
    [
        (None, {"optuna", "wandb", "transformers"}, "optuna"),
        (None, {"wandb", "transformers"}, "wandb"),
        (None, {"wandb"}, None),
        (None, set(), None),
        ("wandb", {"optuna", "wandb", "transformers"}, "wandb"),
        ("wandb", {"optuna", "wandb"}, None),
        ("optuna", {"optuna"}, "optuna"),
        ("ray", {"optuna"}, None),
    ],
)
def test_a_backend_is_one_that_is_installed(monkeypatch, wanted, installed, found):
    monkeypatch.setattr(trials, "is_installed", lambda module: module in installed)
    if found is None:
        with pytest.raises(MissingSearchBackend):
            trials.chosen_backend(wanted)
    else:
        assert trials.chosen_backend(wanted).value == found
