"""What an engine leaves on a target is there for it alone."""

from __future__ import annotations

import mlx.core as mx
import pytest

from engine.guests.belongings import Belongings
from tests.engine import tiny
from tests.engine.guests.small import Hook


def looks(model):
    body = model.model
    kinds = {type(part) for part in model.modules()}
    return [
        [dict(each) for each in (model, body)],
        [dict(vars(each)) for each in (model, body)],
        list(body.layers),
        {kind: dict(vars(kind)) for kind in kinds},
        mx.default_stream(mx.default_device()),
    ]


def same(left, right):
    return all(
        str(one) == str(other) if index in {0, 1} else one == other
        for index, (one, other) in enumerate(zip(left, right, strict=True))
    )


def disturb(model):
    layers, kind = model.model.layers, type(model.model.layers[0].self_attn)
    model._rows = [1]
    model.flag = "set"
    model.model.norm_again = model.model.norm
    layers[0] = Hook(layers[0], model._rows)
    kind.__call__ = lambda *_: None
    kind.mark = True
    mx.set_default_stream(mx.new_stream(mx.default_device()))


def test_it_comes_and_goes():
    model = tiny.build()
    before = looks(model)
    belongings = Belongings(model)
    with belongings.installed():
        disturb(model)
        inside = looks(model)
    assert same(looks(model), before)
    assert not same(inside, before)
    with belongings.installed():
        assert same(looks(model), inside)
        model._rows.append(2)
    assert same(looks(model), before)
    with belongings.installed():
        assert model._rows == [1, 2]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_it_goes_when_the_engine_breaks_down(error):
    model = tiny.build()
    before = looks(model)

    def break_down():
        with Belongings(model).installed():
            disturb(model)
            raise error

    with pytest.raises(error):
        break_down()
    assert same(looks(model), before)


def test_two_engines_see_their_own():
    model = tiny.build()
    first, second = Belongings(model), Belongings(model)
    before = looks(model)
    with first.installed():
        model.flag = 1
    with second.installed():
        assert "flag" not in vars(model)
        model.flag = 2
    with first.installed():
        assert model.flag == 1
    with second.installed():
        assert model.flag == 2
        del model.flag
    assert same(looks(model), before)


def test_what_an_engine_takes_away_comes_back():
    model = tiny.build()
    norm = model.model.norm
    belongings = Belongings(model)
    with belongings.installed():
        del model.model["norm"]
    assert model.model.norm is norm
