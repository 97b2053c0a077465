"""Parts of pushes, cards and searches that need no Hub and no training."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import weakref
from concurrent.futures import Future
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.toy import Classifier
from hf_compat import TrainerState, TrainingArguments
from hf_compat.callbacks.trackers import TensorBoardCallback, WandbCallback
from hf_compat.errors import ArgumentError, HubError, MissingSearchBackend, OverrideError, SearchError, UnknownArgument
from hf_compat.hub import client, model_card
from hf_compat.hub.client import Commit, HubClient
from hf_compat.hub.pushes import Pushes
from hf_compat.search import trials, with_optuna, with_upstream
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
    assert asked[1] == {"license": "unknown", "language": "en"}
    assert [record.name for record in caplog.records].count(model_card.logger.name) == 1


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


def a_client():
    """A client without huggingface_hub."""
    made = HubClient.__new__(HubClient)
    made._jobs, made.missing, made._logged = [], {}, set()
    return made


def test_a_failed_push_is_told_once_for_each_reason(caplog):
    caplog.set_level(logging.INFO)
    made = a_client()
    for message, folder, why in (("first", "", "down."), ("second", "last", "down."), ("third", "", "hf_x is wrong")):
        commit = Commit(repo_id="a/b", message=message, folder=folder, token="hf_x")
        made.note_failure(commit, OSError(why))
    assert made.missing == {"": "third", "last": "second"}
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO", "WARNING"] and "failed: down. No training" in caplog.messages[0]
    assert "hf_x" not in caplog.text and "'second' to a/b" in caplog.messages[1]


@pytest.mark.parametrize("is_stage", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_pushes_that_are_given_up_leave_no_copies(tmp_path, is_stage, has_begun):
    made, future, folder = a_client(), Future(), tmp_path / "stage"
    folder.mkdir()
    if has_begun:
        future.set_running_or_notify_cancel()
    commit = Commit(repo_id="a/b", message="it", source=str(folder), is_stage=is_stage)
    made._jobs = [(commit, future)]
    made._give_up(list(made._jobs), TimeoutError("late"))
    assert made._jobs == [] and made.missing == {"": "it"}
    assert folder.exists() is (has_begun or not is_stage) and future.cancelled() is not has_begun
    made._give_up([(replace(commit, source=str(tmp_path / "gone")), Future())], TimeoutError("late"))


@pytest.mark.parametrize(
    ("patience", "size", "ends"),
    [
        (10.0, 0, "given up"),
        (10.0, 1_000_000, "given up"),
        (10.0, 2_500_000, "sent"),
        (100.0, 0, "sent"),
        (100.0, 0, "stopped"),
    ],
)
def test_a_wait_for_pushes_ends(tmp_path, monkeypatch, caplog, patience, size, ends):
    """After the first wait 10 seconds have passed, and 5 more after each. A megabyte may take 4 seconds."""
    caplog.set_level(logging.INFO)
    made, given = a_client(), []
    (tmp_path / "file").write_bytes(bytes(size))
    futures = [Future(), Future(), Future()]
    futures[0].set_result(None)
    made._jobs = [(Commit(repo_id="a/b", message=f"m{place}", source=str(tmp_path / "none") if place < 2
                          else str(tmp_path)), one) for place, one in enumerate(futures)]  # fmt: skip
    clock = iter([100.0, 100.0, 110.0, 115.0, 120.0, 125.0])
    monkeypatch.setattr(client.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(client, "PATIENCE_SECONDS", patience)
    monkeypatch.setattr(client, "SLOWEST_BYTES_PER_SECOND", 250_000.0)
    waits = []

    def wait(jobs, timeout):
        waits.append((len(jobs), timeout))
        if ends == "stopped":
            raise KeyboardInterrupt
        if len(waits) == 2:
            jobs[0].set_result(None)
        if len(waits) == 4:
            jobs[0].set_result(None)

    monkeypatch.setattr(client.concurrent.futures, "wait", wait)
    monkeypatch.setattr(made, "_give_up", lambda jobs, why: given.append(([one.message for one, _ in jobs], str(why))))
    if ends == "stopped":
        with pytest.raises(KeyboardInterrupt):
            made.wait()
        assert given == [(["m1", "m2"], "you have stopped it")]
    else:
        made.wait()
    if ends == "given up":
        assert given == [(["m2"], "the Hub has not taken it in 15 seconds")]
    if ends == "sent":
        assert given == [] and waits == [(2, 15.0), (2, 15.0), (1, 15.0), (1, 15.0)]
        assert [record.args[0] for record in caplog.records] == ["'m1'", "'m1'", "'m2'", "'m2'"]
        assert [record.args[2:] for record in caplog.records] == [
            (2, size / 1e6, 0.0), (2, size / 1e6, 10.0), (1, size / 1e6, 15.0), (1, size / 1e6, 20.0),
        ]  # fmt: skip


@pytest.mark.parametrize(("is_there", "is_fork", "waits"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_process_waits_at_its_end_for_its_own_pushes(is_there, is_fork, waits):
    class Held:
        waited = 0

        def wait(self):
            Held.waited += 1
            raise KeyboardInterrupt

    held = Held()
    reference = weakref.ref(held)
    if not is_there:
        del held
    client._wait_at_exit(reference, os.getpid() + is_fork)
    assert Held.waited == waits


@pytest.mark.parametrize("missing", [{}, {"": "first", "last": "second"}])
def test_pushes_that_have_not_arrived_are_told_once(missing, caplog):
    pushes = SimpleNamespace(client=SimpleNamespace(missing=dict(missing)), _push_later=lambda: "push it later")
    for _ in range(2):
        Pushes.warn_of_missing(pushes)
    assert pushes.client.missing == {}
    told = ["These pushes have not arrived on the Hub: 'first', 'second'.\n\nHint: push it later."]
    assert caplog.messages == (told if missing else [])


@pytest.mark.parametrize(
    ("facts", "front", "title"),
    [
        ({}, ["tags: ['generated_from_trainer']"], "out"),
        (
            {"language": "de", "license": "mit", "finetuned_from": "base", "tags": "mine", "tasks": ["one", "two"]},
            ["language: de", "license: mit", "base_model: base", "tags: ['mine', 'generated_from_trainer']",
             "pipeline_tag: one"],
            "out",
        ),
        ({"model_name": "named", "dataset": "d", "tags": ["a", "b"]},
         ["tags: ['a', 'b', 'generated_from_trainer']", "datasets: ['d']"], "named"),
        ({"dataset": "d", "dataset_tags": ["t"]}, ["tags: ['generated_from_trainer']", "datasets: ['t']"], "out"),
    ],
)  # fmt: skip
def test_a_short_card_has_its_facts(facts, front, title):
    names = ("language", "license", "finetuned_from", "tags", "tasks", "dataset_tags", "dataset", "model_name")
    card = model_card._short_card(SimpleNamespace(output_dir="some/out/"), dict.fromkeys(names) | facts)
    assert card == "\n".join(["---", *front, "---", "", model_card._OWN_MARK, "", f"# {title}", ""])


@pytest.mark.parametrize("has_board", [False, True])
@pytest.mark.parametrize(("asked", "count"), [(None, 1), (0, 0), (3, 3)])
@pytest.mark.parametrize("fails", [False, True])
def test_ray_gets_a_trainer_that_can_be_sent(monkeypatch, has_board, asked, count, fails):
    board, added = object() if has_board else None, []
    host = SimpleNamespace(model_wrapped=1, callback_handler=SimpleNamespace(model=1), add_callback=added.append)
    host.pop_callback = lambda kind: board if kind is TensorBoardCallback else None

    def search(*words, **options):
        assert words == (host, count, "minimize") and options == {"a": 1} and not added
        assert host.model_wrapped is host.callback_handler.model is None
        if fails:
            raise RuntimeError("odd")
        return "1", 0.5, {}, "analysis"

    monkeypatch.setattr(with_upstream, "_upstream", lambda backend, direction: search if backend == "ray" else None)
    if fails:
        with pytest.raises(RuntimeError, match="odd"):
            with_upstream.search_ray(host, asked, "minimize", {"a": 1})
    else:
        assert with_upstream.search_ray(host, asked, "minimize", {"a": 1}) == ("1", 0.5, {}, "analysis")
    assert added == ([board] if has_board else [])


class OwnWandb(WandbCallback):
    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("options", "ranks", "told"),
    [
        ({}, 1, None),
        ({"project": "p", "name": None, "metric": "eval/loss"}, 1, None),
        ({"projekt": "p"}, 1, "did you mean `project`"),
        ({"name": ""}, 1, "is not a text"),
        ({"name": 3}, 1, "is not a text"),
        ({}, 2, "there are 2"),
        ({}, 1, "No run of the sweep s7"),
    ],
)
@pytest.mark.parametrize("held", [None, "its own", "another's"])
@pytest.mark.parametrize("space", [{}, {"metric": {"goal": "maximize"}}])
def test_a_sweep_has_what_wandb_needs(monkeypatch, options, ranks, told, held, space):
    held = {"its own": OwnWandb(), "another's": object()}.get(held)
    added, space = [], dict(space)
    host = SimpleNamespace(args=SimpleNamespace(world_size=ranks), hp_space=lambda trial: space)
    host.add_callback, host.pop_callback = added.append, {WandbCallback: held}.get

    def search(*words, **given):
        assert words == (host, 4, "minimize")
        assert given == {name: value for name, value in options.items() if value is not None}
        assert host.hp_space(None) is space and "metric" in space
        return None if told else "id", 0.5, {}, "s7"

    monkeypatch.setattr(with_upstream, "_upstream", lambda backend, direction: search if backend == "wandb" else None)
    kinds = []
    known = lambda kind: kinds.append(kind) or kind  # noqa: E731
    monkeypatch.setattr(with_upstream, "known_to_transformers", known)
    monkeypatch.setattr(WandbCallback, "__init__", lambda self: None)
    goal = dict(space).get("metric", {})
    if told is not None:
        with pytest.raises((ArgumentError, UnknownArgument, SearchError), match=told):
            with_upstream.search_wandb(host, 4, "minimize", options)
    else:
        assert with_upstream.search_wandb(host, 4, "minimize", options) == ("id", 0.5, {}, "s7")
        is_own = isinstance(held, OwnWandb)
        assert kinds == [OwnWandb if is_own else WandbCallback] and space["metric"] == goal
        assert added[0] is held if is_own else type(added[0]) is WandbCallback


@pytest.mark.parametrize("backend", ["optuna", "ray", "wandb"])
def test_a_trial_sets_names_and_values(backend):
    asked, trial = [], {"a": 1, "wandb": {}}
    host = SimpleNamespace(hp_space=lambda trial: asked.append(trial) or {"b": 2})
    found = trials.space_of(host, trials.HPSearchBackend(backend), trial)
    assert found == {"optuna": {"b": 2}, "ray": {"a": 1}, "wandb": {"a": 1, "wandb": {}}}[backend]
    assert asked == ([trial] if backend == "optuna" else [])
    if backend == "optuna":
        host.hp_space = lambda trial: [("b", 2)]
        with pytest.raises(OverrideError, match="is not a dict"):
            trials.space_of(host, trials.HPSearchBackend(backend), trial)


@pytest.mark.parametrize("direction", ["minimize", ["minimize"]])
def test_searches_of_upstream_have_one_direction(monkeypatch, direction):
    monkeypatch.setattr(with_upstream, "of_transformers", lambda *words: words)
    if direction == "minimize":
        found = with_upstream._upstream("ray", direction)
        assert found == ("integrations.integration_utils", "run_hp_search_ray", "`backend='ray'`")
    else:
        with pytest.raises(ArgumentError, match="ray takes one"):
            with_upstream._upstream("ray", direction)
