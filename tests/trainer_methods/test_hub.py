"""Pushes to a local server of the Hub's interface arrive as those of transformers' Trainer do."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from concurrent.futures import Future
from pathlib import Path

import huggingface_hub
import pytest
import transformers

import hf_compat
from helpers import toy
from helpers.hub_runs import TOKEN, make, pushed_by
from helpers.hub_server import running_hub, talked_to
from hf_compat import Trainer
from hf_compat.checkpoint.reading import is_ours_alone
from hf_compat.errors import HubError, MissingPackage
from hf_compat.hub import model_card
from hf_compat.hub.client import PushInProgress

# huggingface_hub's own call of its HTTP library
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
STRATEGIES = ["end", "every_save", "checkpoint", "all_checkpoints"]
# What differs in bytes: arguments without secrets, the fused optimizer's container, speeds in the log.
NOT_COMPARED = ("training_args.bin", "optimizer.pt", "trainer_state.json")


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as server, talked_to(monkeypatch, server):
        yield server


def content(name, data):
    """Return a file's content, whatever its format."""
    return data if not name.endswith(".safetensors") else hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_arrives_is_upstreams(tmp_path, monkeypatch, strategy):
    values = {"hub_strategy": strategy, "eval_strategy": "steps", "eval_steps": 2, "hub_revision": "dev"}
    theirs, _ = pushed_by(transformers, tmp_path / "theirs", monkeypatch, **values)
    ours, tokens = pushed_by(hf_compat, tmp_path / "ours", monkeypatch, **values)
    assert [(c.repo, c.revision, c.message) for c in ours] == [(c.repo, c.revision, c.message) for c in theirs]
    assert len(ours) == {"end": 1, "every_save": 3}.get(strategy, 5)
    assert tokens - {None} == {f"Bearer {TOKEN}"}
    for mine, other in zip(ours, theirs, strict=True):
        assert {name for name in mine.files if not is_ours_alone(name)} == set(other.files)
        compared = [name for name in other.files if not name.endswith(NOT_COMPARED)]
        assert {n: content(n, mine.files[n]) for n in compared} == {n: content(n, other.files[n]) for n in compared}
        assert not [name for name, data in mine.files.items() if TOKEN.encode() in data]


def test_a_card_has_the_name_that_is_given(tmp_path, hub):
    make(tmp_path, max_steps=1).push_to_hub(model_name="Mine")
    assert huggingface_hub.ModelCard(hub.tree("me/run")["README.md"].decode()).data.model_name == "Mine"


def test_a_card_has_upstreams_words(tmp_path, hub):
    trainer = make(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    trainer.push_to_hub(tags="toy", license="mit", tasks="text-classification", dataset_tags="toys", dataset="Toys")
    card = huggingface_hub.ModelCard(hub.tree("me/run")["README.md"].decode())
    assert (card.data.license, card.data.datasets, card.data.tags) == (
        "mit",
        ["toys"],
        ["toy", "generated_from_trainer"],
    )
    assert card.data.model_name == "run" and card.data.eval_results == []
    for line in ("- learning_rate: 5e-05", "### Training results", "### Framework versions", "- train_batch_size: 4"):
        assert f"\n{line}\n" in str(card)


def test_a_model_without_a_configuration_has_a_card(make_args, tmp_path):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8), eval_dataset=toy.rows(6))
    trainer.create_model_card(language="en", tags="toy")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "# out\n\nThis model was trained from scratch on an unknown dataset." in text
    assert "tags:\n- toy\n- generated_from_trainer\n" in text


def test_a_card_that_somebody_wrote_stays(make_args, tmp_path, caplog):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8))
    path = tmp_path / "out" / "README.md"
    path.write_text("---\ntags: [mine]\n---\n\nMy words.\n")
    trainer.create_model_card(tags=["toy"])
    trainer.create_model_card(tags=["toy"])
    assert "tags:\n- toy\n- mine\n" in path.read_text() and "My words." not in path.read_text()
    assert "My words." in path.with_name("_README.before.md").read_text()
    assert len(list(path.parent.glob("_README*"))) == 1 and "_README.before.md" in caplog.text


def test_saving_a_model_pushes_it(tmp_path, hub):
    trainer = make(tmp_path, save_strategy="no")
    trainer.train()
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert hub.messages() == ["Model save"]
    assert (tmp_path / "elsewhere" / "model.safetensors").read_bytes() == hub.tree("me/run")["model.safetensors"]


def assert_whole(tree, folder):
    """Compare every file of a pushed checkpoint with the checkpoint's manifest."""
    listed = json.loads(tree[f"{folder}/manifest.json"])["files"]
    assert "optimizer.pt" in listed
    for name, facts in listed.items():
        assert hashlib.sha256(tree[f"{folder}/{name}"]).hexdigest() == facts["sha256"], name


def test_a_failed_push_never_ends_a_training(tmp_path, hub, caplog):
    hub.fail = lambda number, method, path: 400 if "/commit/" in path else None
    trainer = make(tmp_path, max_steps=6, hub_strategy="checkpoint", hub_always_push=True)
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 6
        trainer.save_model()
    told = [record for record in caplog.records if record.levelno == logging.WARNING and "The push" in record.msg]
    assert len(told) == 1, "the same reason is told once"
    assert "These pushes have not arrived on the Hub: 'Training in progress, step 6'" in caplog.text
    assert "hf upload me/run" in caplog.text and "The model is saved, but not pushed." in caplog.text
    with pytest.raises(
        HubError, match=r"The push 'End of training' to me/run has failed: (?s:.*)Hint: .*push_to_hub"
    ) as e:
        trainer.push_to_hub()
    assert isinstance(e.value, huggingface_hub.errors.HfHubHTTPError) and e.value.response.status_code == 400
    assert TOKEN not in str(e.value) and TOKEN not in caplog.text
    hub.fail = None
    trainer.push_to_hub()
    assert hub.messages() == ["End of training"]


@pytest.mark.parametrize(
    ("status", "way_out"),
    [*((status, "`hub_token`") for status in (401, 403, 404)), (400, "check `hub_model_id` and the connection")],
)
def test_a_repository_that_cannot_be_made_is_told_at_once_with_the_way_out(tmp_path, hub, status, way_out):
    hub.fail = lambda number, method, path: status
    with pytest.raises(HubError, match=rf"no repository 'run' to push to(?s:.*)Hint: .*{way_out}") as caught:
        make(tmp_path)
    assert isinstance(caught.value, huggingface_hub.errors.HfHubHTTPError) and TOKEN not in str(caught.value)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
        make(tmp_path, transformers.Trainer, transformers)


def test_offline_is_said_at_once(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="unset HF_HUB_OFFLINE"):
        make(tmp_path)
    assert hub.requests == []


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(
        MissingPackage,
        match=r"Pushing to the Hub needs the package huggingface_hub(?s:.*)pip install 'huggingface_hub>=",
    ):
        make(tmp_path)


def waiting_hub(hub):
    """Make commits wait until the event is set."""
    released = threading.Event()
    hub.fail = lambda number, method, path: released.wait(30) and None if "/commit/" in path else None
    return released


@pytest.mark.parametrize("always", [False, True])
def test_a_push_that_is_under_way_keeps_the_next_one_away(tmp_path, hub, always):
    class Counts(hf_compat.TrainerCallback):
        begun = 0

        def on_push_begin(self, args, state, control, **kwargs):
            assert (args, state.global_step, control) == (trainer.args, 2 + 2 * self.begun, trainer.control)
            self.begun += 1

        def on_train_end(self, args, state, control, **kwargs):
            released.set()

    released, counts = waiting_hub(hub), Counts()
    trainer = make(tmp_path, max_steps=6, hub_always_push=always, callbacks=[counts])
    trainer.train()
    steps = [2, 4, 6] if always else [2]
    assert hub.messages() == [f"Training in progress, step {step}" for step in steps]
    assert counts.begun == len(steps)


def test_callbacks_are_told_of_a_push_that_a_script_asks_for(tmp_path, hub):
    class Hears(hf_compat.TrainerCallback):
        def on_push_begin(self, *told, **kwargs):
            self.told = told

    hears = Hears()
    trainer = make(tmp_path, max_steps=1, callbacks=[hears])
    trainer.push_to_hub()
    assert hears.told == (trainer.args, trainer.state, trainer.control)


@pytest.mark.parametrize("values", [{}, {"async_save": True}, {"load_best_model_at_end": True}], ids=str)
def test_what_rotation_removes_arrives_whole(tmp_path, hub, values):
    class Releases(hf_compat.TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            assert [path.name for path in Path(args.output_dir).glob("checkpoint-*")] == ["checkpoint-6"]
            released.set()

    released = waiting_hub(hub)
    values = {"save_total_limit": 1, "hub_strategy": "all_checkpoints", "hub_always_push": True, **values}
    if "load_best_model_at_end" in values:
        values |= {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "metric_for_best_model": "step"}
        values |= {"greater_is_better": True}
    trainer = make(tmp_path, max_steps=6, callbacks=[Releases()], **values)
    if "load_best_model_at_end" in values:
        trainer.compute_metrics = lambda prediction: {"step": trainer.state.global_step}
    trainer.train()
    assert len(hub.commits) == 6
    for step in (2, 4, 6):
        assert_whole(hub.tree("me/run"), f"checkpoint-{step}")
        assert f"Training in progress, step {step}, checkpoint" in hub.messages()
    assert list(Path(trainer.args.output_dir).glob("_hub_push*")) == []


def test_a_commit_names_the_epoch_of_the_checkpoint_that_was_written_in_the_background(tmp_path, hub):
    values = {"save_strategy": "epoch", "async_save": True, "hub_strategy": "every_save", "hub_always_push": True}
    make(tmp_path, max_steps=-1, num_train_epochs=3, **values).train()
    assert hub.messages() == [f"Training in progress, epoch {epoch}" for epoch in (1, 2, 3)]


def test_overrides_are_called_when_upstream_calls_them(tmp_path, monkeypatch):
    names = ("init_hf_repo", "create_model_card", "push_to_hub", "_push_from_checkpoint", "_finish_current_push")

    def calls_of(api):
        calls = []

        def override(name):
            def method(self, *args, **kwargs):
                calls.append((name, sorted(kwargs)))
                return getattr(api.Trainer, name)(self, *args, **kwargs)

            return method

        kind = type("Own", (api.Trainer,), {name: override(name) for name in names})
        with running_hub() as hub, talked_to(monkeypatch, hub):
            trainer = make(tmp_path / api.__name__, kind, api)
            trainer.train()
            trainer.save_model()
            trainer.push_to_hub(tags=["x"])
        return calls

    assert calls_of(hf_compat) == calls_of(transformers)


def test_a_checkpoint_of_the_hub_resumes(tmp_path, hub):
    whole = make(tmp_path / "whole", hub_strategy="checkpoint", save_steps=4)
    whole.train()
    folder = tmp_path / "fetched"
    for path, data in hub.tree("me/run").items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    longer = make(tmp_path / "longer", push_to_hub=False, max_steps=6, save_steps=4, lr_scheduler_type="constant")
    longer.train(resume_from_checkpoint=str(folder / "last-checkpoint"))
    assert longer.state.global_step == 6 and longer._run.updates_before == 4


def test_a_second_training_pushes_again(tmp_path, hub):
    trainer = make(tmp_path, max_steps=2)
    trainer.train()
    trainer.train()
    assert hub.messages()[0] == "Training in progress, step 2" and len(hub.commits) <= 2
    assert trainer.push_in_progress.is_done()


@pytest.mark.parametrize("cls", [PushInProgress, transformers.utils.PushInProgress])
def test_of_cancelled_pushes_those_under_way_are_left(cls):
    waiting, under_way, done = jobs = [Future() for _ in range(3)]
    under_way.set_running_or_notify_cancel()
    done.set_result(None)
    pushes = cls(jobs)
    pushes.cancel()
    assert pushes.jobs == [under_way] and waiting.cancelled() and not pushes.is_done()


def test_a_push_that_nobody_waits_for(tmp_path, hub):
    trainer = make(tmp_path, push_to_hub=False, hub_model_id="them/it", hub_private_repo=True)
    future = trainer.push_to_hub("Mine", blocking=False, revision="other")
    assert future.result(30).commit_message == "Mine" and hub.commits[0].revision == "other"
    assert (trainer.hub_model_id, hub.repos["them/it"]["visibility"]) == ("them/it", "private")


@pytest.mark.parametrize("text", ["---\ntags: [mine\n---\n", "---\n- a\n- list\n---\n"])
def test_tags_of_a_card_that_cannot_be_read_are_told_of(tmp_path, caplog, text):
    path = tmp_path / "README.md"
    path.write_text(text)
    assert model_card.read_tags(str(path)) == ([], None)
    assert f"The tags of {path} cannot be read, and are not in the new card: " in caplog.text
    assert model_card.read_tags(str(tmp_path / "none.md")) == ([], None)
    assert len(caplog.records) == 1


def test_a_card_where_transformers_is_not_installed(make_args, tmp_path, monkeypatch):
    monkeypatch.setattr(model_card, "is_installed", lambda module: False)
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8))
    trainer.create_model_card(language="en", tags="toy", tasks=["text-classification"], dataset_args="part: all")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlanguage: en\ntags: ['toy', 'generated_from_trainer']\npipeline_tag: text-class")
    assert card.endswith("\n\n# out\n")
    trainer.create_model_card()
    assert list((tmp_path / "out").glob("_README*")) == [], "its own card is written anew"


def test_the_setter_and_the_old_names_say_where_to_push(make_args, hub):
    args = make_args(max_steps=2, save_strategy="steps", save_steps=2)
    args = args.set_push_to_hub("them/new", strategy="every_save", token=TOKEN, always_push=True, revision="dev")
    Trainer(toy.Classifier(), args, train_dataset=toy.rows(8)).train()
    old = make_args(max_steps=2, push_to_hub=True, push_to_hub_model_id="old", push_to_hub_token=TOKEN)
    Trainer(toy.Classifier(), old, train_dataset=toy.rows(8)).push_to_hub("Mine")
    assert [(c.repo, c.revision) for c in hub.commits] == [("them/new", "dev"), ("me/old", "main")]
    assert set(hub.tokens) - {None} == {f"Bearer {TOKEN}"}
