"""A sample of `mutations.py`: no damage hangs, ends in a foreign error, stops an automatic resume or is kept silent."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from helpers import damage
from hf_compat.checkpoint.validation import check_optimizer, check_schedule, random_states_problem, refuse
from hf_compat.errors import CheckpointError
from hf_compat.runtime.seeding import read_rng
from sweeps.faults import mutations

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:hf_compat.errors.HfCompatWarning"),
]


def test_a_sample_of_all_forms():
    table, is_well = mutations.run(every=60, seed=1)
    assert is_well, "\n".join("  ".join(row) for row in table)
    assert len(table) == len(mutations.FORMS) + 2


def test_a_damage_changes_its_file(tmp_path):
    path = tmp_path / "it.pt"
    content = {"a": torch.zeros(3), "b": [1, {"c": "x"}]}
    for one in damage.of_values("it.pt", content, damage.write_torch, 40, random.Random(0)):
        damage.write_torch(content, path)
        before = path.read_bytes()
        one.apply(path)
        assert path.read_bytes() != before, one.what
    assert content == {"a": content["a"], "b": [1, {"c": "x"}]}


def stepped(kind, **options):
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def is_accepted(state, optimizer=None) -> bool:
    try:
        check_optimizer("it", state, optimizer)
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize(
    "kind", ["AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "SGD", "ASGD", "Rprop"]
)
def test_what_optimizers_of_torch_write_is_right(kind):
    for options in ({}, {"amsgrad": True} if kind.startswith("Adam") and kind != "Adamax" else {}):
        optimizer = stepped(getattr(torch.optim, kind), **options)
        assert is_accepted(optimizer.state_dict()) and is_accepted(optimizer.state_dict(), optimizer)


def test_what_other_optimizers_write_is_right():
    moments = {"step": 1, "exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(())}  # as NovoGrad's
    group = {"lr": None, "relative_step": True, "eps": (1e-30, 1e-3), "params": [0, 1]}  # as Adafactor's
    assert is_accepted({"state": {0: moments, 1: moments}, "param_groups": [group]})
    assert is_accepted({"state": {"w": {}}, "param_groups": [{"lr": torch.tensor(0.1), "params": ["w"]}]})


@pytest.mark.parametrize(
    ("place", "new", "message"),
    [
        (("param_groups", 0, "lr"), "x", "`param_groups[0].lr` is 'x'"),
        (("param_groups", 0, "lr"), float("nan"), "`param_groups[0].lr` is nan"),
        (("param_groups", 0, "betas"), 5, "`param_groups[0].betas` is 5"),
        (("param_groups", 0, "amsgrad"), "x", "`param_groups[0].amsgrad` is 'x'"),
        (("param_groups", 0, "amsgrad"), None, "`param_groups[0].amsgrad` is None"),
        (("param_groups", 0, "params"), [0], "`state` has the parameter 1"),
        (("param_groups",), {}, "`param_groups` is {}"),
        (("state", 0), None, "`state` is {0: None, 1: "),
        (("state", 0, "step"), "x", "`state[0].step` is 'x'"),
        (("state", 0, "exp_avg"), torch.zeros(5), "`exp_avg` of a parameter has the shape [5], its parameter [2, 3]"),
        (("state", 0, "exp_avg"), None, "`state[0].exp_avg` is None, not a tensor"),
        (("state", 0, "exp_avg"), torch.zeros(2, 3, dtype=torch.int32), "not a tensor of floating-point numbers"),
        (("state", 0, "exp_avg_sq"), damage.REMOVED, "the state of a parameter lacks `exp_avg_sq`"),
        (("param_groups", 0, "lr"), damage.REMOVED, "`lr` of a group is missing"),
        (("param_groups", 0, "eps"), damage.REMOVED, "`eps` of a group is missing"),
    ],
)
def test_an_optimizers_state_of_a_wrong_form_is_named(place, new, message):
    optimizer = stepped(torch.optim.AdamW)
    with pytest.raises(CheckpointError) as caught:
        check_optimizer("it", damage.changed(optimizer.state_dict(), place, new), optimizer)
    assert message in str(caught.value)


def kept(path: tuple[str, ...], new: object, file: str):
    """Return a damage of one value in a file of torch."""

    def apply(place):
        damage.write_torch(damage.changed(torch.load(place, weights_only=False), path, new), place)

    return damage.Damage(file, f"{path} is {new!r}", apply, is_value=True)


DAMAGES = {
    "a sum of the loss log is gone": ("sealed again", kept(("losses", "first_update"), damage.REMOVED, "run_state.pt")),
    "the loss log holds something else": ("sealed again", kept(("losses",), {"x": 1}, "run_state.pt")),
    "a rate that no float holds": ("sealed again", kept(("_last_lr", 0), 10**400, "scheduler.pt")),
    "a schedule without its updates": ("sealed again", kept(("last_epoch",), damage.REMOVED, "scheduler.pt")),
    "a schedule of a .ckpt": (".ckpt of Lightning", kept(("lr_schedulers", 0), {"x": 1}, "it.ckpt")),
    "a schedule of a .ckpt without its functions": (
        ".ckpt of Lightning",
        kept(("lr_schedulers", 0, "lr_lambdas"), damage.REMOVED, "it.ckpt"),
    ),
}


@pytest.fixture(scope="module")
def good_of(tmp_path_factory):
    """Prepare each form once."""
    return functools.cache(
        lambda name: mutations.prepare(mutations.FORMS[name], tmp_path_factory.mktemp("forms") / name.replace(" ", "_"))
    )


@pytest.mark.parametrize(("form", "one"), DAMAGES.values(), ids=DAMAGES)
def test_a_part_that_is_missing_is_found_before_it_is_used(tmp_path, good_of, form, one):
    good = good_of(form)
    ends = {use: end for use, (end, _) in mutations.try_one(mutations.FORMS[form], good, one, tmp_path / "try").items()}
    assert ends.pop("by True", "right") == "right"
    by_name = ends.pop("by name", None) or ends.pop("fit")
    assert by_name == "refused" and not set(ends.values()) & set(mutations.BAD)


def test_whole_weights_of_another_model_are_refused_by_name(tmp_path, good_of):
    form, good = mutations.FORMS["transformers"], good_of("transformers")
    shapes = [one for one in form.damages(good.folder, random.Random(0)) if "norm.weight is a tensor of" in one.what]
    ends = mutations.try_one(form, good, shapes[0], tmp_path / "try")
    assert ends["by True"][0] == "misfit" and ends["by name"][0] == "refused"
    assert "norm.weight" in ends["by True"][1] and "checkpoint-4" in ends["by True"][1]


def test_schedules_and_random_states():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    state = schedule.state_dict()
    check_schedule("it", state, schedule)
    wrong = (("last_epoch", "x"), ("base_lrs", [None]), ("lr_lambdas", 5), ("_step_count", None), ("_last_lr", []))
    for field, new in wrong:
        with pytest.raises(CheckpointError, match=field):
            check_schedule("it", {**state, field: new}, schedule)
    for field in ("last_epoch", "lr_lambdas"):
        with pytest.raises(CheckpointError, match=f"`{field}` is missing"):
            check_schedule("it", {name: value for name, value in state.items() if name != field}, schedule)
    states = read_rng()
    refuse("it", random_states_problem(states))
    for generator in ("python", "numpy", "cpu"):
        for new in (None, [], [1], "x", torch.zeros(3)):
            with pytest.raises(CheckpointError, match="random states"):
                refuse("it", random_states_problem({**states, generator: new}))
    assert torch.equal(read_rng()["cpu"], states["cpu"])
