"""The modules and parameters of a model, walked once and not again at every update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import attrgetter, is_

from torch import nn

_tables_of = attrgetter("_parameters", "_modules")
_mode_of = attrgetter("training")
# The functions behind the methods of `nn.Module` that are replaced here, and behind those that these call.
_train_of = attrgetter("train.__func__")
_zero_grad_of = attrgetter("zero_grad.__func__")
_walk_of = attrgetter(
    "parameters.__func__", "named_parameters.__func__", "_named_members.__func__", "named_modules.__func__"
)


class ModuleTree:
    """Does what `model.parameters()`, `model.train()` and `model.zero_grad()` do, without a walk.

    A walk makes about twelve calls for each parameter. The tree keeps what a walk has found. Before each use it
    compares what every module holds with what it held then, in loops of the interpreter. So a callback may freeze,
    replace, add or remove parameters and modules at any time. A model with its own version of a method runs that.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._held: list[object] = []  # by all modules
        self._is_plain = False  # no method of torch's is replaced

    def __reduce__(self) -> tuple[type[ModuleTree], tuple[()]]:
        return ModuleTree, ()

    def parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """List a model's parameters."""
        is_known = self._follow(model) and self._parameters and _is_torchs(model, _walk_of)
        return self._parameters if is_known else model.parameters()  # torch warns of an empty generator

    def train(self, model: nn.Module) -> None:
        """Switch all modules to training mode."""
        if self._follow(model) and all(map(_mode_of, self._modules)):
            try:
                if all(map(is_, map(_train_of, self._modules), repeat(nn.Module.train))):
                    return
            except AttributeError:  # an object has another callable in place of the method
                pass
        model.train()

    def zero_grad(self, model: nn.Module) -> None:
        """Forget all gradients."""
        if not _is_torchs(model, _zero_grad_of):
            model.zero_grad()
            return
        for parameter in self.parameters(model):
            if parameter.grad is not None:
                parameter.grad = None

    def _follow(self, model: nn.Module) -> bool:
        """Walk a model unless it is as it was. Whether it is, and its parameters are those that its modules hold."""
        if self._model is model:
            if not self._is_plain:
                return False
            held = self._look()
            if len(held) == len(self._held) and all(map(is_, held, self._held)):
                return True
        self._model, self._modules, self._parameters = model, list(model.modules()), list(model.parameters())
        self._is_plain = all(
            _is_torchs(module, _walk_of) and all(isinstance(table, dict) for table in _tables_of(module))
            for module in self._modules
        )
        self._held = self._look() if self._is_plain else []
        return False

    def _look(self) -> list[object]:
        tables = chain.from_iterable(map(_tables_of, self._modules))
        return list(chain.from_iterable(map(dict.values, tables)))


def _is_torchs(module: nn.Module, functions_of: Callable[[nn.Module], object]) -> bool:
    """Whether a module's methods are those of `nn.Module`, which no class and no object has replaced."""
    try:
        return bool(functions_of(module) == functions_of(_PLAIN))
    except AttributeError:  # as above
        return False


_PLAIN = nn.Module()
