"""A class that somebody changes in place is as before afterwards, and who was made of the change keeps it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from penstock.engines.models.shared_class import kept_as_it_is


class Added:
    """A base that vLLM adds."""

    compiled = True


class Model(nn.Module):
    """A class of a library."""

    def forward(self, value: int) -> int:
        return value


def _changed() -> Any:
    """A model of the class that was changed as vLLM changes it: a base more, calls past the module's own."""
    kind: Any = Model
    kind.__bases__ = (*kind.__bases__, Added)
    kind.__call__ = lambda self, value: 10 * self.forward(value)
    kind.ignored = False
    return kind()


def test_the_trainers_models_are_called_as_before_and_vllms_as_it_wants() -> None:
    """Also those inside another module, and those made later. Control: within the context all were changed."""
    before, bases = Model(), Model.__bases__
    with kept_as_it_is(Model) as serve:
        theirs = nn.Sequential(_changed())
        assert before(1) == 10
        serve(theirs)
    assert (before(1), Model()(1)) == (1, 1)
    assert Model.__bases__ == bases and not hasattr(Model, "ignored") and "__call__" not in vars(Model)
    served: Any = theirs[0]
    assert (served(1), served.compiled, served.ignored) == (10, True, False)
    assert isinstance(served, Model) and type(served).__name__ == "Model" and type(served) is not Model


def test_it_is_as_before_where_vllm_does_not_start() -> None:
    with pytest.raises(ValueError, match="no such model"), kept_as_it_is(Model):
        _changed()
        raise ValueError("no such model")
    assert Model()(1) == 1


def test_a_class_that_nobody_changes_is_nobodys() -> None:
    model = Model()
    with kept_as_it_is(Model) as serve:
        serve(model)
    assert type(model) is Model
